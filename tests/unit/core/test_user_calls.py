"""Calls of users' functions: a cancellation of their own is their failure, and one of the caller's ends them."""

import asyncio

import pytest

from posttrain.core.errors import CodeError
from posttrain.core.user_calls import within


async def awaits_what_was_cancelled():
    shared = asyncio.get_running_loop().create_future()
    shared.cancel()
    await shared


async def cancels_itself():
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(0)


def raises_it():
    raise asyncio.CancelledError


@pytest.mark.parametrize("function", [awaits_what_was_cancelled, cancels_itself, raises_it])
async def test_a_cancellation_from_inside_is_a_failure_of_that_code(function):
    said = r"the tool failed: it was cancelled from inside: CancelledError \(.*test_user_calls.py, line \d+\)"
    with pytest.raises(CodeError, match=said):
        await within(60.0, "the tool failed", function)


async def test_a_caller_that_is_cancelled_ends_the_function():
    begun, ended = asyncio.Event(), asyncio.Event()

    async def waits():
        try:
            begun.set()
            await asyncio.Event().wait()
        finally:
            ended.set()

    calling = asyncio.create_task(within(60.0, "the tool failed", waits))
    await begun.wait()
    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling
    await asyncio.wait_for(ended.wait(), 10)
