"""`posttrain quickstart`: the whole pipeline on a tiny model, and what each stage gained.

    prep -> generate (untrained) -> sft -> generate -> rl -> generate -> merge-ckpt

One Ray instance serves all stages; everything else is what the commands of the same names do.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from posttrain import merge_ckpt
from posttrain.cluster.cluster import local_ray
from posttrain.config.presets import resolve
from posttrain.core.text import printable, table
from posttrain.evaluation.command import evaluate
from posttrain.generation import command as generate
from posttrain.models.export import check_replaceable
from posttrain.prep import command as prep
from posttrain.rl import command as rl
from posttrain.sft import command as sft
from posttrain.tracking.report.background import FILE

PASS_AT = (1, 5)
STAGES = {"base": "untrained", "sft": "after SFT", "rl": "after RL"}


@dataclass(frozen=True)
class Pipeline:
    """What the stages work on."""

    dataset: str
    model: str
    preset: str
    """The preset of `rl`; those of `sft` and `generate` are named after it."""
    notes: Mapping[str, str]
    """What is said of a stage before it starts"""


TEXT = Pipeline(
    "arith",
    "builtin:tiny",
    "tiny-arith",
    {
        "prep": "generated word problems",
        "sft": "conversations with a tool",
        "rl": "GRPO on multi-turn episodes with the tool",
    },
)
VISION = Pipeline(
    "shapes",
    "builtin:tiny-vision",
    "tiny-vision",
    {
        "prep": "generated pictures and questions about them",
        "sft": "conversations with pictures",
        "rl": "GRPO on questions about pictures",
    },
)


def run(seed: int, out: Path, as_json: bool, overwrite: bool, pipeline: Pipeline = TEXT) -> dict[str, Any]:
    """Run every stage into ``out`` and print a table, and with ``as_json`` one JSON line on stdout.

    Raises:
        DataError: ``out`` exists and ``overwrite`` is false, or ``out`` holds something else than a quickstart.
    """
    started = time.monotonic()
    check_replaceable(out, overwrite, "a quickstart", is_quickstart)
    if out.exists():
        shutil.rmtree(out)
    data = out / "data"
    note(f"prep: {pipeline.notes['prep']}")
    prep.run(pipeline.dataset, out=str(data), seed=seed)
    stages: dict[str, dict[str, float]] = {}

    def score(stage: str, model: str) -> None:
        flags = common(f"generate-{stage}") | {"model.path": model, "generate.data": str(data / "test.parquet")}
        file = generate.run(resolve("generate", f"{pipeline.preset}-generate", flags=flags))
        overall = evaluate(file, PASS_AT).overall
        stages[stage] = {f"pass@{k}": float(overall[f"pass@{k}"] or 0.0) for k in PASS_AT}
        note(f"{STAGES[stage]}: " + ", ".join(f"{name} {100 * value:.1f} %" for name, value in stages[stage].items()))

    def common(name: str) -> dict[str, Any]:
        return {"run.dir": str(out), "run.name": name, "run.seed": seed}

    with local_ray():
        note("generate: the untrained model on held-out problems")
        score("base", pipeline.model)
        note(f"sft: {pipeline.notes['sft']}")
        preset = f"{pipeline.preset}-sft"
        shown = resolve("sft", preset).config
        flags = common("sft") | {"data.train": str(data / "sft_train.parquet")}
        if shown.data.val:
            flags["data.val"] = str(data / "sft_test.parquet")
        sft.run(resolve("sft", preset, flags=flags))
        score("sft", "run:sft")
        note(f"rl: {pipeline.notes['rl']}")
        flags = common("rl") | {"model.path": "run:sft", "data.train": str(data / "train.parquet")}
        rl.run(resolve("rl", pipeline.preset, flags=flags))
        score("rl", "run:rl")
    report = out / "rl" / FILE
    merged = merge_ckpt.run("rl", str(out / "merged"), runs=str(out))
    note(f"merge-ckpt: {merged}")

    seconds = round(time.monotonic() - started, 1)
    result = {"stages": stages, "seconds": seconds, "merged": str(merged), "report": str(report)}
    print_table(stages, seconds)
    note(f"report: {report}")
    if as_json:
        typer.echo(json.dumps(result))
    return result


def is_quickstart(folder: Path) -> bool:
    """Return whether an earlier quickstart made this folder."""
    return any((folder / mark).is_file() for mark in ("data/sft_train.parquet", "sft/run.json"))


def note(text: str) -> None:
    typer.echo(printable(f"== {text}"), err=True)


def print_table(stages: Mapping[str, Mapping[str, float]], seconds: float) -> None:
    """The table at the end, on stderr so that stdout stays for the JSON line."""
    columns = ("model", *(f"pass@{k}" for k in PASS_AT))
    rows = [
        (STAGES[stage], *(f"{100 * scores[f'pass@{k}']:.1f} %" for k in PASS_AT)) for stage, scores in stages.items()
    ]
    Console(file=sys.stderr).print(table(columns, rows, title=f"held-out problems, {seconds:.0f} s in all"))
