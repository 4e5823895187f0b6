"""Images of SmolVLM and Idefics3: square tiles of one size, and the whole image once more, made as small as a tile.

The tower takes each tile by itself. In the text a tile's features follow a token that names its row and column, and the
tiles of a row are followed by a line break; so the block of an image holds more than tokens of features.

Shape legend: n tiles of an image, s patches along a tile's side, C channels, p side of a patch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from posttrain.data.images import Grid, ImageError, PlacedImage, RawImage
from posttrain.data.tiling import Tiling, block_text
from posttrain.data.vision import VisionProcessor

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TileProcessor(VisionProcessor):
    """A grid is (tiles, rows, columns); an image that is one tile has 0 rows and columns.

    Args:
        processor: SmolVLM's or Idefics3's.
        tokenizer: of the model; it names the tokens around images.
        image_id, video_id: as in ``VisionProcessor``.
        patch_size: pixels along each side of a patch.
        merge: patches along each side of what becomes one feature.
    """

    frames = 1

    def __init__(
        self,
        processor: Any,
        tokenizer: PreTrainedTokenizerBase,
        *,
        image_id: int,
        video_id: int | None,
        patch_size: int,
        merge: int,
    ) -> None:
        super().__init__(processor, image_id=image_id, video_id=video_id)
        self.tokenizer, self.merge, self.patch_size = tokenizer, merge, patch_size
        tile = int(processor.max_image_size["longest_edge"])
        longest = int(processor.size["longest_edge"]) if processor.do_resize else None
        self.tiling = Tiling(tile, longest, bool(processor.do_image_splitting))
        self.side = tile // patch_size
        """Patches along each side of a tile. Pixels that are left over are not read."""
        self.blank = (1, self.side, self.side)
        self._blocks: dict[Grid, npt.NDArray[np.int32]] = {}

    def grid(self, raw: RawImage) -> Grid:
        image = raw.decode()
        rows, columns = self.tiling.divided(image.height, image.width)
        return rows * columns + 1, rows, columns

    def block(self, grid: Grid) -> npt.NDArray[np.int32]:
        if grid not in self._blocks:
            ids = self.tokenizer(self._text(grid), add_special_tokens=False)["input_ids"]
            self._blocks[grid] = np.asarray(ids, np.int32)
        return self._blocks[grid]

    def _text(self, grid: Grid) -> str:
        """Return what stands for an image in the text that the model was trained on."""

        def named(name: str, usual: str) -> str:
            return str(getattr(self.tokenizer, name, usual))

        _, rows, columns = grid
        return block_text(
            rows,
            columns,
            named("image_token", "<image>") * (self.side // self.merge) ** 2,
            around=named("fake_image_token", "<fake_token_around_image>"),
            whole=named("global_image_token", "<global-img>"),
        )

    def patch_grid(self, grid: Grid) -> Grid:
        return grid[0], self.side, self.side

    def _patches(self, image: PlacedImage) -> npt.NDArray[np.uint8]:
        made = self.processor.preprocess(
            [image.raw.decode()], do_rescale=False, do_normalize=False, return_row_col_info=True, return_tensors="np"
        )
        tiles = made["pixel_values"][0]
        rows, columns = int(made["rows"][0][0]), int(made["cols"][0][0])
        if (len(tiles), rows, columns) != image.grid:
            raise ImageError(
                f"it is cut into {rows} x {columns} tiles, and was into {image.grid[1]} x {image.grid[2]}",
                "was the file changed during the run?",
            )
        n, s, p = len(tiles), self.side, self.patch_size
        cut = tiles[:, :, : s * p, : s * p].reshape(n, -1, s, p, s, p)
        return np.ascontiguousarray(cut.transpose(0, 2, 4, 1, 3, 5)).reshape(n * s * s, -1).astype(np.uint8)
