"""Calls of users' functions: with a deadline, in a thread of their own."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import threading
from collections.abc import Callable
from typing import Any

from posttrain.core.errors import CodeError, RunError
from posttrain.core.plugins import described, user_code


class LateError(RunError):
    """A user's code did not end in time."""


async def value_of(result: Any) -> Any:
    """Return what a function, plain or ``async``, has given."""
    return await result if inspect.isawaitable(result) else result


async def within(
    deadline_s: float,
    what: str,
    function: Callable[..., Any],
    *args: Any,
    keep: Callable[[Any], None] | None = None,
) -> Any:
    """Return what a user's function, plain or ``async``, gives for ``args``. It may do anything: what does not even end
    when it is cancelled is left behind.

    Args:
        what: whose code runs, and what it does: the beginning of the message.
        keep: gets what the function gives as soon as it does, also where the caller is cancelled just then.

    Raises:
        LateError: it did not end within ``deadline_s`` seconds.
        PosttrainError: as ``CodeError`` for whatever the function raises that is no error of ours, a cancellation of
            its own included: it is no wish of the caller's.
    """

    async def call() -> Any:
        with user_code(what, function):
            result = await value_of(function(*args))
        if keep is not None:
            keep(result)
        return result

    task = asyncio.create_task(call())
    task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # of one left behind nobody asks
    try:
        await asyncio.wait([task], timeout=deadline_s)
        if not task.done():
            raise LateError(f"{what}: it did not answer within {deadline_s:g} s")
        try:
            return task.result()
        except asyncio.CancelledError as error:
            raise CodeError(
                f"{what}: it was cancelled from inside: {described(error, function)}",
                hint="catch the cancellation of what that code awaits; --debug shows the traceback",
            ) from error
    finally:
        task.cancel()


async def in_thread(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Return what a plain function gives that runs in a thread of its own. Those of ``asyncio.to_thread`` are few, and
    the end of the run waits for them: a function that never returns would stop other work, and then the run."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()
    context = contextvars.copy_context()

    def settle(result: Any, error: Exception | None) -> None:
        if done.cancelled():
            return
        if error is None:
            done.set_result(result)
        else:
            done.set_exception(error)

    def work() -> None:
        result: Any = None
        failure: Exception | None = None
        try:
            result = context.run(function, *args, **kwargs)
        except (SystemExit, StopIteration) as error:  # neither may be thrown into a coroutine
            failure = RuntimeError(f"it raised {error!r}")
            failure.__cause__ = error
        except Exception as error:
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop is closed: the run is over
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=work, name=getattr(function, "__qualname__", None), daemon=True).start()
    return await done
