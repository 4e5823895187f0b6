"""A tool that shows a part of an image enlarged, as an image."""

from __future__ import annotations

import asyncio
import io
from typing import Annotated, Any, TypeGuard

from pydantic import Field

from posttrain.core.types import Prompt, ToolSchema
from posttrain.data.images import MAX_PIXELS, ImageError, RawImage
from posttrain.data.turns import IMAGE
from posttrain.tools.base import Tool, ToolResult

_MOST_RATIO = 200
"""Most that processors of images take as the longer side over the shorter. What is shown must be one that the model can
see: it is numbered with the others."""
SCHEMA: ToolSchema = {
    "type": "function",
    "function": {
        "name": "zoom",
        "description": "Show a part of an image enlarged.",
        "parameters": {
            "type": "object",
            "properties": {
                "box": {
                    "type": "array",
                    "items": {"type": "number"},
                    "description": "The part: [left, top, right, bottom].",
                },
                "image": {
                    "type": "integer",
                    "description": "Which image, from 1 in the order in which they were shown; 1 if left out.",
                },
            },
            "required": ["box"],
        },
    },
}


class Zoom(Tool):
    """Shows a part of an image of the conversation enlarged. What it shows can be zoomed into again.

    Args:
        scale: what coordinates count along each side: 1000 for thousandths, as Qwen3-VL writes boxes, or another number
            of equal parts; 0 for pixels of the image as the row has it.
        side: pixels along the longer side of what is shown; 0 for as many as the image has.
        most: images that an episode may be shown.
    """

    name = "zoom"
    schema = SCHEMA
    gives_images = True

    def __init__(
        self,
        scale: Annotated[int, Field(ge=0)] = 1000,
        side: Annotated[int, Field(ge=0, le=4096)] = 0,
        most: Annotated[int, Field(ge=1)] = 8,
    ) -> None:
        self.scale, self.side, self.most = scale, side, most

    async def create(self, prompt: Prompt) -> _Shown:
        return _Shown([RawImage.of(image) for image in prompt.images])

    async def call(self, state: _Shown, arguments: dict[str, Any]) -> ToolResult:
        box, number = arguments.get("box"), arguments.get("image", 1)
        if arguments.keys() - {"box", "image"} or not _is_box(box):
            return _wrong("give 'box', a list of four numbers [left, top, right, bottom], and 'image', which one")
        async with state.turn:
            return await self._show(state, box, number)

    async def _show(self, state: _Shown, box: list[float], number: Any) -> ToolResult:
        if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= len(state.images):
            return _wrong(f"'image' is a number from 1 to {len(state.images)}" if state.images else "there is no image")
        if state.zooms == self.most:
            return _wrong(f"at most {self.most} parts are shown")
        try:
            shown = await asyncio.to_thread(self.zoom, state.images[number - 1], box)
        except ImageError as error:
            return _wrong(error.message)
        except _BoxError as error:
            return _wrong(str(error))
        state.images.append(RawImage(shown))
        state.zooms += 1
        return ToolResult(IMAGE, images=(shown,))

    def zoom(self, image: RawImage, box: list[float]) -> bytes:
        """Return a part of an image as a PNG. Raises ``ImageError``, and an error of its own for a box outside it."""
        from PIL import Image

        whole = image.decode()
        left, top, right, bottom = (
            round(at * side / self.scale) if self.scale else round(at)
            for at, side in zip(box, whole.size * 2, strict=True)
        )
        if not (0 <= left < right <= whole.width and 0 <= top < bottom <= whole.height):
            sides = f"{self.scale} x {self.scale}" if self.scale else f"{whole.width} x {whole.height}"
            raise _BoxError(f"the box is empty, or not within the image, which is {sides}")
        longest = (self.side or max(whole.size)) / max(right - left, bottom - top)
        size = max(1, round((right - left) * longest)), max(1, round((bottom - top) * longest))
        if max(size) > _MOST_RATIO * min(size):
            raise _BoxError(f"the box is too narrow: one side may be at most {_MOST_RATIO} times the other")
        if size[0] * size[1] > MAX_PIXELS:
            raise _BoxError(f"the part would have {size[0]} x {size[1]} pixels; at most {MAX_PIXELS:,} are shown")
        part = whole.crop((left, top, right, bottom)).resize(size, Image.Resampling.BICUBIC)
        file = io.BytesIO()
        part.save(file, "PNG")
        return file.getvalue()


class _Shown:
    """The images that an episode has shown."""

    def __init__(self, images: list[RawImage]) -> None:
        self.images = images
        self.zooms = 0
        self.turn = asyncio.Lock()
        """Calls of one turn run side by side, and images are numbered in the order of the calls."""


class _BoxError(Exception):
    """The box cannot be shown; the message is for the model."""


def _is_box(value: Any) -> TypeGuard[list[float]]:
    return (
        isinstance(value, list)
        and len(value) == 4
        and all(isinstance(at, int | float) and not isinstance(at, bool) and abs(at) < 2**31 for at in value)
    )


def _wrong(what: str) -> ToolResult:
    return ToolResult(f"error: {what}", error=True)
