"""The keys of the config by name: those that there are, and what an unknown one may have meant."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, get_origin

from pydantic import BaseModel

from posttrain.config import Config
from posttrain.config.aliases import NO_KEY, keys_by_alias
from posttrain.core.errors import ConfigError
from posttrain.core.registry import nearest


def leaf_keys() -> list[str]:
    """Every dotted key that a config knows."""
    return [key for key, _ in leaves_of(Config)]


def leaves_of(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, type) of each value in the tree."""
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from leaves_of(kind, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", kind


@functools.cache
def _tables() -> frozenset[str]:
    """The keys whose value is a table of free names, such as `tools`."""
    return frozenset(key for key, kind in leaves_of(Config) if get_origin(kind) is dict)


def table_of(key: str) -> str | None:
    """The table that ``key`` lies in, if it does (`tools` of `tools.search.url`)."""
    return next((table for table in _tables() if key.startswith(f"{table}.") and all(key.split("."))), None)


def known_key(name: str) -> str:
    """The key or section that a name stands for: itself, the table that it is an entry of, or what another trainer
    calls it.

    Raises:
        ConfigError: there is none; the hint has the nearest.
    """
    leaves = leaf_keys()
    if name in leaves or any(leaf.startswith(f"{name}.") for leaf in leaves):
        return name
    known = table_of(name) or _called_elsewhere(name)
    if known is None:
        raise ConfigError(f"unknown key `{name}`", hint=key_hint(name, leaves))
    return known


def key_hint(key: str, leaves: Sequence[str]) -> str:
    """What an unknown key may have meant (``nearest_key``), or why there is none."""
    last = key.rpartition(".")[2]
    if last in NO_KEY:
        return f"`{last}` has no key here: {NO_KEY[last]}"
    if (close := nearest_key(key, leaves)) is None:
        return "`posttrain presets show NAME` prints every key"
    return f"`{key}` is called `{close}` here" if close == _called_elsewhere(key) else f"did you mean `{close}`?"


def nearest_key(key: str, leaves: Sequence[str]) -> str | None:
    """The key that an unknown one may have meant: the same last part in another section (`train.lr` ->
    `train.optim.lr`), what another trainer calls so, or one that is spelled alike. None: there is none."""
    prefix, _, last = key.rpartition(".")
    if known := _called_elsewhere(key):
        return known
    if same_name := [leaf for leaf in leaves if leaf.rpartition(".")[2] == last]:
        return nearest(key, same_name) or same_name[0]
    others = {f"{prefix}.{name}".lstrip("."): ours for name, ours in keys_by_alias().items()}
    names = {leaf: leaf for leaf in leaves} | others
    close = nearest(key, names)
    return None if close is None else names[close]


def _called_elsewhere(name: str) -> str | None:
    """Our key that another trainer calls so."""
    from posttrain.config.verl.names import ours_of  # on demand: hundreds of rules

    return ours_of(name) or keys_by_alias().get(name.rpartition(".")[2])
