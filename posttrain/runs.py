"""The run folder `<run.dir>/<run.name>/`, who owns it, and how a run is asked to stop.

    config.toml      the resolved config
    provenance.json  where each value came from
    run.json         command, status, process, host, versions, times
    metrics.jsonl    written by `posttrain.track`
    warnings.jsonl   likewise, once there are any
    traces/          written by `posttrain.data.trace_writer`
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
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Literal, Self

from posttrain import __version__
from posttrain.errors import ConfigError
from posttrain.files import write_text
from posttrain.lock import RunLock
from posttrain.planning.machines import this_machine
from posttrain.presets import Resolved, dump_toml
from posttrain.registry import unknown
from posttrain.resume import branch, check_resumable, find_start, go_back
from posttrain.train import checkpoint
from posttrain.train.checkpoint import Checkpoint

Status = Literal["finished", "failed", "interrupted"]

VERSIONED = ("torch", "transformers", "ray", "numpy", "pyarrow")

_GRACE_S = 5.0
"""Time for a step to end and be saved. Workers and Ray then take up to 4 s to go: 10 s after Ctrl-C nothing is left."""


@dataclass(frozen=True)
class RunDir:
    """An open run folder. Make one with ``RunDir.open``; end it with ``finish``."""

    path: Path
    resumed: bool
    """True when the folder was there already: look for a checkpoint in it."""
    start: Checkpoint | None = None
    """What a run without a checkpoint of its own begins with."""
    changes: tuple[str, ...] = ()
    """`key: old -> new` of the config, where it goes on from another."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Of the packages that it runs with."""
    _lock: RunLock | None = field(default=None, repr=False, compare=False)

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints; it may not exist yet."""
        return self.path / "checkpoints"

    @classmethod
    def open(cls, resolved: Resolved) -> RunDir:
        """Create the run's folder, or reopen the unfinished one of the same name and config.

        Raises:
            ConfigError: the folder exists and is finished, in use, of another config, or not a run; it cannot be
                created; or `run.resume` names a checkpoint that this run cannot begin with. Nothing is left behind
                then, and nothing is deleted.
            UserError: `run.resume` names no sound checkpoint.
        """
        run = resolved.config.run
        if not run.name:
            raise ConfigError("run.name = '' is not a folder name", hint="give one with --name NAME")
        path = Path(run.dir) / run.name
        start = find_start(run.resume)
        versions = {"posttrain": __version__, "python": platform.python_version(), **_versions()}
        exists = path.exists() and not (path.is_dir() and not any(path.iterdir()))
        if exists:
            state = _read_state(path)
            _check_owner(path, state)
        if exists and run.overwrite and start is not None and path.resolve() in start.path.resolve().parents:
            raise ConfigError(
                f"--overwrite would delete {start.path}, which the run is to begin with", hint="give --name NAME"
            )
        if not exists or run.overwrite:
            changes = branch(start, resolved)
            lock = RunLock.take(path) if exists else None
            lock = _create(path, resolved, versions, replaced=lock)
            return cls(path, False, start, changes, versions, lock)
        lock = RunLock.take(path)
        try:
            if start is not None and start.path.parent.resolve() == (path / "checkpoints").resolve():
                changes = go_back(path, start, resolved)
            else:
                changes = tuple(check_resumable(path, state, resolved))
            state |= {"status": "running", "resumed": _now(), "versions": versions, **_process()}
            _write_files(path, resolved, state)
        except OSError as error:
            lock.release()
            raise ConfigError(
                f"cannot write to run folder {path}: {error.strerror or error}",
                hint="choose a place: --set run.dir=DIR",
            ) from error
        except BaseException:
            lock.release()
            raise
        return cls(path, True, start, changes, versions, lock)

    def finish(self, status: Status) -> None:
        """Record how the run ended. After ``finished`` it cannot be resumed."""
        state = _read_state(self.path)
        write_text(self.path / "run.json", _json(state | {"status": status, "ended": _now()}))
        if self._lock is not None:
            self._lock.release()


def find_run(root: str | Path, name: str) -> Path:
    """The folder of a run, by name; ``latest`` is the newest one with a checkpoint.

    Raises:
        ConfigError: there is no such run; the hint has the nearest name.
    """
    if name == "latest":
        return latest_run(root)
    path = Path(root) / name
    if (path / "run.json").is_file():
        return path
    known = [file.parent.name for file in Path(root).glob("*/run.json")]
    raise ConfigError(f"no run {name!r} in {root}", hint=unknown(name, known))


def weights_of(root: str | Path, path: str, key: str = "model.path") -> str:
    """The folder or hub id that a model path stands for: of `run:NAME` the run's newest checkpoint, of `run:NAME/best`
    its best one. ``key`` is named in messages.

    Raises:
        ConfigError: there is no such run, or it has no checkpoint.
    """
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
    """The ``sft`` or ``rl`` run with the newest complete checkpoint. Raises ``ConfigError`` when there is none."""
    found: list[tuple[float, Path]] = []
    for marker in Path(root).glob("*/checkpoints/global_step_*/COMPLETE"):
        path = marker.parents[2]
        if (path / "run.json").is_file() and _read_state(path).get("command") in ("sft", "prefer", "rl"):
            found.append((marker.stat().st_mtime, path))
    if not found:
        raise ConfigError(f"no run with a checkpoint in {root}", hint="train one first: posttrain sft")
    return max(found)[1]


class StopSignal:
    """Ctrl-C and SIGTERM as a wish first, and as an exception when that takes too long.

    The first signal sets ``requested``: the loop ends after the current step and saves. ``grace_s`` seconds after
    Ctrl-C, or at a second signal, ``KeyboardInterrupt`` is raised in the main thread. SIGTERM has no such limit: the
    scheduler that sends it has one of its own. Outside the main thread nothing is installed, because Python allows
    handlers there only.
    """

    def __init__(self, grace_s: float = _GRACE_S) -> None:
        self.grace_s = grace_s
        self.requested = False
        self.terminated = False
        """By SIGTERM."""
        self._old: dict[int, Any] = {}
        self._timer: tuple[float, float] | None = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._old[number] = signal.signal(number, self._on_signal)
            self._old[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._on_alarm)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            signal.setitimer(signal.ITIMER_REAL, *self._timer)
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        self.terminated = number == signal.SIGTERM
        if not self.terminated:
            self._timer = signal.setitimer(signal.ITIMER_REAL, self.grace_s)

    def _on_alarm(self, number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt


def _create(path: Path, resolved: Resolved, versions: Mapping[str, str], *, replaced: RunLock | None = None) -> RunLock:
    """Write the new folder beside its place, then rename it: it is there whole or not at all. ``replaced``: the lock of
    the folder that is there already."""
    made_root = not path.parent.exists()
    temporary: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent))
        temporary.chmod(0o755)
        lock = RunLock.take(temporary)
        _write_files(temporary, resolved, _new_state(resolved, versions))
        if replaced is not None:
            shutil.rmtree(path)
        temporary.rename(path)
    except OSError as error:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
        if made_root and path.parent.is_dir() and not any(path.parent.iterdir()):
            path.parent.rmdir()
        if path.is_dir() and error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            raise ConfigError(f"run {path} is in use: it was started just now", hint="give --name NAME") from error
        reason = error.strerror or str(error)
        raise ConfigError(
            f"cannot create run folder {path}: {reason}", hint="choose a place: --set run.dir=DIR"
        ) from error
    finally:
        if replaced is not None:
            replaced.release()
    return lock


def _write_files(path: Path, resolved: Resolved, state: dict[str, Any]) -> None:
    write_text(path / "config.toml", dump_toml(resolved.config))
    write_text(path / "provenance.json", _json(resolved.provenance))
    write_text(path / "run.json", _json(state))


def _read_state(path: Path) -> dict[str, Any]:
    """run.json. A folder without one is not a run, and is never touched."""
    file = path / "run.json"
    if not file.is_file():
        raise ConfigError(f"{path} exists and is not a run folder", hint="give another name with --name NAME")
    try:
        state = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}", hint="give another name with --name NAME") from error
    if not isinstance(state, dict):
        raise ConfigError(f"{file} does not describe a run", hint="give another name with --name NAME")
    return state


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
    """When a process started, in the system's own unit; None when it is not alive."""
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
