"""Images with masks (``segmentation_folder``): matching files, and the number of classes of their pixels.

A folder has ``images/`` and ``masks/`` with files of the same names, and optionally ``classes.txt``, one name per line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from vissl_zero.atomic import is_there
from vissl_zero.config.run_config import RunConfig
from vissl_zero.errors import Problem
from vissl_zero.resolve.data_plan import splits
from vissl_zero.resolve.image_files import image_files

if TYPE_CHECKING:
    from vissl_zero.resolve.decisions import Decisions

SOURCE = "segmentation_folder"
IMAGES, MASKS, CLASSES = "images", "masks", "classes.txt"
IGNORED = 255  # the class of pixels that do not count
_MAX_CLAUSES = 20

# Geometric transforms use the same random draws for image and mask. All others change the image alone.
GEOMETRIC = (
    *("Resize", "CenterCrop", "RandomCrop", "RandomResizedCrop", "RandomHorizontalFlip", "RandomVerticalFlip"),
    *("Pad", "RandomRotation", "RandomAffine", "RandomPerspective", "ElasticTransform"),
)
OF_IMAGES = (
    *("ToTensor", "Normalize", "ColorJitter", "Grayscale", "RandomGrayscale", "GaussianBlur", "RandomSolarize"),
    *("RandomPosterize", "RandomInvert", "RandomAdjustSharpness", "RandomAutocontrast", "RandomEqualize"),
    *("RandomApply", "ImgPilColorDistortion", "ImgPilGaussianBlur", "ImgPilRandomSolarize", "ImgPilRandomPhotometric"),
    "ImgPilRandomStroke",
)


class Pair(NamedTuple):
    """Paths of an image and of its mask."""

    image: str
    mask: str


def list_pairs(root: Path) -> tuple[list[Pair], list[str]]:
    """Return the pairs of image and mask below ``root``, sorted, and a clause for each image without a usable mask."""
    if missing := [name for name in (IMAGES, MASKS) if not (root / name).is_dir()]:
        return [], [f"{root} has no folder {' and no folder '.join(missing)}"]
    try:
        images, masks = _by_stem(root / IMAGES), _by_stem(root / MASKS)
    except OSError as error:
        return [], [f"{error.filename or root} cannot be listed ({error.strerror})"]
    pairs, problems = [], []
    for stem in sorted(images):
        image, mask = images[stem], masks.get(stem, [])
        pngs = [path for path in mask if path.lower().endswith(".png")]
        if len(image) > 1:
            problems.append(f"{' and '.join(sorted(image))} would have the same mask")
        elif not mask:
            problems.append(f"{image[0]} has no mask {root / MASKS / stem}.png")
        elif not pngs:
            # JPEG is lossy: it would change the numbers of classes.
            problems.append(f"the mask {mask[0]} is no PNG, and other formats change values")
        else:
            pairs.append(Pair(image[0], pngs[0]))
    return pairs, problems if images else [f"{root / IMAGES} holds no images"]


def _by_stem(folder: Path) -> Mapping[str, list[str]]:
    by_stem: dict[str, list[str]] = {}
    for path in image_files(str(folder)):
        # The path below ``folder``, because files in different subfolders may have the same name.
        by_stem.setdefault(str(Path(path).relative_to(folder).with_suffix("")), []).append(path)
    return by_stem


def listed(problems: Sequence[str]) -> str:
    """Join the first 20 clauses to one string, and say how many more there are."""
    more = len(problems) - _MAX_CLAUSES
    return "; ".join(problems[:_MAX_CLAUSES]) + (f"; and {more:,} more" if more > 0 else "")


def names_of_classes(root: Path, num_classes: int) -> tuple[str, ...]:
    """Return the names in ``classes.txt`` of a folder, or "0", "1", ... up to ``num_classes`` without such a file.

    Raises:
        OSError, UnicodeDecodeError: the file cannot be read.
    """
    path = root / CLASSES
    if not path.is_file():
        return tuple(map(str, range(num_classes)))
    # Editors on Windows put a byte-order mark before the first name.
    return tuple(line.strip() for line in path.read_text(encoding="utf-8-sig").splitlines() if line.strip())


def pairs(cfg: RunConfig, decided: Decisions) -> list[Problem]:
    """Check that each image has a mask, and that the number of classes is known."""
    problems: list[Problem] = []
    for split, options in splits(cfg).items():
        key = f"config.DATA.{split}"
        if options.DATA_SOURCES != [SOURCE] or (cfg.DRY_RUN and not any(map(is_there, options.DATA_PATHS))):
            continue
        if not options.DATA_PATHS:
            fix = f"Write {key}.DATA_PATHS=[/path/to/folder], with {IMAGES}/ and {MASKS}/ in it."
            problems.append(Problem(f"{key}.DATA_PATHS", "[]", "must name a folder with images and masks", fix))
            continue
        roots = [Path(path) for path in options.DATA_PATHS]
        if complaints := [clause for root in roots for clause in list_pairs(root)[1]]:
            fix = f"Put a PNG of the same name under {MASKS}/ for each file under {IMAGES}/."
            must = f"must hold a mask for each image, and {listed(complaints)}"
            problems.append(Problem(f"{key}.DATA_PATHS", str(options.DATA_PATHS), must, fix))
        # Only if all pairs are complete: the classes of any other folder say little.
        elif problem := _classes(roots, options.SOURCE_PARAMS.get("num_classes", 0), key, split == "TRAIN"):
            problems.append(problem)
    return problems


def transforms_of_pairs(cfg: RunConfig) -> list[Problem]:
    """Check that every transform is defined for masks too, and that the backend supports masks."""
    problems: list[Problem] = []
    for split, options in splits(cfg).items():
        key = f"config.DATA.{split}.TRANSFORMS"
        for name in _names(options.TRANSFORMS):
            if name in (*GEOMETRIC, *OF_IMAGES):
                continue
            must = "must leave one image, with a mask that moves as it does"
            fix = f"Known: {', '.join((*GEOMETRIC, *OF_IMAGES))}."
            problems.append(Problem(key, name, must, fix))
        applied = [entry["transforms"] for entry in _entries(options.TRANSFORMS) if "transforms" in entry]
        for name in (name for inner in applied for name in _names(inner) if name in GEOMETRIC):
            problems.append(
                Problem(key, name, "must not stand inside RandomApply, which is of images alone", "Move it out.")
            )
    if cfg.DATA.BACKEND != "pil":
        fix = "Write config.DATA.BACKEND=pil."
        problems.append(Problem("config.DATA.BACKEND", cfg.DATA.BACKEND, "must be pil for images with masks", fix))
    return problems


def _entries(transforms: Sequence[Any]) -> list[Mapping[str, Any]]:
    return [entry for entry in transforms if isinstance(entry, Mapping)]


def _names(transforms: Any) -> list[str]:
    return [str(entry.get("name")) for entry in _entries(transforms)]


def _classes(roots: Sequence[Path], num_classes: object, key: str, is_train: bool) -> Problem | None:
    """Check that ``classes.txt`` and ``num_classes`` agree, and that TRAIN has one of them."""
    if not isinstance(num_classes, int):
        return None  # reported where types are checked
    try:
        named = [names_of_classes(root, 0) for root in roots]
    except (OSError, UnicodeDecodeError) as error:
        return Problem(
            f"{key}.DATA_PATHS", CLASSES, f"cannot be read as text ({error})", "Write a name a line in UTF-8."
        )
    counts = {len(names) for names in named if names} | ({num_classes} if num_classes else set())
    if len(counts) > 1 or len({names for names in named if names}) > 1:
        must = f"must be the number of names in {CLASSES}, the same in each folder"
        got = f"{num_classes}, and {', '.join(str(len(names)) for names in named)} names"
        return Problem(f"{key}.SOURCE_PARAMS.num_classes", got, must, "Correct one of them, or leave the key out.")
    if not counts and is_train:
        fix = f"Write {key}.SOURCE_PARAMS.num_classes=21, or {CLASSES} with a name a line beside {IMAGES}/."
        return Problem(f"{key}.SOURCE_PARAMS.num_classes", "0", "must say how many classes pixels have", fix)
    return None


PAIR_RULES = (pairs,)
