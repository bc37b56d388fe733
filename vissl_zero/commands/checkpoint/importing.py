"""``vissl-zero checkpoint import | export``: weights from elsewhere and for elsewhere; nothing in a file is run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vissl_zero.checkpoint.export import NAMES, PARTS
from vissl_zero.checkpoint.export import export as write_export
from vissl_zero.checkpoint.first_weights import match, shapes_of
from vissl_zero.checkpoint.foreign_layouts import read_foreign
from vissl_zero.checkpoint.import_weights import write_imported
from vissl_zero.checkpoint.weights import open_weights, weights_of
from vissl_zero.commands.checkpoint.inspection import Parser, opened, say
from vissl_zero.config.compose import compose
from vissl_zero.config.resolve import resolve
from vissl_zero.config.saved import as_data
from vissl_zero.errors import CheckpointError, ConfigError
from vissl_zero.reporting.quantity import bytes_text

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
    """Write the file and say what is in it; returns 0.

    Raises:
        ConfigError, CheckpointError: the arguments, or what they name, are wrong.
    """
    parser = Parser("export", _EXPORT)
    parser.add_argument("path", help="run folder, checkpoint folder or safetensors file")
    parser.add_argument("--to", required=True, metavar="FILE", help="file to write")
    parser.add_argument("--part", choices=PARTS, default="model", help="trunk and heads (model), or one of them")
    parser.add_argument("--names", choices=NAMES, default="own", help="whose names (own)")
    parser.add_argument("--average", action="store_true", help="the running average of the weights (HOOKS.EMA_MODEL)")
    parser.add_argument("--overwrite", action="store_true", help="replace FILE if it exists")
    options = parser.parse_args(arguments)
    with weights_of(opened(options.path), "average" if options.average else "student") as weights:
        done = write_export(weights, Path(options.to), options.part, options.names, options.overwrite)
        say(f"{weights.path} -> {done.path}: {len(done.names)} tensors, {bytes_text(done.num_bytes)}")
    if done.left_out:
        names = ", ".join(done.left_out[:5]) + (" ..." if len(done.left_out) > 5 else "")
        say(f"Left out, since {options.names} has no name for them: {names}")
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
    """Write what matched and say what did not; 0, or 1 if the trunk is not complete.

    Raises:
        ConfigError, CheckpointError: the arguments, or what they name, are wrong.
    """
    parser = Parser("import", _IMPORT)
    parser.add_argument("source", help="file to read")
    parser.add_argument(
        "words", nargs="*", metavar="config=...", help="recipe and overrides of the model to compare with"
    )
    parser.add_argument("--to", required=True, metavar="OUT", help="a .safetensors file; or a folder, for a checkpoint")
    parser.add_argument("--like", metavar="PATH", help="run folder, checkpoint or weights of the model to compare with")
    parser.add_argument("--key", default="", help="where a torch file holds the state dict, such as model.encoder")
    parser.add_argument("--remove-prefix", default="", metavar="TEXT", help="taken off the names that begin with it")
    parser.add_argument("--partial", action="store_true", help="write what matches even if the trunk is not complete")
    parser.add_argument("--overwrite", action="store_true", help="replace OUT if it is a file that exists")
    options = parser.parse_intermixed_args(arguments)
    if options.like and options.words:
        raise ConfigError(f"{parser.prog}: give a recipe or --like, not both.")
    shapes, config = _target(parser.prog, options.words, options.like)
    foreign = read_foreign(Path(options.source).expanduser(), options.key)
    found = match(foreign, shapes, options.remove_prefix)
    for reason in foreign.passed_over:
        say(f"passed over: {reason}")
    say(f"{options.source}: {foreign.layout}, {len(foreign.entries)} tensors")
    for sentence in found.sentences():
        say(sentence)
    if not found.entries:
        raise CheckpointError(
            f"{options.source}: no tensor has a name or shape that is understood; nothing was written."
        )
    incomplete = found.lacks("trunk")
    is_understood = shapes is not None or 2 * len(found.entries) >= len(foreign.entries)
    if incomplete and not options.partial:
        count = f"{len(found.entries)} of {len(foreign.entries)} tensors fit, and the trunk lacks {len(incomplete)}"
        say(f"Not written: {count}. --partial writes the rest all the same.")
        return 1
    if not is_understood and not options.partial:
        raise CheckpointError(
            f"{options.source}: only {len(found.entries)} of {len(foreign.entries)} tensors have a name that is "
            "understood; nothing was written. Name a recipe or --like for the model they are of, --key or "
            "--remove-prefix for their place, or --partial to write these few all the same."
        )
    path, about_optimizer = write_imported(found, foreign, Path(options.to).expanduser(), config, options.overwrite)
    if about_optimizer:
        say(about_optimizer)
    say(f"-> {path}: {len(found.entries)} tensors, {bytes_text(sum(entry.num_bytes for entry in found.entries))}")
    return 1 if incomplete or not is_understood else 0


def _target(
    program: str, words: Sequence[str], like: str | None
) -> tuple[Mapping[str, Sequence[int]] | None, dict[str, Any]]:
    """Shapes of the model to compare with, and the run it is of, where they are known."""
    if like:
        with open_weights(like) as weights:
            return {name: info.shape for name, info in weights.tensors.items()}, {}
    if not words:
        return None, {}
    recipe = next((word.removeprefix("config=") for word in words if word.startswith("config=")), None)
    if recipe is None:
        raise ConfigError(f"{program}: {words[0]!r} is neither a recipe (config=<recipe>) nor an override of one.")
    composed = compose(recipe, [word for word in words if not word.startswith("config=")])
    plan = resolve(composed.run, Path.cwd(), recipe=recipe, written=composed.written)
    return shapes_of(plan.config["MODEL"]), as_data(plan)
