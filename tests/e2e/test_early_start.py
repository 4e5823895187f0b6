"""Ray and the engines' processes start while a run is checked, and engines beside trainers; what fails ends them."""

import asyncio
import threading
import time
from pathlib import Path
from typing import NoReturn

import psutil
import pytest
import ray

from posttrain import launch
from posttrain.cluster import early
from posttrain.cluster.cluster import Cluster, local_ray
from posttrain.cluster.early import EarlyCluster, start_early
from posttrain.config import Config
from posttrain.config.presets import Resolved, resolve
from posttrain.core.errors import DataError, DeadlineError, ModelError, RunError
from posttrain.models.builtin import builtin_tokenizer
from posttrain.models.load import ModelSource

SOURCE = ModelSource("builtin:tiny")


def config(**parts):
    rollout = {"engine": "hf", "kv_tokens": 2048} | parts.pop("rollout", {})
    return Config.model_validate({"command": "rl", "rollout": rollout, "cluster": {"device": "cpu"} | parts})


def engines() -> list[psutil.Process]:
    """Processes of engines that this one has started. Ray renames them at each call, and Linux cuts names at 15
    letters: amid that psutil finds no more."""
    return [p for p in psutil.Process().children(recursive=True) if "SamplerAct" in _name(p)]


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return ""


def wait_for_engine() -> None:
    deadline = time.monotonic() + 120
    while not engines():
        assert time.monotonic() < deadline, "no engine's process came"
        time.sleep(0.05)


def test_engines_are_there_before_the_run_has_been_checked(tmp_path: Path):
    logs = tmp_path / "run" / "logs"
    with EarlyCluster(config(), logs) as ahead:
        wait_for_engine()
        assert not logs.parent.exists()  # nothing is written before the checks are over
        logs.mkdir(parents=True)

        async def run() -> None:
            async with ahead as cluster:
                before = {p.pid for p in engines()}
                tokenizer = builtin_tokenizer("tiny")
                [sampler] = await cluster.samplers(SOURCE, [tokenizer.eos_token_id])
                assert sampler.handle.process.pid in before
                # Its output goes to the run from here on, and so does the diagnosis of its death look there.
                assert sampler.handle.process.log == str(logs / "sampler-0.log")
                assert f"process {sampler.handle.process.pid}" in (logs / "sampler-0.log").read_text()

        asyncio.run(run())
        assert not ray.is_initialized()
    assert not ray.is_initialized()


def test_a_check_that_fails_ends_what_has_started(tmp_path: Path):
    with pytest.raises(DataError, match="no such file"), EarlyCluster(config(), tmp_path / "logs"):
        wait_for_engine()
        started = engines()
        raise DataError("data: no such file")
    assert not ray.is_initialized()
    psutil.wait_procs(started, timeout=20)
    assert not engines()
    assert list(tmp_path.iterdir()) == []


def test_a_command_with_such_an_engine_starts_it_before_its_checks(tmp_path: Path):
    def prepare(resolved: Resolved) -> NoReturn:
        wait_for_engine()
        raise DataError("data: no such file")

    sets = ["rollout.engine='vllm'", f"run.dir='{tmp_path}'"]
    with pytest.raises(DataError, match="no such file"):
        launch.run(resolve("rl", "tiny-arith", sets), prepare)
    assert not ray.is_initialized()
    assert list(tmp_path.iterdir()) == []


def test_a_ray_that_does_not_start_in_time_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    hangs = threading.Event()
    monkeypatch.setattr(early, "init_ray", hangs.wait)

    async def run(cluster: Cluster) -> None:
        async with cluster:
            pytest.fail("entered")

    late = pytest.raises(DeadlineError, match=r"Ray did not start .* cluster.start_deadline_s = 0.2 s")
    with late, EarlyCluster(config(start_deadline_s=0.2), tmp_path) as ahead:
        asyncio.run(run(ahead))
    hangs.set()


def test_a_run_that_starts_again_makes_a_cluster_of_its_own(tmp_path: Path):
    async def start(cluster: Cluster) -> int:
        async with cluster:
            group = await cluster.trainer("actor", SOURCE)
            return group.handles[0].process.pid

    cfg = config()
    with EarlyCluster(cfg, tmp_path) as ahead:
        first = asyncio.run(start(ahead))
        assert asyncio.run(start(Cluster(cfg, tmp_path))) != first
    assert not ray.is_initialized()


def test_what_fails_meanwhile_is_told_when_the_run_enters(tmp_path: Path):
    async def run(cluster: Cluster) -> None:
        async with cluster:
            pytest.fail("entered")

    with (
        pytest.raises(RunError, match="but Ray sees no GPU"),
        EarlyCluster(config(device="cuda"), tmp_path) as ahead,
    ):
        asyncio.run(run(ahead))
    assert not ray.is_initialized()


@pytest.mark.parametrize(
    ("rollout", "cluster", "ahead"),
    [
        ({}, {}, False),  # it takes a share of what the trainer has left
        ({"replicas": 2, "memory_fraction": 0.3}, {}, True),  # their caches have sizes of their own
        ({}, {"placement": "separate"}, True),
    ],
)
async def test_engines_start_beside_trainers_where_these_take_no_memory_from_them(rollout, cluster, ahead):
    ray.init("local", num_cpus=3, num_gpus=2, include_dashboard=False, log_to_driver=False)
    try:
        async with Cluster(config(rollout=rollout, device="cuda", **cluster)) as made:
            await made.begin_samplers(SOURCE, [0])
            assert (made._starting is not None) == ahead
    finally:
        ray.shutdown()


@pytest.mark.parametrize(("only", "groups"), [(True, {"samplers": 2}), (False, {"trainers": 1})])
async def test_engines_of_a_run_that_trains_nothing_spread_over_the_gpus(only, groups):
    ray.init("local", num_cpus=3, num_gpus=2, include_dashboard=False, log_to_driver=False)
    try:
        rollout = {"replicas": 2, "memory_fraction": 0.3, "only": only}
        async with Cluster(config(rollout=rollout, device="cuda")) as made:
            await made.prepare_samplers()
            assert {pool: len(group.bundle_specs) for pool, group in made.groups.items()} == groups
    finally:
        ray.shutdown()


async def test_what_fails_of_an_engine_that_starts_ahead_is_told_to_whom_waits_for_it():
    missing = ModelSource("builtin:none")
    with local_ray():
        async with Cluster(config()) as cluster:
            await cluster.begin_samplers(missing, [0])
            await cluster.trainer("actor", SOURCE)  # goes on beside it
            with pytest.raises(ModelError, match="none"):
                await cluster.samplers(missing, [0], weights_follow=True)


@pytest.mark.parametrize(
    ("parts", "starts"),
    [
        ({"rollout": {"engine": "vllm"}}, True),
        ({"rollout": {"engine": "hf"}}, False),  # it imports nothing that the run does not
        ({"rollout": {"engine": "vllm", "replay": "earlier"}}, False),
        ({"rollout": {"engine": "vllm"}, "address": "10.0.0.1:6379"}, False),
    ],
)
def test_only_engines_on_this_machine_that_are_slow_to_import_start_early(parts, starts, tmp_path: Path):
    assert isinstance(start_early(config(**parts), tmp_path), EarlyCluster) == starts
