"""The training loop of `rl` stays one page."""

from __future__ import annotations

import ast
from pathlib import Path

from posttrain.rl import loop

PAGE = Path(loop.__file__)


def test_loop_has_at_most_150_lines() -> None:
    assert len(PAGE.read_text(encoding="utf-8").splitlines()) <= 150


def test_loop_imports_at_most_15_of_our_modules() -> None:
    tree = ast.parse(PAGE.read_text(encoding="utf-8"))
    modules = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    ours = [module for module in modules if module.startswith("posttrain")]
    assert 0 < len(ours) <= 15


def test_commands_share_one_loop() -> None:
    """A run that samples and a replay both start `rl.loop.train`."""
    from posttrain.rl import command, replay

    assert command.train is replay.train is loop.train
