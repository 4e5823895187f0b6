"""An engine in a process of its own, as the driver sees it."""

import asyncio
import time
from types import SimpleNamespace

import pytest
import torch

from posttrain.cluster.cluster import Cluster, local_ray
from posttrain.config import Config
from posttrain.core.errors import RunError, WorkerError
from posttrain.core.types import Prompt, SamplingParams
from posttrain.models.builtin import builtin_tokenizer
from posttrain.models.load import ModelSource
from posttrain.rewards.compose import Rewarder
from posttrain.rewards.grade import GraderPool
from posttrain.rl.batch import pack, usable
from posttrain.rollout.pool import SamplerPool
from posttrain.rollout.source import TrajectorySource
from posttrain.runs.episodes import episode_context
from posttrain.runs.preflight import open_model

SOURCE = ModelSource("builtin:tiny")
TOKENIZER = builtin_tokenizer("tiny")
EOS = TOKENIZER.eos_token_id

CONFIG = Config.model_validate(
    {
        "command": "rl",
        "run": {"seed": 1},
        "rollout": {"replicas": 2, "kv_tokens": 4096, "max_response_tokens": 48, "max_turns": 2, "tools": ["gsm8k"]},
    }
)


@pytest.fixture(scope="module")
def cluster():
    with local_ray():
        cluster = Cluster(CONFIG)
        asyncio.run(cluster.__aenter__())
        yield cluster
        asyncio.run(cluster.__aexit__(None, None, None))


@pytest.fixture(scope="module")
def samplers(cluster):
    return asyncio.run(cluster.samplers(SOURCE, [EOS]))


def prompt(length, seed=0):
    return torch.randint(1000, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


async def running(sampler):
    """Requests that the engine's process has at work."""
    return await sampler.actor.__ray_call__.remote(lambda self: len(self.tasks))


async def test_many_requests_at_once(samplers):
    sampler = samplers[0]
    prompts = [prompt(3 + i % 40, seed=i) for i in range(200)]
    lengths = [1 + i % 17 for i in range(200)]
    samples = await asyncio.gather(
        *(sampler.generate(p, SamplingParams(n)) for p, n in zip(prompts, lengths, strict=True))
    )
    for sample, count in zip(samples, lengths, strict=True):
        assert 1 <= len(sample.ids) <= count
        assert len(sample.logprobs) == len(sample.ids)
        assert sample.finish_reason == ("stop" if sample.ids[-1] == EOS else "length")
        assert sample.version == 0
    # Every answer went to the one who asked: it continues that prompt with these probabilities.
    scored = await sampler.score([p + s.ids for p, s in zip(prompts, samples, strict=True)])
    for one, sample, start in zip(scored, samples, prompts, strict=True):
        torch.testing.assert_close(one[len(start) :], sample.logprobs, rtol=0, atol=1e-4)
    assert not sampler.waiting
    assert await running(sampler) == 0


async def test_requests_travel_together(samplers):
    sampler = samplers[0]
    await asyncio.gather(*(sampler.generate(prompt(4, seed=i), SamplingParams(4)) for i in range(50)))
    started = time.monotonic()
    await asyncio.gather(*(sampler.generate(prompt(4, seed=i), SamplingParams(4)) for i in range(50)))
    together = time.monotonic() - started
    started = time.monotonic()
    for i in range(10):
        await sampler.generate(prompt(4, seed=i), SamplingParams(4))
    assert together < time.monotonic() - started


async def test_greedy_is_the_same_on_every_replica_and_sampling_is_not(samplers):
    start, greedy = prompt(12), SamplingParams(20, temperature=0.0)
    first, second = await asyncio.gather(*(s.generate(start, greedy) for s in samplers))
    assert first.ids == second.ids
    first, second = await asyncio.gather(*(s.generate(start, SamplingParams(20)) for s in samplers))
    assert first.ids != second.ids


async def test_cancelling_aborts_the_request(samplers):
    sampler = samplers[0]
    tasks = [asyncio.create_task(sampler.generate(prompt(8, seed=i), SamplingParams(3000))) for i in range(5)]
    short = asyncio.create_task(sampler.generate(prompt(8, seed=9), SamplingParams(3)))
    await short
    assert await running(sampler) == 5
    for task in tasks:
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(r, asyncio.CancelledError) for r in results)
    assert not sampler.waiting
    deadline = time.monotonic() + 10
    while await running(sampler) and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    assert await running(sampler) == 0
    # The engine is at rest, and serves the next one.
    assert len((await asyncio.wait_for(sampler.generate(prompt(8), SamplingParams(3)), 20)).ids) >= 1


class Recorded:
    """An actor's handle that notes the requests on their way to it."""

    def __init__(self, actor):
        self.actor, self.requests = actor, []
        self.submit = SimpleNamespace(remote=self.pass_on)

    def pass_on(self, requests):
        self.requests += requests
        return self.actor.submit.remote(requests)

    def __getattr__(self, name):
        return getattr(self.actor, name)


async def test_a_request_cancelled_before_it_was_sent(samplers, monkeypatch):
    sampler = samplers[0]
    monkeypatch.setattr(sampler, "actor", Recorded(sampler.actor))
    task = asyncio.create_task(sampler.generate(prompt(8), SamplingParams(3000)))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not sampler.waiting
    assert len((await sampler.generate(prompt(8), SamplingParams(3))).ids) >= 1
    assert len(sampler.actor.requests) == 1
    assert await running(sampler) == 0


async def test_an_error_reaches_the_request_that_caused_it(samplers):
    sampler = samplers[0]
    good = asyncio.create_task(sampler.generate(prompt(8), SamplingParams(5)))
    with pytest.raises(RunError, match="top_p and top_k need the processors"):
        await sampler.generate(prompt(8), SamplingParams(5, top_p=0.5))
    with pytest.raises(RunError, match=r"does not fit into rollout\.kv_tokens = 4096") as error:
        await sampler.generate(prompt(8), SamplingParams(5000))
    assert "max_response_tokens" in error.value.hint
    assert len((await good).ids) >= 1


async def test_a_handle_works_in_one_event_loop_after_another(samplers):
    """A run's validation, and tests, may use a loop of their own."""

    def elsewhere():
        return asyncio.run(samplers[1].generate(prompt(5), SamplingParams(4)))

    assert len((await asyncio.to_thread(elsewhere)).ids) >= 1
    assert len((await samplers[1].generate(prompt(5), SamplingParams(4))).ids) >= 1


async def test_episodes_through_real_engines(samplers):
    source, tokenizer = open_model(CONFIG)
    env = episode_context(CONFIG, source, tokenizer)
    rewarder = Rewarder(CONFIG.reward, GraderPool(), CONFIG.rollout.max_response_tokens)
    pool = TrajectorySource(SamplerPool(samplers), env, rewarder)
    prompts = [
        Prompt(i, [{"role": "user", "content": f"What is {i} + 1?"}], "openai/gsm8k", str(i + 1)) for i in range(6)
    ]
    groups = await pool.sample(prompts, 4)
    assert [len(g) for g in groups] == [4] * 6
    episodes = [t for g in groups for t in g]
    assert all(t.error is None for t in episodes)
    assert {t.stop_reason for t in episodes} <= {"stop", "length", "max_turns"}
    assert max(t.response_length for t in episodes) <= 48
    assert len({tuple(t.tokens.tolist()) for t in episodes}) == len(episodes)
    # The engine that sampled an episode, asked again, gives the same probabilities to every sampled token.
    scored = await samplers[0].score([t.tokens.tolist() for t in episodes])
    for scores, episode in zip(scored, episodes, strict=True):
        own = torch.from_numpy(episode.loss_mask)
        torch.testing.assert_close(
            torch.tensor(scores)[own], torch.from_numpy(episode.logprobs)[own], rtol=0, atol=1e-4
        )
    assert pack(usable(groups)).num_sequences == 24


async def test_a_broken_engine_fails_its_requests_and_says_why(samplers):
    """A token that the model does not have ends the engine: those at work and those who come later are told."""
    sampler = samplers[1]
    waiting = asyncio.create_task(sampler.generate(prompt(8), SamplingParams(3000)))
    await asyncio.sleep(0.2)
    with pytest.raises(WorkerError, match="the embedded engine failed"):
        await asyncio.wait_for(sampler.generate([10**6], SamplingParams(5)), 20)
    with pytest.raises(WorkerError, match="the embedded engine failed"):
        await asyncio.wait_for(waiting, 20)
    with pytest.raises(WorkerError, match="the embedded engine has stopped"):
        await asyncio.wait_for(sampler.generate(prompt(8), SamplingParams(5)), 20)


async def test_a_killed_engine_fails_its_requests_and_is_named(samplers):
    sampler = samplers[0]
    tasks = [asyncio.create_task(sampler.generate(prompt(8, seed=i), SamplingParams(3000))) for i in range(3)]
    await asyncio.sleep(0.3)
    sampler.actor.__ray_call__.remote(lambda self: __import__("os")._exit(1))
    results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 30)
    failed = [r for r in results if isinstance(r, WorkerError)]  # a fast machine may have ended one before
    assert failed
    assert all(r.finish_reason == "stop" for r in results if r not in failed)
    assert all("sampler 0 died" in str(error) for error in failed)
    with pytest.raises(WorkerError, match="sampler 0 died"):
        await asyncio.wait_for(sampler.generate(prompt(8), SamplingParams(5)), 30)
