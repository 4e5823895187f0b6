"""Images of Qwen2.5-VL and Qwen3-VL: one grid of patches for an image, of its own proportions.

Shape legend: T tokens of a sequence after expansion, P patches of an image, C channels, p side of a patch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from posttrain.data.images import Grid, ImageError, PlacedImage, RawImage
from posttrain.data.vision import VisionProcessor

if TYPE_CHECKING:
    from PIL import Image


class GridProcessor(VisionProcessor):
    """A grid is (times, rows, columns) of patches. Arguments as in ``VisionProcessor``; ``processor`` is Qwen2-VL's."""

    def __init__(self, processor: Any, *, image_id: int, video_id: int | None) -> None:
        super().__init__(processor, image_id=image_id, video_id=video_id)
        self.merge = int(processor.merge_size)
        # Models take an image for a film that stands still.
        self.frames = int(processor.temporal_patch_size)
        self.blank = (1, self.merge, self.merge)

    def grid(self, raw: RawImage) -> Grid:
        """Decode an image whole, and return its grid. Raises ``ImageError``."""
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        image, size = raw.decode(), self.processor.size
        side = int(self.processor.patch_size)
        try:
            height, width = smart_resize(
                image.height,
                image.width,
                side * self.merge,
                min_pixels=size["shortest_edge"],
                max_pixels=size["longest_edge"],
            )
        except ValueError as error:
            raise ImageError(
                f"the model does not read an image of {image.width} x {image.height} pixels: {error}",
                "cut it, or leave the row out",
            ) from None
        return 1, height // side, width // side

    def block(self, grid: Grid) -> npt.NDArray[np.int32]:
        return np.full(grid[0] * grid[1] * grid[2] // self.merge**2, self.image_id, np.int32)

    def patch_grid(self, grid: Grid) -> Grid:
        return grid

    def positions(self, length: int, images: Sequence[PlacedImage]) -> npt.NDArray[np.int64]:
        """Return [T, 3] positions in time, height and width (multimodal rotary embedding, arXiv:2409.12191).

        Text counts on in all three alike. A token of an image has its row and its column, counted from where the text
        before it ended; what follows goes on after the larger of both.
        """
        out = np.empty((length, 3), np.int64)
        at = position = 0
        for image in images:
            out[at : image.start] = position + np.arange(image.start - at)[:, None]
            position += image.start - at
            cells = (image.grid[0], image.grid[1] // self.merge, image.grid[2] // self.merge)
            at = image.start + image.tokens
            out[image.start : at] = position + np.stack(np.unravel_index(np.arange(image.tokens), cells), axis=1)
            position += max(cells[1:])
        out[at:] = position + np.arange(length - at)[:, None]
        return out

    def as_read(self, image: PlacedImage) -> Image.Image:
        from PIL import Image

        _, rows, columns = image.grid
        m, side = self.merge, int(self.processor.patch_size)
        # Patches that become one token lie one after another.
        cut = self._patches(image).reshape(rows // m, columns // m, m, m, -1, side, side)
        pixels = cut.transpose(0, 2, 5, 1, 3, 6, 4).reshape(rows * side, columns * side, -1)
        return Image.fromarray(np.ascontiguousarray(pixels))

    def _patches(self, image: PlacedImage) -> npt.NDArray[np.uint8]:
        made = self.processor.preprocess(
            [image.raw.decode()], do_rescale=False, do_normalize=False, return_tensors="np"
        )
        patches, grid = made["pixel_values"], tuple(int(n) for n in made["image_grid_thw"][0])
        if grid != image.grid:
            raise ImageError(f"its grid is {grid}, and was {image.grid}", "was the file changed during the run?")
        first = patches.reshape(len(patches), 3, self.frames, -1)[:, :, 0]
        return np.ascontiguousarray(first.reshape(len(patches), -1)).astype(np.uint8)
