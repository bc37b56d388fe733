"""``vissl-zero checkpoint``: its subcommands inspect, verify, diff, export, import. Nothing in a file is run.

With them, the arguments, tables and texts of ``vissl-zero checkpoint``; text of a file reaches the terminal as plain
text only.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vissl_zero.checkpoint.comparison import TensorDifference, compare, facts_that_differ, settings_that_differ
from vissl_zero.checkpoint.exchange import NAMES, PARTS, write_imported
from vissl_zero.checkpoint.exchange import export as write_export
from vissl_zero.checkpoint.first_weights import match, shapes_of
from vissl_zero.checkpoint.folder import MANIFEST_NAME, Checkpoint, TensorInfo, find_checkpoints, open_checkpoint
from vissl_zero.checkpoint.foreign_layouts import read_foreign
from vissl_zero.checkpoint.weights import WeightsFile, config_of, open_store, open_weights, weights_of
from vissl_zero.commands.arguments import CommandParser, config_dirs, output
from vissl_zero.config.compose import compose
from vissl_zero.config.override_words import recipe_and_overrides, searchpath_override
from vissl_zero.config.run_config import RunConfig
from vissl_zero.errors import CheckpointError, ConfigError, printable
from vissl_zero.reporting.quantity import bytes_text
from vissl_zero.resolve.resolve import resolve
from vissl_zero.resolve.saved import as_data
from vissl_zero.vissl.keys import without_vissl_keys


def verify(arguments: Sequence[str]) -> int:
    """Read every byte against its checksum; 0 if all is complete and undamaged, 1 if not.

    Raises:
        CheckpointError: the path names nothing that could be verified.
    """
    parser = CommandParser(
        prog="vissl-zero checkpoint verify",
        description="Read everything against the checksums: of a run folder, all its checkpoints.\n"
        "Exit codes: 0 complete, 1 incomplete or damaged, 2 an error in your input.",
    )
    parser.add_argument("path", nargs="+", help="run folder, checkpoint folder or safetensors file")
    options = parser.parse_args(arguments)
    is_complete = [_verify(path) for text in options.path for path in _checkpoints_at(Path(text).expanduser())]
    return 0 if all(is_complete) else 1


def _checkpoints_at(path: Path) -> list[Path]:
    """List all checkpoints of a run folder, oldest first; or the one checkpoint or file that ``path`` itself is."""
    if not path.is_dir() or (path / MANIFEST_NAME).exists():
        if path.is_dir() or path.suffix == ".safetensors":
            return [path]
        open_store(path).close()  # raises if it cannot be read
        return [path]
    if checkpoints := find_checkpoints(path)[::-1]:
        return checkpoints
    if path.name.startswith("step_") or any(path.glob("rank*.json")):
        return [path]  # a checkpoint that has lost its manifest
    store = open_store(path)  # the weights of a run folder, or an error that says what to give
    store.close()
    return [store.path]


def _verify(path: Path) -> bool:
    try:
        if path.is_dir():
            with open_checkpoint(path) as checkpoint:
                problems = list(checkpoint.verify())
                num_bytes, what = sum(rank.num_bytes for rank in checkpoint.ranks.values()), "all checksums fit"
        else:
            file = WeightsFile(path)
            try:
                problems = list(file.verify())
            finally:
                file.close()
            num_bytes = sum(info.num_bytes for info in file.tensors.values())
            what = "all checksums fit" if file.has_checksums else "it carries no checksums; its length is right"
    # A checkpoint that cannot be opened is a finding like the others, and those after it are still read.
    except CheckpointError as error:
        problems = [str(error)]
    for problem in problems:
        echo(problem)
    if problems:
        echo(f"INCOMPLETE OR DAMAGED: {path}", style="bold red")
    else:
        echo(f"complete: {path} ({bytes_text(num_bytes)}, {what})")
    return not problems


_MOST_ROWS = 40


def diff(arguments: Sequence[str]) -> int:
    """Print settings and tensors that differ. Return 0 if all tensors are equal, 1 if not.

    Raises:
        ConfigError, CheckpointError: the arguments, or what they name, are wrong.
    """
    parser = CommandParser(
        prog="vissl-zero checkpoint diff",
        description="Settings and tensors that differ; data are read in chunks.\n"
        "Two checkpoints are compared as a whole, anything else by its weights.\n"
        "Exit codes: 0 the tensors are equal, 1 they are not, 2 an error in your input.",
    )
    parser.add_argument("a", metavar="A", help="run folder, checkpoint folder or safetensors file")
    parser.add_argument("b", metavar="B", help="another one, as A")
    parser.add_argument("--tolerance", type=float, default=0.0, help="largest absolute difference to ignore (0)")
    parser.add_argument("--all", action="store_true", help=f"all rows, not only {_MOST_ROWS} of each table")
    options = parser.parse_args(arguments)
    if not options.tolerance >= 0:
        raise ConfigError(f"{parser.prog}: --tolerance must be 0 or more (got {options.tolerance}).")
    a, b = opened(options.a), opened(options.b)
    most = None if options.all else _MOST_ROWS
    try:
        for store in (a, b):
            if problems := list(store.verify()):
                # Damage is not a difference, but would be shown as one.
                raise CheckpointError("\n".join(problems))
        echo(f"A {a.path}\nB {b.path}")
        if isinstance(a, Checkpoint) and isinstance(b, Checkpoint):
            _pairs("", facts_that_differ(a, b), most)
        one, other = (config_of(store).get("config", {}) for store in (a, b))
        if isinstance(one, Mapping) and isinstance(other, Mapping) and one and other:
            _pairs("config.", settings_that_differ(one, other), most)
        differences = [entry for entry in compare(a, b) if not _is_within(entry, options.tolerance)]
    finally:
        a.close()
        b.close()
    return _report(differences, options.tolerance, most)


def _is_within(entry: TensorDifference, tolerance: float) -> bool:
    return entry.largest is not None and entry.largest <= tolerance


def _pairs(prefix: str, pairs: Mapping[str, tuple[object, object]], most: int | None) -> None:
    if pairs:
        echo("")
        rows = [(prefix + key, one, other) for key, (one, other) in pairs.items()]
        table(rows[:most], ("setting" if prefix else "", "A", "B"))
        _rest(len(rows), most)


def _report(differences: list[TensorDifference], tolerance: float, most: int | None) -> int:
    within = f" within {tolerance:g}" if tolerance else ""
    if not differences:
        echo(f"\nAll tensors are equal{within}.")
        return 0
    echo("")
    # Tensors that cannot be subtracted come first: one is missing, or has another shape.
    worst_first = sorted(
        differences, key=lambda entry: (entry.largest is not None, -(entry.largest or 0.0), entry.name)
    )
    rows = [
        (entry.name, entry.what, entry.text, "" if entry.largest is None else f"{entry.largest:.3g}")
        for entry in worst_first
    ]
    table(rows[:most], ("tensor", "differs in", "", "largest difference"), right=(3,))
    _rest(len(rows), most)
    names = {entry.name for entry in differences}
    echo(f"\n{len(names)} tensors differ{within}." if len(names) != 1 else f"\n1 tensor differs{within}.")
    return 1


def _rest(num_rows: int, most: int | None) -> None:
    if most is not None and num_rows > most:
        echo(f"... and {num_rows - most} more; --all lists them.")


_KINDS = {
    "model": "parameters",
    "buffer": "buffers",
    "average": "running average of parameters",
    "teacher": "parameters of the teacher",
    "optimizer": "optimizer state",
    "criterion": "state of the loss",
    "extra": "extra of optimizer.save()",
    "of_rank": "of single ranks",
}


def inspect(arguments: Sequence[str]) -> int:
    """Print the contents and return 0. Reads headers and manifests, not the data."""
    parser = CommandParser(
        prog="vissl-zero checkpoint inspect", description="Contents of a checkpoint. Reads the manifests, not the data."
    )
    parser.add_argument("path", help="run folder, checkpoint folder or safetensors file")
    parser.add_argument("--tensors", action="store_true", help="list every tensor")
    parser.add_argument("--config", action="store_true", help="list every setting, those at their defaults too")
    options = parser.parse_args(arguments)
    store = opened(options.path)
    try:
        _facts(store)
        _bytes(store)
        _settings(store, options.config)
        if options.tensors:
            _tensors(store.tensors.values())
        else:
            echo(f"\n{len(store.tensors)} tensors; --tensors lists them.")
    finally:
        store.close()
    return 0


def _facts(store: Checkpoint | WeightsFile) -> None:
    if isinstance(store, WeightsFile):
        table([("weights", store.path), *store.metadata.items()])
        return
    m = store.manifest
    ranks = "1 process" if m.world_size == 1 else f"{m.world_size} processes"
    images = f"{m.position} images in all, {m.epoch_samples} of epoch {m.epoch}, {m.global_batch} per step"
    rows: list[tuple[str, object]] = [
        ("checkpoint", store.path),
        ("recipe", m.recipe),
        ("step", m.step),
        ("images", images),
        ("sharding", f"ZeRO level {m.level}, {m.engine} engine, {ranks}"),
        ("written", f"{m.created} by vissl_zero {m.vissl_zero}, torch {m.torch}"),
    ]
    if m.loss_scale is not None:
        rows.append(("loss scale", m.loss_scale.get("scale")))
    rows += [(name, value) for name, value in m.results.items() if isinstance(value, (int, float, str))]
    table(rows)


def _bytes(store: Checkpoint | WeightsFile) -> None:
    sums: dict[str, list[int]] = {}
    for name, info in store.tensors.items():
        kind = _KINDS.get(name.split("/")[0], "other") if isinstance(store, Checkpoint) else "weights"
        if kind == "optimizer state":
            kind = f"optimizer: {name.split('/')[1]}"
        entry = sums.setdefault(kind, [0, 0, 0])
        for index, amount in enumerate((1, info.num_elements, info.num_bytes)):
            entry[index] += amount
    total = [sum(entry[index] for entry in sums.values()) for index in range(3)]
    rows = [(kind, *entry[:2], bytes_text(entry[2])) for kind, entry in [*sums.items(), ("in all", total)]]
    echo("")
    table(rows, ("kind", "tensors", "elements", "size"), right=(1, 2, 3))
    if isinstance(store, Checkpoint) and len(store.ranks) > 1:
        parts = ", ".join(f"{stem} {bytes_text(rank.num_bytes)}" for stem, rank in list(store.ranks.items())[:8])
        echo(f"files: {parts}{', ...' if len(store.ranks) > 8 else ''}")


def _settings(store: Checkpoint | WeightsFile, is_all: bool) -> None:
    config = config_of(store).get("config")
    if not isinstance(config, Mapping) or not config:
        return
    defaults: dict[str, Any] = {} if is_all else without_vissl_keys(asdict(RunConfig()))
    differing = settings_that_differ(defaults, config)
    # A key that came after this checkpoint is missing in it ("-"), and was not set.
    rows = [(f"config.{key}", value) for key, (_, value) in differing.items() if value != "-"]
    echo("\nSettings:" if is_all else "\nSettings other than the defaults:")
    table(rows)


def _tensors(infos: Iterable[TensorInfo]) -> None:
    rows = [(i.name, str(i.dtype).removeprefix("torch."), list(i.shape), bytes_text(i.num_bytes)) for i in infos]
    echo("")
    table(rows, ("tensor", "type", "shape", "size"), right=(3,))


def console() -> Console:
    """Make a console as wide as the terminal, or as the text in a file or pipe."""
    # Rich assumes 80 columns where there is no terminal, and would fold names that a script looks for.
    return Console(highlight=False, width=None if sys.stdout.isatty() else 200, soft_wrap=False)


def table(rows: Iterable[Sequence[object]], titles: Sequence[str] = (), right: Sequence[int] = ()) -> None:
    """Print rows in columns.

    Args:
        rows: cells; anything.
        titles: titles of the columns; none: no header.
        right: columns to align to the right.
    """
    cells = [[printable(cell) for cell in row] for row in rows]
    result = Table(box=None, pad_edge=False, show_header=bool(titles))
    for index in range(max((len(row) for row in cells), default=len(titles))):
        title = titles[index] if index < len(titles) else ""
        # Rich would cut a long name and end it with dots; names are copied from here.
        result.add_column(title, justify="right" if index in right else "left", overflow="fold")
    for row in cells:
        # As ``Text``, because brackets in the names of a foreign file would be markup of Rich.
        result.add_row(*map(Text, row))
    console().print(result)


def echo(text: object, style: str = "") -> None:
    """Print one line of text, whatever is in it."""
    console().print(Text(printable(text), style=style))


def opened(path: str) -> Checkpoint | WeightsFile:
    """Open what ``path`` names, after saying which newer checkpoints do not open."""
    passed_over: list[str] = []
    store = open_store(path, passed_over)
    for reason in passed_over:
        echo(f"passed over: {reason}")
    return store


_EXPORT = """\
Write the model of a checkpoint as one file, one tensor in memory at a time. Data are checked against their checksums
first. The ending of FILE decides the format: .safetensors, or .pt, .pth, .torch for a plain torch state dict (which
torch.load(FILE, weights_only=True) reads).

Into torchvision's own model:
  vissl-zero checkpoint export runs/mine --part trunk --names torchvision --to resnet50.pt
  model = torchvision.models.resnet50(); model.fc = torch.nn.Identity()
  model.load_state_dict(torch.load("resnet50.pt", weights_only=True), strict=True)
A head that is one linear layer becomes the classifier (fc) with --part model.

Into a folder that transformers' Dinov2Model or ViTModel reads (with a config.json of the same sizes beside it):
  vissl-zero checkpoint export runs/mine --part trunk --names hugging_face --to mine/model.safetensors
"""


def export(arguments: Sequence[str]) -> int:
    """Write the file and say what is in it. Return 0.

    Raises:
        ConfigError, CheckpointError: the arguments, or what they name, are wrong.
    """
    parser = CommandParser(prog="vissl-zero checkpoint export", description=_EXPORT)
    parser.add_argument("path", help="run folder, checkpoint folder or safetensors file")
    parser.add_argument("--to", required=True, type=output, metavar="FILE", help="file to write")
    parser.add_argument("--part", choices=PARTS, default="model", help="trunk and heads (model), or one of them")
    parser.add_argument("--names", choices=NAMES, default="own", help="whose names (own)")
    parser.add_argument(
        "--average", action="store_true", help="the running average of the weights (HOOKS.EMA_MODEL, vissl_zero.ema)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace FILE if it exists")
    options = parser.parse_args(arguments)
    with weights_of(opened(options.path), "average" if options.average else "student") as weights:
        done = write_export(weights, options.to, options.part, options.names, options.overwrite)
        echo(f"{weights.path} -> {done.path}: {len(done.names)} tensors, {bytes_text(done.num_bytes)}")
    if done.left_out:
        names = ", ".join(done.left_out[:5]) + (" ..." if len(done.left_out) > 5 else "")
        echo(f"Left out, since {options.names} has no name for them: {names}")
    return 0


_IMPORT = """\
Read weights of VISSL (consolidated, or the file that lists shards or slices), a torch state dict or safetensors, under
VISSL's, classy-vision's, torchvision's, timm's, torch hub's (DINO, DINOv2, iBOT, MAE), Hugging Face's (ViT, ViTMAE,
DINOv2) or our names, and write them under ours. Nothing in a file is run: one that holds more than data is refused.

  vissl-zero checkpoint import swav_in1k.torch --to s.safetensors
  vissl-zero config=benchmark/linear config.MODEL.WEIGHTS_INIT.PARAMS_FILE=s.safetensors config.MODEL.TRUNK.NAME=resnet

With a recipe (or --like) names and shapes are compared with that model's; what does not match is listed, and nothing is
written if the trunk is not complete (exit code 1), unless --partial is given. Without one, nothing is written if fewer
than half of the tensors have a name that is understood (exit code 2), unless --partial is given (exit code 1):
  vissl-zero checkpoint import swav_in1k.torch --to swav.safetensors config=pretrain/swav/cifar10 config.MODEL.TRUNK...

A folder as OUT becomes a run to resume: with the same recipe and config.CHECKPOINT.DIR=OUT, from the file's step and
with its momentum, as far as the file says whose that is (consolidated checkpoints of training).
"""


def import_(arguments: Sequence[str]) -> int:
    """Write the matching tensors and report the others. Return 0, or 1 if the trunk is incomplete.

    Raises:
        ConfigError, CheckpointError: the arguments, or what they name, are wrong.
    """
    parser = CommandParser(prog="vissl-zero checkpoint import", description=_IMPORT)
    parser.add_argument("source", help="file to read")
    parser.add_argument(
        "words", nargs="*", metavar="config=...", help="recipe and overrides of the model to compare with"
    )
    parser.add_argument(
        "--to", required=True, type=output, metavar="OUT", help="a .safetensors file; or a checkpoint's folder"
    )
    parser.add_argument("--like", metavar="PATH", help="run folder, checkpoint or weights of the model to compare with")
    parser.add_argument("--key", default="", help="where a torch file holds the state dict, such as model.encoder")
    parser.add_argument("--remove-prefix", default="", metavar="TEXT", help="remove this prefix from tensor names")
    parser.add_argument("--partial", action="store_true", help="write what matches even if the trunk is incomplete")
    parser.add_argument("--overwrite", action="store_true", help="replace OUT if the file exists")
    # Flags may stand between the words of a recipe.
    rest, folders = config_dirs(arguments)
    options = parser.parse_intermixed_args(rest)
    if options.like and options.words:
        raise ConfigError(f"{parser.prog}: give a recipe or --like, not both.")
    shapes, config = _target(
        parser.prog, [*searchpath_override(folders), *options.words] if options.words else [], options.like
    )
    foreign = read_foreign(Path(options.source).expanduser(), options.key)
    matched = match(foreign, shapes, options.remove_prefix)
    for reason in foreign.passed_over:
        echo(f"passed over: {reason}")
    echo(f"{options.source}: {foreign.layout}, {len(foreign.entries)} tensors")
    for sentence in matched.sentences():
        echo(sentence)
    if not matched.entries:
        raise CheckpointError(
            f"{options.source}: no tensor has a name or shape that is understood; nothing was written."
        )
    incomplete = matched.lacks("trunk")
    is_understood = shapes is not None or 2 * len(matched.entries) >= len(foreign.entries)
    if incomplete and not options.partial:
        count = f"{len(matched.entries)} of {len(foreign.entries)} tensors fit, and the trunk lacks {len(incomplete)}"
        echo(f"Not written: {count}. --partial writes the rest all the same.")
        return 1
    if not is_understood and not options.partial:
        raise CheckpointError(
            f"{options.source}: only {len(matched.entries)} of {len(foreign.entries)} tensors have a name that is "
            "understood; nothing was written. Name a recipe or --like for the model they are of, --key or "
            "--remove-prefix for their place, or --partial to write these few all the same."
        )
    path, about_optimizer = write_imported(matched, foreign, options.to, config, options.overwrite)
    if about_optimizer:
        echo(about_optimizer)
    echo(f"-> {path}: {len(matched.entries)} tensors, {bytes_text(sum(entry.num_bytes for entry in matched.entries))}")
    return 1 if incomplete or not is_understood else 0


def _target(
    program: str, words: Sequence[str], like: str | None
) -> tuple[Mapping[str, Sequence[int]] | None, dict[str, Any]]:
    """Return the shapes of the model to compare with, and the run it is of, where they are known."""
    if like:
        with open_weights(like) as weights:
            return {name: info.shape for name, info in weights.tensors.items()}, {}
    if not words:
        return None, {}
    recipe, overrides = recipe_and_overrides(words)
    if recipe is None:
        raise ConfigError(f"{program}: {words[0]!r} is neither a recipe (config=<recipe>) nor an override of one.")
    composed = compose(recipe, overrides)
    plan = resolve(composed.run, Path.cwd(), recipe=recipe, written=composed.written)
    return shapes_of(plan.config.MODEL), as_data(plan)
