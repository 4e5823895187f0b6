"""Ray's head process (the GCS): whether it still answers. Without it Ray ends every process of the run a minute later,
the driver first, and without a word of ours."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

import ray

from posttrain.core.errors import WorkerError

_EVERY_S = 2.0
_TRY_S = 5.0
"""Longest wait for one answer."""
_PATIENCE_S = 40.0
"""How long a head of a cluster may be away: it may be started again. Ray's own patience is 60 s."""


class Head:
    """Looks after the head while a run goes on, and cancels the task that asked for it when the head is lost."""

    def __init__(self) -> None:
        self._watch: asyncio.Task[None] | None = None
        self._lost: WorkerError | None = None

    def watch(self, *, patient: bool) -> None:
        """Begin, for the present task.

        Args:
            patient: wait for a head that may come back; that of a Ray of our own never does.
        """
        waiting = asyncio.current_task()
        assert waiting is not None
        address, log = ray.get_runtime_context().gcs_address, _log_of_head(own=not patient)
        self._watch = asyncio.create_task(self._look(waiting, address, log, _PATIENCE_S if patient else 0.0))

    def unwatch(self) -> None:
        """End it."""
        if self._watch is not None:
            self._watch.cancel()

    def raise_if_lost(self) -> None:
        """Raise ``WorkerError``, in the place of the cancellation, where the head was lost."""
        if self._lost is not None:
            (task := asyncio.current_task()) and task.uncancel()
            raise self._lost

    async def _look(self, waiting: asyncio.Task[object], address: str, log: str, patience_s: float) -> None:
        host, _, port = address.rpartition(":")
        heard, tries = time.monotonic(), 0
        while True:
            await asyncio.sleep(_EVERY_S)
            if await _answers(host, int(port)):
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


async def _answers(host: str, port: int) -> bool:
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(_TRY_S):
            _, writer = await asyncio.open_connection(host, port)
            writer.close()
        return True
    return False


def _log_of_head(*, own: bool) -> str:
    """Where its log is; of a Ray of our own on this machine."""
    node: Any = ray._private.worker._global_node
    return f"{node.get_logs_dir_path()}/gcs_server.out" if own and node else "gcs_server.out on its machine"
