"""Regular expressions mean the same on every Python that is supported."""

from __future__ import annotations

import re
from pathlib import Path

REPO = Path(__file__).parents[3]


def test_no_group_is_repeated_possessively() -> None:
    """Python before 3.11.5 does not put back what the last, vain repetition of ``(...)*+`` has read (CPython issue
    106052). An atomic group, ``(?>(...)*)``, says the same and is right."""
    files = [*REPO.glob("posttrain/**/*.py"), *REPO.glob("scripts/*.py"), *REPO.glob("examples/*.py")]
    assert len(files) > 400
    lines = ((file, line) for file in files for line in file.read_text(encoding="utf-8").splitlines())
    assert [(file.name, line) for file, line in lines if re.search(r"\)(?:[*+?]|\{[\d,]+\})\+", line)] == []
