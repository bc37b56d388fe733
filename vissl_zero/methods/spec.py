"""The facts about a method that need no torch.

``python -m vissl_zero.methods.spec`` writes the tables of ``docs/methods.md``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from vissl_zero.errors import Problem
from vissl_zero.registry import HEADS, METHODS, TRUNKS

if TYPE_CHECKING:
    from vissl_zero.config.run_config import RunConfig
    from vissl_zero.resolve.decisions import Decisions


class MethodSpec:
    """Base of the torch-free half of every method; registered in METHODS, built without arguments.

    Attributes:
        losses: names that ``LOSS.name`` may have for this method -> dataclass of the keys under that name. The loss
            itself is registered in LOSSES, in the file with the mathematics.
        heads: heads of the method, registered in HEADS in that file -> dataclass of their keys.
        shape_keys: keys of the loss that decide the shapes of its state. They must equal those of a checkpoint.
        teacher_follows: see ``Method``; EVALUATED_MODEL may name such a teacher, which is a copy of the model.
        teacher_keys: losses whose frozen teacher has the same outputs for the same crops of an image -> keys of the
            loss that change these outputs.
        title, paper, views, teacher, couples, recipe: the method's row in ``docs/methods.md``: name and source; crops
            of an image that the method sees; the kind of teacher; the terms that depend on other samples; a recipe that
            runs in a minute. ``FIGURES`` has the results of that recipe.
    """

    losses: ClassVar[Mapping[str, type]]
    heads: ClassVar[Mapping[str, type]] = {}
    shape_keys: ClassVar[Sequence[str]] = ()
    teacher_keys: ClassVar[Mapping[str, Sequence[str]]] = {}
    title: ClassVar[str]
    paper: ClassVar[str]
    views: ClassVar[str]
    teacher: ClassVar[str] = "none"
    teacher_follows: ClassVar[bool] = False
    couples: ClassVar[str] = "nothing"
    recipe: ClassVar[str]

    def inferred(self, cfg: RunConfig) -> dict[str, tuple[Any, str]]:
        """Infer keys of the loss from other blocks: key -> (value, the block), such as ``(4, "transforms")``.

        Inferred values override those of the recipe, with a note. None keeps the recipe's value.
        """
        return {}

    def takes_other_model(self, cfg: RunConfig) -> bool:
        """Check whether the teacher is the model under DISTILLATION, with weights of its own."""
        return False

    def teacher_weights(self, cfg: RunConfig) -> str:
        """Name the weights whose network is the teacher; empty: the teacher does not come from named weights."""
        return ""

    def teacher_head(self, cfg: RunConfig) -> list[Any] | None:
        """Return HEAD.PARAMS of a teacher from ``teacher_weights``; None: the head of prototypes in the weights."""
        return [["identity", {}]]

    def problems(self, cfg: RunConfig, decided: Decisions) -> list[Problem]:
        """Check a recipe that names one of ``losses``. Types and limits of single keys have been checked before."""
        return []


def loss_keys(cfg: RunConfig) -> Any:
    """Return the typed keys of the recipe's loss."""
    return cfg.LOSS[cfg.LOSS["name"]]


def heads_of(cfg: RunConfig) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield name and keys of each head that is written as ["name", {key: value}]."""
    for head in cfg.MODEL.HEAD.PARAMS:
        if isinstance(head, Sequence) and not isinstance(head, str) and len(head) == 2 and isinstance(head[0], str):
            yield head[0], head[1] if isinstance(head[1], Mapping) else {}


def head_width(cfg: RunConfig) -> int | None:
    """Return the width of the first head's embeddings, the last of its ``dims``; None where the recipe has none."""
    dims = next((options.get("dims") for _, options in heads_of(cfg)), None)
    return dims[-1] if dims else None


# Transforms that make tiles -> crops of another size that they return before the tiles.
_CUTTING: dict[str, list[int]] = {"ImgPatchesFromTensor": [], "ImgPilToPatchesAndImage": [1]}


def are_cut(cfg: RunConfig) -> bool:
    """Check whether the transforms cut images into tiles."""
    return any(isinstance(entry, Mapping) and entry.get("name") in _CUTTING for entry in cfg.DATA.TRAIN.TRANSFORMS)


def crops_of(cfg: RunConfig) -> list[int] | None:
    """Count the crops per image of each size that the transforms make; None without a multi-crop."""
    for entry in cfg.DATA.TRAIN.TRANSFORMS:
        name = entry.get("name") if isinstance(entry, Mapping) else None
        # The first that makes several crops decides: those after it act on each crop.
        if name == "ImgPilToMultiCrop":
            counts = list(entry.get("num_crops") or ())
        elif name == "ImgReplicatePil":
            counts = [entry.get("num_times", 2)]
        elif name in _CUTTING:
            counts = [*_CUTTING[name], entry.get("num_patches", 9)]
        else:
            continue
        # Other values are reported by the rule ``transforms``.
        return counts if counts and all(isinstance(count, int) for count in counts) else None
    return None


def num_crops_of(cfg: RunConfig) -> int:
    """Count the crops per image that the transforms make, of all sizes; 1 without a multi-crop."""
    return sum(crops_of(cfg) or [1])


def one_head(cfg: RunConfig, *allowed: str) -> list[Problem]:
    """Check that the model has one head, of an allowed name."""
    # The last head of a chain counts: those before it are projections.
    names = [options["heads"][-1][0] if name == "chain" else name for name, options in heads_of(cfg)]
    if not names or (len(names) == 1 and (names[0] in allowed or names[0] not in HEADS.builtin())):
        return []
    fix = f"Write [[{allowed[0]!r}, {{...}}]]; vissl-zero list heads has them."
    must = f"must be one {' or '.join(allowed)} for {cfg.LOSS['name']}"
    return [Problem("config.MODEL.HEAD.PARAMS", str(names), must, fix)]


def two_views(cfg: RunConfig, exactly: bool = True) -> list[Problem]:
    """Check that the transforms make two crops of one size of each image; else (``exactly``) two or more, of any size.

    A recipe without a multi-crop makes one crop, which is refused in both cases.
    """
    counts = crops_of(cfg)
    if counts is not None and (counts == [2] if exactly else sum(counts) >= 2):
        return []
    crops = "total_num_crops: 2, num_crops: [2], size_crops: [224], crop_scales: [[0.14, 1]]"
    how_many = "two crops of an image, of one size," if exactly else "two or more crops of an image"
    return [
        Problem(
            "config.DATA.TRAIN.TRANSFORMS",
            str(counts or "no multi-crop"),
            f"must make {how_many} for {cfg.LOSS['name']}",
            f"Add {{name: ImgPilToMultiCrop, {crops}}}.",
        )
    ]


def one_size(cfg: RunConfig) -> list[Problem]:
    """Check that the transforms make crops of one size."""
    counts = crops_of(cfg)
    if counts is None or len(counts) == 1:
        return []
    must = f"must make crops of one size for {cfg.LOSS['name']}"
    fix = "Write size_crops: [224] and one entry in num_crops and crop_scales."
    return [Problem("config.DATA.TRAIN.TRANSFORMS", str(counts), must, fix)]


def patch_trunk(cfg: RunConfig, mask_token: bool = False) -> list[Problem]:
    """Check that the trunk is a vision transformer, and with ``mask_token`` that it has a vector for masked patches."""
    name, key = cfg.MODEL.TRUNK.NAME, "config.MODEL.TRUNK"
    is_own, is_timm = name == "vision_transformer", name.startswith("timm/")
    # Only building the model shows which of timm's models are plain vision transformers: resolve imports no torch.
    if not (is_own or is_timm):
        # A plugin's trunk may be a vision transformer under any name.
        if name not in TRUNKS.builtin():
            return []
        must = f"must be a vision transformer for {cfg.LOSS['name']}, which looks at patches"
        fix = "Write NAME: vision_transformer, or timm/vit_small_patch16_224, for example."
        return [Problem(f"{key}.NAME", name, must, fix)]
    field = "VISION_TRANSFORMERS.USE_MASK_TOKEN" if is_own else "PARAMS.use_mask_token"
    has_token = (
        cfg.MODEL.TRUNK.VISION_TRANSFORMERS.USE_MASK_TOKEN if is_own else cfg.MODEL.TRUNK.PARAMS.get("use_mask_token")
    )
    if has_token or not mask_token:
        return []
    must = f"must be true for {cfg.LOSS['name']}, which masks patches"
    return [Problem(f"{key}.{field}", "False", must, f"Write {key}.{field}=true.")]


def share(key: str, value: float) -> list[Problem]:
    """Check that ``value`` is between 0 and 1."""
    if 0 <= value <= 1:
        return []
    return [Problem(f"config.{key}", str(value), "must be between 0 and 1", f"Correct config.{key}.")]


PAGE = Path("docs/methods.md")
# By method, with command and date; written by benchmarks/digits_methods.py and benchmarks/cifar_methods.py.
FIGURES = Path(__file__).with_name("figures.json")
_MARKS = "<!-- table: written by python -m vissl_zero.methods.spec -->", "<!-- end of the table -->"
_CIFAR_MARKS = "<!-- CIFAR-10: written by python -m vissl_zero.methods.spec -->", "<!-- end of CIFAR-10 -->"


def table() -> str:
    """Write the table of all methods, in Markdown."""
    rows = []
    for name in METHODS.builtin():
        spec: MethodSpec = METHODS.get(name).build()
        title = f"[{spec.title}]({spec.paper})" if spec.paper else spec.title
        losses = ", ".join(f"`{loss}`" for loss in spec.losses)
        cells = (f"`{name}`", title, losses, spec.views, spec.teacher, spec.couples, f"`{spec.recipe}`", _reached(name))
        rows.append(f"| {' | '.join(cells)} |")
    figures = "kNN top-1: untrained -> trained (raw pixels)"
    titles = ("name", "method", "`LOSS.name`", "views", "teacher", "what couples samples", "recipe", figures)
    return "\n".join([f"| {' | '.join(titles)} |", f"|{' --- |' * len(titles)}", *rows])


def _reached(method: str) -> str:
    figures = json.loads(FIGURES.read_text()).get(method)
    if figures and "miou_trained" in figures:
        return f"mIoU: {figures['miou_untrained']} -> {figures['miou_trained']} %"
    if not figures or "trained" not in figures:
        return "not measured"
    return f"{figures['untrained']} -> {figures['trained']} % ({figures['raw_pixels']} %)"


def _cifar_table() -> str:
    """Write what was reached on CIFAR-10's images, a row for each run, in Markdown."""
    reached = "kNN top-1: untrained -> trained (raw pixels) | linear top-1, the same"
    lines = [f"| method | seed | {reached} | epochs | minutes of one core | date |", f"|{' --- |' * 7}"]
    for name, figures in json.loads(FIGURES.read_text()).items():
        for seed, run in figures.get("cifar10", {}).items():
            kinds = (
                f"{run[f'untrained_{kind}']} -> {run[f'trained_{kind}']} % ({run[f'raw_pixels_{kind}']} %)"
                for kind in ("knn", "linear")
            )
            times = f"{run['epochs']} | {run['minutes']} | {run['date']}"
            lines.append(f"| `{name}` | {seed} | {' | '.join(kinds)} | {times} |")
    return "\n".join(lines)


def with_table(page: str) -> str:
    """Fill ``docs/methods.md`` with new tables."""
    for (first, last), text in ((_MARKS, table()), (_CIFAR_MARKS, _cifar_table())):
        begin, end = page.index(first) + len(first), page.index(last)
        page = f"{page[:begin]}\n{text}\n{page[end:]}"
    return page


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
