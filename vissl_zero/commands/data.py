"""``vissl-zero data check|stats|pack|bench``: look at images before training, pack them, and time their loading."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median as middle
from typing import TYPE_CHECKING

from vissl_zero.commands.arguments import CommandParser, config_dirs, output, output_file
from vissl_zero.config.catalog import source_of
from vissl_zero.config.override_words import searchpath_override
from vissl_zero.errors import ConfigError, DataError, counted, printable
from vissl_zero.reporting.quantity import bytes_text

if TYPE_CHECKING:
    from vissl_zero.data.check import Findings
    from vissl_zero.data.source import Source

_SHEET = "data_check.png"
_MOST_CLASSES = 10
_NEWEST = 50  # steps


def data(words: Sequence[str]) -> int:
    """Run a subcommand of ``vissl-zero data`` and return the exit code.

    Raises:
        ConfigError: wrong arguments.
        DataError: the images cannot be read, or packed.
    """
    parser = CommandParser(prog="vissl-zero data")
    subcommands = parser.add_subparsers(dest="verb", required=True)
    source = CommandParser(add_help=False)
    source.add_argument(
        "paths", nargs="+", metavar="source", help="what DATA_PATHS would name; its format is recognized"
    )
    source.add_argument("--json", action="store_true", help="print an object of JSON")
    check = subcommands.add_parser(
        "check", parents=[source], help="find images that would make training fail", description=_CHECK
    )
    check.add_argument(
        "--picture", type=output_file, default=Path(_SHEET), help=f"where to draw it; {_SHEET} by default"
    )
    stats = subcommands.add_parser(
        "stats", parents=[source], help="measure mean and deviation of the pixels", description=_STATS
    )
    stats.add_argument("--channels", type=_whole, default=3, help="config.DATA.IN_CHANNELS; 3, RGB, by default")
    pack = subcommands.add_parser("pack", help="write images into few large files", description=_PACK)
    pack.add_argument("source", type=Path, help="what DATA_PATHS would name; its format is recognized")
    pack.add_argument("out", type=output, help="output folder; one that was interrupted is continued")
    pack.add_argument("--to", required=True, choices=("webdataset", "arrow", "lmdb"), help="format")
    pack.add_argument("--size", type=_side, help="reduce larger images to this shorter side, pixels")
    bench = subcommands.add_parser("bench", help="time each part of loading", description=_BENCH)
    bench.add_argument("words", nargs="+", metavar="config=<recipe>", help="recipe and overrides, as for training")
    bench.add_argument("--images", type=_whole, default=256, help="to measure, 256 by default")
    wait = bench.add_mutually_exclusive_group()
    wait.add_argument("--step-seconds", type=_seconds, help="time of a step without loading")
    wait.add_argument("--run", type=Path, help="run folder to take that time from")
    bench.add_argument("--json", action="store_true", help="print an object of JSON")
    rest, folders = config_dirs(words)
    options = parser.parse_args(rest)
    if options.verb == "pack":
        _pack(options.source.expanduser(), options.out, options.to, options.size)
    elif options.verb == "bench":
        _bench(options, searchpath_override(folders))
    elif options.verb == "check":
        _check(options.paths, options.picture, options.json)
    else:
        _stats(options.paths, options.json, options.channels)
    return 0


_CHECK = (
    "Read every image once, and say how many there are, of which classes, sizes and formats; which are broken, copies "
    "of others, turned by EXIF, gray, CMYK or transparent. A picture shows samples and the sizes of the classes."
)
_STATS = "Measure mean and standard deviation of each channel over all pixels, and print the line for TRANSFORMS."
_PACK = (
    "Pack images in the order of their source. An interrupted run goes on where it stopped; packed.json has a checksum "
    "for each part."
)

_BENCH = (
    "Time reading, decoding, each transform and collating on one core, say whether training will wait for the loader, "
    "and what to change."
)


def _pack(source: Path, out: Path, form: str, size: int | None) -> None:
    from vissl_zero.data import pack as packing

    count = packing.pack(source, out, form, size, _report)
    where = printable(out)
    print(f"{counted(count, 'image')} in {where}. Train on them with config.DATA.TRAIN.DATA_PATHS={where}.")


def _opened(paths: Sequence[str], channels: int = 3) -> tuple[Source, str]:
    """Open the source that reads ``paths``. Return the source and its name."""
    from vissl_zero.data.decode import Decoder
    from vissl_zero.data.source import SourceRequest
    from vissl_zero.registry import DATA_SOURCES

    paths = [str(Path(path).expanduser()) for path in paths]
    kind = source_of(paths)
    # The messages of a source name a key of the configuration by default, and there is none here.
    source: Source = DATA_SOURCES.get(kind).build(
        SourceRequest("TRAIN", tuple(paths), decoder=Decoder(channels=channels), named="the path")
    )
    return source, f"{kind} {', '.join(paths)}"


def _check(paths: Sequence[str], picture: Path, is_json: bool) -> None:
    from vissl_zero.data.check import check
    from vissl_zero.data.source import left_out
    from vissl_zero.reporting.data_sheet import NUM_SAMPLES, write_sheet

    if picture.suffix.lower() != ".png":
        raise ConfigError(f"vissl-zero data check --picture: must end in .png, not {str(picture)!r}.")
    source, title = _opened(paths)
    lost = list(left_out(source))
    findings = check(source, title, NUM_SAMPLES, _report)
    names = source.class_names
    samples = []
    for index in findings.samples:
        label = source.label(index)
        caption = Path(source.name(index)).name if label is None else names[label]
        samples.append((source.image(index), caption))
    try:
        write_sheet(picture, f"{title}: {counted(findings.num_images, 'image')}", samples, findings.classes)
    except OSError as error:
        fix = "Name a file that can be written: --picture <file.png>."
        raise DataError(f"The picture {picture} cannot be written: {error.strerror}. {fix}") from error
    if is_json:
        facts = {**asdict(findings), "warnings": [*lost, *findings.warnings()], "picture": str(picture)}
        print(json.dumps(facts, indent=1))
        return
    for line in _described(findings):
        print(printable(line))
    print(f"picture       {printable(picture)}")
    for warning in [*lost, *findings.warnings()]:
        print(f"warning: {printable(warning)}")


def _described(findings: Findings) -> list[str]:
    """Return lines that describe a source."""
    size = f", {bytes_text(findings.num_bytes)}" if findings.num_bytes else ""
    lines = [f"{findings.source}: {counted(findings.num_images, 'image')}{size}"]
    if findings.classes:
        ordered = sorted(findings.classes.items(), key=lambda pair: -pair[1])
        shown = ordered if len(ordered) <= _MOST_CLASSES else [*ordered[:3], *ordered[-3:]]
        text = ", ".join(f"{name} {images:,}" for name, images in shown)
        lines.append(f"classes       {len(ordered):,}; {'' if shown is ordered else 'largest and smallest: '}{text}")
    else:
        lines.append("classes       none: the images have no labels")
    for name, (least, median, most) in findings.sizes.items():
        lines.append(f"{name:<14}{least:,} to {most:,} pixels, median {median:,.0f}")
    lines.append(f"formats       {', '.join(f'{name} {images:,}' for name, images in findings.formats.items())}")
    lines += [f"{flag.replace('_', ' '):<14}{images:,}" for flag, images in findings.flagged.items()]
    lines += [f"    {name}: {reason}" for name, reason in findings.broken]
    lines.append(f"duplicates    {findings.num_duplicates:,}")
    lines += [f"    {name} is {first}" for name, first in findings.duplicates]
    return lines


def _stats(paths: Sequence[str], is_json: bool, channels: int) -> None:
    from vissl_zero.data.pixel_statistics import Statistics, channel_statistics, statistics

    source, title = _opened(paths, channels)
    result = statistics(source, _report) if channels == 3 else channel_statistics(source, channels, _report)
    if is_json:
        print(json.dumps({"source": title, **asdict(result), "normalize": result.normalize()}, indent=1))
        return
    broken = f" ({result.num_broken:,} more cannot be read)" if result.num_broken else ""
    print(printable(f"{title}: {counted(result.num_images, 'image')}{broken}"))
    if isinstance(result, Statistics):
        print(f"channels      {result.channels}{' (gray, read as three equal ones)' if result.channels == 1 else ''}")
        print(f"bits          {result.bits}{' (read as 8)' if result.bits != 8 else ''}")
    else:
        print(f"channels      {result.channels}")
    for name, values in (("mean", result.mean), ("std", result.std)):
        print(f"{name:<14}{', '.join(f'{value:.6f}' for value in values)}")
    print(f"For TRANSFORMS, after ToTensor:\n  {result.normalize()}")


def _bench(options: argparse.Namespace, places: Sequence[str]) -> None:
    from vissl_zero.config.compose import compose
    from vissl_zero.config.override_words import recipe_and_overrides
    from vissl_zero.data.bench import advice, measure, supply_of
    from vissl_zero.resolve.resolve import resolve

    recipe, overrides = recipe_and_overrides([*places, *options.words])
    if recipe is None:
        raise ConfigError("vissl-zero data bench: needs a recipe: vissl-zero data bench config=<recipe>.")
    composed = compose(recipe, overrides)
    plan = resolve(composed.run, ".", recipe=composed.recipe, written=composed.written, notes=composed.notes)
    step = options.step_seconds if options.run is None else _step_seconds(options.run, plan.global_batch)
    data = plan.config.DATA
    cost = measure(data, plan.seed, plan.batch_per_rank, options.images)
    supply = supply_of(plan, cost)
    changes = advice(data, cost, supply, step)
    if options.json:
        facts = {
            **asdict(cost),
            "images_per_s": 1 / cost.total,
            "images_per_s_of_a_rank": supply.rate,
            "loading_step_seconds": supply.step_seconds,
            "step_seconds": step,
            "data_wait": None if step is None else supply.data_wait(step),
            "advice": changes,
        }
        print(json.dumps(facts, indent=1))
        return
    broken = f" ({cost.num_broken:,} more cannot be used)" if cost.num_broken else ""
    print(f"{counted(cost.num_images, 'image')}{broken}, one core, BACKEND {data.BACKEND}")
    print(f"{'part':<26}{'ms an image':>12}{'share':>8}{'images/s':>11}")
    for part, seconds in (*cost.seconds.items(), ("all", cost.total)):
        rate = f"{1 / seconds:11,.0f}" if seconds else f"{'':>11}"
        print(f"{part:<26}{1e3 * seconds:12.3f}{100 * seconds / cost.total:6.0f} %{rate}")
    has = f"{counted(supply.workers, 'worker')} on {counted(supply.cores, 'core')} for each rank"
    print(f"{has}: {supply.rate:,.0f} images/s, {supply.step_seconds:.3g} s for the images of a step.")
    if step is None:
        print("Training waits where a step takes less beside loading: --run <run folder> or --step-seconds tells.")
    elif wait := supply.data_wait(step):
        print(f"A step takes {step:.3g} s beside loading: training will wait {100 * wait:.0f} % of the time.")
    else:
        print(f"A step takes {step:.3g} s beside loading: training will not wait.")
    for change in changes:
        print(f"- {change}")


def _step_seconds(folder: Path, images: int) -> float:
    """Return the seconds of a step of ``images`` images without loading, by the newest steps of a run."""
    from vissl_zero.reporting.metrics_file import FILE_NAME, read_records

    try:
        # The first step also warms up caches and measures activations.
        records = [*read_records(folder / FILE_NAME, after=1)][-_NEWEST:]
    except OSError as error:
        raise DataError(f"{folder / FILE_NAME} cannot be read: {error.strerror}. Name a run folder.") from error
    if not records:
        raise DataError(f"{folder / FILE_NAME} has no step after the first. Name another run, or --step-seconds.")
    # ``images_per_s`` includes the wait for the loader. A median, because some steps also save or evaluate.
    return middle(images / record.images_per_s * (1 - record.data_wait) for record in records)


def _whole(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number, at least 1, not {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of seconds above 0, not {text!r}")
    return seconds


def _side(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of pixels, at least 1, not {text!r}")
    return int(text)


def _report(line: str) -> None:
    # Standard output has the result alone, which may be JSON.
    print(line, file=sys.stderr, flush=True)
