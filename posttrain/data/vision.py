"""What a vision-language model reads of a conversation with images: its ids, its positions and its pixels.

A chat template writes one image token for each image. A model reads the token as often as the image has features
(``expand``), positions that follow rows and columns of the image (``positions``), and its pixels (``pixels``).
Expansion works on ids, once, and never on text.

Shape legend: T tokens of a sequence after expansion, P patches of all images, C channels, p side of a patch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from posttrain.core.errors import DataError
from posttrain.core.types import Ids
from posttrain.data.images import Grid, ImageError, PlacedImage, RawImage
from posttrain.data.pack import Images, PackedBatch
from posttrain.data.turns import IMAGE

_THREADS = 8
"""Most images that are decoded at the same time."""


@dataclass(frozen=True)
class Expanded:
    """A sequence as a trainer reads it."""

    ids: npt.NDArray[np.int32]
    """[T]"""
    mask: npt.NDArray[np.bool_]
    """[T] true where the token carries loss; never at a token of an image"""
    images: tuple[PlacedImage, ...]


class VisionProcessor:
    """The images of one model's conversations. It can be pickled.

    Args:
        processor: an image processor of transformers that cuts images into patches, as Qwen2-VL's does.
        image_id: the token that stands for an image.
        video_id: the token that stands for a video, which is refused.
    """

    def __init__(self, processor: Any, *, image_id: int, video_id: int | None) -> None:
        self.processor, self.image_id, self.video_id = processor, image_id, video_id
        self.merge = int(processor.merge_size)
        """Patches along each side of what becomes one token."""
        self.frames = int(processor.temporal_patch_size)
        """Times that an image is repeated in a patch: models take it for a film that stands still."""

    @property
    def table(self) -> npt.NDArray[np.float32]:
        """Return [C, 256] what the model reads for each value of each channel: rescaled and normalised."""
        values = np.broadcast_to(np.arange(256, dtype=np.uint8), (3, 1, 256))
        scaled = self.processor.rescale(values, self.processor.rescale_factor) if self.processor.do_rescale else values
        if self.processor.do_normalize:
            scaled = self.processor.normalize(scaled, self.processor.image_mean, self.processor.image_std)
        return np.ascontiguousarray(scaled[:, 0], dtype=np.float32)

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

    def read(self, ids: Sequence[int], mask: Sequence[bool], images: Sequence[Mapping[str, Any]]) -> Expanded:
        """Return the sequence of a row that has these ``images``, each decoded once. Arguments and errors as in
        ``expand``; an error over an image has its column."""
        found = []
        for number, image in enumerate(images):
            raw = RawImage.of(image)
            try:
                found.append((raw, self.grid(raw)))
            except ImageError as error:
                raise ImageError(error.message, error.hint, f"images.{number}") from error
        return self.expand(ids, mask, found)

    def expand(self, ids: Sequence[int], mask: Sequence[bool], images: Sequence[tuple[RawImage, Grid]]) -> Expanded:
        """Repeat each image token as often as its image has features.

        Args:
            ids: as the chat template gives them, with one token for each image.
            mask: true where a token carries loss.
            images: with their grids, in the order of the text.

        Raises:
            ImageError: the text has another number of image tokens than there are images, or a video.
        """
        one = np.asarray(ids, np.int32)
        where = np.flatnonzero(one == self.image_id)
        if self.video_id is not None and (one == self.video_id).any():
            raise ImageError("the text has the token of a video", "posttrain trains on text and images, not on videos")
        if len(where) != len(images):
            raise ImageError(
                f"the text has {len(where)} image tokens, and the row {len(images)} images",
                f"an image is named by {IMAGE}; no text may hold the model's own image token",
            )
        counts = np.array([self._tokens(grid) for _, grid in images], np.int64)
        repeats = np.ones(len(one), np.int64)
        repeats[where] = counts
        starts = where + np.cumsum(counts - 1) - (counts - 1)
        carries = np.asarray(mask, np.bool_) & (one != self.image_id)
        placed = zip(images, starts.tolist(), counts.tolist(), strict=True)
        return Expanded(
            np.repeat(one, repeats),
            np.repeat(carries, repeats),
            tuple(PlacedImage(raw, grid, start, tokens) for (raw, grid), start, tokens in placed),
        )

    def locate(self, ids: Ids, images: Sequence[tuple[RawImage, Grid]]) -> tuple[PlacedImage, ...]:
        """Return where the images of a sequence stand that is expanded already.

        Raises:
            ImageError: its image tokens are not those of these images.
        """
        where = np.flatnonzero(np.asarray(ids) == self.image_id)
        placed, at = [], 0
        for raw, grid in images:
            tokens = self._tokens(grid)
            mine = where[at : at + tokens]
            if len(mine) < tokens or mine[-1] - mine[0] != tokens - 1:
                break
            placed.append(PlacedImage(raw, grid, int(mine[0]), tokens))
            at += tokens
        if len(placed) < len(images) or at < len(where):
            raise ImageError(
                f"a sequence has {len(where)} tokens of images, and not those of its {len(images)} images",
                "was a file changed during the run?",
            )
        return tuple(placed)

    def _tokens(self, grid: Grid) -> int:
        return grid[0] * grid[1] * grid[2] // self.merge**2

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

    def pixels(self, images: Sequence[PlacedImage]) -> npt.NDArray[np.uint8]:
        """Return [P, C * p * p] the patches of these images, one image after another. Raises ``ImageError``."""
        # Of a group of responses all have the image of their prompt.
        distinct = {(image.raw, image.grid): image for image in images}
        with ThreadPoolExecutor(min(_THREADS, max(1, len(distinct)))) as pool:
            patches = dict(zip(distinct, pool.map(self._patches, distinct.values()), strict=True))
        return np.concatenate([patches[image.raw, image.grid] for image in images])

    def _patches(self, image: PlacedImage) -> npt.NDArray[np.uint8]:
        made = self.processor.preprocess(
            [image.raw.decode()], do_rescale=False, do_normalize=False, return_tensors="np"
        )
        patches, grid = made["pixel_values"], tuple(int(n) for n in made["image_grid_thw"][0])
        if grid != image.grid:
            raise ImageError(f"its grid is {grid}, and was {image.grid}", "was the file changed during the run?")
        first = patches.reshape(len(patches), 3, self.frames, -1)[:, :, 0]
        return np.ascontiguousarray(first.reshape(len(patches), -1)).astype(np.uint8)

    def attach_read(self, batch: PackedBatch, images: Sequence[Sequence[PlacedImage]]) -> None:
        """``attach`` images of training data that were read before. Raises ``DataError`` for one that cannot be now."""
        try:
            self.attach(batch, images)
        except ImageError as error:
            raise DataError(f"an image of the training data: {error.message}", hint=error.hint) from error

    def attach(self, batch: PackedBatch, images: Sequence[Sequence[PlacedImage]]) -> None:
        """Give a batch the images of its sequences. Without any it stays as it is. Raises ``ImageError``."""
        every = [image for of_sequence in images for image in of_sequence]
        if not every:
            return
        marked = torch.zeros(batch.num_tokens, dtype=torch.bool)
        for start, of_sequence in zip(batch.cu_seqlens.tolist(), images, strict=False):
            for image in of_sequence:
                marked[start + image.start : start + image.start + image.tokens] = True
        batch.image_tokens = marked
        lengths = zip(batch.lengths, images, strict=True)
        batch.rotary_ids = torch.from_numpy(np.concatenate([self.positions(n, found) for n, found in lengths]))
        batch.images = Images(
            pixels=torch.from_numpy(self.pixels(every)),
            grids=torch.tensor([image.grid for image in every]),
            counts=torch.tensor([len(of_sequence) for of_sequence in images]),
            merge=self.merge,
        )
