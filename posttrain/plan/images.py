"""How many images the training data has, and how many patches each becomes, from the headers of some of them."""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from posttrain.config import Config
from posttrain.core.errors import DataError
from posttrain.data.images import ImageError, RawImage
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
    source: str = ""
    """Where these come from, in words; "": not known"""


NO_IMAGES = ImageLoad()


@dataclass(frozen=True)
class PixelLimits:
    """Between how many pixels a model reads an image."""

    fewest: int
    most: int


def limits_of(settings: Mapping[str, Any], tower: TowerShape) -> PixelLimits:
    """Return what the settings of an image processor say, else those of the tower's family."""
    family = (56 * 56, 28 * 28 * 16384) if tower.gated else (1 << 16, 1 << 24)
    size = settings.get("size") or {}
    fewest = settings.get("min_pixels") or size.get("min_pixels") or size.get("shortest_edge") or family[0]
    most = settings.get("max_pixels") or size.get("max_pixels") or size.get("longest_edge") or family[1]
    return PixelLimits(int(fewest), int(most))


def patches_of(height: int, width: int, tower: TowerShape, limits: PixelLimits) -> int:
    """Return the patches of an image, which is brought to whole tokens along each side and within the limits."""
    side = tower.patch * tower.merge
    sides = [max(side, round(n / side) * side) for n in (height, width)]
    if math.prod(sides) > limits.most:
        shrink = math.sqrt(height * width / limits.most)
        sides = [max(side, math.floor(n / shrink / side) * side) for n in (height, width)]
    elif math.prod(sides) < limits.fewest:
        grow = math.sqrt(limits.fewest / (height * width))
        sides = [math.ceil(n * grow / side) * side for n in (height, width)]
    return math.prod(sides) // tower.patch**2


def images_of(cfg: Config, tower: TowerShape, limits: PixelLimits) -> ImageLoad:
    """Return what the first rows of the training data have; with "" for its source where they are not here."""
    try:
        rows = list(itertools.islice(_rows(cfg), ROWS))
        sizes = [_size(image) for images in rows for image in images]
    except (DataError, ImageError, OSError, ValueError):
        return ImageLoad()  # the run itself will say what is wrong with it
    if not rows:
        return ImageLoad()
    patches = [patches_of(height, width, tower, limits) for height, width in sizes]
    mean = sum(patches) / len(patches) if patches else 0.0
    return ImageLoad(len(patches) / len(rows), mean, f"the first {len(rows)} rows")


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


def _size(image: Mapping[str, Any]) -> tuple[int, int]:
    """Return height and width by the file's header."""
    from PIL import Image

    with Image.open(io.BytesIO(RawImage.of(image).read())) as opened:
        return opened.height, opened.width
