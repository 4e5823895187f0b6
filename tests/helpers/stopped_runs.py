"""Runs that were stopped, made of runs that were not."""

from __future__ import annotations

import re
import shutil
from pathlib import Path


def cut_back(folder: Path, step: int) -> None:
    """Leave a run's folder as the run left it when it was stopped after ``step``, whose checkpoint it has still."""
    checkpoints = folder / "checkpoints"
    for checkpoint in checkpoints.glob("global_step_*"):
        if int(re.sub(r"\D", "", checkpoint.name)) > step:
            shutil.rmtree(checkpoint)
    assert (checkpoints / f"global_step_{step}").is_dir()
    (checkpoints / "latest").write_text(f"global_step_{step}")
    state = folder / "run.json"
    state.write_text(state.read_text().replace('"finished"', '"interrupted"'))
    rows = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(rows[:step]))
