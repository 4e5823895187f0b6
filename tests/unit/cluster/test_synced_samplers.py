"""Samplers of an asynchronous run: who may use the trainers when, and the versions that new samplers get."""

import asyncio
from types import SimpleNamespace

import pytest

from posttrain.cluster import synced_samplers
from posttrain.cluster.synced_samplers import SyncedSamplers
from posttrain.config import Config
from posttrain.core.errors import WorkerError
from posttrain.core.types import Sample, SamplingParams

PARAMS = SamplingParams(4)


class Replica:
    """A sampler that answers with the version that it was sent, until it dies."""

    def __init__(self, index):
        self.index, self.version, self.dead = index, None, False
        self.trainers = ()

    async def generate(self, prompt_ids, params, images=()):
        await asyncio.sleep(0)
        if self.dead:
            raise WorkerError("it died")
        return Sample([self.index], [0.0], "stop", self.version)

    async def sleep(self):
        self.asleep = True


class Trainer:
    def __init__(self):
        self.freed, self.moves = 0, []

    async def free_cache(self):
        self.freed += 1

    async def onload(self):
        self.moves.append("onload")

    async def offload(self):
        self.moves.append("offload")


@pytest.fixture
def opened(monkeypatch):
    """``opened(**rollout)``: (samplers of two replicas that can be replaced, log of what used the trainers)"""
    log = []
    using = []

    async def publish(source, receivers, transfers, *, version, replace, free_gpus, frozen, **_):
        assert not using, "weights were sent while trainers were at work, or twice at once"
        using.append("publish")
        for receiver in list(receivers):
            await asyncio.sleep(0)
            if receiver.dead and replace is not None:
                await replace(receiver, WorkerError("it died"))
            else:
                receiver.version = version
        await free_gpus()
        log.append((version, [receiver.index for receiver in receivers], frozen))
        using.remove("publish")
        return {}

    monkeypatch.setattr(synced_samplers, "publish", publish)

    async def samplers(source, stop, *, weights_follow):
        assert weights_follow
        return [Replica(0), Replica(1)]

    async def sampler(source, stop, index, *, weights_follow):
        assert weights_follow
        await asyncio.sleep(0)
        return Replica(index + 10)

    async def make(trainer=None, placement="colocated", offload=False, **rollout):
        sections = {"rollout": {"staleness": 1, "replicas": 2} | rollout, "train": {"offload": offload}}
        cfg = Config.model_validate({"command": "rl", "cluster": {"placement": placement}} | sections)
        cluster = SimpleNamespace(
            cfg=cfg, samplers=samplers, sampler=sampler, transfers=lambda: None, sync_tolerance=1.0
        )
        synced = SyncedSamplers(cluster, None, [trainer or Trainer()])
        await synced.start(None, [])
        await synced.publish(0, [])
        return synced

    return make, log, using


async def ask(pool):
    with pool.session() as session:
        return await session.generate([1], PARAMS)


async def test_a_sampler_that_dies_while_trainers_work_is_replaced_by_the_next_update(opened):
    make, log, using = opened
    synced = await make()
    await synced.to_trainers()
    using.append("trainers")
    first = synced.pool.samplers[0]
    first.dead = True
    assert (await ask(synced.pool)).version == 0  # at the other one
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(synced.pool.samplers) == 1
    using.remove("trainers")
    await synced.publish(1, [])
    assert sorted(replica.index for replica in synced.pool.samplers) == [1, 10]
    assert {replica.version for replica in synced.pool.samplers} == {1}
    assert all(version == 1 for version, *_ in log[1:])


@pytest.mark.parametrize("noticed", [False, True])
async def test_a_sampler_that_dies_amid_an_update_is_replaced_after_it(opened, noticed):
    """Whether an episode notices it first, or the update does."""
    make, _, _ = opened
    synced = await make()
    await synced.to_trainers()
    synced.pool.samplers[0].dead = True
    updating = asyncio.create_task(synced.publish(1, []))
    if noticed:
        assert (await ask(synced.pool)).version in (0, 1)
    await asyncio.wait_for(updating, 10)
    assert {replica.version for replica in synced.pool.samplers} == {1}
    assert sorted(replica.index for replica in synced.pool.samplers) == [1, 10]
    await synced.to_trainers()


async def test_without_updates_in_flight_new_weights_wait_for_the_turns_in_progress(opened):
    make, log, _ = opened
    synced = await make(in_flight_updates=False)
    await synced.to_trainers()
    gate = asyncio.Event()

    async def late(prompt_ids, params, images=()):
        version = replica.version
        await gate.wait()
        return Sample([0], [0.0], "stop", version)

    replica = synced.pool.samplers[0]
    replica.generate = late
    turn = asyncio.create_task(ask(synced.pool))
    await asyncio.sleep(0)
    updating = asyncio.create_task(synced.publish(1, []))
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(log) == 1
    gate.set()
    await asyncio.wait_for(updating, 10)
    assert (await turn).version == 0
    assert replica.version == 1


@pytest.mark.parametrize(("placement", "freed"), [("colocated", 2), ("separate", 0)])
async def test_trainers_keep_their_memory_where_no_engine_needs_it(opened, placement, freed):
    """Else they give it back before an update, and the buffers after."""
    trainer = Trainer()
    await opened[0](trainer, placement)
    assert trainer.freed == freed


async def test_offloaded_trainers_come_back_whenever_they_work_or_send(opened):
    trainer = Trainer()
    synced = await opened[0](trainer, offload=True, sleep=True, staleness=0)
    assert trainer.moves == ["offload"]  # when engines have the first weights
    await synced.to_trainers()
    assert all(replica.asleep for replica in synced.pool.samplers)
    assert trainer.moves == ["offload", "onload"]
    await synced.publish(1, [])
    await synced.publish(2, [])  # they did not work in between
    assert trainer.moves == ["offload", "onload", "offload", "onload", "offload"]


@pytest.mark.parametrize(("rollout", "again"), [({}, False), ({"sleep": True, "staleness": 0}, True)], ids=str)
async def test_frozen_weights_are_sent_again_where_engines_have_slept(opened, rollout, again):
    make, log, _ = opened
    synced = await make(**rollout)
    await synced.to_trainers()
    await synced.publish(1, [])
    assert log == [(0, [0, 1], True), (1, [0, 1], again)]


async def test_frozen_weights_are_sent_to_an_engine_that_is_new(opened):
    make, log, _ = opened
    synced = await make()
    await synced.pool.replace(synced.pool.samplers[0], WorkerError("it died"))
    await synced.publish(1, [])
    assert log[1:] == [(0, [10], True), (1, [10, 1], False)]


async def test_where_engines_sleep_all_get_weights_again_when_one_is_replaced(opened):
    """They gave up theirs, so that the trainers had room to send."""
    make, log, _ = opened
    synced = await make(sleep=True, staleness=0)
    first, second = synced.pool.samplers
    await synced.pool.replace(first, WorkerError("it died"))
    assert log[1:] == [(0, [10, 1], True)]
    assert second.asleep
