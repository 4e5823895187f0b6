"""The harness as one program, for a service that takes no more than that."""

from __future__ import annotations

import functools
from pathlib import Path

_PARTS = ("wire", "same", "reading", "effects", "proxy", "serving", "harness")
"""The harness's files, each after those that it imports."""


@functools.cache
def harness_program() -> str:
    """Return the source of a program that makes modules of the harness's files and runs it."""
    folder = Path(__file__).parent
    sources = {name: (folder / f"{name}.py").read_text(encoding="utf-8") for name in _PARTS}
    return (
        "import sys, types\n"
        f"for name, source in {sources!a}.items():\n"
        "    module = sys.modules[name] = types.ModuleType(name)\n"
        "    exec(compile(source, name + '.py', 'exec'), module.__dict__)\n"
        "module.main()\n"
    )
