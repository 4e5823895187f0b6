"""The run folder `<run.dir>/<run.name>/`, its owner, and the signals that stop a run.

    config.toml      the resolved config
    provenance.json  where each value came from
    run.json         command, status, why it failed, process, host, versions, times
    metrics.jsonl    written by `posttrain.tracking`
    warnings.jsonl   likewise, if there are any
    logs/            output of the driver and its workers
    rollouts/        written by `posttrain.rollout.writer`
    checkpoints/     written by `posttrain.train.checkpoint`

A folder is created whole or not at all, and one that is not a run is never deleted.
"""

from __future__ import annotations

import errno
import json
import os
import platform
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Literal, NamedTuple, Self

from posttrain import __version__
from posttrain.config.presets import Resolved
from posttrain.config.writing import dump_toml
from posttrain.core.errors import ConfigError, Interrupted, PosttrainError
from posttrain.core.files import first_within, read_object, remove, write_text, writing
from posttrain.core.machines import this_machine
from posttrain.core.registry import unknown
from posttrain.core.signals import TERMINATING, handle, leave_terminal, restore
from posttrain.runs.lock import RunLock
from posttrain.runs.resume import (
    begun_by_overwrite,
    branch,
    check_resumable,
    files_read,
    find_start,
    go_back,
    is_barren,
)
from posttrain.tracking.log import LOGS
from posttrain.train import checkpoint
from posttrain.train.checkpoint import Checkpoint

Status = Literal["finished", "failed", "interrupted"]

VERSIONED = ("torch", "transformers", "ray", "numpy", "pyarrow")

STATE = "run.json"

_ANEW = "and with --resume never it begins anew"

_GRACE_S = 5.0
"""Time for a step to end and be saved. Workers and Ray then take up to 4 s to end, so all have ended 10 s after
Ctrl-C."""


@dataclass(frozen=True)
class RunDir:
    """An open run folder. Make one with ``RunTarget.open``; end it with ``finish``."""

    path: Path
    resumed: bool
    """True when the folder was there already: look for a checkpoint in it."""
    start: Checkpoint | None = None
    """The checkpoint that a run without one of its own starts from"""
    changes: tuple[str, ...] = ()
    """``key: old -> new`` of the config, where the run continues another"""
    notes: tuple[str, ...] = ()
    """What the user should know about how the folder was opened"""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Package -> version that the run uses"""
    _lock: RunLock | None = field(default=None, repr=False, compare=False)

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints; it may not exist yet."""
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        """The folder of the logs of driver and workers; it may not exist yet."""
        return self.path / LOGS

    def finish(self, status: Status, failure: PosttrainError | None = None) -> None:
        """Record how the run ended, and let others open it. After ``finished`` it cannot be resumed.

        Raises:
            RunError, ConfigError: that cannot be written. Others can open it all the same.
        """
        try:
            state = _read_state(self.path) | {"status": status, "ended": _now()}
            if failure is not None:
                state["failure"] = {
                    "message": failure.message,
                    "hint": failure.hint,
                    "exit_code": failure.exit_code,
                    "who": failure.who or "driver",
                    "time": _now(),
                }
            write_text(self.path / STATE, _json(state))
        finally:
            if self._lock is not None:
                self._lock.release()


@dataclass(frozen=True)
class RunTarget:
    """The folder that a run will have. ``RunTarget.find`` checks it before anything costly, and ``open`` creates it."""

    path: Path
    resolved: Resolved
    start: Checkpoint | None
    """The checkpoint that `run.resume` names"""

    @classmethod
    def find(cls, resolved: Resolved) -> RunTarget:
        """Return the target of a run that may be opened. Nothing is written.

        Raises:
            ConfigError: as ``named``; the folder exists and is finished, in use, of another config, or not a run; or
                `run.resume` names a checkpoint that this run cannot begin with.
            UserError: as ``named``.
        """
        target = cls.named(resolved)
        target._look()
        return target

    @classmethod
    def named(cls, resolved: Resolved) -> RunTarget:
        """Return the target of a run, whatever is in its folder.

        Raises:
            ConfigError: it has no name.
            UserError: `run.resume` names no sound checkpoint.
        """
        run = resolved.config.run
        if not run.name:
            raise ConfigError("run.name = '' is not a folder name", hint="give one with --name NAME")
        return cls(Path(run.dir) / run.name, resolved, find_start(run.resume))

    def check_steps(self, total_steps: int) -> None:
        """Raise ``ConfigError`` where a run of so many steps would end before those that it goes on from."""
        own = checkpoint.last_step(self.path / "checkpoints") if self._look().goes_on else None
        step = max(own or 0, self.start.step if self.start else 0)
        finishes = own == total_steps and self._state()["status"] != "finished"  # at most the last step's end is left
        if step < total_steps or finishes or not step:
            return
        raise ConfigError(
            f"nothing is left to train: the run goes on after step {step}, and ends after step {total_steps}",
            hint=f"--steps counts all steps: give more than {step}; to train the weights on something else, start from "
            "them: --model PATH, under another --name",
        )

    def open(self) -> RunDir:
        """Create the folder, or reopen the unfinished one that is there.

        Raises:
            ConfigError: as ``find``, of what has come about since; or it cannot be created. Nothing is left behind
                then, and nothing is deleted.
            RunError: the disk is full or broken; likewise.
        """
        found, resolved = self._look(), self.resolved
        versions = {"posttrain": __version__, "python": platform.python_version(), **_versions()}
        lock = RunLock.take(self.path) if self._exists() else None
        if not found.goes_on:
            lock = _create(self.path, resolved, versions, replaced=lock)
            return RunDir(self.path, False, self.start, found.changes, found.notes, versions, lock)
        assert lock is not None
        try:
            state = {key: value for key, value in self._state().items() if key not in ("ended", "failure")}
            state |= {"status": "running", "resumed": _now(), "versions": versions, **_process()}
            _write_files(self.path, resolved, state)
        except BaseException:
            lock.release()
            raise
        return RunDir(self.path, True, self.start, found.changes, found.notes, versions, lock)

    def _look(self) -> _Found:
        """Return what opening the folder does. Raises ``ConfigError`` where it must not be opened."""
        path, resolved, start = self.path, self.resolved, self.start
        if not self._exists():
            return _Found(False, branch(start, resolved))
        state = self._state()
        _check_owner(path, state)
        if resolved.config.run.overwrite:
            if (changes := begun_by_overwrite(path, state, resolved)) is not None:
                return _Found(True, changes, (f"run {path} was begun by this --overwrite: it goes on, {_ANEW}",))
            read = files_read(start, resolved.config)
            if (lost := first_within(path, read)) is not None:
                raise ConfigError(
                    f"--overwrite would delete {read[lost]}, which the run reads", hint="give --name NAME"
                )
            return _Found(False, branch(start, resolved))
        if start is not None and start.path.parent.resolve() == (path / "checkpoints").resolve():
            return _Found(True, go_back(path, state, start, resolved))
        try:
            return _Found(True, tuple(check_resumable(path, state, resolved)))
        except ConfigError:
            if state.get("status") != "failed" or resolved.config.run.resume == "never" or not is_barren(path):
                raise
            replaced = f"run {path} had failed before its first checkpoint: it is replaced"
            return _Found(False, branch(start, resolved), (replaced,))

    def _exists(self) -> bool:
        return self.path.exists() and not (self.path.is_dir() and not any(self.path.iterdir()))

    def _state(self) -> dict[str, Any]:
        return _read_state(self.path)


class _Found(NamedTuple):
    """The effect of opening a folder."""

    goes_on: bool
    """True: the run in it is resumed; False: a new run is created, and replaces what is there"""
    changes: tuple[str, ...]
    notes: tuple[str, ...] = ()


def run_folder(root: str | Path, name: str | Path) -> Path:
    """Return the folder of a run, by its path or as ``find_run`` does by its name. A folder that is no run's does not
    hide the run of its name. Raises ``ConfigError`` where there is no such run."""
    return Path(name) if (Path(name) / STATE).is_file() else find_run(root, str(name))


def find_run(root: str | Path, name: str) -> Path:
    """Return the folder of a run, by name; ``latest`` is the newest one with a checkpoint.

    Raises:
        ConfigError: there is no such run; the hint has the nearest name.
    """
    if name == "latest":
        return latest_run(root)
    path = Path(root) / name
    if (path / STATE).is_file():
        return path
    known = [file.parent.name for file in Path(root).glob("*/run.json")]
    raise ConfigError(f"no run {name!r} in {root}", hint=unknown(name, known))


def weights_of(root: str | Path, path: str, key: str = "model.path") -> str:
    """Return the folder or hub id that a model path stands for: `run:NAME` is the run's newest checkpoint,
    `run:NAME/best` its best one. Messages name ``key``.

    Raises:
        ConfigError: the path is empty, there is no such run, or it has no checkpoint.
    """
    if not path:
        raise ConfigError(f"{key} is empty", hint="give a folder, a hub id (org/name), run:NAME or builtin:tiny")
    if not path.startswith("run:"):
        return path
    name, best = path.removeprefix("run:"), ""
    if name.endswith("/best"):
        name, best = name.removesuffix("/best"), "best"
    try:
        run = find_run(root, name) / best
    except ConfigError as error:
        raise ConfigError(
            f"{key} = {path!r}: {error.message}",
            hint=f"{error.hint}; train it first, or give --model PATH (builtin:tiny is the untrained tiny model)",
        ) from error
    return str(checkpoint.find(run).path)


def latest_run(root: str | Path) -> Path:
    """Return the training run with the newest complete checkpoint. Raises ``ConfigError`` when there is none."""
    found: list[tuple[float, Path]] = []
    for marker in Path(root).glob("*/checkpoints/global_step_*/COMPLETE"):
        path = marker.parents[2]
        if (path / STATE).is_file() and _read_state(path).get("command") in ("sft", "prefer", "rl"):
            found.append((marker.stat().st_mtime, path))
    if not found:
        raise ConfigError(f"no run with a checkpoint in {root}", hint="train one first: posttrain sft")
    return max(found)[1]


class StopSignal:
    """Turns Ctrl-C, SIGTERM and SIGHUP into a request to stop, and into an exception when that takes too long.

    The first signal sets ``requested``: the loop ends after the current step and saves. ``grace_s`` seconds after
    Ctrl-C, or at a second signal, ``KeyboardInterrupt`` is raised in the main thread. SIGTERM and SIGHUP have no such
    limit: the scheduler that sends them has one of its own. Outside the main thread nothing is installed.
    """

    def __init__(self, grace_s: float = _GRACE_S) -> None:
        self.grace_s = grace_s
        self.requested = False
        self.by: signal.Signals | None = None
        """The signal of ``TERMINATING`` that asked; None: Ctrl-C, or none did"""
        self._old: dict[int, Any] = {}
        self._timer: tuple[float, float] | None = None

    def __enter__(self) -> Self:
        self._old = handle((signal.SIGINT, *TERMINATING), self._on_signal)
        self._old |= handle((signal.SIGALRM,), self._on_alarm)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._timer is not None:
            signal.setitimer(signal.ITIMER_REAL, *self._timer)
        restore(self._old)

    def interrupted(self, done: str) -> Interrupted:
        """Return the exception of a loop that was asked to stop and ended after ``done``."""
        if self.by is None:
            return Interrupted(f"stopped after {done}")
        return Interrupted(f"stopped by {self.by.name} after {done}", exit_code=0)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        leave_terminal()
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        if number in TERMINATING:
            self.by = signal.Signals(number)
        else:
            self._timer = signal.setitimer(signal.ITIMER_REAL, self.grace_s)

    def _on_alarm(self, number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt


def _create(path: Path, resolved: Resolved, versions: Mapping[str, str], *, replaced: RunLock | None = None) -> RunLock:
    """Write the new folder under a temporary name, then rename it, so that it is never seen in part.

    ``replaced``: the lock of the folder that it replaces."""
    made_root = not path.parent.exists()
    temporary: Path | None = None
    try:
        with writing(path, hint="choose a place: --set run.dir=DIR"):
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent))
            temporary.chmod(0o755)
            lock = RunLock.take(temporary)
            _write_files(temporary, resolved, _new_state(resolved, versions))
            if replaced is not None:
                shutil.rmtree(path)
            _rename(temporary, path)
    except BaseException:
        if temporary is not None:
            remove(temporary)
        if made_root and path.parent.is_dir() and not any(path.parent.iterdir()):
            path.parent.rmdir()
        raise
    finally:
        if replaced is not None:
            replaced.release()
    return lock


def _rename(temporary: Path, path: Path) -> None:
    try:
        temporary.rename(path)
    except OSError as error:
        if path.is_dir() and error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            raise ConfigError(f"run {path} is in use: it was started just now", hint="give --name NAME") from error
        raise


def _write_files(path: Path, resolved: Resolved, state: dict[str, Any]) -> None:
    write_text(path / "config.toml", dump_toml(resolved.config))
    write_text(path / "provenance.json", _json(resolved.provenance))
    write_text(path / STATE, _json(state))


def _read_state(path: Path) -> dict[str, Any]:
    """Read run.json. A folder without one is not a run, and is never changed."""
    file = path / STATE
    if not file.is_file():
        raise ConfigError(f"{path} exists and is not a run folder", hint="give another name with --name NAME")
    return read_object(file, hint="give another name with --name NAME")


def _check_owner(path: Path, state: dict[str, Any]) -> None:
    here = state.get("host") == socket.gethostname()
    if state.get("status") != "running" or not here:
        return
    pid = int(state.get("pid", 0))
    # The start time tells the owner from a later process that was given the same pid.
    if pid > 0 and _started(pid) is not None and _started(pid) == state.get("pid_started"):
        raise ConfigError(f"run {path} is in use by process {pid}", hint="wait for it, or give --name NAME")


def _new_state(resolved: Resolved, versions: Mapping[str, str]) -> dict[str, Any]:
    return {
        "command": resolved.config.command,
        "preset": resolved.preset_name,
        "status": "running",
        **_process(),
        "versions": dict(versions),
        "started": _now(),
    }


def _process() -> dict[str, Any]:
    pid = os.getpid()
    machine = this_machine().stored()
    return {"pid": pid, "pid_started": _started(pid), "host": socket.gethostname(), "machine": machine}


def _started(pid: int) -> str | None:
    """Return when a process started, in the system's own unit; None when it is not alive."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        if Path("/proc/self/stat").exists():
            return None
        try:
            os.kill(pid, 0)  # a system without /proc
        except ProcessLookupError:
            return None
        except PermissionError:
            return "unknown"
        return "unknown"
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else fields[19]


def _versions() -> dict[str, str]:
    from importlib import metadata

    found: dict[str, str] = {}
    for package in VERSIONED:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def _now() -> str:
    return datetime.fromtimestamp(time.time(), UTC).isoformat(timespec="seconds")


def _json(value: Any) -> str:
    return json.dumps(value, indent=1) + "\n"
