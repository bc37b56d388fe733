"""``vissl-zero data check|stats|pack``: look at images before training, and pack them into few large files."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from vissl_zero.commands.arguments import CommandParser
from vissl_zero.config.catalog import source_of
from vissl_zero.errors import ConfigError, DataError, counted, printable
from vissl_zero.reporting.quantity import bytes_text

if TYPE_CHECKING:
    from vissl_zero.data.check import Findings
    from vissl_zero.data.source import Source

_SHEET = "data_check.png"
_MOST_CLASSES = 10


def data(words: Sequence[str]) -> int:
    """Run a word of ``vissl-zero data``; returns the exit code.

    Raises:
        ConfigError: wrong arguments.
        DataError: the images cannot be read, or packed.
    """
    parser = CommandParser(prog="vissl-zero data")
    verbs = parser.add_subparsers(dest="verb", required=True, parser_class=CommandParser)
    source = CommandParser(add_help=False)
    source.add_argument(
        "paths", nargs="+", metavar="source", help="what DATA_PATHS would name; its format is recognized"
    )
    source.add_argument("--json", action="store_true", help="print an object of JSON")
    check = verbs.add_parser(
        "check", parents=[source], help="look for what training would stumble over", description=_CHECK
    )
    check.add_argument("--picture", type=Path, default=Path(_SHEET), help=f"where to draw it; {_SHEET} by default")
    verbs.add_parser("stats", parents=[source], help="measure mean and deviation of the pixels", description=_STATS)
    pack = verbs.add_parser("pack", help="write a folder of images into few large files", description=_PACK)
    pack.add_argument("folder", type=Path, help="folder of images, as DATA_PATHS would name it")
    pack.add_argument("out", type=Path, help="folder to write, new or begun")
    pack.add_argument("--to", required=True, choices=("webdataset", "arrow", "lmdb"), help="format")
    pack.add_argument("--size", type=_side, help="reduce larger images to this shorter side, pixels")
    options = parser.parse_args(words)
    if options.verb == "pack":
        _pack(options.folder, options.out, options.to, options.size)
    elif options.verb == "check":
        _check(options.paths, options.picture, options.json)
    else:
        _stats(options.paths, options.json)
    return 0


_CHECK = (
    "Read every image once, and say how many there are, of which classes, sizes and formats; which are broken, copies "
    "of others, turned by EXIF, gray, CMYK or transparent. A picture shows samples and the sizes of the classes."
)
_STATS = "Measure mean and standard deviation of each channel over all pixels, and print the line for TRANSFORMS."
_PACK = (
    "Pack a folder of images in its order. An interrupted run goes on where it stopped; packed.json has a checksum for "
    "each part."
)


def _pack(folder: Path, out: Path, form: str, size: int | None) -> None:
    from vissl_zero.data import pack as packing

    count = packing.pack(folder, out, form, size, _report)
    where = printable(out)
    print(f"{counted(count, 'image')} in {where}. Train on them with config.DATA.TRAIN.DATA_PATHS={where}.")


def _opened(paths: Sequence[str]) -> tuple[Source, str]:
    """Open the source that reads ``paths``, and name it."""
    from vissl_zero.data.source import SourceRequest
    from vissl_zero.registry import DATA_SOURCES

    paths = [str(Path(path).expanduser()) for path in paths]
    kind = source_of(paths)
    source: Source = DATA_SOURCES.get(kind).build(SourceRequest("TRAIN", tuple(paths)))
    return source, f"{kind} {', '.join(paths)}"


def _check(paths: Sequence[str], picture: Path, is_json: bool) -> None:
    from vissl_zero.data.check import check
    from vissl_zero.data.source import left_out
    from vissl_zero.reporting.data_sheet import NUM_SAMPLES, write_sheet

    if picture.suffix.lower() != ".png":
        raise ConfigError(f"vissl-zero data check --picture: must end in .png, not {str(picture)!r}.")
    source, title = _opened(paths)
    lost = list(left_out(source))
    found = check(source, title, NUM_SAMPLES, _report)
    names = source.class_names
    samples = []
    for index in found.samples:
        label = source.label(index)
        caption = Path(source.name(index)).name if label is None else names[label]
        samples.append((source.image(index), caption))
    try:
        write_sheet(picture, f"{title}: {counted(found.num_images, 'image')}", samples, found.classes)
    except OSError as error:
        fix = "Name a file that can be written: --picture <file.png>."
        raise DataError(f"The picture {picture} cannot be written: {error.strerror}. {fix}") from error
    if is_json:
        print(json.dumps({**asdict(found), "warnings": [*lost, *found.warnings()], "picture": str(picture)}, indent=1))
        return
    for line in _described(found):
        print(printable(line))
    print(f"picture       {printable(picture)}")
    for warning in [*lost, *found.warnings()]:
        print(f"warning: {printable(warning)}")


def _described(found: Findings) -> list[str]:
    """Describe a source, a line for each kind of fact."""
    size = f", {bytes_text(found.num_bytes)}" if found.num_bytes else ""
    lines = [f"{found.source}: {counted(found.num_images, 'image')}{size}"]
    if found.classes:
        ordered = sorted(found.classes.items(), key=lambda pair: -pair[1])
        shown = ordered if len(ordered) <= _MOST_CLASSES else [*ordered[:3], *ordered[-3:]]
        text = ", ".join(f"{name} {images:,}" for name, images in shown)
        lines.append(f"classes       {len(ordered):,}; {'' if shown is ordered else 'largest and smallest: '}{text}")
    else:
        lines.append("classes       none: the images have no labels")
    for name, (least, median, most) in found.sizes.items():
        lines.append(f"{name:<14}{least:,} to {most:,} pixels, median {median:,.0f}")
    lines.append(f"formats       {', '.join(f'{name} {images:,}' for name, images in found.formats.items())}")
    lines += [f"{flag.replace('_', ' '):<14}{images:,}" for flag, images in found.flagged.items()]
    lines += [f"    {name}: {reason}" for name, reason in found.broken]
    lines.append(f"duplicates    {found.num_duplicates:,}")
    lines += [f"    {name} is {first}" for name, first in found.duplicates]
    return lines


def _stats(paths: Sequence[str], is_json: bool) -> None:
    from vissl_zero.data.pixel_statistics import statistics

    source, title = _opened(paths)
    found = statistics(source, _report)
    if is_json:
        print(json.dumps({"source": title, **asdict(found), "normalize": found.normalize()}, indent=1))
        return
    broken = f" ({found.num_broken:,} more cannot be read)" if found.num_broken else ""
    print(printable(f"{title}: {counted(found.num_images, 'image')}{broken}"))
    print(f"channels      {found.channels}{' (gray, read as three equal ones)' if found.channels == 1 else ''}")
    print(f"bits          {found.bits}{' (read as 8)' if found.bits != 8 else ''}")
    for name, values in (("mean", found.mean), ("std", found.std)):
        print(f"{name:<14}{', '.join(f'{value:.6f}' for value in values)}")
    print(f"For TRANSFORMS, after ToTensor:\n  {found.normalize()}")


def _side(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of pixels, at least 1, not {text!r}")
    return int(text)


def _report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
