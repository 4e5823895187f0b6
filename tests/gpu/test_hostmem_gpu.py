"""Pinned host memory is given back: to the system, and in CUDA's books."""

import psutil
import pytest
import torch

from posttrain.train.hostmem import host_memory
from posttrain.train.offload import CpuOffload

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
MIB = 2**20


def test_what_comes_to_the_same_addresses_is_pinned_again():
    source = torch.arange(32 * MIB, device="cuda").to(torch.uint8)
    used, places = [], set()
    for _ in range(8):
        memory = host_memory(64 * MIB, pinned=True)
        places.add(memory.data_ptr())
        part = memory[: 32 * MIB]
        del memory  # the part keeps all of it
        assert part.is_pinned()
        part.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        assert torch.equal(part, source.cpu())
        del part
        used.append(psutil.Process().memory_info().rss / MIB)
    assert len(places) < 8, "no address came again, so this has shown nothing"
    assert used[-1] - used[0] < 32


def test_more_tensors_are_offloaded_than_before():
    """As with the optimizer's state, which is there after the first step only."""
    tensors = [torch.randn(5 * MIB, device="cuda") for _ in range(4)]
    expected = [tensor.clone() for tensor in tensors]
    offloaded = CpuOffload()
    for count in (1, 4, 2, 3, 4):
        offloaded.offload(tensors[:count])
        offloaded.onload()
    for tensor, value in zip(tensors, expected, strict=True):
        assert torch.equal(tensor, value)
