"""Messages about files in a folder of images that are not read, so that no photo is left out silently."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from vissl_zero.errors import counted

# Extensions of image formats that ``data/decode.py`` does not decode.
PICTURES = (
    *(".heic", ".heif", ".hif", ".avif", ".avifs", ".jxl", ".jp2", ".j2k", ".jpf"),
    *(".svg", ".psd", ".ico", ".tga", ".eps", ".exr", ".hdr", ".dds", ".pbm", ".pnm", ".pfm"),
    *(".dng", ".cr2", ".cr3", ".crw", ".nef", ".nrw", ".arw", ".srf", ".sr2", ".orf", ".raf", ".rw2", ".pef"),
    *(".srw", ".raw", ".x3f"),
)


def left_out(endings: Mapping[str, int], where: str) -> str:
    """Return a sentence with the number of unread images in ``where`` by extension; empty if there are none."""
    if not (count := sum(endings.values())):
        return ""
    listed = ", ".join(f"{ending} {number:,}" for ending, number in sorted(endings.items(), key=lambda pair: -pair[1]))
    verb, pronoun = ("is", "it") if count == 1 else ("are", "them")
    return f"{counted(count, 'file')} in {where} {verb} left out: {listed} (convert {pronoun} to JPEG or PNG)."


def held(endings: Mapping[str, int], most: int = 3) -> str:
    """Return a sentence on the other files of a folder without images (" It does hold 1 .heic file."), or ""."""
    shown = sorted(((ending, n) for ending, n in endings.items() if ending), key=lambda pair: -pair[1])[:most]
    if not shown:
        return ""
    listed = ", ".join(f"{number:,} {ending}" for ending, number in shown)
    files = "file" if sum(number for _, number in shown) == 1 else "files"
    advice = " Convert them to JPEG or PNG." if any(ending in PICTURES for ending, _ in shown) else ""
    return f" It does hold {listed} {files}.{advice}"


def endings_in(folder: Path) -> Counter[str]:
    """Count the files in a folder and its subfolders by lower-case extension. Cost: lists the whole tree."""
    return Counter(Path(name).suffix.lower() for _, _, names in os.walk(folder) for name in names if name[0] != ".")
