"""First weights depend on seed and full name, and on nothing else."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from vissl_zero.models.init import initialize_
from vissl_zero.models.trunks.resnet import ResNet


class _Custom(nn.Module):
    """Fills itself by the protocol."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(4, 8))

    def init_parameters(self, generator_for: Callable[[str], torch.Generator]) -> None:
        self.token.copy_(torch.randn(4, 8, generator=generator_for("token")))


class _Scaled(nn.Linear):
    """A subclass of a known type with a reset of its own."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=100.0)
        nn.init.zeros_(self.bias)


class _Gain(nn.Module):
    """A parameter with a value from the constructor and no way to reset it."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.full((3,), 0.25))


_PARTS: dict[str, Callable[[], nn.Module]] = {
    "conv": lambda: nn.Conv2d(4, 8, 3, groups=2),
    "twin": lambda: nn.Conv2d(4, 8, 3, groups=2),
    "linear": lambda: nn.Linear(16, 5),
    "norm": lambda: nn.BatchNorm2d(8),
    "group_norm": lambda: nn.GroupNorm(2, 8),
    "embedding": lambda: nn.Embedding(7, 6),
    "custom": _Custom,
    "scaled": lambda: _Scaled(6, 6),
    "gain": _Gain,
}


def _state(names: list[str], seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    torch.randn(len(names))  # the global generator must not matter
    model = nn.ModuleDict({name: _PARTS[name]() for name in names}).to(dtype)
    initialize_(model, seed)
    return model.state_dict()


def test_build_order_and_number_format_do_not_matter() -> None:
    forward = _state(list(_PARTS))
    backward = _state(list(reversed(_PARTS)))
    wide = _state(list(_PARTS), dtype=torch.float64)
    assert forward.keys() == backward.keys()
    for name, tensor in forward.items():
        assert torch.equal(tensor, backward[name]), name
        assert torch.equal(tensor.double(), wide[name].double()), name
        assert tensor.dtype == torch.int64 or wide[name].dtype == torch.float64


def test_seed_and_name_matter() -> None:
    first, second = _state(list(_PARTS)), _state(list(_PARTS), seed=1)
    assert not torch.equal(first["conv.weight"], first["twin.weight"])
    for name in ("conv.weight", "conv.bias", "linear.weight", "embedding.weight", "custom.token", "scaled.weight"):
        assert not torch.equal(first[name], second[name]), name


def test_values_follow_the_rule_of_each_type() -> None:
    state = _state(list(_PARTS))
    std = math.sqrt(2 / (9 * 8))
    assert abs(state["conv.weight"].std().item() / std - 1) < 0.25
    assert state["conv.bias"].abs().max() <= 1 / math.sqrt(2 * 9)
    assert 0.8 / 4 < state["linear.weight"].abs().max() <= 1 / 4
    for name in ("norm", "group_norm"):
        assert state[f"{name}.weight"].eq(1).all() and state[f"{name}.bias"].eq(0).all()
    assert state["scaled.weight"].std() > 50 and state["scaled.bias"].eq(0).all()
    assert state["gain.gain"].eq(0.25).all()
    assert state["custom.token"].std() > 0.5


def test_norm_statistics_start_afresh() -> None:
    norm = nn.BatchNorm1d(3)
    norm(torch.randn(5, 3) + 4)
    initialize_(norm, 0)
    assert norm.running_mean is not None and norm.running_mean.eq(0).all()


@pytest.mark.parametrize("is_module_shared", [False, True])
def test_what_is_tied_or_shared_is_drawn_alike_in_any_order(is_module_shared: bool) -> None:
    def tied(order: tuple[str, str]) -> Tensor:
        layers = {name: nn.Linear(3, 3, bias=False) for name in order}
        if is_module_shared:
            layers[order[1]] = layers[order[0]]
        layers[order[1]].weight = layers[order[0]].weight
        model = nn.ModuleDict(layers)
        initialize_(model, 0)
        assert layers["a"].weight is layers["b"].weight
        return layers["a"].weight

    assert torch.equal(tied(("a", "b")), tied(("b", "a")))


@pytest.mark.parametrize("depth", [18, 50])
def test_residual_branches_start_at_zero_where_asked(depth: int) -> None:
    trunk = ResNet(DEPTH=depth, ZERO_INIT_RESIDUAL=True, STEM_TYPE="RES_STEM_CIFAR")
    initialize_(trunk, 0)
    block = trunk.stages[0][1][0]  # type: ignore[index]
    x = torch.rand(2, block.conv1.in_channels, 4, 4)
    torch.testing.assert_close(block(x), x)


@pytest.mark.parametrize("is_standardized", [False, True])
def test_a_resnet_begins_as_vissl_s_where_asked(is_standardized: bool) -> None:
    """VISSL rebuilds its layers after torchvision's initialization (resnext.py at 09270ed2), as torch builds them."""
    options = {"DEPTH": 18, "STANDARDIZE_CONVOLUTIONS": is_standardized}
    own, theirs = ResNet(**options), ResNet(**options, FIRST_WEIGHTS="vissl")
    for trunk in (own, theirs):
        initialize_(trunk, 0)
    for mine, its in zip(own.modules(), theirs.modules(), strict=True):
        if isinstance(mine, nn.Conv2d) and isinstance(its, nn.Conv2d):
            bound = 1 / math.sqrt(its.weight[0].numel())
            assert 0.99 * bound < its.weight.abs().max() <= bound
            assert abs(its.weight.std().item() / (bound / math.sqrt(3)) - 1) < 0.05
            fan_out = mine.weight[:, 0].numel()
            assert abs(mine.weight.std().item() / math.sqrt(2 / fan_out) - 1) < 0.05
            assert (type(its).forward is not nn.Conv2d.forward) == is_standardized


def test_the_global_generator_is_left_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    initialize_(nn.ModuleDict({name: nn.Identity() for name in "ab"} | {"e": nn.Embedding(2, 2)}), 0)
    # Building the embedding drew; initializing it must not have.
    torch.manual_seed(3)
    nn.Embedding(2, 2)
    after_building = torch.rand(2)
    torch.manual_seed(3)
    embedding = nn.Embedding(2, 2)
    initialize_(embedding, 0)
    assert torch.equal(torch.rand(2), after_building)
    assert not torch.equal(expected, after_building)
