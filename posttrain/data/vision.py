"""What a vision-language model reads of a conversation with images: its ids, its positions and its pixels.

A chat template writes one image token for each image. A model reads a block of tokens in its place (``expand``), in
which the image token stands as often as the image has features; positions, which in some families follow rows and
columns of the image (``positions``); and its pixels (``pixels``). Expansion works on ids, once, and never on text. What
a family does with an image is in ``vision_grids`` (Qwen2.5-VL, Qwen3-VL) and ``vision_tiles`` (SmolVLM, Idefics3).

Shape legend: T tokens of a sequence after expansion, P patches of all images, C channels, p side of a patch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from posttrain.core.errors import DataError
from posttrain.core.types import Ids
from posttrain.data.images import Grid, ImageError, PlacedImage, RawImage, SizedImage
from posttrain.data.pack import Images, PackedBatch
from posttrain.data.turns import IMAGE

if TYPE_CHECKING:
    from PIL import Image

_THREADS = 8
"""Most images that are decoded at the same time."""


@dataclass(frozen=True)
class Expanded:
    """A sequence as a trainer reads it."""

    ids: npt.NDArray[np.int32]
    """[T]"""
    mask: npt.NDArray[np.bool_]
    """[T] true where the token carries loss; never in the block of an image"""
    images: tuple[PlacedImage, ...]


class VisionProcessor(ABC):
    """The images of one model's conversations. It can be pickled.

    Args:
        processor: the family's image processor of transformers.
        image_id: the token that stands for an image, and for each of its features.
        video_id: the token that stands for a video, which is refused.
    """

    merge: int
    """Patches along each side of what becomes one feature."""
    frames: int
    """Times that an image is repeated in a patch."""
    blank: Grid
    """``patch_grid`` of the smallest image that there is."""

    def __init__(self, processor: Any, *, image_id: int, video_id: int | None) -> None:
        self.processor, self.image_id, self.video_id = processor, image_id, video_id

    @abstractmethod
    def grid(self, raw: RawImage) -> Grid:
        """Decode an image whole, and return into what it is cut: its number of tokens follows from that. Raises
        ``ImageError``."""

    @abstractmethod
    def block(self, grid: Grid) -> npt.NDArray[np.int32]:
        """Return the tokens that take the place of an image's one. Those that are ``image_id`` get a feature each, in
        the order in which the tower gives them; others are text."""

    @abstractmethod
    def patch_grid(self, grid: Grid) -> Grid:
        """Return the patches of an image as its tower takes them: of how many pictures, and along their sides."""

    @abstractmethod
    def _patches(self, image: PlacedImage) -> npt.NDArray[np.uint8]:
        """Return [P, C * p * p] the patches of one image. Raises ``ImageError``."""

    def as_read(self, image: PlacedImage) -> Image.Image:
        """Return an image at the size at which the model reads it, so that nothing changes if it is resized again.

        Raises:
            ImageError: it can no longer be read, or the family reads no image as one picture.
        """
        raise ImageError("the model reads an image in several pictures", "--set rollout.engine=hf")

    def positions(self, length: int, images: Sequence[PlacedImage]) -> npt.NDArray[np.int64] | None:
        """Return [T, 3] positions in time, height and width; None: the model counts tokens, whatever they are."""
        return None

    @property
    def table(self) -> npt.NDArray[np.float32]:
        """Return [C, 256] what the model reads for each value of each channel: rescaled and normalised."""
        values = np.broadcast_to(np.arange(256, dtype=np.uint8), (3, 1, 256))
        scaled = self.processor.rescale(values, self.processor.rescale_factor) if self.processor.do_rescale else values
        if self.processor.do_normalize:
            scaled = self.processor.normalize(scaled, self.processor.image_mean, self.processor.image_std)
        return np.ascontiguousarray(scaled[:, 0], dtype=np.float32)

    @property
    def never_sampled(self) -> list[int]:
        """Return the tokens that no engine may sample: they would stand for images that are not there."""
        return [self.image_id, *([] if self.video_id is None else [self.video_id])]

    def sized(self, images: Sequence[Mapping[str, Any]]) -> list[SizedImage]:
        """Return the ``images`` of a row with their grids, each decoded once. Raises ``ImageError`` with the column of
        the one that it is about."""
        found = []
        for number, image in enumerate(images):
            raw = RawImage.of(image)
            try:
                found.append((raw, self.grid(raw)))
            except ImageError as error:
                raise ImageError(error.message, error.hint, f"images.{number}") from error
        return found

    def read(self, ids: Sequence[int], mask: Sequence[bool], images: Sequence[Mapping[str, Any]]) -> Expanded:
        """Return the sequence of a row that has these ``images``, each decoded once. Arguments and errors as in
        ``expand``; an error over an image has its column."""
        return self.expand(ids, mask, self.sized(images))

    def expand(self, ids: Sequence[int], mask: Sequence[bool], images: Sequence[SizedImage]) -> Expanded:
        """Put the block of each image in the place of its token.

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
        blocks = [self.block(grid) for _, grid in images]
        counts = np.array([len(block) for block in blocks], np.int64)
        repeats = np.ones(len(one), np.int64)
        repeats[where] = counts
        starts = (where + np.cumsum(counts - 1) - (counts - 1)).tolist()
        carries = np.asarray(mask, np.bool_) & (one != self.image_id)
        whole = np.repeat(one, repeats)
        for start, block in zip(starts, blocks, strict=True):
            whole[start : start + len(block)] = block
        placed = zip(images, starts, counts.tolist(), strict=True)
        return Expanded(
            whole,
            np.repeat(carries, repeats),
            tuple(PlacedImage(raw, grid, start, tokens) for (raw, grid), start, tokens in placed),
        )

    def one_token_each(self, ids: Ids, images: Sequence[PlacedImage]) -> list[int]:
        """Return an expanded sequence with one token for each image: ``expand`` undone. Engines that expand themselves
        are given these."""
        out: list[int] = []
        at = 0
        every: list[int] = np.asarray(ids).tolist()
        for image in images:
            out += [*every[at : image.start], self.image_id]
            at = image.start + image.tokens
        return out + every[at:]

    def locate(self, ids: Ids, images: Sequence[SizedImage]) -> tuple[PlacedImage, ...]:
        """Return where the images of a sequence stand that is expanded already.

        Raises:
            ImageError: its image tokens are not those of these images.
        """
        given = np.asarray(ids)
        where = np.flatnonzero(given == self.image_id)
        placed, at = [], 0
        for raw, grid in images:
            block = self.block(grid)
            mine = np.flatnonzero(block == self.image_id)
            if at == len(where) or (start := int(where[at] - mine[0])) < 0:
                break
            if not np.array_equal(given[start : start + len(block)], block):
                break
            placed.append(PlacedImage(raw, grid, start, len(block)))
            at += len(mine)
        if len(placed) < len(images) or at < len(where):
            raise ImageError(
                f"a sequence has {len(where)} tokens of images, and not those of its {len(images)} images",
                "was a file changed during the run?",
            )
        return tuple(placed)

    def marked(self, ids: Ids, images: Sequence[PlacedImage]) -> npt.NDArray[np.bool_]:
        """Return [T] true where a token of a sequence stands for a feature of these images."""
        given = np.asarray(ids)
        found = np.zeros(len(given), np.bool_)
        for image in images:
            part = slice(image.start, image.start + image.tokens)
            found[part] = given[part] == self.image_id
        return found

    def pixels(self, images: Sequence[PlacedImage]) -> npt.NDArray[np.uint8]:
        """Return [P, C * p * p] the patches of these images, one image after another. Raises ``ImageError``."""
        # Of a group of responses all have the image of their prompt.
        distinct = {(image.raw, image.grid): image for image in images}
        with ThreadPoolExecutor(min(_THREADS, max(1, len(distinct)))) as pool:
            patches = dict(zip(distinct, pool.map(self._patches, distinct.values()), strict=True))
        return np.concatenate([patches[image.raw, image.grid] for image in images])

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
        lengths = batch.lengths
        sequences = zip(batch.input_ids.split(lengths), images, strict=True)
        batch.image_tokens = torch.from_numpy(np.concatenate([self.marked(ids, found) for ids, found in sequences]))
        positions = [self.positions(n, found) for n, found in zip(lengths, images, strict=True)]
        given = [each for each in positions if each is not None]
        batch.rotary_ids = torch.from_numpy(np.concatenate(given)) if given else None
        batch.images = Images(
            pixels=torch.from_numpy(self.pixels(every)),
            grids=torch.tensor([self.patch_grid(image.grid) for image in every]),
            counts=torch.tensor([len(of_sequence) for of_sequence in images]),
            merge=self.merge,
            smallest=self.blank,
        )
