"""Where engines go, and what of the machine they may use."""

import pytest
import ray

from posttrain.cluster.cluster import _threads
from posttrain.cluster.placement import check_total, node_of, on_one_node
from posttrain.config import RolloutConfig
from posttrain.core.errors import ConfigError
from posttrain.engines.base import EngineSpec
from posttrain.engines.external import arguments
from posttrain.models.load import ModelSource


@pytest.mark.parametrize(
    ("nodes", "ranks", "expected"),
    [
        ("aaaa", 2, [[0, 1], [2, 3]]),
        ("aaabbb", 2, [[0, 1], [3, 4]]),  # one GPU of each node is left over
        ("abab", 2, [[0, 2], [1, 3]]),
        ("aabb", 4, []),
        ("a", 1, [[0]]),
    ],
)
def test_an_engine_stays_on_one_node(nodes, ranks, expected):
    assert on_one_node(nodes, ranks) == expected


@pytest.mark.parametrize(("asked", "expected"), [("3", 3), ("4,2", 4), ("", 2), ("0", 2), ("many", 2)])
def test_threads(monkeypatch, asked, expected):
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    monkeypatch.setattr("os.cpu_count", lambda: 64)  # of the machine; a job may use four of them
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {3, 4, 5, 9})
    assert _threads(2) == expected


def test_engine_options_may_not_be_ours():
    def spec(**options):
        rollout = RolloutConfig(engine="vllm", engine_options=options)
        return EngineSpec(ModelSource("builtin:tiny"), "cpu", "float32", 0, rollout, [0])

    assert arguments(spec(extra=1), {"seed": 0}) == {"seed": 0, "extra": 1}
    with pytest.raises(ConfigError, match=r"rollout\.engine_options\.seed is what posttrain sets itself"):
        arguments(spec(seed=3, extra=1), {"seed": 0})


@pytest.mark.parametrize(
    ("replicas", "ranks", "fraction", "there", "expected"),
    [
        (3, 1, 0.3, 8, 3),
        (3, 1, 0.3, 2, 2),
        (3, 1, 0.3, 1, 1),
        (3, 1, 0.4, 1, 3),  # they do not fit together
        (3, 1, 0.4, 2, 2),
        (3, 2, 0.3, 5, 4),
        (3, 2, 0.3, 2, 2),
        (1, 4, 0.5, 2, 4),  # too few for one
        (2, 1, 0.4, 0, 2),
    ],
)
def test_engines_that_sample_for_no_trainer_share_gpus_where_they_must(replicas, ranks, fraction, there, expected):
    rollout = RolloutConfig(replicas=replicas, tensor_parallel=ranks, memory_fraction=fraction)
    assert rollout.gpus_alone(there) == expected


@pytest.mark.parametrize(
    ("count", "after", "expected"),
    [
        (1, 0, "a"),
        (2, 0, "ab"),
        (3, 0, "abc"),
        (6, 0, "aabbcc"),  # neighbours are together, as a shard of weights is to be
        (1, 1, "b"),  # an engine beside one trainer
        (2, 1, "bc"),
        (2, 6, "ab"),  # no node is left
    ],
)
def test_processes_without_gpus_are_spread_over_nodes(count, after, expected):
    assert "".join(node_of("abc", count, index, after) for index in range(count)) == expected
    assert node_of("abc", count, -1, after) == expected[-1]


@pytest.mark.parametrize("kind", ["GPU", "CPU"])
def test_a_run_may_take_all_that_a_cluster_has_and_no_more(monkeypatch, kind):
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"GPU": 8.0, "CPU": 8.0} | {kind: 4.0})
    check_total(3, "trainers", held=1)
    with pytest.raises(
        ConfigError, match=r"samplers want 3 GPUs .* besides 2 GPUs .* of this run; the Ray cluster has"
    ):
        check_total(3, "samplers", held=2)
