"""Whole weights out of shards: the same as one by one, whatever the number of rows and processes."""

import multiprocessing
import socket
import traceback

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from posttrain.models import gather
from posttrain.models.gather import whole, whole_many

SHAPES = [(7, 3), (1,), (2, 2, 2), (64, 5), (5,), (3, 4)]


def originals():
    generator = torch.Generator().manual_seed(0)
    return {f"w{i}": torch.randn(shape, generator=generator) for i, shape in enumerate(SHAPES)}


def check(rank, world_size, replicas, port):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    axes = (world_size,) if replicas == 1 else (replicas, world_size // replicas)
    mesh = init_device_mesh("cpu", axes)
    rows = [Shard(0)] if replicas == 1 else [Replicate(), Shard(0)]
    columns = [Shard(1)] if replicas == 1 else [Replicate(), Shard(1)]
    expected = originals()
    sharded = {name: distribute_tensor(tensor, mesh, rows) for name, tensor in expected.items()}
    expected |= {"plain": torch.ones(3), "columns": torch.arange(12.0).reshape(3, 4), "half": torch.ones(9, 2).half()}
    sharded |= {
        "plain": expected["plain"],
        "columns": distribute_tensor(expected["columns"], mesh, columns),
        "half": distribute_tensor(expected["half"], mesh, rows),
    }
    gather._GROUP_BYTES = 200  # several groups
    for dtype in (None, torch.float64, torch.bfloat16):
        found = dict(whole_many(sharded.items(), dtype))
        assert list(found) == list(expected)
        for name, tensor in expected.items():
            target = dtype or tensor.dtype
            assert found[name].shape == tensor.shape
            assert torch.equal(found[name].to(target), tensor.to(target)), name
    dist.barrier()  # one that leaves while others still talk ends them
    dist.destroy_process_group()


def run(rank, *args):
    try:
        check(rank, *args)
    except BaseException:
        traceback.print_exc()
        raise


@pytest.mark.parametrize(("world_size", "replicas"), [(1, 1), (3, 1), (4, 2)])
def test_gathers_shards_into_the_original_weights(world_size, replicas):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    multiprocessing.set_forkserver_preload(["torch.distributed.tensor", "posttrain.models.gather"])
    mp.start_processes(run, (world_size, replicas, port), nprocs=world_size, start_method="forkserver")


def test_shards_in_host_memory_are_gathered_on_the_device_of_the_mesh():
    """As `train.cpu_offload` leaves them: NCCL takes no tensors of the host."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("meta", (2,))  # in the place of a GPU, which this machine need not have
        # As FSDP2 makes them; `from_local` would move the shard to the mesh's device.
        spec = distribute_tensor(torch.empty(5, 3, device="meta"), mesh, [Shard(0)])._spec
        shard = DTensor(torch.ones(3, 3), spec, requires_grad=False)
        assert shard.to_local().device.type == "cpu"
        found = [whole(shard), dict(whole_many([("w", shard)], torch.bfloat16))["w"]]
    finally:
        dist.destroy_process_group()
    assert [(tensor.device.type, tuple(tensor.shape)) for tensor in found] == [("meta", (5, 3))] * 2
