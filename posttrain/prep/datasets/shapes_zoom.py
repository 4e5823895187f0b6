"""Generated questions that are answered by looking closer: which of three patterns a square has.

A picture has 128 x 128 pixels and a square in one quarter. Patterns are lines one pixel wide. The built-in model reads
images at 64 x 64 pixels, where all patterns are the same even grey; of a quarter it reads every pixel.
"""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from posttrain.core.types import Message
from posttrain.data.images import RawImage
from posttrain.data.parquet import Conversation
from posttrain.data.turns import IMAGE
from posttrain.prep.datasets.base import RawRow
from posttrain.prep.datasets.shapes import BACKGROUND, Scene, Shapes
from posttrain.tools import zoom

SIDE, SQUARE = 128, 48
QUARTER = SIDE // 2
GREYS = (100, 110, 120, 130, 140, 150)
FIELDS = ((220, 50, 50), (50, 190, 60), (50, 70, 220), (230, 200, 40))
"""Colours of the quarter that has the square, by place. A model as small as this needs long to learn positions that
follow from attention alone; of a colour it learns soon where to look."""
DEPTH = 80
"""How much lighter and darker than its grey a pattern's lines are."""
TOOL = zoom.Zoom(scale=2, side=QUARTER)
"""As the preset `tiny-vision-zoom` has it: quarters are boxes, shown pixel by pixel."""
DEMOS = ("right", "right", "elsewhere", "unseen")
"""Training conversations look at the right quarter, at another, or at none, in these shares. But for the first they
guess."""


@dataclass(frozen=True)
class Square(Scene):
    """A question about the pattern of a square: its one thing is (grey, pattern from 0, row, column)."""

    @property
    def quarter(self) -> int:
        """Return the number of its quarter, by rows."""
        _, _, row, column = self.things[0]
        return int(2 * (row // QUARTER) + column // QUARTER)

    def draw(self) -> bytes:
        from PIL import Image

        [(grey, pattern, row, column)] = self.things
        picture = np.full((SIDE, SIDE, 3), BACKGROUND, np.float64)
        top, left = (QUARTER * n for n in divmod(self.quarter, 2))
        picture[top : top + QUARTER, left : left + QUARTER] = FIELDS[self.quarter]
        # Lines fade out towards the edges: where they ended at once, their last one would show at half the resolution.
        fade = np.sin(np.pi * (np.arange(SQUARE) + 0.5) / SQUARE) ** 2
        y, x = np.indices((SQUARE, SQUARE))
        lines = ((-1.0) ** y, (-1.0) ** x, (-1.0) ** (x + y))[pattern]
        drawn = grey + np.rint(DEPTH * fade[:, None] * fade * lines)
        picture[row : row + SQUARE, column : column + SQUARE] = drawn[..., None]
        file = io.BytesIO()
        Image.fromarray(picture.astype(np.uint8)).save(file, "PNG")
        return file.getvalue()


def one_square(rng: random.Random) -> Square:
    """Return a scene of a square in one of the quarters."""
    row, column = (QUARTER * rng.randrange(2) + 2 * rng.randint(0, (QUARTER - SQUARE) // 2) for _ in range(2))
    pattern = rng.randrange(3)
    thing = (rng.choice(GREYS), pattern, row, column)
    return Square("1 level, 2 upright, 3 checked?", str(pattern + 1), (thing,))


class ShapesZoom(Shapes):
    """The data set of ``posttrain prep shapes-zoom``."""

    name = "shapes-zoom"
    default_rows: ClassVar[dict[str, int]] = {"train": 4000, "test": 300}
    scenes: Sequence[Callable[[random.Random], Scene]] = (one_square,)
    capacity: ClassVar[dict[str, int]] = {"train": 4500, "test": 1000}

    def raw(self, scene: Scene) -> RawRow:
        assert isinstance(scene, Square)
        # The picture comes last: what is asked for is nearer to it.
        return {**super().raw(scene), "question": f"{scene.question}{IMAGE}", "quarter": scene.quarter}

    def to_sft(self, row: RawRow, index: int, split: str) -> Conversation:
        """Half of the training conversations do not look where the answer is. SFT imitates them; RL, which sees rewards
        only, learns to look there."""
        picture = row["images"][0]
        rng = random.Random(b"demo" + picture["bytes"] + row["question"].encode())
        kind = rng.choice(DEMOS) if split == "train" else "right"
        if kind == "unseen":
            return Conversation([*self._prompt(row), _answer(rng.choice("123"))], [zoom.SCHEMA], images=[picture])
        right = row["quarter"]
        quarter = right if kind == "right" else rng.choice([n for n in range(4) if n != right])
        top, left = divmod(quarter, 2)
        box = [left, top, left + 1, top + 1]
        call: Message = {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": {"name": TOOL.name, "arguments": {"box": box}}}],
        }
        result: Message = {"role": "tool", "name": TOOL.name, "content": IMAGE}
        shown = {"bytes": TOOL.zoom(RawImage.of(picture), [*map(float, box)])}
        said = self.gold(row) if kind == "right" else rng.choice("123")
        return Conversation([*self._prompt(row), call, result, _answer(said)], [zoom.SCHEMA], images=[picture, shown])


def _answer(said: str) -> Message:
    return {"role": "assistant", "content": f"#### {said}"}
