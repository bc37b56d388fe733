"""Image files in a folder and its subfolders."""

from __future__ import annotations

import os
from collections.abc import Iterator

# Endings of the files that ``vissl_zero.data.decode`` decodes.
EXTENSIONS = (
    *(".jpg", ".jpeg", ".jfif", ".jpe", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff"),
    *(".ppm", ".pgm", ".dcm"),
)


def image_files(folder: str | os.PathLike[str], endings: tuple[str, ...] = EXTENSIONS) -> Iterator[str]:
    """Yield the paths of images in a folder and its subfolders, in no order, without hidden files; lists lazily."""
    # Symbolic links can form cycles, so a folder is visited once per class folder. Not once overall: the folder of one
    # class may be a link to another's.
    root = os.stat(folder)  # noqa: PTH116 - may be bytes of any encoding
    yield from _walk(folder, None, {(root.st_dev, root.st_ino)}, endings)


def _walk(
    folder: str | os.PathLike[str],
    seen: set[tuple[int, int]] | None,
    root_inodes: set[tuple[int, int]],
    endings: tuple[str, ...],
) -> Iterator[str]:
    """Yield matching files below ``folder``; ``seen`` has the folders of its class folder, None above these."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.name.lower().endswith(endings) and entry.is_file():
                yield entry.path
            elif entry.is_dir():
                of_class, stat = set(root_inodes) if seen is None else seen, entry.stat()
                if (inode := (stat.st_dev, stat.st_ino)) not in of_class:
                    of_class.add(inode)
                    yield from _walk(entry.path, of_class, root_inodes, endings)
