"""``vissl-zero data pack <folder> <out> --to webdataset|arrow|lmdb``: images in few large files."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from vissl_zero.errors import ConfigError, printable


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"vissl-zero data: {message}. See vissl-zero data pack --help.")


def data(words: Sequence[str]) -> int:
    """Run a word of ``vissl-zero data``; returns the exit code.

    Raises:
        ConfigError: wrong arguments.
        DataError: the folder cannot be packed.
    """
    parser = _Parser(prog="vissl-zero data")
    verbs = parser.add_subparsers(dest="verb", required=True, parser_class=_Parser)
    pack = verbs.add_parser("pack", help="write a folder of images into few large files", description=_PACK)
    pack.add_argument("folder", type=Path, help="folder of images, as DATA_PATHS would name it")
    pack.add_argument("out", type=Path, help="folder to write, new or begun")
    pack.add_argument("--to", required=True, choices=("webdataset", "arrow", "lmdb"), help="format")
    pack.add_argument("--size", type=_side, help="reduce larger images to this shorter side, pixels")
    try:
        options = parser.parse_args(list(words))
    except SystemExit as ended:  # --help
        return int(ended.code or 0)
    from vissl_zero.data import pack as packing

    count = packing.pack(options.folder, options.out, options.to, options.size, _report)
    out = printable(options.out)
    print(f"{count:,} images are in {out}. Train on them with config.DATA.TRAIN.DATA_PATHS={out}.")
    return 0


_PACK = (
    "Pack a folder of images in its order. An interrupted run goes on where it stopped; packed.json has a checksum for "
    "each part."
)


def _side(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of pixels, at least 1, not {text!r}")
    return int(text)


def _report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
