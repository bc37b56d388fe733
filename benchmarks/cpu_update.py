"""The update of training with its optimizer on the CPU against torch's fused AdamW on the same tensors.

    python benchmarks/cpu_update.py [--millions 48] [--rounds 15]

Interleaved rounds in one process, one thread, one rank; medians and quartiles of the ratios.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

import vissl_zero

BLOCK = 1024  # a block has 2^20 parameters


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(1)
    options = {"type": "AdamW", "lr": 1e-3, "weight_decay": 0.1}
    runs: dict[str, Callable[[], object]] = {}
    plain_model = _model(args.millions)
    plain = torch.optim.AdamW(plain_model.parameters(), lr=1e-3, weight_decay=0.1, fused=True)
    _set_grads(plain_model.parameters())
    runs["torch.optim.AdamW(fused=True)"] = plain.step
    for level in (1, 3):
        zero = {"level": level, "offload_optimizer_config": {"device": "cpu", "pin_memory": False}}
        _, optimizer = vissl_zero.initialize(_model(args.millions), options, zero)
        sharded = optimizer._sharded
        params = [param for group in sharded.optimizer.param_groups for param in group["params"]]
        _set_grads(params)
        runs[f"level {level}, update"] = sharded.optimizer.step
        runs[f"level {level}, update and norm of all gradients"] = lambda stepper=sharded._stepper: stepper.step(())
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(args.rounds + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    reference, *others = runs
    print(f"{args.millions} million parameters, {args.rounds} rounds; {reference}: {_median(seconds[reference]):.3f} s")
    for name in others:
        pairs = zip(seconds[name][1:], seconds[reference][1:], strict=True)
        low, middle, high = statistics.quantiles([ours / theirs for ours, theirs in pairs], n=4)
        print(f"{name}: {middle:.2f} ({low:.2f} to {high:.2f})")


def _model(millions: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(BLOCK, BLOCK, bias=False) for _ in range(millions)))


def _set_grads(params: object) -> None:
    for param in params:  # type: ignore[attr-defined]
        param.grad = torch.full_like(param, 1e-3)


def _median(values: list[float]) -> float:
    return statistics.median(values[1:])


if __name__ == "__main__":
    main()
