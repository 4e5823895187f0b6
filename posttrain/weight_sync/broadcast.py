"""Broadcasts of weights from one process to others on other GPUs: NCCL, or gloo where there is no GPU.

A process group lasts as long as all of its ranks. When one of them is lost, a collective cannot go on without it:
``BroadcastRendezvous.announce_loss`` tells the others, which then leave the group.
"""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from posttrain.core import rendezvous
from posttrain.core.errors import RunError

_LOST = "lost"
_POLL_S = 0.0002
_LOSS_POLL_S = 0.1
"""Interval between two checks for a lost rank."""


class RankLost(RunError):
    """A broadcast was given up, because another rank of the group has died or does not answer."""


@dataclass(frozen=True)
class BroadcastGroup:
    """The rendezvous address of a process group, whose rank 0 sends."""

    name: str
    """Unique: the port of a group that has ended is given to another."""
    host: str
    port: int
    size: int
    deadline_s: float
    """Longest wait for one broadcast."""


class BroadcastRendezvous:
    """The key-value store at which a group's ranks find each other, in a process that outlives the group."""

    lost: str | None = None
    """The rank that was lost first, or why the group has ended."""

    def __init__(self, host: str, size: int, deadline_s: float) -> None:
        self._store = rendezvous.serve(host, 0, timedelta(seconds=deadline_s))
        self.group = BroadcastGroup(uuid.uuid4().hex, host, self._store.port, size, deadline_s)

    def announce_loss(self, who: str) -> None:
        """Tell all ranks that ``who`` was lost, so that they stop waiting. The first call counts."""
        if self.lost is None:
            self.lost = who
            self._store.set(_LOST, who)


class BroadcastRank:
    """One rank of a group, in this process. The group connects at the first broadcast."""

    def __init__(self, group: BroadcastGroup, rank: int, device: torch.device) -> None:
        self.group, self.rank, self.device = group, rank, device
        self.left = False
        """This rank has left the group, for good."""
        self._buffer = torch.empty(0, dtype=torch.uint8, device=device)
        self._deadline = timedelta(seconds=group.deadline_s)
        self._backend: Any = None
        try:
            # Two connections: a wait for the group keeps one of them busy, and the other tells of losses meanwhile.
            self._losses, self._store = (rendezvous.join(group.host, group.port, self._deadline) for _ in range(2))
        except RuntimeError as error:
            raise RankLost(
                f"rank {rank} of {group.size} cannot reach the rendezvous of a broadcast: {error}"
            ) from error

    def receive(self, size: int) -> Tensor:
        """Return the [size] bytes that rank 0 sends, which stay valid until the next call. Raises as ``wait``."""
        if self._buffer.numel() < size:
            self._buffer = torch.empty(size, dtype=torch.uint8, device=self.device)
        flat = self._buffer[:size]
        self.wait(self.start(flat))
        return flat

    def start(self, flat: Tensor) -> Any:
        """Start the broadcast of [size] bytes from rank 0, which must not change until ``wait`` has returned. The first
        call waits for all ranks. Raises as ``wait``."""
        try:
            if self._backend is not None:
                return self._broadcast(self._backend, flat)
            connected = self._connect(flat)
            self._wait_until(connected.done)
            return connected.result()
        except RuntimeError as error:
            self._give_up(str(error))

    def _connect(self, flat: Tensor) -> Future[Any]:
        """Create the process group and start its first broadcast. Both wait for the other ranks in code that does not
        hear of losses: they run in a thread, which is left behind if the others do not come."""
        result: Future[Any] = Future()
        # The caller's stream, which orders the broadcast with what writes and reads the bytes.
        stream = torch.cuda.stream(torch.cuda.current_stream(self.device)) if flat.is_cuda else contextlib.nullcontext()

        def connect() -> None:
            try:
                with stream:
                    self._backend = backend = self._create_backend()
                    result.set_result(self._broadcast(backend, flat))
            except BaseException as error:  # the waiting thread raises it
                result.set_exception(error)

        threading.Thread(target=connect, name="connect-group", daemon=True).start()
        return result

    def _create_backend(self) -> Any:
        """Return a process group outside torch.distributed's registry, whose default group is the trainer's or the
        engine's own."""
        if self.device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self._deadline
            return dist.ProcessGroupNCCL(self._store, self.rank, self.group.size, options)
        return dist.ProcessGroupGloo(self._store, self.rank, self.group.size, self._deadline)

    @staticmethod
    def _broadcast(backend: Any, flat: Tensor) -> Any:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.asyncOp = True
        return backend.broadcast([flat], options)

    def wait(self, work: Any) -> None:
        """Wait until a broadcast that was started has ended.

        Raises:
            RankLost: another rank was lost, or the deadline has passed. This rank has left the group.
        """
        self._wait_until(work.is_completed)
        try:
            work.wait()
        except RuntimeError as error:
            self._give_up(str(error))

    def _wait_until(self, done: Callable[[], bool]) -> None:
        """Poll ``done``. Raises as ``wait``."""
        begun = checked = time.monotonic()
        while not done():
            time.sleep(_POLL_S)
            now = time.monotonic()
            if now - checked > _LOSS_POLL_S:
                checked = now
                if self._losses.check([_LOST]):
                    self._give_up(f"{self._losses.get(_LOST).decode()} was lost")
                if now - begun > self.group.deadline_s:
                    self._give_up(f"nothing came within {self.group.deadline_s:g} s")

    def _give_up(self, why: str) -> NoReturn:
        self.leave()
        raise RankLost(f"rank {self.rank} of {self.group.size} gave up a broadcast of weights: {why}")

    def leave(self) -> None:
        """Leave the group for good, even in the middle of a broadcast."""
        self.left = True
        self._buffer = torch.empty(0, dtype=torch.uint8, device=self.device)
        # In a thread, which alone then owns the backend: gloo's destructor waits, up to the group's deadline, for
        # ranks that have not left to take their bytes.
        held, self._backend = [self._backend], None
        if held[0] is None:  # the wait for another bucket has left already
            return
        threading.Thread(target=lambda: held.pop().abort(), name="leave-group", daemon=True).start()


class BroadcastConnection:
    """This process's rank in a broadcast group, kept from one update to the next."""

    def __init__(self) -> None:
        self._current: BroadcastRank | None = None

    def join(self, group: BroadcastGroup, rank: int, device: torch.device) -> BroadcastRank:
        """Return rank ``rank`` of ``group``. The first call for a group joins it, and leaves the group before.

        Raises:
            RankLost: the rendezvous cannot be reached, or this process has left the group.
        """
        current = self._current
        if current is not None and current.group == group:
            if current.left:
                raise RankLost("this group has lost a rank")
            if current.rank == rank:
                return current
        self.close()
        self._current = BroadcastRank(group, rank, device)
        return self._current

    def close(self) -> None:
        """Leave the group, if there is one."""
        if self._current is not None:
            self._current.leave()
