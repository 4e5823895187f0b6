"""The memory of GPUs that trainers and engines share: whether a run fits, and what its weight updates may take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from posttrain.config import Config
from posttrain.core.errors import ConfigError, ModelError
from posttrain.core.machines import this_machine
from posttrain.core.sizes import GIB
from posttrain.plan.advice import Problem, assignments
from posttrain.plan.estimate import Plan
from posttrain.plan.inputs import PlanOptions, question_of, replans
from posttrain.plan.layout import sync_budget
from posttrain.plan.problems import impossible, too_large

_OVER_BUDGET = 1.05
"""A weight update that takes more than this times its budget is worth a warning."""


@dataclass
class MemoryBudget:
    """What a weight update may take of the trainers' GPUs, and whether it did."""

    gib: float | None
    """None: not known"""
    note: Callable[[str], Any]
    warned: bool = False

    def check(self, metrics: dict[str, float]) -> dict[str, float]:
        """Return the metrics of an update with the budget beside them. The first one above it is told of."""
        used = metrics.get("sync/gpu_used_gib")
        if used is None or self.gib is None:
            return metrics
        if used > _OVER_BUDGET * self.gib and not self.warned:
            self.warned = True
            self.note(
                f"warning: a weight update took {used:.1f} GiB of a GPU, and {self.gib:.1f} were reckoned with: "
                "does another program use it? (docs/plan.md)"
            )
        return metrics | {"sync/gpu_budget_gib": self.gib}


def check_budget(cfg: Config) -> float | None:
    """Return the GiB that a weight update is to take of the trainers' fullest GPU; None: on a CPU, or of a cluster
    elsewhere, or where no engine shares it.

    Raises:
        ConfigError: weights and caches alone do not fit onto the GPUs of this machine.
    """
    plan = _plan_here(cfg)
    if plan is None:
        return None
    problem = impossible(plan, replans(plan.question, PlanOptions()))
    if problem is not None:
        raise ConfigError(problem.message, hint=_hint(problem))
    budget = sync_budget(plan.layout)
    return None if budget is None else budget / GIB


def memory_warning(cfg: Config) -> str | None:
    """Return what to tell of a run that has no room on this machine's GPUs, with micro-batches as large as they may be;
    None: it has, or it is not known."""
    plan = _plan_here(cfg)
    problem = None if plan is None else too_large(plan, replans(plan.question, PlanOptions()))
    if problem is None:
        return None
    return f"warning: by its plan this run {problem.message}\n  hint: {_hint(problem)}"


def _plan_here(cfg: Config) -> Plan | None:
    """Return the plan of a run on this machine's GPUs; None: it runs on a CPU or elsewhere, or no plan can be made of
    its kind of model."""
    if cfg.cluster.device == "cpu" or cfg.cluster.address is not None:
        return None
    machine = this_machine()
    if not machine.memory:
        return None
    try:
        return Plan(question_of(cfg, PlanOptions(), machine=machine))
    except ModelError:
        return None


def _hint(problem: Problem) -> str:
    """Return the settings that put a problem right, as they are typed, or what else helps."""
    fixes = [f"--set {' --set '.join(assignments(settings))}" for settings in problem.settings]
    return f"{' or '.join(fixes) or problem.otherwise}; `posttrain plan` shows every moment"
