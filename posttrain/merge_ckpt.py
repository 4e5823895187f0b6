"""`posttrain merge-ckpt`: a sharded checkpoint to a Hugging Face folder, or its LoRA adapter to one for peft."""

from __future__ import annotations

import re
from pathlib import Path

from posttrain.errors import ConfigError
from posttrain.models.export import export, export_adapter
from posttrain.models.load import find_verl, locate
from posttrain.runs import find_run
from posttrain.train import checkpoint


def run(
    path: str,
    out: str,
    *,
    overwrite: bool = False,
    adapter: bool = False,
    dtype: str = "float32",
    max_shard_size: str = "5GB",
    runs: str = "runs",
) -> Path:
    """Merge a checkpoint (a run's name or folder, or a ``global_step_N`` folder; verl's too) into ``out``; returns
    ``out``.

    Args:
        adapter: of a LoRA run's checkpoint write the adapter alone, as peft reads it.
        dtype: of the weights: float32, bfloat16 or float16.
        max_shard_size: of a safetensors file, as "5GB".

    Raises:
        UserError: no sound checkpoint there, no adapter in it, or ``out`` exists (with ``overwrite``: and is not a
            model's folder).
    """
    check_size(max_shard_size)
    folder = Path(path) if Path(path).is_dir() else find_run(runs, path)
    place = find_verl(folder) or checkpoint.find(folder).path
    source = locate(str(place))
    if not adapter:
        export(source, Path(out), overwrite=overwrite, dtype=dtype, max_shard_size=max_shard_size)
    elif source.adapters:
        export_adapter(source, Path(out), overwrite=overwrite)
    else:
        raise ConfigError(f"{place} holds no adapter: the run trained all weights", hint="merge without --adapter")
    return Path(out)


def check_size(text: str) -> None:
    """Whether ``text`` is a size of files, as "5GB". Raises ``ConfigError``."""
    if not re.fullmatch(r"[1-9]\d*\s*[KMGT]B", text.strip().upper()):
        raise ConfigError(f"--max-shard-size: {text!r} is not a size", hint="write it as 500MB, 5GB or 1TB")
