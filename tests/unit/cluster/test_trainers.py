"""The driver's calls to training workers."""

from typing import get_args

from posttrain.cluster.trainers import WorkerMethod
from posttrain.train.worker import TrainWorker


def test_worker_methods_are_methods_of_the_worker() -> None:
    assert [name for name in get_args(WorkerMethod) if not callable(getattr(TrainWorker, name, None))] == []
