"""Does a loop stay in the budget that ``level="fit"`` was given? Networks that no forecast was made for, on CPU ranks.

    python benchmarks/fit_budgets.py [--only resnet18 ...] [--dtype bfloat16] [--json out.json]

For each network, ranks of a first start print what levels 0 to 3 need. The budget is half-way between the most and the
least of it; on one rank, where levels need about the same, it is what level 0 needs. Ranks of a second start pass it to
``initialize`` and train four steps. Each is forked from a process that has imported everything and done nothing else.
It took its largest resident memory less what it held at the fork and the code that is mapped from files. The rank that
took most is compared.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import socket
import statistics
import tempfile
import traceback
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import own_nets
import torch
import torch.nn.functional as F
from own_nets import Net
from torch import Tensor, nn

import vissl_zero
from vissl_zero.integration.fit import forecaster_of
from vissl_zero.integration.initialize import join_ranks
from vissl_zero.resolve.resolved import ShardingPlan
from vissl_zero.sharding.memory import mapped_bytes, peak_bytes, resident_bytes

NUM_STEPS = 4
CPU = torch.device("cpu")
MIB, GIB = 2**20, 2**30
# By a run sooner or later: a forecast counts what a run adds to a process that has imported everything.
IMPORTED = ("timm", "torchvision", "sympy", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor")


class SuperResolution(nn.Module):
    """Residual blocks at the small size, and shuffled pixels at twice that (EDSR)."""

    def __init__(self, width: int = 64, num_blocks: int = 8) -> None:
        super().__init__()
        conv = partial(nn.Conv2d, kernel_size=3, padding=1)
        self.first = conv(3, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(conv(width, width), nn.ReLU(inplace=True), conv(width, width)) for _ in range(num_blocks)
        )
        self.last = nn.Sequential(conv(width, 4 * width), nn.PixelShuffle(2), conv(width, 3))

    def forward(self, x: Tensor) -> Tensor:
        """(B, 3, H, W) -> (B, 3, 2 H, 2 W)."""
        x = y = self.first(x)
        for block in self.blocks:
            y = y + block(y)
        return self.last(x + y)


class Capsules(nn.Module):
    """Capsules routed by agreement in three rounds."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 256, 9), nn.Conv2d(256, 256, 9, stride=2)
        self.votes = nn.Parameter(torch.randn(1152, 10, 16, 8) * 0.05)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 1, 28, 28) -> lengths (B, 10)."""
        x = self.second(F.relu(self.first(x))).view(len(x), 32, 8, 36).permute(0, 1, 3, 2).reshape(len(x), 1152, 8)
        votes = torch.einsum("nijk,bnk->bnij", self.votes, F.normalize(x, dim=-1))
        agreement = torch.zeros(votes.shape[:3])
        for _ in range(3):
            capsules = F.normalize((agreement.softmax(2)[..., None] * votes).sum(1, keepdim=True), dim=-1)
            agreement = agreement + (votes * capsules).sum(-1)
        return (agreement.softmax(2)[..., None] * votes).sum(1).norm(dim=-1)


class Detector(nn.Module):
    """A ResNet-18, a pyramid of its maps, and two shared heads that see each of them."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = _timm("resnet18", features_only=True, out_indices=(2, 3, 4))
        self.joined = nn.ModuleList(nn.Conv2d(width, 128, 1) for width in (128, 256, 512))
        heads = (nn.Conv2d(128, 128, 3, padding=1), nn.GroupNorm(8, 128), nn.ReLU())
        self.heads = nn.ModuleList(nn.Sequential(*heads, nn.Conv2d(128, num, 3, padding=1)) for num in (90, 36))

    def forward(self, x: Tensor) -> Tensor:
        """(B, 3, H, W) -> a loss."""
        maps = [join(level) for join, level in zip(self.joined, self.trunk(x), strict=True)]
        for index in (1, 0):
            maps[index] = maps[index] + F.interpolate(maps[index + 1], scale_factor=2)
        classes, boxes = ([head(level) for level in maps] for head in self.heads)
        return sum((one.sigmoid().mean() for one in classes), torch.zeros(())) + sum(box.abs().mean() for box in boxes)


class Masked(nn.Module):
    """A transformer over padded sequences, which a mask of each row's length hides."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.last = nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, 256) -> (B, 10)."""
        lengths = x.shape[1] - torch.arange(len(x)) % (x.shape[1] // 2)
        mask = torch.arange(x.shape[1]) >= lengths[:, None]
        return self.last(self.encoder(x, src_key_padding_mask=mask).mean(dim=1))


def _timm(name: str, **options: Any) -> nn.Module:
    from timm import create_model  # late, as in ``own_nets``

    model: nn.Module = create_model(name, **options)
    return model


def _first_convolutions() -> nn.Module:
    layers = nn.Conv2d(3, 64, 9, padding=4), nn.ReLU(), nn.Conv2d(64, 32, 5, padding=2), nn.ReLU()
    return nn.Sequential(*layers, nn.Conv2d(32, 3, 5, padding=2))


def _video() -> nn.Module:
    widths = [3, 32, 64, 128]
    layers = [
        nn.Sequential(nn.Conv3d(i, o, 3, padding=1), nn.BatchNorm3d(o), nn.ReLU(), nn.MaxPool3d(2))
        for i, o in pairwise(widths)
    ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(128, 10))


def _sound() -> nn.Module:
    widths = [1, 64, 128, 256]
    layers = [nn.Sequential(nn.Conv1d(i, o, 9, stride=4), nn.GELU()) for i, o in pairwise(widths)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(256, 10))


def _classify(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(inputs), labels)


def _shrink(model: nn.Module, *inputs: Tensor) -> Tensor:
    return model(*inputs).square().mean()


def _given(model: nn.Module, *inputs: Tensor) -> Tensor:
    loss: Tensor = model(*inputs)
    return loss


_TIMM = {  # images of a rank, and their pixels on a side
    "davit_tiny": (4, 224),
    "resnet18": (8, 160),
    "resnext26ts": (4, 160),
    "convnext_atto": (8, 160),
    "vit_tiny_patch16_224": (8, 224),
    "xcit_nano_12_p16_224": (8, 224),
    "crossvit_tiny_240": (4, 240),
    "swin_tiny_patch4_window7_224": (2, 224),
    "efficientnet_b0": (4, 160),
    "mobilenetv3_large_100": (8, 160),
    "ghostnet_050": (8, 160),
    "lcnet_050": (16, 160),
    "regnety_004": (8, 160),
    "repvgg_a0": (4, 160),
    "densenet121": (2, 128),
    "hgnet_tiny": (4, 128),
    "botnet26t_256": (2, 256),
    "pvt_v2_b0": (4, 224),
    "coat_lite_tiny": (4, 224),
    "levit_128s": (8, 224),
    "mobilevit_xs": (4, 160),
    "edgenext_xx_small": (8, 160),
    "poolformer_s12": (4, 160),
    "mixer_s32_224": (8, 224),
    "maxvit_rmlp_pico_rw_256": (2, 256),
    "hrnet_w18_small": (2, 160),
}
NETS: dict[str, tuple[Net, int]] = {
    **{name: (net, 256) for name, net in own_nets.NETS.items()},
    "super_resolution": (Net(SuperResolution, (3, 48, 48), _shrink, is_labeled=False), 8),
    "first_convolutions": (Net(_first_convolutions, (3, 96, 96), _shrink, is_labeled=False), 8),
    "capsules": (Net(Capsules, (1, 28, 28), _classify), 16),
    "detector": (Net(Detector, (3, 256, 256), _given, is_labeled=False), 4),
    "masked": (Net(Masked, (128, 256), _classify), 16),
    "video": (Net(_video, (3, 16, 48, 48), _classify), 4),
    "sound": (Net(_sound, (1, 8000), _classify), 16),
    **{
        name: (Net(partial(_timm, name, num_classes=10), (3, size, size), _classify), num)
        for name, (num, size) in _TIMM.items()
    },
}


class Loop:
    """A network's loop on this rank, in a format that autocast computes in."""

    def __init__(self, name: str, dtype: str):
        self.net, self.size = NETS[name]
        self.dtype = dtype
        self.options = dict(own_nets.OPTIMIZERS[("adamw", "momentum")[[*NETS].index(name) % 2]])
        torch.manual_seed(0)

    def loss(self, model: Any, batch: Sequence[Tensor]) -> Tensor:
        """The loss of a batch."""
        with torch.autocast("cpu", torch.bfloat16, enabled=self.dtype == "bfloat16"):
            return self.net.loss(model, *batch)

    def needs(self) -> list[int]:
        """What levels 0 to 3 need, in bytes; joins the ranks."""
        join_ranks(CPU, timeout_s=120)
        batch = self.net.batch(self.size)
        sample = lambda model: self.loss(model, batch)  # noqa: E731
        plan = ShardingPlan(0, shard_group_size=-1)
        forecaster, mode = forecaster_of(self.net.build(), self.options, plan, sample, CPU)
        with mode:
            steps = [forecaster.forecast(ShardingPlan(level, shard_group_size=-1)).step for level in range(4)]
        return [step.resident_bytes for step in steps if step is not None]

    def train(self, budget: int) -> dict[str, Any]:
        """Train within a budget, in bytes; the level, and what this rank took."""
        notes: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: notes.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("vissl_zero").addHandler(handler)
        resident, mapped = resident_bytes(), mapped_bytes()
        assert resident is not None
        model = self.net.build()
        batch = self.net.batch(self.size)
        zero = {"level": "fit", "memory_gb": budget / GIB}
        sample = lambda model: self.loss(model, batch)  # noqa: E731
        model, optimizer = vissl_zero.initialize(model, optimizer=self.options, zero=zero, device="cpu", sample=sample)
        for _ in range(NUM_STEPS):
            loss = self.loss(model, batch)
            optimizer.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            del loss
        taken = peak_bytes(CPU) - resident - (mapped_bytes() - mapped)
        optimizer.close()
        return {"taken": taken, "notes": notes}


def on_ranks(num_ranks: int, name: str, dtype: str, budget: int = 0) -> list[Any]:
    """Fork ranks, with the environment that torchrun gives them; what each found."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="fit_budgets_") as folder:
        files = [Path(folder) / str(rank) for rank in range(num_ranks)]
        processes = []
        for rank, file in enumerate(files):
            processes.append(os.fork())
            if not processes[-1]:
                world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
                os.environ |= {key: str(number) for key, number in world.items()}
                os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
                try:
                    loop = Loop(name, dtype)
                    file.write_text(json.dumps(loop.train(budget) if budget else loop.needs()))
                except BaseException:  # noqa: BLE001 - a forked process must not return
                    traceback.print_exc()
                os._exit(0)
        for process in processes:
            os.waitpid(process, 0)
        return [json.loads(file.read_text()) for file in files]


def compared(name: str, num_ranks: int, dtype: str) -> dict[str, Any]:
    """A row of the table: bytes."""
    needs = on_ranks(num_ranks, name, dtype)[0]
    budget = (max(needs) + min(needs)) // 2 if num_ranks > 1 else needs[0]
    ranks = on_ranks(num_ranks, name, dtype, budget)
    words = " ".join(ranks[0]["notes"])
    level = re.search(r"fit took level (\d)", words)
    assert level is not None, words
    row = {"net": name, "ranks": num_ranks, "dtype": dtype, "budget": budget, "level": int(level[1])}
    return {**row, "needed": needs[int(level[1])], "taken": max(rank["taken"] for rank in ranks)}


def line(row: dict[str, Any]) -> str:
    """A row of the table in benchmarks/fit_budgets.md, in MiB."""
    words = [str(row[key]).replace("_", " ") for key in ("net", "ranks", "dtype", "level")]
    sizes = [f"{row[key] / MIB:.0f}" for key in ("budget", "needed", "taken")]
    return f"| {' | '.join([*words, *sizes])} | {row['needed'] / row['taken'] - 1:+.1%} |"


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """How many stayed in their budget, and how far forecasts lie above."""
    excess = [row["needed"] / row["taken"] - 1 for row in rows]
    within = sum(row["taken"] <= row["budget"] for row in rows)
    return (
        f"{within} of {len(rows)} in their budget; forecasts above what was taken: "
        f"median {statistics.median(excess):+.1%}, least {min(excess):+.1%}, most {max(excess):+.1%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="NET", choices=NETS, default=[*NETS], help="these networks")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="that is computed in")
    parser.add_argument("--json", type=Path, help="write the rows there")
    given = parser.parse_args()
    for module in IMPORTED:
        import_module(module)
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for name in given.only:
        rows.append(compared(name, given.ranks, given.dtype))
        print(line(rows[-1]), flush=True)
        if given.json:
            given.json.write_text(json.dumps(rows, indent=1))
    print(f"\n{summary(rows)}")


if __name__ == "__main__":
    main()
