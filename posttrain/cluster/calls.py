"""Calls to actors, with a deadline on every one and an answer to "who did not answer"."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import ray

from posttrain.errors import DeadlineError, PosttrainError, WorkerError

_DEATH_NOTICE_S = 2.0
"""How much later than a peer's error the news of a dead worker may come."""


async def gather(refs: Sequence[Any], names: Sequence[str], what: str, deadline_s: float) -> list[Any]:
    """Results of one call to each of several actors, in order.

    Raises:
        DeadlineError: some did not answer in time; the message names them.
        WorkerError: one died or raised; the message names it and shows the end of its traceback.
        PosttrainError: one raised an error with a message of ours, which is passed on.
    """
    futures = [asyncio.wrap_future(ref.future()) for ref in refs]
    try:
        done, pending = await asyncio.wait(futures, timeout=deadline_s, return_when=asyncio.FIRST_EXCEPTION)
        # One failure usually makes its peers fail in a collective, and a peer's error may come before the news of a
        # death.
        if pending and any(f.exception() for f in done):
            more, pending = await asyncio.wait(pending, timeout=_DEATH_NOTICE_S, return_when=asyncio.FIRST_EXCEPTION)
            done |= more
    finally:
        # Nobody asks them again, be it after a deadline, a peer's failure or Ctrl-C; asyncio would complain of that.
        for future in futures:
            future.cancel()
    failures = [(n, f.exception()) for n, f in zip(names, futures, strict=True) if f in done and f.exception()]
    if failures:
        name, error = min(failures, key=lambda failure: _precedence(failure[1]))
        raise _translate(name, error, what)
    if pending:
        late = [n for n, f in zip(names, futures, strict=True) if f in pending]
        raise DeadlineError(
            f"{', '.join(late)} did not finish {what} within {deadline_s:g} s",
            hint="raise cluster.step_deadline_s if the work is really that long; else look at the worker's log",
        )
    return [f.result() for f in futures]


def _precedence(error: BaseException | None) -> int:
    """Which of several failures to report: one that has a message of ours, else a death, else the first."""
    if isinstance(error, ray.exceptions.RayTaskError) and isinstance(error.cause, PosttrainError):
        return 0
    return 1 if isinstance(error, ray.exceptions.RayActorError) else 2


def _translate(name: str, error: BaseException | None, what: str) -> PosttrainError:
    if isinstance(error, ray.exceptions.RayTaskError):
        cause = error.cause
        if isinstance(cause, PosttrainError):
            return cause
        return WorkerError(f"{name} failed in {what}: {type(cause).__name__}: {cause}\n{_last_lines(str(error))}")
    if isinstance(error, ray.exceptions.RayActorError):
        return WorkerError(f"{name} died during {what}", hint="was it killed, or out of memory? see its log")
    return WorkerError(f"{name} failed in {what}: {type(error).__name__}: {error}")


def _last_lines(text: str, count: int = 12) -> str:
    return "\n".join(text.rstrip().splitlines()[-count:])
