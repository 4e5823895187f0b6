"""`posttrain plan`: what a run will take, before it starts and without a GPU; and what it took, beside that.

Imports neither torch nor transformers.
"""

from __future__ import annotations

import json
import socket
from dataclasses import replace
from pathlib import Path

import tomli

from posttrain.config import Config
from posttrain.config.keys import flatten_tree
from posttrain.config.presets import config_of, import_algorithms
from posttrain.core.errors import ConfigError, DataError, UserError
from posttrain.core.files import read_object
from posttrain.core.machines import machine_stored
from posttrain.plan.compare import Pair, compare, computed_of, lengths_of, waits_of
from posttrain.plan.estimate import Plan, Question
from posttrain.plan.inputs import Known, PlanOptions, question_of, replans
from posttrain.plan.problems import problems
from posttrain.plan.table import as_data, render
from posttrain.tracking.metrics import FILE_NAME, read_metrics
from posttrain.tracking.report.folder import DAMAGED


def show(cfg: Config, asked: PlanOptions | None = None, as_json: bool = False, *, known: Known | None = None) -> str:
    """Return the plan of a run, as text or as one JSON line.

    Raises:
        UserError: the model cannot be found here, or a GPU of this name.
    """
    asked = asked or PlanOptions()
    question = question_of(cfg, asked, known)
    plan = Plan(question)
    found = problems(plan, replans(question, asked, known))
    return json.dumps(as_data(plan, found)) if as_json else render(plan, found)


def show_run(folder: Path, asked: PlanOptions, as_json: bool) -> str:
    """Return a run's figures beside those that a plan predicts with the lengths that it had, for the machine that it
    ran on or the one that was described.

    Raises:
        UserError: there is no run, it has no metrics, or its model cannot be found.
    """
    cfg = stored_config(folder)
    question, notes = _question_of_run(cfg, folder, asked)
    pairs = compared(question, folder)
    if as_json:
        rows = [{"metric": p.name, "predicted": p.predicted, "measured": p.measured, "off": p.off} for p in pairs]
        told = {"machine": question.machine.describe(), "notes": notes, "compared": rows}
        return json.dumps({"run": cfg.run.name, "command": cfg.command, **told})
    width = max(len(pair.name) for pair in pairs)
    lines = [f"posttrain {cfg.command} {cfg.run.name}", f"predicted for: {question.machine.describe()}"]
    lines += [f"note: {note}" for note in notes]
    lines += [f"  {'':<{width}}  predicted   measured    off"]
    lines += [f"  {p.name:<{width}}  {p.predicted:>9.4g}  {p.measured:>9.4g}  {p.off:>+4.0%}" for p in pairs]
    return "\n".join(lines)


def _question_of_run(cfg: Config, folder: Path, asked: PlanOptions) -> tuple[Question, list[str]]:
    """Return what a run was, and what to know of the comparison: it may have been made on another machine."""
    state = read_object(folder / "run.json", hint=DAMAGED)
    host, here, kept = str(state.get("host", "")), socket.gethostname(), "machine" in state
    theirs = machine_stored(None if cfg.cluster.device == "cpu" else state["machine"]) if kept else None
    question = question_of(cfg, asked, machine=theirs if asked == PlanOptions(length=asked.length) else None)
    notes: list[str] = []
    if theirs is not None and theirs.kind != question.machine.kind:
        notes.append(f"the run was made on another machine: {theirs.describe()}; its times and memory are of that one")
    elif theirs is None and asked.gpu is None and host != here:
        notes.append(
            f"the run was made on another machine, {host or 'of unknown name'}, and this is {here}: times and memory "
            "are predicted for this one; --gpu names the run's"
        )
    return question, [*notes, *question.notes]


def compared(question: Question, folder: Path) -> list[Pair]:
    """Return what is both predicted and measured of a run. Raises ``DataError`` where it has no metrics yet."""
    rows = read_metrics(folder)
    file = folder / FILE_NAME
    if not rows and file.is_file() and file.stat().st_size:
        raise DataError(f"{file} does not hold metrics", hint=DAMAGED)
    lengths = lengths_of(question.cfg, rows)
    if lengths is None:
        raise DataError(
            f"{file} has no steps yet", hint="wait for the first step; run.logger must have had jsonl in it"
        )
    lengths = replace(lengths, images=question.lengths.images)
    waits, computed = waits_of(question.cfg, rows), computed_of(rows)
    return compare(Plan(replace(question, lengths=lengths, typical=True, waits=waits, computed=computed)), rows)


def closing_line(cfg: Config, folder: Path) -> str | None:
    """Return the same in one line, for the end of a run; None: there is nothing to say, as on a CPU."""
    if cfg.cluster.device == "cpu":
        return None
    try:
        pairs = compared(question_of(cfg, PlanOptions()), folder)
    except UserError:
        return None  # without metrics, or of a model that plan does not know
    except Exception as error:  # whatever it is: a run that has been trained does not fail for it
        return f"warning: nothing was compared with the plan: {type(error).__name__}: {error}"
    if len(pairs) < 2:
        return None
    return "predicted / measured: " + ", ".join(pair.describe() for pair in pairs)


def stored_config(folder: Path) -> Config:
    """Return the config of a run. Raises ``ConfigError``."""
    file = folder / "config.toml"
    try:
        tree = tomli.loads(file.read_text(encoding="utf-8"))
        import_algorithms(tree.get("plugins"), [flatten_tree(tree)])
        return config_of(tree, str(file))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}", hint="was it made by this version?") from error
