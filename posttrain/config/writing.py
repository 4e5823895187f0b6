"""Write a config as TOML, on request with the origin of each value."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import tomli
import tomli_w

from posttrain.config import Config
from posttrain.config.keys import Values, flatten_tree


def dump_toml(config: Config, provenance: Mapping[str, str] | None = None) -> str:
    """Return the whole tree as TOML; values that are None (TOML has none) are left out. With ``provenance``, each line
    of a value ends with a comment that gives its origin."""
    text = tomli_w.dumps(_without_none(config.model_dump()))
    return text if provenance is None else _annotate(text, provenance)


def flatten_config(config: Config) -> Values:
    """Return every leaf of the tree by dotted key, in TOML's types; None values are left out."""
    return flatten_tree(tomli.loads(dump_toml(config)))


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(inner) for key, inner in value.items() if inner is not None}
    return list(value) if isinstance(value, tuple) else value


def _annotate(text: str, provenance: Mapping[str, str]) -> str:
    """Add `# where from` to each value. An array that tomli_w spreads over lines gets it on its last line."""
    lines: list[str] = []
    section = key = ""
    for line in text.removesuffix("\n").split("\n"):  # strings may have other line ends of Unicode in them
        if line.startswith("["):
            section = line.strip("[]") + "."
        elif match := re.match(r'([A-Za-z0-9_-]+|"(?:[^"\\]|\\.)*") = ', line):
            key = section + match[1]
        ends_value = line and not line.startswith("[") and not line.endswith("[") and not line.startswith(" ")
        lines.append(f"{line}  # {origin(key, provenance)}" if ends_value else line)
    return "\n".join(lines) + "\n"


def origin(key: str, provenance: Mapping[str, str]) -> str:
    """Return the origin of a value. A table that is one value (`reward.weights`, `tools`) has one origin."""
    while "." in key and key not in provenance:
        key = key.rpartition(".")[0]
    return provenance[key]
