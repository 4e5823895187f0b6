"""Parameters in FP8 of an engine that loads weights by code of its own: each element must come with each update.

Before an update all of them become NaN, scales too. What is still NaN at its end was not loaded, whatever the engine
has joined or shared out; a copy from the update before cannot stay there unseen.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from posttrain.core.errors import WeightSyncError
from posttrain.core.registry import some
from posttrain.models.fp8 import DTYPE
from posttrain.models.fp8_layers import SCALE

_NAN = 0x7F
"""A float8_e4m3fn that is not a number; with the sign bit it is one, too. Quantizing gives neither."""


def poison(model: nn.Module) -> None:
    """Overwrite the quantized weights of a model, and their scales, with NaN."""
    for name, parameter in _quantized(model).items():
        if parameter.dtype == DTYPE:
            parameter.data.view(torch.uint8).fill_(_NAN)
        elif name.endswith(SCALE):
            parameter.data.fill_(float("nan"))


def check_overwritten(model: nn.Module) -> None:
    """Check that all of them were overwritten since. Raises ``WeightSyncError`` with their names."""
    if left := [name for name, parameter in _quantized(model).items() if _has_nan(parameter.data)]:
        raise WeightSyncError(f"new weights did not reach all of {some(left)}")


def _quantized(model: nn.Module) -> dict[str, Tensor]:
    return {name: p for name, p in model.named_parameters() if p.dtype == DTYPE or name.endswith(SCALE)}


def _has_nan(values: Tensor) -> bool:
    if values.dtype == DTYPE:
        return bool(((values.view(torch.uint8) & _NAN) == _NAN).any())
    return bool(values.isnan().any())
