"""Calls of users' functions with a deadline."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

from posttrain.core.errors import CodeError, RunError
from posttrain.core.plugins import described, user_code


class LateError(RunError):
    """A user's code did not end in time."""


async def within(deadline_s: float, what: str, function: Callable[..., Any], *args: Any) -> Any:
    """Return what a user's function, plain or ``async``, gives for ``args``. It may do anything: what does not even end
    when it is cancelled is left behind.

    Args:
        what: whose code runs, and what it does: the beginning of the message.

    Raises:
        LateError: it did not end within ``deadline_s`` seconds.
        PosttrainError: as ``CodeError`` for whatever the function raises that is no error of ours, a cancellation of
            its own included: it is no wish of the caller's.
    """

    async def call() -> Any:
        with user_code(what, function):
            result = function(*args)
            return await result if inspect.isawaitable(result) else result

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
