"""CPU offload of tensors in place: whoever holds them goes on holding the same tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, UntypedStorage
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from posttrain.train.hostmem import pieces


class CpuOffload:
    """Copies of tensors in host memory (pinned, for a GPU), while the memory that they had on the device is free.

    The host's memory is kept for the next time: pinning it takes longer than copying.
    """

    def __init__(self) -> None:
        self._hosts: list[Tensor] = []
        self._offloaded: list[UntypedStorage] = []

    def offload(self, tensors: Iterable[Tensor]) -> None:
        """Copy the tensors to the host and free their memory. They must not be used until ``onload``."""
        assert not self._offloaded
        self._offloaded = _distinct(tensors)
        sizes = [storage.nbytes() for storage in self._offloaded]
        if sizes != [len(host) for host in self._hosts]:
            pinned = any(storage.device.type == "cuda" for storage in self._offloaded)
            self._hosts = []  # before there are others
            self._hosts = pieces(sizes, pinned=pinned)
        for storage, host in zip(self._offloaded, self._hosts, strict=True):
            host.copy_(_bytes(storage), non_blocking=True)
        _wait(self._offloaded)
        for storage in self._offloaded:
            storage.resize_(0)

    def onload(self) -> None:
        """Give the tensors their memory and contents back."""
        if not self._offloaded:
            return
        for storage, host in zip(self._offloaded, self._hosts, strict=True):
            storage.resize_(len(host))
            _bytes(storage).copy_(host, non_blocking=True)
        _wait(self._offloaded)
        self._offloaded = []


def _distinct(tensors: Iterable[Tensor]) -> list[UntypedStorage]:
    """Return the memory behind the tensors, each piece once: tied weights and padded shards share theirs."""
    storages = {s._cdata: s for tensor in tensors for s in _storages(tensor)}
    return [storage for storage in storages.values() if storage.nbytes()]


def _storages(tensor: Tensor) -> Iterator[UntypedStorage]:
    if isinstance(tensor, DTensor):
        yield from _storages(tensor.to_local())
    elif is_traceable_wrapper_subclass(tensor):  # torchao's: codes and scales
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            yield from _storages(getattr(tensor, name))
    else:
        yield tensor.untyped_storage()


def _bytes(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _wait(storages: list[UntypedStorage]) -> None:
    if any(storage.device.type == "cuda" for storage in storages):
        torch.cuda.synchronize()
