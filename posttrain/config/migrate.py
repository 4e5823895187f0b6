"""Rewrite TOML files whose config keys were renamed. Comments, order and layout stay as they are."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import tomli
import tomlkit
from tomlkit.container import Container
from tomlkit.items import InlineTable, SingleKey, Table

from posttrain.config.keys import flatten_tree, renamed_in
from posttrain.config.reading import read_toml
from posttrain.core.errors import ConfigError
from posttrain.core.files import write_bytes


def migrate(path: Path) -> dict[str, str]:
    """Give the keys of a preset their current names, and return the changes by earlier name. A file without renamed
    keys is not written.

    Raises:
        ConfigError: the file cannot be read or written, is not TOML, or gives a key by both names.
        RunError: the disk is full or broken; the file is as it was.
    """
    path = path.resolve()  # the target of a link is replaced, and not the link
    before = flatten_tree(read_toml(path, "preset"))
    renamed = renamed_in(before, str(path))
    if renamed:
        document = tomlkit.parse(path.read_bytes().decode("utf-8"))
        _rename(document, renamed)
        text = document.as_string()
        if flatten_tree(tomli.loads(text)) != {renamed.get(key, key): value for key, value in before.items()}:
            raise ConfigError(
                f"{path} cannot be rewritten without changing more than names",
                hint="; ".join(f"write `{new}` for `{old}` by hand" for old, new in renamed.items()),
            )
        write_bytes(path, text.encode("utf-8"))
    return renamed


def _rename(table: Container, renamed: Mapping[str, str], prefix: str = "") -> None:
    """Replace the last part of each renamed key in a table and in those below it."""
    for index, (key, item) in enumerate(table.body):
        if key is None:  # a comment, or an empty line
            continue
        name = f"{prefix}{key.key}"
        if name in renamed:
            new = renamed[name].rpartition(".")[2]
            table.body[index] = (SingleKey(new, sep=key.sep, original=key.as_string().replace(key.key, new)), item)
        elif isinstance(item, Table | InlineTable):
            _rename(item.value, renamed, f"{name}.")
