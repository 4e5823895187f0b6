"""Bytes from one process to many that have GPUs of their own: NCCL, or gloo where there is no GPU.

A group lives as long as its members do. One that loses a member is of no use to the others, which are told
(``Meeting.announce_loss``) and give up: a collective cannot go on without it.
"""

from __future__ import annotations

import threading
import time
import uuid
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from posttrain.errors import RunError

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

    def __init__(self, host: str, size: int, deadline_s: float) -> None:
        wait = timedelta(seconds=deadline_s)
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=wait)
        self.group = BroadcastGroup(uuid.uuid4().hex, host, self._store.port, size, deadline_s)

    def announce_loss(self, who: str) -> None:
        """Nobody waits for ``who`` any more."""
        self._store.set(_LOST, who)


class Member:
    """This process in a group. It waits for all others when it is made, or (NCCL) at the first broadcast.

    Raises:
        MemberLost: they did not come within the group's deadline.
    """

    _current: Member | None = None
    _given_up: BroadcastGroup | None = None

    def __init__(self, group: BroadcastGroup, rank: int, device: torch.device) -> None:
        self.group, self.rank, self.device = group, rank, device
        self._buffer = torch.empty(0, dtype=torch.uint8, device=device)
        wait = timedelta(seconds=group.deadline_s)
        self._backend: Any
        try:
            self._store = TCPStore(group.host, group.port, is_master=False, wait_for_workers=False, timeout=wait)
            # Not in torch.distributed's registry, whose default group is the trainer's or the engine's own.
            if device.type == "cuda":
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = wait
                self._backend = dist.ProcessGroupNCCL(self._store, rank, group.size, options)
            else:
                self._backend = dist.ProcessGroupGloo(self._store, rank, group.size, wait)
        except RuntimeError as error:
            raise MemberLost(f"rank {rank} of {group.size} could not join the others for weights: {error}") from error

    @classmethod
    def of(cls, group: BroadcastGroup, rank: int, device: torch.device) -> Self:
        """This process's place in ``group``, taken at the first call; a place in another group is left.

        Raises:
            MemberLost: as the constructor, or this process has given the group up.
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
        """Broadcast, from rank 0 to all others, [size] bytes that this rank must leave alone until ``wait``. Raises
        ``MemberLost``."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.asyncOp = True
        try:
            return self._backend.broadcast([flat], options)
        except RuntimeError as error:
            self._give_up(str(error))

    def wait(self, work: Any) -> None:
        """A broadcast that was started is done.

        Raises:
            MemberLost: a member was lost, or nothing moved within the deadline. This one has left the group.
        """
        begun = looked = time.monotonic()
        while not work.is_completed():
            time.sleep(_NAP_S)
            now = time.monotonic()
            if now - looked > _LOOK_S:
                looked = now
                if self._store.check([_LOST]):
                    self._give_up(f"{self._store.get(_LOST).decode()} was lost")
                if now - begun > self.group.deadline_s:
                    self._give_up(f"nothing came within {self.group.deadline_s:g} s")
        try:
            work.wait()
        except RuntimeError as error:
            self._give_up(str(error))

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
