"""``vissl-zero export``: write a trunk to a folder that another library opens."""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vissl_zero.atomic import read_object
from vissl_zero.commands.arguments import CommandParser, output, writing
from vissl_zero.errors import CheckpointError
from vissl_zero.torchvision_compat import is_repaired
from vissl_zero.version import __version__

if TYPE_CHECKING:
    from vissl_zero.evaluation.trunk import Classifier, LoadedTrunk
    from vissl_zero.weights.to_library import Exported, Source

TARGETS = ("timm", "transformers", "torchvision", "torchhub", "detectron2", "peft", "onnx", "safetensors")
_FIGURES = ("steps", "final_loss", "knn_top1_before", "knn_top1_after", "top1", "rankme_after")


def export(arguments: Sequence[str]) -> int:
    """Write the folder, open it again with the library, and print the call that does so. Return 0.

    Raises:
        ConfigError, CheckpointError: the arguments, or what they name, are wrong.
    """
    parser = CommandParser(
        prog="vissl-zero export",
        description="Write a trunk as a folder that another library opens, with config.json, preprocessor_config.json "
        "and a model card. The library opens it again, and features are compared, before it is done.",
    )
    parser.add_argument("weights", help="run folder, file, timm:<name>, hf:<repo>, torchvision:<name>, torchhub:<name>")
    parser.add_argument("--to", required=True, choices=TARGETS, help="the library, or kind of file")
    parser.add_argument("--out", required=True, type=output, metavar="FOLDER", help="to write; must be empty or new")
    parser.add_argument("--license", default="other", help="for the model card (other), such as apache-2.0")
    parser.add_argument(
        "--classifier", action="store_true", help="also the last layer of a run that predicts classes, and their names"
    )
    parser.add_argument(
        "--which", default="student", choices=("student", "teacher"), help="of a run of yours (student)"
    )
    options = parser.parse_args(arguments)
    out = options.out
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(f"--out {out}: is not empty, and nothing is overwritten. Name a new folder.")
    from vissl_zero.evaluation.trunk import load_classifier, load_trunk

    # Python prints a warning with our file and line; the user needs its text alone.
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        loaded = load_trunk(options.weights, which=options.which)
    for warning in caught:
        print(f"note: {warning.message}", file=sys.stderr)
    # Before the writing, which blames --out for every error of a file.
    last = load_classifier(options.weights, which=options.which) if options.classifier else None
    with writing(out):
        done = _written(loaded, last, options)
    _print_result(loaded, done, out, options.to)
    return 0


def _written(loaded: LoadedTrunk, last: Classifier | None, options: argparse.Namespace) -> Exported:
    """Write the folder next to its final place, under the name that the printed calls use, and move it there."""
    from vissl_zero.weights.to_library import Source, Views, write, write_preprocessor

    out, views = options.out, Views.of(loaded.config["DATA"])
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".export-") as temporary:
        folder = Path(temporary) / out.name
        folder.mkdir()
        source = Source(loaded.trunk, loaded.config["MODEL"]["TRUNK"], views, place=out)
        if last is not None:
            source = replace(source, classifier=last.layer, classes=last.classes)
        done = write(source, options.to, folder)
        if last is not None and not source.classes:
            done.notes.append("The weights do not name their classes; those of a run that has ended do.")
        write_preprocessor(views, folder)
        card = _card(loaded, done, source, options.to, options.license, Path(options.weights))
        (folder / "README.md").write_text(card, encoding="utf-8")
        folder.replace(out)
    return done


def _print_result(loaded: LoadedTrunk, done: Exported, out: Path, target: str) -> None:
    print(f"{loaded.path} ({loaded.recognized}) -> {out}, for {target}")
    for name in sorted(file.name for file in out.iterdir()):
        print(f"  {name}")
    # The card stays in the folder, so its call names the folder alone. Here the call has to work from this shell.
    # ``sub`` gets a function, because it would read backslashes in a path as references.
    call = re.sub(rf'(?<=[:"]){re.escape(out.name)}(?=[/"])', lambda _: str(out), _call(done, target))
    print(f"opens with   {call}")
    print(f"checked      outputs differ from ours by {done.difference:.2g} at most")
    for note in done.notes:
        print(f"note         {note}")
    if target != "safetensors" and is_repaired():
        print("note         torchvision here is for another build of torch: import vissl_zero before the library.")


def _call(done: Exported, target: str) -> str:
    if target == "detectron2":
        return done.call
    library = {"torchhub": "torch", "onnx": "onnxruntime", "safetensors": "vissl_zero"}.get(target, target)
    imports = "import torch, torchvision" if target == "torchvision" else f"import {library}"
    return f"{imports}; model = {done.call}"


def _card(
    loaded: LoadedTrunk,
    done: Exported,
    source: Source,
    target: str,
    license_name: str,
    weights: Path,
) -> str:
    views, num_classes = source.views, None if source.classifier is None else source.classifier.out_features
    library = {"torchhub": "timm", "safetensors": "vissl_zero"}.get(target, target)
    option = "" if num_classes is None else " --classifier"
    command = f"vissl-zero export {weights} --to {target}{option} --out {done.folder.name}"
    facts = _facts(weights)
    rows = "".join(f"| {key} | {value} |\n" for key, value in facts.items())
    calls = _call(done, target).replace("; ", "\n")
    task = "image-feature-extraction" if num_classes is None else "image-classification"
    gives = f"{loaded.feature_dim} features" if num_classes is None else f"a score for each of {num_classes} classes"
    opened = "again" if target == "detectron2" else f"by {target}"  # detectron2 is not among our packages
    head = f"license: {license_name}\nlibrary_name: {library}\npipeline_tag: {task}\ntags: [vissl_zero]"
    paragraphs = (
        f"---\n{head}\n---\n# {done.folder.name}",
        f"A network that turns an image into {gives}: {loaded.recognized}.",
        f"```python\n{calls}\n```",
        *done.notes,
        f"Images are resized to {views.resize} pixels at the shorter side, cropped to {views.size} x {views.size} in "
        f"the middle, scaled to 0 to 1 and normalized by mean {list(views.mean)} and deviation {list(views.std)} "
        f"(`preprocessor_config.json`).",
        f"Opened {opened}, outputs differ from vissl_zero's by {done.difference:.2g} at most.",
        f"| | |\n| --- | --- |\n| trunk | {loaded.recognized} |\n"
        f"{rows}| written by | vissl_zero {__version__}, `{command}` |",
    )
    return "\n\n".join(paragraphs) + "\n"


def _facts(source: Path) -> dict[str, Any]:
    """Collect recipe, data and results of one of our runs."""
    summary = source / "summary.json"
    if not summary.is_file():
        return {}
    try:
        content = read_object(summary)
    except (OSError, ValueError):
        return {}
    from vissl_zero.resolve.saved import RESOLVED_FILE, read_saved

    facts: dict[str, Any] = {}
    try:
        saved = read_saved(source / RESOLVED_FILE)
        # Runs of other versions may lack a key: the card then has fewer rows.
        facts["recipe"] = saved.get("recipe", "")
        facts["loss"] = saved["config"]["LOSS"]["name"]
        facts["data"] = ", ".join(saved["config"]["DATA"]["TRAIN"]["DATA_SOURCES"])
    except (OSError, ValueError, LookupError, TypeError):
        pass
    return facts | {key: content[key] for key in _FIGURES if content.get(key) is not None}
