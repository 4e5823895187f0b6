"""One HTML file with everything in it: styles, scripts, data. It asks nobody for anything, and a content security
policy holds it to that.

What models wrote is hostile until shown otherwise. It is in the page as compressed bytes in base64, so no text of it
can be read as markup, and the scripts put it on the screen as text only.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import zlib
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from posttrain.core.files import write_bytes
from posttrain.tracking.report.collect import MOST_EPISODES, Collector
from posttrain.tracking.report.folder import RunFolder

MOST_BYTES = 4_900_000
"""Largest size of a page. It must open at once, and go through mail."""

STYLES = ("uplot.min.css", "style.css")
SCRIPTS = ("uplot.min.js", "data.js", "curves.js", "distributions.js", "episodes.js", "settings.js", "main.js")


def write_page(path: Path, runs: Sequence[Path], collector: Collector | None = None) -> int:
    """Make the page of some run folders and put it in its place whole; returns its size in bytes. A page that would be
    too large shows fewer trajectories.

    Raises:
        ConfigError: one of them is no run, or the page cannot be written there.
        RunError: the disk is full or broken.
    """
    collector = collector or Collector()
    folders = [RunFolder.read(run) for run in runs]
    most = MOST_EPISODES
    while True:
        data, tokens = collector.collect(folders, most)
        page = render(data, tokens).encode("utf-8", "backslashreplace")
        if len(page) <= MOST_BYTES or most <= len(folders):
            break
        most = max(len(folders), int(len(data["episodes"]) * 0.8 * MOST_BYTES / len(page)))
    write_bytes(path, page, hint="choose another place with --out FILE")
    return len(page)


def render(data: Mapping[str, Any], tokens: bytes) -> str:
    """Return the page. ``data`` goes into it as JSON, ``tokens`` as it is."""
    style = "\n".join(_asset(name) for name in STYLES)
    script = "\n".join(_asset(name) for name in SCRIPTS)
    policy = f"default-src 'none'; base-uri 'none'; form-action 'none'; img-src data:; style-src {_digest(style)}; "
    policy += f"script-src {_digest(script)}"
    names = ", ".join(str(run["name"]) for run in data["runs"])
    parts = {
        "policy": policy,
        "title": html.escape(_plain(names)),
        "style": style,
        "data": _packed(json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")),
        "tokens": _packed(tokens),
        "script": script,
    }
    page = _asset("template.html")
    for name, text in parts.items():
        before, mark, after = page.partition(f"<!-- {name} -->")
        assert mark, name
        page = before + text + after
    return page


def _asset(name: str) -> str:
    return (resources.files("posttrain.tracking.report") / "assets" / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _packed(raw: bytes) -> str:
    return base64.b64encode(zlib.compress(raw, 6)).decode()


def _plain(text: str) -> str:
    """Return text without characters that are not seen, or change how others are."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
