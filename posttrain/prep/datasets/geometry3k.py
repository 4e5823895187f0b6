"""Geometry3K (Lu et al. 2021, arXiv:2105.04165): school geometry with a figure."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from posttrain.core.errors import DataError
from posttrain.core.types import Score
from posttrain.prep.datasets.base import Kind, RawRow, list_of
from posttrain.prep.datasets.problems import AnswerForm, MathProblems

_SPLIT_NAMES = {"train": "train", "val": "validation", "validation": "validation", "test": "test"}
_FIGURE = "img_diagram.png"
_IMAGE = "<image>"


class Geometry3k(MathProblems):
    """Raw rows ``{"images": [{"bytes"}], "problem", "answer"}``, with ``<image>`` in the problem; or the original
    folders of one problem (``train/11/data.json`` beside ``img_diagram.png``) with ``annotat_text``, ``choices``,
    ``answer`` (a letter) and ``data_type`` (its split). The answer is then the text of the choice.

    The RLHF row has a column ``images``, ``[{"bytes": PNG}]``, one for each ``<image>`` in the prompt.
    """

    name = "geometry3k"
    data_source = "hiyouga/geometry3k"
    licence = "MIT"
    hub_id: str | None = "hiyouga/geometry3k"
    splits: tuple[str, ...] = ("train", "validation", "test")
    kinds: tuple[Kind, ...] = ("rlhf",)
    size: Mapping[str, int] = {"train": 2101, "validation": 300, "test": 601}
    patterns: ClassVar[Mapping[str, tuple[str, ...]]] = {
        split: (f"data/{split}-*", f"{split}-*", split, f"{folder}/*/data", "*/data", "data")
        for folder, split in (("train", "train"), ("val", "validation"), ("test", "test"))
    }
    form: ClassVar[AnswerForm] = AnswerForm(
        "{problem} You FIRST think about the reasoning process as an internal monologue and then provide the final "
        "answer. The reasoning process MUST BE enclosed within <think> </think> tags. The final answer MUST BE put in "
        "\\boxed{}.",
        "<think>\n</think>\n\\boxed{{answer}}",
        "\\boxed{{answer}}",
    )
    """verl's instruction for this set."""
    problem_columns: ClassVar[Sequence[str]] = ("problem", "annotat_text", "problem_text", "question")
    solution_columns: ClassVar[Sequence[str]] = ()
    kept_columns: ClassVar[Sequence[str]] = ("problem_type_graph", "problem_type_goal")

    def available(self, source: str | None) -> Sequence[str]:
        return [s for s in super().available(source) if next(itertools.islice(self.rows(s, source), 1), None)]

    def belongs(self, row: RawRow, split: str) -> bool:
        return _SPLIT_NAMES.get(str(row.get("data_type", split)), split) == split

    def complete(self, row: RawRow, file: Path) -> RawRow:
        figure = file.with_name(_FIGURE)
        if "images" in row or not figure.exists():
            return row
        try:
            return {**row, "images": [{"bytes": figure.read_bytes()}]}
        except OSError as error:
            raise DataError(f"{figure}: unreadable: {error}", hint="the figure of a problem lies beside it") from error

    def problem(self, row: RawRow) -> str:
        text = super().problem(row)
        return text if _IMAGE in text else _IMAGE + text

    def gold(self, row: RawRow) -> str:
        choices, letter = list_of(row, "choices"), row.get("answer")
        if not choices or not isinstance(letter, str):
            return super().gold(row)
        place = "ABCD".find(letter.strip()) if len(letter.strip()) == 1 else -1
        if not 0 <= place < len(choices):
            raise DataError("the gold answer is none of the choices", hint=f"{letter!r} of {len(choices)} choices")
        return str(choices[place]).strip()

    def to_rlhf(self, row: RawRow, index: int, split: str) -> dict[str, Any]:
        return {**super().to_rlhf(row, index, split), "images": self._images(row)}

    def to_sft(self, row: RawRow, index: int, split: str) -> None:
        """There are no worked solutions."""

    def check(self, row: RawRow) -> Score:
        images, asked = self._images(row), self.problem(row).count(_IMAGE)
        if len(images) != asked:
            raise DataError(
                "images are missing, or not named in the problem",
                hint=f"the problem names {asked}, and there are {len(images)}",
            )
        return super().check(row)

    def _images(self, row: RawRow) -> list[dict[str, bytes]]:
        found = row.get("images")
        items = found if isinstance(found, list) else [found] if found else []
        raw = [item.get("bytes") if isinstance(item, Mapping) else item for item in items]
        images = [{"bytes": data} for data in raw if isinstance(data, bytes) and data]
        if not images or len(images) < len(raw):
            raise DataError(
                "the image is missing",
                hint=f"neither `images` with bytes nor {_FIGURE} beside the problem; the row has {', '.join(row)}",
            )
        return images
