"""Two ranks on one GPU over gloo, as nccl refuses it: each level against one process with the whole batch.

    torchrun --nproc-per-node 2 benchmarks/gpu_ranks.py [--levels 0 1 2 3] [--json ranks.json]

The launcher and its placement refuse several ranks for a GPU. A loop of one's own may have them: ``initialize`` joins
the process group that is there. Weights are in float64; the largest difference after a few steps is printed.
"""

from __future__ import annotations

import argparse
import copy
import json
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import vissl_zero

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
STEPS, BATCH, WIDTH = 5, 12, 64


def built() -> nn.Module:
    """Draw the same weights on each rank."""
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, 96), nn.GELU(), nn.LayerNorm(96), nn.Linear(96, WIDTH)]
    return nn.Sequential(*layers).double().to(DEVICE)


def batches() -> list[Tensor]:
    """Draw the same samples on each rank."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(BATCH, WIDTH, generator=generator, dtype=torch.float64).to(DEVICE) for _ in range(STEPS)]


def by_one(model: nn.Module) -> dict[str, Tensor]:
    """Train with plain torch on whole batches."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for batch in batches():
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return model.state_dict()


def by_ranks(model: nn.Module, level: int) -> dict[str, Tensor]:
    """Train with a level, each rank on its part; rank 0 gets the full weights."""
    zero = {"level": level, "clip_grad": 0.5, "wrap_threshold": 100}
    model, optimizer = vissl_zero.initialize(model, {"type": "AdamW", "lr": 1e-2}, zero)
    for batch in batches():
        optimizer.backward(model(batch.chunk(dist.get_world_size())[dist.get_rank()]).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    weights: dict[str, Tensor] = optimizer.full_state()
    return weights


def main() -> None:
    """Every rank; a failure of one level is a row, and the others are not tried."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--levels", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    dist.init_process_group("gloo")
    rows = []
    for level in given.levels:
        weights = by_ranks(built(), level)
        if dist.get_rank() == 0:
            expected = by_one(copy.deepcopy(built()))
            distance = max(float((weights[name] - expected[name].cpu()).abs().max()) for name in expected)
            rows.append({"model": "two linear layers", "system": f"level {level}, {dist.get_world_size()} ranks"})
            rows[-1] |= {"distance": distance, "peak_bytes": 0}
            print(json.dumps(rows[-1]), flush=True)
            if given.json:
                given.json.write_text(json.dumps(rows, indent=1))
    dist.barrier()
    dist.destroy_process_group()
    if any(row["distance"] > 1e-10 for row in rows):
        raise SystemExit("the ranks have trained another model than one process")


if __name__ == "__main__":
    main()
