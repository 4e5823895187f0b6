"""Watch Ray's head process (the GCS). Without it Ray ends every process of the run a minute later, the driver first,
with no message of ours."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

import ray

from posttrain.core.errors import WorkerError

_INTERVAL_S = 2.0
_ANSWER_S = 5.0
"""Longest wait for one answer."""
_PATIENCE_S = 40.0
"""How long the head of a cluster may be unreachable, since it may be restarted. Ray itself waits for 60 s."""


class Head:
    """Watches the head during a run, and cancels the task that started the watch when the head is lost."""

    def __init__(self) -> None:
        self._watch: asyncio.Task[None] | None = None
        self._lost: WorkerError | None = None

    def watch(self, *, patient: bool) -> None:
        """Start to watch, for the current task.

        Args:
            patient: wait for a head that may be restarted; that of a Ray which this process started never is.
        """
        waiting = asyncio.current_task()
        assert waiting is not None
        address, log = ray.get_runtime_context().gcs_address, _log_of_head(own=not patient)
        self._watch = asyncio.create_task(self._watch_head(waiting, address, log, _PATIENCE_S if patient else 0.0))

    def unwatch(self) -> None:
        """Stop to watch."""
        if self._watch is not None:
            self._watch.cancel()

    def raise_if_lost(self) -> None:
        """Raise ``WorkerError`` instead of the cancellation where the head was lost."""
        if self._lost is not None:
            (task := asyncio.current_task()) and task.uncancel()
            raise self._lost

    async def _watch_head(self, waiting: asyncio.Task[object], address: str, log: str, patience_s: float) -> None:
        host, _, port = address.rpartition(":")
        heard, tries = time.monotonic(), 0
        while True:
            await asyncio.sleep(_INTERVAL_S)
            if await answers(host, int(port)):
                heard, tries = time.monotonic(), 0
                continue
            tries += 1
            if tries > 1 and time.monotonic() - heard > patience_s:
                break
        self._lost = WorkerError(
            f"Ray's head process (GCS, {address}) has died or cannot be reached; its log: {log}",
            hint="was it killed, or out of memory? the same command goes on from the last checkpoint",
            who="Ray's head process",
        )
        waiting.cancel()


async def answers(host: str, port: int) -> bool:
    """Return whether a process of Ray listens there, after at most ``_ANSWER_S`` seconds."""
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(_ANSWER_S):
            _, writer = await asyncio.open_connection(host, port)
            writer.close()
        return True
    return False


def _log_of_head(*, own: bool) -> str:
    """Return where its log is; ``own``: this process has started Ray."""
    node: Any = ray._private.worker._global_node
    return f"{node.get_logs_dir_path()}/gcs_server.out" if own and node else "gcs_server.out on its machine"
