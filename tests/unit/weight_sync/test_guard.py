"""Requests and updates of an engine: who waits for whom, and what an update must bring."""

import asyncio

import pytest

from posttrain.core.errors import RunError, WeightSyncError
from posttrain.weight_sync import guard as module
from posttrain.weight_sync.broadcast import RankLost
from posttrain.weight_sync.buckets import Bucket
from posttrain.weight_sync.guard import UpdateGuard

SHAPES = {"a": (2, 3), "b": (4,)}


def bucket(number, shapes, update="first"):
    entries = tuple((name, "float32", shape, 0) for name, shape in shapes.items())
    return Bucket(entries, update=update, number=number)


class Engine:
    """Requests run until they are aborted or released."""

    def __init__(self):
        self.guard = UpdateGuard("it", SHAPES, self.abort)
        self.ends = asyncio.Event()
        self.aborts = 0

    async def abort(self):
        self.aborts += 1
        self.ends.set()

    async def request(self):
        async with self.guard.request() as version:
            await self.ends.wait()
            return version

    async def update(self, version, shapes=SHAPES):
        async with self.guard.loading(bucket(0, shapes, f"update {version}")):
            self.ends.clear()
        async with self.guard.finish(version):
            assert not self.guard.running


async def test_update_aborts_requests_and_holds_new_ones():
    engine = Engine()
    old = [asyncio.create_task(engine.request()) for _ in range(3)]
    await asyncio.sleep(0)
    assert len(engine.guard.running) == 3
    async with engine.guard.loading(bucket(0, {"a": (2, 3)})):
        assert await asyncio.gather(*old) == [0, 0, 0]
        new = asyncio.create_task(engine.request())
        await asyncio.sleep(0.01)
        assert not engine.guard.running
    async with engine.guard.loading(bucket(1, {"b": (4,)})):
        pass
    assert engine.aborts == 1
    async with engine.guard.finish(7):
        assert not new.done()
    assert await new == 7


async def test_an_engine_without_weights_has_requests_wait_for_the_first_update():
    engine = Engine()
    engine.guard = UpdateGuard("it", SHAPES, engine.abort, empty=True)
    waiting = asyncio.create_task(engine.request())
    await asyncio.sleep(0.01)
    assert not engine.guard.running
    await engine.update(3)
    engine.ends.set()
    assert (await waiting, engine.aborts) == (3, 0)


async def test_requests_that_are_kept_outlive_updates_and_new_ones_wait_for_their_end():
    engine = Engine()
    pauses = []
    engine.guard = UpdateGuard("it", SHAPES, lambda: asyncio.sleep(0, pauses.append(engine.guard.version)), keeps=True)
    old = asyncio.create_task(engine.request())
    await asyncio.sleep(0)
    for version in (7, 8):
        async with engine.guard.loading(bucket(0, SHAPES, f"update {version}")):
            new = asyncio.create_task(engine.request())
            await asyncio.sleep(0.01)
            assert len(engine.guard.running) == version - 6  # without the new one
        async with engine.guard.finish(version):
            assert not old.done()
        await asyncio.sleep(0.01)
    assert pauses == [0, 7]
    engine.ends.set()
    assert (await old, await new) == (0, 8)


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
async def test_loads_buckets_in_order_one_at_a_time(order):
    """Whatever order they come in: the first waits for requests to come back, and a load takes its time."""
    engine = Engine()
    engine.guard = UpdateGuard("it", SHAPES, lambda: asyncio.sleep(0))  # it takes a while to send requests back
    old = asyncio.create_task(engine.request())
    await asyncio.sleep(0)
    loaded = []

    async def load(number):
        name = "ab"[number]
        async with engine.guard.loading(bucket(number, {name: SHAPES[name]})):
            loaded.append(f"{name} begins, {len(engine.guard.running)} run")
            await asyncio.sleep(0.01 * (2 - number))
            loaded.append(f"{name} ends")

    buckets = []
    for number in order:
        buckets.append(asyncio.create_task(load(number)))
        await asyncio.sleep(0.01)
    assert not loaded
    engine.ends.set()
    await asyncio.gather(old, *buckets)
    assert loaded == ["a begins, 0 run", "a ends", "b begins, 0 run", "b ends"]


async def test_bucket_fails_at_once_after_one_that_failed():
    """Whether it came before the failure or after it; and the next update begins with its own first bucket."""
    engine = Engine()
    with pytest.raises(RankLost):
        async with engine.guard.loading(bucket(0, {"a": (2, 3)})):
            second = asyncio.create_task(engine.guard.loading(bucket(1, {"b": (4,)})).__aenter__())
            await asyncio.sleep(0)
            raise RankLost("sampler 1 was lost")
    with pytest.raises(RankLost):
        await second
    with pytest.raises(RankLost):
        await engine.guard.loading(bucket(2, {})).__aenter__()
    await engine.update(4)
    assert engine.guard.version == 4


async def test_new_update_replaces_one_that_was_abandoned():
    """Another engine died, and nobody told this one: its buckets count from their own first, and one load ends before
    the other begins."""
    engine = Engine()
    loaded, old = [], asyncio.Event()

    async def load(number, update, until=None):
        name = "ab"[number % 2]
        async with engine.guard.loading(bucket(number, {name: SHAPES[name]}, update)):
            loaded.append(f"{update} {name} begins")
            await (until.wait() if until else asyncio.sleep(0.01))
            loaded.append(f"{update} {name} ends")

    await load(0, "old")
    stuck, waits = asyncio.create_task(load(1, "old", old)), asyncio.create_task(load(3, "old"))
    await asyncio.sleep(0)
    new = [asyncio.create_task(load(number, "new")) for number in (1, 0)]
    await asyncio.sleep(0.01)
    with pytest.raises(RunError, match="it got a bucket of an update that is over"):
        await waits
    old.set()
    await asyncio.gather(*new)
    assert loaded[2:] == [
        *("old b begins", "old b ends"),
        *("new a begins", "new a ends", "new b begins", "new b ends"),
    ]
    for late in (stuck, load(2, "old")):
        with pytest.raises(RunError, match="of an update that is over"):
            await late
    async with engine.guard.finish(5):
        pass
    assert engine.guard.version == 5
    with pytest.raises(RunError, match="of an update that is over"):
        await load(0, "new")


async def test_aborts_nothing_without_requests():
    engine = Engine()
    await engine.update(1)
    assert engine.aborts == 0
    assert engine.guard.version == 1


@pytest.mark.parametrize(("shapes", "message"), [
    ({"c": (1,)}, r"the trainer sent c \(1,\); the engine has None"),
    ({"a": (3, 2)}, r"the trainer sent a \(3, 2\); the engine has \(2, 3\)"),
    ({"b": (4,)}, "1 parameters of the engine were not sent, among them a"),
])  # fmt: skip
async def test_rejects_incomplete_update_until_a_complete_one(shapes, message):
    engine = Engine()
    engine.ends.set()
    with pytest.raises(WeightSyncError, match=message):
        await engine.update(1, shapes)
    with pytest.raises(RunError, match=f"it has no complete weights: {message}"):
        await engine.request()
    with pytest.raises(WeightSyncError, match="were not sent"):  # what came before the failure does not count
        await engine.update(2, {"a": (2, 3)} if "b" in shapes else {"b": (4,)})
    await engine.update(3)
    engine.ends.set()
    assert await engine.request() == 3


async def test_failed_update_fails_waiting_requests():
    engine = Engine()
    async with engine.guard.loading(bucket(0, {"a": (2, 3)})):
        waiting = asyncio.create_task(engine.request())
        await asyncio.sleep(0)
    with pytest.raises(WeightSyncError):
        await engine.update(1, {"c": (1,)})
    with pytest.raises(RunError, match="no complete weights"):
        await waiting


async def test_requests_keep_waiting_while_an_update_restarts():
    """Another engine was lost in the middle of a broadcast: the living get all weights once more."""
    engine = Engine()
    with pytest.raises(RankLost):
        async with engine.guard.loading(bucket(0, {"a": (2, 3)})):
            waiting = asyncio.create_task(engine.request())
            await asyncio.sleep(0)
            raise RankLost("sampler 1 was lost")
    await asyncio.sleep(0.01)
    assert not waiting.done()
    await engine.update(4)
    engine.ends.set()
    assert await waiting == 4


async def test_requests_that_do_not_come_back_end_the_update(monkeypatch):
    monkeypatch.setattr(module, "_ABORT_DEADLINE_S", 0.05)
    engine = Engine()
    engine.guard = UpdateGuard("it", SHAPES, lambda: asyncio.sleep(0))
    task = asyncio.create_task(engine.request())
    await asyncio.sleep(0)
    with pytest.raises(WeightSyncError, match=r"it still had 1 requests 0\.05 s after they were aborted"):
        await engine.update(1)
    task.cancel()


async def test_what_is_frozen_is_loaded_once_until_its_memory_is_given_up():
    engine = Engine()
    engine.guard = UpdateGuard("it", SHAPES, engine.abort, frozen=["b"])
    rest = {"a": SHAPES["a"]}
    with pytest.raises(WeightSyncError, match="1 parameters of the engine were not sent, among them b"):
        await engine.update(1, rest)
    await engine.update(2)
    await engine.update(3, rest)
    with pytest.raises(WeightSyncError, match="among them a"):
        await engine.update(4, {"b": SHAPES["b"]})
    await engine.update(5, rest)
    engine.guard.lost_weights()
    with pytest.raises(WeightSyncError, match="among them b"):
        await engine.update(6, rest)
