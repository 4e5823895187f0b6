"""Resolve presets and flags to one typed config, with the origin of every value.

Layers, the later one wins: defaults <- the algo's bundle <- the preset (parents through ``extends`` first) <-
``--algo`` <- ``--set a.b=value`` <- named flags. Imports neither torch nor anything that does: ``posttrain presets``
answers at once.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date, time
from pathlib import PurePath
from typing import Any, get_args

import tomli
from pydantic import ValidationError

from posttrain.algos import ADVANTAGES, BUNDLES, POLICY_LOSSES
from posttrain.config import Command, Config, algo_bundle
from posttrain.config.keys import Values, flag_name, flatten_known, leaf_keys, leaves_of, table_of
from posttrain.config.preset_files import CPU_PRESETS, default_preset, list_presets, load_preset, preset_of
from posttrain.core.errors import ConfigError
from posttrain.core.registry import Registry, load_plugins, nearest


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
        of_command.append((f"flag {flag_name(key)}", flatten_known({key: value}, "flags", dotted=True)))
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


def config_of(tree: Mapping[str, Any], source: str) -> Config:
    """Return the config of a whole tree, as a run stores it. Raises ``ConfigError``: a key or a value is wrong."""
    try:
        return Config.model_validate(_nested(flatten_known(tree, source)))
    except ValidationError as error:
        raise _config_error(error, dict.fromkeys(leaf_keys(), source)) from None


def _parse_sets(sets: Sequence[str]) -> Values:
    given: Values = {}
    for text in sets:
        key, equals, raw = text.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"--set {text!r} is not of the form key=value", hint="for example --set train.steps=20")
        if quote := next((char for char in key if char in "\"'"), None):
            raise ConfigError(f"--set {text!r} has a {quote} in its key", hint="write the key's parts without quotes")
        given.pop(key.strip(), None)  # the last one wins, also over a section that was set in between
        given[key.strip()] = _toml_value(raw.strip())
    return flatten_known(given, "--set", dotted=True)


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
                values[key] = None if isinstance(value, str) and value == "none" and key in optional else value
            provenance[key] = source
    provenance["command"] = "command line"
    for key, value in values.items():
        try:
            json.dumps(value, default=_plain, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            origin = f"{key} is set by: {provenance[key]}" if key in provenance else None
            raise ConfigError(f"{key} = {value!a} is not text in UTF-8", hint=origin) from None
        except TypeError as error:
            raise ConfigError(
                f"{key} ({provenance.get(key, 'the preset')}): {error}",
                hint="values are numbers, texts, lists and dicts; write a frame with to_parquet and give the path",
            ) from None
    nested = _nested({"command": command, **values})
    try:
        # Through JSON in strict mode: "3" is not a number, while a list may fill a tuple.
        config = Config.model_validate_json(json.dumps(nested, default=_plain), strict=True)
    except ValidationError as error:
        raise _config_error(error, provenance) from None
    for key, value in values.items():
        try:
            json.dumps(value, default=_plain, allow_nan=False)
        except ValueError:  # in a table of free names; a resumed run would find it changed
            raise ConfigError(
                f"{key} = {value!r} has a number that is not finite",
                hint="TOML has nan and inf, and no setting takes them",
            ) from None
    return Resolved(config, provenance, name)


def _plain(value: Any) -> Any:
    """Return the text of a path or date, and the number or list of what NumPy has. Raises ``TypeError`` for others."""
    if isinstance(value, PurePath | date | time):
        return str(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} is no value of a preset")


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
