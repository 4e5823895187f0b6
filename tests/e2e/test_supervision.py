"""Processes that die, hang or are stopped are named in time, with what can be found out about them."""

import asyncio
import contextlib
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import ray
import torch
from ray.cluster_utils import Cluster as RayNodes

from posttrain.algos.reduce import token_weights
from posttrain.cluster.actors import ActorHandle, Supervised, actor_class
from posttrain.cluster.calls import gather, wait_until_up
from posttrain.cluster.cluster import Cluster, local_ray
from posttrain.cluster.placement import spread
from posttrain.config import Config
from posttrain.core.errors import ConfigError, DeadlineError, PosttrainError, WorkerError
from posttrain.data.pack import PackedBatch
from posttrain.models.load import ModelSource
from posttrain.train.spec import LossSpec

SOURCE = ModelSource("builtin:tiny")
PATHS = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[2])])


@pytest.fixture(scope="module")
def ray_here():
    with local_ray():
        yield


def config(**cluster):
    train = {"tokens_per_microbatch": 512}
    return Config.model_validate({"command": "rl", "train": train, "cluster": {"device": "cpu", **cluster}})


def long_batch(count=4000):
    """A batch that takes a worker many seconds."""
    ids = [list(range(5, 125))] * count
    batch = PackedBatch.from_sequences(ids, [[True] * len(s) for s in ids])
    batch.loss_weights = token_weights(batch.loss_mask, batch.cu_seqlens, "token-mean")
    return batch


async def outcome(call):
    """(the error of a call, seconds that it took to come)"""
    began = time.monotonic()
    with pytest.raises(PosttrainError) as error:
        await asyncio.wait_for(call, 100)
    return error.value, time.monotonic() - began


def run(actor, function):
    """Run a function in the process of an actor, in the thread that computes."""
    return actor.__ray_call__.remote(function)


# ---------------------------------------------------------------------- trainers


@pytest.mark.parametrize(
    ("how", "within_s"),
    [
        pytest.param(signal.SIGKILL, 10.0, id="killed"),
        pytest.param(signal.SIGSTOP, 20.0, id="stopped", marks=pytest.mark.slow),
    ],
)
async def test_a_trainer_that_is_lost_in_an_update_is_named(ray_here, how, within_s):
    async with Cluster(config(workers=2, silence_deadline_s=10.0)) as cluster:
        group = await cluster.trainer("actor", SOURCE)
        process = group.handles[1].process
        await run(group.actors[1], lambda self: os.write(2, b"the last words of rank 1\n"))
        update = asyncio.create_task(outcome(group.update(long_batch(), LossSpec())))
        await asyncio.sleep(1.0)
        assert not update.done()
        os.kill(process.pid, how)
        lost = time.monotonic()
        error, _ = await update
        assert time.monotonic() - lost < within_s
        if how == signal.SIGKILL:
            assert isinstance(error, WorkerError)
            assert error.message.startswith("actor worker 1 died during update: its process was killed or crashed")
        else:
            assert isinstance(error, DeadlineError)
            silent = "actor worker 1 has said nothing for 10 s (cluster.silence_deadline_s) during update"
            assert error.message.startswith(silent)
            stopped = f"actor worker 1 (process {process.pid}): stopped, by SIGSTOP or a debugger"
            assert stopped in error.message
        assert "the last words of rank 1" in error.message.partition(f"the end of its log, {process.log}:\n")[2]
    # One that is stopped does not hear Ray; it is ended all the same.
    psutil.wait_procs([p] if (p := process.find()) else [], timeout=10)
    assert process.find() is None


async def test_a_trainer_that_hangs_shows_where(ray_here):
    async with Cluster(config(workers=2, step_deadline_s=3.0)) as cluster:
        group = await cluster.trainer("actor", SOURCE)

        def stuck_in_a_place_of_its_own(self):
            time.sleep(60)

        run(group.actors[1], stuck_in_a_place_of_its_own)
        error, seconds = await outcome(group.update(long_batch(8), LossSpec()))
        assert isinstance(error, DeadlineError)
        # The other waits for it in a collective.
        assert error.message.startswith("actor worker 0, actor worker 1 did not finish update within 3 s\n")
        first, second = error.message.split("actor worker 1 (process ")
        assert "posttrain/train/worker.py:" in first
        assert "posttrain/cluster/trainers.py:" in first
        assert "in stuck_in_a_place_of_its_own" in second
        assert "ray/" not in second.partition("the end of its log")[0]
        assert seconds < 15


@pytest.mark.slow
async def test_work_that_keeps_python_from_answering_is_no_silence(ray_here):
    """A long call into C that holds Python's lock: no heartbeat, but a busy CPU."""
    async with Cluster(config(silence_deadline_s=10.0)) as cluster:
        group = await cluster.trainer("actor", SOURCE)

        def hold_the_lock(self):
            re.match("(a|a)*$", "a" * 28 + "b")  # about 17 s on a core of its own
            return True

        assert await gather([run(group.actors[0], hold_the_lock)], group.handles, "a sum", 300.0) == [True]


def test_ray_runs_nothing_that_nobody_asks(ray_here):
    """Neither autoscaler nor dashboard nor a reader of logs: they take a second of every start."""
    running = ""
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # one of an earlier test, which has ended
            running += " ".join(["", *child.cmdline()])
    assert "gcs_server" in running
    assert not [name for name in ("monitor.py", "dashboard/dashboard.py") if name in running]


async def test_calls_run_in_one_thread_with_the_threads_that_were_asked_for(ray_here, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    async with Cluster(config()) as cluster:
        group = await cluster.trainer("actor", SOURCE)

        def where(self):
            import torch

            return threading.get_native_id(), torch.get_num_threads()

        (actor,) = group.actors
        update = asyncio.create_task(group.update(long_batch(40), LossSpec()))
        await asyncio.gather(*(actor.heartbeat.remote() for _ in range(20)))
        found = set(await asyncio.gather(*(run(actor, where) for _ in range(20))))
        await update
        found |= set(await asyncio.gather(*(run(actor, where) for _ in range(20))))
        assert [threads for _, threads in found] == [2]


# ---------------------------------------------------------------------- other nodes


class Sleeper(Supervised):
    def work(self):
        print("at work, far away", file=sys.stderr, flush=True)
        time.sleep(300)


@pytest.fixture
def far(monkeypatch):
    """A Ray cluster of two nodes; on the second there is ``far``."""
    ray.shutdown()
    nodes = RayNodes(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    second = nodes.add_node(num_cpus=1, resources={"far": 1})
    # The nodes' workers do not know where this file is.
    ray.init(address=nodes.address, log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": PATHS}})
    yield nodes, second
    ray.shutdown()
    nodes.shutdown()


async def test_processes_on_another_node_are_looked_at_there(far):
    nodes, second = far
    handle = ActorHandle("sleeper", actor_class(Sleeper).options(num_cpus=0, resources={"far": 0.1}).remote(), 60.0)
    await wait_until_up([handle], 60.0)
    assert handle.process.node != ray.get_runtime_context().get_node_id()
    error, seconds = await outcome(gather([handle.actor.work.remote()], [handle], "a nap", 2.0))
    assert seconds < 20
    assert "waiting here, innermost call first:\n  tests/e2e/test_supervision.py" in error.message.replace(
        os.getcwd() + "/", ""
    )
    assert "at work, far away" in error.message

    call = asyncio.create_task(outcome(gather([handle.actor.work.remote()], [handle], "a nap", 60.0)))
    await asyncio.sleep(1.0)
    nodes.remove_node(second)
    error, seconds = await call
    assert seconds < 60
    assert error.message.startswith("sleeper died during a nap: its node has died")
    assert f"its log: {handle.process.log} on node {handle.process.address}" in error.message


async def test_every_node_without_gpus_gets_a_worker(far):
    for _ in range(3):  # Ray would choose nodes at random
        async with Cluster(config(workers=2)) as cluster:
            group = await cluster.trainer("actor", SOURCE)
            where = [handle.process.node for handle in group.handles]
        assert where[0] == ray.get_runtime_context().get_node_id() != where[1]


async def test_a_node_that_has_just_died_gets_no_worker(far):
    _, second = far
    own = ray.get_runtime_context().get_node_id()
    assert [(await spread(2, index))["scheduling_strategy"].node_id == own for index in (0, 1)] == [True, False]
    second.kill_raylet(check_alive=False)
    assert [node["Alive"] for node in ray.nodes()] == [True, True]  # Ray has not seen it yet
    assert [(await spread(2, index))["scheduling_strategy"].node_id == own for index in (0, 1)] == [True, True]


# ---------------------------------------------------------------------- memory


@pytest.mark.skipif(torch.cuda.is_available(), reason="engines would start")
async def test_engines_without_trainers_share_a_gpu(ray_here):
    ray.shutdown()
    ray.init("local", num_cpus=3, num_gpus=1, include_dashboard=False, log_to_driver=False)
    for fraction, expected in ((0.3, "CUDA"), (0.5, "samplers want 3 GPUs")):
        rollout = {"engine": "hf", "replicas": 3, "memory_fraction": fraction}
        cfg = Config.model_validate({"command": "generate", "cluster": {"device": "cuda"}, "rollout": rollout})
        async with Cluster(cfg) as cluster:
            error, _ = await outcome(cluster.samplers(SOURCE, [0]))
            assert expected in error.message
            assert ("memory_fraction" in (error.hint or "")) == (fraction == 0.5)
            assert [len(group.bundle_specs) for group in cluster.groups.values()] == [1] * (fraction == 0.3)
            if fraction == 0.3:
                assert cluster._shares_gpu  # their caches get a size of their own


async def test_a_cluster_without_capacity_says_so(ray_here):
    ray.shutdown()
    ray.init("local", num_cpus=3, num_gpus=3, include_dashboard=False, log_to_driver=False)
    held = ray.util.placement_group([{"GPU": 2.0, "CPU": 1.0}])
    await held.ready()
    async with Cluster(config(device="cuda", workers=4)) as cluster:
        error, seconds = await outcome(cluster.trainer("actor", SOURCE))
        assert isinstance(error, ConfigError)
        assert error.message == ("trainers want 4 GPUs (with one CPU each); the Ray cluster has 3 GPUs and 3 CPUs")
        assert seconds < 5
    async with Cluster(config(device="cuda", workers=2, start_deadline_s=2.0)) as cluster:
        error, seconds = await outcome(cluster.trainer("actor", SOURCE))
        assert isinstance(error, DeadlineError)
        assert error.message == (
            "trainers want 2 GPUs (with one CPU each), and did not get them within 2 s (cluster.start_deadline_s); "
            "free are 1 of 3 GPUs and 2 of 3 CPUs"
        )
        assert "another run" in error.hint
