"""vLLM in FP8 on the CPU, through its own code for published FP8 checkpoints: what it computes from the start and after
each update, and updates that do not reach all weights. See scripts/test_vllm."""

import asyncio
import pickle

import pytest
import torch

from posttrain.config import RolloutConfig
from posttrain.core.errors import WeightSyncError
from posttrain.core.types import SamplingParams
from posttrain.engines.base import EngineSpec
from posttrain.engines.external import fp8_of
from posttrain.models import fp8
from posttrain.models.builtin import builtin_tokenizer
from posttrain.models.load import ModelSource, load_model
from posttrain.models.weights import as_stored
from posttrain.weight_sync.sender import WeightSender

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]
vllm = pytest.importorskip("vllm")

SOURCE = ModelSource("builtin:tiny")
EOS = builtin_tokenizer("tiny").eos_token_id
IDS = torch.randint(10, 1000, (64,), generator=torch.Generator().manual_seed(3)).tolist()
WEIGHT = "model.layers.1.mlp.down_proj.weight"


def logprobs_of(seed, *, rounded):
    """[T] of a model in bfloat16."""
    model = load_model(SOURCE, dtype=torch.bfloat16, seed=seed)
    if rounded:
        layers = fp8.layers_of(model, stored=False)
        fp8.round_weights(model, layers)
        fp8.round_inputs(model, layers)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        rows = model(torch.tensor([IDS])).logits[0].float().log_softmax(-1)
    return torch.tensor([0.0, *rows[:-1].gather(1, torch.tensor(IDS)[1:, None]).flatten().tolist()])


def gap(scores, expected):
    return float((torch.tensor(scores) - expected).abs().mean())


async def buckets(spec, seed, load, *, without=()):
    """Send the weights of a model as the trainer does, in buckets that part some weights from their scales."""
    model = load_model(SOURCE, dtype=torch.bfloat16, seed=seed)
    stored = as_stored(model, ((name, p.data) for name, p in model.named_parameters()))
    tensors = (found for found in fp8.quantized_weights(stored, fp8_of(spec)) if found[0] not in without)
    sender = WeightSender(tensors, torch.bfloat16, "host", bucket_bytes=1 << 16)
    try:
        while (bucket := sender.next(0)) is not None:
            await load(bucket)
    finally:
        sender.close()


@pytest.fixture(scope="module")
def found():
    """What one engine gave, step by step."""
    from posttrain.engines.vllm import open_engine

    cfg = RolloutConfig(
        engine="vllm", quantization="fp8", kv_tokens=8192, max_prompt_tokens=128, max_response_tokens=128
    )
    spec = EngineSpec(SOURCE, "cpu", "bfloat16", 1, cfg, [EOS], threads=1)

    async def main():
        engine = await open_engine(spec)
        found = {"start": (await engine.score([IDS]))[0]}
        for seed in (2, 3):
            await buckets(spec, seed, engine.load_bucket)
            [found[f"update {seed}"]] = await engine.finish_update(seed, [IDS])
        sample = await engine.generate(IDS[:20], SamplingParams(12, 1.0, seed=5))
        found["sampled"] = sample.logprobs
        found["scored"] = (await engine.score([[*IDS[:20], *sample.ids]]))[0][20:]
        with pytest.raises(WeightSyncError) as error:  # the guard sees what was not sent
            await buckets(spec, 2, engine.load_bucket, without=[WEIGHT + "_scale_inv"])
            await engine.finish_update(4)
        found["not sent"] = error.value.message

        async def unguarded(bucket):  # what vLLM's own loader loses only its parameters tell
            await engine.llm.collective_rpc("load_bucket", args=(pickle.dumps(bucket),))

        for name in (WEIGHT, WEIGHT + "_scale_inv"):
            await buckets(spec, 3, unguarded, without=[name])
            with pytest.raises(Exception, match="new weights did not reach all of") as lost:
                await engine.llm.collective_rpc("check_quantized")
            found[name] = str(lost.value)
        await buckets(spec, 3, unguarded)
        await engine.llm.collective_rpc("check_quantized")
        await engine.close()
        return found

    return asyncio.run(asyncio.wait_for(main(), 600))


@pytest.mark.parametrize(("step", "seed"), [("start", 1), ("update 2", 2), ("update 3", 3)])
def test_it_computes_with_the_quantized_weights_of_the_last_update(found, step, seed):
    """Nearer to a model with rounded numbers than to one without; bfloat16 lies between, too."""
    assert gap(found[step], logprobs_of(seed, rounded=True)) < 0.01
    assert 0.005 < gap(found[step], logprobs_of(seed, rounded=False)) < 0.03
    others = {1, 2, 3} - {seed}
    assert all(gap(found[step], logprobs_of(other, rounded=True)) > 0.1 for other in others)


def test_log_probabilities_of_samples_are_those_of_scores(found):
    assert found["sampled"] == pytest.approx(found["scored"], abs=0.05)


def test_tensors_that_are_not_sent_or_not_loaded_are_told_of(found):
    assert "1 parameters of the engine were not sent" in found["not sent"]
    assert f"did not reach all of {WEIGHT}" in found[WEIGHT]
    assert f"did not reach all of {WEIGHT}_scale_inv" in found[WEIGHT + "_scale_inv"]


def test_weights_that_a_kernel_reads_as_they_came_stay_what_they_are():
    """DeepGEMM on Hopper returns views of weights and scales; on Blackwell it lays scales out anew."""
    from vllm.model_executor.kernels.linear.scaled_mm import deep_gemm

    import posttrain.weight_sync.vllm_worker  # noqa: F401

    layer = torch.nn.Module()
    layer.scale = loaded = torch.nn.Parameter(torch.ones(2, 3))
    deep_gemm.replace_parameter(layer, "scale", loaded.data[None].squeeze(0))
    assert layer.scale is loaded
    deep_gemm.replace_parameter(layer, "scale", loaded.data.t().contiguous().t())
    assert layer.scale is not loaded
