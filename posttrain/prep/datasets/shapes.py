"""Generated questions about small pictures, for the built-in model that sees: count, read a digit, compare sizes.

A picture has 48 x 48 pixels in 3 x 3 cells. A stable hash of the scene decides its split, so that train and test share
no picture.
"""

from __future__ import annotations

import hashlib
import io
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from posttrain.core.errors import DataError
from posttrain.core.types import Message
from posttrain.data.parquet import Conversation
from posttrain.data.turns import IMAGE
from posttrain.prep.datasets.base import RawRow, WordProblems

SIDE, CELLS = 48, 3
CELL = SIDE // CELLS
TEST_PERCENT = 20
HASTY_SHARE = 0.35
"""Share of SFT training conversations whose answer is off by one."""
COLOURS = {"red": (220, 40, 40), "green": (30, 160, 60), "blue": (40, 70, 220)}
BACKGROUND = 245
_DIGITS = (
    "111101101101111", "010110010010111", "111001111100111", "111001111001111", "101101111001001",
    "111100111001111", "111100111101111", "111001001001001", "111101111101111", "111101111001111",
)  # fmt: skip
"""Rows of three pixels of the ten digits, five rows each."""
_DIGIT_SCALE = 4
"""Pixels along each side of a digit's pixel."""

Picture = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Scene:
    """A question about a picture. ``things`` say what is drawn, and tell scenes apart."""

    question: str
    answer: str
    things: tuple[tuple[Any, ...], ...]

    def draw(self) -> bytes:
        """Return the picture as a PNG."""
        from PIL import Image

        picture = np.full((SIDE, SIDE, 3), BACKGROUND, np.uint8)
        for kind, colour, *where in self.things:
            _PAINTERS[kind](picture, COLOURS[colour], *where)
        file = io.BytesIO()
        Image.fromarray(picture).save(file, "PNG")
        return file.getvalue()

    @property
    def split(self) -> str:
        """Return the split it belongs to, the same on every machine and for every seed."""
        digest = hashlib.sha256(repr((self.question, self.things)).encode()).digest()
        return "test" if int.from_bytes(digest[:8], "big") % 100 < TEST_PERCENT else "train"


def _circle(picture: Picture, colour: tuple[int, int, int], row: int, column: int, radius: int) -> None:
    y, x = np.ogrid[:SIDE, :SIDE]
    picture[(y - row) ** 2 + (x - column) ** 2 <= radius**2] = colour


def _square(picture: Picture, colour: tuple[int, int, int], row: int, column: int, radius: int) -> None:
    picture[row - radius : row + radius + 1, column - radius : column + radius + 1] = colour


def _digit(picture: Picture, colour: tuple[int, int, int], row: int, column: int, digit: int) -> None:
    cells = np.array([int(cell) for cell in _DIGITS[digit]], bool).reshape(5, 3)
    mask = cells.repeat(_DIGIT_SCALE, 0).repeat(_DIGIT_SCALE, 1)
    picture[row : row + mask.shape[0], column : column + mask.shape[1]][mask] = colour


_PAINTERS: dict[str, Callable[..., None]] = {"circle": _circle, "square": _square, "digit": _digit}


def count_shapes(rng: random.Random) -> Scene:
    """Return a scene of one to six shapes, of which those of one kind are asked for."""
    asked = rng.choice(("circle", "square"))
    other = "square" if asked == "circle" else "circle"
    number, others = rng.randint(1, 5), rng.randint(0, 3)
    cells = rng.sample(range(CELLS**2), number + others)
    kinds = [asked] * number + [other] * others
    centre = CELL // 2
    things = tuple(
        (kind, rng.choice(list(COLOURS)), centre + CELL * (cell // CELLS), centre + CELL * (cell % CELLS), 5)
        for kind, cell in sorted(zip(kinds, cells, strict=True), key=lambda pair: pair[1])
    )
    return Scene(f"How many {asked}s are there?", str(number), things)


def read_digit(rng: random.Random) -> Scene:
    """Return a scene of two digits side by side, one of which is asked for by its colour."""
    first, second = rng.sample(list(COLOURS), 2)
    digits = rng.randint(0, 9), rng.randint(0, 9)
    rows = rng.randint(4, 24), rng.randint(4, 24)
    things = (
        ("digit", first, rows[0], rng.randint(4, 10), digits[0]),
        ("digit", second, rows[1], rng.randint(26, 32), digits[1]),
    )
    asked = rng.randint(0, 1)
    return Scene(f"Which number is {(first, second)[asked]}?", str(digits[asked]), things)


def compare_sizes(rng: random.Random) -> Scene:
    """Return a scene of two squares, of which the larger one is asked for by number."""
    first, second = rng.sample(list(COLOURS), 2)
    large = rng.randint(6, 10)
    radii = [large, large - rng.randint(2, 4)]
    rng.shuffle(radii)
    things = (
        ("square", first, rng.randint(12, 35), 12, radii[0]),
        ("square", second, rng.randint(12, 35), 35, radii[1]),
    )
    question = f"Which square is more, 1 the {first} or 2 the {second}?"
    return Scene(question, "1" if radii[0] > radii[1] else "2", things)


SCENES = (count_shapes, read_digit, compare_sizes)


class Shapes(WordProblems):
    """The data set of ``posttrain prep shapes``. One picture a row; the three kinds of questions take turns."""

    name = "shapes"
    data_source = "posttrain/shapes"
    licence = "Apache-2.0 (generated)"
    hub_id: str | None = None
    splits: tuple[str, ...] = ("train", "test")
    default_rows: ClassVar[dict[str, int]] = {"train": 6000, "test": 300}
    answer_tool = False
    scenes: Sequence[Callable[[random.Random], Scene]] = SCENES
    """What draws scenes at random; they take turns."""
    capacity: ClassVar[dict[str, int]] = {}
    """Most rows of a split, where its scenes are few enough to run out"""

    def available(self, source: str | None) -> Sequence[str]:
        if source is not None:
            raise DataError(f"{self.name} is generated, and reads no --source", hint="leave --source out")
        return self.splits

    def rows(self, split: str, source: str | None, *, n: int | None = None, seed: int = 0) -> Iterator[RawRow]:
        """``n`` rows (None: ``default_rows``), no scene twice; the same for the same seed."""
        most = self.capacity.get(split)
        if n is not None and most is not None and n > most:
            raise DataError(
                f"{self.name}: {n} {split} rows asked for, and it has {most}", hint=f"ask for at most {most}"
            )
        rng = random.Random(f"shapes-{split}-{seed}")
        seen: set[Scene] = set()
        for number in range(n or self.default_rows[split]):
            scene = self.scenes[number % len(self.scenes)](rng)
            while scene.split != split or scene in seen:
                scene = self.scenes[number % len(self.scenes)](rng)
            seen.add(scene)
            yield self.raw(scene)

    def raw(self, scene: Scene) -> RawRow:
        """Return the row of a scene."""
        return {
            "question": f"{IMAGE}{scene.question}",
            "answer": f"#### {scene.answer}",
            "images": [{"bytes": scene.draw()}],
        }

    def to_rlhf(self, row: RawRow, index: int, split: str) -> dict[str, Any]:
        return {**super().to_rlhf(row, index, split), "images": row["images"]}

    def to_sft(self, row: RawRow, index: int, split: str) -> Conversation:
        """Some training conversations are off by one, as collected demonstrations are: SFT imitates them, and RL, which
        sees rewards only, learns not to."""
        said = self.gold(row)
        if self.is_hasty(row, split):
            said = str(int(said) - 1) if int(said) else "1"
        answer: Message = {"role": "assistant", "content": f"#### {said}"}
        return Conversation([*self._prompt(row), answer], images=row["images"])

    def is_hasty(self, row: RawRow, split: str) -> bool:
        """Return whether this row's conversation is off by one; the same for the same picture."""
        digest = hashlib.sha256(b"hasty" + row["images"][0]["bytes"]).digest()
        return split == "train" and int.from_bytes(digest[:8], "big") < HASTY_SHARE * 2**64
