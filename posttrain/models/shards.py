"""Weights that several processes wrote, each its part: read whole, or only what this process holds of them.

Two layouts: torch.distributed.checkpoint's, which is ours, and verl's, a file for each rank whose tensors are DTensors.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from posttrain.core.errors import ModelError, first_line
from posttrain.models.load import is_verl

Reader = Callable[[Mapping[str, Tensor]], None]
"""Overwrites tensors, which may be sharded, with those of the same names. A collective where they are. Raises
``ModelError``: one is missing or of another shape, or the shards cannot be read."""


def reader(folder: str) -> Reader:
    """Return a reader of the shards in ``folder``, opened once. Raises ``ModelError``."""
    return VerlShards(Path(folder)).read if is_verl(Path(folder)) else partial(_read, folder)


def stored_shapes(folder: str) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor that the shards in ``folder`` hold, by name; no weights are read. Raises
    ``ModelError``."""
    if is_verl(Path(folder)):
        return VerlShards(Path(folder)).shapes()
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    try:
        stored = FileSystemReader(folder).read_metadata().state_dict_metadata
    except Exception as error:  # a pickle: of a damaged one anything
        raise _unreadable(folder, error) from error
    return {name: tuple(entry.size) for name, entry in stored.items() if hasattr(entry, "size")}


def _read(folder: str, tensors: Mapping[str, Tensor]) -> None:
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_loader import load

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            alone = not any(isinstance(tensor, DTensor) for tensor in tensors.values())
            load(dict(tensors), checkpoint_id=folder, no_dist=alone)
    except (OSError, RuntimeError, CheckpointException) as error:
        raise _unreadable(folder, error) from error


def _unreadable(folder: str, error: BaseException) -> ModelError:
    return ModelError(f"cannot read the checkpoint shards in {folder}: {error}", hint="use an earlier checkpoint")


# ---------------------------------------------------------------------- verl


class VerlShards:
    """``model_world_size_W_rank_R.pt`` of all ranks, mapped into memory.

    Raises:
        ModelError: a rank's file is missing or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        found: dict[int, dict[int, Path]] = {}
        for file in folder.glob("model_world_size_*_rank_*.pt"):
            if numbers := re.fullmatch(r"model_world_size_(\d+)_rank_(\d+)\.pt", file.name):
                found.setdefault(int(numbers[1]), {})[int(numbers[2])] = file
        if len(found) != 1:
            raise ModelError(
                f"{folder} holds the shards of several world sizes: {sorted(found)}",
                hint="leave those of one in it: a later save has not removed the others",
            )
        [(size, files)] = found.items()
        if missing := sorted(set(range(size)) - set(files)):
            raise ModelError(f"{folder} lacks the file of rank {missing[0]} of {size}", hint="is the copy complete?")
        self._ranks = [_load(files[rank]) for rank in range(size)]
        if any(".lora_A." in name for name in self._ranks[0]):
            raise ModelError(
                f"the checkpoint in {folder} has a LoRA adapter beside its weights",
                hint="merge it with verl's own merger first",
            )

    def read(self, tensors: Mapping[str, Tensor]) -> None:
        """A ``Reader``."""
        for name, tensor in tensors.items():
            copy_held(tensor, self.whole(name, tuple(tensor.shape)))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all parameters, by name."""
        return {name: tuple(tensor.shape) for name, tensor in self._ranks[0].items()}

    def whole(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A parameter's value. Raises ``ModelError`` where there is none of that shape."""
        first = self._ranks[0].get(name)
        if first is None:
            raise ModelError(f"{self.folder} has no weights for {name}", hint="is huggingface/ that of these weights?")
        tensor: Tensor = first
        if isinstance(first, DTensor):
            tensor = self._join(name, first.device_mesh.mesh, first.placements)
        if tuple(tensor.shape) != shape:
            raise ModelError(
                f"{self.folder}: {name} is {tuple(tensor.shape)}, and the config makes it {shape}",
                hint="is huggingface/ that of these weights?",
            )
        return tensor

    def _join(self, name: str, ranks: Tensor, placements: tuple[Any, ...]) -> Tensor:
        if not placements:
            local: Tensor = self._ranks[int(ranks)][name]._local_tensor
            return local
        placement, *rest = placements
        if isinstance(placement, Replicate):
            return self._join(name, ranks[0], tuple(rest))
        if not isinstance(placement, Shard):
            raise ModelError(
                f"{self.folder}: {name} is placed as {placement}, which cannot be joined",
                hint="merge it with verl's own merger first",
            )
        return torch.cat([self._join(name, part, tuple(rest)) for part in ranks], placement.dim)


def _load(file: Path) -> dict[str, Any]:
    try:
        return dict(torch.load(file, map_location="cpu", weights_only=True, mmap=True))
    except Exception as error:  # of pickle, zip and torch: the file is damaged, or no checkpoint
        raise ModelError(f"cannot read {file}: {first_line(error)}", hint="is the copy complete?") from error


# ---------------------------------------------------------------------- parts


def copy_held(tensor: Tensor, whole: Any) -> None:
    """Write the rows that this process holds of ``tensor``; ``whole`` is a tensor or a lazy slice of a file."""
    part, place = held(tensor)
    if part.numel():
        part.copy_(whole[place])


def held(tensor: Tensor) -> tuple[Tensor, tuple[slice, ...]]:
    """What this process holds of a tensor that may be sharded, and where in the whole that is."""
    data = tensor.detach()
    if not isinstance(data, DTensor):
        return data, tuple(slice(0, size) for size in data.shape)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(data.shape, data.device_mesh, data.placements)
    return data.to_local(), tuple(slice(at, at + size) for at, size in zip(offset, shape, strict=True))


def nonfinite(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names of floating-point tensors that hold an infinity or NaN in this process's part. Takes no memory
    beside them."""
    parts = {name: (t.to_local() if isinstance(t, DTensor) else t).detach() for name, t in tensors.items()}
    parts = {name: part for name, part in parts.items() if part.is_floating_point() and part.numel()}
    # A few kernels look at all of them; one by one they would take hundreds.
    if torch.nn.utils.get_total_norm(list(parts.values()), math.inf).isfinite():
        return []
    return [name for name, part in parts.items() if not torch.stack(torch.aminmax(part)).isfinite().all()]
