"""Competitive programming as PRIME trains on it (Cui et al. 2025, arXiv:2502.01456): CodeContests (arXiv:2203.07814),
APPS (arXiv:2105.09938), TACO (arXiv:2312.14852) and Codeforces."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from posttrain.core.errors import DataError
from posttrain.core.types import Message
from posttrain.prep.datasets.base import RawRow, list_of
from posttrain.prep.datasets.problems import first, given_prompt, given_truth, problem_text, without_figures
from posttrain.prep.datasets.programs import Programs

SOURCES = ("codecontests", "apps", "codeforces", "taco")

_PYTHON3 = 3
"""The number of Python 3 among the languages of CodeContests."""
_GROUPS = ("public_tests", "private_tests", "generated_tests")
_ASK = (
    "{problem}\n\nWrite Python code to solve the problem. Present the code in \n```python\nYour code\n```\nat the end."
)
"""PRIME's instruction."""


class Code(Programs):
    """Raw rows in any of these shapes:

    - PRIME's parquet, ``{"data_source": "taco", "prompt": [message], "reward_model": {"ground_truth": JSON text}}``,
      whose prompt is kept as it is;
    - ``{"problem", "tests"}``, perhaps with ``solutions`` and ``source``; tests are ``{"inputs", "outputs"}``, or a
      list of ``{"input", "output"}``, or JSON text of either;
    - APPS and TACO, ``{"question", "input_output": JSON text, "solutions": JSON text, "starter_code"}``; TACO's rows
      are those with ``raw_tags``;
    - CodeContests, ``{"description", "public_tests", "private_tests", "generated_tests", "solutions"}``.

    A row that names no source is of ``codecontests``. Rows without tests, and PRIME's mathematics, are left out.
    """

    name = "code"
    data_source = "codecontests"
    licence = "MIT (problems: CC-BY-4.0, MIT, Apache-2.0)"
    hub_id: str | None = "PRIME-RL/Eurus-2-RL-Data"
    splits: tuple[str, ...] = ("train", "validation", "test")
    size: Mapping[str, int] = {"train": 26758, "validation": 1024}
    patterns: ClassVar[Mapping[str, tuple[str, ...]]] = {
        split: (split, f"{split}-*", f"data/{split}-*", f"*_{split}") for split in ("train", "validation", "test")
    }

    @property
    def data_sources(self) -> tuple[str, ...]:
        return SOURCES

    def source_of(self, row: RawRow) -> str:
        for name in ("data_source", "dataset", "source"):
            label = str(row.get(name) or "").lower().replace("_", "").replace("-", "")
            if label in SOURCES and not (name == "source" and "input_output" in row):
                return label
        if "input_output" in row:  # there `source` is the site that a problem was found on
            return "taco" if "raw_tags" in row else "apps"
        return str(row.get("data_source") or "codecontests")

    def skip(self, row: RawRow) -> str | None:
        if self.source_of(row) not in SOURCES:
            return "of another source"
        given = given_truth(row) or row.get("tests") or any(row.get(group) for group in _GROUPS)
        return None if given or _decoded(row.get("input_output")) else "there are no tests"

    def task(self, row: RawRow) -> str:
        text = without_figures(problem_text(row, ("problem", "question", "description"))).strip()
        starter = row.get("starter_code")
        return f"{text}\n\n{starter.strip()}" if isinstance(starter, str) and starter.strip() else text

    def prompt(self, row: RawRow) -> list[Message]:
        task = self.task(row)
        return given_prompt(row) or [{"role": "user", "content": _ASK.replace("{problem}", task)}]

    def tests(self, row: RawRow) -> dict[str, Any]:
        found = _decoded(first({**row, "given": given_truth(row)}, ("given", "tests", "input_output")))
        groups = [row[group] for group in _GROUPS if row.get(group)]
        if found is None and groups and all(isinstance(group, Mapping) for group in groups):
            found = _joined(groups)
        if isinstance(found, list) and found and all(isinstance(test, Mapping) for test in found):
            found = _listed(found)
        if isinstance(found, list):
            found = {"assert_case": found}
        if not isinstance(found, dict) or not (found.get("inputs") or found.get("assert_case")):
            raise DataError("there are no tests", hint=f"the row has {', '.join(row)}")
        return found

    def solution(self, row: RawRow) -> str | None:
        solutions = _decoded(row.get("solutions"))
        if isinstance(solutions, Mapping):
            pairs = zip(list_of(solutions, "language"), list_of(solutions, "solution"), strict=False)
            solutions = [text for language, text in pairs if language == _PYTHON3]
        if not isinstance(solutions, list):
            return None
        return next((text for text in solutions if isinstance(text, str) and text.strip()), None)


def _decoded(value: Any) -> Any:
    """What JSON text holds, None where it is none; anything else as it is, empty things as None."""
    if not isinstance(value, str):
        return value or None
    try:
        return json.loads(value) or None
    except ValueError:
        return None


def _joined(groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """CodeContests' groups of tests as one."""
    return {
        "inputs": [text for group in groups for text in list_of(group, "input")],
        "outputs": [text for group in groups for text in list_of(group, "output")],
    }


def _listed(tests: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A list of single tests as lists of inputs and outputs, with the function's name where they call one."""
    name = next((test["fn_name"] for test in tests if test.get("fn_name")), None)
    joined = {"inputs": [test.get("input") for test in tests], "outputs": [test.get("output") for test in tests]}
    return joined if name is None else {**joined, "fn_name": name}
