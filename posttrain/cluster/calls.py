"""Calls to actors: every one has a deadline, and an error names the actor with its diagnosis."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import Any

import ray

from posttrain.cluster.actors import ActorHandle, Diagnosis
from posttrain.core.errors import DeadlineError, PosttrainError, RunError, WorkerError, explained

_DEATH_NOTICE_S = 2.0
"""How much later than another actor's error the news of a dead actor may come."""
_DIAGNOSED = 16
"""Most late actors that are diagnosed."""
_SHOWN = 4
"""Most different diagnoses that an error shows."""
_CRASHED = "its process was killed or crashed"


async def wait_until_up(actors: Sequence[ActorHandle], deadline_s: float) -> None:
    """Wait until actors are up, and learn where they run. From then on they are supervised by their heartbeats.

    Raises:
        as ``gather``
    """
    found = await gather([handle.actor.heartbeat.remote() for handle in actors], actors, "start", deadline_s)
    for handle, process in zip(actors, found, strict=True):
        handle.process = process


async def answer(ref: Any, actor: ActorHandle, what: str, deadline_s: float) -> Any:
    """Return the result of one call. Raises as ``gather``."""
    return (await gather([ref], [actor], what, deadline_s))[0]


async def gather(refs: Sequence[Any], actors: Sequence[ActorHandle], what: str, deadline_s: float) -> list[Any]:
    """Return the results of one call to each of several actors, in order. An error shows the diagnosis of the actors
    that it names: how they died, the end of their logs, where they hang.

    Args:
        what: the call, in messages.

    Raises:
        DeadlineError: some did not answer in time, or one has sent no heartbeat for its ``silence_s``; the message
            names them.
        WorkerError: one died or raised; the message names it and shows the end of its traceback.
        PosttrainError: one raised such an error, which is passed on.
    """
    futures = [asyncio.wrap_future(ref.future()) for ref in refs]
    answers = asyncio.ensure_future(_answers(futures, deadline_s))
    watches = {asyncio.ensure_future(actor.wait_for_silence()): actor for actor in actors if actor.process is not None}
    try:
        await asyncio.wait([answers, *watches], return_when=asyncio.FIRST_COMPLETED)
        silent = next((watch for watch in watches if watch.done()), None)
        if silent is not None and not answers.done():
            raise _silent(watches[silent], silent.result(), what)
        done = await answers
    finally:
        # Nobody awaits them after a deadline, another actor's failure or Ctrl-C; asyncio would warn of that.
        for task in (answers, *watches, *futures):
            task.cancel()
    asked = dict(zip(futures, actors, strict=True))
    if failures := [(asked[f], error) for f in done if (error := f.exception())]:
        actor, error = min(failures, key=lambda failure: _precedence(failure[1]))  # of the like, the first
        failure = await _failure(actor, error, what)
        failure.who = failure.who or actor.name
        raise failure from error  # whose text has the traceback of the process
    late = [a for a, f in zip(actors, futures, strict=True) if f not in done]
    if late:
        raise await _late(late, what, deadline_s)
    return [f.result() for f in futures]


async def _answers(futures: Sequence[asyncio.Future[Any]], deadline_s: float) -> list[asyncio.Future[Any]]:
    """Return the calls that have ended when all have, one has failed, or the deadline has passed; those that failed
    because another had come after it."""
    done, pending = await asyncio.wait(futures, timeout=deadline_s, return_when=asyncio.FIRST_EXCEPTION)
    # One failure usually makes the other ranks fail in a collective, and their error may come before the news of a
    # death.
    more: set[asyncio.Future[Any]] = set()
    if pending and any(f.exception() for f in done):
        more, _ = await asyncio.wait(pending, timeout=_DEATH_NOTICE_S, return_when=asyncio.FIRST_EXCEPTION)
    return [f for ended in (done, more) for f in futures if f in ended]


def _precedence(error: BaseException | None) -> int:
    """Return the rank of a failure among several, lowest first: a ``PosttrainError``, else a death, else any other."""
    if isinstance(error, ray.exceptions.RayTaskError) and isinstance(error.cause, PosttrainError):
        return 0
    return 1 if isinstance(error, ray.exceptions.RayActorError) else 2


async def _failure(actor: ActorHandle, error: BaseException | None, what: str) -> PosttrainError:
    """Return the error to raise for a call that ended with ``error``."""
    if isinstance(error, ray.exceptions.RayTaskError) and isinstance(error.cause, PosttrainError):
        return error.cause
    found = await actor.diagnose(stacks=False)
    if isinstance(error, ray.exceptions.RayActorError):
        return _death(actor, error, what, found)
    cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) else error
    if cause is not None and isinstance(told := explained(cause), RunError):  # a full disk is no fault of the worker
        return RunError(f"{actor.name} failed in {what}: {told.message}", hint=told.hint)
    traceback = _last_lines(str(error)) if isinstance(error, ray.exceptions.RayTaskError) else ""
    message = f"{actor.name} failed in {what}: {type(cause).__name__}: {cause}"
    return WorkerError(_paragraphs(message, traceback, _log(actor, found)))


def _death(actor: ActorHandle, error: ray.exceptions.RayActorError, what: str, found: Diagnosis | None) -> WorkerError:
    hint = "was it killed, or out of memory?"
    if found is not None and found.oom_kills:
        cause = f"{cause_of_death(error)}; the kernel of its machine has ended processes for lack of memory meanwhile"
        hint = "give it more memory, or less to do at once"
    elif found is not None and found.ended and isinstance(error, ray.exceptions.ActorUnavailableError):
        cause = _CRASHED
    elif found is None and actor.process is not None and _tells_of_node(error):
        cause = f"its node has died or cannot be reached ({actor.process.address})"
        hint = "is that machine up? The same command goes on from the last checkpoint, with fewer cluster.workers too"
    else:
        cause = cause_of_death(error)
    return WorkerError(_paragraphs(f"{actor.name} died during {what}: {cause}", _log(actor, found)), hint=hint)


def _tells_of_node(error: ray.exceptions.RayActorError) -> bool:
    """Return whether an actor may be lost with its node, of which Ray at first knows only that nobody answers."""
    return isinstance(error, ray.exceptions.ActorUnavailableError) or "its node has died" in str(error)


def cause_of_death(error: ray.exceptions.RayActorError) -> str:
    """Return how an actor died, as far as Ray knows."""
    text = str(error)
    if getattr(error, "actor_init_failed", False):
        return f"it could not start\n{_last_lines(text)}"
    if "connection error code" in text:  # what Ray says of a process that is gone
        return _CRASHED
    reason = re.search(r"The actor (?:is dead|died) because (.*)", text, re.DOTALL)
    told = " ".join((reason[1] if reason else text).split())
    return told if len(told) <= 400 else told[:400] + " ..."


def _silent(actor: ActorHandle, found: Diagnosis | None, what: str) -> DeadlineError:
    actor.unresponsive = True
    return DeadlineError(
        _paragraphs(
            f"{actor.name} has said nothing for {actor.silence_s:g} s (cluster.silence_deadline_s) during {what}",
            _finding([actor], found),
            _log(actor, found),
        ),
        hint="what holds it: a signal, a debugger, a machine without memory or network?",
        who=actor.name,
    )


async def _late(actors: Sequence[ActorHandle], what: str, deadline_s: float) -> DeadlineError:
    diagnosed = actors[:_DIAGNOSED]
    found = await asyncio.gather(*(actor.diagnose() for actor in diagnosed))
    alike: dict[tuple[Any, ...], list[tuple[ActorHandle, Diagnosis | None]]] = {}
    for actor, state in zip(diagnosed, found, strict=True):
        actor.unresponsive = True
        alike.setdefault((state.ended, state.stopped, state.stack) if state else (), []).append((actor, state))
    parts = []
    for group in list(alike.values())[:_SHOWN]:
        first, state = group[0]
        parts += [_finding([actor for actor, _ in group], state), _log(first, state)]
    late = ", ".join(actor.name for actor in actors)
    return DeadlineError(
        _paragraphs(f"{late} did not finish {what} within {deadline_s:g} s", *parts),
        hint="raise the deadline in [cluster] if the work is really that long",
        who=late,
    )


def _finding(actors: Sequence[ActorHandle], found: Diagnosis | None) -> str:
    """Return a sentence about processes that do not answer, all in the same state; empty if nothing is known."""
    process = actors[0].process
    if process is None:
        return "" if actors[0].actor is None else f"{', '.join(actor.name for actor in actors)}: no process came up"
    who = ", ".join(f"{actor.name} (process {actor.process.pid})" for actor in actors if actor.process)
    if found is None:
        return f"{who}: node {process.address} does not answer"
    if found.ended:
        return f"{who}: ended"
    if found.stopped:
        return f"{who}: stopped, by SIGSTOP or a debugger"
    state = "at work" if found.works else "waiting"
    if not found.stack:
        return f"{who}: {state}, and does not show where"
    return f"{who}: {state} here, innermost call first:\n{_indented(found.stack)}"


def _log(actor: ActorHandle, found: Diagnosis | None) -> str:
    if actor.process is None or actor.process.log is None:
        return ""
    if found is None:
        return f"its log: {actor.process.log} on node {actor.process.address}"
    return f"the end of its log, {actor.process.log}:\n{_indented(found.log)}" if found.log else ""


def _indented(lines: Sequence[str]) -> str:
    return "\n".join(f"  {line}" for line in lines)


def _paragraphs(*parts: str) -> str:
    return "\n".join(part for part in parts if part)


def _last_lines(text: str, count: int = 12) -> str:
    return "\n".join(text.rstrip().splitlines()[-count:])
