"""The driver's calls to training workers."""

from operator import attrgetter
from typing import get_args

import torch.distributed as dist

from posttrain.cluster.trainers import WorkerMethod
from posttrain.config import TrainConfig
from posttrain.models.load import ModelSource
from posttrain.train.spec import WorkerSpec
from posttrain.train.worker import TrainWorker
from tests.helpers.ports import free_ports


def test_worker_methods_are_methods_of_a_worker_that_is_set_up() -> None:
    worker = TrainWorker(WorkerSpec(ModelSource("builtin:tiny"), "cpu", "float32", 9, 1.0, TrainConfig()), 0, 1)
    worker.setup("127.0.0.1", int(free_ports(1)[0]), 60.0)
    try:
        for name in get_args(WorkerMethod):
            assert callable(attrgetter(name)(worker))
    finally:
        dist.destroy_process_group()
