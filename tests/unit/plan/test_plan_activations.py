"""What the plan says that the backward pass keeps, beside what autograd keeps of the real model code, to the byte (16
bytes a layer where layers are compiled and checkpointed)."""

from functools import partial

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from posttrain.config import LoraConfig
from posttrain.models import lora
from posttrain.models.attention import Ragged
from posttrain.models.attention_kernels import Kernel
from posttrain.models.builtin import BUILTIN, builtin_config, builtin_sizes, builtin_tokenizer
from posttrain.models.load import implementations
from posttrain.plan import activations
from posttrain.plan.activations import Policy
from posttrain.plan.shape import shape_of
from posttrain.train import parallel
from posttrain.train.flops import model_flops
from posttrain.train.model import PackedLM

TOKENS = 96
SIZES = {
    "hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256,
    "tie_word_embeddings": True,
}  # fmt: skip
CONFIGS = {
    "qwen2": lambda layers: Qwen2Config(**SIZES, num_hidden_layers=layers),
    "qwen3": lambda layers: Qwen3Config(**SIZES, num_hidden_layers=layers, head_dim=32),
    "llama": lambda layers: LlamaConfig(**SIZES, num_hidden_layers=layers),
    "mixtral": lambda layers: MixtralConfig(**SIZES, num_hidden_layers=layers, num_local_experts=4),
    "qwen3_moe": lambda layers: Qwen3MoeConfig(
        **SIZES,
        num_hidden_layers=layers,
        num_experts=64,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        head_dim=32,
        norm_topk_prob=True,
    ),
}


# An attention kernel as those on GPUs are: one operator over ragged rows that keeps q, k, v, its result and a float32 a
# head. What it computes does not matter here.


@torch.library.custom_op("plantest::varlen", mutates_args=())
def varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return q * 1.0, torch.zeros((q.shape[1], q.shape[0]), dtype=torch.float32)


@varlen.register_fake
def _(q, k, v):
    return torch.empty_like(q), torch.empty((q.shape[1], q.shape[0]), dtype=torch.float32)


@torch.library.custom_op("plantest::varlen_backward", mutates_args=())
def varlen_backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, log_sum: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return grad * 1.0, k * 1.0, v * 1.0


@varlen_backward.register_fake
def _(grad, q, k, v, out, log_sum):
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


varlen.register_autograd(
    lambda ctx, grad, _: varlen_backward(grad.contiguous(), *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs, *output),
)


def test_its_operators_are_defined_once():
    """Another test module imports this one: by another name it would be loaded, and would define them, again."""
    assert __name__ == "tests.unit.plan.test_plan_activations"


def kernel(*, repeats_heads):
    def attend(q, k, v, cu_q, cu_k, longest, scale):
        if repeats_heads:
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        return varlen(q.contiguous(), k.contiguous(), v.contiguous())[0]

    return Kernel("test", "test", attend)


class Living(TorchDispatchMode):
    """The memory that operators have made and that somebody still holds."""

    def __init__(self, weights):
        super().__init__()
        self.weights, self.made = weights, {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.weights:  # a view of one
                    self.made.setdefault(StorageWeakRef(storage), storage.nbytes())
        return out

    def bytes(self):
        return sum(size for ref, size in self.made.items() if not ref.expired())


def saved_bytes(config, policy, monkeypatch, tokens=TOKENS):
    """Kept between forward and backward pass of all but the head, weights apart."""
    with torch.device("meta" if policy.lora_rank else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, **implementations(config))
    if policy.lora_rank:
        model.requires_grad_(False)
        lora.inject(model, LoraConfig(rank=policy.lora_rank), dtype=torch.bfloat16)
        model.to_empty(device="cpu")  # what it computes does not matter
    lm = PackedLM(model)
    compile_ = torch.compile
    with monkeypatch.context() as patch:
        # What is kept is decided before code is made for it.
        patch.setattr(torch, "compile", partial(compile_, backend="aot_eager_decomp_partition"))
        patch.setattr(parallel, "_EXPENSIVE", parallel._EXPENSIVE | {"plantest.varlen.default"})
        parallel.parallelize(
            lm, None, dtype=torch.bfloat16, activation_checkpointing=policy.checkpointing, compiled=policy.compiled
        )
        ragged = Ragged.build(
            torch.tensor([0, tokens]), torch.device("cpu"), kernel(repeats_heads=policy.repeats_heads)
        )
        inputs = {
            "input_ids": torch.arange(tokens)[None] % 256, "position_ids": torch.arange(tokens)[None],
            "use_cache": False, "ragged": ragged,
        }  # fmt: skip
        weights = {p.untyped_storage()._cdata for p in lm.parameters()}
        found = {}

        def keep(tensor):
            storage = tensor.untyped_storage()
            if storage._cdata not in weights:
                found[storage._cdata] = storage.nbytes(), storage  # held, or its address would be used again
            return tensor

        if policy.checkpointing == "selective" and not policy.compiled:  # its cache does not go through hooks
            with Living(weights) as living:
                hidden = lm.model.base_model(**inputs).last_hidden_state
            total = living.bytes()
        else:
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                hidden = lm.model.base_model(**inputs).last_hidden_state
            total = sum(size for size, _ in found.values())
        hidden.float().sum().backward()
    return total


slow = partial(pytest.param, marks=pytest.mark.slow)  # to compile takes seconds
POLICIES = [
    ("qwen2", Policy("none", compiled=False)),
    ("qwen2", Policy("none", compiled=False, repeats_heads=True)),
    ("qwen2", Policy("selective", compiled=False)),
    ("qwen2", Policy("full", compiled=False)),
    ("qwen2", Policy("none", compiled=False, lora_rank=1)),
    ("qwen2", Policy("selective", compiled=False, lora_rank=1)),
    ("qwen3", Policy("none", compiled=False, lora_rank=1)),
    slow("qwen2", Policy("selective", lora_rank=1)),
    slow("qwen2", Policy("none")),
    slow("qwen2", Policy("none", repeats_heads=True)),
    slow("qwen2", Policy("selective")),
    slow("qwen2", Policy("full")),
    ("qwen3", Policy("none", compiled=False)),
    slow("qwen3", Policy("none")),
    ("qwen3_moe", Policy("none", compiled=False)),
    ("qwen3_moe", Policy("selective", compiled=False)),
    ("qwen3_moe", Policy("full", compiled=False)),
    slow("qwen3_moe", Policy("none")),
]


@pytest.mark.parametrize(("name", "policy"), POLICIES, ids=str)
def test_the_formula_counts_what_autograd_keeps(name, policy, monkeypatch):
    torch._dynamo.reset()
    two, four = (saved_bytes(CONFIGS[name](layers), policy, monkeypatch) for layers in (2, 4))
    shape = shape_of(CONFIGS[name](2).to_dict(), name)
    # Compiled layers that are checkpointed keep a number or two besides, such as how many tokens there were.
    numbers = 16 if policy.compiled and policy.checkpointing != "none" else 0
    numbers += 28 if policy.compiled and policy.lora_rank else 0
    numbers += 4 * shape.experts if policy.checkpointing == "none" else 0  # where the rows of each expert end
    assert 0 <= (four - two) / 2 - activations.of_layer(shape, policy) * TOKENS <= numbers
    rest = (two - (four - two)) / TOKENS
    if policy.checkpointing == "none" and not policy.lora_rank:
        assert rest == activations.outside(shape, policy)
    else:
        # By the hooks' count it has fewer: tensors shared by all layers are arguments there, and what the first layer
        # reads needs no gradient where embeddings are frozen.
        assert rest <= activations.outside(shape, policy) + 2 * shape.hidden * 2


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_and_flops_are_those_of_the_model(name, tied):
    config = CONFIGS[name](3)
    config.tie_word_embeddings = tied
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    shape = shape_of(config.to_dict(), name)
    assert shape.known
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    counted, of_model = shape.flops(), model_flops(model)
    assert counted.attention == of_model.attention
    assert counted.forward == pytest.approx(of_model.forward)
    assert counted.training([7, 9]) == pytest.approx(of_model.training([7, 9]))


@pytest.mark.parametrize("name", BUILTIN)
def test_sizes_of_a_builtin_model_are_read_without_its_tokenizer(name):
    sizes, config = builtin_sizes(name), builtin_config(name).to_dict()
    for part in ("text_config", "vision_config") if "text_config" in sizes else ():
        whole = config.pop(part)
        config[part] = {key: whole[key] for key in sizes[part]}
    assert {key: config[key] for key in sizes} == sizes
    assert 0 <= sizes.get("text_config", sizes)["vocab_size"] - len(builtin_tokenizer(name)) < 64
