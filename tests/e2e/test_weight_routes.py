"""The ways from trainers to engines of GPUs of their own, as far as a CPU has them: gloo stands for NCCL."""

import asyncio
import contextlib
import os
import signal
import time
from contextlib import asynccontextmanager
from functools import partial

import psutil
import pytest

from posttrain.cluster.cluster import Cluster, local_ray
from posttrain.cluster.synced_samplers import SyncedSamplers
from posttrain.config import Config
from posttrain.core.errors import WeightSyncError
from posttrain.core.types import SamplingParams
from posttrain.models.load import ModelSource
from posttrain.weight_sync.publish import publish
from posttrain.weight_sync.transfers import BroadcastTransfer, HostTransfer

pytestmark = pytest.mark.slow

SOURCE = ModelSource("builtin:tiny")
CHECK = [list(range(5, 45)), [3, 1, 2], list(range(90, 300, 2))]


@pytest.fixture(scope="module", autouse=True)
def ray_here():
    with local_ray():
        yield


def config(transfer="broadcast", seed=0, **more):
    cluster = {"device": "cpu", "workers": 2, "placement": "separate", "weight_transfer": transfer, **more}
    rollout = {"replicas": 2, "kv_tokens": 8192}
    return Config.model_validate({"command": "rl", "run": {"seed": seed}, "cluster": cluster, "rollout": rollout})


async def gap(actor, samplers):
    """Largest difference of any sampler to the trainer."""
    expected = (await actor.score(CHECK)).tolist()
    scored = [[x for s in await sampler.score(CHECK) for x in s] for sampler in samplers]
    return max(abs(a - b) for found in scored for a, b in zip(found, expected, strict=True))


@asynccontextmanager
async def opened(transfer):
    """(trainer of two workers, two engines with other weights, what chooses transfers) of one cluster."""
    async with Cluster(config(transfer)) as cluster:
        actor = await cluster.trainer("actor", SOURCE)
        yield actor, await other_weights(cluster, transfer), cluster.transfers()


@pytest.fixture(scope="module")
def broadcast():
    """``broadcast(test)`` runs a coroutine function with the trainer, the engines and the chooser of one cluster."""
    with asyncio.Runner() as runner:
        cluster = opened("broadcast")
        members = runner.run(cluster.__aenter__())
        yield lambda test: runner.run(test(*members))
        runner.run(cluster.__aexit__(None, None, None))


async def bring(kind, actor, samplers, transfers):
    """Bring the trainer's weights to the engines twice, by this kind of transfer."""
    assert await gap(actor, samplers) > 0.1
    for version in (1, 2):
        metrics = await publish(actor, samplers, transfers, version=version, check=CHECK, tolerance=1e-4)
        assert metrics["sync/check_gap"] < 1e-5
    assert await gap(actor, samplers) < 1e-4
    assert [(await s.generate([1, 2, 3], SamplingParams(4))).version for s in samplers] == [2, 2]
    route = transfers.choose(actor, samplers)
    assert isinstance(route, kind)
    assert (route is transfers.choose(actor, samplers)) == (kind is BroadcastTransfer)  # its group lives on
    assert not reachable_from_elsewhere()


def test_two_workers_bring_their_weights_to_two_engines_through_the_host():
    async def main():
        async with opened("host") as members:
            await bring(HostTransfer, *members)

    asyncio.run(main())


def reachable_from_elsewhere():
    """(process, address) of what accepts connections to other addresses than those of the loopback device: of Ray,
    trainers and engines."""
    here = psutil.Process()
    found = set()
    for process in [here, *here.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            listening = [c.laddr.ip for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN]
            found |= {
                (process.name(), ip) for ip in listening if ip.removeprefix("::ffff:") not in ("127.0.0.1", "::1")
            }
    return found


async def other_weights(cluster, transfer):
    """Engines with other weights than the trainer's."""
    cluster.cfg = config(transfer, seed=7)
    samplers = await cluster.samplers(SOURCE, [0])
    cluster.cfg = config(transfer)
    return samplers


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_one_that_is_lost_in_a_broadcast_is_replaced(how, monkeypatch):
    """The other waits for it in the middle of a broadcast, and so does the trainer; all go on without it."""

    async def main():
        async with Cluster(config(silence_deadline_s=10.0, step_deadline_s=15.0)) as cluster:
            actor = await cluster.trainer("actor", SOURCE)
            sync = SyncedSamplers(cluster, actor, [actor])
            pool = await sync.start(SOURCE, [0])
            await sync.publish(1, CHECK)
            doomed, other = pool.samplers
            load = doomed.load_bucket

            async def dying(bucket, data=None):
                os.kill(doomed.handle.process.pid, how)
                await load(bucket, data)

            monkeypatch.setattr(doomed, "load_bucket", dying)
            metrics = await sync.publish(2, CHECK)
            assert metrics["sync/check_gap"] < 1e-5
            assert pool.deaths == 1
            replaced, same = pool.samplers
            assert same is other
            assert replaced is not doomed
            assert [(await s.generate([1, 2, 3], SamplingParams(4))).version for s in pool.samplers] == [2, 2]
            assert await gap(actor, pool.samplers) < 1e-4
            await sync.publish(3, CHECK)
            await pool.close()

    asyncio.run(main())


def test_two_workers_bring_their_weights_to_two_engines_by_broadcast(broadcast):
    broadcast(partial(bring, BroadcastTransfer))


def test_an_engine_that_refuses_weights_leaves_nobody_waiting(broadcast, monkeypatch):
    async def main(actor, samplers, transfers):
        options = {"check": CHECK, "tolerance": 1e-4}
        await publish(actor, samplers, transfers, version=3, **options)

        async def refuse(bucket, data=None):
            raise WeightSyncError("no")

        began = time.monotonic()
        with monkeypatch.context() as patch, pytest.raises(WeightSyncError, match=r"^no$"):
            patch.setattr(samplers[0], "load_bucket", refuse)
            await publish(actor, samplers, transfers, version=4, **options)
        await publish(actor, samplers, transfers, version=5, **options)
        assert time.monotonic() - began < 20  # and not cluster.silence_deadline_s
        assert await gap(actor, samplers) < 1e-4

    broadcast(main)
