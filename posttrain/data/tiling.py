"""Into how many tiles SmolVLM and Idefics3 cut an image, by its size alone, and what stands for them in the text."""

from __future__ import annotations

import math
from dataclasses import dataclass

_LARGEST_SIDE = 4096
"""Longest side, in pixels, that the processors of transformers make of any image."""


@dataclass(frozen=True)
class Tiling:
    """How images are brought to whole tiles."""

    tile: int
    """Pixels along each side of a tile"""
    longest: int | None
    """Pixels that the longer side of an image is made to have; None: it stays as it is"""
    splits: bool = True
    """Images are cut at all."""

    def divided(self, height: int, width: int) -> tuple[int, int]:
        """Return rows and columns of tiles that an image is cut into; (0, 0): it is one tile.

        The processor rounds down where it keeps proportions, so this takes the same steps in the same order.
        """
        if not self.splits:
            return 0, 0
        if self.longest is not None:
            height, width = _scaled(height, width, self.longest, even=True)
            if max(height, width) > _LARGEST_SIDE:
                height, width = _scaled(height, width, _LARGEST_SIDE, even=False)
        ratio = width / height
        if width >= height:
            width = self._whole_tiles(width)
            height = self._whole_tiles(int(width / ratio))
        else:
            height = self._whole_tiles(height)
            width = self._whole_tiles(int(height * ratio))
        rows, columns = height // self.tile, width // self.tile
        return (rows, columns) if rows > 1 or columns > 1 else (0, 0)

    def _whole_tiles(self, length: int) -> int:
        return math.ceil(length / self.tile) * self.tile


def block_text(
    rows: int,
    columns: int,
    features: str,
    *,
    around: str = "<fake_token_around_image>",
    whole: str = "<global-img>",
) -> str:
    """Return what stands for an image in the text that a model was trained on.

    Args:
        rows, columns: as of ``Tiling.divided``.
        features: what stands for those of one tile.
        around, whole: tokens before each tile and at the end, and before the whole image.
    """
    text = ""
    for row in range(1, rows + 1):
        text += "".join(f"{around}<row_{row}_col_{column}>{features}" for column in range(1, columns + 1)) + "\n"
    return text + "\n" * bool(rows) + f"{around}{whole}{features}{around}"


def _scaled(height: int, width: int, longest: int, *, even: bool) -> tuple[int, int]:
    """Return sides of an image whose longer one is ``longest``; the other is rounded down, then ``even`` up to a
    multiple of two."""
    ratio = width / height
    if width >= height:
        width = longest
        height = int(width / ratio)
        height += height % 2 if even else 0
    else:
        height = longest
        width = int(height * ratio)
        width += width % 2 if even else 0
    return max(height, 1), max(width, 1)
