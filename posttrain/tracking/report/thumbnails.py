"""Small copies of the images that a page shows, each once."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from typing import Any

from posttrain.data.images import ImageError, RawImage

SIDE = 112
"""Pixels along the longer side."""
MOST_CHARACTERS = 1_000_000
"""Characters of all thumbnails of a page. What comes later is named and not shown."""
NOT_SHOWN = -1


class Thumbnails:
    """The thumbnails of a page, as ``data:`` URLs of JPEG files that were written here, whatever the images held."""

    def __init__(self) -> None:
        self.table: list[str] = []
        self._numbers: dict[RawImage, int] = {}
        self._characters = 0

    def add(self, image: Mapping[str, Any]) -> int:
        """Return the number of an image's thumbnail in the table; ``NOT_SHOWN`` for one that can no longer be read, or
        has no place any more."""
        raw = RawImage.of(image)
        if raw not in self._numbers:
            self._numbers[raw] = self._made(raw)
        return self._numbers[raw]

    def _made(self, raw: RawImage) -> int:
        if self._characters >= MOST_CHARACTERS:
            return NOT_SHOWN
        try:
            picture = raw.decode()
        except ImageError:
            return NOT_SHOWN
        picture.thumbnail((SIDE, SIDE))
        picture.info.clear()  # comments and colour profiles would be written too
        file = io.BytesIO()
        picture.save(file, "JPEG", quality=70)
        url = f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"
        self._characters += len(url)
        if self._characters > MOST_CHARACTERS:
            return NOT_SHOWN
        self.table.append(url)
        return len(self.table) - 1
