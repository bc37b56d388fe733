"""How far an optimizer looks, found by trial: torch's, timm's, and some that a careless trial would let through."""

from __future__ import annotations

import inspect
import operator
from typing import Any

import prodigyopt
import pytest
import schedulefree
import timm.optim
import torch
from torch import nn

from vissl_zero.errors import ConfigError
from vissl_zero.optim import update_rule as module
from vissl_zero.optim.elementwise import SINGLE_ROUNDING, sgd
from vissl_zero.optim.update_rule import (
    ELEMENT_WISE,
    UpdateRule,
    counter_keys,
    element_keys,
    state_keys,
    trial_state,
    update_rule,
    with_params,
    with_wrapped,
)

SHAPES = [(40, 7), (40,), (5, 3, 3, 3), (4, 40), ()]


def _rule(build, shapes=SHAPES):
    params = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    optimizer = build(params)
    own = [[tuple(param.shape) for param in group["params"]] for group in optimizer.param_groups]
    return update_rule(optimizer, own, is_flattened=False)


def _all_of_torch():
    classes = [cls for _, cls in inspect.getmembers(torch.optim, inspect.isclass)]
    return [cls for cls in classes if issubclass(cls, torch.optim.Optimizer) and cls is not torch.optim.Optimizer]


@pytest.mark.parametrize("cls", _all_of_torch(), ids=lambda cls: cls.__name__)
def test_every_optimizer_of_torch(cls, monkeypatch):
    monkeypatch.setattr(module, "ELEMENT_WISE", frozenset())  # or it would be taken on trust
    if cls in ELEMENT_WISE:
        assert _rule(lambda params: cls(params, lr=1e-2)) is UpdateRule.ELEMENT_WISE
    elif cls.__name__ in ("Muon", "Adafactor"):
        shapes = [shape for shape in SHAPES if len(shape) == 2]
        assert _rule(lambda params: cls(params, lr=1e-2), shapes) is UpdateRule.PER_TENSOR
    else:  # LBFGS asks for a closure, SparseAdam for sparse gradients; a new one of torch's belongs in a list above
        assert cls.__name__ in ("LBFGS", "SparseAdam")
        with pytest.raises(ConfigError, match="must run on single tensors"):
            _rule(lambda params: cls(params, lr=1e-2))


@pytest.mark.parametrize("options", [{"amsgrad": True}, {"maximize": True}, {"foreach": True}, {"capturable": False}])
def test_options_of_an_element_wise_optimizer(options, monkeypatch):
    monkeypatch.setattr(module, "ELEMENT_WISE", frozenset())
    assert _rule(lambda params: torch.optim.AdamW(params, lr=0.0, **options)) is UpdateRule.ELEMENT_WISE


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        *((name, UpdateRule.ELEMENT_WISE) for name in ("lion", "nadamw", "madgrad", "rmsproptf", "adopt", "sgdw")),
        *((name, UpdateRule.PER_TENSOR) for name in ("adamp", "sgdp", "clion", "adafactor", "adafactorbv", "lars")),
        *((name, UpdateRule.PER_TENSOR) for name in ("muon", "novograd", "mars")),
        ("lamb", None),  # it clips by the norm of all gradients
    ],
)
def test_optimizers_of_timm_as_people_build_them(name, expected):
    """With a group without weight decay, as ``create_optimizer_v2`` makes it, on which LARS and LAMB rest in places."""
    model = nn.Sequential(nn.Linear(7, 40), nn.Conv2d(3, 5, 3), nn.LayerNorm(40))
    optimizer = timm.optim.create_optimizer_v2(model, name, lr=1e-2, weight_decay=0.05)
    assert len(optimizer.param_groups) > 1
    shapes = [[tuple(param.shape) for param in group["params"]] for group in optimizer.param_groups]
    if expected is None:
        with pytest.raises(ConfigError, match="from that tensor alone"):
            update_rule(optimizer, shapes, is_flattened=False)
    else:
        assert update_rule(optimizer, shapes, is_flattened=False) is expected


def test_the_refusal_of_timms_lamb_names_the_option_that_couples_all_tensors():
    with pytest.raises(ConfigError, match=r"all tensors \(max_grad_norm=None, and use clip_grad instead\)"):
        _rule(lambda params: timm.optim.Lamb(params, lr=1e-2))


def test_prodigy_couples_all_tensors():
    with pytest.raises(ConfigError, match="from that tensor alone"):
        _rule(lambda params: prodigyopt.Prodigy(params, lr=1.0))


class _Sgd(torch.optim.SGD):
    """Changes gradients by ``change`` first."""

    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.change(group, param)
        return super().step(closure)


class _OneGroupOnly(_Sgd):
    """Looks at full tensors where a group says so."""

    def change(self, group, param):
        if group.get("normalized"):
            param.grad /= param.grad.norm()


class _LargeOnly(_Sgd):
    least = 30_000

    def change(self, group, param):
        if param.numel() > self.least:
            param.grad -= param.grad.mean()


class _LargestOnly(_LargeOnly):
    least = 100_000


class _ClampOnly(_Sgd):
    """Looks at the full tensor where its gradient is very large."""

    def change(self, group, param):
        if param.numel():
            param.grad /= param.grad.abs().max().clamp(min=50.0)


class _Random(_Sgd):
    def change(self, group, param):
        param.grad += torch.randn_like(param)


class _Idle(_Sgd):
    """As one that holds the parameters it was built with somewhere else."""

    def change(self, group, param):
        param.grad = None


def _two_groups(cls):
    return lambda params: cls([{"params": params[:1]}, {"params": params[1:], "normalized": True}], lr=0.1)


@pytest.mark.parametrize(
    "build", [_two_groups(_OneGroupOnly), *(lambda p, c=c: c(p, lr=0.1) for c in (_LargeOnly, _ClampOnly))]
)
def test_found_in_any_group_at_any_size_and_any_value(build):
    assert _rule(build) is UpdateRule.PER_TENSOR


@pytest.mark.parametrize("shapes", [[(400, 300), (8, 6)], [(8, 6), (400, 300)], [(20, 8, 700), (4, 4, 4)]])
def test_the_largest_of_each_number_of_dimensions_is_tried(shapes):
    assert _rule(lambda params: _LargestOnly(params, lr=0.1), shapes) is UpdateRule.PER_TENSOR
    small = [shape for shape in shapes if torch.Size(shape).numel() < _LargestOnly.least]
    assert _rule(lambda params: _LargestOnly(params, lr=0.1), small) is UpdateRule.ELEMENT_WISE


@pytest.mark.parametrize(
    ("cls", "sentence"), [(_Random, "without randomness"), (_Idle, "left those of group 0 as they were")]
)
def test_what_cannot_be_reproduced_or_tried_is_refused(cls, sentence):
    with pytest.raises(ConfigError, match=sentence):
        _rule(lambda params: cls(params, lr=0.1))


def test_a_hook_takes_trust_away():
    def normalize(optimizer, *_):
        for param in (param for group in optimizer.param_groups for param in group["params"]):
            param.grad /= param.grad.norm()

    def build(params):
        optimizer = torch.optim.SGD(params, lr=0.1)
        optimizer.register_step_pre_hook(normalize)
        return optimizer

    assert _rule(build) is UpdateRule.PER_TENSOR


@pytest.mark.parametrize("kind", [None, *SINGLE_ROUNDING.values()])
def test_what_is_declared_element_wise_needs_no_trial_and_would_pass_one(kind, monkeypatch):
    def build(params):
        optimizer = kind(params, lr=0.1, weight_decay=0.1) if kind else sgd([{"params": params, "lr": 0.1}])
        optimizer.register_step_pre_hook(hook)
        return optimizer

    hook = module.element_wise(lambda *_: None)
    with monkeypatch.context() as patch:
        patch.setattr(module, "_try_out", lambda *_: pytest.fail("tried"))
        assert _rule(build) is UpdateRule.ELEMENT_WISE
    monkeypatch.setattr(module, "_DECLARED", [])
    tried = []
    monkeypatch.setattr(module, "_try_out", lambda *args, try_out=module._try_out: tried.append(1) or try_out(*args))
    assert _rule(build) is UpdateRule.ELEMENT_WISE
    assert tried


def test_one_that_wraps_another_is_tried_with_it():
    build = lambda params: timm.optim.Lookahead(torch.optim.AdamW(params, lr=0.1))  # noqa: E731
    assert _rule(build) is UpdateRule.ELEMENT_WISE


def test_a_trial_leaves_the_optimizer_alone():
    params = [nn.Parameter(torch.randn(3, 4))]
    optimizer = _ClampOnly(params, lr=0.0)
    before, random_state = params[0].detach().clone(), torch.get_rng_state()
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    update_rule(optimizer, [[(3, 4)]], is_flattened=False)
    assert not optimizer.state and optimizer.param_groups[0]["params"] == params
    assert torch.equal(before, params[0]) and torch.equal(random_state, torch.get_rng_state())


def test_a_trial_leaves_state_that_is_there_from_the_start_alone():
    param = nn.Parameter(torch.ones(3, 4))
    optimizer = torch.optim.Adagrad([param], initial_accumulator_value=0.5)
    assert state_keys(optimizer) == [{"step", "sum"}]
    trial_state(optimizer, 0, param)
    assert float(optimizer.state[param]["step"]) == 0 and bool((optimizer.state[param]["sum"] == 0.5).all())


def test_counters_are_told_from_values_of_elements():
    param = nn.Parameter(torch.zeros(()))
    assert element_keys(torch.optim.NAdam([param])) == {"exp_avg", "exp_avg_sq"}  # not step, not mu_product
    assert element_keys(torch.optim.ASGD([param])) == {"ax"}
    assert element_keys(torch.optim.Adagrad([param])) == {"sum"}
    groups = [{"params": [param]}, {"params": [nn.Parameter(torch.zeros(2))], "momentum": 0.9}]
    assert element_keys(torch.optim.SGD(groups)) == {"momentum_buffer"}  # of any group


def test_state_that_every_parameter_has_whatever_its_shape():
    matrix, scalar = nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(()))
    assert state_keys(torch.optim.NAdam([scalar])) == [{"step", "mu_product", "exp_avg", "exp_avg_sq"}]
    assert state_keys(torch.optim.Muon([matrix])) == [{"momentum_buffer"}]  # it takes no vectors
    assert state_keys(torch.optim.Adafactor([matrix])) == [{"step"}]  # a matrix has row_var and col_var
    assert state_keys(torch.optim.SGD([matrix])) == [set()]


class _CountingMatrices(torch.optim.SGD):
    """Counts its steps in its groups, and takes no vectors."""

    def step(self, closure=None):
        assert all(param.dim() > 1 for group in self.param_groups for param in group["params"])
        self.param_groups[0]["count"] = self.param_groups[0].get("count", 0) + 1
        return super().step(closure)


def test_settings_that_a_step_changes_are_state():
    param = nn.Parameter(torch.zeros(2, 3))
    built = schedulefree.AdamWScheduleFree([param], lr=0.1)
    built.train()
    assert counter_keys(built) == {"k", "scheduled_lr", "lr_max", "weight_sum"}
    assert counter_keys(timm.optim.Lookahead(torch.optim.AdamW([param], lr=0.1))) == {"lookahead_step"}
    assert counter_keys(torch.optim.Muon([param])) == counter_keys(torch.optim.Adam([param])) == set()
    assert counter_keys(_CountingMatrices([param], lr=0.1)) == {"count"}


def test_other_parameters_are_lent_to_the_same_groups_and_given_back():
    first, second, lent = [nn.Parameter(torch.ones(1))], [nn.Parameter(torch.ones(2))], [nn.Parameter(torch.ones(3))]
    optimizer = torch.optim.SGD([{"params": first}, {"params": second}], lr=1.0)
    groups, held = list(optimizer.param_groups), [group["params"] for group in optimizer.param_groups]
    with pytest.raises(KeyError), with_params(optimizer, [lent, []]):
        assert [group["params"] for group in optimizer.param_groups] == [lent, []]
        assert all(map(operator.is_, groups, optimizer.param_groups))  # schedules set the rates in them
        raise KeyError
    assert all(group["params"] is params for group, params in zip(optimizer.param_groups, held, strict=True))


def test_the_state_of_a_first_step_has_its_shapes_and_formats():
    """Whether it may be computed without values (Adam) or not."""

    class Reading(torch.optim.Adam):
        """Looks at a value on the host, which a tensor without memory does not have."""

        def step(self, closure=None):
            assert float(self.param_groups[0]["params"][0].detach().sum()) != 0
            return super().step(closure)

    param = nn.Parameter(torch.zeros(2, 3, dtype=torch.float64))
    for cls in (torch.optim.Adam, Reading):
        optimizer = cls([{"params": [nn.Parameter(torch.zeros(2))]}, {"params": [param], "amsgrad": True}])
        state = trial_state(optimizer, 1, param)
        assert {key: (tuple(value.shape), value.dtype) for key, value in state.items()} == {
            "step": ((), torch.float32),
            **dict.fromkeys(("exp_avg", "exp_avg_sq", "max_exp_avg_sq"), ((2, 3), torch.float64)),
        }
        assert trial_state(optimizer, 0, param).keys() == {"step", "exp_avg", "exp_avg_sq"}


def test_optimizers_inside_an_optimizer():
    inner = torch.optim.AdamW([nn.Parameter(torch.zeros(2))])
    outer = timm.optim.Lookahead(inner)
    outer.other = torch.optim.SGD([nn.Parameter(torch.zeros(2))])  # over other groups: an optimizer of its own
    assert with_wrapped(outer) == [outer, inner] and with_wrapped(inner) == [inner]


def test_only_tensors_with_memory_are_read() -> None:
    given_back, whole = torch.ones(3), torch.ones(6)
    given_back.untyped_storage().resize_(0)
    tensors = [whole, whole[3:], torch.empty(0), given_back, torch.ones(3, device="meta")]
    assert [module._has_memory(tensor) for tensor in tensors] == [True, True, True, False, False]


def test_trials_are_where_clamps_and_projections_decide_otherwise_for_rows() -> None:
    turning, (start, grads) = (vars(case).values() for case in module._cases((8, 6), torch.device("cpu")))
    first, _, back, silent, _ = list(turning)[1]
    assert back.equal(-first) and not silent[:4].any() and silent[4:].all()
    assert not start[:4].any() and 0.0 < float(start[4:].abs().max()) < 0.1
    sizes = [float(grad.norm()) / 48**0.5 for grad in grads]
    assert all(0.7 < size / scale < 1.4 for size, scale in zip(sizes, (1e3, 1.0, 1e-3, 30.0, 1e-6, 1.0), strict=True))

    across, mixed, along = module._cases_by_angle((8, 6), torch.device("cpu"))
    assert abs(float((across.grads[0] * across.start).sum())) < 1e-12
    products = (mixed.grads[0] * mixed.start).sum(dim=1).abs()
    assert float(products[:4].max()) < 1e-12 < 0.1 < float(products[4:].min())
    assert mixed.grads[1].equal(mixed.grads[0])
    _, vector, _ = module._cases_by_angle((8,), torch.device("cpu"))  # an element at right angles would be zero
    assert bool((vector.grads[0].abs() > 1e-3).all())
    assert along.grads[0].equal(along.start) and along.grads[1].equal(3 * along.start)
    torch.testing.assert_close(along.grads[2], -along.start, rtol=0.0, atol=0.5)

    assert [len(piece.start) for piece in along.pieces(is_flattened=False)] == [1, 3, 4, 0]
    assert [len(piece.start) for piece in along.pieces(is_flattened=True)] == [1, 23, 24, 0]


def test_state_without_memory_begins_with_zeros() -> None:
    like = torch.ones(3, device="meta")
    fresh = module._fresh("sum", torch.empty_like(like), like, torch.ones(2, 2))
    assert fresh.shape == (2, 2) and not fresh.any()


@pytest.mark.parametrize(
    ("key", "value", "like", "fresh"),
    [
        ("slow", torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0]), [7.0, 8.0, 9.0]),  # a copy of the parameter
        ("sum", torch.tensor([4.0, 4.0]), torch.tensor([1.0, 2.0]), [4.0, 4.0, 4.0]),
        ("sum", torch.tensor(4.0), torch.tensor(1.0), [4.0, 4.0, 4.0]),
        ("slow", torch.tensor(1.0), torch.tensor(1.0), [1.0, 1.0, 1.0]),  # a number, whose value says nothing
        ("step", torch.tensor(4.0), torch.tensor(1.0), 4.0),
        ("step", torch.tensor(4.0), torch.tensor([1.0, 2.0]), 4.0),
        ("rows", torch.ones(1, 2), torch.tensor([1.0, 2.0]), [[1.0, 1.0]]),
        ("count", 3, torch.tensor([1.0, 2.0]), 3),
    ],
)
def test_state_that_is_there_from_the_start_is_made_for_another_parameter(
    key: str, value: Any, like: torch.Tensor, fresh: Any
) -> None:
    made = module._fresh(key, value, like, torch.nn.Parameter(torch.tensor([7.0, 8.0, 9.0])))
    assert made is not value or not isinstance(value, torch.Tensor)
    assert (made.tolist() if isinstance(made, torch.Tensor) else made) == fresh


@pytest.mark.parametrize(
    ("shapes", "small", "large"),
    [
        ([(3, 2)], [(8, 6), (5, 12)], [(264, 160), (3, 2)]),
        ([(5,), (7,), (6,)], [(13,)], [(7,)]),
        ([()], [()], []),  # one element says nothing of size
        ([(1,)], [(13,)], []),
        ([(2,)], [(13,)], [(2,)]),
        ([(2**17,), (2**17 + 1,)], [(13,)], [(2**17,)]),  # what takes too long is not tried
        ([(1, 2, 3), (4, 4)], [(6, 5, 4), (8, 6), (5, 12)], [(264, 160), (1, 2, 3), (4, 4)]),
        ([(1, 1, 1, 1, 1, 2)], [(4, 2, 2, 2, 2, 2)], [(1, 1, 1, 1, 1, 2)]),
    ],
)
def test_shapes_that_are_tried_have_the_dimensions_and_the_sizes_of_the_parameters(shapes, small, large):
    assert module._small_shapes(shapes) == small
    assert module._large_shapes(shapes) == large
