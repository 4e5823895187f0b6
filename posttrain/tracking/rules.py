"""Rules that find in the last steps of a run what is likely to be wrong with it.

A rule is a pure function of a window of steps. It returns a finding with a level, which rises as the matter gets worse,
or None. ``posttrain.tracking.warnings`` raises each finding once, and again when its level rises.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from posttrain.algos import ADVANTAGES
from posttrain.config import Config
from posttrain.core.text import shortened
from posttrain.core.types import Failure

WINDOW = 200
"""Steps that a rule may look back."""
_RECENT, _FEW = 10, 5
"""Steps over which shares of failures, and other means, are taken."""
_FAILING = (0.01, 0.1, 0.5)
"""Levels of a share of failures."""
_STREAK = (10, 100)
"""Levels of a number of steps in a row."""
_MESSAGE = 300
"""Characters of a first error that are shown."""


@dataclass(frozen=True)
class Observed:
    """A finished step."""

    step: int
    metrics: Mapping[str, float]
    errors: Mapping[Failure, str] = field(default_factory=dict)
    """The first message of each kind of failure in the step."""


@dataclass(frozen=True)
class Finding:
    """What a rule has found."""

    level: int
    """1 or more."""
    text: str
    hint: str
    """What to do."""


Window = Sequence[Observed]
"""Steps in their order, the newest last; at least one."""
Rule = Callable[[Window], Finding | None]


def rules_of(cfg: Config) -> dict[str, Rule]:
    """Return the rules that have a meaning under this config, by name."""
    advantage = ADVANTAGES.get(cfg.algo.advantage)
    by_group = advantage.group and (cfg.rollout.n > 1 or bool(cfg.rollout.replay))
    without = {"equal_rewards" if by_group else "no_signal"}
    if advantage.teacher and not cfg.rollout.only:
        without |= {"equal_rewards", "no_signal"}  # rewards are not read
    if cfg.rollout.replay:
        without |= {"trainer_engine_gap", "policy_moved"}  # another policy sampled
    return {name: rule for name, rule in RULES.items() if name not in without}


# ---------------------------------------------------------------------- failures


def graders_fail(window: Window) -> Finding | None:
    """Find episodes whose grader or reward function failed."""
    return _failing(
        window, "grader", "rollout/grader_failed", "rollout/episodes", "episodes could not be graded",
        "mend the grader or reward.function; --examine 4 shows graded conversations, and reward.on_error says what "
        "such an episode counts as",
    )  # fmt: skip


def episodes_fail(window: Window) -> Finding | None:
    """Find episodes that ended in an error."""
    return _failing(
        window, "episode", "rollout/failed", "rollout/episodes", "episodes failed and were left out",
        "look at the first error: an engine, a tool or a deadline (rollout.episode_deadline_s)",
    )  # fmt: skip


def validation_fails(window: Window) -> Finding | None:
    """Find validation episodes that failed or could not be graded: the accuracy says little about the model then."""
    return _failing(
        window[-1:], "validation", "rollout/val_failed", "rollout/val_episodes",
        "validation episodes failed or could not be graded",
        "look at the first error; the trajectories of the validation are in rollouts/ of the run",
    )  # fmt: skip


def tools_fail(window: Window) -> Finding | None:
    """Find tool calls that are nearly all answered with an error."""
    recent = window[-_RECENT:]
    calls, failed = _sum(recent, "rollout/tool_calls"), _sum(recent, "rollout/tool_errors")
    level = _level(failed / calls, (0.8, 0.99)) if calls >= 20 else 0
    return _finding(
        level,
        f"{failed:,.0f} of {calls:,.0f} tool calls {_when(recent)} were answered with an error{_first(recent, 'tool')}",
        "call the tool by hand with these arguments; if the model writes calls in another way, check "
        "rollout.tool_format",
    )


def engines_lost(window: Window) -> Finding | None:
    """Find engines that died and were replaced."""
    lost = window[-1].metrics.get("rollout/samplers_lost", 0.0)
    return _finding(
        _level(lost, (1, 3, 10)),
        f"{_count(lost, 'engine')} died so far, and requests went on elsewhere{_first(window, 'engine')}",
        "a run survives cluster.sampler_restarts of them; lower rollout.memory_fraction or rollout.max_concurrent if "
        "memory ran out",
    )


def skipped_updates(window: Window) -> Finding | None:
    """Find updates that were skipped because their gradient was not finite."""
    metrics = window[-1].metrics
    skipped = metrics.get("train/skipped_steps", metrics.get("actor/skipped_steps", 0.0))
    return _finding(
        _level(skipped, (1, 10, 100)),
        f"{_count(skipped, 'update')} skipped so far: the gradient was not finite",
        "lower train.optim.lr, or compare with train.dtype = 'float32'; train.max_skipped_steps in a row end the run",
    )


# ---------------------------------------------------------------------- nothing to learn from


def no_signal(window: Window) -> Finding | None:
    """Find steps in a row in which no group of episodes has different rewards."""
    streak = _streak(window, lambda m: m.get("rollout/groups_without_signal") == 1.0)
    if all(_equal(step.metrics) for step in streak):
        return _same_reward(streak)
    return _finding(
        _level(len(streak), _STREAK),
        f"in each of the last {len(streak)} steps all episodes of every group had the same reward: nothing is learned",
        "use prompts that the model solves sometimes, raise rollout.n, or draw others with rollout.filter_groups",
    )


def equal_rewards(window: Window) -> Finding | None:
    """Find steps in a row in which all rewards are the same."""
    return _same_reward(_streak(window, _equal))


def groups_filtered(window: Window) -> Finding | None:
    """Find that `rollout.filter_groups` leaves out nearly all groups."""
    recent = window[-_FEW:]
    kept, filtered = _sum(recent, "rollout/groups"), _sum(recent, "rollout/filtered_groups")
    level = _level(filtered / (kept + filtered), (0.8, 0.95)) if len(recent) == _FEW and filtered else 0
    return _finding(
        level,
        f"rollout.filter_groups left out {filtered:,.0f} of {kept + filtered:,.0f} groups {_when(recent)}: all "
        "episodes of each had the same reward",
        "use prompts that the model solves sometimes, or raise rollout.n: sampling takes as many times as long",
    )


def answers_cut(window: Window) -> Finding | None:
    """Find answers that end because they have reached the length limit."""
    share = _mean(window[-_FEW:], "response_length/clip_ratio")
    return _finding(
        _level(share, (0.5, 0.95)),
        f"{100 * share:.0f} % of the answers {_when(window[-_FEW:])} were cut at rollout.max_response_tokens",
        "raise rollout.max_response_tokens, or check that the model ends its turns (the chat template's end token)",
    )


# ---------------------------------------------------------------------- a policy that goes astray


def trainer_engine_gap(window: Window) -> Finding | None:
    """Find probabilities of trainer and engine that differ, where both have the same weights."""
    recent = window[-_FEW:]
    part = "same_weights/" if any("staleness/max" in step.metrics for step in recent) else ""
    outside, apart = _mean(recent, f"rollout_gap/{part}outside"), _mean(recent, f"rollout_gap/{part}mean_abs")
    return _finding(
        _level(outside, (0.1, 0.5)),
        f"for {100 * outside:.0f} % of the tokens {_when(recent)} the ratio of trainer's to engine's probability is "
        f"outside [0.9, 1.1] (log-probabilities are {apart:.2g} apart in the mean)",
        "correct for it with algo.correction.weight, try rollout.batch_invariant or train.dtype = 'float32'; with "
        "several updates a step, lower train.optim.lr",
    )


def policy_moved(window: Window) -> Finding | None:
    """Find a policy that moves far from the one that sampled, within a step."""
    moved = abs(_mean(window[-_FEW:], "actor/ppo_kl"))
    return _finding(
        _level(moved, (0.1, 1.0)),
        f"actor/ppo_kl is {moved:.2g} in the mean of the last {_FEW} steps: the policy moves far within a step",
        "lower train.optim.lr or algo.updates_per_step",
    )


def kl_explodes(window: Window) -> Finding | None:
    """Find a policy far from its reference."""
    for name in ("actor/kl_loss", "actor/reward_kl_penalty"):
        kl = _mean(window[-_FEW:], name)
        if level := _level(kl, (1.0, 10.0)):
            return Finding(
                level,
                f"{name} is {kl:.2g} in the mean of the last {_FEW} steps: the policy has left its reference",
                "lower train.optim.lr, or raise algo.kl_coef; checkpoints of earlier steps may be better",
            )
    return None


def entropy_collapses(window: Window) -> Finding | None:
    """Find an entropy that has fallen to a small part of what it was."""
    before, now = _mean(window[:_RECENT], "actor/entropy"), _mean(window[-_RECENT:], "actor/entropy")
    level = _level(before / max(now, 1e-12), (20, 200)) if len(window) > _RECENT and before > 0 else 0
    return _finding(
        level,
        f"actor/entropy has fallen from {before:.2g} to {now:.2g} since step {window[0].step}: the policy hardly "
        "explores",
        "raise algo.entropy_coef or algo.clip_high, or lower train.optim.lr",
    )


def memory_grows(window: Window) -> Finding | None:
    """Find memory of a GPU that is not freed: all of the last steps took more than all of those before them."""
    used = [step.metrics.get("sync/gpu_used_gib", 0.0) for step in window]
    last, before = used[-_RECENT:], used[-2 * _RECENT : -_RECENT]
    grows = len(before) == _RECENT and 0.0 < max(before) < min(last)
    return _finding(
        _level(last[-1] / used[0], (1.05, 1.25)) if grows and used[0] else 0,
        f"the GPU memory in use grew from {used[0]:.1f} to {used[-1]:.1f} GiB {_when(window)}, and does not stop",
        "longer answers may take it (response_length/mean). If they are no longer, something is not freed: report it, "
        "with the run's config.toml; a run that is resumed begins with free memory",
    )


RULES: dict[str, Rule] = {
    rule.__name__: rule
    for rule in (
        graders_fail, episodes_fail, validation_fails, tools_fail, engines_lost, skipped_updates, no_signal,
        equal_rewards, groups_filtered, answers_cut, trainer_engine_gap, policy_moved, kl_explodes, entropy_collapses,
        memory_grows,
    )
}  # fmt: skip
"""By the name that a warning has in files."""


# ---------------------------------------------------------------------- arithmetic


def _failing(window: Window, kind: Failure, failed: str, of: str, what: str, hint: str) -> Finding | None:
    """Return the share of two metrics that count, over the last steps."""
    recent = window[-_RECENT:]
    count, total = _sum(recent, failed), _sum(recent, of)
    share = count / total if total else 0.0
    text = f"{count:,.0f} of {total:,.0f} {what} {_when(recent)} ({_percent(share)}){_first(recent, kind)}"
    return _finding(_level(share, _FAILING), text, hint)


def _same_reward(streak: Window) -> Finding | None:
    value = streak[-1].metrics["critic/score/mean"] if streak else 0.0
    return _finding(
        _level(len(streak), _STREAK),
        f"every reward was the same in each of the last {len(streak)} steps (the last: {value:g}): nothing is learned",
        "--examine 4 shows graded conversations: does the grader find the answers, and are some of them right?",
    )


def _equal(metrics: Mapping[str, float]) -> bool:
    """Return true if several episodes of a step all had the same reward."""
    several = metrics.get("rollout/episodes", 2.0) > 1
    return several and "critic/score/max" in metrics and metrics["critic/score/max"] == metrics["critic/score/min"]


def _finding(level: int, text: str, hint: str) -> Finding | None:
    return Finding(level, text, hint) if level else None


def _level(value: float, bounds: Sequence[float]) -> int:
    """Return how many of the rising ``bounds`` a value reaches; 0 for one that is not a number."""
    return sum(value >= bound for bound in bounds)


def _sum(window: Window, name: str) -> float:
    return float(sum(step.metrics.get(name, 0.0) for step in window))


def _mean(window: Window, name: str) -> float:
    """Return the mean of ``_FEW`` steps or more; 0 where fewer steps have the metric: one odd step is no trend."""
    values = [float(step.metrics[name]) for step in window if name in step.metrics]
    return sum(values) / len(values) if len(values) >= _FEW else 0.0


def _streak(window: Window, test: Callable[[Mapping[str, float]], bool]) -> Window:
    """Return the newest steps, as far back as all of them pass."""
    count = next((i for i, step in enumerate(reversed(window)) if not test(step.metrics)), len(window))
    return window[len(window) - count :]


def _first(window: Window, kind: Failure) -> str:
    """Return the first message of a kind of failure, as the end of a sentence."""
    first = next((step.errors[kind] for step in window if kind in step.errors), None)
    return "" if first is None else f"; the first: {shortened(first, _MESSAGE)}"


def _when(window: Window) -> str:
    first, last = window[0].step, window[-1].step
    return f"in step {last}" if first == last else f"in steps {first} to {last}"


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %" if share < 0.1 else f"{100 * share:.0f} %"


def _count(number: float, what: str) -> str:
    return f"{number:,.0f} {what}{'' if number == 1 else 's'}"
