"""Public models with random weights: in without a hint, out to a library, and in again with the same bits.

    python benchmarks/public_models.py [<part of a name> ...] [--write]

Each file is as its library writes it; layouts of DINO, DINOv2, DINOv3, MAE, MoCo v3 and SwAV are written by hand from
their published names. ``vissl-zero export`` writes the folder, and the target library opens it with its own call.
Features of our trunk and of the target are compared with those of the library that wrote the file, at two image sizes
if that library takes another than its own. A difference is relative to the largest feature, if that is above 1. Exits
with 1 if a model fails.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import vissl_zero  # before timm, which needs operations of torchvision

import timm  # isort: skip
import torch
import torchvision
import transformers
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.unit.weights.test_recognition import (
    HF,
    SIZES,
    images,
    in_dinov3s_names,
    plain_transformer,
    randomized,
    resized_as_in_dinov2,
    without_classifier,
)
from vissl_zero.cli import main as command_line
from vissl_zero.evaluation.trunk import LoadedTrunk

TOLERANCE = 1e-5
_TABLE = Path(__file__).with_suffix(".md")
Features = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Written:
    """A model in its library's form.

    Attributes:
        path: file or folder of the weights.
        features: of the library's own model.
    """

    path: Path
    features: Features


@dataclass(frozen=True)
class Model:
    """A model to send through.

    Attributes:
        write: writes its weights into a folder.
        target: of ``vissl-zero export``.
        sides: of the images, in pixels.
        one_size_there: why the target's features are compared at the first size alone.
    """

    write: Callable[[Path], Written]
    target: str
    sides: tuple[int, int] = (224, 160)
    one_size_there: str = ""


def _of_timm(name: str, folder: Path) -> Written:
    try:
        net = timm.create_model(name, dynamic_img_size=True)
    except TypeError:
        net = timm.create_model(name)
    randomized(net)
    torch.save(net.state_dict(), folder / "in.pth")
    net.reset_classifier(0, **({"global_pool": "token"} if "dinov3" in name else {}))
    return Written(folder / "in.pth", net)


def _of_torchvision(name: str, folder: Path) -> Written:
    net = randomized(torchvision.models.get_model(name))
    torch.save(net.state_dict(), folder / "in.pth")
    return Written(folder / "in.pth", without_classifier(net))


def _of_transformers(build: Callable[[], nn.Module], folder: Path) -> Written:
    net: Any = randomized(build())
    (folder / "in").mkdir()
    net.save_pretrained(folder / "in")
    options = {"interpolate_pos_encoding": True} if isinstance(net, transformers.ViTModel) else {}

    def features(x: Tensor) -> Tensor:
        found = net(x, **options)
        pooled: Tensor = found.last_hidden_state[:, 0] if found.last_hidden_state.ndim == 3 else found.pooler_output
        return pooled.flatten(1)

    return Written(folder / "in", features)


def _by_hand(
    wrap: Callable[[dict[str, Tensor]], Any], is_resized_by_hub: bool, folder: Path, **options: Any
) -> Written:
    net = plain_transformer(**options)
    torch.save(wrap(dict(net.state_dict())), folder / "in.pth")
    return Written(folder / "in.pth", resized_as_in_dinov2(net, **options) if is_resized_by_hub else net)


def _dinov2(registers: int, folder: Path) -> Written:
    """Write facebookresearch/dinov2's names: a mask token, and with registers a position of the class token."""
    net = plain_transformer(init_values=1.0, reg_tokens=registers, no_embed_class=registers > 0)
    state = dict(net.state_dict()) | {"mask_token": torch.zeros(1, 192)}
    if registers:
        state["register_tokens"] = state.pop("reg_token")
        state["pos_embed"] = torch.cat([torch.zeros(1, 1, 192), state["pos_embed"]], dim=1)
    torch.save(state, folder / "in.pth")
    return Written(folder / "in.pth", resized_as_in_dinov2(net, init_values=1.0, reg_tokens=registers))


def _dinov2_training(folder: Path) -> Written:
    """Write a checkpoint of dinov2's own training: student and teacher, with their heads."""

    def wrap(state: dict[str, Tensor]) -> Any:
        teacher = {f"teacher.backbone.{name}": tensor for name, tensor in state.items()}
        student = {f"student.backbone.{name}": 0 * tensor for name, tensor in state.items()}
        return {"model": student | teacher | {"teacher.dino_head.last_layer.weight": torch.ones(3, 3)}, "iteration": 7}

    return _by_hand(wrap, True, folder, init_values=1.0)


def _dinov3(folder: Path) -> Written:
    """Write facebookresearch/dinov3's names; the number of heads is in no tensor, so it stands beside the file."""
    net: Any = randomized(HF["gated dinov3"]())
    state = {name: tensor.contiguous() for name, tensor in in_dinov3s_names(net).items()}
    (folder / "in").mkdir()
    torch.save(state, folder / "in" / "pytorch_model.bin")
    (folder / "in" / "config.json").write_text(json.dumps({"num_attention_heads": SIZES["num_attention_heads"]}))
    return Written(folder / "in", lambda x: net(x).last_hidden_state[:, 0])


def _teacher(state: dict[str, Tensor]) -> Any:
    student = {f"module.backbone.{name}": 0 * tensor for name, tensor in state.items()}
    return {"student": student, "teacher": {f"backbone.{name}": t for name, t in state.items()}, "epoch": 3}


def _mae(state: dict[str, Tensor]) -> Any:
    decoder = {"decoder_embed.weight": torch.ones(8, 192), "decoder_pos_embed": torch.ones(1, 17, 8)}
    return {"model": state | decoder | {"mask_token": torch.ones(1, 1, 8)}, "epoch": 799}


def _moco(state: dict[str, Tensor]) -> Any:
    base = {f"module.base_encoder.{name}": 0 * tensor for name, tensor in state.items()}
    return {"state_dict": base | {f"module.momentum_encoder.{name}": tensor for name, tensor in state.items()}}


def _swav(folder: Path) -> Written:
    net = randomized(torchvision.models.resnet50())
    state = {f"module.{name}": tensor for name, tensor in net.state_dict().items() if not name.startswith("fc.")}
    torch.save(state | {"module.prototypes.weight": torch.ones(3, 128)}, folder / "in.pth")
    return Written(folder / "in.pth", without_classifier(net))


_HUB_RESIZES = "timm resizes positions in another way than DINO's and DINOv2's hubs"
_TIMM = (
    *("vit_tiny_patch16_224", "deit3_small_patch16_224", "vit_base_patch32_clip_224", "beit_base_patch16_224"),
    *("vit_tiny_patch16_dinov3_qkvb", "vit_small_patch16_dinov3", "convnext_atto"),
    *("convnext_tiny", "convnextv2_atto", "swin_tiny_patch4_window7_224", "swinv2_cr_tiny_ns_224", "resnet18"),
    *("resnet26d", "resnet50", "resnext50_32x4d", "regnetx_002", "regnety_002", "efficientnet_b0"),
    *("tf_efficientnetv2_b0", "mobilenetv3_small_100", "xcit_nano_12_p16_224", "xcit_tiny_12_p8_224"),
    *("ghostnet_050", "repvgg_a0"),
)
_OF_14_PIXELS = {"eva02_tiny_patch14_224": (224, 168), "vit_small_patch14_reg4_dinov2": (518, 224)}
_TORCHVISION = (
    *("resnet18", "resnet50", "resnext50_32x4d", "wide_resnet50_2", "convnext_tiny", "swin_t", "swin_v2_t"),
    *("efficientnet_b0", "efficientnet_v2_s", "regnet_x_400mf", "regnet_y_400mf", "vit_b_32", "mobilenet_v3_small"),
)
_SMALL = (32, 48)
MODELS: dict[str, Model] = {
    **{f"timm {name}": Model(partial(_of_timm, name), "timm") for name in _TIMM},
    **{f"timm {name}": Model(partial(_of_timm, name), "timm", sides) for name, sides in _OF_14_PIXELS.items()},
    **{f"torchvision {name}": Model(partial(_of_torchvision, name), "torchvision") for name in _TORCHVISION},
    **{
        f"transformers {name}": Model(
            partial(_of_transformers, build),
            "transformers" if name in ("vit", "dinov2", "gated dinov2", "dinov2 with registers") else "timm",
            _SMALL if "convnext" not in name else (64, 96),
        )
        for name, build in HF.items()
    },
    "transformers resnet-50": Model(
        partial(_of_transformers, lambda: transformers.ResNetModel(transformers.ResNetConfig())), "torchvision"
    ),
    "dino by hand": Model(partial(_by_hand, _teacher, True), "torchhub", _SMALL, _HUB_RESIZES),
    "dinov2 by hand": Model(partial(_dinov2, 0), "torchhub", _SMALL, _HUB_RESIZES),
    "dinov2, 4 registers, by hand": Model(partial(_dinov2, 4), "torchhub", _SMALL),
    "dinov2's training by hand": Model(_dinov2_training, "torchhub", _SMALL, _HUB_RESIZES),
    "dinov3 by hand": Model(_dinov3, "torchhub", _SMALL),
    "mae by hand": Model(partial(_by_hand, _mae, False), "timm", _SMALL),
    "moco v3 by hand": Model(partial(_by_hand, _moco, False), "timm", _SMALL),
    "swav resnet-50 by hand": Model(_swav, "torchvision"),
}


def _opened(target: str, out: Path) -> tuple[Path, Features]:
    """Open an exported folder with the target's own call; return what to read again, too."""
    if target == "timm":
        return out, timm.create_model(f"local-dir:{out}", pretrained=True).eval()
    if target == "torchhub":
        return out, torch.hub.load(str(out), "trunk", source="local").eval()
    if target == "torchvision":
        (file,) = out.glob("*.pth")
        net = without_classifier(torchvision.models.get_model(file.stem))
        net.load_state_dict(torch.load(file))
        return file, net.eval()
    kind = json.loads((out / "config.json").read_text())["model_type"]
    model: Any = transformers.AutoModel.from_pretrained(out, **({"add_pooling_layer": False} if kind == "vit" else {}))
    options = {"interpolate_pos_encoding": True} if kind == "vit" else {}
    return out, lambda x: model.eval()(x, **options).last_hidden_state[:, 0]


@dataclass(frozen=True)
class Row:
    """What came out for a model; ``reason`` is empty if nothing failed."""

    name: str
    target: str
    recognized: str
    num_params: int
    has_same_bits: bool
    differences: list[str]
    reason: str = ""

    def cells(self) -> list[str]:
        """Return the row of the table."""
        bits = "yes" if self.has_same_bits else "NO"
        return [self.name, self.recognized, f"{self.num_params / 1e6:.2f} M", self.target, bits, *self.differences]


@contextlib.contextmanager
def _quietly() -> Iterator[io.StringIO]:
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        yield text


def check(name: str, model: Model, folder: Path) -> Row:
    """Send a model through, and compare."""
    with _quietly() as said:
        written = model.write(folder)
        ours = vissl_zero.load_trunk(written.path)
        out = folder / "out"
        code = command_line(["export", str(written.path), "--to", model.target, "--out", str(out)])
        if code:
            raise RuntimeError(said.getvalue().strip().splitlines()[-1])
        place, theirs = _opened(model.target, out)
        again = vissl_zero.load_trunk(place)
    state, other = ours.trunk.state_dict(), again.trunk.state_dict()
    has_same_bits = state.keys() == other.keys() and all(torch.equal(state[key], other[key]) for key in state)
    texts, reasons = [], [] if has_same_bits else ["other bits"]
    for side in model.sides:
        text, reason = _compared(side, written.features, ours, theirs, model.one_size_there if texts else "")
        texts.append(text)
        reasons += [reason] if reason else []
    num_params = sum(parameter.numel() for parameter in ours.trunk.parameters())
    return Row(name, model.target, ours.recognized, num_params, has_same_bits, texts, "; ".join(reasons))


def _compared(side: int, wanted: Features, ours: LoadedTrunk, theirs: Features, skips_target: str) -> tuple[str, str]:
    """Return the cell of an image size, and why it fails."""
    x = images(side)
    with torch.no_grad():
        try:
            expected = wanted(x)
        except (AssertionError, RuntimeError, ValueError):
            return f"{side}: the library refuses it", ""
        found = {"ours": ours(x)} | ({} if skips_target else {"the target's": theirs(x)})
    scale = max(1.0, float(expected.abs().max()))
    differences = {whose: float((features - expected).abs().max()) / scale for whose, features in found.items()}
    worst = max(differences, key=lambda whose: differences[whose])
    failed = not differences[worst] <= TOLERANCE or not float(expected.abs().max()) > 1e-3
    text = f"{side}: {differences[worst]:.1e}{' (ours)' * bool(skips_target)}"
    return text, f"features {worst} at {side} pixels" if failed else ""


_TITLES = ["model", "recognized as", "parameters", "target", "same bits", "first size", "second size"]


def main() -> int:
    """Print the table; return 1 if a model fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="parts of names; all models without any")
    parser.add_argument("--write", action="store_true", help=f"the table, to {_TABLE.name}")
    options = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    chosen = [name for name in MODELS if not options.names or any(part in name for part in options.names)]
    rows, failed, began = list[list[str]](), list[str](), time.monotonic()
    print(" | ".join(_TITLES))
    for name in chosen:
        with tempfile.TemporaryDirectory() as folder:
            try:
                row = check(name, MODELS[name], Path(folder))
                rows.append(row.cells())
                print(" | ".join(row.cells()), flush=True)
                failed += [f"{name}: {row.reason}"] if row.reason else []
            except Exception as error:  # noqa: BLE001 - each model is tried
                failed.append(f"{name}: {type(error).__name__}: {str(error)[:300]}")
                print(failed[-1], flush=True)
        gc.collect()
    one_size = sum("refuses" in row[-1] for row in rows)
    count = f"{len(chosen)} models, {len(chosen) - len(failed)} pass, {one_size} of them take one image size alone"
    print(f"{count}; {time.monotonic() - began:.0f} s")
    print(*failed, sep="\n")
    if options.write:
        _write(rows, count)
    return 1 if failed else 0


def _write(rows: list[list[str]], count: str) -> None:
    lines = [f"| {' | '.join(cells)} |" for cells in (_TITLES, ["---"] * len(_TITLES), *rows)]
    command = f"`python benchmarks/public_models.py --write`, {datetime.now(UTC):%Y-%m-%d}"
    libraries = {"timm": timm, "torchvision": torchvision, "transformers": transformers}
    versions = ", ".join(f"{name} {library.__version__}" for name, library in libraries.items())
    about = (
        "Each model has random weights, in a file as its library writes it. It is recognized without a hint, exported, "
        "and read again. A size has the larger difference of our trunk and of the target library from the library that "
        "wrote the file, relative to the largest feature if that is above 1. `(ours)`: our trunk alone is compared, "
        f"because {_HUB_RESIZES}."
    )
    parts = ["# Public models in, out, and in again", f"{command}, {versions}: {count}.", about, "\n".join(lines)]
    _TABLE.write_text("\n\n".join(parts) + "\n", encoding="utf-8")


if __name__ == "__main__":
    torch.set_num_threads(2)
    sys.exit(main())
