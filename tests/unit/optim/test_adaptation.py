"""LARC and LARS against the formulas written out one tensor at a time."""

from __future__ import annotations

import math

import pytest
import torch

from vissl_zero.optim.adaptation import Larc, Lars, TensorNorms, decay_absorbed

LR = 0.3
TENSORS = {
    "matrix": ((4, 3), 1.0, 1.0),
    "bias": ((5,), 0.1, 1.0),
    "zero parameter": ((3,), 0.0, 1.0),
    "zero gradient": ((2, 2), 1.0, 0.0),
    "tiny gradient": ((6,), 1.0, 1e-6),
    "large gradient": ((3, 3), 1e-2, 1e3),
}


def drawn(seed=0):
    generator = torch.Generator().manual_seed(seed)
    params, grads = [], []
    for shape, param_scale, grad_scale in TENSORS.values():
        params.append(torch.randn(shape, dtype=torch.float64, generator=generator) * param_scale)
        grads.append(torch.randn(shape, dtype=torch.float64, generator=generator) * grad_scale)
    return params, grads


def norms_of(params, grads):
    return TensorNorms(
        param_sq=torch.stack([p.square().sum() for p in params]),
        grad_sq=torch.stack([g.square().sum() for g in grads]),
        dot=torch.stack([(p * g).sum() for p, g in zip(params, grads, strict=True)]),
    )


def adapted(adaptation, params, grads, lr=LR, weight_decay=0.01):
    """What the optimizer step makes of the gradients."""
    lr, weight_decay = (torch.full((len(params),), v, dtype=torch.float64) for v in (lr, weight_decay))
    num_dims = torch.tensor([p.ndim for p in params])
    scale, decay = adaptation.coefficients(norms_of(params, grads), lr, weight_decay, num_dims)
    return [s * (g + d * p) for s, d, p, g in zip(scale, decay, params, grads, strict=True)]


def slow_larc(param, grad, lr, weight_decay, trust_coefficient, clip, eps):
    """The formula of apex's LARC, in Python numbers."""
    param_norm, grad_norm = param.norm().item(), grad.norm().item()
    if param_norm == 0 or grad_norm == 0:
        return grad
    rate = trust_coefficient * param_norm / (grad_norm + param_norm * weight_decay + eps)
    if clip:
        rate = min(rate / lr, 1.0)
    return (grad + weight_decay * param) * rate


def slow_lars(param, grad, weight_decay, eta, eps, is_excluded):
    """The formula of Barlow Twins' LARS with an eps, in Python numbers."""
    update = grad + weight_decay * param
    if is_excluded or param.norm().item() == 0 or update.norm().item() == 0:
        return update
    return update * (eta * param.norm().item() / (update.norm().item() + eps))


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("eps", [1e-8, 0.0, 0.5])
@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
def test_larc(clip, eps, weight_decay):
    params, grads = drawn()
    found = adapted(Larc(0.02, clip, eps), params, grads, weight_decay=weight_decay)
    for name, param, grad, got in zip(TENSORS, params, grads, found, strict=True):
        torch.testing.assert_close(
            got, slow_larc(param, grad, LR, weight_decay, 0.02, clip, eps), rtol=1e-14, atol=0, msg=name
        )


def test_larc_clips_some_tensors_and_not_others():
    params, grads = drawn()
    ones = torch.ones(len(params), dtype=torch.float64)
    scale, _ = Larc(0.02, clip=True).coefficients(norms_of(params, grads), LR * ones, 0 * ones, ones)
    assert scale[list(TENSORS).index("tiny gradient")] == 1.0
    assert scale[list(TENSORS).index("large gradient")] < 1e-3


def test_larc_with_learning_rate_zero():
    params, grads = drawn()
    assert all(g.isfinite().all() for g in adapted(Larc(clip=True), params, grads, lr=0.0))


@pytest.mark.parametrize("exclude", [False, True])
@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
def test_lars(exclude, weight_decay):
    params, grads = drawn()
    found = adapted(Lars(0.001, 1e-8, exclude), params, grads, weight_decay=weight_decay)
    for name, param, grad, got in zip(TENSORS, params, grads, found, strict=True):
        wanted = slow_lars(param, grad, weight_decay, 0.001, 1e-8, exclude and param.ndim == 1)
        torch.testing.assert_close(got, wanted, rtol=1e-11, atol=1e-18, msg=name)


def test_lars_excludes_by_the_dimensions_of_the_whole_tensor():
    (param, *_), (grad, *_) = drawn()
    flat_param, flat_grad = [param.flatten()], [grad.flatten()]
    norms, one = norms_of(flat_param, flat_grad), torch.ones(1, dtype=torch.float64)
    adaptation = Lars(exclude_bias_and_norm=True)
    of_matrix, _ = adaptation.coefficients(norms, one, 0 * one, torch.tensor([2]))
    of_vector, _ = adaptation.coefficients(norms, one, 0 * one, torch.tensor([1]))
    assert of_vector == 1.0
    assert of_matrix < 0.01


def test_lars_survives_a_decay_that_cancels_the_gradient():
    # |g|^2 + 2 wd <g, p> + wd^2 |p|^2 is 0 here but for rounding, which may leave it below 0.
    for seed in range(20):
        param = drawn(seed)[0][0]
        (found,) = adapted(Lars(), [param], [-0.1 * param], weight_decay=0.1)
        assert found.isfinite().all()
        assert found.norm() <= 0.001 * param.norm()


def test_eps_keeps_lars_from_stepping_on_rounding_noise():
    param, noise = torch.ones(4, dtype=torch.float64), torch.full((4,), 1e-17, dtype=torch.float64)
    (without,) = adapted(Lars(eps=0.0), [param], [noise], weight_decay=0.0)
    (with_eps,) = adapted(Lars(), [param], [noise], weight_decay=0.0)
    assert math.isclose(without.norm().item(), 0.001 * 2.0, rel_tol=1e-6)  # as far as for any true gradient
    assert with_eps.norm() < 1e-11


@pytest.mark.parametrize("adaptation", [Larc(clip=True), Larc(), Lars(), Lars(exclude_bias_and_norm=True)], ids=str)
def test_nothing_is_read_on_the_host(adaptation):
    # Tensors on "meta" have no values: any branch on one or copy to the host raises.
    number = torch.empty(3, device="meta")
    scale, decay = adaptation.coefficients(
        TensorNorms(number, number, number), number, number, torch.empty(3, dtype=torch.int64, device="meta")
    )
    assert scale.shape == decay.shape == (3,)
    assert scale.is_meta
    assert decay.is_meta


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_coefficients_have_the_dtype_of_the_norms(dtype):
    ones, doubles = torch.ones(2, dtype=dtype), torch.ones(2, dtype=torch.float64)
    for adaptation in (Larc(clip=True), Lars()):
        scale, decay = adaptation.coefficients(TensorNorms(ones, ones, ones), doubles, doubles, torch.ones(2))
        assert scale.dtype == decay.dtype == dtype


def test_decay_absorbed_gives_the_weight_decay_back_also_after_an_error():
    groups = [{"params": [torch.nn.Parameter(torch.ones(1))], "weight_decay": wd} for wd in (0.1, 0.2)]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    with pytest.raises(RuntimeError, match="midway"), decay_absorbed(optimizer):
        assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, 0.0]
        raise RuntimeError("midway")
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.2]


@pytest.mark.parametrize("adaptation", [Larc(), Lars()], ids=str)
def test_what_needs_the_inner_product_says_so(adaptation):
    """Where it does not, nobody computes one."""
    one = torch.ones(1, dtype=torch.float64)
    scales = [
        adaptation.coefficients(TensorNorms(one, one, dot), lr=one, weight_decay=0.1 * one, num_dims=2 * one)[0]
        for dot in (0 * one, one)
    ]
    assert torch.equal(*scales) is not adaptation.needs_dot
