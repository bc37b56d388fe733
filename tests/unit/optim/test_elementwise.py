"""The built-in base optimizers against torch's plainest path, one tensor at a time."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from vissl_zero.optim.elementwise import adam, adamw, complete_state, sgd

SIZE = 37
CASES = {
    "sgd": (sgd, {"momentum": 0.9}, torch.optim.SGD),
    "sgd without momentum": (sgd, {"momentum": 0.0}, torch.optim.SGD),
    "nesterov": (sgd, {"momentum": 0.9, "nesterov": True}, torch.optim.SGD),
    "adam": (adam, {"betas": [0.8, 0.99], "eps": 1e-6}, torch.optim.Adam),
    "amsgrad": (adam, {"amsgrad": True}, torch.optim.Adam),
    "adamw": (adamw, {"betas": [0.8, 0.99], "eps": 1e-6}, torch.optim.AdamW),
}


def trained(build, cuts, num_steps=6):
    """All values after some steps on one vector, cut into tensors of the given sizes."""
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(SIZE, dtype=torch.float64, generator=generator)
    params = [torch.nn.Parameter(part.clone()) for part in whole.split(cuts)]
    optimizer = build([{"params": params, "lr": 0.01, "weight_decay": 0.1}])
    for step in range(num_steps):
        grads = torch.randn(SIZE, dtype=torch.float64, generator=generator).split(cuts)
        for index, (param, grad) in enumerate(zip(params, grads, strict=True)):
            # The first tensor is frozen for two steps, as prototypes are.
            param.grad = None if index == 0 and step < 2 else grad.clone()
        optimizer.param_groups[0]["lr"] = 0.01 * (step + 1)
        optimizer.step()
    return torch.cat([param.detach() for param in params])


@pytest.mark.parametrize("name", CASES)
def test_equals_torch_one_tensor_at_a_time(name):
    build, options, plain = CASES[name]
    found = trained(lambda groups: build(groups, **options), [5, 32])
    wanted = trained(lambda groups: plain(groups, foreach=False, **options), [5, 32])
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-15)


@pytest.mark.parametrize("name", CASES)
def test_does_not_depend_on_how_tensors_are_cut(name):
    # Ranks hold shards, some of them empty.
    build, options, _ = CASES[name]
    whole = trained(lambda groups: build(groups, **options), [5, 32])
    cut = trained(lambda groups: build(groups, **options), [5, 0, 1, 7, 24])
    torch.testing.assert_close(cut, whole, rtol=0, atol=1e-15)


def test_momentum_is_there_before_the_first_step():
    # The memory ledger is read before the step; a thawed parameter must find a buffer.
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = sgd([{"params": [param], "lr": 0.1, "weight_decay": 0.0}])
    assert torch.equal(optimizer.state[param]["momentum_buffer"], torch.zeros(3))
    assert not sgd([{"params": [param], "lr": 0.1, "weight_decay": 0.0}], momentum=0.0).state


@pytest.mark.parametrize("is_fused", [True, False])
def test_restored_counters_go_where_fused_kernels_read_them(is_fused):
    param = torch.nn.Parameter(torch.zeros(3, device="meta"))  # stands for a GPU
    optimizer = torch.optim.AdamW([param])
    optimizer.param_groups[0]["fused"] = is_fused
    optimizer.state[param]["step"] = torch.tensor(7.0)
    complete_state(optimizer)
    assert optimizer.state[param]["step"].device.type == ("meta" if is_fused else "cpu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_in_half_precision_is_torchs_unfused_one(dtype: torch.dtype, momentum: float) -> None:
    """Torch's fused kernel on the CPU leaves 16 elements as they are."""
    start, grads = torch.linspace(-1, 1, 64).to(dtype), [torch.full((64,), value).to(dtype) for value in (1.0, 0.5)]
    results = []
    for build in (sgd, partial(torch.optim.SGD, fused=False)):
        param = nn.Parameter(start.clone())
        optimizer = build([{"params": [param], "lr": 0.125}], momentum=momentum)
        for grad in grads:
            param.grad = grad.clone()
            optimizer.step()
        results.append(param.detach())
    assert torch.equal(*results) and not torch.equal(results[0], start)
