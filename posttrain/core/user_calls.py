"""Calls of users' functions with a deadline."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

from posttrain.core.errors import RunError
from posttrain.core.plugins import user_code


class LateError(RunError):
    """A user's code did not end in time."""


async def within(deadline_s: float, what: str, function: Callable[..., Any], *args: Any) -> Any:
    """Return what a user's function, plain or ``async``, gives for ``args``. It may do anything: what does not even end
    when it is cancelled is left behind.

    Args:
        what: whose code runs, and what it does: the beginning of the message.

    Raises:
        LateError: it did not end within ``deadline_s`` seconds.
        PosttrainError: as ``CodeError`` for whatever the function raises that is no error of ours.
    """

    async def call() -> Any:
        with user_code(what, function):
            result = function(*args)
            return await result if inspect.isawaitable(result) else result

    task = asyncio.create_task(call())
    task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # of one left behind nobody asks
    try:
        await asyncio.wait([task], timeout=deadline_s)
        if task.done():
            return task.result()
        raise LateError(f"{what}: it did not answer within {deadline_s:g} s")
    finally:
        task.cancel()
