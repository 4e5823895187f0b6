"""Blockwise FP8: quantized weights for engines, and what FP8 does to a linear layer, in plain torch.

A block of b x b weights has the scale s = max |w| / 448 in float32, and each weight becomes w / s, rounded to
float8_e4m3fn (4 significant bits). Activations are quantized as they come, in groups of b elements of a token, with a
scale each. Both are what the block kernels of SGLang and vLLM expect of a checkpoint with ``weight_scale_inv``.

Shape legend: N outputs, K inputs, b side of a block.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from posttrain.models import vision
from posttrain.models.fp8_layers import FP8_MAX, SCALE, Fp8Layers, fp8_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DTYPE = torch.float8_e4m3fn
_TINY = 1e-12
"""Least max |w| of a block: a block of zeros has a scale, too."""


def layers_of(model: PreTrainedModel, *, stored: bool, tensor_parallel: int = 1) -> Fp8Layers:
    """Return which weights of a model, which may be on the meta device, are quantized.

    Args:
        stored: engines get weights as files on the hub have them, experts one by one; else as the model does.
        tensor_parallel: GPUs of an engine.

    Raises:
        ConfigError: none can be.
    """
    from posttrain.models.weights import as_stored

    ends = {id(module.weight) for module in _ends(model)}
    within = {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.ndim >= 2 and id(parameter) not in ends and not name.startswith(vision.TOWER)
    }
    weights = as_stored(model, within.items()) if stored else iter(within.items())
    linear = {name: tuple(w.shape) for name, w in weights if _is_matrix(name, w)}
    kind = model.config.get_text_config().model_type
    return fp8_layers(kind, linear, tensor_parallel=tensor_parallel)


def _ends(model: PreTrainedModel) -> Iterator[Any]:
    yield model.get_input_embeddings()
    if (head := model.get_output_embeddings()) is not None:
        yield head


def _is_matrix(name: str, weight: Tensor) -> bool:
    return (weight.ndim == 2 and name.endswith(".weight")) or (".experts." in name and weight.ndim in (2, 3))


# ---------------------------------------------------------------------- weights


def quantize(weight: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Return [..., N, K] float8_e4m3fn and the scales of its blocks, [..., N / b, K / b] float32.

    Raises:
        ValueError: blocks do not divide N and K.
    """
    if weight.ndim > 2:  # one matrix at a time: the work is in float32
        parts = [quantize(part, block) for part in weight]
        return torch.stack([part for part, _ in parts]), torch.stack([scale for _, scale in parts])
    rows, columns = weight.shape
    if rows % block or columns % block:
        raise ValueError(f"blocks of {block} do not divide a weight of shape {tuple(weight.shape)}")
    # In place, in one copy: `plan` counts its five bytes an element.
    tiles = weight.to(torch.float32, copy=True).view(rows // block, block, columns // block, block)
    scale = torch.maximum(tiles.amax((1, 3)), -tiles.amin((1, 3))).clamp_(min=_TINY) / FP8_MAX
    quantized = tiles.div_(scale[:, None, :, None]).clamp_(-FP8_MAX, FP8_MAX).to(DTYPE)
    return quantized.view(rows, columns), scale


def dequantize(quantized: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return [..., N, K] of ``dtype`` that the quantized weight stands for."""
    *others, rows, columns = quantized.shape
    above, beside = scale.shape[-2:]
    tiles = quantized.to(torch.float32).view(*others, above, rows // above, beside, columns // beside)
    return (tiles * scale[..., :, None, :, None]).to(dtype).view(quantized.shape)


def quantized_weights(
    weights: Iterable[tuple[str, Tensor]], layers: Fp8Layers, *, values: bool = True
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that engines get: for each weight of ``layers`` its scales and then its quantized self, the
    others as they are. Scales are computed from the weights that come, and kept nowhere.

    Args:
        values: False: nobody reads them, and quantized ones are on the meta device.
    """
    for name, weight in weights:
        if name not in layers.names:
            yield name, weight
            continue
        quantized, scale = quantize(weight if values else weight.to("meta"), layers.block)
        yield name + SCALE, scale
        yield name, quantized


def sent_type(name: str, tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    """Return the type in which a tensor is sent to engines, whose compute type is ``dtype``."""
    return tensor.dtype if tensor.dtype == DTYPE or name.endswith(SCALE) else dtype


# ---------------------------------------------------------------------- what it does to a layer


def rounded_activations(x: Tensor, block: int) -> Tensor:
    """Return [..., K] as FP8 gives it back: groups of b elements of each token are quantized with a scale each."""
    groups = x.float().unflatten(-1, (-1, block))
    scale = groups.abs().amax(-1, keepdim=True).clamp(min=_TINY) / FP8_MAX
    rounded: Tensor = (groups / scale).clamp(-FP8_MAX, FP8_MAX).to(DTYPE).float() * scale
    return rounded.flatten(-2).to(x.dtype)


def round_weights(model: nn.Module, layers: Fp8Layers) -> None:
    """Replace the weights of a model by what FP8 gives back of them."""
    parameters = dict(model.named_parameters())
    for name in layers.names:
        weight = parameters[name].data
        weight.copy_(dequantize(*quantize(weight, layers.block), weight.dtype))


def round_inputs(model: nn.Module, layers: Fp8Layers) -> None:
    """Quantize what the layers get, from now on. Of experts that is what comes to all of them; what goes from one of
    their matrices to the next is not seen here, and stays as it is."""

    def rounded(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (rounded_activations(args[0], layers.block), *args[1:]), kwargs
        first = next(iter(kwargs))
        return args, {**kwargs, first: rounded_activations(kwargs[first], layers.block)}

    for owner in sorted({name.rpartition(".")[0] for name in layers.names}):
        model.get_submodule(owner).register_forward_pre_hook(rounded, with_kwargs=True)
