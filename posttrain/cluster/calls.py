"""Calls to actors, with a deadline on every one and an answer to "who did not answer, and why"."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import Any

import ray

from posttrain.cluster.actors import Look, Peer
from posttrain.core.errors import DeadlineError, PosttrainError, RunError, WorkerError, explained

_DEATH_NOTICE_S = 2.0
"""How much later than a peer's error the news of a dead worker may come."""
_LOOKED_AT = 16
"""How many of those that are late are looked at."""
_SHOWN = 4
"""How many different findings an error shows."""


async def meet(peers: Sequence[Peer], deadline_s: float) -> None:
    """Wait until these actors are up, and learn where they run. From now on none of them may be silent.

    Raises:
        as ``gather``
    """
    found = await gather([peer.actor.pulse.remote() for peer in peers], peers, "start", deadline_s)
    for peer, process in zip(peers, found, strict=True):
        peer.process = process


async def gather(refs: Sequence[Any], peers: Sequence[Peer], what: str, deadline_s: float) -> list[Any]:
    """Results of one call to each of several actors, in order. An error shows what was found out about who is named:
    how it died, the end of its log, where it hangs.

    Raises:
        DeadlineError: some did not answer in time, or one has given no pulse for its ``silence_s``; the message names
            them.
        WorkerError: one died or raised; the message names it and shows the end of its traceback.
        PosttrainError: one raised an error with a message of ours, which is passed on.
    """
    futures = [asyncio.wrap_future(ref.future()) for ref in refs]
    answers = asyncio.ensure_future(_answers(futures, deadline_s))
    watches = {asyncio.ensure_future(peer.silence()): peer for peer in peers if peer.process is not None}
    try:
        await asyncio.wait([answers, *watches], return_when=asyncio.FIRST_COMPLETED)
        silent = next((watch for watch in watches if watch.done()), None)
        if silent is not None and not answers.done():
            raise _silent(watches[silent], silent.result(), what)
        done = await answers
    finally:
        # Nobody asks them again, be it after a deadline, a peer's failure or Ctrl-C; asyncio would complain of that.
        for task in (answers, *watches, *futures):
            task.cancel()
    failures = [(p, f.exception()) for p, f in zip(peers, futures, strict=True) if f in done and f.exception()]
    if failures:
        peer, error = min(failures, key=lambda failure: _precedence(failure[1]))
        failure = await _failure(peer, error, what)
        failure.who = failure.who or peer.name
        raise failure from error  # whose text has the traceback of the process
    late = [p for p, f in zip(peers, futures, strict=True) if f not in done]
    if late:
        raise await _late(late, what, deadline_s)
    return [f.result() for f in futures]


async def _answers(futures: Sequence[asyncio.Future[Any]], deadline_s: float) -> set[asyncio.Future[Any]]:
    """The calls that have ended when all have, one has failed, or the deadline has come."""
    done, pending = await asyncio.wait(futures, timeout=deadline_s, return_when=asyncio.FIRST_EXCEPTION)
    # One failure usually makes its peers fail in a collective, and a peer's error may come before the news of a death.
    if pending and any(f.exception() for f in done):
        more, _ = await asyncio.wait(pending, timeout=_DEATH_NOTICE_S, return_when=asyncio.FIRST_EXCEPTION)
        done |= more
    return done


def _precedence(error: BaseException | None) -> int:
    """Which of several failures to report: one that has a message of ours, else a death, else the first."""
    if isinstance(error, ray.exceptions.RayTaskError) and isinstance(error.cause, PosttrainError):
        return 0
    return 1 if isinstance(error, ray.exceptions.RayActorError) else 2


async def _failure(peer: Peer, error: BaseException | None, what: str) -> PosttrainError:
    """What to raise for a call that ended with ``error``."""
    if isinstance(error, ray.exceptions.RayTaskError) and isinstance(error.cause, PosttrainError):
        return error.cause
    found = await peer.look(ask=False)
    if isinstance(error, ray.exceptions.RayActorError):
        memory = found is not None and found.oom_kills > 0
        message = f"{peer.name} died during {what}: {cause_of_death(error)}"
        if memory:
            message += "; the kernel of its machine has ended processes for lack of memory meanwhile"
        hint = "give it more memory, or less to do at once" if memory else "was it killed, or out of memory?"
        return WorkerError(_paragraphs(message, _log(peer, found)), hint=hint)
    cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) else error
    if cause is not None and isinstance(told := explained(cause), RunError):  # a full disk is no fault of the worker
        return RunError(f"{peer.name} failed in {what}: {told.message}", hint=told.hint)
    trace = _last_lines(str(error)) if isinstance(error, ray.exceptions.RayTaskError) else ""
    message = f"{peer.name} failed in {what}: {type(cause).__name__}: {cause}"
    return WorkerError(_paragraphs(message, trace, _log(peer, found)))


def cause_of_death(error: ray.exceptions.RayActorError) -> str:
    """How an actor died, as far as Ray knows."""
    text = str(error)
    if getattr(error, "actor_init_failed", False):
        return f"it could not start\n{_last_lines(text)}"
    if "connection error code" in text:  # Ray's words for a process that is gone, with all that may have been
        return "its process was killed or crashed"
    reason = re.search(r"The actor (?:is dead|died) because (.*)", text, re.DOTALL)
    told = " ".join((reason[1] if reason else text).split())
    return told if len(told) <= 400 else told[:400] + " ..."


def _silent(peer: Peer, found: Look | None, what: str) -> DeadlineError:
    peer.missed = True
    return DeadlineError(
        _paragraphs(
            f"{peer.name} has said nothing for {peer.silence_s:g} s (cluster.silence_deadline_s) during {what}",
            _finding([peer], found),
            _log(peer, found),
        ),
        hint="what holds it: a signal, a debugger, a machine without memory or network?",
        who=peer.name,
    )


async def _late(peers: Sequence[Peer], what: str, deadline_s: float) -> DeadlineError:
    looked_at = peers[:_LOOKED_AT]
    found = await asyncio.gather(*(peer.look() for peer in looked_at))
    alike: dict[tuple[Any, ...], list[tuple[Peer, Look | None]]] = {}
    for peer, look in zip(looked_at, found, strict=True):
        peer.missed = True
        alike.setdefault((look.ended, look.stopped, look.stack) if look else (), []).append((peer, look))
    parts = []
    for group in list(alike.values())[:_SHOWN]:
        (first, look), names = group[0], [peer for peer, _ in group]
        parts += [_finding(names, look), _log(first, look)]
    late = ", ".join(peer.name for peer in peers)
    return DeadlineError(
        _paragraphs(f"{late} did not finish {what} within {deadline_s:g} s", *parts),
        hint="raise the deadline in [cluster] if the work is really that long",
        who=late,
    )


def _finding(peers: Sequence[Peer], found: Look | None) -> str:
    """A sentence about processes that do not answer, in the same state; empty if there is nothing to say."""
    process = peers[0].process
    if process is None:
        return "" if peers[0].actor is None else f"{', '.join(peer.name for peer in peers)}: no process came up"
    who = ", ".join(f"{peer.name} (process {peer.process.pid})" for peer in peers if peer.process)
    if found is None:
        return f"{who}: node {process.node} does not answer"
    if found.ended:
        return f"{who}: ended"
    if found.stopped:
        return f"{who}: stopped, by SIGSTOP or a debugger"
    state = "at work" if found.works else "waiting"
    if not found.stack:
        return f"{who}: {state}, and does not show where"
    return f"{who}: {state} here, innermost call first:\n{_indented(found.stack)}"


def _log(peer: Peer, found: Look | None) -> str:
    if peer.process is None or peer.process.log is None:
        return ""
    if found is None:
        return f"its log: {peer.process.log} on node {peer.process.node}"
    return f"the end of its log, {peer.process.log}:\n{_indented(found.log)}" if found.log else ""


def _indented(lines: Sequence[str]) -> str:
    return "\n".join(f"  {line}" for line in lines)


def _paragraphs(*parts: str) -> str:
    return "\n".join(part for part in parts if part)


def _last_lines(text: str, count: int = 12) -> str:
    return "\n".join(text.rstrip().splitlines()[-count:])
