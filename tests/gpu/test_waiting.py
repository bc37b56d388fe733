"""A training step on a GPU never waits for it, except to read whether a scaled loss has overflowed."""

from __future__ import annotations

import statistics
import warnings

import pytest
import torch
from torch import nn

import vissl_zero

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.timeout(280),
]


@pytest.mark.parametrize("level", range(4))
@pytest.mark.parametrize("dtype", ["float32", "bf16", "fp16"])
def test_the_host_runs_ahead(dtype, level):
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.LayerNorm(256)) for _ in range(6)]
    model = nn.Sequential(*layers).cuda()
    half = {} if dtype == "float32" else {dtype: True}
    zero = {"level": level, "clip_grad": 1.0, **half}
    model, optimizer = vissl_zero.initialize(model, {"type": "AdamW", "lr": 1e-3}, zero)
    x = torch.randn(64, 256, device="cuda")
    waits = []
    try:
        for _ in range(24):
            torch.cuda.set_sync_debug_mode("warn")
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                optimizer.backward(model(x).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            torch.cuda.set_sync_debug_mode("default")
            waits.append([str(one.message).splitlines()[0] for one in caught if "synchroniz" in str(one.message)])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    typical = statistics.median(len(found) for found in waits[8:])
    assert typical == (1 if dtype == "fp16" else 0), waits[8:]
