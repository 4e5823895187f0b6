"""What travels between the driver and an engine's actor: messages of many requests, replies of many answers."""

import asyncio

import numpy as np

from posttrain.cluster.actors import ActorHandle
from posttrain.cluster.samplers import RemoteSampler, SamplerActor
from posttrain.core.types import Sample, SamplingParams

PARAMS = SamplingParams(4)


class Engine:
    """Answers with the request's last token, each when it is told to."""

    def __init__(self):
        self.asked = {}

    async def generate(self, prompt_ids, params, images=()):
        told = self.asked[int(prompt_ids[-1])] = asyncio.Event()
        await told.wait()
        return Sample([int(prompt_ids[-1])], [-0.5], "stop", 0)


class InProcess(SamplerActor):
    """The actor without a process of Ray."""

    def __init__(self, engine):
        self.engine, self.tasks = engine, {}
        self.answers, self.delivered, self.answered = [], 0, asyncio.Event()


class Calls:
    """The handle on an actor of this process; ``messages`` are how many requests each message has had."""

    def __init__(self, actor):
        self._actor, self.messages = actor, []

    def __getattr__(self, name):
        return Call(getattr(self._actor, name), self.messages if name == "submit" else None)


class Call:
    def __init__(self, method, sizes):
        self._method, self._sizes = method, sizes

    def remote(self, *args):
        if self._sizes is not None:
            self._sizes.append(len(args[0]))
        self._future = asyncio.run_coroutine_threadsafe(self._method(*args), asyncio.get_running_loop())
        return self

    def future(self):
        return self._future


async def until(true):
    async with asyncio.timeout(60):
        while not true():
            await asyncio.sleep(0)


def test_a_reply_keeps_its_answers_while_others_are_added():
    """Ray serializes a reply in another thread, while the event loop adds answers."""

    async def play():
        engine = Engine()
        actor = InProcess(engine)
        await actor.submit([(i, np.array([i], np.int32).tobytes(), PARAMS, ()) for i in range(2)])
        await until(lambda: len(engine.asked) == 2)
        engine.asked[0].set()
        first = await actor.collect(0)
        engine.asked[1].set()
        await until(lambda: len(actor.answers) == 2)
        assert [request for request, _ in first] == [0]
        assert [request for request, _ in await actor.collect(1)] == [1]

    asyncio.run(play())


def test_an_actor_forgets_requests_that_have_ended_or_were_aborted():
    async def play():
        engine = Engine()
        actor = InProcess(engine)
        await actor.submit([(i, np.array([i], np.int32).tobytes(), PARAMS, ()) for i in range(3)])
        await actor.abort([2, 7])  # one before its first step, and one that is not known
        await until(lambda: len(engine.asked) == 2)
        await actor.abort([1])
        engine.asked[0].set()
        await until(lambda: not actor.tasks)
        assert [request for request, _ in await actor.collect(0)] == [0]

    asyncio.run(play())


def test_the_first_requests_of_many_leave_while_others_are_made():
    async def play():
        engine = Engine()
        calls = Calls(InProcess(engine))
        sampler = RemoteSampler(ActorHandle("sampler 0", calls, 60.0), deadline_s=60.0)
        tasks = [asyncio.create_task(sampler.generate([7, i], PARAMS)) for i in range(150)]
        await until(lambda: len(engine.asked) == 150)
        assert calls.messages == [64, 64, 22]
        for told in engine.asked.values():
            told.set()
        assert [(await task).ids for task in tasks] == [[i] for i in range(150)]

    asyncio.run(play())
