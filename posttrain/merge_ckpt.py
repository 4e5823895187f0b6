"""`posttrain merge-ckpt`: a sharded checkpoint to a Hugging Face folder, or its LoRA adapter to one for peft."""

from __future__ import annotations

from pathlib import Path

from posttrain.errors import ConfigError
from posttrain.models.export import export, export_adapter
from posttrain.models.load import locate
from posttrain.runs import find_run
from posttrain.train import checkpoint


def run(path: str, out: str, *, overwrite: bool = False, adapter: bool = False, runs: str = "runs") -> Path:
    """Merge a checkpoint (a run's name or folder, or a ``global_step_N`` folder) into ``out``; returns ``out``.

    Args:
        adapter: of a LoRA run's checkpoint write the adapter alone, as peft reads it.

    Raises:
        UserError: no sound checkpoint there, no adapter in it, or ``out`` exists (with ``overwrite``: and is not a
            model's folder).
    """
    folder = Path(path) if Path(path).is_dir() else find_run(runs, path)
    found = checkpoint.find(folder)
    source = locate(str(found.path))
    if not adapter:
        export(source, Path(out), overwrite=overwrite)
    elif source.adapters:
        export_adapter(source, Path(out), overwrite=overwrite)
    else:
        raise ConfigError(f"{found.path} holds no adapter: the run trained all weights", hint="merge without --adapter")
    return Path(out)
