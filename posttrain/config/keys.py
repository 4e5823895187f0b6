"""Look up config keys by name: those that exist, those that were renamed, and what an unknown one may have meant."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_origin

from pydantic import BaseModel

from posttrain.config import Config
from posttrain.config.aliases import NO_KEY, RENAMED, keys_by_alias
from posttrain.core.errors import ConfigError
from posttrain.core.registry import nearest

Values = dict[str, Any]
"""Dotted key -> value."""


class RenamedKeyWarning(UserWarning):
    """Warn that a preset, a flag or a stored config gives keys by their earlier names."""


_FLAGS = {
    "algo.name": "--algo",
    "data.train": "--data",
    "generate.endpoint.url": "--endpoint",
    "model.path": "--model",
    "plugins": "--plugin",
    "rollout.only": "--rollout-only",
}
"""Options of commands that are not called after the last part of their key."""


def flag_name(key: str) -> str:
    """Return the option of commands that sets a key (`train.steps` -> `--steps`)."""
    return _FLAGS.get(key, "--" + key.rsplit(".", 1)[-1].replace("_", "-"))


def leaf_keys() -> list[str]:
    """Return every dotted key that a config knows."""
    return [key for key, _ in leaves_of(Config)]


def leaves_of(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, type) of each value in the tree."""
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from leaves_of(kind, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", kind


def flatten_tree(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested tables as dotted keys, whether a config knows the keys or not."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat |= flatten_tree(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


@functools.cache
def _tables() -> frozenset[str]:
    """Return the keys whose value is a table of free names, such as `tools`."""
    return frozenset(key for key, kind in leaves_of(Config) if get_origin(kind) is dict)


def table_of(key: str) -> str | None:
    """Return the table that ``key`` lies in (`tools` of `tools.search.url`), or None."""
    return next((table for table in _tables() if key.startswith(f"{table}.") and all(key.split("."))), None)


def current_keys(values: Mapping[str, Any], source: str, *, hint: str = "") -> dict[str, Any]:
    """Return ``values`` (dotted key -> value) with renamed keys under their current names.

    One ``RenamedKeyWarning`` names all of them.

    Args:
        source: what gives the values, as the warning's first words (``preset old.toml``).
        hint: what to do about it, as the warning's last words.

    Raises:
        ConfigError: a key is given by its earlier and by its current name.
    """
    renamed = renamed_in(values, source)
    if renamed:
        names = ", ".join(f"`{old}` is called `{new}`" for old, new in renamed.items())
        warnings.warn(f"{source} has renamed keys: {names}{hint and f'; {hint}'}", RenamedKeyWarning, stacklevel=1)
    return {renamed.get(key, key): value for key, value in values.items()}


def renamed_in(values: Mapping[str, Any], source: str) -> dict[str, str]:
    """Return the current name by earlier name of each renamed key in ``values``. ``source`` gives them.

    Raises:
        ConfigError: a key is given by both names.
    """
    renamed = {old: new for old, new in RENAMED.items() if old in values}
    if twice := [f"`{old}` and `{new}`" for old, new in renamed.items() if new in values]:
        raise ConfigError(
            f"{source} gives one key by two names: {', '.join(twice)}", hint="keep the second name and drop the first"
        )
    return renamed


def flatten_known(tree: Mapping[str, Any], source: str, migrate: str = "", *, dotted: bool = False) -> Values:
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


def known_key(name: str) -> str:
    """Return the key or section that a name stands for: itself, its current name, the table that it is an entry of, or
    the key that another trainer calls so.

    Raises:
        ConfigError: there is none; the hint has the nearest.
    """
    leaves = leaf_keys()
    if name in leaves or any(leaf.startswith(f"{name}.") for leaf in leaves):
        return name
    known = RENAMED.get(name) or table_of(name) or _called_elsewhere(name)
    if known is None:
        raise ConfigError(f"unknown key `{name}`", hint=key_hint(name, leaves))
    return known


def key_hint(key: str, leaves: Sequence[str]) -> str:
    """Say what an unknown key may have meant (``nearest_key``), or why there is none."""
    last = key.rpartition(".")[2]
    if last in NO_KEY:
        return f"`{last}` has no key here: {NO_KEY[last]}"
    if (close := nearest_key(key, leaves)) is None:
        return "`posttrain presets show NAME` prints every key"
    return f"`{key}` is called `{close}` here" if close == _called_elsewhere(key) else f"did you mean `{close}`?"


def nearest_key(key: str, leaves: Sequence[str]) -> str | None:
    """Return the key that an unknown one may have meant: the same last part in another section (`train.lr` ->
    `train.optim.lr`), the key that another trainer calls so, or one that is spelled alike, also by an earlier name.
    None: there is none."""
    prefix, _, last = key.rpartition(".")
    if known := _called_elsewhere(key):
        return known
    if same_name := [leaf for leaf in leaves if leaf.rpartition(".")[2] == last]:
        return nearest(key, same_name) or same_name[0]
    others = {f"{prefix}.{name}".lstrip("."): ours for name, ours in keys_by_alias().items()}
    names = {leaf: leaf for leaf in leaves} | others | RENAMED
    close = nearest(key, names)
    return None if close is None else names[close]


def _called_elsewhere(name: str) -> str | None:
    """Return our key that another trainer calls so."""
    from posttrain.config.verl.names import ours_of  # on demand: hundreds of rules

    return ours_of(name) or keys_by_alias().get(name.rpartition(".")[2])
