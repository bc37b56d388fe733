"""``vissl-zero checkpoint export``: the model as one file for elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vissl_zero.checkpoint.export import NAMES, PARTS
from vissl_zero.checkpoint.export import export as write_export
from vissl_zero.checkpoint.weights import weights_of
from vissl_zero.commands.checkpoint.terminal import Parser, opened, say
from vissl_zero.reporting.quantity import bytes_text

_DESCRIPTION = """\
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
    parser = Parser("export", _DESCRIPTION)
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
