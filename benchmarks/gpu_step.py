"""Time, memory and idle share of a training step on one GPU, beside DDP and fully_shard written by hand.

    python benchmarks/gpu_step.py --models vit_s vit_b [--systems "level 0" "level 3"] [--rounds 15] [--json step.json]
    python benchmarks/gpu_step.py --models --offload 1.6
    python benchmarks/gpu_step.py --models --input 256

All systems are in one process and take turns: in each round each trains three steps, in an order that changes from
round to round. A ratio is that of two times of one round; the median is printed. Time is that of the device (CUDA
events); peak memory is what a system holds between steps, and what a step adds to that. The idle share is that of the
step in which no kernel runs: kernels from the profiler, the step's time from rounds without it.

With ``--input`` a micro-batch of so many images in SwAV's views goes to the device, augmented by workers or there.
With ``--offload`` a vision transformer of so many billion parameters trains at level 3 with everything on the CPU tier.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import vissl_zero  # before torchvision and timm, which it lets be imported beside a CPU build of torch
from vissl_zero.config.blocks.data import Data, Split
from vissl_zero.data.loader import build_loader
from vissl_zero.sharding.update import overlapped_update

from timm.models.vision_transformer import VisionTransformer  # isort: skip
from torchvision.models import regnet_y_16gf  # isort: skip

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STEPS = 3  # of a system in each round


def _vit(size: int, patch: int, width: int, depth: int) -> nn.Module:
    return VisionTransformer(size, patch, embed_dim=width, depth=depth, num_heads=width // 64, num_classes=1000)


# name: (model, batch, size of its images)
MODELS: dict[str, tuple[Callable[[], nn.Module], int, int]] = {
    "vit_s": (partial(_vit, 224, 16, 384, 12), 256, 224),
    "vit_b": (partial(_vit, 224, 16, 768, 12), 128, 224),
    "vit_l": (partial(_vit, 224, 16, 1024, 24), 64, 224),
    "regnet_y_16gf": (regnet_y_16gf, 64, 224),
    "tiny": (partial(_vit, 32, 16, 64, 2), 4, 32),
}


class ByHand:
    """What one would write: autocast over float32 weights, AdamW in one kernel."""

    def __init__(self, model: nn.Module):
        self.model = self.wrapped(model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)

    def wrapped(self, model: nn.Module) -> nn.Module:
        """Wrap in DDP."""
        return DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=True)

    def step(self, x: Tensor) -> None:
        """Train one step."""
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = self.model(x).float().square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class FullyShardByHand(ByHand):
    """fully_shard, block by block, as torchtitan calls it: bfloat16 compute, float32 reduction."""

    is_compiled = False

    def wrapped(self, model: nn.Module) -> nn.Module:
        """Wrap each block, then the model."""
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in getattr(model, "blocks", None) or [b for s in model.trunk_output for b in s]:
            if self.is_compiled:
                block.compile()
            fully_shard(block, mp_policy=policy)
        return fully_shard(model, mp_policy=policy)

    def step(self, x: Tensor) -> None:
        """Train one step."""
        self.model(x).float().square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class CompiledByHand(FullyShardByHand):
    """The same, each block compiled."""

    is_compiled = True


class Ours:
    """vissl_zero.initialize."""

    def __init__(self, model: nn.Module, **zero: Any):
        zero = {"bf16": True, **zero}
        self.model, self.optimizer = vissl_zero.initialize(model, {"type": "AdamW", "lr": 1e-4}, zero)

    def step(self, x: Tensor) -> None:
        """Train one step."""
        self.optimizer.backward(self.model(x).float().square().mean())
        self.optimizer.step()
        self.optimizer.zero_grad()


class CopiedAfterTheUpdate(Ours):
    """The optimizer on the CPU, all of whose update is one piece: nothing is copied to the GPU beside it."""

    def __init__(self, model: nn.Module):
        with patch.object(overlapped_update, "PIECE_BYTES", sys.maxsize):
            super().__init__(model, level=3, offload_optimizer_config={"device": "cpu"})


SYSTEMS: dict[str, Callable[[nn.Module], Any]] = {
    "DDP by hand": ByHand,
    "fully_shard by hand": FullyShardByHand,
    **{f"level {level}": partial(Ours, level=level) for level in range(4)},
    "fully_shard by hand, compiled": CompiledByHand,
    "level 3, compiled": partial(Ours, level=3, compile=True),
    "level 3, float8": partial(Ours, level=3, float8=True),
    "level 3, float8, compiled": partial(Ours, level=3, float8=True, compile=True),
    "level 3, optimizer on the CPU": partial(Ours, level=3, offload_optimizer_config={"device": "cpu"}),
    "level 3, optimizer on the CPU, copied after the update": CopiedAfterTheUpdate,
}
PLAIN = tuple(SYSTEMS)[:6]


class OnMeta(VisionTransformer):
    """Draws the parameters of its own, which the rest of the model leaves to it."""

    def reset_parameters(self) -> None:
        """Draw class token and positions."""
        for param in (self.cls_token, self.pos_embed):
            nn.init.trunc_normal_(param, std=0.02)


def compare(model: str, names: list[str], rounds: int) -> list[dict[str, Any]]:
    """Train all systems in turn; return one row for each."""
    build, batch, size = MODELS[model]
    x = torch.randn(batch, 3, size, size, device=DEVICE)
    systems, held, peaks = {}, {}, {}
    for name in names:
        before = _allocated()
        torch.manual_seed(0)
        with torch.device(DEVICE):
            system = SYSTEMS[name](build())
        for _ in range(3 + 2 * ("compiled" in name)):
            system.step(x)
        systems[name], held[name] = system, _allocated() - before
        print(f"{model}, {name}: ready", file=sys.stderr, flush=True)
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            rest = _allocated()
            _reset_peak()
            times[name].append(_timed(lambda system=systems[name]: [system.step(x) for _ in range(STEPS)]) / STEPS)
            peaks[name] = held[name] + _peak() - rest
    num_params = sum(param.numel() for param in build().parameters())
    rows = []
    for name in names:
        row = {"model": model, "system": name, "batch": batch, "parameters": num_params}
        row |= {"ms": round(1e3 * statistics.median(times[name]), 2), "peak_bytes": peaks[name]}
        row["images_per_s"] = round(batch / statistics.median(times[name]))
        for base in ("DDP by hand", "fully_shard by hand", "fully_shard by hand, compiled"):
            if base in times:
                pairs = zip(times[name], times[base], strict=True)
                row[f"over {base}"] = round(statistics.median(own / other for own, other in pairs), 3)
        busy, kernels = _busy(lambda system=systems[name]: system.step(x))
        row["idle"] = round(1 - busy / statistics.median(times[name]), 3)
        rows.append(row | {"attention": kernels})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def offload(billions: float) -> list[dict[str, Any]]:
    """Train a vision transformer that no single card holds with its optimizer."""
    depth = 32
    width = round((billions * 1e9 / 12 / depth) ** 0.5 / 128) * 128
    started = time.perf_counter()
    with torch.device("meta"):
        model = OnMeta(224, 14, embed_dim=width, depth=depth, num_heads=width // 128, num_classes=0)
    tiers = {f"offload_{what}_config": {"device": "cpu"} for what in ("param", "optimizer")}
    system = Ours(model, level=3, **tiers)
    built_s = time.perf_counter() - started
    x = torch.randn(8, 3, 224, 224, device=DEVICE)
    _reset_peak()
    times = [_timed(partial(system.step, x)) for _ in range(4)]
    row = {
        "model": f"ViT of {sum(p.numel() for p in model.parameters()) / 1e9:.2f} billion parameters",
        "system": "level 3, parameters and optimizer on the CPU",
        "batch": 8,
        "built_s": round(built_s, 1),
        "ms": round(1e3 * statistics.median(times[1:]), 1),
        "peak_bytes": _peak(),
        "host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    print(json.dumps(row), flush=True)
    return [row]


def input_pipeline(num_images: int, rounds: int) -> list[dict[str, Any]]:
    """Copy a micro-batch to the device; where workers have not augmented it, the device does."""
    crops = {"num_crops": [2, 6], "size_crops": [224, 96], "crop_scales": [[0.14, 1.0], [0.05, 0.14]]}
    views = [
        {"name": "ImgPilToMultiCrop", "total_num_crops": 8, **crops},
        {"name": "RandomHorizontalFlip", "p": 0.5},
        {"name": "ImgPilColorDistortion", "strength": 1.0},
        {"name": "ImgPilGaussianBlur", "p": 0.5, "radius_min": 0.1, "radius_max": 2.0},
        {"name": "ToTensor"},
        {"name": "Normalize", "mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]},
    ]
    split = Split(DATA_SOURCES=["synthetic"], DATA_LIMIT=num_images, DEFAULT_GRAY_IMG_SIZE=400, TRANSFORMS=views)
    rows = []
    for place in ("workers", "device"):
        data = Data(BACKEND="fast", AUGMENT_ON=place, TRAIN=split, NUM_DATALOADER_WORKERS=0)
        loader = build_loader(data, "TRAIN", 0, num_images, 0, 1, 1)
        ((batch,),) = loader.epoch(0)
        batch = batch.pin_memory() if DEVICE == "cuda" else batch
        copy = partial(batch.to, DEVICE, torch.float32)
        copy()
        _reset_peak()
        seconds = statistics.median(_timed(copy) for _ in range(rounds))
        row = {"model": f"SwAV's views of {num_images} images", "system": f"augmented on {place}", "batch": num_images}
        row |= {"ms": round(1e3 * seconds, 2), "images_per_s": round(num_images / seconds), "peak_bytes": _peak()}
        rows.append(row)
        print(json.dumps(rows[-1]), flush=True)
    return rows


def _timed(work: Callable[[], Any]) -> float:
    """Seconds of the device."""
    if DEVICE == "cpu":
        started = time.perf_counter()
        work()
        return time.perf_counter() - started
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    work()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3


def _busy(work: Callable[[], Any]) -> tuple[float, str]:
    """Seconds in which a kernel ran, and which kernel of attention was used."""
    if DEVICE == "cpu":
        return 0.0, ""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        work()
        torch.cuda.synchronize()
    events = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    spans = sorted((e.time_range.start, e.time_range.end) for e in events)
    busy, until = 0.0, float("-inf")
    for start, end in spans:
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    names = {key for e in events for key in ("flash", "cudnn", "cutlass", "efficient") if f"{key}" in e.name.lower()}
    return busy / 1e6, " ".join(sorted(names))


def _allocated() -> int:
    return torch.cuda.memory_allocated() if DEVICE == "cuda" else 0


def _peak() -> int:
    return torch.cuda.max_memory_allocated() if DEVICE == "cuda" else 0


def _reset_peak() -> None:
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()


def start() -> None:
    """Start a world of this process alone."""
    if DEVICE == "cuda":
        torch.cuda.set_device(0)
    device = torch.device("cuda", 0) if DEVICE == "cuda" else None
    backend = "cpu:gloo,cuda:nccl" if DEVICE == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, device_id=device)


def main() -> None:
    """Parse, run, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=["vit_b"], choices=list(MODELS))
    parser.add_argument("--systems", nargs="+", default=list(PLAIN), choices=list(SYSTEMS))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--input", type=int, help="images of a micro-batch; after the comparisons")
    parser.add_argument("--offload", type=float, help="billion parameters; after the comparisons")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    start()
    rows = []
    for model in given.models:
        rows += compare(model, given.systems, given.rounds)
        if given.json:
            given.json.write_text(json.dumps(rows, indent=1))
    if given.input:
        rows += input_pipeline(given.input, given.rounds)
    if given.offload:
        rows += offload(given.offload)
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
