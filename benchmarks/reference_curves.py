"""Train SimCLR and SwAV on the same CIFAR-10 images with ``reference/cifar10/<method>`` and with lightly's own script.

Usage: python benchmarks/reference_curves.py ours|bare|lightly|lockstep simclr|swav --data <folder> [--script <file>]
       [--seed 0] [--epochs 8] [--images 2560]
       python benchmarks/reference_curves.py draw

The folder has train/ and test/, with a folder of JPEGs for each class in both. lightly has an environment of its own:
``pip install lightly==1.6.0 pytorch_lightning scikit-learn``, where neither this project nor its libraries are needed.
Its script is not in its package: docs/source/getting_started/benchmarks/cifar10_benchmark.py of
https://github.com/lightly-ai/lightly at e8d317fc. All of it up to its loop over models runs unchanged, but for the
constants in ``_lightly_source``.

One core takes about 50 minutes for an epoch of the benchmark. So both sides see the first ``--images`` and ``_TEST``
images of the classes, in batches of ``_BATCH``, through a ResNet-18 of a quarter of the width, for ``--epochs`` epochs.
All else is the benchmark's: transforms, loss, head, optimizer, schedule, and kNN after every epoch. Curves go to
``benchmarks/reference_curves.json``; ``draw`` makes the picture and the table of docs/methods.md of them.

``bare`` is ours without the ReLU that lightly's trunk lacks. ``lockstep`` trains that beside lightly's model, from the
same weights and on the same crops, and prints how far the two are apart at the end; both are in one environment then.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean, variance
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from vissl_zero.resolve.resolved import ResolvedRun

# Method, side, seed -> the curve, when it was measured and how long that took.
Curves = dict[str, dict[str, dict[str, dict[str, Any]]]]

CURVES = Path(__file__).with_suffix(".json")
PICTURE = Path(__file__).parents[1] / "docs/pictures/reference_curves.svg"
PAGE = Path(__file__).parents[1] / "docs/methods.md"
MARKS = "<!-- curves: written by benchmarks/reference_curves.py -->", "<!-- end of the curves -->"
SIDES = {"ours": "ours", "bare": "ours without the stem's ReLU", "lightly": "lightly 1.6.0"}
METHODS = {"simclr": "SimCLR", "swav": "SwAV"}
_CLASSES = {"simclr": "SimCLRModel", "swav": "SwaVModel"}  # of lightly's script
_TRAIN, _TEST = 2560, 2000
_BATCH = 128
_EPOCHS = 8
_WIDTH = 16  # channels of the first stage; 64 in the benchmark


class RefusedError(Exception):
    """What a user has to change, in a sentence."""


def main() -> None:
    """Run one side of one method with one seed, and note its curve; or draw those that are noted."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("side", choices=(*SIDES, "lockstep", "draw"))
    parser.add_argument("method", choices=METHODS, nargs="?")
    parser.add_argument("--data", type=Path, help="folder with the images")
    parser.add_argument("--script", type=Path, help="lightly's cifar10_benchmark.py")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=_EPOCHS)
    parser.add_argument("--images", type=int, default=_TRAIN, help="to train on")
    args = parser.parse_args()
    if args.side == "draw":
        draw(json.loads(CURVES.read_text()), PICTURE)
        PAGE.write_text(with_table(PAGE.read_text(), json.loads(CURVES.read_text())))
        return
    if args.method is None or args.data is None:
        parser.error("name a method and --data <folder with train/ and test/>")
    if args.side in ("lightly", "lockstep") and args.script is None:
        parser.error(f"{args.side} needs --script <its cifar10_benchmark.py>; the head of this file says where that is")
    with tempfile.TemporaryDirectory() as temporary:
        images = Path(temporary)
        for split, count in (("train", args.images), ("test", _TEST)):
            _copy(args.data / split, images / split, count)
        began = time.perf_counter()
        try:
            if args.side == "lockstep":
                print(f"{_lockstep(args.script, args.method, images, args.seed, args.epochs):.1e}")
                return
            if args.side == "lightly":
                top1s = _lightly(args.script, args.method, images, args.seed, args.epochs)
            else:
                top1s = _ours(args.method, images, args.seed, args.epochs, is_bare=args.side == "bare")
        except RefusedError as error:
            parser.error(str(error))
        seconds = time.perf_counter() - began
    curves: Curves = json.loads(CURVES.read_text()) if CURVES.exists() else {}
    by_seed = curves.setdefault(args.method, {}).setdefault(args.side, {})
    by_seed[str(args.seed)] = {
        "knn_top1": [round(top1, 2) for top1 in top1s],
        "seconds": round(seconds),
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
    }
    CURVES.write_text(json.dumps(curves, indent=1, sort_keys=True) + "\n")
    print(args.side, args.method, args.seed, by_seed[str(args.seed)], flush=True)


def _copy(source: Path, target: Path, count: int) -> None:
    """Copy the first images of each class, as many of each."""
    classes = sorted(folder for folder in source.iterdir() if folder.is_dir())
    for folder in classes:
        (target / folder.name).mkdir(parents=True)
        for file in sorted(folder.iterdir())[: count // len(classes)]:
            shutil.copy(file, target / folder.name)


def _plan(method: str, images: Path, seed: int, epochs: int, is_bare: bool, more: Mapping[str, Any]) -> ResolvedRun:
    """Resolve the recipe with a narrow trunk, these images and ``more``; it writes into ``images``/run."""
    from one_process import be_a_rank
    from torch import nn

    from vissl_zero.config.components.trunks import ResNetConfig
    from vissl_zero.config.compose import compose
    from vissl_zero.models.trunks.resnet import StagedTrunk, _stages, _stem, replace_convolutions
    from vissl_zero.registry import TRUNKS
    from vissl_zero.resolve.resolve import resolve

    @TRUNKS.register("narrow_resnet")
    class NarrowResNet(StagedTrunk):
        """The recipe's trunk, with fewer channels, and without the stem's ReLU where ``is_bare``."""

        def __init__(self) -> None:
            config = ResNetConfig(DEPTH=18, STEM_TYPE="RES_STEM_CIFAR")
            stem = _stem(config, _WIDTH, nn.BatchNorm2d)
            if is_bare:
                stem[2] = nn.Identity()
            super().__init__(stem, *_stages(config, _WIDTH, nn.BatchNorm2d))
            replace_convolutions(self, is_standardized=False, is_torch_first=True)

    be_a_rank()
    keys = {
        "DATA.NUM_DATALOADER_WORKERS": 0,
        "DATA.TRAIN.DATA_PATHS": f"[{images / 'train'}]",
        "DATA.TRAIN.BATCHSIZE_PER_REPLICA": _BATCH,
        "DATA.TEST.DATA_PATHS": f"[{images / 'test'}]",
        "MODEL.TRUNK.NAME": "narrow_resnet",
        "OPTIMIZER.num_epochs": epochs,
        "SEED_VALUE": seed,
        **more,
    }
    recipe = f"reference/cifar10/{method}"
    words = [f"config.{key}={value}" for key, value in keys.items()]
    return resolve(compose(recipe, words).run, images / "run", recipe=recipe)


def _ours(method: str, images: Path, seed: int, epochs: int, is_bare: bool) -> list[float]:
    """Top-1 in percent before training and after each epoch."""
    from one_process import train_here

    train_here(_plan(method, images, seed, epochs, is_bare, {}))
    summary = json.loads((images / "run" / "summary.json").read_text())
    points = summary.get("knn_top1_by_step") or [[0, summary["knn_top1_before"]], [1, summary["knn_top1_after"]]]
    return [100 * top1 for _, top1 in points]


def _lightly(script: Path, method: str, images: Path, seed: int, epochs: int) -> list[float]:
    """The same, by lightly's script."""
    found, pl = _code(script, images, epochs)
    model_class, top1s = found[_CLASSES[method]], []

    class Curve(pl.Callback):
        def on_validation_end(self, trainer: Any, _model: Any) -> None:
            top1s.append(float(trainer.callback_metrics["kNN_accuracy"]))

    pl.seed_everything(seed)
    training, bank, test = found["get_data_loaders"](_BATCH, found["create_dataset_train_ssl"](model_class))
    model = model_class(bank, found["classes"])
    trainer = pl.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        devices=1,
        logger=False,
        callbacks=[Curve()],
        enable_checkpointing=False,
        enable_progress_bar=False,
        num_sanity_val_steps=0,
    )
    trainer.validate(model, test, verbose=False)
    trainer.fit(model, train_dataloaders=training, val_dataloaders=test)
    return top1s


def _code(script: Path, images: Path, epochs: int) -> tuple[dict[str, Any], Any]:
    """Run the script up to its loop; return what it defines, and Lightning.

    Raises:
        RefusedError: it is another script, or lightly is not installed.
    """
    source = compile(_lightly_source(script.read_text(), images, epochs), str(script), "exec")
    try:
        import lightly  # noqa: F401 - its script imports the rest
        import pytorch_lightning as pl
    except ImportError:
        must = "This environment has no lightly: pip install lightly==1.6.0 pytorch_lightning scikit-learn"
        raise RefusedError(must) from None
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    found: dict[str, Any] = {"__name__": "cifar10_benchmark"}
    exec(source, found)
    return found, pl


def _lockstep(script: Path, method: str, images: Path, seed: int, epochs: int) -> float:
    """Largest difference of a weight or a running statistic after the same steps from the same weights, in float64.

    lightly's model, loss, optimizer and schedule train on the crops that our loader makes. The stem is lightly's. SwAV
    passes both views together on both sides, and lightly's prototypes have no bias.
    """
    from one_process import train_here
    from safetensors.torch import load_file

    from vissl_zero.data.loader import build_train_loader
    from vissl_zero.models.init import initialize_
    from vissl_zero.models.model import build_model

    exact = {"TRAINER.DTYPE": "float64", "NEAREST_NEIGHBOR.USE_KNN": "false"}
    plan = _plan(method, images, seed, epochs, is_bare=True, more=exact)
    theirs = _code(script, images, epochs)[0][_CLASSES[method]](None, 10).double().train()
    ours = build_model(plan.config.MODEL, num_classes=10).double()
    initialize_(ours, seed)
    if method == "swav":
        theirs.prototypes.heads[0].bias = None
    first = {name: tensor for name, tensor in ours.state_dict().items() if name != _SHIFT[0]}
    theirs.load_state_dict(dict(zip(theirs.state_dict(), first.values(), strict=True)))
    (optimizer,), (schedule,) = theirs.configure_optimizers()
    loader = build_train_loader(plan, rank=0, world_size=1)
    for epoch in range(epochs):
        for (batch,) in loader.epoch(epoch):
            optimizer.zero_grad()
            _loss(theirs, method, batch.images[0].double()).backward()
            optimizer.step()
        schedule.step()
    if method == "swav":
        theirs.prototypes.normalize()
    train_here(plan)
    last = load_file(images / "run" / "weights.safetensors")
    pairs = zip(first, theirs.state_dict().values(), strict=True)
    return max(float((last[name] - tensor).abs().max()) for name, tensor in pairs if name not in _SHIFT)


# A bias before batch norm, which lightly leaves out, and the running mean that it shifts.
_SHIFT = "heads.0.projection_head.0.bias", "heads.0.projection_head.1.running_mean"


def _loss(model: Any, method: str, views: Tensor) -> Tensor:
    if method != "swav":
        return model.training_step((views.chunk(2), None, None), 0)
    model.prototypes.normalize()
    return model.criterion(list(model(views).chunk(2)), [])


def _lightly_source(text: str, images: Path, epochs: int) -> str:
    """The script up to its loop over models, with other constants and a narrower trunk."""
    head, end, _ = text.partition("\nmodels = [")
    changes = {
        r"^max_epochs = .*$": f"max_epochs = {epochs}",
        r"^num_workers = .*$": "num_workers = 0",
        r"^batch_size = \d+$": f"batch_size = {_BATCH}",
        r"^path_to_train = .*$": f"path_to_train = {str(images / 'train')!r}",
        r"^path_to_test = .*$": f"path_to_test = {str(images / 'test')!r}",
        r'ResNetGenerator\("resnet-18"\)': f'ResNetGenerator("resnet-18", width={_WIDTH / 64})',
        # Two lists of one entry beside a default of two: its 1.6.0 refuses that.
        r"crop_min_scales=\[0.14\],": "crop_min_scales=[0.14], crop_max_scales=[1.0],",
        r"(SimCLR|SwaV)ProjectionHead\(512,": rf"\1ProjectionHead({8 * _WIDTH},",
    }
    for pattern, replacement in changes.items():
        head, count = re.subn(pattern, replacement, head, flags=re.MULTILINE)
        if not count or not end:
            raise RefusedError(f"{pattern} is not in lightly's script; take the one at e8d317fc")
    return head


def draw(curves: Curves, to: Path) -> None:
    """Draw a panel for each method: the mean of the seeds of each side, and each seed in pale."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    from vissl_zero.reporting.panels import BLUE, SKY, STYLE, VERMILLION

    colors = {"ours": SKY, "bare": BLUE, "lightly": VERMILLION}
    with mpl.rc_context({**STYLE, "svg.hashsalt": "reference_curves", "svg.fonttype": "none"}):
        figure = Figure(figsize=(10, 3.8), layout="constrained", facecolor="white")
        for axes, method in zip(figure.subplots(1, len(METHODS), sharey=True), METHODS, strict=True):
            for side, runs in sorted(curves[method].items(), key=lambda item: list(SIDES).index(item[0])):
                rows = _rows(runs)
                for row in rows:
                    axes.plot(row, color=colors[side], alpha=0.3, linewidth=1)
                axes.plot([mean(column) for column in zip(*rows, strict=True)], color=colors[side], label=SIDES[side])
            axes.set(title=METHODS[method], xlabel="epoch", ylabel="kNN top-1, %" if method == "simclr" else "")
            axes.legend(loc="upper left")
        figure.savefig(to, metadata={"Date": None})


def with_table(page: str, curves: Curves) -> str:
    """Fill ``docs/methods.md`` with top-1 after each epoch, and how far the sides are apart."""
    begin, end = page.index(MARKS[0]) + len(MARKS[0]), page.index(MARKS[1])
    return f"{page[:begin]}\n{table(curves)}\n{page[end:]}"


def table(curves: Curves) -> str:
    """Write a row for each run, and one for each of ours less lightly: the mean, beside its standard error."""
    epochs = len(next(iter(curves["simclr"]["lightly"].values()))["knn_top1"])
    titles = ("method", "side", "seed", "untrained", *map(str, range(1, epochs)))
    lines = [f"| {' | '.join(titles)} |", f"|{' --- |' * len(titles)}"]
    for method in METHODS:
        for side in (side for side in SIDES if side in curves[method]):
            for seed, run in curves[method][side].items():
                lines.append(_line(METHODS[method], SIDES[side], seed, [f"{top1:.1f}" for top1 in run["knn_top1"]]))
        for side in (side for side in SIDES if side in curves[method] and side != "lightly"):
            apart = differences(_rows(curves[method][side]), _rows(curves[method]["lightly"]))
            cells = [f"{gap:+.1f} ± {error:.1f}" for gap, error in apart]
            lines.append(_line(METHODS[method], f"{SIDES[side]}, minus lightly", "mean", cells))
    return "\n".join(lines)


def differences(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> list[tuple[float, float]]:
    """Subtract the means of two sides, point by point; each with its standard error from the spread of the seeds.

    The spread is pooled over sides and points: two seeds say little about one point.
    """
    spreads = [variance(column) for rows in (ours, theirs) if len(rows) > 1 for column in zip(*rows, strict=True)]
    error = (mean(spreads) * (1 / len(ours) + 1 / len(theirs))) ** 0.5 if spreads else float("nan")
    columns = zip(zip(*ours, strict=True), zip(*theirs, strict=True), strict=True)
    return [(mean(own) - mean(other), error) for own, other in columns]


def _rows(runs: dict[str, dict[str, Any]]) -> list[list[float]]:
    return [run["knn_top1"] for run in runs.values()]


def _line(*cells: Any) -> str:
    *first, values = cells
    return f"| {' | '.join([*first, *values])} |"


if __name__ == "__main__":
    main()
