"""Checkpoints: what workers write (shards of model and optimizer) and what the driver makes of it.

    runs/<name>/checkpoints/global_step_N/
        actor/model, actor/optim     torch.distributed.checkpoint shards, readable at any world size
        actor/adapter                LoRA only: the adapter as peft writes it; actor/model then holds nothing else
        actor/huggingface            config and tokenizer; the full safetensors too with checkpoint.save_hf
        meta.json  loader.json       run state of the driver
        COMPLETE                     size and sha256 of every other file
    runs/<name>/checkpoints/latest   the newest folder's name

A checkpoint is written under a temporary name and renamed once ``COMPLETE`` is in it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.errors import UserError

if TYPE_CHECKING:
    import torch
    from torch import nn


# ---------------------------------------------------------------------- on the workers


def save_shards(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None, step: int) -> None:
    """Write ``folder/model`` and ``folder/optim``. A collective over the default process group."""
    from torch.distributed.checkpoint.state_dict_saver import save

    save(_trained(model), checkpoint_id=folder / "model")
    if optimizer is not None:
        state = _plain(_optimizer_state(model, optimizer))
        save({"state": state, "step": step}, checkpoint_id=folder / "optim")


def load_shards(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> int:
    """Read what ``save_shards`` wrote, at any world size. Returns the optimizer step. A collective."""
    from torch.distributed.checkpoint.state_dict_loader import load

    from posttrain.train.optim import is_quantized, quantize

    load(_trained(model), checkpoint_id=folder / "model")
    if optimizer is None:
        return 0
    state = _optimizer_state(model, optimizer)
    read: dict[str, Any] = {"state": _plain(state), "step": 0}
    load(read, checkpoint_id=folder / "optim")  # writes into the optimizer's own tensors, where they are plain
    for name, tensors in state.items():
        for key, tensor in tensors.items():
            if is_quantized(tensor):
                quantize(tensor, read["state"][name][key])
    return int(read["step"])


def _trained(model: nn.Module) -> dict[str, Any]:
    """All parameters, or those of the adapter in a LoRA run. A tied weight is listed once; buffers follow from the
    config."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def _optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, torch.Tensor]]:
    """The optimizer's own tensors by parameter name, sharded as the parameters are."""
    from posttrain.train.optim import init_state

    init_state(optimizer)
    return {name: dict(optimizer.state[p]) for name, p in model.named_parameters() if p.requires_grad}


def _plain(state: dict[str, dict[str, torch.Tensor]]) -> dict[str, dict[str, torch.Tensor]]:
    """The same with copies of quantized tensors in float32."""
    from posttrain.train.optim import dequantized, is_quantized

    return {
        name: {key: dequantized(t) if is_quantized(t) else t for key, t in tensors.items()}
        for name, tensors in state.items()
    }


# ---------------------------------------------------------------------- on the driver


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    path: Path
    step: int

    def read(self, name: str) -> dict[str, Any]:
        """A JSON file of the checkpoint."""
        return dict(json.loads((self.path / name).read_text()))


def begin(checkpoints: Path, step: int) -> Path:
    """An empty temporary folder for the checkpoint of ``step``; leftovers of a killed save are removed."""
    folder = checkpoints / f".tmp_global_step_{step}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def commit(folder: Path, step: int, states: Mapping[str, Mapping[str, Any]], keep: int) -> Checkpoint:
    """Finish a checkpoint whose shards are written: driver state, ``COMPLETE``, rename, ``latest``, remove old ones."""
    for name, state in states.items():
        (folder / name).write_text(json.dumps(state, indent=1))
    files = {str(p.relative_to(folder)): _digest(p) for p in sorted(folder.rglob("*")) if p.is_file()}
    (folder / "COMPLETE").write_text(json.dumps({"step": step, "files": files}, indent=1))
    final = folder.parent / f"global_step_{step}"
    shutil.rmtree(final, ignore_errors=True)
    os.replace(folder, final)
    pointer = folder.parent / ".latest.tmp"
    pointer.write_text(final.name)
    os.replace(pointer, folder.parent / "latest")
    # A later one that the run could not resume from does not count: it must not push out what was just written.
    for old in [f for f in _folders(folder.parent) if _step(f) <= step][keep:]:
        shutil.rmtree(old)
    return Checkpoint(final, step)


def _digest(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def verify(path: Path) -> str | None:
    """What is wrong with a checkpoint folder, or None."""
    manifest = path / "COMPLETE"
    if not manifest.is_file():
        return "it is not complete"
    try:
        files = dict(json.loads(manifest.read_text())["files"])
    except (ValueError, KeyError, TypeError):
        return "COMPLETE is damaged"
    for name, expected in files.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if _digest(file) != expected:
            return f"{name} is damaged"
    return None


def newest(checkpoints: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest sound checkpoint, and a line for each newer one that is broken."""
    problems: list[str] = []
    for folder in _folders(checkpoints):
        problem = verify(folder)
        if problem is None:
            return Checkpoint(folder, _step(folder)), problems
        problems.append(f"checkpoint {folder} is not usable: {problem}")
    return None, problems


def find(path: str | Path) -> Checkpoint:
    """The checkpoint that a run folder, its ``checkpoints`` folder or a ``global_step_N`` folder stands for.

    Raises:
        UserError: there is none.
    """
    folder = Path(path)
    if folder.name.startswith("global_step_") and folder.is_dir():
        problem = verify(folder)
        if problem is not None:
            raise UserError(f"checkpoint {folder} is not usable: {problem}", hint="use an earlier checkpoint")
        return Checkpoint(folder, _step(folder))
    root = folder / "checkpoints" if (folder / "checkpoints").is_dir() else folder
    checkpoint, problems = newest(root)
    if checkpoint is None:
        detail = "; ".join(problems) or "no global_step_N folder in it"
        raise UserError(f"no checkpoint in {path}: {detail}", hint="give a run folder or a global_step_N folder")
    return checkpoint


def _folders(checkpoints: Path) -> list[Path]:
    """Checkpoint folders, newest first. One that was renamed (``global_step_3.bak``) is not ours."""
    ours = (p for p in checkpoints.glob("global_step_*") if p.is_dir() and p.name[len("global_step_") :].isdigit())
    return sorted(ours, key=_step, reverse=True)


def _step(folder: Path) -> int:
    digits = folder.name.removeprefix("global_step_")
    if not digits.isdigit():
        raise UserError(f"not a checkpoint folder: {folder}", hint="its name must be global_step_N")
    return int(digits)
