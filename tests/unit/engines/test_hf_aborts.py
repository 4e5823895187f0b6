"""Requests of the embedded engine that a weight update cuts off."""

import asyncio

import pytest
import torch

from posttrain.config import RolloutConfig
from posttrain.core.types import SamplingParams
from posttrain.engines.base import EngineSpec
from posttrain.engines.hf import HFSampler
from posttrain.models.load import ModelSource
from tests.helpers.standstill import stopped_when

SPEC = EngineSpec(ModelSource("builtin:tiny"), "cpu", "float32", 0, RolloutConfig(engine="hf", kv_tokens=320), [1023])
"""With room for a few requests, and a stop token that never comes."""


def moved_out(engine):
    """Return the tokens of each request that has lost its place in the cache: those of its prompt, and its samples."""
    waiting = engine.manager.batch_processor.scheduler.waiting_requests
    return {name: state.initial_tokens for name, state in waiting.items() if state._true_initial_tokens}


async def test_a_request_that_a_full_cache_moved_out_returns_what_it_has_sampled():
    engine = HFSampler(SPEC)
    prompts = [torch.randint(10, 1000, (40,), generator=torch.Generator().manual_seed(i)).tolist() for i in range(8)]
    try:
        async with asyncio.timeout(120):
            requests = [asyncio.create_task(engine.generate(prompt, SamplingParams(200))) for prompt in prompts]
            go_on = await stopped_when(engine, lambda: bool(moved_out(engine)))
            waiting = {int(name.removeprefix("r")): tokens for name, tokens in moved_out(engine).items()}
            await engine.guard.close()
            go_on.set()
            cut = await asyncio.gather(*requests)
            scored = await engine.score([[*p, *s.ids] for p, s in zip(prompts, cut, strict=True)])
    finally:
        await engine.close()
    assert {sample.finish_reason for sample in cut} == {"abort"}
    assert waiting
    for i, tokens in waiting.items():
        assert [*prompts[i], *cut[i].ids] == tokens
        assert cut[i].ids
        assert cut[i].logprobs == pytest.approx(scored[i][40:], abs=1e-4)
