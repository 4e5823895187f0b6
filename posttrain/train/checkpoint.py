"""Checkpoints as folders: how one comes to be whole, how it is checked, and which of them are kept.

    runs/<name>/checkpoints/global_step_N/
        actor/model, actor/optim     torch.distributed.checkpoint shards, readable at any world size
        actor/random                 state of every worker's random number generators
        actor/adapter                LoRA only: the adapter as peft writes it; actor/model then holds nothing else
        actor/huggingface            config and tokenizer; the full safetensors too with checkpoint.save_hf
        critic/...                   the same of a critic
        meta.json  loader.json       run state of the driver
        in_flight.parquet            rl: episodes that were played and not yet trained on, as a rollout file
        COMPLETE                     size and sha256 of every other file, and of itself
    runs/<name>/checkpoints/latest      the newest folder's name
    runs/<name>/checkpoints/best.json   the best one's step, by `checkpoint.best`

A checkpoint is written under a temporary name and renamed once ``COMPLETE`` is in it. What workers write is in
``train.saver``.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from posttrain.core.errors import UserError
from posttrain.core.files import remove, sync, write_text

Digest = dict[str, Any]
"""``bytes`` and ``sha256`` of a file"""

State = Mapping[str, Any] | Callable[[Path], None]
"""State of the driver as JSON, or what writes the file that holds it"""

PROBE = "probe.json"
"""What the trainer said of two fixed texts; see ``posttrain.runs.probe``."""

_READERS = 8
"""Files that are hashed at the same time."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    path: Path
    step: int

    def read(self, name: str) -> dict[str, Any]:
        """A JSON file of the checkpoint."""
        return dict(json.loads((self.path / name).read_text(encoding="utf-8")))


# ---------------------------------------------------------------------- writing


def begin(checkpoints: Path, step: int) -> Path:
    """An empty temporary folder for the checkpoint of ``step``; leftovers of killed saves are removed."""
    remove_unfinished(checkpoints)
    folder = checkpoints / f".tmp_global_step_{step}"
    folder.mkdir(parents=True)
    return folder


def remove_unfinished(checkpoints: Path) -> None:
    """Remove what saves have left that did not come to their end. Nobody may be writing."""
    for left in checkpoints.glob(".tmp_global_step_*"):
        remove(left)


class Abandoned(Exception):
    """Nobody wants the checkpoint any more that a thread commits."""


class Wanted:
    """Tells a thread that commits a checkpoint that nobody wants it any more. Its files may be removed then: it is
    not put in its place later."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._abandoned = False

    def check(self) -> None:
        """Raise ``Abandoned`` if that has happened."""
        if self._abandoned:
            raise Abandoned

    @contextmanager
    def to_the_end(self) -> Iterator[None]:
        """Put off ``abandon`` until the work inside is done. Raises ``Abandoned``."""
        with self._lock:
            self.check()
            yield

    def abandon(self) -> None:
        """Have the thread give up, unless it is at the end of its work: then wait for that."""
        with self._lock:
            self._abandoned = True


def commit(
    folder: Path,
    step: int,
    states: Mapping[str, State],
    keep: int,
    written: Mapping[str, Digest] | None = None,
    wanted: Wanted | None = None,
) -> Checkpoint:
    """Finish a checkpoint whose shards are written: driver state, ``COMPLETE``, rename, ``latest``, remove old ones.

    Args:
        written: digests of files in it that are known already; the others are read.
        wanted: asked between its parts. Raises ``Abandoned``.
    """
    wanted = wanted or Wanted()
    for name, state in states.items():
        wanted.check()
        if callable(state):
            state(folder / name)
            sync(folder / name)
        else:
            write_text(folder / name, json.dumps(state, indent=1), synced=True)
    known = dict(written or {})
    files = {str(p.relative_to(folder)): p for p in sorted(folder.rglob("*")) if p.is_file()}
    known |= _digests({name: path for name, path in files.items() if name not in known}, wanted)
    write_text(folder / "COMPLETE", _manifest(step, {name: known[name] for name in files}), synced=True)
    for place in [p for p in folder.rglob("*") if p.is_dir()] + [folder]:
        sync(place)
    final = folder.parent / f"global_step_{step}"
    with wanted.to_the_end():
        shutil.rmtree(final, ignore_errors=True)
        os.replace(folder, final)
        write_text(folder.parent / "latest", final.name, synced=True)
        sync(folder.parent)
        _drop_old(folder.parent, step, keep)
    return Checkpoint(final, step)


def _drop_old(checkpoints: Path, step: int, keep: int) -> None:
    """Remove all but the newest ``keep`` and the best. A later one that the run could not resume from does not count:
    it must not push out what was just written."""
    best = read_best(checkpoints)
    older = [folder for folder in _folders(checkpoints) if _step(folder) <= step]
    for folder in older[keep:]:
        if best is None or _step(folder) != best.step:
            # First out of sight: a removal that is cut short must not leave a folder that looks damaged.
            doomed = checkpoints / f".tmp_{folder.name}"
            os.replace(folder, doomed)
            shutil.rmtree(doomed)


def digest(path: Path) -> Digest:
    """Size and hash of a file."""
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _digests(files: Mapping[str, Path], wanted: Wanted | None = None) -> dict[str, Digest]:
    def read(path: Path) -> Digest:
        if wanted is not None:
            wanted.check()
        return digest(path)

    with ThreadPoolExecutor(_READERS) as pool:
        return dict(zip(files, pool.map(read, files.values()), strict=True))


def _manifest(step: int, files: Mapping[str, Digest]) -> str:
    """What ``COMPLETE`` says; its last entry is the hash of the others."""
    content = {"step": step, "files": files}
    own = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    return json.dumps(content | {"sha256": own}, indent=1)


# ---------------------------------------------------------------------- the best one


@dataclass(frozen=True)
class Best:
    """The step whose checkpoint is kept as the best, and why."""

    step: int
    metric: str
    value: float


def write_best(checkpoints: Path, best: Best) -> None:
    """Remember it, in the place of the one before."""
    write_text(checkpoints / "best.json", json.dumps(asdict(best)), synced=True)


def read_best(checkpoints: Path) -> Best | None:
    """The step that was written last; None where there is none, or its file is damaged."""
    try:
        return Best(**json.loads((checkpoints / "best.json").read_text()))
    except (OSError, ValueError, TypeError):
        return None


# ---------------------------------------------------------------------- reading


def verify(path: Path) -> str | None:
    """What is wrong with a checkpoint folder, or None. Reads all of it."""
    try:
        text = (path / "COMPLETE").read_text(encoding="utf-8")
    except FileNotFoundError:
        return "it is not complete"
    except (OSError, ValueError):
        return "COMPLETE is damaged"
    try:
        content = json.loads(text)
        step, files = int(content["step"]), dict(content["files"])
        intact = text == _manifest(step, files)
    except (ValueError, KeyError, TypeError):
        intact = False
    if not intact:
        return "COMPLETE is damaged"
    if path in _folders(path.parent) and step != _step(path):
        return f"it is the checkpoint of step {step}"
    if missing := next((name for name in files if not (path / name).is_file()), None):
        return f"{missing} is missing"
    if PROBE in files and not _probe_is_finite(path / PROBE):
        return f"its weights give no finite numbers ({PROBE})"
    # Sizes first: they cost nothing.
    other = (name for name, expected in files.items() if (path / name).stat().st_size != expected["bytes"])
    if (cut := next(other, None)) is not None:
        return f"{cut} is damaged: its size is another"
    found = _digests({name: path / name for name in files})
    return next((f"{name} is damaged" for name, expected in files.items() if found[name] != expected), None)


def _probe_is_finite(file: Path) -> bool:
    """Return whether all that the trainer said of the probe's texts is finite. Damage is for digests to find."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return True
    return all_finite(content)


def all_finite(probe: Mapping[str, Any]) -> bool:
    """Return whether the log-probabilities, or scores, of a probe are finite."""
    rows = [probe["scores"]] if "scores" in probe else probe.get("logprobs", [])
    return all(math.isfinite(value) for row in rows for value in row)


def newest(checkpoints: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest sound checkpoint, and a line for each newer one that is broken."""
    problems: list[str] = []
    for folder in _folders(checkpoints):
        problem = verify(folder)
        if problem is None:
            return Checkpoint(folder, _step(folder)), problems
        problems.append(f"checkpoint {folder} is not usable: {problem}")
    return None, problems


def last_step(checkpoints: Path) -> int | None:
    """Return the step of the newest checkpoint, sound or not; None where there is none."""
    return next(iter(steps(checkpoints)), None)


def steps(checkpoints: Path) -> list[int]:
    """Return the steps whose checkpoints lie in a folder, sound or not, the newest first."""
    return [_step(folder) for folder in _folders(checkpoints)]


def find(path: str | Path) -> Checkpoint:
    """The checkpoint that a run folder, its ``checkpoints`` folder or a ``global_step_N`` folder stands for: of a run
    the one that it wrote last; with ``/best`` behind one of the first two the best one, by `checkpoint.best`.

    Raises:
        UserError: there is none, or it is not sound. An older one never takes its place: the hint names it.
    """
    folder = Path(path)
    if folder.name == "best" and not folder.exists():
        folder = _find_best(folder.parent)
    if folder.name.startswith("global_step_") and folder.is_dir():
        return _sound(folder)
    last = _last(_root(folder))
    if last is None:
        raise UserError(
            f"no checkpoint in {path}: no global_step_N folder in it",
            hint="give a run folder or a global_step_N folder",
        )
    return _sound(last)


def _sound(folder: Path) -> Checkpoint:
    check(folder)
    return Checkpoint(folder, _step(folder))


def check(folder: Path) -> None:
    """Raise ``UserError`` where the checkpoint in a folder, which may have any name, is not sound."""
    problem = verify(folder)
    if problem is None:
        return
    others = _folders(folder.parent)
    older = others[others.index(folder) + 1 :] if folder in others else []
    sound = next((place for place in older if verify(place) is None), None)
    raise UserError(
        f"checkpoint {folder} is not usable: {problem}",
        hint="no checkpoint before it is sound" if sound is None else f"the newest sound one before it is {sound}",
    )


def check_all(manifests: Iterable[Path]) -> None:
    """Check the checkpoints that ``COMPLETE`` files belong to. Raises ``UserError``."""
    for manifest in manifests:
        check(manifest.parent)


def _find_best(folder: Path) -> Path:
    best = read_best(_root(folder))
    if best is None:
        raise UserError(
            f"no best checkpoint in {folder}", hint="a run keeps one where checkpoint.best names a metric of its steps"
        )
    return _root(folder) / f"global_step_{best.step}"


def _root(folder: Path) -> Path:
    """The folder of checkpoints that a run's folder, or this folder itself, is."""
    return folder / "checkpoints" if (folder / "checkpoints").is_dir() else folder


def _last(checkpoints: Path) -> Path | None:
    """The folder that was written last. A later one that a run did not go on from is none of it."""
    folders = _folders(checkpoints)
    try:
        latest = (checkpoints / "latest").read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        latest = ""
    return next((folder for folder in folders if folder.name == latest), folders[0] if folders else None)


def _folders(checkpoints: Path) -> list[Path]:
    """Checkpoint folders, newest first. One that was renamed (``global_step_3.bak``) is not ours."""
    ours = (p for p in checkpoints.glob("global_step_*") if p.is_dir() and p.name[len("global_step_") :].isdigit())
    return sorted(ours, key=_step, reverse=True)


def _step(folder: Path) -> int:
    digits = folder.name.removeprefix("global_step_")
    if not digits.isdigit():
        raise UserError(f"not a checkpoint folder: {folder}", hint="its name must be global_step_N")
    return int(digits)
