"""Runs that were stopped, made of runs that were not."""

from __future__ import annotations

import re
import shutil
from pathlib import Path


def stopped_after(step: int, whole: Path, name: str) -> Path:
    """Return a copy of a run's folder, called ``name``, as the run left it when it was stopped after ``step``, whose
    checkpoint it has still."""
    folder = Path(shutil.copytree(whole, whole.with_name(name)))
    for checkpoint in (folder / "checkpoints").glob("global_step_*"):
        if int(re.sub(r"\D", "", checkpoint.name)) > step:
            shutil.rmtree(checkpoint)
    assert (folder / "checkpoints" / f"global_step_{step}").is_dir()
    (folder / "checkpoints" / "latest").write_text(f"global_step_{step}")
    state = folder / "run.json"
    state.write_text(state.read_text().replace('"finished"', '"interrupted"'))
    rows = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(rows[:step]))
    return folder
