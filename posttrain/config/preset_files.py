"""Find, read and list preset files, shipped or a user's, each with those that it extends. ``presets.py`` resolves what
they hold to a config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from posttrain.config import Command
from posttrain.config.keys import Values, flatten_known
from posttrain.config.reading import read_toml
from posttrain.core.errors import ConfigError
from posttrain.core.machines import has_gpu
from posttrain.core.registry import nearest

GPU_PRESETS = {
    "sft": "qwen2.5-0.5b-gsm8k-sft", "prefer": "qwen2.5-0.5b-dpo", "rl": "qwen2.5-0.5b-gsm8k",
    "generate": "qwen2.5-0.5b-generate",
}  # fmt: skip
CPU_PRESETS = {"sft": "tiny-multiturn", "prefer": "tiny-prefer", "rl": "tiny-gsm8k", "generate": "tiny-generate"}

IN_PYTHON = "the preset given in Python"
"""Origin, in messages and provenance, of values that a dict and not a file gives."""


@dataclass(frozen=True)
class Preset:
    """One preset file with its parents folded in."""

    name: str
    command: str
    description: str
    layers: tuple[tuple[str, Values], ...]
    """(where from, values), the root of the ``extends`` chain first."""


def load_preset(name_or_path: str) -> Preset:
    """Read a preset and the presets it extends. Raises ``ConfigError`` naming the file and the key."""
    path = find_preset(name_or_path)
    layers: list[tuple[str, Values]] = []
    seen: list[Path] = []
    command = description = ""
    current: Path | None = path
    while current is not None:
        if current in seen:
            chain = " -> ".join(p.stem for p in [*seen, current])
            raise ConfigError(f"presets extend each other in a circle: {chain}", hint="remove one `extends`")
        seen.append(current)
        raw = read_toml(current, "preset")
        parent = _text(raw, "extends", f"preset {current}")
        command = command or _text(raw, "command", f"preset {current}")
        description = description or _text(raw, "description", f"preset {current}")
        flat = flatten_known(_settings(raw), str(current), f"`posttrain presets migrate {current}` rewrites it")
        layers.insert(0, (f"preset {current.stem}", flat))
        current = find_preset(parent, beside=current.parent) if parent else None
    known = get_args(Command)
    if command not in known:
        what = f"unknown command {command!r}" if command else "no `command`"
        raise ConfigError(f"{what} in preset {path}", hint=f'add `command = "..."`, one of {", ".join(known)}')
    return Preset(path.stem, command, description, tuple(layers))


def find_preset(name_or_path: str, beside: Path | None = None) -> Path:
    """Return the file of a shipped preset's name, or of a path (relative to ``beside``, else to the current folder)."""
    if name_or_path.endswith(".toml") or "/" in name_or_path:
        path = (beside or Path()) / name_or_path
        if not path.is_file():
            raise ConfigError(f"preset file not found: {path}", hint="`posttrain presets` lists the shipped ones")
        return path.resolve()
    path = presets_dir() / f"{name_or_path}.toml"
    if not path.is_file():
        close = nearest(name_or_path, sorted(p.stem for p in presets_dir().glob("*.toml")))
        hint = f"did you mean {close!r}?" if close else "`posttrain presets` lists them; a path must end with .toml"
        raise ConfigError(f"unknown preset {name_or_path!r}", hint=hint)
    return path.resolve()


def presets_dir() -> Path:
    """Return the folder of shipped presets: inside the installed package, or at the top of a checkout."""
    package = Path(__file__).resolve().parents[1]
    shipped = package / "_presets"
    return shipped if shipped.is_dir() else package.parent / "presets"


def list_presets() -> list[Preset]:
    """Return every shipped preset, by name."""
    return [load_preset(name) for name in sorted(path.stem for path in presets_dir().glob("*.toml"))]


def default_preset(command: str) -> tuple[str, str]:
    """Return the preset that ``command`` uses when none is given, and one line that says so."""
    if has_gpu():
        name = GPU_PRESETS[command]
        return name, f"GPU found: using preset {name}"
    name = CPU_PRESETS[command]
    return name, f"no GPU found: using preset {name}"


def preset_of(tree: Mapping[str, Any], command: Command) -> Preset:
    """Return the preset that a dict describes as a ``.toml`` file would, ``extends`` included. Keys may be dotted.

    It has the name of the preset that it extends, and its command where it names none; without ``extends`` the name is
    empty and the command is ``command``.

    Raises:
        ConfigError: as ``load_preset``.
    """
    parent = _text(tree, "extends", IN_PYTHON)
    base = load_preset(parent) if parent else Preset("", command, "", ())
    values = flatten_known(_settings(tree), IN_PYTHON, dotted=True)
    return Preset(
        base.name,
        _text(tree, "command", IN_PYTHON) or base.command,
        _text(tree, "description", IN_PYTHON) or base.description,
        (*base.layers, (IN_PYTHON, values)),
    )


def _text(raw: Mapping[str, Any], key: str, source: str) -> str:
    value = raw.get(key, "")
    if not isinstance(value, str):
        raise ConfigError(f"{key} = {value!r} in {source} is not text", hint=f'write `{key} = "..."`')
    return value


def _settings(raw: Mapping[str, Any]) -> Values:
    """Return the part of a preset that is a config tree."""
    return {str(key): value for key, value in raw.items() if key not in ("extends", "command", "description")}
