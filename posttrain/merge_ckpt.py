"""`posttrain merge-ckpt`: a sharded checkpoint to a Hugging Face folder, or its LoRA adapter to one for peft."""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_args

from posttrain.config import RunConfig
from posttrain.core.defaults import MERGED_DTYPE, MERGED_SHARD_SIZE, WeightsDtype
from posttrain.core.errors import ConfigError, UserError
from posttrain.core.files import refuse_inputs
from posttrain.core.registry import unknown
from posttrain.core.text import printable
from posttrain.models import hub
from posttrain.models.export import Check, export, export_adapter
from posttrain.models.load import ModelSource, auto_class, find_verl, is_verl, load_config, load_model, locate
from posttrain.runs import probe
from posttrain.runs.run import run_folder
from posttrain.train import checkpoint

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def run(
    path: str,
    out: str,
    *,
    overwrite: bool = False,
    adapter: bool = False,
    dtype: WeightsDtype | None = None,
    max_shard_size: str | None = None,
    check: bool = False,
    push: str | None = None,
    private: bool | None = None,
    runs: str = RunConfig().dir,
) -> Path:
    """Merge a checkpoint (a run's name or folder, or a ``global_step_N`` folder; verl's too) into ``out``; returns
    ``out``.

    Args:
        adapter: of a LoRA run's checkpoint write the adapter alone, as peft reads it.
        dtype: of the weights; None: `MERGED_DTYPE`.
        max_shard_size: of a safetensors file, as "5GB"; None: `MERGED_SHARD_SIZE`.
        check: load the result with transformers, and compare it with what the trainer said.
        push: upload the result to this repository of the Hugging Face hub.
        private: whether that is private if it is new; None: yes.

    Raises:
        UserError: no sound checkpoint there, no adapter in it, ``out`` exists (with ``overwrite``: and is not a model's
            folder), or is something that a run needs; or options that do not go together.
        RunError: the result says something else than the trainer; then there is no ``out``. Or the upload failed.
    """
    if adapter and (dtype or max_shard_size):
        raise ConfigError(
            f"--adapter and {'--dtype' if dtype else '--max-shard-size'}: an adapter is written as it was trained, "
            "in one file",
            hint="leave one of them out",
        )
    if private is not None and not push:
        raise ConfigError("--private and --public are about --push", hint="add --push NAMESPACE/NAME")
    if dtype is not None and dtype not in (dtypes := get_args(WeightsDtype)):
        raise ConfigError(f"{dtype!r} is not a dtype of merged weights", hint=unknown(dtype, dtypes))
    check_size(max_shard_size or MERGED_SHARD_SIZE)
    if push:
        hub.check_target(push)
    place = find_checkpoint(path, runs)
    source = locate(str(place))
    _check_out(Path(out), place, source)
    if adapter and not source.adapters:
        raise ConfigError(f"{place} holds no adapter: the run trained all weights", hint="merge without --adapter")
    if not adapter:  # the checkpoint itself is known to be sound; those that it is an adapter of are not
        checkpoint.check_all(source.manifests[:-1])
    written = dtype or MERGED_DTYPE
    matches = _numeric_check(probe.read(place), source, written, adapter=adapter) if check else None
    if adapter:
        export_adapter(source, Path(out), overwrite=overwrite, check=matches)
    else:
        size = max_shard_size or MERGED_SHARD_SIZE
        export(source, Path(out), overwrite=overwrite, dtype=written, max_shard_size=size, check=matches)
    if push:
        pushed = hub.upload(Path(out), push, private=private is not False)
        print(printable(f"pushed: {pushed}"), file=sys.stderr)
    return Path(out)


def _check_out(out: Path, place: Path, source: ModelSource) -> None:
    """Raise ``ConfigError`` where ``out`` would replace the checkpoint in ``place``, what it is made of or the model
    that its run began with, or would lie in a checkpoint."""
    parts = filter(None, [str(place), source.path, source.shards, *source.adapters, _began_with(place)])
    refuse_inputs(out, "--out", [part for part in parts if Path(part).is_dir()])
    for folder in Path(os.path.realpath(out)).parents:
        if re.fullmatch(r"global_step_\d+", folder.name) and ((folder / "actor").is_dir() or is_verl(folder)):
            raise ConfigError(f"--out {out} lies in the checkpoint {folder}", hint="give another --out")


def _began_with(place: Path) -> str | None:
    """Return `model.path` of the run that wrote a checkpoint; None where the checkpoint does not say."""
    try:
        path = json.loads((place / "meta.json").read_text(encoding="utf-8"))["config"]["model"]["path"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return path if isinstance(path, str) else None


def find_checkpoint(path: str, runs: str) -> Path:
    """The ``global_step_N`` folder, or the folder of verl's shards, that ``path`` stands for. Raises ``UserError``."""
    path = path.removeprefix("run:")  # as `model.path` names a run
    if path.endswith("/best") and not Path(path).exists():
        return checkpoint.find(find_folder(path.removesuffix("/best"), runs) / "best").path
    folder = find_folder(path, runs)
    if folder.name == "critic" and (folder / "model").is_dir():
        raise UserError(
            f"{folder} is a critic, which a run keeps to go on from: only the actor becomes a model",
            hint=f"merge {folder.parent}",
        )
    return find_verl(folder) or checkpoint.find(folder).path


def find_folder(path: str, runs: str) -> Path:
    """The folder of a run, by its path or name, else a folder with a checkpoint in it. Raises ``ConfigError``."""
    try:
        return run_folder(runs, path)
    except ConfigError as error:
        if Path(path).is_dir():
            return Path(path)
        if "/" not in path:
            raise
        there = [f"global_step_{step}" for step in checkpoint.steps(Path(path).parent)]
        hint = f"{Path(path).parent} holds {', '.join(there)}" if there else error.hint
        raise ConfigError(f"no such folder: {path}", hint=hint) from None


def check_size(text: str) -> None:
    """Check that ``text`` is a size of files, such as "5GB". Raises ``ConfigError``."""
    if not re.fullmatch(r"[1-9]\d*\s*[KMGT]B", text.strip().upper()):
        raise ConfigError(f"--max-shard-size: {text!r} is not a size", hint="write it as 500MB, 5GB or 1TB")


# ---------------------------------------------------------------------- --check


def _numeric_check(said: probe.Probe, source: ModelSource, dtype: str, *, adapter: bool) -> Check:
    """Return whether a folder is the model of which the trainer ``said`` this."""

    def check(folder: Path) -> None:
        said.prove(partial(_adapted, source, folder) if adapter else partial(_plain, folder, said.scores), dtype=dtype)

    return check


def _plain(folder: Path, scores: bool) -> PreTrainedModel:
    """As anybody opens it: with transformers alone."""
    import torch
    from transformers import AutoModelForSequenceClassification

    kind: Any = AutoModelForSequenceClassification if scores else auto_class(load_config(ModelSource(str(folder))))
    model: PreTrainedModel = kind.from_pretrained(folder, dtype=torch.float32)
    return model


def _adapted(source: ModelSource, folder: Path) -> PreTrainedModel:
    """The adapter in ``folder`` through peft, on the weights that the run began with."""
    import peft
    import torch

    base = load_model(replace(source, adapters=source.adapters[:-1]), dtype=torch.float32)
    base.set_attn_implementation("eager")  # ours takes packed sequences
    return cast("PreTrainedModel", peft.PeftModel.from_pretrained(base, str(folder)))
