"""Large pieces of host memory that a GPU copies into at full speed."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

_ALIGNED = 64
"""Bytes of which the address of a tensor is a multiple."""


class _Pages(mmap.mmap):
    """Pages, perhaps pinned. CUDA must hear that they go: it holds on to what was pinned, and refuses to pin what comes
    to the same addresses."""

    pinned_at = 0

    def pin(self, address: int, size: int) -> None:
        # In one piece: a copy must not cross from one into another.
        error = int(torch.cuda.cudart().cudaHostRegister(address, size, 0))
        if error != 0:
            raise RuntimeError(f"{size / 2**30:.3g} GiB of host memory cannot be pinned: CUDA error {error}")
        self.pinned_at = address

    def __del__(self) -> None:
        if self.pinned_at and not sys.is_finalizing():
            torch.cuda.cudart().cudaHostUnregister(self.pinned_at)


def host_memory(size: int, *, pinned: bool) -> Tensor:
    """[size] uint8 of host memory that is zero.

    torch's own pinned memory comes in powers of two, and at 2.3 GB/s on a machine that copies at 55: page by page. Here
    the pages are large where the system has such, all threads bring them into being, and then they are pinned.

    Args:
        pinned: for copies from and to a GPU.

    Raises:
        RuntimeError: the system does not let so much be pinned.
    """
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    pages = _Pages(-1, size)  # the tensor keeps it alive
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    if pinned:
        memory.zero_()
        pages.pin(memory.data_ptr(), size)
    return memory


def pieces(sizes: Sequence[int], *, pinned: bool) -> list[Tensor]:
    """Host memory for tensors of so many bytes each, as parts of one piece."""
    starts = [0, *accumulate(-(-size // _ALIGNED) * _ALIGNED for size in sizes)]
    memory = host_memory(starts[-1], pinned=pinned)
    return [memory[start : start + size] for start, size in zip(starts, sizes, strict=False)]
