"""Who gets which part of what a transfer sends."""

from collections import Counter

from posttrain.weight_sync.buckets import Bucket
from posttrain.weight_sync.endpoints import Receivers
from posttrain.weight_sync.sender import SharedGpu
from posttrain.weight_sync.transfers import DeviceTransfer


class Trainers:
    world_size = 3


class Engine:
    def __init__(self, *trainers):
        self.trainers, self.got = trainers, []

    async def load_bucket(self, bucket, data=None):
        self.got.append(bucket.handles)


async def test_each_process_that_reads_a_gpu_has_a_handle_of_its_own():
    """Torch counts the readers of a handle down from one, and keeps the memory where there were two."""
    engines = [Engine(0), Engine(1, 0), Engine(0)]
    transfer = DeviceTransfer(Trainers(), engines)
    assert transfer.transports() == [SharedGpu(3), SharedGpu(1), None]
    made = [[f"rank {rank}, handle {reader}" for reader in range(count)] for rank, count in enumerate((3, 1, 0))]
    await transfer.deliver(0, [Bucket((), handles=tuple(handles)) for handles in made], Receivers(engines))
    assert [len(engine.got) for engine in engines] == [1, 1, 1]
    used = Counter(handle for engine in engines for handle in engine.got[0])
    assert used == Counter(handle for handles in made for handle in handles)
    for engine in engines:
        assert [handle.split(",")[0] for handle in engine.got[0]] == [f"rank {rank}" for rank in engine.trainers]
