"""``vissl-zero new``: write a short recipe for a folder of images, from four questions or their flags."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, TypeVar

from vissl_zero.commands.arguments import CommandParser
from vissl_zero.config.compose import compose
from vissl_zero.config.recipes import recipe_names
from vissl_zero.errors import ConfigError, DataError, VisslZeroError, printable
from vissl_zero.planner.machine_profile import MachineProfile, profile_names, read_profile

if TYPE_CHECKING:
    from vissl_zero.planner.planning import Planned

T = TypeVar("T")

# Enough for a median; decoding every image of a large folder may take hours.
_NUM_LOOKED_AT = 64
_SIDES = (32, 64, 96, 128, 160, 192, 224)
_MOST_IMAGES = 64  # of a batch
_LEAST_IMAGES = 8
_VALIDATION = ("val", "test")
# Without this line, Hydra puts the keys below the name of the recipe's group.
_PACKAGE = "# @package _global_"
_NUM_TIMED, _NUM_WARM = 8, 3  # steps of the measurement, and those before the speed is steady


@dataclass(frozen=True)
class Facts:
    """Facts about a folder of images.

    Attributes:
        train: folder to train on.
        val: folder to evaluate on; None without labels.
        num_images: number of images in ``train``.
        num_classes: number of classes in ``train``; 0 without labels.
        side: median of the shorter sides of the sampled images, in pixels.
        is_gray: whether all sampled images are gray.
    """

    train: Path
    val: Path | None
    num_images: int
    num_classes: int
    side: int
    is_gray: bool


@dataclass(frozen=True)
class Place:
    """The machine that the recipe will run on.

    Attributes:
        memory: GiB that a process may use; None: what is free.
        profile: profile of the machine; empty: this one.
    """

    memory: float | None = None
    profile: str = ""

    @property
    def machine(self) -> MachineProfile | None:
        """The rates of the machine; None for this one."""
        return read_profile(self.profile) if self.profile else None

    @property
    def procs(self) -> int:
        """Number of processes on the machine: a profile whose name ends in x8 describes a machine with eight."""
        count = re.search(r"x(\d+)$", self.profile)
        return int(count[1]) if count else 1


def new(arguments: Sequence[str]) -> int:
    """Ask the questions that the flags do not answer, and write the recipe. Return the exit code.

    Raises:
        ConfigError: an answer is wrong, or no plan fits the memory.
        DataError: the folder has no images that can be used.
    """
    parser = CommandParser(
        prog="vissl-zero new",
        description="Write a recipe of at most 25 lines that trains on a folder of images. Asks on a terminal for "
        "what the flags leave open; elsewhere the flags' defaults hold.",
    )
    parser.add_argument("name", help="recipe to write: configs/config/<name>.yaml; config=<name> trains it")
    parser.add_argument("--images", metavar="FOLDER", help="images; with labels, train/ and val/ of class folders")
    parser.add_argument("--labels", help="yes: train a classifier; no: learn without labels; auto (default): look")
    parser.add_argument("--memory-gb", metavar="X", help="GiB that a process may use; auto (default): what is free")
    parser.add_argument("--machine", metavar="X", help=f"another machine: {', '.join(profile_names())}, or a YAML file")
    parser.add_argument("--epochs", metavar="N", help="passes over the images, 20 by default")
    parser.add_argument("--hours", metavar="X", help="how long it may train, in place of --epochs")
    options = parser.parse_args(arguments)
    path = _place(options.name)
    images = _answer(options.images, "--images", "Which folder holds the images?", "", _folder)
    question = "Train with their labels (yes, no, auto)?"
    labels = _answer(options.labels, "--labels", question, "auto", _labels)
    place = _asked_place(options.memory_gb, options.machine)
    epochs, hours = _asked_length(options.epochs, options.hours)
    facts = look_at(images, labels)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        batch, planned = _fitting(path, facts, place, epochs)
        note = ""
        if hours is not None:
            speed, source = _speed(path, place, planned)
            epochs = max(1, int(hours * 3600 * speed / facts.num_images))
            note = f"{hours:g} hours are about {epochs:,} epochs at {speed:,.0f} images/s, {source}"
            path.write_text(recipe(facts, place, epochs, batch), encoding="utf-8")
    # Also after Ctrl-C: a recipe that is not fitted yet must not take the name.
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    gray = ", gray" if facts.is_gray else ""
    kinds = f", {facts.num_classes} classes" if facts.val else ""
    print(printable(f"{facts.train}: {facts.num_images:,} images, median {facts.side} pixels{gray}{kinds}"))
    print(f"a plan fits with a batch of {batch} images")
    if note:
        print(note)
    print(f"wrote {printable(path)}. Train it: vissl-zero config={options.name}")
    return 0


def _place(name: str) -> Path:
    if not all(part and part.replace("_", "a").replace("-", "a").isalnum() for part in name.split("/")):
        must = "must be letters, digits, - and _, with / between folders, as in my_recipe or mine/swav"
        raise ConfigError(f"vissl-zero new {name}: {must}. Correct it.")
    path = Path("configs/config") / f"{name}.yaml"
    if path.exists() or name in recipe_names():
        raise ConfigError(f"vissl-zero new {name}: there is a recipe of this name. Choose another one.")
    return path


def _answer(value: str | None, flag: str, question: str, default: str, read: Callable[[str], T]) -> T:
    """Return the value of a flag, or ask until an answer can be parsed; the default without a terminal."""
    while value is None and sys.stdin.isatty():
        try:
            return read(input(f"{question}{f' [{default}]' if default else ''} ").strip() or default)
        except VisslZeroError as error:
            print(printable(str(error)))
        except EOFError:  # Ctrl-D
            break
    if not (value or default):
        raise ConfigError(
            f"vissl-zero new {flag}: must be given where there is no terminal to ask. Write {flag} <value>."
        )
    return read(value or default)


def _folder(text: str) -> Path:
    folder = Path(text).expanduser()
    if not text or not folder.is_dir():
        raise DataError(f"vissl-zero new --images {text}: must be a folder with images. Correct the path.")
    return folder


def _labels(text: str) -> str:
    if text not in ("yes", "no", "auto"):
        raise ConfigError(f"vissl-zero new --labels: must be yes, no or auto (got {text!r}).")
    return text


def _asked_place(memory: str | None, machine: str | None) -> Place:
    """Read ``--memory-gb`` and ``--machine``, or ask for one of them."""
    if machine is not None:
        memory_gb = None if memory in (None, "auto") else _number("--memory-gb", str(memory), ", or auto")
        return _place_of(memory_gb, machine)
    question = "Memory of a process in GiB, or a machine such as a100x8?"
    return _answer(memory, "--memory-gb", question, "auto", _memory_or_machine)


def _memory_or_machine(text: str) -> Place:
    if text == "auto" or text in profile_names():
        return _place_of(None, text.removeprefix("auto"))
    return _place_of(_number("--memory-gb", text, ", or auto"), "")


def _place_of(memory_gb: float | None, profile: str) -> Place:
    if profile:
        read_profile(profile)  # refuses one that is not there
    return Place(memory_gb, profile)


def _asked_length(epochs: str | None, hours: str | None) -> tuple[int, float | None]:
    """Read ``--epochs`` or ``--hours``, or ask for one of them; with hours, epochs are 1."""
    if epochs is not None and hours is not None:
        raise ConfigError("vissl-zero new --hours: must be left out beside --epochs. Give one of them.")
    if hours is not None:
        return 1, _number("--hours", hours)
    return _answer(epochs, "--epochs", "How long (epochs such as 20, or hours such as 2h)?", "20", _length)


def _length(text: str) -> tuple[int, float | None]:
    if text.endswith("h"):
        return 1, _number("--hours", text.removesuffix("h"))
    if not (text.isascii() and text.isdecimal() and 0 < int(text) < 10**6):
        raise ConfigError(f"vissl-zero new --epochs: must be a whole number, at least 1 (got {text!r}).")
    return int(text), None


def _number(flag: str, text: str, also: str = "") -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0
    # Asked this way around, NaN is refused too.
    if not 0 < number < 10**9:
        raise ConfigError(f"vissl-zero new {flag}: must be a number above 0{also} (got {text!r}).")
    return number


def look_at(folder: Path, labels: str) -> Facts:
    """Count the images of a folder, and decode a few of them.

    Args:
        folder: folder with images; or with train/ and val/, each with a folder for each class.
        labels: yes, no or auto.
    Raises:
        DataError: there are too few images, or no labels.
    """
    from vissl_zero.data.check import look
    from vissl_zero.data.source import SourceRequest
    from vissl_zero.registry import DATA_SOURCES

    folder = folder.absolute()
    # In the recipe, it would be read as a reference to another key.
    if "${" in str(folder):
        raise DataError(f"vissl-zero new --images {folder}: must not have ${{ in its path. Rename the folder.")
    val = next((folder / name for name in _VALIDATION if (folder / name).is_dir()), None)
    is_split = (folder / "train").is_dir() and val is not None
    if labels == "yes" and not is_split:
        raise DataError(
            f"vissl-zero new --images {folder}: must hold train/ and val/, each with a folder for each class, for "
            "--labels yes. Move some images of each class to val/, or write --labels no."
        )
    train = folder / "train" if is_split else folder
    source = DATA_SOURCES.get("disk_folder").build(SourceRequest("TRAIN", (str(train),)))
    names = source.class_names
    if labels == "yes" and len(names) < 2:
        raise DataError(f"vissl-zero new --images {train}: must have a folder for each class. Or write --labels no.")
    if len(source) < _LEAST_IMAGES:
        raise DataError(
            f"vissl-zero new --images {train}: must hold {_LEAST_IMAGES} images or more (got {len(source)})."
        )
    # Spread over the whole source, because files are sorted by class.
    rows = look(source, range(0, len(source), -(-len(source) // _NUM_LOOKED_AT))).rows
    rows = rows[~rows["broken"]]
    if not len(rows):
        raise DataError(
            f"vissl-zero new --images {train}: must hold images that can be read. See vissl-zero data check."
        )
    has_labels = is_split and len(names) > 1 and labels != "no"
    side = int(median(min(row["width"], row["height"]) for row in rows))
    num_classes = len(names) if has_labels else 0
    return Facts(train, val if has_labels else None, len(source), num_classes, side, bool(rows["gray"].all()))


def recipe(facts: Facts, place: Place, epochs: int, batch: int) -> str:
    """Return the recipe's text, with a comment on each line below the first."""
    side = max([side for side in _SIDES if side <= facts.side], default=_SIDES[0])
    base = "supervised/folder" if facts.val else "pretrain/simclr/my_photos"
    method = "a ResNet-18 that learns the classes" if facts.val else "SimCLR with a ResNet-18, without labels"
    lines = [
        (f"defaults: [/config/{base}]", method),
        ("config:", "every key: vissl-zero config=<this recipe> --cfg job"),
        ("  DATA:", "what is read"),
        (f"    IMG_SIZE: {side}", f"side of the largest crop, pixels; the images' median is {facts.side}"),
        ("    TRAIN:", "what is trained on"),
        ("      DATA_SOURCES: [disk_folder]", "a folder of image files"),
        (f"      DATA_PATHS: [{_quoted(facts.train)}]", f"{facts.num_images:,} images"),
        (f"      BATCHSIZE_PER_REPLICA: {batch}", "images per process and micro-batch"),
    ]
    if facts.val:
        lines += [
            ("    TEST:", "what is measured on"),
            ("      DATA_SOURCES: [disk_folder]", "the same classes"),
            (f"      DATA_PATHS: [{_quoted(facts.val)}]", "other images than those above"),
        ]
    lines += [
        ("  OPTIMIZER:", "how it learns"),
        (f"    num_epochs: {epochs}", "passes over the images"),
        ("  ZERO:", "how memory is used"),
        ("    LEVEL: fit", "the cheapest plan that fits; vissl-zero plan lists them"),
    ]
    if place.memory is not None:
        lines.append((f"    MEMORY_GB: {place.memory:g}", "GiB that a process may use"))
    if place.machine is not None:
        lines.append((f"    MACHINE_PROFILE: {_quoted(place.profile)}", "whose memory and rates plans are for"))
        if place.machine.capability is not None:
            lines += [("  MACHINE:", "what computes"), ("    DEVICE: gpu", "NVIDIA's")]
    if place.procs > 1:
        lines.append(("  DISTRIBUTED:", "how many compute"))
        lines.append((f"    NUM_PROC_PER_NODE: {place.procs}", "processes, one for each GPU"))
    return "\n".join([_PACKAGE, *(f"{line}  # {comment}" for line, comment in lines)]) + "\n"


def _quoted(path: Path | str) -> str:
    return json.dumps(str(path), ensure_ascii=False)


def _fitting(path: Path, facts: Facts, place: Place, epochs: int) -> tuple[int, Planned]:
    """Write the recipe with the largest batch for which a plan fits. Return the batch and the plans."""
    from vissl_zero.planner.planning import plan_run

    batch = _LEAST_IMAGES
    while batch * 2 <= min(_MOST_IMAGES, facts.num_images // place.procs):
        batch *= 2
    while True:
        path.write_text(recipe(facts, place, epochs, batch), encoding="utf-8")
        planned = plan_run(compose(_name(path), ["config.DRY_RUN=true"]).run, _name(path))
        if planned.chosen is not None:
            return batch, planned
        if batch == _LEAST_IMAGES:
            raise ConfigError(
                f"vissl-zero new --memory-gb: must be more: no plan fits, even with a batch of {batch} images. "
                "Give more memory, or smaller images."
            )
        batch //= 2


def _name(path: Path) -> str:
    return path.relative_to("configs/config").with_suffix("").as_posix()


def _speed(path: Path, place: Place, planned: Planned) -> tuple[float, str]:
    """Return images per second of the recipe, and their source: the forecast, or steps measured on this machine.

    Raises:
        ConfigError: there is no forecast, or the measured steps failed.
    """
    chosen = planned.chosen
    if place.profile:
        if chosen is None or chosen.forecast.seconds is None:
            raise ConfigError("vissl-zero new --hours: the time of a step is not known there. Give --epochs.")
        images = chosen.batch_per_rank * chosen.micro_batches * chosen.world_size
        return images / chosen.forecast.seconds, f"the planner's forecast for {place.profile}, data loading left out"
    print(f"measuring {_NUM_TIMED} steps ...", flush=True)
    with TemporaryDirectory(prefix="vissl_zero_new_") as scratch:
        words = [
            f"config={_name(path)}",
            f"config.CHECKPOINT.DIR={scratch}/run",
            "config.NEAREST_NEIGHBOR.USE_KNN=false",
        ]
        # An epoch has a step at least, so these are enough epochs.
        words += [f"config.TRAINER.MAX_STEPS={_NUM_TIMED}", f"config.OPTIMIZER.num_epochs={_NUM_TIMED}"]
        words += ["config.TEST_MODEL=false", "config.HOOKS.LOGGERS=[]"]
        command = [sys.executable, "-m", "vissl_zero.cli", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ConfigError(
                f"vissl-zero new --hours: the steps to measure failed. Give --epochs.\n{done.stderr.strip()}"
            )
        rows = (Path(scratch) / "run/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    # A median: another program on the machine may slow down single steps.
    return median(json.loads(row)["images_per_s"] for row in rows[_NUM_WARM:]), f"measured in {_NUM_TIMED} steps here"
