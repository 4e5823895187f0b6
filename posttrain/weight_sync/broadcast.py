"""Bytes from one process to many that have GPUs of their own: NCCL, or gloo where there is no GPU.

A group lives as long as its members do. One that loses a member is of no use to the others, which are told
(``Meeting.announce_loss``) and give up: a collective cannot go on without it.
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
from typing import Any, NoReturn, Self

import torch
import torch.distributed as dist
from torch import Tensor

from posttrain.core import rendezvous
from posttrain.core.errors import RunError

_LOST = "lost"
_NAP_S = 0.0002
_LOOK_S = 0.1
"""Between two looks whether a member was lost."""


class MemberLost(RunError):
    """A broadcast was given up, because another member has died or does not answer."""


@dataclass(frozen=True)
class BroadcastGroup:
    """Where the members of a group meet. Rank 0 sends."""

    name: str
    """No other group has it: the port of one that is gone is given to another."""
    host: str
    port: int
    size: int
    deadline_s: float
    """Longest wait for one broadcast."""


class Meeting:
    """Where a group meets, in a process that outlives it."""

    lost: str | None = None
    """Who was lost first, or why."""

    def __init__(self, host: str, size: int, deadline_s: float) -> None:
        self._store = rendezvous.serve(host, 0, timedelta(seconds=deadline_s))
        self.group = BroadcastGroup(uuid.uuid4().hex, host, self._store.port, size, deadline_s)

    def announce_loss(self, who: str) -> None:
        """Nobody waits for ``who`` any more."""
        if self.lost is None:
            self.lost = who
            self._store.set(_LOST, who)


class Member:
    """This process in a group, which comes together at the first broadcast."""

    _current: Member | None = None
    _given_up: BroadcastGroup | None = None

    def __init__(self, group: BroadcastGroup, rank: int, device: torch.device) -> None:
        self.group, self.rank, self.device = group, rank, device
        self._buffer = torch.empty(0, dtype=torch.uint8, device=device)
        self._deadline = timedelta(seconds=group.deadline_s)
        self._backend: Any = None
        try:
            # One to hear of losses by, while a wait for the group keeps the other.
            self._news, self._store = (rendezvous.join(group.host, group.port, self._deadline) for _ in range(2))
        except RuntimeError as error:
            raise MemberLost(f"rank {rank} of {group.size} does not reach where weights are sent: {error}") from error

    @classmethod
    def of(cls, group: BroadcastGroup, rank: int, device: torch.device) -> Self:
        """This process's place in ``group``, taken at the first call; a place in another group is left.

        Raises:
            MemberLost: the others cannot be reached, or this process has given the group up.
        """
        if group == Member._given_up:
            raise MemberLost("this group has lost a member")
        current = Member._current
        if not isinstance(current, cls) or (current.group, current.rank) != (group, rank):
            if current is not None:
                current.leave()
            current = Member._current = cls(group, rank, device)
        return current

    def receive(self, size: int) -> Tensor:
        """[size] bytes that rank 0 sends. They stay until the next call. Raises as ``wait``."""
        if self._buffer.numel() < size:
            self._buffer = torch.empty(size, dtype=torch.uint8, device=self.device)
        flat = self._buffer[:size]
        self.wait(self.start(flat))
        return flat

    def start(self, flat: Tensor) -> Any:
        """Broadcast, from rank 0 to all others, [size] bytes that this rank must leave alone until ``wait``. The first
        time, wait for the others. Raises as ``wait``."""
        try:
            if self._backend is not None:
                return self._broadcast(self._backend, flat)
            joined = self._join(flat)
            self._until(joined.done)
            return joined.result()
        except RuntimeError as error:
            self._give_up(str(error))

    def _join(self, flat: Tensor) -> Future[Any]:
        """Make the group, and begin its first broadcast. Both wait for the others in code that hears of no loss: in a
        thread, which is left behind where they do not come."""
        result: Future[Any] = Future()
        # Of this thread, in which what is done to the bytes before and after is ordered.
        stream = torch.cuda.stream(torch.cuda.current_stream(self.device)) if flat.is_cuda else contextlib.nullcontext()

        def join() -> None:
            try:
                with stream:
                    self._backend = backend = self._open()
                    result.set_result(self._broadcast(backend, flat))
            except BaseException as error:  # told to whoever waits
                result.set_exception(error)

        threading.Thread(target=join, name="join-group", daemon=True).start()
        return result

    def _open(self) -> Any:
        """Not in torch.distributed's registry, whose default group is the trainer's or the engine's own."""
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
        """A broadcast that was started is done.

        Raises:
            MemberLost: a member was lost, or nothing moved within the deadline. This one has left the group.
        """
        self._until(work.is_completed)
        try:
            work.wait()
        except RuntimeError as error:
            self._give_up(str(error))

    def _until(self, done: Callable[[], bool]) -> None:
        """Wait for ``done``. Raises as ``wait``."""
        begun = looked = time.monotonic()
        while not done():
            time.sleep(_NAP_S)
            now = time.monotonic()
            if now - looked > _LOOK_S:
                looked = now
                if self._news.check([_LOST]):
                    self._give_up(f"{self._news.get(_LOST).decode()} was lost")
                if now - begun > self.group.deadline_s:
                    self._give_up(f"nothing came within {self.group.deadline_s:g} s")

    def _give_up(self, why: str) -> NoReturn:
        Member._given_up = self.group
        self.leave()
        raise MemberLost(f"rank {self.rank} of {self.group.size} gave up a broadcast of weights: {why}")

    def leave(self) -> None:
        """Out of the group, in the middle of a broadcast too, and for good."""
        if Member._current is self:
            Member._current = None
        self._buffer = torch.empty(0, dtype=torch.uint8, device=self.device)
        # In a thread, to which alone it then belongs: with gloo its destructor waits, up to the group's deadline, for
        # bytes that a member who has not left does not take.
        held, self._backend = [self._backend], None
        if held[0] is None:  # it has left: two buckets were on their way
            return
        threading.Thread(target=lambda: held.pop().abort(), name="leave-group", daemon=True).start()
