"""The project's own text uses the field's terms, and docstrings begin with what they describe (CONTRIBUTING.md)."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

REPO = Path(__file__).parents[3]
SAY = {
    "rooms?|doors?": "package, layer, import contract",
    "canar(y|ies)": "weight-sync check",
    "outlets?": "sender, transfer buffer",
    "pulses?": "heartbeat",
    "seats?": "sticky session",
    "park(ed|ing|s)?": "CPU offload",
    "carried|carry_cancelled": "partial rollout",
    "owe[ds]?": "update guard",
    "facts": "metadata",
    "traces/|Trace(Writer|s|Row)": "rollout files",
}
"""Pattern of a private word -> what to say instead."""
MEANT = {
    r"\b(no|free|make|making|some|has|for its|the|enough) room\b|room (for|to|is|there|on|under)\b": "disk and memory",
    r"`seat`|\(\"east\", \"seat\"\)": "an example of what algebra makes of words",
    r"sync/canary_gap|carry_cancelled|`traces/`|run\.traces": "names that older runs and presets have",
}
"""Uses that are meant: pattern -> why."""


def tracked(*patterns: str) -> list[Path]:
    names = subprocess.run(["git", "ls-files", *patterns], cwd=REPO, capture_output=True, text=True, check=True).stdout
    return [REPO / name for name in names.splitlines()]


def lines() -> list[tuple[str, str]]:
    files = set(
        tracked(
            "posttrain/*.py",
            "tests/*.py",
            "posttrain/*.js",
            "presets/*",
            "docs/*.md",
            "*.md",
            "examples/*",
            "scripts/*",
        )
    ) - {Path(__file__)}
    return [
        (f"{file.relative_to(REPO)}:{number}", line)
        for file in sorted(files)
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1)
    ]


@pytest.fixture(scope="module")
def text() -> list[tuple[str, str]]:
    if not (REPO / ".git").exists():
        pytest.skip("git tells which files are the project's")
    return lines()


@pytest.mark.parametrize("word", SAY)
def test_uses_the_terms_of_the_field(word: str, text: list[tuple[str, str]]) -> None:
    pattern = re.compile(rf"(?<![a-zA-Z])({word})(?![a-zA-Z])", re.IGNORECASE if word.islower() else 0)
    meant = re.compile("|".join(MEANT), re.IGNORECASE)
    found = [f"{place}: {line.strip()}" for place, line in text if pattern.search(meant.sub("", line))]
    assert not found, f"say {SAY[word]!r}:\n" + "\n".join(found)


def test_docstrings_say_what_a_function_does() -> None:
    found = []
    for file in tracked("posttrain/*.py") if (REPO / ".git").exists() else sorted(REPO.glob("posttrain/**/*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                first = node.value.value.split(maxsplit=1)[:1]
                if first and first[0].strip(".,:;") in ("Of", "In", "Whether"):
                    found.append(f"{file.relative_to(REPO)}:{node.lineno}: {node.value.value.splitlines()[0]}")
    assert not found, "\n".join(found)
