"""Images for SGLang and vLLM. What they make of them must be what trainers read, to the token and to the pixel.

vLLM expands by itself: it is given ids with one token for each image, and the images beside them (``prompt``). These
come at the size at which the model reads them, from the trainers' own image processor, so that the engine's, which may
be another class and resize otherwise, finds nothing to resize. vLLM says which tokens it has read, and they are
compared with the trainers' (``check``).

SGLang makes text of ids, and ids of that text, where it expands by itself, and may come back with others. So it is
given what trainers read, as the output of a processor: expanded ids, patches, grids and positions (``processed``).

Tokens of images are made so unlikely that they are not sampled (``bias``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from posttrain.core.errors import RunError
from posttrain.core.types import Ids
from posttrain.data.images import ImageError, PlacedImage, RawImage, given_to_none
from posttrain.data.vision import VisionProcessor
from posttrain.engines.base import EngineSpec
from posttrain.models.processors import load_vision
from posttrain.models.vision import patches

if TYPE_CHECKING:
    from PIL import Image

_NEVER = -100.0
"""The least that both engines' ``logit_bias`` takes: a factor of e^-100 of the probability."""


@dataclass(frozen=True)
class EngineImages:
    """What an engine is told about images.

    Args:
        reader: reads them as trainers do; None: the model reads text alone.
        engine: its name, in messages.
    """

    reader: VisionProcessor | None
    engine: str

    @staticmethod
    def of(spec: EngineSpec, engine: str) -> EngineImages:
        """Raises ``ModelError``."""
        return EngineImages(load_vision(spec.source), engine)

    @property
    def bias(self) -> dict[int, float]:
        """Return what is added to logits so that no token of an image is sampled."""
        return {} if self.reader is None else dict.fromkeys(self.reader.never_sampled, _NEVER)

    async def prompt(self, ids: Ids, images: Sequence[PlacedImage]) -> tuple[list[int], list[Image.Image]]:
        """Return a prompt with one token for each image, and the images, in order.

        Args:
            ids: as trainers read them.

        Raises:
            RunError: the model reads text alone, or an image can no longer be read.
        """
        if self.reader is None:
            given_to_none(images, self.engine)
        if self.reader is None or not images:
            return np.asarray(ids).tolist(), []
        distinct = list({(image.raw, image.grid): image for image in images}.values())
        try:
            read = await asyncio.gather(*(asyncio.to_thread(self.reader.as_read, image) for image in distinct))
        except ImageError as error:
            raise RunError(f"an image of the prompt: {error.message}", hint=error.hint) from error
        found: dict[RawImage, Image.Image] = {image.raw: made for image, made in zip(distinct, read, strict=True)}
        return self.reader.one_token_each(ids, images), [found[image.raw] for image in images]

    async def processed(self, ids: Ids, images: Sequence[PlacedImage]) -> dict[str, Any] | None:
        """Return the images of a prompt as SGLang takes a processor's output beside the expanded ``ids``; None: it has
        none. Arguments and errors as in ``prompt``."""
        reader = self.reader
        if reader is None:
            given_to_none(images, self.engine)
        if reader is None or not images:
            return None
        try:
            pixels = await asyncio.to_thread(reader.pixels, images)
        except ImageError as error:
            raise RunError(f"an image of the prompt: {error.message}", hint=error.hint) from error
        found: dict[str, Any] = {
            "format": "processor_output",
            "pixel_values": patches(torch.from_numpy(pixels), torch.from_numpy(reader.table), reader.frames),
            "image_grid_thw": torch.tensor([reader.patch_grid(image.grid) for image in images]),
            "offsets": [(image.start, image.start + image.tokens - 1) for image in images],  # both are of the image
        }
        positions = reader.positions(len(ids) + 1, images)
        if positions is not None:
            found["mrope_positions"] = torch.from_numpy(positions[:-1].T.copy())
            found["mrope_position_delta"] = torch.tensor([[int(positions[-1, 0]) - len(ids)]])
        return found

    def check(self, ids: Ids, expanded: Sequence[int]) -> None:
        """Compare what the engine has read with what trainers read. Raises ``RunError``."""
        if not np.array_equal(np.asarray(ids), np.asarray(expanded)):
            raise RunError(
                f"{self.engine} makes {len(expanded)} tokens of a prompt with images, and trainers read {len(ids)}: it "
                "expands images otherwise",
                hint="--set rollout.engine=hf samples with images",
            )
