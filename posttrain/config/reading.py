"""Read TOML files, or reject them with the line of the mistake."""

from __future__ import annotations

import codecs
import re
from pathlib import Path
from typing import Any

import tomli

from posttrain.core.errors import ConfigError

_KEY = re.compile(r"\s*([\w.\"'-]+(?:\s*\.\s*[\w\"'-]+)*)\s*=")
_HEADER = re.compile(r"\s*\[{1,2}\s*([\w.\"'\s-]+?)\s*\]{1,2}\s*(?:#.*)?$")  # and no row of an array of arrays
_TWICE = ("Cannot overwrite a value", "Cannot declare", "Duplicate inline table key")
"""How tomli begins to say that something is there already."""


def read_toml(path: Path, what: str) -> dict[str, Any]:
    """Return the tree of a TOML file. ``what`` names the kind of file in messages (``preset``).

    Raises:
        ConfigError: it cannot be read, is not UTF-8 or has a byte order mark, is not TOML, or gives a key twice.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{what} {path} cannot be read: {error}", hint="check the path") from error
    if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise ConfigError(
            f"{what} {path} is UTF-16, and TOML is UTF-8", hint="`iconv -f UTF-16 -t UTF-8 FILE` converts it"
        )
    if raw.startswith(codecs.BOM_UTF8):
        raise ConfigError(
            f"{what} {path} begins with a byte order mark (BOM), which TOML does not allow",
            hint="save it as UTF-8 without BOM; `sed -i '1s/^\\xEF\\xBB\\xBF//' FILE` takes it away",
        )
    try:
        text = raw.decode("utf-8")
        return tomli.loads(text)
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise ConfigError(
            f"{what} {path} is not UTF-8, in line {line}: {error}", hint="`iconv -t UTF-8 FILE` converts it"
        ) from error
    except tomli.TOMLDecodeError as error:
        if str(error).startswith(_TWICE):
            raise ConfigError(f"{what} {path}: {_given_twice(text, str(error))}", hint="keep one of them") from error
        raise ConfigError(f"{what} {path} is not valid TOML: {error}", hint="strings need quotes in a file") from error


def _given_twice(text: str, error: str) -> str:
    """Return the key or table that is given twice, and its lines."""
    lines = text.splitlines()
    found = re.search(r"at line (\d+)", error)
    last = int(found[1]) if found else len(lines)
    # A value may go over several lines, and the error is at its end.
    number = next((n for n in range(last, 0, -1) if _KEY.match(lines[n - 1]) or _HEADER.match(lines[n - 1])), last)
    line = lines[number - 1]
    if inline := re.match(r"Duplicate inline table key (.+?) \(", error):
        return f"line {number}: the key {inline[1]} is given twice"
    if header := _HEADER.match(line):
        name = f"[{_plain(header[1])}]"
        earlier = [
            n for n, text in enumerate(lines[: number - 1], 1) if (m := _HEADER.match(text)) and m[1] == header[1]
        ]
    else:
        key = _KEY.match(line)
        name = f"the key `{_plain(key[1])}`" if key else "a key"
        earlier = _same_table(lines[: number - 1], _plain(key[1])) if key else []
    first = f", first on line {earlier[-1]}" if earlier else ""
    return f"line {number}: {name} is given twice{first}"


def _same_table(lines: list[str], key: str) -> list[int]:
    """Return the lines since the last table header that give this key."""
    start = next((n for n in range(len(lines), 0, -1) if _HEADER.match(lines[n - 1])), 0)
    return [n for n in range(start + 1, len(lines) + 1) if (m := _KEY.match(lines[n - 1])) and _plain(m[1]) == key]


def _plain(key: str) -> str:
    return re.sub(r"[\s\"']", "", key)
