"""New weights amid the requests of the embedded engine, which keep their KV cache (`rollout.keep_kv`)."""

import asyncio

import pytest
import torch

from posttrain.config import RolloutConfig
from posttrain.core.errors import WorkerError
from posttrain.core.types import SamplingParams
from posttrain.engines.base import EngineSpec
from posttrain.engines.hf import BLOCK, HFSampler
from posttrain.models.load import ModelSource, load_model
from posttrain.weight_sync.sender import WeightSender
from tests.helpers.kept_cache import by_hand
from tests.helpers.standstill import stopped_when

SOURCE = ModelSource("builtin:tiny")
STOP = 0
TOKENS = 80


def whole_model(seed):
    model = load_model(SOURCE, dtype=torch.float32, seed=seed)
    model.set_attn_implementation("eager")
    return model


MODELS = [whole_model(seed) for seed in (0, 1, 2)]
"""What the engine starts with, and what it gets."""


def prompt(length, seed=0):
    return torch.randint(10, 1000, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def run(work, **rollout):
    async def main():
        cfg = RolloutConfig(engine="hf", staleness=1, keep_kv=True, kv_tokens=2048, **rollout)
        engine = HFSampler(EngineSpec(SOURCE, "cpu", "float32", 0, cfg, [STOP], threads=1))
        try:
            return await work(engine)
        finally:
            if engine.manager is not None:
                await engine.close()

    return asyncio.run(asyncio.wait_for(main(), 120))


async def stopped_at(engine, tokens, request="r0"):
    """Wait until a request has so many tokens, as ``stopped_when`` does."""

    def there():
        so_far = engine._so_far(request)
        return so_far is not None and len(so_far.generated_tokens) == tokens

    return await stopped_when(engine, there)


async def load(engine, model):
    weights = [(name, p.data) for name, p in model.named_parameters()]
    sender = WeightSender(weights, torch.float32, "host")
    try:
        while (bucket := sender.next(0)) is not None:
            await engine.load_bucket(bucket)
    finally:
        sender.close()


async def update(engine, version, stopped):
    """Bring MODELS[version] while the generation thread is stopped."""
    await load(engine, MODELS[version])
    stopped.set()
    check = prompt(20, seed=9)
    [scores] = await engine.finish_update(version, [check])
    assert scores == close_to([0.0, *by_hand(check[:1], check[1:], {0: MODELS[version]})])


def close_to(expected):
    return pytest.approx(expected, abs=2e-5)


def sampling(seed):
    return SamplingParams(TOKENS, 1.0, seed=seed)


def test_a_request_goes_on_with_its_kv_cache_and_each_token_has_its_version():
    given = prompt(3 * BLOCK + 5)

    async def work(engine):
        request = asyncio.create_task(engine.generate(given, sampling(1)))
        await update(engine, 1, await stopped_at(engine, 30))
        await update(engine, 2, await stopped_at(engine, 50))
        return await request

    sample = run(work)
    assert (sample.finish_reason, len(sample.ids)) == ("length", TOKENS)
    assert sample.versions == [0] * 30 + [1] * 20 + [2] * 30
    assert sample.logprobs == close_to(by_hand(given, sample.ids, {0: MODELS[0], 30: MODELS[1], 50: MODELS[2]}))
    anew = by_hand(given, sample.ids, {0: MODELS[2]})  # what it would be with a cache that is computed anew
    assert max(abs(a - b) for a, b in zip(sample.logprobs[50:], anew[50:], strict=True)) > 0.01


def test_a_request_that_waited_for_its_turn_is_sampled_by_the_new_weights_alone():
    givens = [prompt(40, seed=1), prompt(40, seed=2)]

    async def work(engine):
        requests = [asyncio.create_task(engine.generate(given, sampling(7))) for given in givens]
        await update(engine, 1, await stopped_at(engine, 30))
        return await asyncio.gather(*requests)

    first, second = run(work, max_concurrent=1)
    assert set(first.versions) == {0, 1}
    assert second.versions == [1] * TOKENS
    assert second.logprobs == close_to(by_hand(givens[1], second.ids, {0: MODELS[1]}))


def test_no_request_takes_a_prefix_that_older_weights_computed():
    """Of one that has ended before the update, of one that goes on, and of what this one computes afterwards."""
    given = prompt(2 * BLOCK)

    async def work(engine):
        ended = await engine.generate(prompt(3 * BLOCK, seed=3), sampling(3))
        request = asyncio.create_task(engine.generate(given, sampling(1)))
        await update(engine, 1, await stopped_at(engine, 2 * BLOCK, "r1"))
        kept = await request
        cache = engine.kept._processor.cache
        shared = cache._total_prefix_length
        asked = [prompt(3 * BLOCK, seed=3), given, [*given, *kept.ids, 5], [*given, *kept.ids, 5]]
        later = [(ids, await engine.generate(ids, sampling(4))) for ids in asked]
        return ended, kept, later, cache._total_prefix_length - shared, cache

    ended, kept, later, shared, cache = run(work)
    assert set(ended.versions) == {0}
    assert kept.versions == [0] * 2 * BLOCK + [1] * (TOKENS - 2 * BLOCK)
    for ids, sample in later:
        assert set(sample.versions) == {1}
        assert sample.logprobs == close_to(by_hand(ids, sample.ids, {0: MODELS[1]}))
    # What the new weights have computed is shared: the prompt by the third, all of the third by the fourth.
    assert shared == 2 * BLOCK + (2 * BLOCK + TOKENS) // BLOCK * BLOCK
    assert cache.get_num_free_blocks() == cache.num_blocks


def test_requests_that_share_their_prompt_keep_it_and_free_it_once():
    given = prompt(4 * BLOCK + 1)

    async def work(engine):
        first = asyncio.create_task(engine.generate(given, sampling(1)))
        (await stopped_at(engine, 5)).set()
        others = [asyncio.create_task(engine.generate(given, sampling(seed))) for seed in (2, 3)]
        await update(engine, 1, await stopped_at(engine, 20, "r2"))
        cache = engine.kept._processor.cache
        assert cache._total_prefix_length == 2 * 4 * BLOCK
        others[1].cancel()
        samples = await asyncio.gather(first, others[0])
        await engine.generate(prompt(5), sampling(4))  # the library cancels between two steps
        return samples, cache

    samples, cache = run(work)
    for sample in samples:
        [(cut, version)] = sample.updates
        assert 0 < cut < TOKENS
        assert version == 1
        assert sample.logprobs == close_to(by_hand(given, sample.ids, {0: MODELS[0], cut: MODELS[1]}))
    assert cache.get_num_free_blocks() == cache.num_blocks


def test_an_engine_that_is_closed_amid_an_update_fails_its_requests():
    async def work(engine):
        request = asyncio.create_task(engine.generate(prompt(40), sampling(1)))
        stopped = await stopped_at(engine, 30)
        await load(engine, MODELS[1])
        stopped.set()
        assert not request.done()
        await engine.close()
        with pytest.raises(WorkerError, match="the embedded engine failed"):
            await request

    run(work)
