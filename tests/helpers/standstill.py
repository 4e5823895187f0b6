"""Hold up the generation thread of an embedded engine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from posttrain.engines.hf import HFSampler


async def stopped_when(engine: HFSampler, there: Callable[[], bool]) -> threading.Event:
    """Wait until ``there`` is true before a step of the engine. The generation thread does nothing then until the
    result is set."""
    loop, reached, go_on = asyncio.get_running_loop(), asyncio.Event(), threading.Event()
    manager: Any = engine.manager
    step = manager._generation_loop_body

    def stop_or_step(*args: Any, **kwargs: Any) -> Any:
        if there():
            manager._generation_loop_body = step
            loop.call_soon_threadsafe(reached.set)
            assert go_on.wait(60)
        return step(*args, **kwargs)

    manager._generation_loop_body = stop_or_step
    await reached.wait()
    return go_on
