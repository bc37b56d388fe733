"""Models built without memory for their weights, and filled unit by unit: the same bits as those of a whole model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.blocks import model_block
from vissl_zero.errors import ConfigError
from vissl_zero.models.bare import build_bare, lost_operations, whole_start_bytes
from vissl_zero.models.init import FirstWeights, initialize_, outermost_units
from vissl_zero.models.model import Model, Unit, build_model

REGNET = {
    "NAME": "regnet",
    "REGNET": {"depth": 3, "w_0": 8, "w_a": 8.0, "w_m": 2.0, "group_width": 8, "stem_width": 8},
}
VIT = {
    "IMAGE_SIZE": 16,
    "PATCH_SIZE": 8,
    "NUM_LAYERS": 2,
    "NUM_HEADS": 2,
    "HIDDEN_DIM": 16,
    "MLP_DIM": 16,
    "USE_MASK_TOKEN": True,
    "LAYER_SCALE_INIT": 0.1,
    "NUM_REGISTERS": 2,
}
TIMM_VIT = {"embed_dim": 16, "depth": 2, "num_heads": 2, "img_size": 16, "patch_size": 8}
SWAV = ["swav_head", {"dims": [-1, 12, 6], "use_bn": True, "num_clusters": [7, 5]}]
DINO = ["dino_head", {"in_dim": 16, "num_clusters": [9], "use_bn": True, "hidden_dim": 8, "bottleneck_dim": 4}]
MLP = ["mlp", {"dims": [-1, 3]}]
RESNET = {"NAME": "resnet", "RESNETS": {"DEPTH": 18, "ZERO_INIT_RESIDUAL": True}}
MODELS: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "regnet": (REGNET, [SWAV, MLP]),
    "resnet": (RESNET, [["siamese_head", {"dims": [-1, 8, 4], "predictor_dims": [6]}]]),
    "vit": ({"NAME": "vision_transformer", "VISION_TRANSFORMERS": VIT}, [DINO]),
    "timm_vit": (
        {"NAME": "timm/vit_tiny_patch16_224", "PARAMS": {"name": "vit_tiny_patch16_224", "model_args": TIMM_VIT}},
        [["patch_predictor", {"dims": [-1, 8, 12], "depth": 2, "num_heads": 2}]],
    ),
}


def _build(name: str) -> Model:
    trunk, heads = MODELS[name]
    return build_model(
        model_block(
            {"TRUNK": trunk, "HEAD": {"PARAMS": heads, "BATCHNORM_EPS": 1e-5, "BATCHNORM_MOMENTUM": 0.1, **_SCALE}}
        )
    )


_SCALE = {"PARAMS_MULTIPLIER": 0.5}


def _whole(build: Callable[[], Model], seed: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    model = build()
    initialize_(model, seed)
    return model.to(dtype).state_dict()


def _require_same(model: nn.Module, expected: dict[str, Tensor]) -> None:
    found = model.state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


@pytest.mark.parametrize("name", MODELS)
def test_units_filled_in_any_order_have_the_bits_of_a_whole_model(name: str) -> None:
    model = build_bare(lambda: _build(name))
    bare = {key for key, param in model.named_parameters() if param.is_meta}
    kinds = nn.Linear | nn.Conv2d | nn.modules.batchnorm._BatchNorm | nn.LayerNorm
    known = [key for key, module in model.named_modules() if isinstance(module, kinds)]
    assert bare == {f"{key}.{own}" for key in known for own, _ in model.get_submodule(key).named_parameters()}
    weights = FirstWeights(model, seed=7)
    model.to(torch.float64)
    teacher = copy.deepcopy(model).as_teacher()
    its_weights = weights.of_copy(teacher)
    units = outermost_units(model)
    layers = [key for key, module in model.named_modules() if isinstance(module, nn.Linear)]
    for unit in [layers[0], *reversed(units)]:
        weights.fill_(unit)
        inside = next(other for other in units if f"{unit}.".startswith(f"{other}."))
        assert not any(param.is_meta for param in model.get_submodule(inside).parameters())
    weights.fill_("")
    expected = _whole(lambda: _build(name), 7, torch.float64)
    _require_same(model, expected)
    its_weights.fill_("")
    its = teacher.state_dict()
    assert its and all(torch.equal(tensor, expected[key]) for key, tensor in its.items())


def test_only_the_unit_asked_for_gets_memory() -> None:
    model = build_bare(lambda: _build("regnet"))
    weights = FirstWeights(model, seed=0)
    weights.fill_("trunk.stages.0.0")
    filled = {name for name, param in model.named_parameters() if not param.is_meta}
    assert filled == {name for name, _ in model.named_parameters() if name.startswith("trunk.stages.0.0.")}


def test_weights_of_a_file_replace_those_drawn_in_the_format_of_the_model() -> None:
    third = torch.full((7, 6), 1 / 3, dtype=torch.float64)
    model = build_bare(lambda: _build("regnet"))
    weights = FirstWeights(model, seed=0)
    weights.loaded = {"heads.0.prototypes0.weight": lambda: third}
    model.to(torch.float64)
    weights.fill_("")
    assert torch.equal(model.get_parameter("heads.0.prototypes0.weight"), third.float().double())


def test_a_head_can_be_drawn_by_another_name() -> None:
    model = build_bare(lambda: _build("regnet"))
    FirstWeights(model, 0, {"heads.1": ""}).fill_("heads.1")
    alone = _build("regnet").heads[1]
    initialize_(alone, 0)
    _require_same(model.heads[1], alone.state_dict())


class _Trunk(nn.Module):
    """A plugin's: constructors draw for a parameter that nothing else fills, after layers have drawn for theirs."""

    feature_dim = 4

    def __init__(self, last: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.first = Unit(nn.Linear(3, 4), nn.Embedding(2, 4))
        nn.init.kaiming_normal_(self.first[0].weight)
        self.second = Unit(last())
        self.gain = nn.Parameter(torch.randn(4))


class _Tied(_Trunk):
    def __init__(self) -> None:
        super().__init__(lambda: nn.Linear(3, 4))
        self.second[0].weight = self.first[0].weight


class _Spanning(_Trunk):
    def __init__(self) -> None:
        super().__init__(lambda: nn.Linear(4, 4))

    def init_parameters(self, generator_for: Callable[[str], torch.Generator]) -> None:
        for param in self.parameters():
            param.copy_(torch.rand(param.shape, generator=generator_for("all")))


class _Buffered(_Trunk):
    """A buffer that a constructor computes, by a function with keywords."""

    def __init__(self) -> None:
        super().__init__(lambda: nn.Linear(4, 4))
        self.register_buffer("scale", torch.linspace(0.0, 1.0, steps=4))


class _Resetting(_Trunk):
    """What resets a parameter of its own may reset its units too."""

    def __init__(self) -> None:
        super().__init__(lambda: nn.Linear(4, 4))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.gain)


class _ResettingUnits(nn.Module):
    """Owns no parameter, so that nothing asks it to reset one."""

    feature_dim = 4

    def __init__(self) -> None:
        super().__init__()
        self.first = Unit(nn.Linear(3, 4))

    def reset_parameters(self) -> None:
        raise AssertionError


class _Asking(_Trunk):
    """torch draws nothing for weights that are not there, whatever comes after them."""

    def __init__(self) -> None:
        super().__init__(lambda: nn.Linear(4, 4))
        nn.init.trunc_normal_(self.second[0].weight)
        self.offset = nn.Parameter(torch.randn(4))


class _Computing(_Trunk):
    def __init__(self) -> None:
        super().__init__(lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)))


class _Probing(_Trunk):
    def __init__(self) -> None:
        super().__init__(lambda: nn.Linear(4, 4))
        self.bound = float(self.first[0].weight.detach().abs().max())


def _plugin(trunk: Callable[[], nn.Module]) -> Model:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return Model(trunk(), [nn.Linear(4, 2)])


@pytest.mark.parametrize(
    ("trunk", "is_bare"),
    [
        (lambda: _Trunk(lambda: nn.LayerNorm(4)), True),
        (_Tied, False),
        (_Spanning, False),
        (_Buffered, True),
        (_Resetting, False),
        (_ResettingUnits, True),
        (_Asking, torch.__version__.startswith("2.11")),  # which draws all the same
        (_Computing, False),
        (_Probing, False),
    ],
)
def test_a_model_that_cannot_be_filled_by_units_is_built_whole(trunk: Callable[[], nn.Module], is_bare: bool) -> None:
    model = build_bare(lambda: _plugin(trunk))
    assert any(param.is_meta for param in model.parameters()) == is_bare
    FirstWeights(model, 5).fill_("")
    _require_same(model, _whole(lambda: _plugin(trunk), 5))


def test_what_is_wrong_with_a_model_is_said_as_ever() -> None:
    def build() -> Model:
        raise ConfigError([])

    with pytest.raises(ConfigError):
        build_bare(build)


def test_operations_on_weights_that_are_not_there_are_noted() -> None:
    model = build_bare(lambda: _build("regnet"))
    with lost_operations() as lost, torch.no_grad():
        model.as_teacher()
        assert not lost
        model.heads[1].clf[0].weight.mul_(2)  # type: ignore[union-attr,index]
    assert lost


def test_a_trunk_that_draws_all_its_weights_stands_twice_in_memory_at_the_start() -> None:
    plain, spanning = _build("regnet"), _plugin(_Spanning)
    of_plain, whole, trunk = (sum(map(torch.numel, part.parameters())) for part in (plain, spanning, spanning.trunk))
    assert whole_start_bytes(plain) == 4 * of_plain
    assert whole_start_bytes(spanning) == 4 * (whole + trunk)


def test_why_a_model_is_built_whole_is_noted(caplog: pytest.LogCaptureFixture) -> None:
    def build() -> Any:
        layer = nn.Linear(2, 2)
        assert float(layer.weight.sum()) == float(layer.weight.sum())
        return layer

    with caplog.at_level("INFO", "vissl_zero"):
        assert build_bare(build).weight.device.type == "cpu"
    (record,) = caplog.records
    assert record.getMessage().startswith(
        "The model is built whole on every rank: its constructor failed without weights ("
    )
