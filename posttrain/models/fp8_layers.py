"""Which weights of a model are quantized to FP8 for rollouts, and how engines are told. Imports nothing heavy: `plan`
counts with the same rules.

Weights are those of linear layers of the decoder, in blocks of 128 x 128 or 64 x 64 with one scale each, as DeepSeek-V3
stores its own (arXiv:2412.19437, section 3.3). Embeddings, the output head, norms, biases, routers, convolutions and
the layers of linear attention and Mamba stay in the compute type.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from posttrain.core.errors import ConfigError

FP8_MAX = 448.0
"""The largest number of float8_e4m3fn."""
BLOCKS = (128, 64)
"""Sides of a block, those that all engines have the fastest kernels for first. SGLang's and vLLM's kernels for experts
know the first one alone."""
SCALE = "_scale_inv"
"""The name of a weight's scales is the weight's with this behind it, as in published FP8 checkpoints."""

_JOINED = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up", "up_proj": "gate_up"}
"""Layers that engines join into one matrix, all parts of which are of one type."""
_SPLIT_INPUTS = frozenset({"o_proj", "down_proj", "w2"})
"""Layers whose inputs are shared out in an engine of several GPUs; of the others the outputs are."""
_ALONE = frozenset({"o_proj", "down_proj", "qkv_proj", "gate_up_proj"})
_EXPERT = frozenset({"gate_proj", "up_proj", "down_proj", "gate_up_proj", "w1", "w2", "w3"})
_LAYER = re.compile(r"(^|\.)layers\.\d+\.")
_UNSUPPORTED = {
    "gpt_oss": "its experts are stored transposed, and engines have them in MXFP4",
    "deepseek_v2": "engines join and take apart the matrices of its latent attention",
    "deepseek_v3": "engines join and take apart the matrices of its latent attention",
}
"""Types of models -> why they are refused."""


@dataclass(frozen=True)
class Fp8Layers:
    """The weights of one model that are quantized, by the names under which they are sent to engines."""

    block: int
    """Side of a block, and tokens' activations that share a scale."""
    names: frozenset[str]
    kept: tuple[str, ...]
    """Linear layers that are not quantized, without the output head: names of modules."""
    elements: int
    """Elements of the quantized weights"""
    of_linear: int
    """Elements of the weights of all linear layers but the output head"""

    def saved_bytes(self, itemsize: int) -> int:
        """Return how many bytes fewer all weights and scales take than weights of ``itemsize`` bytes each."""
        return self.elements * (itemsize - 1) - scale_bytes(self.elements, self.block)

    @property
    def engine_config(self) -> dict[str, Any]:
        """Return the ``quantization_config`` of a checkpoint with such weights."""
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [self.block, self.block],
            "modules_to_not_convert": list(self.kept),
        }

    def shapes(self, whole: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all tensors that are sent, scales among them, where ``whole`` are those of the
        weights."""
        sent = dict(whole)
        for name in self.names:
            *others, rows, columns = whole[name]
            sent[name + SCALE] = (*others, rows // self.block, columns // self.block)
        return sent

    def describe(self) -> str:
        """Return one line for people."""
        share = self.elements / self.of_linear
        rest = "" if share == 1.0 else f"; {len(self.kept)} layers stay as they are (docs/fp8.md)"
        return f"{100 * share:.3g} % of the linear layers' weights, in blocks of {self.block} x {self.block}{rest}"


def scale_bytes(elements: int, block: int) -> int:
    """Return the bytes of the float32 scales of so many quantized elements."""
    return 4 * (elements // block**2)


def fp8_layers(kind: str, linear: Mapping[str, tuple[int, ...]], *, tensor_parallel: int = 1) -> Fp8Layers:
    """Return which of a model's weights are quantized.

    Blocks are the largest that divide the sizes of all layers that could be; where none does, those that divide the
    most. Layers that these do not divide stay as they are, and with them those that engines join them to.

    Args:
        kind: `model_type` of the model.
        linear: weights of its linear layers but the output head, and of its experts: names -> (outputs, inputs), of
            joined experts with more in front.
        tensor_parallel: GPUs that an engine shares each matrix out to.

    Raises:
        ConfigError: none can be.
    """
    of_linear = sum(map(_elements, linear.values()))
    candidates = {name: shape for name, shape in linear.items() if _is_known(name)}
    what = f"rollout.quantization = 'fp8' with a model of type {kind}"
    if kind in _UNSUPPORTED:
        raise ConfigError(f"{what}: {_UNSUPPORTED[kind]}", hint=_HINT)
    experts = any(".experts." in name for name in candidates)
    best: tuple[int, int, frozenset[str]] = (0, BLOCKS[0], frozenset())
    for block in BLOCKS[:1] if experts else BLOCKS:
        names = _fitting(candidates, block, tensor_parallel)
        elements = sum(_elements(candidates[name]) for name in names)
        if elements > best[0]:
            best = elements, block, names
    elements, block, names = best
    if not names:
        sizes = sorted({size for shape in candidates.values() for size in shape[-2:]})
        blocks = " or ".join(map(str, BLOCKS))
        why = f"no size of {sizes} fits blocks of {blocks}" if sizes else "no layer of it is known"
        raise ConfigError(f"{what}: nothing can be quantized ({why})", hint=_HINT)
    kept = sorted({name.removesuffix(".weight") for name in linear.keys() - names})
    return Fp8Layers(block, names, tuple(kept), elements, of_linear)


_HINT = "--set rollout.quantization=none; docs/fp8.md says which models it is for"


def _is_known(name: str) -> bool:
    """Return whether a weight is of a kind that may be quantized."""
    if not _LAYER.search(name):
        return False
    last = name.removesuffix(".weight").rpartition(".")[2]
    if ".experts." in name:
        return last in _EXPERT
    return name.endswith(".weight") and (last in _JOINED or last in _ALONE)


def _fitting(candidates: Mapping[str, tuple[int, ...]], block: int, parallel: int) -> frozenset[str]:
    """Return the candidates that blocks divide, without those that are joined to others which they do not."""
    groups: dict[str, list[str]] = {}
    for name in candidates:
        groups.setdefault(_group(name), []).append(name)
    chosen: set[str] = set()
    for names in groups.values():
        if all(_fits(name, candidates[name], block, parallel) for name in names):
            chosen.update(names)
    return frozenset(chosen)


def _group(name: str) -> str:
    """Return the name of what engines join a weight to: all experts of a layer, or the parts of a matrix."""
    if ".experts." in name:
        return name.partition(".experts.")[0] + ".experts"
    module, _, last = name.removesuffix(".weight").rpartition(".")
    return f"{module}.{_JOINED.get(last, last)}"


def _fits(name: str, shape: tuple[int, ...], block: int, parallel: int) -> bool:
    last = name.removesuffix(".weight").rpartition(".")[2]
    outputs, inputs = shape[-2:]
    if last == "gate_up_proj":
        outputs //= 2
    by_inputs = last in _SPLIT_INPUTS
    return outputs % (block if by_inputs else block * parallel) == 0 and (
        inputs % (block * parallel if by_inputs else block) == 0
    )


def _elements(shape: Iterable[int]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product
