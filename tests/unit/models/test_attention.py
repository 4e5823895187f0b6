"""Packed and paged attention against plain transformers, each sequence alone."""

import asyncio
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from posttrain.config import RolloutConfig
from posttrain.core.errors import RunError, WeightSyncError
from posttrain.core.types import SamplingParams
from posttrain.data.pack import PackedBatch
from posttrain.engines.hf import EngineSpec, HFSampler
from posttrain.models.attention import Ragged, ragged_attention
from posttrain.models.attention_kernels import choose
from posttrain.models.load import ModelSource, load_model
from posttrain.train.model import PackedLM
from posttrain.weight_sync.sender import WeightSender

SDPA = choose("sdpa", torch.device("cpu"), torch.float32)
VOCABULARY = 96
STOP = 95
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "max_position_embeddings": 2048,
    # Far from uniform, so that greedy decoding has no ties and a wrong mask cannot hide.
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": STOP,
    "pad_token_id": STOP,
}


def make_folder(kind, path):
    """A Hugging Face folder: Qwen2 with 4 query heads on 2 key heads, Llama with 6 on 3 and a head size of its own."""
    torch.manual_seed(0)
    if kind == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(num_attention_heads=4, num_key_value_heads=2, **COMMON))
        for layer in model.model.layers:  # biases start at zero, which would hide a mistake in them
            for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
                torch.nn.init.normal_(projection.bias, std=0.2)
    else:
        config = LlamaConfig(
            num_attention_heads=6, num_key_value_heads=3, head_dim=12, tie_word_embeddings=True, **COMMON
        )
        model = LlamaForCausalLM(config)
    model.generation_config.eos_token_id = STOP
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module", params=["qwen2", "llama"])
def folder(request, tmp_path_factory):
    return make_folder(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory):
    """For what does not depend on the architecture."""
    return make_folder("qwen2", tmp_path_factory.mktemp("qwen2"))


def sequences(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCABULARY - 1, (n,), generator=generator).tolist() for n in lengths]


def packed_logits(model, ids):
    batch = PackedBatch.from_sequences(ids, [[True] * len(s) for s in ids])
    ragged = Ragged.build(batch.cu_seqlens, torch.device("cpu"), SDPA)
    return (
        model(input_ids=batch.input_ids[None], position_ids=batch.position_ids[None], use_cache=False, ragged=ragged)
        .logits[0]
        .split(batch.lengths)
    )


@pytest.mark.parametrize("plain", ["eager", "sdpa"])
@pytest.mark.parametrize(
    "lengths",
    [
        [7],
        [5, 6, 8],  # one group, with padding
        [1, 2, 3, 64, 33, 1, 17, 40, 9, 128],  # many groups
        [1, 1, 1],
    ],
)
def test_packed_is_each_sequence_alone(folder, plain, lengths):
    ids = sequences(lengths)
    model = load_model(ModelSource(str(folder)), dtype=torch.float32)
    reference = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=plain)
    generator = torch.Generator().manual_seed(1)
    loss = expected_loss = torch.zeros(())
    for sequence, logits in zip(ids, packed_logits(model, ids), strict=True):
        alone = reference(input_ids=torch.tensor([sequence])).logits[0]
        torch.testing.assert_close(logits, alone, rtol=1e-4, atol=1e-4)
        weights = torch.randn(alone.shape, generator=generator)
        loss = loss + (weights * logits.log_softmax(-1)).sum()
        expected_loss = expected_loss + (weights * alone.log_softmax(-1)).sum()
    loss.backward()
    expected_loss.backward()
    expected = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        wanted = expected[name].grad
        torch.testing.assert_close(
            parameter.grad, wanted, rtol=1e-3, atol=1e-4 * float(wanted.abs().max() + 1), msg=name
        )


def test_no_sequence_sees_another(qwen2):
    model = load_model(ModelSource(str(qwen2)), dtype=torch.float32)
    ids = sequences([20, 30, 40])
    before = packed_logits(model, ids)
    changed = packed_logits(model, [sequences([20], seed=9)[0], ids[1], sequences([40], seed=9)[0]])
    assert torch.equal(before[1], changed[1])
    assert not torch.allclose(before[0], changed[0])


def test_padding_is_under_half_of_any_group():
    lengths = torch.tensor([1, 2, 3, 4, 5, 8, 9, 16, 17, 31, 33, 64, 65, 100])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    groups = Ragged.build(offsets, torch.device("cpu"), SDPA).groups
    assert sorted(torch.cat([g.tokens for g in groups]).tolist()) == list(range(int(offsets[-1])))
    for group in groups:
        assert len(group.slots) * 2 > group.rows * group.length
        assert len(set(group.slots.tolist())) == len(group.slots)


def test_what_it_cannot_do_is_an_error():
    module, x = SimpleNamespace(), torch.zeros(1, 2, 3, 4)
    ragged = Ragged.build(torch.tensor([0, 3]), torch.device("cpu"), SDPA)
    with pytest.raises(ValueError, match="ragged"):
        ragged_attention(module, x, x, x, None)
    with pytest.raises(ValueError, match="neither a mask"):
        ragged_attention(module, x, x, x, torch.ones(3, 3), ragged=ragged)
    with pytest.raises(ValueError, match="neither a mask"):
        ragged_attention(module, x, x, x, None, dropout=0.1, ragged=ragged)


# ---------------------------------------------------------------------- the engine


def spec(folder, **changes):
    """Return the spec of an engine; ``changes`` are keys of `[rollout]` or of the spec itself."""
    of_spec = ("stop_token_ids", "truncates", "replica", "seed", "threads")
    own = {key: changes.pop(key) for key in of_spec if key in changes}
    rollout = RolloutConfig(**({"kv_tokens": 8192, "max_concurrent": 64} | changes))
    values = {"source": ModelSource(str(folder)), "device": "cpu", "dtype": "float32", "seed": 0}
    return EngineSpec(**(values | {"stop_token_ids": [STOP]} | own), rollout=rollout)


async def load(engine, weights):
    sender = WeightSender(weights.items(), torch.float32, "host")
    await engine.load_bucket(sender.next(0))
    assert sender.next(1) is None
    sender.close()


def with_engine(engine_spec, body):
    """Run ``body(engine)``, a coroutine, with an engine that is closed afterwards."""

    async def main():
        engine = HFSampler(engine_spec)
        try:
            return await body(engine)
        finally:
            await engine.close()

    return asyncio.run(main())


def greedy_reference(folder, prompt, new_tokens):
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    out = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=new_tokens, pad_token_id=STOP)
    return out[0, len(prompt) :].tolist()


def trainer_logprobs(folder, ids, temperature):
    lm = PackedLM(load_model(ModelSource(str(folder)), dtype=torch.float32))
    batch = PackedBatch.from_sequences(ids, [[True] * len(s) for s in ids])
    predict = batch.loss_mask.nonzero().flatten()
    ragged = Ragged.build(batch.cu_seqlens, torch.device("cpu"), SDPA)
    column = torch.zeros(batch.num_tokens)
    with torch.no_grad():
        column[predict] = lm(
            batch.input_ids, batch.position_ids, predict - 1, batch.input_ids[predict], ragged, temperature
        )[0]
    return [part.tolist() for part in column.split(batch.lengths)]


def test_top_p_and_top_k_are_of_each_request(folder):
    """They leave one token, two, or all of them."""
    prompt, count = sequences([31])[0], 40

    async def body(engine):
        params = [SamplingParams(count, 1.0, top_k=1), SamplingParams(count, 1.0, top_p=1e-4)]
        params += [SamplingParams(count, 1.0, top_k=2)] * 8 + [SamplingParams(count, 1.0)] * 7
        params += [SamplingParams(count, 1.0, top_k=VOCABULARY + 1)]
        return await asyncio.gather(*(engine.generate(prompt, p) for p in params))

    found = with_engine(spec(folder, truncates=True), body)
    assert found[0].ids == found[1].ids == greedy_reference(folder, prompt, count)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    ranks = []
    for sample in found[2:]:
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *sample.ids]])).logits[0, len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(sample.ids)[:, None])
        ranks.append((logits > chosen).sum(1).max().item())
    assert max(ranks[:8]) == 1
    assert max(ranks[8:]) > 1
    whole = [[*prompt, *sample.ids] for sample in found[10:]]
    for sample, expected in zip(found[10:], trainer_logprobs(folder, whole, 1.0), strict=True):
        assert sample.logprobs == pytest.approx(expected[len(prompt) :], abs=1e-4)


def test_a_request_with_a_seed_samples_the_same_in_any_company(folder):
    """And with the probabilities that the trainer finds; requests without one go on as before."""
    prompts = sequences([5, 31, 40, 7])
    params = [SamplingParams(25, 0.8, seed=seed) for seed in (1, 2, 3, 3)]

    async def together(engine):
        unseeded = [engine.generate(prompts[0], SamplingParams(25)) for _ in range(6)]
        seeded = [engine.generate(p, x) for p, x in zip(prompts, params, strict=True)]
        found = await asyncio.gather(*unseeded, *seeded)
        return found[:6], found[6:], engine.seeded.seeds

    async def alone(engine):
        return [await engine.generate(p, x) for p, x in reversed(list(zip(prompts, params, strict=True)))]

    unseeded, seeded, left = with_engine(spec(folder, seed=5), together)
    assert [s.ids for s in seeded] == [s.ids for s in reversed(with_engine(spec(folder, replica=3), alone))]
    assert len({tuple(s.ids) for s in unseeded}) == 6
    assert not left
    whole = [[*prompt, *sample.ids] for prompt, sample in zip(prompts, seeded, strict=True)]
    expected = trainer_logprobs(folder, whole, 0.8)
    for prompt, sample, logprobs in zip(prompts, seeded, expected, strict=True):
        assert sample.logprobs == pytest.approx(logprobs[len(prompt) :], abs=1e-4)


def test_greedy_tokens_are_those_of_generate(folder):
    prompts = sequences([1, 31, 32, 33, 100])
    lengths = [40, 1, 33, 5, 12]

    async def body(engine):
        params = [SamplingParams(n, temperature=0.0) for n in lengths]
        return await asyncio.gather(*(engine.generate(p, x) for p, x in zip(prompts, params, strict=True)))

    for prompt, count, sample in zip(prompts, lengths, with_engine(spec(folder), body), strict=True):
        expected = greedy_reference(folder, prompt, count)
        assert sample.ids == expected
        assert sample.finish_reason == ("stop" if expected[-1] == STOP else "length")
        assert len(sample.logprobs) == len(sample.ids)
        assert sample.version == 0


def test_greedy_stops_at_a_stop_token(qwen2):
    """A token that greedy decoding reaches anyway, declared a stop token."""
    prompt = sequences([12])[0]
    free = greedy_reference(qwen2, prompt, 24)
    stop = free[min(9, len(free) - 1)]

    async def body(engine):
        return await engine.generate(prompt, SamplingParams(24, temperature=0.0))

    sample = with_engine(spec(qwen2, stop_token_ids=[stop]), body)
    assert sample.ids == free[: free.index(stop) + 1]
    assert sample.finish_reason == "stop"


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(
    ("lengths", "kv_tokens"),
    [
        ([1, 40, 64, 90, 33, 33, 5], 8192),
        ([40] * 12, 320),  # far more than fits: requests are put off, moved out and taken back
        ([900] * 6, 8192),  # more than one batch of prompt tokens: a prompt is read in two parts
    ],
)
def test_engine_score_and_trainer_agree(folder, lengths, kv_tokens, temperature):
    prompts = sequences(lengths)
    # The same prompt several times shares its cache blocks, the way a group of episodes does.
    prompts = [*prompts, prompts[-1], prompts[-1]]

    async def body(engine):
        params = SamplingParams(60, temperature)
        samples = await asyncio.gather(*(engine.generate(p, params) for p in prompts))
        whole = [p + s.ids for p, s in zip(prompts, samples, strict=True)]
        return samples, whole, await engine.score(whole)

    samples, whole, scored = with_engine(spec(folder, kv_tokens=kv_tokens), body)
    trained = trainer_logprobs(folder, whole, temperature)
    assert len({tuple(s.ids) for s in samples}) > len(samples) // 2
    for score, train in zip(scored, trainer_logprobs(folder, whole, 1.0), strict=True):
        assert score[0] == train[0] == 0.0
        torch.testing.assert_close(score, train, rtol=0, atol=1e-4)
    for prompt, sample, train in zip(prompts, samples, trained, strict=True):
        torch.testing.assert_close(sample.logprobs, train[len(prompt) :], rtol=0, atol=1e-4)


def test_an_engine_that_slept_has_the_weights_that_it_was_given(qwen2):
    prompt = sequences([50])[0]

    async def body(engine):
        params = SamplingParams(20, temperature=0.0)
        before = await engine.generate(prompt, params)
        given = {name: p.detach().clone() for name, p in engine.parameters.items()}
        running = asyncio.create_task(engine.generate(prompt, SamplingParams(1500)))
        async with asyncio.timeout(60):
            while not (so_far := engine._so_far(next(iter(engine.futures), ""))) or len(so_far.logprobs) < 5:
                await asyncio.sleep(0.005)
        assert not running.done()
        await engine.sleep()
        assert sum(p.untyped_storage().nbytes() for p in engine.model.parameters()) == 0
        waiting = asyncio.create_task(engine.generate(prompt, params))
        await engine.wake()
        await load(engine, given)
        await engine.finish_update(4)
        cut = await running
        return before, cut, await waiting, await engine.score([prompt + cut.ids])

    before, cut, after, scored = with_engine(spec(qwen2, stop_token_ids=[VOCABULARY + 5]), body)  # it never comes
    # What was sampled before is not lost, nor what it was sampled with.
    assert 5 <= len(cut.ids) == len(cut.logprobs) < 1500
    assert (cut.finish_reason, cut.version) == ("abort", 0)
    torch.testing.assert_close(cut.logprobs, scored[0][len(prompt) :], rtol=0, atol=1e-4)
    assert (after.ids, after.version) == (before.ids, 4)


def test_new_weights_change_samples_and_drop_the_cache(qwen2):
    prompt = sequences([70])[0]

    async def body(engine):
        params = SamplingParams(30, temperature=0.0)
        before = await engine.generate(prompt, params)
        changed = {name: p.detach() * 1.05 for name, p in engine.parameters.items()}
        await load(engine, changed)
        await engine.finish_update(7)
        after = await engine.generate(prompt, params)
        return before, after, await engine.score([prompt + after.ids])

    before, after, _ = with_engine(spec(qwen2), body)
    assert (before.version, after.version) == (0, 7)
    model = AutoModelForCausalLM.from_pretrained(qwen2, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.05)
    expected = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=30, pad_token_id=STOP)
    assert after.ids == expected[0, len(prompt) :].tolist()


def test_wrong_or_missing_weights_are_errors(qwen2):
    async def body(engine):
        names = sorted(engine.parameters)
        with pytest.raises(WeightSyncError, match="no_such_weight"):
            await load(engine, {"no_such_weight": torch.zeros(2)})
        with pytest.raises(WeightSyncError, match=names[0]):
            await load(engine, {names[0]: torch.zeros(1, 2)})
        await load(engine, {name: engine.parameters[name].clone() for name in names[1:]})
        with pytest.raises(WeightSyncError, match=f"1 parameter.*{names[0]}"):
            await engine.finish_update(1)
        assert engine.guard.version == 0

    with_engine(spec(qwen2), body)


def test_a_cancelled_request_frees_its_place(qwen2):
    """With room for one request, the next is served only after the cancelled one has gone."""
    prompt = sequences([16])[0]

    async def body(engine):
        task = asyncio.create_task(engine.generate(prompt, SamplingParams(1500)))
        await asyncio.sleep(0.3)
        assert not task.done()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return await asyncio.wait_for(engine.generate(prompt, SamplingParams(4, temperature=0.0)), 20.0)

    sample = with_engine(spec(qwen2, max_concurrent=1, stop_token_ids=[VOCABULARY + 5]), body)
    assert len(sample.ids) == 4


def test_unsupported_sampling_is_refused(qwen2):
    async def body(engine):
        for params in (SamplingParams(4, top_p=0.9), SamplingParams(4, top_k=5)):
            with pytest.raises(RunError, match="top_p and top_k"):
                await engine.generate([1, 2], params)

    with_engine(spec(qwen2), body)


def test_a_request_that_cannot_fit_fails_alone(qwen2):
    """It would otherwise end the engine, and every later request with it."""
    ids = sequences([255, 20])

    async def body(engine):
        with pytest.raises(RunError, match="kv_tokens"):
            await engine.generate(ids[0], SamplingParams(1))
        with pytest.raises(RunError, match="kv_tokens"):
            await engine.generate(ids[1], SamplingParams(236))
        largest = await asyncio.gather(*(engine.generate(ids[0][:n], SamplingParams(224 - n)) for n in (1, 100, 223)))
        assert [len(s.ids) for s in largest] == [223, 124, 1]
        return await asyncio.wait_for(engine.generate(ids[1], SamplingParams(5, temperature=0.0)), 20.0)

    engine_spec = spec(qwen2, kv_tokens=256, stop_token_ids=[VOCABULARY + 5])  # a token that never comes
    sample = with_engine(engine_spec, body)
    expected = greedy_reference(qwen2, ids[1], 5)
    assert sample.ids[: len(expected)] == expected


def test_an_engine_that_breaks_says_so_and_an_update_revives_it(qwen2):
    prompt = sequences([20])[0]

    async def body(engine):
        with pytest.raises(RunError, match="engine"):
            await asyncio.wait_for(engine.generate([VOCABULARY + 1000], SamplingParams(5)), 20.0)
        with pytest.raises(RunError, match="engine"):
            await asyncio.wait_for(engine.generate(prompt, SamplingParams(5)), 20.0)
        await load(engine, {name: p.clone() for name, p in engine.parameters.items()})
        await engine.finish_update(1)
        return await asyncio.wait_for(engine.generate(prompt, SamplingParams(5, temperature=0.0)), 20.0)

    assert with_engine(spec(qwen2), body).ids == greedy_reference(qwen2, prompt, 5)


def test_replicas_sample_differently_and_each_repeats_itself(qwen2):
    prompt = sequences([20])[0]

    async def body(engine):
        return (await engine.generate(prompt, SamplingParams(30))).ids

    first = with_engine(spec(qwen2, replica=0), body)
    assert with_engine(spec(qwen2, replica=0), body) == first
    assert with_engine(spec(qwen2, replica=1), body) != first


LEFT_OPEN = """
import sys

from posttrain.weight_sync.sender import WeightSender
from posttrain.models.load import ModelSource
from posttrain.config import RolloutConfig
from posttrain.engines.hf import EngineSpec, HFSampler

source = ModelSource("builtin:tiny")
rollout = RolloutConfig(kv_tokens=1024, max_concurrent=4)
engine = HFSampler(EngineSpec(source, "cpu", "float32", 0, rollout, stop_token_ids=[0]))
print("open", *sorted({"peft", "torchao"} & sys.modules.keys()), flush=True)
"""


@pytest.fixture(scope="module")
def left_open():
    """A process that has opened an engine and ended."""
    return subprocess.run([sys.executable, "-c", LEFT_OPEN], capture_output=True, text=True, timeout=60)


@pytest.mark.slow
def test_a_process_that_ends_without_closing_its_engine_ends(left_open):
    """A worker whose node is gone closes nothing. Waiting for the generation thread it would keep the GPU for ever."""
    assert (left_open.returncode, left_open.stdout[:4]) == (0, "open"), left_open.stderr


@pytest.mark.slow
def test_an_engine_imports_no_package_that_its_model_does_not_need(left_open):
    """torchao and peft take half a second of every start."""
    assert left_open.stdout == "open\n"
