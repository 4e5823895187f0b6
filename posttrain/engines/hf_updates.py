"""Weight updates of the embedded engine that its requests outlive (`rollout.keep_kv`)."""

from __future__ import annotations

import threading
from typing import Any

from posttrain.core.errors import WeightSyncError


class KeptRequests:
    """Holds up the requests of transformers' continuous batching between two steps, and lets them go on with the KV
    cache that they have. Requests that begin afterwards take nothing of it."""

    def __init__(self) -> None:
        self._manager: Any = None
        self._processor: Any = None
        """The library's object that computes, and owns the cache; None: it does not exist yet."""
        self._changed = threading.Condition()
        self._paused = self._stepping = False
        self._updates: dict[str, list[tuple[int, int]]] = {}
        """By request, ``Sample.updates`` so far."""
        self._old: set[str] = set()
        """Requests whose cache has entries of older weights."""

    def attach(self, manager: Any) -> None:
        """Hold up this manager, before it starts: its own thread creates the object that computes."""
        self._manager = manager
        step, create = manager._generation_loop_body, manager._create_batch_processor

        def step_unless_paused(*args: Any, **kwargs: Any) -> bool:
            with self._changed:
                self._changed.wait_for(lambda: not self._paused)  # ``resume`` comes with the update's end or ``close``
                self._stepping = True
            try:
                return bool(step(*args, **kwargs))
            finally:
                with self._changed:
                    self._stepping = False
                    self._changed.notify_all()

        def create_with_private_blocks() -> Any:
            processor = self._processor = create()
            mark = processor.cache.mark_shareable_blocks_as_complete

            def mark_unless_old(state: Any, complete: int) -> None:
                if state.request_id not in self._old:
                    mark(state, complete)

            processor.cache.mark_shareable_blocks_as_complete = mark_unless_old
            return processor

        manager._generation_loop_body = step_unless_paused
        manager._create_batch_processor = create_with_private_blocks

    def begin(self, request_id: str) -> None:
        """Follow a request from its first token on."""
        self._updates[request_id] = []

    def end(self, request_id: str) -> tuple[tuple[int, int], ...]:
        """Return ``Sample.updates`` of a request, and forget it."""
        return tuple(self._updates.pop(request_id))

    def pause(self, deadline_s: float) -> None:
        """Wait until no step runs; none begins before ``resume``. Raises ``WeightSyncError`` at the deadline."""
        self._manager._has_new_requests.set()  # an idle step waits for this
        with self._changed:
            self._paused = True
            if not self._changed.wait_for(lambda: not self._stepping, deadline_s):
                raise WeightSyncError(f"the embedded engine was still amid a step {deadline_s:g} s after it was paused")

    def update(self, version: int) -> None:
        """Count what requests sample from now on as ``version``, and share no block of their cache any more. Call it
        between ``pause`` and ``resume``."""
        states = {state.request_id: state for state in list(self._manager.input_queue.queue)}
        if self._processor is not None:
            scheduler = self._processor.scheduler
            self._old = scheduler.active_requests.keys() | scheduler.waiting_requests.keys()
            states |= scheduler.active_requests | scheduler.waiting_requests
            _drop_prefixes(self._processor.cache._block_manager)
        for request_id, updates in self._updates.items():
            if (state := states.get(request_id)) is not None:  # else it has ended, and its answer is under way
                updates.append((len(state.to_generation_output().generated_tokens), version))

    def resume(self) -> None:
        """Let requests go on."""
        with self._changed:
            self._paused = False
            self._changed.notify_all()


def _drop_prefixes(blocks: Any) -> None:
    """Forget what the cache's blocks hold. Those of requests that run stay theirs, and become free when these end."""
    for block in blocks._id_to_block.values():
        block.hash = None
    blocks._hash_to_id.clear()
    for free in blocks._init_block_ids:
        del blocks._id_to_block[free]
    blocks._uninit_block_ids.extend(blocks._init_block_ids)
    blocks._init_block_ids.clear()
