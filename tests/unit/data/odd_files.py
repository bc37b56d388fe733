"""The odd files of docs/data.md: how to make each, and what a run does with it.

python -m tests.unit.data.odd_files          prints the table of docs/data.md
python -m tests.unit.data.odd_files FOLDER   writes the files into a folder
"""

from __future__ import annotations

import gzip
import io
import os
import struct
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from PIL import Image
from PIL.PngImagePlugin import PngInfo

WIDTH, HEIGHT = 48, 32
SKIPPED = "named"


@dataclass(frozen=True)
class OddFile:
    """A file that is odd.

    Attributes:
        name: of the file.
        what: it is.
        outcome: what a run does with it, for people.
        content: of the file.
        reason: why it cannot be used, a regular expression; empty where it is read.
        pixels: (H, W, 3) that are read; None where only the size is known.
        within: most mean distance to them, steps of 8 bits.
        size: width and height as read.
    """

    name: str
    what: str
    outcome: str
    content: bytes
    reason: str = ""
    pixels: np.ndarray | None = None
    within: float = 0.0
    size: tuple[int, int] = (WIDTH, HEIGHT)


def base() -> Image.Image:
    """The image that most of the files hold: smooth, so that JPEG keeps it."""
    y, x = np.mgrid[0:HEIGHT, 0:WIDTH]
    return Image.fromarray(np.stack([x * 5, y * 7, 255 - x * 2 - y * 3], -1).clip(0, 255).astype(np.uint8))


def saved(image: Image.Image, form: str, **options: Any) -> bytes:
    """The content of a file."""
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def odd_files() -> list[OddFile]:
    """All of them, those that are read first."""
    return [*_jpegs(), *_pngs(), *_others(), *_broken()]


def _rgb(image: Image.Image) -> np.ndarray:
    return np.asarray(image.convert("RGB"))


def _jpegs() -> Iterator[OddFile]:
    image = base()
    whole, gray, exif = _rgb(image), _rgb(image.convert("L")), Image.Exif()
    exif[0x0112] = 6
    jpeg = saved(image, "JPEG", quality=95)
    other = Image.new("RGB", image.size)
    read = {"pixels": whole, "within": 4.0}
    yield OddFile("gray.jpg", "gray JPEG", "three equal channels", saved(image.convert("L"), "JPEG"), "", gray, 3.0)
    yield OddFile("cmyk.jpg", "CMYK with Adobe's inversion", "as RGB", saved(image.convert("CMYK"), "JPEG"), **read)
    yield OddFile("progressive.jpg", "progressive JPEG", "read", saved(image, "JPEG", progressive=True), **read)
    yield OddFile("half_color.jpg", "color at half size, odd sides", "read", _cut_jpeg(image), size=(47, 31))
    turned = saved(image, "JPEG", exif=exif, quality=95)
    yield OddFile("turned.jpg", "EXIF: turn by a quarter", "as stored; `EXIF: apply` turns it", turned, **read)
    damaged = saved(image, "JPEG", exif=b"Exif\x00\x00" + b"\xff" * 40, quality=95)
    yield OddFile("bad_exif.jpg", "damaged EXIF", "read without it", damaged, **read)
    profile = saved(image, "JPEG", icc_profile=b"no profile", quality=95)
    yield OddFile("bad_profile.jpg", "damaged color profile", "read; profiles are not applied", profile, **read)
    yield OddFile("bytes_behind.jpg", "bytes behind the end", "read", jpeg + b"\0trailer" * 50, **read)
    two = saved(image, "MPO", save_all=True, append_images=[other], quality=95)
    yield OddFile("phone.jpg", "two pictures of a phone (`MPO`)", "the first one", two, **read)
    yield OddFile("png_inside.jpg", "PNG with the name of a JPEG", "by its content", saved(image, "PNG"), "", whole)
    yield OddFile("jpeg_inside.png", "JPEG with the name of a PNG", "by its content", jpeg, **read)
    yield OddFile("PHOTO.JPEG", "name in capitals", "read", jpeg, **read)
    no_text = os.fsdecode(b"caf\xe9.jpg")
    yield OddFile(no_text, "name that is no text (`caf\\xe9.jpg`)", "read; the name survives", jpeg, **read)
    yield OddFile("a\u2028b\nc.jpg", "line ends in the name (U+2028, `\\n`)", "read; the name survives", jpeg, **read)


def _cut_jpeg(image: Image.Image) -> bytes:
    return saved(image.crop((0, 0, WIDTH - 1, HEIGHT - 1)), "JPEG", subsampling="4:2:0")


def _pngs() -> Iterator[OddFile]:
    image = base()
    whole, gray = _rgb(image), image.convert("L")
    deep = np.asarray(gray).astype(np.uint16) * 257
    yield OddFile("gray16.png", "16-bit gray", "65,535 is white", saved(Image.fromarray(deep), "PNG"), "", _rgb(gray))
    ok, color = cv2.imencode(".png", whole[..., ::-1].astype(np.uint16) * 257)
    assert ok
    yield OddFile("color16.png", "16-bit color", "its upper 8 bits", color.tobytes(), "", whole)
    palette = image.quantize(64)
    yield OddFile("palette.png", "palette", "its colors", saved(palette, "PNG"), "", _rgb(palette))
    clear = saved(palette, "PNG", transparency=0)
    outcome = "the stored color; `BACKGROUND` lays it on another"
    yield OddFile("clear_palette.png", "palette with a transparent entry", outcome, clear, "", _rgb(palette))
    alpha = Image.fromarray(np.linspace(0, 255, WIDTH * HEIGHT).reshape(HEIGHT, WIDTH).astype(np.uint8))
    both = image.copy()
    both.putalpha(alpha)
    yield OddFile("clear.png", "RGB and transparency", outcome, saved(both, "PNG"), "", whole)
    gray_alpha = Image.merge("LA", (gray, alpha))
    yield OddFile("clear_gray.png", "gray and transparency", outcome, saved(gray_alpha, "PNG"), "", _rgb(gray))
    bits = gray.point(lambda value: 255 * (value > 127), "1")
    yield OddFile("one_bit.png", "black and white, 1 bit", "read", saved(bits, "PNG"), "", _rgb(bits))
    notes = PngInfo()
    notes.add_text("parameters", "x" * 3_000_000, zip=True)
    yield OddFile(
        "text.png", "text of 3,000,000 bytes", "read without it", saved(image, "PNG", pnginfo=notes), "", whole
    )
    other = Image.new("RGB", image.size)
    moving = saved(image, "PNG", save_all=True, append_images=[other])
    yield OddFile("moving.png", "animated PNG", "its first frame", moving, "", whole)
    dot = Image.new("RGB", (1, 1), (9, 8, 7))
    yield OddFile("one_pixel.png", "a single pixel", "read", saved(dot, "PNG"), "", _rgb(dot), size=(1, 1))
    thin = Image.new("RGB", (700, 1), (9, 8, 7))
    yield OddFile("thin.png", "700 x 1 pixels", "read", saved(thin, "PNG"), "", _rgb(thin), size=(700, 1))


def _others() -> Iterator[OddFile]:
    image = base()
    whole, gray, other = _rgb(image), image.convert("L"), Image.new("RGB", image.size)
    moving = saved(image, "GIF", save_all=True, append_images=[other])
    yield OddFile("moving.gif", "animated GIF", "its first frame", moving, "", whole, 12.0)
    clear = saved(image.quantize(64), "GIF", transparency=0)
    yield OddFile("clear.gif", "GIF with a transparent color", "the stored color", clear, "", whole, 12.0)
    moving = saved(image, "WEBP", save_all=True, append_images=[other], lossless=True)
    yield OddFile("moving.webp", "animated WebP", "its first frame", moving, "", whole, 1.0)
    yield OddFile("plain.webp", "WebP without loss", "read", saved(image, "WEBP", lossless=True), "", whole)
    pages = saved(image, "TIFF", save_all=True, append_images=[other])
    yield OddFile("pages.tif", "TIFF of several pages", "the first page", pages, "", whole)
    packed = saved(image, "TIFF", compression="tiff_lzw")
    yield OddFile("packed.tiff", "compressed TIFF", "read", packed, "", whole)
    deep = Image.fromarray(np.asarray(gray).astype(np.uint16) * 257)
    yield OddFile("gray16.tif", "16-bit gray TIFF", "65,535 is white", saved(deep, "TIFF"), "", _rgb(gray))
    inks = saved(image.convert("CMYK"), "TIFF")
    yield OddFile("inks.tif", "CMYK TIFF", "as RGB", inks, "", whole, 1.0)
    yield OddFile("palette.bmp", "BMP with a palette", "its colors", saved(image.quantize(64), "BMP"), "", whole, 12.0)
    rows = "\n".join(" ".join(map(str, row)) for row in np.asarray(gray).tolist())
    text = f"P2\n# a comment\n{WIDTH} {HEIGHT}\n255\n{rows}\n".encode()
    yield OddFile("numbers.pgm", "gray numbers written as text (`PGM`)", "read", text, "", _rgb(gray))


def _broken() -> Iterator[OddFile]:
    image = base()
    jpeg, png, no_image = saved(image, "JPEG"), saved(image, "PNG"), "it is not an image in one of the formats"
    yield _unusable("empty.jpg", "no bytes", b"", no_image)
    yield _unusable("cut.jpg", "JPEG that was cut off", jpeg[: len(jpeg) // 2], "truncated")
    yield _unusable("header.jpg", "JPEG without pixels", jpeg[: jpeg.index(b"\xff\xda")], "truncated|broken|cannot")
    yield _unusable("packed.jpg", "JPEG that gzip packed", gzip.compress(jpeg), "compressed with gzip")
    yield _unusable("page.jpg", "a server's error page", b"<!DOCTYPE html><h1>404</h1>", no_image)
    yield _unusable("drawing.png", "SVG", b'<svg xmlns="http://www.w3.org/2000/svg"/>', no_image)
    yield _unusable("script.jpg", "PostScript", b"%!PS-Adobe-3.0 EPSF-3.0\nshowpage\n", no_image)
    heic = b"\0\0\0\x18ftypheic\0\0\0\0heicmif1" + b"\0" * 99
    yield _unusable("heic_inside.jpg", "HEIC with the name of a JPEG", heic, no_image)
    yield _unusable("avif_inside.jpg", "AVIF with the name of a JPEG", saved(image, "AVIF"), no_image)
    yield _unusable("jpeg2000_inside.jpg", "JPEG 2000 with the name of a JPEG", saved(image, "JPEG2000"), no_image)
    large = saved(Image.new("RGB", (3000, 2000)), "JPEG", progressive=True)
    at = large.rindex(b"\xff\xda")
    scans = large[:at] + large[at:-2] * 5000 + large[-2:]
    yield _unusable("scans.jpg", "JPEG of thousands of scans", scans, "take too long to decode")
    yield _unusable("cut.png", "PNG that was cut off", png[: len(png) // 2], "truncated|broken")
    flipped = bytearray(png)
    flipped[png.index(b"IDAT") + 10] ^= 0xFF
    yield _unusable("flipped.png", "PNG with a damaged byte", bytes(flipped), "broken|checksum|crc|incorrect")
    yield _unusable("bomb.png", "PNG that claims 3.6 billion pixels", _claiming(png, 60_000, 60_000), "are more than")
    yield _unusable("nothing.png", "PNG that claims 0 x 0 pixels", _claiming(png, 0, 0), ".")
    float_ = Image.fromarray(np.asarray(image.convert("L")).astype(np.float32))
    yield _unusable("float.tif", "TIFF of floating-point numbers", saved(float_, "TIFF"), "floating-point numbers")
    wide = Image.fromarray(np.asarray(image.convert("L")).astype(np.int32))
    yield _unusable("wide.tif", "TIFF of 32-bit integers", saved(wide, "TIFF"), "32-bit integers")
    moving = saved(image, "GIF")
    yield _unusable("cut.gif", "GIF that was cut off", moving[:200], ".")
    yield _unusable("cut.webp", "WebP that was cut off", saved(image, "WEBP")[:100], ".")


def _unusable(name: str, what: str, content: bytes, reason: str) -> OddFile:
    return OddFile(name, what, SKIPPED, content, reason)


def _claiming(png: bytes, width: int, height: int) -> bytes:
    """A PNG whose header claims another size."""
    content = bytearray(png)
    content[16:24] = struct.pack(">II", width, height)
    content[29:33] = struct.pack(">I", zlib.crc32(bytes(content[12:29])))
    return bytes(content)


def write(folder: Path) -> list[OddFile]:
    """Write all of them into a folder."""
    found = odd_files()
    folder.mkdir(parents=True, exist_ok=True)
    for odd in found:
        (folder / odd.name).write_bytes(odd.content)
    return found


def table() -> str:
    """The table of docs/data.md."""
    rows = ["| file | what it is | what happens |", "| --- | --- | --- |"]
    for odd in odd_files():
        name = odd.name if odd.name.isascii() and odd.name.isprintable() else ascii(odd.name)[1:-1]
        rows.append(f"| `{name}` | {odd.what} | {odd.outcome} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        write(Path(sys.argv[1]))
    else:
        print(table(), end="")
