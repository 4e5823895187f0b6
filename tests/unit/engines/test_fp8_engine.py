"""The embedded engine in FP8: it computes what rounded weights and activations give, from each update anew, and an
update that does not reach every weight does not pass."""

import asyncio

import pytest
import torch

from posttrain.config import RolloutConfig
from posttrain.core.errors import WeightSyncError
from posttrain.core.types import SamplingParams
from posttrain.engines.base import EngineSpec
from posttrain.engines.hf import HFSampler
from posttrain.models import fp8
from posttrain.models.load import ModelSource, load_model
from posttrain.weight_sync.sender import WeightSender

STOP = 0
IDS = torch.randint(10, 1000, (70,), generator=torch.Generator().manual_seed(3)).tolist()
MODELS = ["builtin:tiny", "builtin:tiny-moe"]


def whole_model(path, seed, *, rounded):
    model = load_model(ModelSource(path), dtype=torch.float32, seed=seed)
    if rounded:
        layers = fp8.layers_of(model, stored=False)
        fp8.round_weights(model, layers)
        fp8.round_inputs(model, layers)
    model.set_attn_implementation("eager")
    return model


def logprobs_of(model):
    with torch.no_grad():
        rows = model(torch.tensor([IDS])).logits[0].log_softmax(-1)
    return [0.0, *rows[:-1].gather(1, torch.tensor(IDS)[1:, None]).flatten().tolist()]


def run(path, work, **rollout):
    async def main():
        cfg = RolloutConfig(engine="hf", quantization="fp8", kv_tokens=2048, **rollout)
        engine = HFSampler(EngineSpec(ModelSource(path), "cpu", "float32", 0, cfg, [STOP], threads=1))
        try:
            return await work(engine)
        finally:
            await engine.close()

    return asyncio.run(asyncio.wait_for(main(), 120))


def sent(path, seed, *, without=()):
    """The tensors of an update, as the trainer sends them."""
    model = load_model(ModelSource(path), dtype=torch.float32, seed=seed)
    layers = fp8.layers_of(model, stored=False)
    weights = ((name, p.data) for name, p in model.named_parameters())
    return [(n, t) for n, t in fp8.quantized_weights(weights, layers) if n not in without]


async def load(engine, tensors, bucket_bytes=1 << 16):
    sender = WeightSender(tensors, torch.float32, "host", bucket_bytes=bucket_bytes)
    try:
        while (bucket := sender.next(0)) is not None:
            await engine.load_bucket(bucket)
    finally:
        sender.close()


def close_to(expected, within=2e-3):
    """A rounded activation may fall to the other side where the order of a sum differs in its last bit."""
    return pytest.approx(expected, abs=within)


@pytest.mark.parametrize("path", MODELS)
def test_it_scores_and_samples_as_rounded_numbers_do_from_the_start_and_after_each_update(path):
    async def work(engine):
        found = [(await engine.score([IDS]))[0]]
        for version in (1, 2):
            await load(engine, sent(path, version))
            found += await engine.finish_update(version, [IDS])
        sample = await engine.generate(IDS[:20], SamplingParams(12, 1.0, seed=5))
        [again] = await engine.score([[*IDS[:20], *sample.ids]])
        return found, sample.logprobs, again[20:]

    found, sampled, again = run(path, work)
    for version, scores in enumerate(found):
        assert scores == close_to(logprobs_of(whole_model(path, version, rounded=True)))
        plain = logprobs_of(whole_model(path, version, rounded=False))
        gap = sum(abs(a - b) for a, b in zip(scores, plain, strict=True)) / len(plain)
        assert 2e-3 < gap < 0.05
    assert sampled == close_to(again)


def test_a_weight_and_its_scales_may_come_in_different_buckets():
    """Buckets of one tensor each."""

    async def work(engine):
        await load(engine, sent(MODELS[0], 1), bucket_bytes=1)
        return (await engine.finish_update(1, [IDS]))[0]

    assert run(MODELS[0], work) == close_to(logprobs_of(whole_model(MODELS[0], 1, rounded=True)))


WEIGHT = "model.layers.1.mlp.down_proj.weight"


@pytest.mark.parametrize(
    ("without", "message"),
    [
        ([WEIGHT], f"1 parameters of the engine were not sent, among them {WEIGHT}"),
        ([WEIGHT + "_scale_inv"], f"the trainer sent {WEIGHT} without scales"),
        ([WEIGHT, WEIGHT + "_scale_inv"], "2 parameters of the engine were not sent"),
    ],
)
def test_an_update_without_a_tensor_is_refused(without, message):
    async def work(engine):
        await load(engine, sent(MODELS[0], 1, without=without))
        await engine.finish_update(1)

    with pytest.raises(WeightSyncError, match=message):
        run(MODELS[0], work)


def test_scales_of_an_update_that_was_given_up_are_not_used():
    async def work(engine):
        await load(engine, [t for t in sent(MODELS[0], 1) if t[0].endswith("_scale_inv")])
        await load(engine, sent(MODELS[0], 2, without=[WEIGHT + "_scale_inv"]))

    with pytest.raises(WeightSyncError, match=f"the trainer sent {WEIGHT} without scales"):
        run(MODELS[0], work)


def test_weights_in_the_trainers_type_are_refused():
    model = load_model(ModelSource(MODELS[0]), dtype=torch.float32, seed=1)

    async def work(engine):
        await load(engine, [(name, p.data) for name, p in model.named_parameters()])

    with pytest.raises(WeightSyncError, match="without scales"):
        run(MODELS[0], work)


def test_one_request_at_a_time_gives_the_same_whatever_else_runs():
    """`rollout.batch_invariant`: scales of activations are of single tokens."""

    async def alone_and_together(engine):
        alone = await engine.generate(IDS[:30], SamplingParams(20, 1.0, seed=1))
        others = [engine.generate(IDS[n : n + 25], SamplingParams(20, 1.0, seed=n)) for n in range(4)]
        together = await asyncio.gather(engine.generate(IDS[:30], SamplingParams(20, 1.0, seed=1)), *others)
        return alone, together[0]

    alone, together = run(MODELS[0], alone_and_together, batch_invariant=True)
    assert alone.ids == together.ids
    assert alone.logprobs == together.logprobs
