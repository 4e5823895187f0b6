"""Errors of bad input say what to do about it."""

import ast
from pathlib import Path

import pytest

import posttrain

_BAD_INPUT = {"UserError", "ConfigError", "ModelError", "DataError"}
_NOT_OF_INPUT = {
    "no list of layers found in ",
    "the model has no adapter that could be switched off",
}
"""Beginnings of messages that no input brings about."""


@pytest.mark.parametrize(
    "package", ["cluster", "config", "core", "doctor", "engines", "models", "plan", "runs", "tracking", "train"]
)
def test_errors_of_bad_input_have_a_hint(package: str) -> None:
    without = []
    for file in (Path(posttrain.__file__).parent / package).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            made = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _BAD_INPUT
            if made and not any(keyword.arg == "hint" for keyword in node.keywords):
                without.append(f"{file.name}: {ast.unparse(node.args[0])}")
    assert not [found for found in without if not any(text in found for text in _NOT_OF_INPUT)]
