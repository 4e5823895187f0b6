"""A plan as text, and as plain data for JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from posttrain.core.sizes import GIB
from posttrain.plan.advice import Problem, assignments
from posttrain.plan.estimate import Plan
from posttrain.plan.layout import Moment

_COLUMNS = {
    "weights": ("parameters", "gathered weights"),
    "optimizer": ("optimizer",),
    "gradients": ("gradients",),
    "activations": ("activations", "images", "in flight", "left of the sync check"),
    "logits": ("logits",),
    "buckets": ("buckets",),
    "engine": ("engine weights", "engine process", "engine steps"),
    "KV cache": ("KV cache",),
}
"""Columns of the memory table: what is added up in each; all else is in `other`."""


def render(plan: Plan, found: Sequence[Problem]) -> str:
    """For people, sections one after the other."""
    return "\n".join(line for section in _sections(plan, found) for line in [*section, ""]).rstrip()


def _sections(plan: Plan, found: Sequence[Problem]) -> Iterator[list[str]]:
    yield _head(plan)
    yield ["one step", *_aligned(_batch(plan))]
    if plan.moments:
        fullest = f"fullest GPU, GiB of {plan.question.machine.memory / GIB:.1f}"
        where = fullest if plan.question.machine.memory else "a process, GiB"
        yield [where, *_aligned(_memory(plan))]
    if plan.phases:
        yield ["seconds of a step", *_aligned(_time(plan))]
    if found:
        yield [line for problem in found for line in _problem(problem)]
    else:
        yield ["no problems found"]


def _head(plan: Plan) -> list[str]:
    q, shape = plan.question, plan.question.shapes.actor
    cfg = q.cfg
    layers = f"{shape.kind}, {shape.layers} layers of {shape.hidden}"
    seeing = f", {shape.of_tower:,} of them in the vision tower" if shape.tower is not None else ""
    model = f"{cfg.model.path}: {shape.parameters:,} parameters ({layers}){seeing}"
    groups = ", ".join(f"{t.role} on {t.world}" for t in plan.layout.trainers)
    lines = [f"posttrain {cfg.command} {cfg.run.name}", model, f"machine: {q.machine.describe()}"]
    if groups:
        lines.append(f"training workers: {groups}")
    if plan.layout.engine is not None:
        rollout = cfg.rollout
        place = "on the trainers' GPUs" if plan.layout.colocated else "on GPUs of their own"
        why = f" (rollout.engine = auto: {q.kernels.auto_engine.reason})" if rollout.engine == "auto" else ""
        count = f"{rollout.replicas} x {plan.layout.engine.name} of {rollout.tensor_parallel}"
        lines.append(f"engines: {count}, {place}{why}")
    return lines


# ---------------------------------------------------------------------- tables


def _batch(plan: Plan) -> list[list[str]]:
    batch, cfg = plan.batch, plan.question.cfg
    one = {"sft": "conversations", "prefer": "pairs", "rl": "prompts"}.get(cfg.command, "prompts")
    rows = [["", "of all", "of a rank"]]
    rows.append([one, f"{batch.groups if cfg.command != 'prefer' else cfg.data.batch_size:,}", ""])
    if cfg.command != "sft":
        name = "sequences" if cfg.command == "prefer" else f"episodes ({cfg.rollout.n} each)"
        rows.append([name, f"{batch.sequences:,}", f"{batch.sequences / batch.ranks:,.0f}"])
    rows.append(["tokens", f"{batch.tokens:,}", f"{batch.tokens_per_rank:,.0f}"])
    if cfg.trains:
        share = plan.question.lengths.loss_share
        rows.append(["tokens with loss", f"{batch.tokens * share:,.0f}", f"{batch.tokens_per_rank * share:,.0f}"])
        rows.append(["optimizer steps", str(batch.updates), ""])
        if batch.updates > 1:
            rows.append(["groups of each", ", ".join(map(str, batch.groups_per_update)), ""])
        rows.append(["micro-batches of each (accumulated)", "", str(batch.micro_batches)])
        rows.append(["tokens of a micro-batch, expected", "", f"{batch.largest:,}"])
        rows.append(["tokens of a micro-batch, at most", "", f"{batch.worst:,}"])
        rows.append(["data-parallel ranks", str(batch.ranks), ""])
    lengths = plan.question.lengths
    rows.append(["tokens of a sequence", f"{lengths.mean:,.0f} ({lengths.source})", ""])
    if lengths.turns > 1.0:
        rows.append(["turns of an episode", f"{lengths.turns:.1f}", ""])
    if (images := lengths.images).count:
        told = f"{images.count:.1f} of {images.patches:,.0f} patches, {images.tokens:,.0f} tokens ({images.source})"
        rows.append(["images of a sequence", told, ""])
    if batch.steps is not None:
        rows.append(["steps of the run", f"{batch.steps:,}", ""])
        rates = ", ".join(f"{rate:.3g} at {step:,}" for step, rate in batch.rates)
        rows.append(["learning rate at optimizer step", rates, ""])
    return rows


def _memory(plan: Plan) -> list[list[str]]:
    used = [name for name, terms in _COLUMNS.items() if any(m.terms.get(t) for m in plan.moments for t in terms)]
    rows = [["at", *used, "other", "total", ""]]
    memory = plan.question.machine.memory
    for moment in plan.moments:
        cells = [sum(moment.terms.get(term, 0.0) for term in _COLUMNS[name]) for name in used]
        over = "too much" if memory and moment.total > memory else ""
        shown = [f"{cell / GIB:.1f}" if cell else "" for cell in [*cells, moment.total - sum(cells), moment.total]]
        rows.append([_name(moment), *shown, over])
    return rows


def _name(moment: Moment) -> str:
    return f"{moment.name} (engines' GPU)" if moment.gpu == "engines" else moment.name


def _time(plan: Plan) -> list[list[str]]:
    rows = [["phase", "seconds", "bound by"]]
    rows += [[name, f"{phase.total:.2f}", phase.bound] for name, phase in plan.phases.items()]
    seconds = plan.step_seconds
    assert seconds is not None
    if plan.overlap:
        rows.append(["sampling while training", f"-{plan.overlap:.2f}", ""])
    if plan.late:
        rows.append(["waiting for groups that are not ready", f"{plan.late:.2f}", ""])
    rows.append(["step", f"{seconds:.2f}", f"{plan.batch.tokens / seconds:,.0f} tokens/s"])
    if plan.mfu is not None:
        rows.append(["MFU of the updates", f"{100 * plan.mfu:.0f} %", ""])
    if plan.batch.steps is not None:
        rows.append(["run without validation", f"{seconds * plan.batch.steps / 3600:.2f} h", ""])
    if plan.layout.trainers:
        rows.append(["a save, that training waits for", f"{plan.save_seconds:.2f}", ""])
    return rows


def _problem(problem: Problem) -> list[str]:
    lines = [f"{'  or set' if number else '  set'} {text}" for number, text in enumerate(problem.advice)]
    if not lines and problem.otherwise:
        lines = [f"  {problem.otherwise}"]
    return [f"{problem.level}: {problem.message}", *lines]


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns as wide as they must be: the first to the left, the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        first = row[0].ljust(widths[0])
        rest = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  " + "  ".join([first, *rest]).rstrip())
    return lines


# ---------------------------------------------------------------------- JSON


def as_data(plan: Plan, found: Sequence[Problem]) -> dict[str, Any]:
    """Numbers and text only; bytes and seconds as they are."""
    q, batch, shape = plan.question, plan.batch, plan.question.shapes.actor
    gpu = q.machine.gpu
    return {
        "command": q.cfg.command,
        "run": q.cfg.run.name,
        "model": {"path": q.cfg.model.path, "type": shape.kind, "parameters": shape.parameters},
        "machine": {
            "gpu": None if gpu is None else gpu.name,
            "gpus": q.machine.gpus,
            "nodes": q.machine.nodes,
            "memory_gib": None if gpu is None else gpu.memory_gib,
        },
        "batch": {
            "sequences": batch.sequences,
            "groups": batch.groups,
            "tokens": batch.tokens,
            "loss_share": q.lengths.loss_share,
            "ranks": batch.ranks,
            "optimizer_steps": batch.updates,
            "groups_per_update": list(batch.groups_per_update),
            "micro_batches": batch.micro_batches,
            "largest_micro_batch": batch.largest,
            "micro_batch_at_most": batch.worst,
            "mean_length": q.lengths.mean,
            "lengths_from": q.lengths.source,
            "images": q.lengths.images.count,
            "patches_of_image": q.lengths.images.patches,
            "tokens_of_image": q.lengths.images.tokens,
            "steps": batch.steps,
            "learning_rate": {str(step): rate for step, rate in batch.rates},
        },
        "memory": [
            {
                "at": moment.name,
                "gpu": moment.gpu,
                "terms_gib": {name: size / GIB for name, size in moment.terms.items()},
                "total_gib": moment.total / GIB,
                "allocated_gib": moment.allocated / GIB,
            }
            for moment in plan.moments
        ],
        "host_gib": {name: size / GIB for name, size in plan.host.items()},
        "seconds": {name: {"total": phase.total, "bound_by": phase.bound} for name, phase in plan.phases.items()},
        "overlap_seconds": plan.overlap,
        "late_seconds": plan.late,
        "waiting": plan.waiting,
        "step_seconds": plan.step_seconds,
        "fits": plan.fits if q.machine.memory else None,
        "problems": [
            {
                "level": p.level,
                "message": p.message,
                "set": [assignments(settings) for settings in p.settings],
                "otherwise": "" if p.settings else p.otherwise,
            }
            for p in found
        ],
    }
