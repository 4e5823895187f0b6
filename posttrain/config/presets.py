"""Resolve presets and flags to one typed config, with the origin of every value.

Layers, the later one wins: defaults <- the algo's bundle <- the preset (parents through ``extends`` first) <-
``--algo`` <- ``--set a.b=value`` <- named flags. Imports neither torch nor anything that does: ``posttrain presets``
answers at once.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import tomli
import tomli_w
from pydantic import ValidationError

from posttrain.algos import ADVANTAGES, BUNDLES, POLICY_LOSSES
from posttrain.config import Command, Config, algo_bundle
from posttrain.config.aliases import RENAMED
from posttrain.config.keys import current_keys, flag_name, flatten_tree, key_hint, leaf_keys, leaves_of, table_of
from posttrain.config.reading import read_toml
from posttrain.core.errors import ConfigError
from posttrain.core.registry import Registry, load_plugins, nearest

Values = dict[str, Any]
"""Dotted key -> value."""

GPU_PRESETS = {
    "sft": "qwen2.5-0.5b-gsm8k-sft", "prefer": "qwen2.5-0.5b-dpo", "rl": "qwen2.5-0.5b-gsm8k",
    "generate": "qwen2.5-0.5b-generate",
}  # fmt: skip
CPU_PRESETS = {"sft": "tiny-multiturn", "prefer": "tiny-prefer", "rl": "tiny-gsm8k", "generate": "tiny-generate"}


IN_PYTHON = "the preset given in Python"
"""Origin, in messages and provenance, of values that a dict and not a file gives."""


@dataclass(frozen=True)
class Resolved:
    """A config ready to run."""

    config: Config
    provenance: dict[str, str]
    """Where the value of each dotted key came from: ``default``, ``preset NAME``, ``algo NAME``, ``--set``, ..."""
    preset_name: str
    """Empty for a command that needs no preset."""

    def named(self, name: str, origin: str) -> Resolved:
        """Return the same with another `run.name`, which comes from ``origin``. Raises ``ConfigError``."""
        return self.with_value("run.name", name, origin)

    def with_value(self, key: str, value: Any, origin: str) -> Resolved:
        """Return the same with another value of a key of a section, which comes from ``origin``. Raises
        ``ConfigError``."""
        section, name = key.split(".")
        tree = self.config.model_dump()
        tree[section][name] = value
        return replace(self, config=config_of(tree, origin), provenance={**self.provenance, key: origin})


@dataclass(frozen=True)
class Preset:
    """One preset file with its parents folded in."""

    name: str
    path: Path
    command: str
    description: str
    layers: tuple[tuple[str, Values], ...]
    """(where from, values), the root of the ``extends`` chain first."""


def resolve(
    command: Command,
    preset: str | Mapping[str, Any] | None = None,
    sets: Sequence[str] = (),
    flags: Mapping[str, Any] | None = None,
) -> Resolved:
    """Resolve the config of one run.

    Args:
        preset: a preset's name, the path of a ``.toml`` file, or what such a file would hold as a dict; None: the
            default preset of the command.
        sets: ``a.b=value`` strings.
        flags: named flags by dotted key (``{"train.steps": 5}``); a None value means that the flag was not given.

    Raises:
        ConfigError: unknown preset, key or algo, a wrong type, or a combination that makes no sense.
    """
    layers: list[tuple[str, Values]] = []
    name = ""
    if preset is None and command in CPU_PRESETS:
        preset, _ = default_preset(command)
    if preset is not None:
        loaded = preset_of(preset, command) if isinstance(preset, Mapping) else load_preset(preset)
        if loaded.command != command:
            raise ConfigError(
                f"preset {loaded.name} is for `posttrain {loaded.command}`, not for `posttrain {command}`",
                hint=_presets_for(command),
            )
        name = loaded.name
        layers = [(f"preset {name}", {"run.name": name, "description": loaded.description}), *loaded.layers]

    given = {key: value for key, value in (flags or {}).items() if value is not None}
    algo_flag = given.pop("algo.name", None)
    of_command = [("--set", _parse_sets(sets))]
    for key, value in given.items():
        of_command.append((f"flag {flag_name(key)}", _flatten({key: value}, "flags", dotted=True)))
    named = [values for _, values in [*layers, *of_command]] + [{"algo.name": algo_flag}]
    import_algorithms(_last([*layers, *of_command], "plugins", []), named)
    if algo_flag is not None:
        layers.append((f"--algo {algo_flag}", algo_bundle(algo_flag)))
    layers += of_command
    if algo_flag is not None:
        layers.append((f"--algo {algo_flag}", {"algo.name": algo_flag}))

    algo = _last(layers, "algo.name", Config(command=command).algo.name)
    if isinstance(algo, str):
        layers.insert(0, (f"algo {algo}", algo_bundle(algo)))
    return _build(command, layers, name)


def import_algorithms(plugins: object, layers: Iterable[Mapping[str, Any]]) -> None:
    """Import the plugins if a layer names an algorithm, an estimator or a loss that is not registered. A config can be
    checked only where it is; other names of plugins are looked up when a run starts.

    Args:
        plugins: the value of `plugins`. One of a wrong type is left to the validation of the tree.
        layers: values by dotted key.
    """
    registries: dict[str, Registry[Any]] = {
        "algo.name": BUNDLES,
        "algo.advantage": ADVANTAGES,
        "algo.policy_loss": POLICY_LOSSES,
    }
    missing = any(
        isinstance(name := layer.get(key), str) and name not in registry
        for layer in layers
        for key, registry in registries.items()
    )
    if missing and isinstance(plugins, list) and all(isinstance(path, str) for path in plugins):
        load_plugins(plugins)


def preset_of(tree: Mapping[str, Any], command: Command) -> Preset:
    """Return the preset that a dict describes as a ``.toml`` file would, ``extends`` included. Keys may be dotted.

    It has the name of the preset that it extends, and its command where it names none; without ``extends`` the name is
    empty and the command is ``command``.

    Raises:
        ConfigError: as ``load_preset``.
    """
    parent = _text(tree, "extends", IN_PYTHON)
    base = load_preset(parent) if parent else Preset("", Path(), command, "", ())
    values = _flatten(_settings(tree), IN_PYTHON, dotted=True)
    return Preset(
        base.name,
        base.path,
        _text(tree, "command", IN_PYTHON) or base.command,
        _text(tree, "description", IN_PYTHON) or base.description,
        (*base.layers, (IN_PYTHON, values)),
    )


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
        flat = _flatten(_settings(raw), str(current), f"`posttrain presets migrate {current}` rewrites it")
        layers.insert(0, (f"preset {current.stem}", flat))
        current = find_preset(parent, beside=current.parent) if parent else None
    known = get_args(Command)
    if command not in known:
        what = f"unknown command {command!r}" if command else "no `command`"
        raise ConfigError(f"{what} in preset {path}", hint=f'add `command = "..."`, one of {", ".join(known)}')
    return Preset(path.stem, path, command, description, tuple(layers))


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


def has_gpu() -> bool:
    """Return whether an NVIDIA GPU can be used here, without importing torch."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1"):
        return False
    driver = Path("/proc/driver/nvidia/gpus")
    if driver.is_dir() and any(driver.iterdir()):
        return True
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return False
    try:
        listed = subprocess.run([smi, "-L"], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False  # a driver that does not answer cannot be trained on
    return "GPU " in listed.stdout


def dump_toml(config: Config, provenance: Mapping[str, str] | None = None) -> str:
    """Return the whole tree as TOML; values that are None (TOML has none) are left out. With ``provenance``, each line
    of a value ends with a comment that gives its origin."""
    text = tomli_w.dumps(_without_none(config.model_dump()))
    return text if provenance is None else _annotate(text, provenance)


def flatten_config(config: Config) -> Values:
    """Return every leaf of the tree by dotted key, in TOML's types; None values are left out."""
    return flatten_tree(tomli.loads(dump_toml(config)))


def _text(raw: Mapping[str, Any], key: str, source: str) -> str:
    value = raw.get(key, "")
    if not isinstance(value, str):
        raise ConfigError(f"{key} = {value!r} in {source} is not text", hint=f'write `{key} = "..."`')
    return value


def config_of(tree: Mapping[str, Any], source: str) -> Config:
    """Return the config of a whole tree, as a run stores it. Raises ``ConfigError``: a key or a value is wrong."""
    try:
        return Config.model_validate(_nested(_flatten(tree, source)))
    except ValidationError as error:
        raise _config_error(error, dict.fromkeys(leaf_keys(), source)) from None


def _settings(raw: Mapping[str, Any]) -> Values:
    """Return the part of a preset that is a config tree."""
    return {str(key): value for key, value in raw.items() if key not in ("extends", "command", "description")}


def _flatten(tree: Mapping[str, Any], source: str, migrate: str = "", *, dotted: bool = False) -> Values:
    """Return nested (or, with ``dotted``, already dotted) keys as dotted ones, renamed keys by their current names
    (``migrate``: how to rewrite ``source``, for the warning). Unknown keys raise, all of them at once."""
    leaves = leaf_keys()
    readable = frozenset((*leaves, *RENAMED))
    sections = {key.rsplit(".", 1)[0] for key in readable if "." in key}
    flat: Values = {}
    problems: list[str] = []
    hints: list[str] = []

    def walk(value: Any, key: str) -> None:
        if key in readable or (dotted and table_of(key)):
            flat[key] = value
        elif key in sections and isinstance(value, Mapping):
            for name, inner in value.items():
                walk(inner, f"{key}.{name}")
        elif key in sections:
            problems.append(f"`{key}` in {source} is a section, not a value")
            first = next(leaf for leaf in leaves if leaf.startswith(f"{key}."))
            hints.append(f"give one of its keys, such as `{first}`")
        else:
            problems.append(f"unknown key `{key}` in {source}")
            hints.append(key_hint(key, leaves))

    for name, value in tree.items():
        if not dotted and "." in name:
            problems.append(f'unknown key `"{name}"` in {source}')
            hints.append("write a dotted key without quotes")
        else:
            walk(value, name)
    if problems:
        raise ConfigError("\n".join(problems), hint="; ".join(dict.fromkeys(hints)))
    return current_keys(flat, source, hint=migrate)


def _parse_sets(sets: Sequence[str]) -> Values:
    given: Values = {}
    for text in sets:
        key, equals, raw = text.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"--set {text!r} is not of the form key=value", hint="for example --set train.steps=20")
        given.pop(key.strip(), None)  # the last one wins, also over a section that was set in between
        given[key.strip()] = _toml_value(raw.strip())
    return _flatten(given, "--set", dotted=True)


def _toml_value(text: str) -> Any:
    """Return the value of TOML text; text that is not TOML (a bare word, a path, a date) is taken as a string."""
    try:
        parsed = tomli.loads(f"value = {text}")
    except tomli.TOMLDecodeError:
        return text
    value = parsed["value"]
    # A second key can only come from a line break inside `text`; dates have no place in the tree.
    plain = isinstance(value, bool | int | float | str | list | dict) and len(parsed) == 1
    return value if plain else text


def _last(layers: Sequence[tuple[str, Values]], key: str, default: Any) -> Any:
    return next((values[key] for _, values in reversed(layers) if key in values), default)


def _build(command: Command, layers: Sequence[tuple[str, Values]], name: str) -> Resolved:
    """Fold the layers and validate the tree."""
    optional = {key for key, kind in leaves_of(Config) if type(None) in get_args(kind)}
    values: Values = {}
    provenance = dict.fromkeys(leaf_keys(), "default")
    for source, layer in layers:
        for key, value in layer.items():
            if table := table_of(key):
                before = values.get(table, functools.reduce(getattr, table.split("."), Config(command=command)))
                values[table] = _with_entry(before, key.removeprefix(f"{table}.").split("."), value)
            else:
                # TOML has no null: the word "none" resets an optional value.
                values[key] = None if value == "none" and key in optional else value
            provenance[key] = source
    provenance["command"] = "command line"
    for key, value in values.items():
        try:
            json.dumps(value, default=str, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            origin = f"{key} is set by: {provenance[key]}" if key in provenance else None
            raise ConfigError(f"{key} = {value!a} is not text in UTF-8", hint=origin) from None
    nested = _nested({"command": command, **values})
    try:
        # Through JSON in strict mode: "3" is not a number, while a list may fill a tuple.
        config = Config.model_validate_json(json.dumps(nested, default=str), strict=True)
    except ValidationError as error:
        raise _config_error(error, provenance) from None
    return Resolved(config, provenance, name)


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tree of dotted keys."""
    tree: dict[str, Any] = {}
    for key, value in values.items():
        section = tree
        *parents, leaf = key.split(".")
        for parent in parents:
            section = section.setdefault(parent, {})
        section[leaf] = value
    return tree


def _with_entry(table: Any, path: Sequence[str], value: Any) -> Values:
    """Return ``table`` with one value changed, the tables on the way to it made where they are not there."""
    copy: Values = dict(table) if isinstance(table, Mapping) else {}
    name, *rest = path
    copy[name] = _with_entry(copy.get(name, {}), rest, value) if rest else value
    return copy


def _config_error(error: ValidationError, provenance: Mapping[str, str]) -> ConfigError:
    """Return an error with one line per mistake: the dotted key, its value and the origin of that."""
    lines: list[str] = []
    hints: list[str] = []
    wrong: dict[str, list[str]] = {}  # value of a key -> what it should be, by each type that the key may have
    for item in error.errors(include_url=False):
        if item["type"] == "value_error":
            message, place = str(item["ctx"]["error"]), ".".join(map(str, item["loc"]))
            if place in leaf_keys() and place not in message:
                message = f"{place}: {message}"
            lines.append(message)
            named = [key for key in re.findall(r"[a-z_]+(?:\.[a-z_]+)+", message) if key in provenance]
            hints += [f"{key} is set by: {provenance[key]}" for key in dict.fromkeys(named)]
            continue
        parts = [str(part) for part in item["loc"]]
        key = next((k for n in range(len(parts), 0, -1) if (k := ".".join(parts[:n])) in provenance), ".".join(parts))
        wrong.setdefault(f"{key} = {item['input']!r} ({provenance.get(key, 'unknown')})", []).append(item["msg"])
        if item["type"] == "literal_error":
            close = nearest(str(item["input"]), re.findall(r"'([^']*)'", item["ctx"]["expected"]))
            hints += [f"did you mean {close!r}?"] if close else []
        if key in leaf_keys():
            default = functools.reduce(getattr, key.split("."), Config(command="sft"))
            hints.append(f"the default of {key} is {'none' if default is None else default}")
    for value, (message, *others) in wrong.items():
        lines.append(", or ".join([f"{value}: {message}", *(m.removeprefix("Input should be ") for m in others)]))
    return ConfigError("\n".join(lines), hint="; ".join(dict.fromkeys(hints)) or None)


def _presets_for(command: str) -> str:
    names = [preset.name for preset in list_presets() if preset.command == command]
    return f"presets for {command}: {', '.join(names)}" if names else f"`posttrain {command}` takes no preset"


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(inner) for key, inner in value.items() if inner is not None}
    return list(value) if isinstance(value, tuple) else value


def _annotate(text: str, provenance: Mapping[str, str]) -> str:
    """Add `# where from` to each value. An array that tomli_w spreads over lines gets it on its last line."""
    lines: list[str] = []
    section = key = ""
    for line in text.splitlines():
        if line.startswith("["):
            section = line.strip("[]") + "."
        elif match := re.match(r'([A-Za-z0-9_-]+|"[^"]*") = ', line):
            key = section + match[1]
        ends_value = line and not line.startswith("[") and not line.endswith("[") and not line.startswith(" ")
        lines.append(f"{line}  # {origin(key, provenance)}" if ends_value else line)
    return "\n".join(lines) + "\n"


def origin(key: str, provenance: Mapping[str, str]) -> str:
    """Return the origin of a value. A table that is one value (`reward.weights`, `tools`) has one origin."""
    while "." in key and key not in provenance:
        key = key.rpartition(".")[0]
    return provenance[key]
