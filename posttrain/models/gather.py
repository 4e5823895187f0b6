"""Gather whole weights of a sharded model, many by one collective, because each collective has a fixed cost."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from posttrain.core.sizes import GATHER_BYTES

_GROUP_BYTES = GATHER_BYTES
"""Most bytes of weights that one collective gathers; a larger weight is gathered alone."""


def whole(parameter: Tensor) -> Tensor:
    """Return all of a tensor. A collective where it is sharded."""
    return next(whole_many([("", parameter)]))[1]


def whole_many(named: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """Return names and whole tensors, in order. A collective where they are sharded.

    Args:
        dtype: they are cast to it where that makes them smaller, before they are gathered; None: they keep their type.
    """
    group: list[tuple[str, DTensor]] = []
    size = 0
    for name, parameter in named:
        tensor = parameter.detach()
        together = _is_row_sharded(tensor)
        fits = not group or (tensor.dtype == group[0][1].dtype and size < _GROUP_BYTES)
        if group and not (together and fits):
            yield from _gather(group, dtype)
            group, size = [], 0
        if together:
            assert isinstance(tensor, DTensor)
            group.append((name, tensor))
            size += tensor.numel() * tensor.element_size()
        else:
            yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    if group:
        yield from _gather(group, dtype)


def _is_row_sharded(tensor: Tensor) -> bool:
    """Return True where ranks hold successive rows of the tensor."""
    if not isinstance(tensor, DTensor) or tensor.ndim == 0:
        return False
    shards = [placement for placement in tensor.placements if isinstance(placement, Shard)]
    return len(shards) == 1 and shards[0].dim == 0


def _gather(named: list[tuple[str, DTensor]], dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
    """Return names and whole tensors of one type, gathered by one collective."""
    first = named[0][1]
    axis = next(i for i, placement in enumerate(first.placements) if isinstance(placement, Shard))
    ranks = first.device_mesh.size(axis)
    if ranks == 1:
        yield from ((name, tensor.to_local()) for name, tensor in named)
        return
    # Every rank has the same number of rows, except the last ones, which may have fewer or none.
    rows = [-(-len(tensor) // ranks) for _, tensor in named]
    sizes = [n * math.prod(tensor.shape[1:]) for n, (_, tensor) in zip(rows, named, strict=True)]
    narrow = dtype if dtype is not None and dtype.itemsize < first.dtype.itemsize else first.dtype
    # On the device of their collectives, which is not that of shards in host memory (`train.cpu_offload`).
    mine = torch.zeros(sum(sizes), dtype=narrow, device=first.device_mesh.device_type)
    for part, (_, tensor) in zip(mine.split(sizes), named, strict=True):
        local = tensor.to_local()
        part[: local.numel()].copy_(local.flatten())
    gathered = mine.new_empty(ranks, len(mine))
    dist.all_gather_into_tensor(gathered.view(-1), mine, group=first.device_mesh.get_group(axis))
    for part, n, (name, tensor) in zip(gathered.split(sizes, dim=1), rows, named, strict=True):
        yield name, part.reshape(ranks * n, *tensor.shape[1:])[: len(tensor)]
