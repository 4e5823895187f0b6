"""`posttrain merge-ckpt`: a sharded checkpoint to a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

from posttrain.models.export import export
from posttrain.models.load import locate
from posttrain.runs import find_run
from posttrain.train import checkpoint


def run(path: str, out: str, *, overwrite: bool = False, runs: str = "runs") -> Path:
    """Merge a checkpoint (a run's name or folder, or a ``global_step_N`` folder) into ``out``; returns ``out``.

    Raises:
        UserError: no sound checkpoint there, or ``out`` exists (with ``overwrite``: and is not a model's folder).
    """
    folder = Path(path) if Path(path).is_dir() else find_run(runs, path)
    found = checkpoint.find(folder)
    export(locate(str(found.path)), Path(out), overwrite=overwrite)
    return Path(out)
