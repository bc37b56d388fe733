"""From the command to the first optimizer step: ``vissl-zero`` over bare ``torchrun`` of a hand-written script.

    python benchmarks/startup.py [--pairs 5]

Both train the quickstart's model (the same widths, crops, batch and optimizer, 2 processes, level 3) on its digits.
Runs alternate; the time is that of the first line of ``metrics.jsonl``, or of the script's own file, after its command
was given. kNN is off: the script has none. Prints the median and quartiles of the paired ratios.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BY_HAND = """
import sys
from pathlib import Path
import torch, torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.fsdp import fully_shard
import vissl_zero  # or torchvision does not import beside a CPU torch
from torchvision.transforms import v2
from PIL import Image

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.set_num_threads(1)
torch.manual_seed(0)

class Block(nn.Module):
    def __init__(self, i, o, s):
        super().__init__()
        self.proj = nn.Sequential(nn.Conv2d(i, o, 1, s, bias=False), nn.BatchNorm2d(o))
        self.f = nn.Sequential(nn.Conv2d(i, o, 3, s, 1, bias=False), nn.BatchNorm2d(o), nn.ReLU(),
                               nn.Conv2d(o, o, 3, 1, 1, bias=False), nn.BatchNorm2d(o))
    def forward(self, x):
        return F.relu(self.proj(x) + self.f(x))

trunk = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
                      Block(16, 16, 2), Block(16, 32, 2), Block(32, 64, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten())
head = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 32))
model = nn.ModuleDict({"trunk": trunk, "head": head, "prototypes": nn.Linear(32, 30, bias=False)})
for unit in model.values():
    fully_shard(unit)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5, weight_decay=0.01)
digits = load_digits()
images = [Image.fromarray((d * 15.9).astype("uint8")).convert("RGB") for d in digits.images[:1437]]
def crops(size, scale):
    return v2.Compose([v2.Resize((32, 32)), v2.RandomResizedCrop(size, scale=scale), v2.ToImage(),
                       v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5] * 3, [0.5] * 3)])
big, small = crops(32, (0.6, 1.0)), crops(24, (0.4, 0.8))
mine = images[rank * 16:rank * 16 + 16]
views = [torch.stack([t(i) for i in mine]) for t in (big, big, small, small)]
scores = [model["prototypes"](F.normalize(model["head"](model["trunk"](v)), dim=1)) for v in views]
with torch.no_grad():
    targets = []
    for s in scores[:2]:
        q = (s.detach() / 0.01).softmax(1)
        dist.all_reduce(total := q.sum(0))
        q = q / total.clamp(min=1e-6)
        targets.append(q / q.sum(1, keepdim=True))
loss = -sum((q * F.log_softmax(s / 0.1, 1)).sum(1).mean() for k, q in enumerate(targets)
            for j, s in enumerate(scores) if j != k) / 6
loss.backward()
optimizer.step()
if rank == 0:
    Path(sys.argv[1]).write_text(str(loss.item()))
dist.barrier()
dist.destroy_process_group()
"""


def first_step_s(command: list[str], file: Path) -> float:
    """Seconds from starting ``command`` until ``file`` has content."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    began = time.time()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment) as process:
        while not (file.exists() and file.stat().st_size):
            if process.poll() not in (None, 0):
                raise SystemExit(process.stderr.read().decode() if process.stderr else "failed")
            time.sleep(0.005)
        seconds = time.time() - began
        process.communicate()
    return seconds


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=5)
    pairs = parser.parse_args().pairs
    ours, theirs = [], []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "by_hand.py").write_text(BY_HAND)
        for index in range(pairs):
            run = folder / f"run{index}"
            vissl_zero = [sys.executable, "-m", "vissl_zero.cli", "config=quickstart/swav_digits"]
            vissl_zero += ["config.NEAREST_NEIGHBOR.USE_KNN=false", "config.TRAINER.MAX_STEPS=1"]
            vissl_zero += ["config.TRAINER.THREADS_PER_RANK=1", f"config.CHECKPOINT.DIR={run}"]
            ours.append(first_step_s(vissl_zero, run / "metrics.jsonl"))
            done = folder / f"loss{index}"
            bare = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
            theirs.append(first_step_s([*bare, str(folder / "by_hand.py"), str(done)], done))
            print(f"pair {index + 1}: vissl-zero {ours[-1]:.2f} s, bare torchrun {theirs[-1]:.2f} s", flush=True)
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4) if pairs > 1 else (ratios[0],) * 3
    print(f"vissl-zero {statistics.median(ours):.2f} s, bare {statistics.median(theirs):.2f} s (medians)")
    print(f"ratio {middle:.2f} (quartiles {low:.2f} to {high:.2f}, {pairs} pairs)")


if __name__ == "__main__":
    main()
