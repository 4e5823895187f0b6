"""Images that rows bring: what is read, and what is an error with the reason."""

import contextlib
import io
import os
import struct
import zlib

import numpy as np
import pytest
from PIL import Image, PngImagePlugin

from posttrain.data import images
from posttrain.data.images import ImageError, RawImage

PIXELS = np.random.default_rng(0).integers(0, 256, (20, 30, 3), np.uint8)


def encoded(image, kind="PNG", **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


RGB = Image.fromarray(PIXELS)
PNG = encoded(RGB)
JPEG = encoded(RGB, "JPEG")
FRAMES = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_of_size(width, height, data=b""):
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def text_bomb():
    info = PngImagePlugin.PngInfo()
    info.add_text("bomb", "x" * (1 << 26), zip=True)
    return encoded(RGB, pnginfo=info)


BAD = {
    "nothing": (b"", "the image is empty"),
    "text": (b"not an image", "not an image that can be read"),
    "one byte": (b"\x89", "not an image that can be read"),
    "zeros": (bytes(100), "not an image that can be read"),
    "the signature alone": (PNG[:8], "not an image that can be read|damaged"),
    "the header alone": (PNG[:33], "damaged|not an image"),
    "half a PNG": (PNG[: len(PNG) // 2], "damaged"),
    "a PNG with its end missing": (PNG[:-40], "damaged"),
    "half a JPEG": (JPEG[: len(JPEG) // 2], "damaged"),
    "a JPEG's start": (JPEG[:20], "damaged|not an image"),
    "a PNG with a wrong checksum": (PNG[:60] + bytes([PNG[60] ^ 255]) + PNG[61:], "damaged"),
    "a PNG whose data does not inflate": (png_of_size(8, 8, b"garbage"), "damaged"),
    "a PNG without data": (png_of_size(8, 8), "damaged"),
    "a decompression bomb": (png_of_size(60_000, 60_000, zlib.compress(bytes(1000))), "too large"),
    "a large one that Pillow would take": (png_of_size(9_000, 9_000, zlib.compress(bytes(1000))), "9000 x 9000"),
    "a PNG of no width": (png_of_size(0, 8), "damaged|not an image"),
    "compressed text that is a bomb": (text_bomb(), "damaged|too large"),
    "an animated GIF": (encoded(FRAMES[0], "GIF", save_all=True, append_images=FRAMES[1:]), "animated: it has 2"),
    "an animated PNG": (encoded(FRAMES[0], "PNG", save_all=True, append_images=FRAMES[1:]), "animated: it has 2"),
    "an animated WebP": (encoded(FRAMES[0], "WEBP", save_all=True, append_images=FRAMES[1:]), "animated: it has 2"),
    "a CMYK JPEG": (encoded(RGB.convert("CMYK"), "JPEG"), "colours are CMYK"),
    "16-bit grey": (encoded(Image.fromarray(np.zeros((4, 4), np.uint16)), "PNG"), "colours are I;16"),
    "a TIFF": (encoded(RGB, "TIFF"), "not an image that can be read"),
    "EPS, which runs a program": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not an image"),
    "SVG": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "not an image"),
    "an icon": (encoded(RGB, "ICO"), "not an image"),
    "PDF": (b"%PDF-1.7 ...", "not an image"),
    "an MP4": (b"\x00\x00\x00\x18ftypmp42" + bytes(100), "it is a video"),
    "a WebM": (b"\x1aE\xdf\xa3" + bytes(100), "it is a video"),
    "HTML of an error page": (b"<!DOCTYPE html><html>404</html>", "not an image"),
    "a git LFS pointer": (b"version https://git-lfs.github.com/spec/v1\n", "not an image"),
    "a parquet file": (b"PAR1" + bytes(50), "not an image"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_image_is_an_error_with_the_reason(name):
    data, reason = BAD[name]
    with pytest.raises(ImageError, match=reason) as error:
        RawImage(data).decode()
    assert error.value.hint


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", ["PNG", "BMP", "GIF", "WEBP", "JPEG"])
def test_what_is_read_is_read_as_it_is(kind):
    options = {"lossless": True} if kind == "WEBP" else {}
    source = RGB.quantize(16) if kind == "GIF" else RGB
    found = RawImage(encoded(source, kind, **options)).decode()
    assert (found.mode, found.size) == ("RGB", (30, 20))
    if kind != "JPEG":
        assert np.array_equal(np.asarray(found), np.asarray(source.convert("RGB")))


def test_grey_one_bit_and_palettes_become_rgb():
    for mode in ("L", "1", "P"):
        found = RawImage(encoded(RGB.convert(mode))).decode()
        assert np.array_equal(np.asarray(found), np.asarray(RGB.convert(mode).convert("RGB")))


def test_what_is_transparent_lies_on_white():
    layer = np.zeros((2, 2, 4), np.uint8)  # black, as diagrams are, and clear but for one pixel
    layer[0, 0, 3] = 255
    for image in (Image.fromarray(layer), Image.fromarray(layer).convert("LA")):
        found = np.asarray(RawImage(encoded(image)).decode())
        assert found[:, :, 0].tolist() == [[0, 255], [255, 255]]
    clear = Image.new("P", (2, 2), 0)
    clear.putpalette([9, 9, 9])
    found = RawImage(encoded(clear, transparency=0)).decode()
    assert np.asarray(found).min() == 255


def test_a_photograph_with_a_small_copy_of_itself_is_no_film():
    """Phones write JPEG files with a preview or a depth map after the photograph, which Pillow calls MPO."""
    photograph = encoded(RGB, "MPO", save_all=True, append_images=[RGB.resize((3, 2))])
    found = RawImage(photograph)
    assert found.decode().size == (30, 20)
    assert found.size() == (20, 30)
    assert np.array_equal(np.asarray(found.decode()), np.asarray(RawImage(encoded(RGB, "JPEG")).decode()))


def test_an_image_stands_as_its_exif_data_says():
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees
    found = RawImage(encoded(RGB, "JPEG", exif=exif))
    assert found.decode().size == (20, 30)
    assert found.size() == (30, 20)


def test_a_size_is_read_of_the_header_alone_or_an_error():
    assert RawImage(PNG[: len(PNG) // 2]).size() == RawImage(PNG).size() == (20, 30)
    broken = encoded(RGB, "JPEG", exif=b"Exif\0\0" + b"MM\0*" + bytes([255] * 9))
    for data in (*(data for data, _ in BAD.values()), broken):
        with contextlib.suppress(ImageError):
            assert len(RawImage(data).size()) == 2
    for name in ("a TIFF", "HTML of an error page", "an MP4"):
        with pytest.raises(ImageError, match="damaged"):
            RawImage(BAD[name][0]).size()


def test_paths_and_file_urls_are_read(tmp_path):
    file = tmp_path / "a b.png"
    file.write_bytes(PNG)
    for path in (str(file), f"file://{tmp_path}/a%20b.png", f"file://localhost{tmp_path}/a%20b.png"):
        assert RawImage.of({"bytes": None, "path": path}).read() == PNG
    assert RawImage.of({"bytes": PNG, "path": "its old name"}).read() == PNG


def test_what_is_no_file_here_is_an_error(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe")
    wrong = {
        "/no/such.png": "no such file",
        str(tmp_path): "is not a file",
        str(tmp_path / "pipe"): "is not a file",  # and nobody waits for what is written to it
        "a\0b": "cannot be read: embedded null byte",
        "https://example.org/a.png": "not on this machine",
        "s3://bucket/a.png": "not on this machine",
        "file://other-host/a.png": "not on this machine",
        "data:image/png;base64,AAAA": "is a data: URL",
        "x" * 5000: "cannot be read",
    }
    for path, reason in wrong.items():
        with pytest.raises(ImageError, match=reason):
            RawImage(path=path).read()
    monkeypatch.setattr(images, "MAX_BYTES", 10)
    (tmp_path / "a.png").write_bytes(PNG)
    for raw in (RawImage(PNG), RawImage(path=str(tmp_path / "a.png"))):
        with pytest.raises(ImageError, match="at most 10 are read"):
            raw.read()
