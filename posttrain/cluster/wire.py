"""Tensors as numpy arrays, which Ray's shared memory hands over without a copy."""

from __future__ import annotations

import warnings
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

Wire = tuple[npt.NDArray[Any], str]
"""The bytes of a tensor in a type numpy has, and the tensor's own type."""


def to_wire(tensor: Tensor) -> Wire:
    name = str(tensor.dtype).removeprefix("torch.")
    plain = tensor.contiguous()
    return (plain.view(torch.int16) if tensor.dtype == torch.bfloat16 else plain).numpy(), name


def from_wire(wire: Wire) -> Tensor:
    """The tensor, sharing the array's memory: read it, never write to it."""
    array, name = wire
    dtype: torch.dtype = getattr(torch, name)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array).view(dtype)
