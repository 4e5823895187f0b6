"""Images as rows bring them: found, looked at before they are decoded, and brought to 8-bit RGB.

The rows of a data set are other people's files. An image of them may be of any size, have any number of frames, or be
none at all, so nothing is decoded whose header does not say that it is small, and each way to be bad has a message.
"""

from __future__ import annotations

import io
import os
import stat
import struct
import warnings
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from posttrain.core.errors import RunError, first_line
from posttrain.core.types import ImageFile

if TYPE_CHECKING:
    from PIL import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""What is read. Pillow knows many more, some of which run other programs."""
MAX_BYTES = 64 << 20
"""Largest file."""
MAX_PIXELS = 1 << 26
"""Most pixels of an image: a file of a few kilobytes may decode to gigabytes."""
_EXACT = ("RGB", "L", "1", "P")
"""Pillow's modes that are 8-bit RGB, or become it without a loss."""
_TRANSPARENT = ("RGBA", "LA", "PA", "La", "RGBa")
_BROKEN = (OSError, ValueError, SyntaxError, EOFError, LookupError, TypeError, struct.error, zlib.error, MemoryError)
"""What Pillow raises over files that are damaged."""


class ImageError(ValueError):
    """An image cannot be used. ``hint`` says what to do; ``column`` is its place in a row (``images.1``), if known."""

    def __init__(self, message: str, hint: str, column: str = "") -> None:
        super().__init__(message)
        self.message, self.hint, self.column = message, hint, column


@dataclass(frozen=True)
class RawImage:
    """An image as a row has it: the bytes of its file, or where the file lies."""

    data: bytes | None = None
    path: str | None = None

    @staticmethod
    def of(value: Mapping[str, Any]) -> RawImage:
        """Return an entry of a row's ``images``. Bytes win over a path, which then is the name of their file."""
        data = value.get("bytes")
        return RawImage(data) if data is not None else RawImage(path=value.get("path"))

    @property
    def entry(self) -> ImageFile:
        """Return the entry of a row's ``images`` that it is read of."""
        return {"bytes": self.data} if self.data is not None else {"path": self.path or ""}

    def read(self) -> bytes:
        """Return the file's bytes. Raises ``ImageError``."""
        data = _read(self.path) if self.data is None and self.path is not None else self.data
        if not data:
            raise ImageError("the image is empty", "does the row hold the image's file, or its path?")
        if len(data) > MAX_BYTES:
            raise ImageError(
                f"the image's file has {len(data):,} bytes; at most {MAX_BYTES:,} are read", "make it smaller"
            )
        return data

    def size(self) -> tuple[int, int]:
        """Return height and width by the file's header, upright as its EXIF data says. Raises ``ImageError``."""
        from PIL import ExifTags, Image

        data = self.read()
        try:
            with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                # Asked for EXIF data that the header does not have, Pillow decodes the whole image to look behind it.
                turned = "exif" in image.info and image.getexif().get(ExifTags.Base.Orientation, 1) >= 5
                return (image.width, image.height) if turned else (image.height, image.width)
        except Image.DecompressionBombError as error:
            raise _too_large(str(error)) from None
        except _BROKEN as error:
            raise _damaged(error) from error

    def decode(self) -> Image.Image:
        """Return the image in RGB, upright as its EXIF data says, on white where it is transparent.

        Raises:
            ImageError: the file cannot be read, is no image, is damaged or too large, has several frames, or colours
                that are not 8-bit RGB, grey or a palette of these.
        """
        from PIL import Image, ImageOps, UnidentifiedImageError

        data = self.read()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of sizes, which are checked below, and of odd metadata
            try:
                image = Image.open(io.BytesIO(data), formats=FORMATS)
            except Image.DecompressionBombError as error:
                raise _too_large(str(error)) from None
            except UnidentifiedImageError:
                raise ImageError(_what(data), f"formats: {', '.join(FORMATS)}") from None
            except _BROKEN as error:
                raise _damaged(error) from error
            with image:
                if image.width * image.height > MAX_PIXELS:
                    raise _too_large(f"it has {image.width} x {image.height} pixels")
                try:
                    frames = getattr(image, "n_frames", 1)
                    if frames > 1 and image.format != "MPO":  # a JPEG file with a preview or a depth map behind it
                        raise ImageError(f"the image is animated: it has {frames} frames", "give one of them")
                    image.load()
                    return _rgb(ImageOps.exif_transpose(image))
                except ImageError:
                    raise
                except Image.DecompressionBombError as error:
                    raise _too_large(str(error)) from None
                except _BROKEN as error:
                    raise _damaged(error) from error


Grid = tuple[int, int, int]
"""What an image is cut into, as its family counts: patches in time, height and width, or tiles, rows and columns."""


SizedImage = tuple[RawImage, Grid]
"""An image that was decoded once, so that the number of its tokens is known."""


@dataclass(frozen=True)
class PlacedImage:
    """An image among the tokens of a sequence."""

    raw: RawImage
    grid: Grid
    start: int
    """The first of its tokens."""
    tokens: int


def given_to_none(images: Sequence[PlacedImage], engine: str) -> None:
    """Raise ``RunError`` where an engine is given images that it does not read."""
    if images:
        raise RunError(f"{engine} is given ids alone: it reads no images", hint="--set rollout.engine=hf")


def _read(path: str) -> bytes:
    """Return the content of the file at a path or ``file://`` URL. Raises ``ImageError``."""
    place = _local(path)
    try:
        status = os.stat(place)
        if not stat.S_ISREG(status.st_mode):  # reading a pipe would wait for whoever writes to it
            raise ImageError(f"{place!r} is not a file", "give the image's file")
        if status.st_size > MAX_BYTES:
            raise ImageError(
                f"{place!r} has {status.st_size:,} bytes; at most {MAX_BYTES:,} are read", "make the image smaller"
            )
        with open(place, "rb") as file:
            return file.read(MAX_BYTES + 1)
    except ImageError:
        raise
    except FileNotFoundError:
        raise ImageError(f"no such file: {place!r}", "a relative path is taken from the current folder") from None
    except (OSError, ValueError) as error:
        raise ImageError(f"{place!r} cannot be read: {error}", "check the path and its permissions") from None


def _local(path: str) -> str:
    """Return the path of a file on this machine. Raises ``ImageError`` for any other place."""
    scheme, mark, _ = path.partition(":")
    if not mark or "/" in scheme or len(scheme) < 2:
        return path
    if scheme == "data":
        raise ImageError("the image is a data: URL", "put its bytes into the column `images`")
    if "://" not in path:
        return path
    parts = urlsplit(path)
    if parts.scheme != "file" or parts.netloc not in ("", "localhost"):
        raise ImageError(
            f"{path[:80]!r} is not on this machine", "download it: images are bytes, paths or file:// URLs"
        )
    return unquote(parts.path)


def _what(data: bytes) -> str:
    """Return what is wrong with bytes that are no image known here."""
    if data[4:8] == b"ftyp" or data[:4] in (b"\x1aE\xdf\xa3", b"RIFF"):
        return "it is a video, or an image of a format that is not read"
    return f"not an image that can be read: it begins with {data[:8]!r}"


def _damaged(error: BaseException) -> ImageError:
    return ImageError(f"the image is damaged: {first_line(error)}", "save it again, or leave the row out")


def _too_large(how: str) -> ImageError:
    return ImageError(f"the image is too large: {how}; at most {MAX_PIXELS:,} pixels are decoded", "make it smaller")


def _rgb(image: Image.Image) -> Image.Image:
    """Return a decoded image in RGB. Raises ``ImageError`` for colours that would not be the same in it."""
    from PIL import Image

    if image.mode in _TRANSPARENT or "transparency" in image.info:
        layer = image.convert("RGBA")
        white = Image.new("RGBA", layer.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, layer).convert("RGB")
    if image.mode not in _EXACT:
        raise ImageError(
            f"the image's colours are {image.mode}, not RGB, grey or a palette of 8 bits", "convert it to RGB"
        )
    return image.convert("RGB")
