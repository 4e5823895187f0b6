"""What a run's folder says of it, but for its trajectories: state, config, metrics, checkpoints."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tomli

from posttrain.config.aliases import RENAMED
from posttrain.config.keys import current_keys, flatten_tree
from posttrain.core.errors import ConfigError
from posttrain.core.files import read_object
from posttrain.tracking.metrics import read_metrics
from posttrain.tracking.warnings import newest, read_warnings

MOST_POINTS = 1500
"""Most points of a curve. More steps than that are averaged, some at a time."""
DAMAGED = "is it the folder of a run? If it is, the file is damaged"
"""Hint where a file of a run cannot be read."""
_OF_THE_FOLDER = ("run.name", "run.dir", "run.overwrite", "run.resume", "run.logger", "run.console", "description")
"""Keys that say nothing of what is learned."""


@dataclass(frozen=True)
class RunFolder:
    """The files of a run, read once."""

    path: Path
    state: Mapping[str, Any]
    """run.json"""
    config: Mapping[str, Any]
    """Dotted key -> value; without those that are none."""
    origins: Mapping[str, str]
    """Dotted key -> where its value came from; also of those that are none."""
    rows: Sequence[Mapping[str, Any]]
    """Lines of metrics.jsonl, each step once."""

    @staticmethod
    def read(path: Path) -> RunFolder:
        """Raises ``ConfigError`` where there is no run, or its files cannot be read."""
        if not (path / "run.json").is_file():
            raise ConfigError(f"{path} is not a run folder", hint="give the name of a run, or the path of its folder")
        state = read_object(path / "run.json", hint=DAMAGED)
        origins = read_object(path / "provenance.json", hint=DAMAGED)
        try:
            stored = flatten_tree(tomli.loads((path / "config.toml").read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path / 'config.toml'} cannot be read: {error}", hint=DAMAGED) from error
        config = current_keys(stored, str(path / "config.toml"))
        origins = {RENAMED.get(key, key): origin for key, origin in origins.items()}
        return RunFolder(path, state, config, origins, read_metrics(path))

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def setting(self) -> dict[str, Any]:
        """Return what makes two runs the same but for the seed."""
        return {k: v for k, v in self.config.items() if k not in _OF_THE_FOLDER and k != "run.seed"}

    def summary(self) -> dict[str, Any]:
        """Return the metadata of the run for the page's head, and its environment."""
        state = self.state
        keys = ("command", "preset", "status", "failure", "started", "resumed", "ended", "host", "versions")
        checkpoints = sorted(
            (int(folder.name.removeprefix("global_step_")) for folder in self._checkpoints()),
        )
        return {key: state.get(key) for key in keys} | {
            "name": self.name,
            "path": str(self.path),
            "model": self.config.get("model.path", ""),
            "seed": self.config.get("run.seed", 0),
            "description": self.config.get("description", ""),
            "checkpoints": checkpoints,
            "warnings": [asdict(warning) for warning in newest(read_warnings(self.path))],
        }

    def curves(self) -> dict[str, Any]:
        """Return the columns of the metrics: ``steps``, and by name values or None; ``every``: steps that a point
        averages."""
        every = max(1, math.ceil(len(self.rows) / MOST_POINTS))
        parts = [self.rows[i : i + every] for i in range(0, len(self.rows), every)]
        names = dict.fromkeys(name for row in self.rows for name in row if name not in ("step", "time"))
        return {
            "every": every,
            "steps": [part[-1]["step"] for part in parts],
            "values": {name: [_point(name, part) for part in parts] for name in names},
        }

    def settings(self) -> dict[str, list[Any]]:
        """Return dotted key -> [value as TOML would have it, where from]."""
        keys = dict.fromkeys([*self.config, *self.origins])
        return {key: [_shown(self.config.get(key)), _origin(key, self.origins)] for key in keys}

    def tokenizer_folders(self) -> list[str]:
        """Return where the tokenizer of its trajectories may be, the likeliest first."""
        newest = sorted(self._checkpoints(), key=lambda f: -int(f.name.removeprefix("global_step_")))
        found = [str(folder / "actor" / "huggingface") for folder in newest[:1]]
        model = str(self.config.get("model.path", ""))
        if model.startswith("run:"):
            other = self.path.parent / model.removeprefix("run:").removesuffix("/best")
            found += [str(f / "actor" / "huggingface") for f in sorted(other.glob("checkpoints/global_step_*"))[-1:]]
        elif model.startswith("builtin:") or Path(model).is_dir():
            found.append(model)
        return found

    def _checkpoints(self) -> list[Path]:
        found = self.path.glob("checkpoints/global_step_*/COMPLETE")
        return [mark.parent for mark in found if mark.parent.name.removeprefix("global_step_").isdigit()]


def groups_of(folders: Sequence[RunFolder]) -> list[int]:
    """Return the number of the group of each run: runs that differ in nothing but the seed share one."""
    settings: list[dict[str, Any]] = []
    numbers = []
    for folder in folders:
        if folder.setting not in settings:
            settings.append(folder.setting)
        numbers.append(settings.index(folder.setting))
    return numbers


def _point(name: str, part: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the mean of a metric over the steps that have it. A phase took 0 seconds in the others, which count: the
    page adds seconds up."""
    values = [row[name] for row in part if name in row]
    if name.startswith("timing_s/") and values:
        values += [0.0] * (len(part) - len(values))
    return _mean(values)


def _mean(values: Sequence[Any]) -> float | None:
    """Return the mean of the finite numbers, to six digits; None where there is none."""
    finite = [v for v in (_number(value) for value in values) if math.isfinite(v)]
    # The sum of large ones may be infinite.
    return float(f"{sum(v / len(finite) for v in finite):.6g}") if finite else None


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def _shown(value: Any) -> str:
    return "none" if value is None else json.dumps(value, ensure_ascii=False, default=str)


def _origin(key: str, origins: Mapping[str, str]) -> str:
    """Return where the value of a key came from. A table that is one value (`reward.weights`) has one origin."""
    while key not in origins and "." in key:
        key = key.rpartition(".")[0]
    return str(origins.get(key, ""))
