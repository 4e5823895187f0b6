"""What `sft` and `rl` share, where it needs no workers."""

import json
import math

import pytest

from posttrain.cluster.peers import Peer
from posttrain.cluster.trainers import TrainerGroup
from posttrain.training import EarlyStop, update_speed


def test_speed_counts_all_updates_and_workers() -> None:
    """Two updates of 2 s and 6 s on two workers: 600 tokens of 800 that ran, 12 of 2 x 8 s x 4 FLOP/s."""
    results = [
        {"seconds": 2.0, "tokens_run": 300.0, "memory_gib": 3.0, "flops": 4.0},
        {"seconds": 6.0, "tokens_run": 500.0, "memory_gib": 2.0, "flops": 8.0},
    ]
    group = TrainerGroup("actor", [Peer("first"), Peer("second")], 1.0, 1, facts={"peak_flops": 4.0})
    speed = update_speed(results, 600, group)
    assert speed == {
        "perf/throughput": 75.0,
        "perf/tokens_per_second_per_gpu": 37.5,
        "perf/padding": pytest.approx(0.25),
        "perf/memory_gib": 3.0,
        "perf/mfu": 12.0 / (2 * 8.0 * 4.0),
    }
    group.facts["peak_flops"] = None
    assert "perf/mfu" not in update_speed(results, 600, group)


def stopped_at(losses: list[float], patience: int | None, min_delta: float = 0.0) -> int | None:
    """The validation, from 1, after which a run with these losses ends."""
    stop = EarlyStop(patience, min_delta)
    for step, loss in enumerate(losses, start=1):
        stop.validated(step, loss)
        again = EarlyStop(patience, min_delta)  # a run that goes on from a checkpoint decides alike
        again.restore(json.loads(json.dumps(stop.state(), allow_nan=False)))
        assert again == stop
        stop = again
        if stop.reached:
            return step
    return None


def test_early_stop() -> None:
    losses = [3.0, 2.0, 2.5, 1.9, 1.9, 1.95, 1.0]
    assert stopped_at(losses, 1) == 3
    assert stopped_at(losses, 2) == 6
    assert stopped_at(losses, 3) is None
    assert stopped_at(losses, 2, min_delta=0.2) == 4
    assert stopped_at(losses, None) is None
    assert stopped_at([math.nan, math.inf, 1.0], 2) == 2
    assert stopped_at([math.nan, 1.0, math.nan, 0.5], 2) is None
