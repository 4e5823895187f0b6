"""The checkpoint that a run starts from, and the keys in which its config may differ from that of the checkpoint."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli

from posttrain.config import Config
from posttrain.config.keys import current_keys, flatten_tree
from posttrain.config.presets import Resolved
from posttrain.config.writing import flatten_config
from posttrain.core.errors import ConfigError
from posttrain.core.registry import nearest
from posttrain.rollout.files import rollouts_folder
from posttrain.runs.early_stop import EarlyStop
from posttrain.train import checkpoint
from posttrain.train.checkpoint import Checkpoint

MAY_CHANGE = frozenset(
    {
        *("description", "run.dir", "run.resume", "run.restarts", "run.overwrite", "run.logger"),
        *("run.console", "run.report", "run.rollouts", "run.rollouts_every", "run.profile", "reward.examine"),
        *("train.steps", "train.save_every", "train.val_every", "train.max_skipped_steps"),
        *("data.workers", "data.prefetch", "data.deadline_s"),
        *("checkpoint.keep", "checkpoint.best", "checkpoint.best_mode", "checkpoint.save_hf", "checkpoint.background"),
        *("cluster.address", "cluster.workers", "cluster.start_deadline_s", "cluster.step_deadline_s"),
        *("cluster.silence_deadline_s", "cluster.sampler_restarts", "train.sequence_parallel", "train.shard_size"),
        "rollout.replicas",
    }
)
"""Keys in which a resumed run may differ from the run it goes on with."""

REPEATS = (MAY_CHANGE | {"run.name", "rollout.replay_schedule", "rollout.episode_deadline_s"}) - {
    *("train.steps", "train.val_every", "cluster.workers", "train.sequence_parallel", "train.shard_size"),
    "rollout.replicas",
}
"""Keys in which a run may differ from the one whose schedule it repeats."""

MUST_AGREE = (
    *("command", "model.path", "train.lora.", "train.optim.name", "prefer.method"),
    *("data.train", "data.keep", "data.shuffle", "data.batch_size", "run.seed"),
    *("algo.updates_per_step", "critic.warmup_steps"),
)
"""Keys, or prefixes of keys, in which a new run must agree with the checkpoint that it starts from: those that say what
its weights are, and what its positions in the data and in the schedule of the learning rate mean."""

PLAY = ("rollout.", "tools", "reward.", "data.enable_thinking", "data.template_kwargs")
"""Keys, or prefixes of keys, that say how episodes are played and graded."""


def find_start(resume: str) -> Checkpoint | None:
    """Return the checkpoint that `run.resume` names. Raises ``UserError``."""
    if resume in ("auto", "never"):
        return None
    if not resume:
        raise ConfigError("run.resume is empty", hint="give auto, never, or the folder of a run or a checkpoint")
    if not Path(resume).exists() and Path(resume).name != "best":
        close = nearest(resume, ["auto", "never"])
        hint = f"did you mean {close!r}?" if close else "give auto, never, or the folder of a run or a checkpoint"
        raise ConfigError(f"run.resume = {resume!r}: there is no such folder", hint=hint)
    return checkpoint.find(resume)


def check_resumable(path: Path, state: dict[str, Any], resolved: Resolved) -> list[str]:
    """Return the permitted changes against the config of the run in ``path``. Raises ``ConfigError`` where it cannot be
    resumed with this config."""
    config = resolved.config
    again = "--overwrite to start it again, or --name NAME for another folder"
    if state.get("status") == "finished":
        raise ConfigError(f"output folder exists: {path} holds a finished run", hint=_further(path, again))
    if config.run.resume == "never":
        raise ConfigError(f"output folder exists: {path} holds an unfinished run", hint=f"--resume auto, {again}")
    if state.get("command") != config.command:
        raise ConfigError(f"output folder exists: {path} is a run of `posttrain {state.get('command')}`", hint=again)
    changes = _changes(_stored_config(path), config)
    if refused := _harmful(changes):
        learned = checkpoint.last_step(path / "checkpoints") is not None
        begin = f" (--resume {shlex.quote(str(path))} begins there with what this run has learned)" if learned else ""
        raise ConfigError(
            f"{path} holds an unfinished run of another config:\n{_shown(refused)}",
            hint=f"give the same values, {again}{begin}",
        )
    return list(changes.values())


def _further(path: Path, again: str) -> str:
    """Return the hint for a finished run that is started again."""
    step = checkpoint.last_step(path / "checkpoints")
    if step is None:
        return again
    return (
        f"to train it further: --resume {shlex.quote(str(path))} --steps N, with N above {step}; "
        f"to start from its weights: --model {shlex.quote(f'run:{path.name}')} --name OTHER; {again}"
    )


def begun_by_overwrite(path: Path, state: Mapping[str, Any], resolved: Resolved) -> tuple[str, ...] | None:
    """Return the changes against the unfinished run in ``path`` if the same command with `--overwrite` began it.

    Such a command resumes its own run, after Ctrl-C or when a scheduler starts it again, and does not delete it. None:
    it is another run, or `run.resume` is ``never``."""
    unfinished = state.get("status") != "finished" and state.get("command") == resolved.config.command
    if not unfinished or resolved.config.run.resume == "never":
        return None
    try:
        stored = _stored_config(path)
    except ConfigError:  # a run whose config cannot be read cannot be resumed
        return None
    changes = _changes(stored, resolved.config)
    return tuple(changes.values()) if stored.get("run.overwrite") and not _harmful(changes) else None


def is_barren(path: Path) -> bool:
    """Return whether a run has left neither a checkpoint nor rollouts, so that nothing is lost if it is deleted."""
    return checkpoint.last_step(path / "checkpoints") is None and not any(rollouts_folder(path).glob("*"))


def _harmful(changes: Mapping[str, str]) -> dict[str, str]:
    """Return the changes of keys in which a resumed run must not differ."""
    return {key: text for key, text in changes.items() if key not in MAY_CHANGE}


def go_back(path: Path, state: Mapping[str, Any], start: Checkpoint, resolved: Resolved) -> tuple[str, ...]:
    """Return the changes against a run that is resumed by the path of its own checkpoint. Raises ``ConfigError`` unless
    it is the last one (a run that resumed an earlier one would write the later ones again), and as ``branch``."""
    newest, _ = checkpoint.newest(path / "checkpoints")
    if newest is not None and newest.step > start.step:
        raise ConfigError(
            f"run.resume = {str(start.path)!r}: run {path} has gone on to step {newest.step} since",
            hint="give --name NAME for a run that branches off there, or remove the later checkpoints",
        )
    if state.get("status") == "finished":
        _check_not_stopped(start, resolved.config)
    return _permitted(start, resolved)  # one that was killed as it stopped early has its end left to do


def branch(start: Checkpoint | None, resolved: Resolved) -> tuple[str, ...]:
    """Return the changes against the config of the checkpoint that a run starts from. Raises ``ConfigError`` where they
    would make the result meaningless, or leave nothing to train."""
    if start is None:
        return ()
    _check_not_stopped(start, resolved.config)
    return _permitted(start, resolved)


def _check_not_stopped(start: Checkpoint, config: Config) -> None:
    """Raise ``ConfigError`` where `train.early_stop` would end a run before its first step."""
    if config.train.early_stop.patience is not None and (stop := early_stop_after(start, config)).reached:
        raise ConfigError(
            f"nothing is left to train: after step {start.step} val/loss has not fallen below {stop.best:.4f} (step "
            f"{stop.best_step}) in {stop.without_better} validations, and train.early_stop.patience = {stop.patience} "
            "ends the run",
            hint=f"give more than {stop.without_better}, or --set train.early_stop.patience=none",
        )


def early_stop_after(found: Checkpoint, config: Config) -> EarlyStop:
    """Return `train.early_stop` as a run has it that goes on from a checkpoint. It begins anew where the checkpoint was
    validated on other data: losses of two sets do not compare."""
    stop = EarlyStop(config.train.early_stop.patience, config.train.early_stop.min_delta)
    meta = found.read("meta.json")
    if meta["config"]["data"]["val"] == config.data.val:
        stop.restore(meta["early_stop"])
    return stop


def _permitted(start: Checkpoint, resolved: Resolved) -> tuple[str, ...]:
    stored = _config_of(start)
    changes = _changes(stored, resolved.config)
    refused = {key: text for key, text in changes.items() if key.startswith(MUST_AGREE)}
    if bool(stored.get("rollout.replay")) != bool(resolved.config.rollout.replay):  # its position is of another kind
        refused["rollout.replay"] = changes["rollout.replay"]
    if refused:
        raise ConfigError(
            f"{start.path} was made with another config:\n{_shown(refused)}",
            hint="give the same values; to train its weights on something else, start from them: --model PATH",
        )
    return tuple(text for key, text in changes.items() if not key.startswith(("run.", "description")))


def files_read(start: Checkpoint | None, config: Config) -> dict[Path, str]:
    """Return the files and folders that a run reads, and the checkpoint that it begins with, by what they are called in
    its config."""
    given = [config.data.train, config.data.val, config.model.path, config.critic.path, config.algo.teacher]
    given += [config.reward.model.path]
    names = [name for value in given if value for name in ([value] if isinstance(value, str) else value)]
    names += [] if start is None else [str(start.path)]
    of_run = "run:"
    read = {
        Path(config.run.dir, name.removeprefix(of_run)) if name.startswith(of_run) else Path(name): name
        for name in names
    }
    repeated = config.rollout.replay_schedule  # the name of a run, or its folder
    return read | ({Path(config.run.dir, repeated): repeated, Path(repeated): repeated} if repeated else {})


def play_changes(start: Checkpoint, config: Config) -> list[str]:
    """Return the changes against the config of a checkpoint for which the episodes in it cannot be played on."""
    changes = _changes(_config_of(start), config)
    return [text for key, text in changes.items() if key.startswith(PLAY) and key not in MAY_CHANGE]


def _config_of(start: Checkpoint) -> dict[str, Any]:
    made_with = current_keys(flatten_tree(start.read("meta.json")["config"]), f"the config of {start.path}")
    return {key: value for key, value in made_with.items() if value is not None}


def _stored_config(path: Path) -> dict[str, Any]:
    try:
        stored = flatten_tree(tomli.loads((path / "config.toml").read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path / 'config.toml'} cannot be read: {error}", hint="--overwrite or --name NAME"
        ) from error
    return current_keys(stored, str(path / "config.toml"))


def _changes(old: Mapping[str, Any], config: Config) -> dict[str, str]:
    """Map each key that differs from the stored config to ``key: old -> new``."""
    new = flatten_config(config)
    keys = [key for key in dict.fromkeys([*old, *new]) if old.get(key) != new.get(key)]
    return {key: f"{key}: {old.get(key, 'none')!r} -> {new.get(key, 'none')!r}" for key in keys}


def _shown(changes: Mapping[str, str], count: int = 5) -> str:
    lines = [f"  {text}" for text in changes.values()]
    return "\n".join(lines[:count] + ([f"  and {len(lines) - count} more"] if len(lines) > count else []))
