"""How many images the training data has, and how many patches and tokens each becomes, from the headers of some of
them."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.config import Config
from posttrain.core.errors import DataError, ModelError
from posttrain.data.images import ImageError, RawImage
from posttrain.data.tiling import Tiling, block_text
from posttrain.plan.tower import TowerShape

ROWS = 64
"""Rows that are looked at, the first ones"""


@dataclass(frozen=True)
class ImageLoad:
    """Images of the sequences that are trained on."""

    count: float = 0.0
    """Mean of a sequence"""
    patches: float = 0.0
    """The mean of an image"""
    tokens: float = 0.0
    """The mean of an image"""
    rows: tuple[tuple[int, int], ...] = ()
    """Patches and tokens of all images of each row that was looked at"""
    source: str = ""
    """Where these come from, in words; "": not known"""


NO_IMAGES = ImageLoad()


@dataclass(frozen=True)
class PixelLimits:
    """Between how many pixels a model reads an image."""

    fewest: int
    most: int


@dataclass(frozen=True)
class Tiles:
    """How a model cuts an image into tiles, and what names them."""

    tiling: Tiling
    tokens: Callable[[str], int]
    """Return how many a text becomes."""


def sizing_of(settings: Mapping[str, Any], tower: TowerShape, folder: Path | None = None) -> PixelLimits | Tiles:
    """Return how a model sizes images.

    Args:
        settings: of its image processor; where they say nothing, what releases of its family have.
        folder: of the model, with its tokenizer.

    Raises:
        ModelError: the tokenizer cannot be read.
    """
    size = settings.get("size") or {}
    if tower.tile:
        tile = (settings.get("max_image_size") or {}).get("longest_edge") or tower.tile
        longest = size.get("longest_edge") or 4 * tower.tile
        splits = settings.get("do_image_splitting", True)
        return Tiles(Tiling(tile, longest if settings.get("do_resize", True) else None, splits), _tokens_by(folder))
    family = (56 * 56, 28 * 28 * 16384) if tower.gated else (1 << 16, 1 << 24)
    fewest = settings.get("min_pixels") or size.get("min_pixels") or size.get("shortest_edge") or family[0]
    most = settings.get("max_pixels") or size.get("max_pixels") or size.get("longest_edge") or family[1]
    return PixelLimits(int(fewest), int(most))


def _tokens_by(folder: Path | None) -> Callable[[str], int]:
    """Return what counts tokens of the text around tiles: the tokenizer in a folder; without one each name is a token,
    and so are line breaks in a row, as in releases."""
    file = None if folder is None else folder / "tokenizer.json"
    if file is None or not file.is_file():
        return lambda text: len(re.findall(r"<[^<>]+>|\n+", text))
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library has no class of its own
        raise ModelError(f"{file} cannot be read: {error}", hint="take the one that came with the weights") from error
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)


def cut(height: int, width: int, tower: TowerShape, sizing: PixelLimits | Tiles) -> tuple[int, int]:
    """Return patches and tokens of an image."""
    if isinstance(sizing, PixelLimits):
        patches = _within(height, width, tower, sizing)
        return patches, patches // tower.merge**2
    rows, columns = sizing.tiling.divided(height, width)
    tiles, features = rows * columns + 1, (tower.window // tower.merge) ** 2
    tokens = sizing.tokens(block_text(rows, columns, "<image>")) + tiles * (features - 1)
    return tiles * tower.window**2, tokens


def _within(height: int, width: int, tower: TowerShape, limits: PixelLimits) -> int:
    """Return the patches of an image that is brought to whole tokens along each side and within the limits."""
    side = tower.patch * tower.merge
    sides = [max(side, round(n / side) * side) for n in (height, width)]
    if math.prod(sides) > limits.most:
        shrink = math.sqrt(height * width / limits.most)
        sides = [max(side, math.floor(n / shrink / side) * side) for n in (height, width)]
    elif math.prod(sides) < limits.fewest:
        grow = math.sqrt(limits.fewest / (height * width))
        sides = [math.ceil(n * grow / side) * side for n in (height, width)]
    return math.prod(sides) // tower.patch**2


def images_of(cfg: Config, tower: TowerShape, sizing: PixelLimits | Tiles) -> ImageLoad:
    """Return what the first rows of the training data have; with "" for its source where they are not here."""
    try:
        rows = list(itertools.islice(_rows(cfg), ROWS))
        sizes = [[RawImage.of(image).size() for image in images] for images in rows]
    except (DataError, ImageError, OSError, ValueError):
        return ImageLoad()  # the run itself will say what is wrong with it
    if not rows:
        return ImageLoad()
    found = [[cut(height, width, tower, sizing) for height, width in of_row] for of_row in sizes]
    of_rows = tuple((sum(patches for patches, _ in row), sum(tokens for _, tokens in row)) for row in found)
    count = sum(map(len, found))
    patches, tokens = (sum(each) / max(count, 1) for each in zip(*of_rows, strict=True))
    return ImageLoad(count / len(rows), patches, tokens, of_rows, f"the first {len(rows)} rows")


def _rows(cfg: Config) -> Iterator[list[Mapping[str, Any]]]:
    """The images of each row."""
    import pyarrow.parquet as pq

    from posttrain.data.shards import shard_files

    for file in shard_files(cfg.data.train or []):
        with pq.ParquetFile(file) as opened:
            if "images" not in opened.schema_arrow.names:
                yield from ([] for _ in range(opened.metadata.num_rows))
                continue
            for batch in opened.iter_batches(batch_size=ROWS, columns=["images"]):
                yield from (images or [] for images in batch.column(0).to_pylist())
