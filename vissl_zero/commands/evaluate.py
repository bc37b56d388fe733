"""``vissl-zero evaluate`` and ``vissl-zero embed``: weights of any origin on a folder of images, without a recipe.

Both are runs of ``benchmark/evaluate`` and ``benchmark/embed`` in a process of their own, so they shard, offload and
spread over ranks as every run does: ``config.ZERO.LEVEL=3`` and other overrides are passed on.
"""

from __future__ import annotations

import csv
import json
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vissl_zero.atomic import read_object, replacing
from vissl_zero.commands.arguments import CommandParser, output_file, writing
from vissl_zero.commands.temporary_run import run_in
from vissl_zero.config.override_words import as_word
from vissl_zero.config.weights_name import absolute, scheme_of
from vissl_zero.errors import ConfigError, DataError, counted, printable
from vissl_zero.lifetime import Scratch
from vissl_zero.resolve.data_plan import names_like

if TYPE_CHECKING:
    from vissl_zero.evaluation.feature_files import ExtractedFeatures

_WEIGHTS = (
    "run folder, file, folder of transformers or timm, timm:<name>, hf:<repo>, torchvision:<name> or torchhub:<name>"
)
_OF_PROBES = ("knn_top1", "knn_k", "knn_temperature", "linear_top1", "linear_penalty", "linear_protocol")
_OF_DATA = ("num_features", "image_size", "num_train", "num_val", "skipped", "recognized")
_FIGURES = (*_OF_PROBES, "linear_by_class", "rankme", *_OF_DATA)
_MOST_CLASSES = 5  # most classes to print
_ENDINGS = (".npz", ".csv", ".parquet", ".safetensors")
_VALIDATION = ("val", "test")


def evaluate(arguments: Sequence[str]) -> int:
    """Measure weights on class folders and print a table or JSON. Return 0, or the exit code of the run that failed.

    Raises:
        ConfigError, DataError: the arguments, or the folder, are wrong.
    """
    parser = CommandParser(
        prog="vissl-zero evaluate",
        description="kNN, a linear probe and RankMe of weights on class folders; nothing is trained. Exit codes: 0 "
        "done, 2 an error in your input, 1 a crash. Further config.<key>=<value> are passed to the run "
        "(benchmark/evaluate).",
    )
    parser.add_argument("weights", nargs="+", help=_WEIGHTS)
    parser.add_argument("--data", required=True, metavar="FOLDER", help="holds train/ and val/ with class folders")
    parser.add_argument(
        "--json", action="store_true", help="print JSON alone on stdout: an object, or a list of several"
    )
    parser.add_argument("--quiet", action="store_true", help="print nothing of the run on stderr but notes and errors")
    # argparse would take overrides for further weights.
    options = parser.parse_args(_without_overrides(arguments))
    train, val = _splits(_existing("--data", options.data))
    for name in options.weights:
        # All of them first: a misspelled name must not end the command after an hour.
        _require_weights(name)
    rows = []
    for name in options.weights:
        words = ["config=benchmark/evaluate", _word("DATA.TRAIN.DATA_PATHS", train), _word("DATA.TEST.DATA_PATHS", val)]
        with Scratch() as folder:
            code, results = _run(name, [*words, *_overrides(arguments)], folder, options.quiet)
        if code:
            return code
        rows.append({"weights": name} | {key: results[key] for key in _FIGURES})
    if options.json:
        print(json.dumps(rows[0] if len(rows) == 1 else rows, indent=2))
    else:
        _table(rows)
    return 0


def _splits(folder: Path) -> tuple[Path, Path]:
    must = f"--data {folder}: must be a folder that holds train/ and val/, each with a folder for each class"
    if not folder.is_dir():
        raise DataError(f"{must}, and is a file. Name the folder above these.")
    val = next((folder / name for name in _VALIDATION if (folder / name).is_dir()), None)
    if not (folder / "train").is_dir() or val is None:
        names = sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))
        holds = f"holds {', '.join(names[:6])}{', ...' * (len(names) > 6)}" if names else "is empty"
        fix = "Name the folder above these, or sort your images into both."
        raise DataError(f"{must}, and {holds}. {fix}")
    return folder / "train", val


def _table(rows: Sequence[dict[str, Any]]) -> None:
    first = rows[0]
    table = Table(box=None, pad_edge=False)
    knn = f"kNN (k={first['knn_k']}, T={first['knn_temperature']})"
    for title in ("weights", knn, "linear", "RankMe", "features", "recognized as"):
        table.add_column(title, justify="left" if title in ("weights", "recognized as") else "right", overflow="fold")
    for row in rows:
        figures = (f"{row['knn_top1']:.1%}", f"{row['linear_top1']:.1%}", f"{row['rankme']:.1f}", row["num_features"])
        table.add_row(*(Text(str(cell)) for cell in (row["weights"], *figures, row["recognized"])))
    # Rich assumes 80 columns where there is no terminal.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 200)
    console.print(table)
    sizes = ", ".join(dict.fromkeys(f"{row['image_size']}" for row in rows))
    text = f"\nTop-1 on {first['num_val']} images after {first['num_train']} of train, {sizes} pixels a side. "
    console.print(Text(text), end="")
    console.print(Text(f"Linear: {first['linear_protocol']}."))
    for row in rows:
        if hardest := _hardest(row["linear_by_class"]):
            console.print(Text(f"Hardest for the linear probe of {row['weights']}: {hardest}."))
    if first["skipped"]:
        console.print(Text(f"broken and left out: {printable(', '.join(first['skipped']))}"))


def _hardest(classes: dict[str, dict[str, Any]]) -> str:
    """List the classes with the lowest accuracy below 1, each with the class with which it is most often confused."""
    wrong = sorted((name for name in classes if classes[name]["taken_for"]), key=lambda name: classes[name]["top1"])
    return ", ".join(
        f"{printable(name)} {classes[name]['top1']:.1%} (taken for {printable(classes[name]['taken_for'])}: "
        f"{classes[name]['num_taken']} of {classes[name]['num_images']})"
        for name in wrong[:_MOST_CLASSES]
    )


def embed(arguments: Sequence[str]) -> int:
    """Write features and names of the images in a folder. Return 0, or the exit code of the run that failed.

    Raises:
        ConfigError, DataError: the arguments, or the folder, are wrong.
    """
    parser = CommandParser(
        prog="vissl-zero embed",
        description="Features of all images in a folder and the folders in it, with their names (paths below the "
        "folder), as arrays features (N, F) and names (N,). Images are resized to the size that the weights were made "
        "for, and normalized as they expect; both are printed. config.DATA.IMG_SIZE=224 chooses another size: time "
        "grows with its square. Further config.<key>=<value> are passed to the run (benchmark/embed).",
    )
    parser.add_argument("weights", help=_WEIGHTS)
    parser.add_argument("folder", help="images, or folders of them")
    parser.add_argument(
        "--out", required=True, type=output_file, metavar="FILE", help=f"ends in one of {', '.join(_ENDINGS)}"
    )
    parser.add_argument("--quiet", action="store_true", help="print nothing of the run on stderr but errors")
    options = parser.parse_args(_without_overrides(arguments))
    out = options.out
    if out.suffix not in _ENDINGS:
        raise ConfigError(f"--out {out}: the ending decides the format, and must be one of {', '.join(_ENDINGS)}.")
    folder = _existing("folder", options.folder)
    if not folder.is_dir():
        raise DataError(f"{folder}: must be a folder with images, not a file. The weights come first, then the folder.")
    if out.suffix == ".parquet":
        _require_pyarrow()
    _require_weights(options.weights)
    _require_writable(out)  # before the work, not after it
    words = ["config=benchmark/embed", _word("DATA.TRAIN.DATA_PATHS", folder), *_overrides(arguments)]
    with Scratch() as run_folder:
        code, _ = _run(options.weights, words, run_folder, options.quiet)
        if not code:
            written = _write(run_folder, folder, out)
            print(f"{out}: {counted(len(written.images), 'image')}, {written.rows.shape[1]} features each")
            if written.skipped:
                print(f"broken and left out: {printable(', '.join(written.skipped))}")
    return code


def _require_weights(name: str) -> None:
    if not scheme_of(name):
        _existing("weights", name)


def _existing(what: str, name: str) -> Path:
    """Return the path of an argument; a missing path is refused with similar names in its folder."""
    if not name:
        raise ConfigError(f"{what}: must be a path, and is empty. A variable of your shell may be unset.")
    path = Path(name).expanduser()
    if not path.exists():
        hint = names_like(path.parent, path.name) or " Correct the path."
        raise DataError(f"{path}: there is no such file or folder.{hint}")
    return path


def _require_pyarrow() -> None:
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError as error:
        raise ConfigError("--out .parquet needs pyarrow: pip install 'vissl-zero[export]', or write .npz.") from error


def _require_writable(out: Path) -> None:
    with writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        # A byte is written, because permissions do not tell of a full disk, or of one that is read-only.
        with tempfile.TemporaryFile(dir=out.parent) as file:
            file.write(b"0")


def _write(run_folder: Path, images: Path, out: Path) -> ExtractedFeatures:
    """Write the features of a run to one file and return them."""
    import numpy as np

    from vissl_zero.evaluation.feature_files import read_features

    features = read_features(run_folder)
    rows = features.rows.numpy()
    names = [os.path.relpath(name, images.absolute()) for name in features.images]
    with writing(out), replacing(out) as temporary:
        if out.suffix == ".npz":
            # Through an open file: given a path, numpy appends .npz to the temporary name.
            with temporary.open("wb") as file:
                np.savez(file, features=rows, names=np.array(names))
        elif out.suffix == ".safetensors":
            from safetensors.torch import save_file

            # safetensors holds tensors alone, so the names go into its metadata, whose values must be texts.
            save_file({"features": features.rows.contiguous()}, temporary, {"names": json.dumps(names)})
        elif out.suffix == ".csv":
            with temporary.open("w", newline="", encoding="utf-8", errors="backslashreplace") as table:
                writer = csv.writer(table)
                writer.writerow(["name", *range(rows.shape[1])])
                # As text, because Python's own numbers would print float32 with the digits of float64.
                writer.writerows([name, *map(str, row)] for name, row in zip(names, rows, strict=True))
        else:
            import pyarrow as arrow
            import pyarrow.parquet as parquet

            columns = arrow.FixedSizeListArray.from_arrays(arrow.array(rows.ravel()), rows.shape[1])
            texts = [os.fsencode(name).decode("utf-8", "backslashreplace") for name in names]  # Parquet needs UTF-8
            parquet.write_table(arrow.table({"name": texts, "features": columns}), temporary)
    return features


_OVERRIDE = re.compile(r"[+]{0,2}(config|hydra)[./\w@]*=|~(config|hydra)[./]")  # a file may be called config.pth


def _overrides(arguments: Sequence[str]) -> list[str]:
    return [word for word in arguments if _OVERRIDE.match(word)]


def _without_overrides(arguments: Sequence[str]) -> list[str]:
    return [word for word in arguments if word not in _overrides(arguments)]


def _word(key: str, path: Path) -> str:
    return f"config.{key}={as_word([path.absolute()])}"


def _run(weights: str, words: Sequence[str], folder: Path, is_quiet: bool) -> tuple[int, dict[str, Any]]:
    """Run an evaluation, and print its output on stderr. Return its exit code and its results."""
    init = f"config.MODEL.WEIGHTS_INIT.PARAMS_FILE={as_word(absolute(weights))}"
    code = run_in(folder, [*words, init], is_quiet)
    return (code, {}) if code else (0, read_object(folder / "summary.json"))
