"""Prompts that sequences share: the same gradient from fewer tokens."""

import random

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from posttrain.algos.reduce import token_weights
from posttrain.cluster.actors import ActorHandle
from posttrain.cluster.trainers import TrainerGroup
from posttrain.config import Config, LoraConfig
from posttrain.data.pack import PackedBatch, place, place_by_prompt
from posttrain.data.prompts import Prompts
from posttrain.models import lora, recurrent
from posttrain.models.attention_kernels import choose
from posttrain.models.load import ModelSource, build, implementations
from posttrain.models.weights import load_weights, materialize
from posttrain.train.flops import sharing_cost
from posttrain.train.microbatch import MicroBatch
from posttrain.train.model import PackedLM, PackedValues
from posttrain.train.parallel import parallelize

CPU = torch.device("cpu")
TINY = ModelSource("builtin:tiny")
SDPA = choose("sdpa", CPU, torch.float32)
SIZES = {"vocab_size": 128, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
MLP = SIZES | {"intermediate_size": 48, "initializer_range": 0.1}
GROUPED = MLP | {"num_key_value_heads": 2}
CONFIGS = {
    "qwen2": Qwen2Config(**GROUPED),
    "llama": LlamaConfig(**GROUPED, head_dim=12),
    "qwen3": Qwen3Config(**GROUPED, head_dim=16),
    "qwen3_moe": Qwen3MoeConfig(**GROUPED, head_dim=8, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2),
    "mixtral": MixtralConfig(**GROUPED, num_local_experts=4, num_experts_per_tok=2),
    "gpt2": GPT2Config(vocab_size=128, n_embd=32, n_layer=2, n_head=4),
    "gpt_neox": GPTNeoXConfig(**MLP),
    "granite": GraniteConfig(**GROUPED),
    "mistral": MistralConfig(**GROUPED, head_dim=8, sliding_window=8),
    "gemma2": Gemma2Config(**GROUPED, head_dim=8, sliding_window=8, attn_logit_softcapping=5.0),
    "qwen3_next": Qwen3NextConfig(
        **GROUPED, head_dim=8, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2,
        shared_expert_intermediate_size=24, layer_types=["linear_attention", "full_attention"],
        linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
    ),
}  # fmt: skip


def grouped_batch(seed, prompts=5, longest=60):
    """Groups of 1 to 6 sequences: prompts of one token and of many, turns of tools within responses."""
    rng = random.Random(seed)
    ids, masks = [], []
    for number in range(prompts):
        prompt = [rng.randrange(128) for _ in range(1 if number == 0 else rng.randrange(3, longest))]
        for _ in range(rng.randint(1, 6)):
            turns = [(rng.randint(1, 12), owned) for owned in (True, False, True)[: rng.choice([1, 3])]]
            ids.append(prompt + [rng.randrange(128) for n, _ in turns for _ in range(n)])
            masks.append([False] * len(prompt) + [owned for n, owned in turns for _ in range(n)])
    order = list(range(len(ids)))
    rng.shuffle(order)
    batch = PackedBatch.from_sequences([ids[i] for i in order], [masks[i] for i in order])
    generator = torch.Generator().manual_seed(seed)
    batch.loss_weights = token_weights(batch.loss_mask, batch.cu_seqlens, "token-mean")
    batch.advantages = torch.randn(batch.num_tokens, generator=generator)
    return batch


def model(name, kind=PackedLM):
    torch.manual_seed(0)
    inner = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.float32, **implementations(CONFIGS[name]))
    recurrent.separate_sequences(inner)
    lm = kind(inner)
    lm.eval()
    if kind is PackedValues:
        torch.nn.init.normal_(lm.model.get_output_embeddings().weight)
    return lm


def adapted():
    inner = build(TINY, dtype=torch.float32).requires_grad_(False)
    lora.inject(inner, LoraConfig(rank=3), dtype=torch.float32)
    materialize(inner, CPU)
    load_weights(inner, TINY, seed=0)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in (p for p in inner.parameters() if p.requires_grad):
            parameter += torch.randn(parameter.shape, generator=generator) * 0.02
    return PackedLM(inner)


def whole(batch):
    return place(batch.lengths, ranks=1, token_budget=10_000)


def by_prompt(batch, budget=10_000, ranks=1):
    return place_by_prompt(Prompts.of(batch), ranks=ranks, token_budget=budget)


def passes(lm, batch, placement):
    """Log-probabilities in the order of the batch, the gradient of their weighted sum, and tokens that were run."""
    lm.zero_grad()
    columns, tokens = [], 0
    for of_rank in placement.shards(batch):
        columns.append([])
        for part in of_rank:
            micro = MicroBatch.build(part, CPU, SDPA)
            tokens += len(micro.input_ids)
            values = lm(micro.input_ids, micro.position_ids, micro.rows, micro.targets, micro.ragged, 0.8)[0]
            (values * micro.weights * micro.advantages).sum().backward()
            column = torch.zeros(part.num_tokens)
            column[micro.predict] = values.detach()
            columns[-1].append(column)
    grads = {name: p.grad.clone() for name, p in lm.named_parameters() if p.grad is not None}
    return placement.gather(columns, batch) * batch.loss_mask, grads, tokens


def assert_same(lm, batch, *placements):
    logprobs, grads, tokens = passes(lm, batch, whole(batch))
    assert tokens == batch.num_tokens
    size = norm(grads)
    for placement in placements:
        found, found_grads, computed = passes(lm, batch, placement)
        torch.testing.assert_close(found, logprobs, rtol=0, atol=1e-5)
        assert computed < tokens
        assert found_grads.keys() == grads.keys()
        differences = {name: found_grads[name] - grad for name, grad in grads.items()}
        assert max(float(d.abs().max()) for d in differences.values()) <= 1e-6
        assert norm(differences) <= 1e-6 * size
    assert size > 0.1


def norm(grads):
    return float(sum(grad.double().square().sum() for grad in grads.values()).sqrt())


@pytest.mark.parametrize("name", CONFIGS)
def test_the_gradient_is_that_of_whole_sequences(name):
    lm = model(name)
    for seed in range(3):
        batch = grouped_batch(seed)
        assert_same(lm, batch, by_prompt(batch), by_prompt(batch, budget=90), by_prompt(batch, budget=90, ranks=2))


@pytest.mark.parametrize("how", ["selective", "full", "LoRA", "values"])
def test_it_is_so_with_all_that_is_put_on_a_model(how):
    lm = adapted() if how == "LoRA" else model("qwen2", PackedValues if how == "values" else PackedLM)
    if how in ("selective", "full"):
        parallelize(lm, None, dtype=torch.float32, activation_checkpointing=how, compiled=False)
    batch = grouped_batch(1)
    assert_same(lm, batch, by_prompt(batch), by_prompt(batch, budget=90))


def test_a_sequence_sees_its_prompt_and_no_other_sequence():
    lm, batch = model("qwen2"), grouped_batch(4)
    before = passes(lm, batch, by_prompt(batch))[0].split(batch.lengths)
    prompts = Prompts.of(batch)
    group = max(prompts.groups, key=len)
    start = int(batch.cu_seqlens[group[0]])
    batch.input_ids[start + prompts.lengths[group[0]] - 1] ^= 1  # the last token of one response
    after = passes(lm, batch, by_prompt(batch))[0].split(batch.lengths)
    changed = [b for b in range(batch.num_sequences) if not torch.equal(before[b], after[b])]
    assert changed == [group[0]]


def test_prompts_end_before_what_predicts():
    mask = [False, False, False, True]
    batch = PackedBatch.from_sequences(
        [[1, 2, 3, 4], [1, 2, 9, 4], [5, 2, 3, 4], [1, 2, 3, 7], [1, 2]], [mask, mask, mask, mask, [False, True]]
    )
    prompts = Prompts.of(batch)
    assert prompts.prefixes == [2, 2, 2, 2, 0]
    assert prompts.groups == [[0, 1, 3], [2], [4]]
    assert prompts.saved == 4
    assert prompts.shared([0, 1, 3, 2, 4]) == [0, 2, 2, 0, 0]
    shard = by_prompt(batch).shards(batch)[0][0]
    assert shard.input_ids.tolist() == [1, 2, 3, 4, 1, 2, 9, 4, 1, 2, 3, 7, 5, 2, 3, 4, 1, 2]
    assert shard.shared.tolist() == [0, 2, 2, 0, 0]
    assert shard.select([1, 2]).shared is None
    micro = MicroBatch.build(shard, CPU, SDPA)
    assert micro.input_ids.tolist() == [1, 2, 3, 4, 9, 4, 3, 7, 5, 2, 3, 4, 1, 2]
    assert micro.position_ids.tolist() == [0, 1, 2, 3, 2, 3, 2, 3, 0, 1, 2, 3, 0, 1]
    assert micro.rows.tolist() == [2, 4, 6, 10, 12]
    assert micro.targets.tolist() == [4, 4, 7, 4, 2]


@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize("budget", [5, 40, 90, 10_000])
def test_placements_by_prompt(ranks, budget):
    for seed in range(5):
        batch = grouped_batch(seed)
        prompts = Prompts.of(batch)
        parts = prompts.assign(ranks=ranks, token_budget=budget)
        assert len(parts) == ranks
        assert len({len(of_rank) for of_rank in parts}) == 1
        assert sorted(b for of_rank in parts for m in of_rank for b in m) == list(range(batch.num_sequences))
        assert all(prompts.computed(m) <= budget or len(m) == 1 for of_rank in parts for m in of_rank)
        loads = [sum(map(prompts.computed, of_rank)) for of_rank in parts]
        plain = place(batch.lengths, ranks=ranks, token_budget=budget).parts
        assert max(loads) <= max(sum(batch.lengths[b] for m in of_rank for b in m) for of_rank in plain)
        if ranks == 1 and budget == 10_000:
            assert loads == [batch.num_tokens - prompts.saved]


def test_one_group_is_shared_out_among_workers():
    mask = [False] * 100 + [True] * 100
    ids = [[1] * 100 + [number] * 100 for number in range(8)]
    batch = PackedBatch.from_sequences(ids, [mask] * 8)
    parts = Prompts.of(batch).assign(ranks=4, token_budget=10_000)
    assert sorted(len(m) for of_rank in parts for m in of_rank) == [2, 2, 2, 2]


@pytest.mark.parametrize(
    ("settings", "other"),
    [
        ({"train": {"sequence_parallel": 2}, "cluster": {"workers": 2}}, "train.sequence_parallel"),
        ({"train": {"sequences_per_microbatch": 4}}, "train.sequences_per_microbatch"),
        ({"rollout": {"batch_invariant": True, "engine": "vllm"}}, "rollout.batch_invariant"),
    ],
)
def test_settings_that_exclude_each_other_are_refused(settings, other):
    Config.model_validate({"command": "rl"} | settings)
    with pytest.raises(ValueError, match=rf"train.share_prompts[^\n]*{other}"):
        Config.model_validate(
            {"command": "rl"} | settings | {"train": settings.get("train", {}) | {"share_prompts": True}}
        )


@pytest.mark.parametrize("responses", [30, 1000])
def test_a_prompt_is_shared_where_that_pays(responses):
    """Two sequences of a prompt of 32 tokens: 16 % of the tokens saved are worth 9 % of their work, 1.4 % are not."""
    mask = [False] * 32 + [True] * responses
    batch = PackedBatch.from_sequences([[1] * (32 + responses)] * 2, [mask] * 2)
    group = TrainerGroup("actor", [], 1.0, 10_000, share_prompts=True, metadata={"sharing_cost": 0.09})
    group.handles = [ActorHandle("only")]
    assert (group._place(batch).prompts is not None) == (responses == 30)
    group.share_prompts = False
    assert group._place(batch).prompts is None


def test_the_cost_of_sharing_grows_with_the_keys():
    costs = {name: sharing_cost(model(name).model) for name in ("qwen2", "gpt2")}
    assert costs["qwen2"] == pytest.approx(8 * 16 / (9 * 48 + 22 * 32 + 8 * 32 + 4 * 16))
    assert costs["gpt2"] == pytest.approx(8 * 32 / (9 * 128 + 22 * 32 + 8 * 32 + 4 * 32))
