"""Which modules become units: decided without processes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from vissl_zero.errors import ConfigError
from vissl_zero.models.model import Model, Unit
from vissl_zero.resolve.resolved import Precision, ShardingPlan
from vissl_zero.sharding.model.wrap_plan import PlannedUnit, WrapPlan, model_units, plan_wrap
from vissl_zero.sharding.param_facts import gathered_bytes, param_facts

import timm  # isort: skip - vissl_zero lets it be imported beside a CPU build of torch

HALF = Precision(compute="bfloat16")


class _Trunk(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = Unit(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
        self.stages = nn.ModuleList(
            nn.ModuleList(Unit(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)) for _ in range(count)) for count in (1, 3)
        )

    def forward(self, images: list[Tensor]) -> list[Tensor]:
        return images


def _model() -> Model:
    return Model(_Trunk(), [nn.Sequential(nn.Linear(4, 50), nn.Linear(50, 2))])


def _names(wrap_plan: WrapPlan, kind: str) -> list[tuple[str, ...]]:
    return [unit.modules for unit in wrap_plan.units if unit.kind == kind]


def test_units_of_the_model_are_wrapped_in_forward_order_and_the_root_comes_last() -> None:
    wrap_plan = plan_wrap(_model(), ShardingPlan(level=3), num_ranks=2)
    blocks = [f"trunk.stages.{stage}.{index}" for stage, index in ((0, 0), (1, 0), (1, 1), (1, 2))]
    assert [unit.modules for unit in wrap_plan.units] == [(name,) for name in ("trunk.stem", *blocks, "heads.0", "")]
    total = sum(param.numel() for param in _model().parameters())
    assert sum(unit.num_params for unit in wrap_plan.units) == total
    assert wrap_plan.units[-1].num_params == 0


def test_threshold_wraps_layers_of_any_type_and_0_wraps_none() -> None:
    assert _names(plan_wrap(_model(), ShardingPlan(level=3), 2), "layer") == []
    large = plan_wrap(_model(), ShardingPlan(level=3, wrap_threshold=102), 2)
    assert _names(large, "layer") == [("trunk.stem.0",), ("heads.0.0",), ("heads.0.1",)]
    every = plan_wrap(_model(), ShardingPlan(level=3, wrap_threshold=1), 2)
    assert ("trunk.stages.1.2.1",) in _names(every, "layer")  # a batch norm
    order = [unit.modules[0] for unit in every.units]
    assert order.index("heads.0.0") < order.index("heads.0") < order.index("")


def test_a_child_that_attention_reads_without_calling_is_not_wrapped() -> None:
    model = nn.Sequential(nn.MultiheadAttention(8, 2), nn.Linear(8, 8))
    assert _names(plan_wrap(model, ShardingPlan(level=3, wrap_threshold=1), 2), "layer") == [("0",), ("1",)]


def test_batch_norm_stays_float32_only_where_parameters_are_half() -> None:
    assert _names(plan_wrap(_model(), ShardingPlan(level=3), 2), "norm") == []
    half = plan_wrap(_model(), ShardingPlan(level=3, precision=HALF), 2)
    assert len(_names(half, "norm")) == 5
    assert all(unit.is_float32 == (unit.kind == "norm") for unit in half.units)
    assert all(unit.is_replicated == unit.is_float32 for unit in half.units)
    assert "  norm   trunk.stem.1 " in half.describe() and "float32, on every rank" in half.describe()
    fairscale = plan_wrap(_model(), ShardingPlan(level=3, engine="fairscale", precision=HALF), 2)
    assert len(_names(fairscale, "norm")) == 5 and not any(unit.is_replicated for unit in fairscale.units)


def test_a_tied_parameter_binds_its_units() -> None:
    model = _model()
    first, second = (model.get_submodule(f"trunk.stages.1.{index}.0") for index in (0, 2))
    second.weight = first.weight
    wrap_plan = plan_wrap(model, ShardingPlan(level=3), 2)
    assert ("trunk.stages.1.0", "trunk.stages.1.2") in [unit.modules for unit in wrap_plan.units]
    assert sum(unit.num_params for unit in wrap_plan.units) == sum(param.numel() for param in model.parameters())
    assert "bound by a tied parameter" in wrap_plan.describe()


def test_a_unit_tied_to_what_is_around_it_is_left_to_that() -> None:
    model = _model()
    model.temperature = model.get_submodule("trunk.stem.0").bias  # type: ignore[assignment]
    names = [unit.modules for unit in plan_wrap(model, ShardingPlan(level=3), 2).units]
    assert ("trunk.stem",) not in names
    inner = plan_wrap(model, ShardingPlan(level=3, wrap_threshold=100), 2)
    assert ("trunk.stem.0",) not in [unit.modules for unit in inner.units]


def test_batch_norms_may_be_tied_to_each_other_alone_where_parameters_are_half() -> None:
    model, half = _model(), ShardingPlan(level=3, precision=HALF)
    norms = [model.get_submodule(f"trunk.stages.1.{index}.1") for index in (0, 2)]
    norms[1].bias = norms[0].bias
    assert ("trunk.stages.1.0.1", "trunk.stages.1.2.1") in _names(plan_wrap(model, half, 2), "norm")
    norms[0].bias = norms[1].bias = model.get_submodule("trunk.stages.0.0.0").bias
    with pytest.raises(ConfigError) as caught:
        plan_wrap(model, half, 2)
    assert [problem.key for problem in caught.value.problems] == ["trunk.stages.1.0.1", "trunk.stages.1.2.1"]
    plan_wrap(model, ShardingPlan(level=3), 2)  # in float32 all may share


class _Foreign(nn.Module):
    """A model that knows nothing of units."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.net = nn.ModuleDict({"layers": nn.ModuleList(nn.TransformerEncoderLayer(4, 2, 8) for _ in range(3))})
        self.mixed = nn.Sequential(nn.Linear(4, 4), nn.ReLU())


def test_repeated_blocks_of_a_foreign_model_become_units() -> None:
    wrap_plan = plan_wrap(_Foreign(), ShardingPlan(level=3), 2)
    assert [unit.modules[0] for unit in wrap_plan.units] == [*(f"net.layers.{index}" for index in range(3)), ""]
    assert wrap_plan.units[-1].num_params == 40 + 20


@pytest.mark.parametrize(
    ("name", "options", "first", "number"),
    [
        ("convnext_atto", {}, "stages.0.blocks.0", 12),
        ("swin_tiny_patch4_window7_224", {}, "layers.0.blocks.0", 12),
        ("pvt_v2_b0", {}, "stages.0.blocks.0", 8),
        ("regnety_002", {}, "s3.b1", 11),  # its first two stages have one block, which belongs to the root
        ("regnety_032", {}, "s1.b1", 21),  # its last stage has one block, which is large
        ("densenet121", {}, "features.denseblock1.denselayer1", 58),
        ("efficientnet_b0", {}, "blocks.0", 16),  # a stage of one block is a unit
        ("hrnet_w18", {}, "layer1.0", 28),  # its modules have several lists of blocks, and stay whole
        ("resnet18", {}, "layer1.0", 8),
        ("vit_tiny_patch16_224", {"depth": 3}, "blocks.0", 3),
    ],
)
def test_blocks_of_stages_are_units(name: str, options: dict[str, int], first: str, number: int) -> None:
    with torch.device("meta"):
        model = timm.create_model(name, **options)
    names = {module: name for name, module in model.named_modules()}
    units = [names[unit] for unit in model_units(model)]
    assert units[0] == first and len(units) == number


class _Block(nn.Module):
    def __init__(self, width: int, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.norm, self.linear, self.inner = nn.LayerNorm(width), nn.Linear(width, width), inner

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x))


@pytest.mark.parametrize(
    ("module", "names"),
    [
        (_Block(4), ["0.0", "0.1", "1"]),
        (nn.Sequential(nn.ReLU(), _Block(5)), ["0.0", "0.1", "1.1"]),
        (_Block(3), ["0.0", "0.1"]),  # smaller than the others
        (nn.Linear(9, 9), ["0.0", "0.1"]),
        (_Block(4, nn.ModuleList([_Block(4), _Block(4)])), ["0.0", "0.1", "1.inner.0", "1.inner.1"]),
    ],
)
def test_a_single_block_is_a_unit_if_it_is_large(module: nn.Module, names: list[str]) -> None:
    model = nn.ModuleList([nn.ModuleList([_Block(4), _Block(4)]), module])
    name_of = {part: name for name, part in model.named_modules()}
    assert [name_of[unit] for unit in model_units(model)] == names


class _Mixture(nn.Module):
    """A block whose experts have most of its parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.experts[0](self.norm(x))


def test_experts_stay_in_their_block_and_towers_are_looked_into() -> None:
    blocks = nn.Sequential(_Mixture(4), _Mixture(8))
    assert model_units(blocks) == list(blocks)
    towers = nn.ModuleDict({"a": nn.Sequential(*(_Mixture(4) for _ in range(2)))})
    towers["b"] = nn.Sequential(*(_Mixture(4) for _ in range(2)))
    model = nn.Module()
    model.a, model.b = towers["a"], towers["b"]
    assert model_units(model) == [*towers["a"], *towers["b"]]
    # Stages of one size are units as they are: each holds a small part of the model.
    equal = nn.Sequential(*(nn.Sequential(*(_Mixture(4) for _ in range(2))) for _ in range(2)))
    assert model_units(equal) == list(equal)
    unequal = nn.Sequential(*(nn.Sequential(*(_Mixture(4) for _ in range(number))) for number in (2, 3)))
    assert model_units(unequal) == [block for stage in unequal for block in stage]


def test_a_model_that_is_itself_a_chain_of_blocks_has_them_as_units() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    plan = plan_wrap(model, ShardingPlan(level=3), num_ranks=2)
    assert [unit.modules for unit in plan.units] == [("0",), ("1",), ("2",), ("",)]


def test_level_0_has_one_unit_and_what_is_gathered_follows_the_level() -> None:
    def gathered(plan: ShardingPlan, num_ranks: int = 2) -> int:
        model = _model()
        return gathered_bytes(param_facts(model, plan_wrap(model, plan, num_ranks), ()), plan, num_ranks)

    assert [unit.kind for unit in plan_wrap(_model(), ShardingPlan(level=0), 2).units] == ["root"]
    total = sum(param.numel() for param in _model().parameters())
    assert [gathered(ShardingPlan(level=level)) for level in range(3)] == [0, 4 * total, 4 * total]
    largest = max(unit.num_params for unit in plan_wrap(_model(), ShardingPlan(level=3), 2).units)
    assert gathered(ShardingPlan(level=3)) == 4 * largest
    norms = sum(
        param.numel()
        for module in _model().modules()
        if isinstance(module, nn.BatchNorm2d)
        for param in module.parameters()
    )
    assert gathered(ShardingPlan(level=2, precision=HALF)) == 2 * (total - norms) > 0


def test_checkpointing_takes_every_nth_unit_or_stages() -> None:
    every_second = plan_wrap(_model(), ShardingPlan(level=0, checkpoint_every=2), 1)
    assert every_second.checkpointed == ("trunk.stem", "trunk.stages.1.0", "trunk.stages.1.2")
    stages = plan_wrap(_model(), ShardingPlan(level=3, stage_checkpoints=((), (1, 2))), 2)
    assert stages.checkpointed == ("trunk.stages.1.0", "trunk.stages.1.1")
    assert [unit.is_checkpointed for unit in stages.units] == [False, False, True, True, False, False, False]
    assert "recomputed in backward" in stages.describe()


def test_checkpointing_takes_the_blocks_that_are_named() -> None:
    named = ("trunk.stages.1.2", "trunk.stages.0.0")
    plan = plan_wrap(_model(), ShardingPlan(level=0, checkpoint_blocks=named), 1)
    assert plan.checkpointed == ("trunk.stages.0.0", "trunk.stages.1.2")
    with pytest.raises(ConfigError, match=r"must name blocks of the model.*Did you mean 'trunk.stages.1.2'") as caught:
        plan_wrap(_model(), ShardingPlan(level=0, checkpoint_blocks=("trunk.stages.1.9", "stem")), 1)
    assert len(caught.value.problems) == 2


def test_checkpointing_of_a_model_without_units_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs a model made of units"):
        plan_wrap(_Foreign(), ShardingPlan(level=3, checkpoint_every=1), 2)
    with pytest.raises(ConfigError, match="must be a list of block ends per stage"):
        plan_wrap(_model(), ShardingPlan(level=3, stage_checkpoints=((1,), (1,), (2,))), 2)


def test_the_description_names_every_unit() -> None:
    text = plan_wrap(_model(), ShardingPlan(level=3, precision=HALF, wrap_threshold=200), 4).describe()
    assert text.startswith("ZeRO level 3 over 4 ranks")
    for line in ("block  trunk.stages.1.2 ", "layer  heads.0.0 ", "norm   trunk.stem.1 ", "root   (model) "):
        assert line in text, text
    assert "float32" in text and "bfloat16" in text


@pytest.mark.parametrize(
    ("level", "num_ranks", "first", "each"),
    [
        (0, 2, "ZeRO level 0, 1,241 parameters, replicated", ""),
        (1, 1, "ZeRO level 1 over 1 rank, 1,241 parameters, optimizer state sharded; gradients whole until", "1,241"),
        (2, 2, "ZeRO level 2 over 2 ranks, 1,241 parameters, optimizer state and gradients sharded; parameters", "621"),
        (3, 4, "ZeRO level 3 over 4 ranks, 1,241 parameters, all state sharded; parameters whole only where", "311"),
    ],
)
def test_the_description_is_a_table_below_a_sentence(level: int, num_ranks: int, first: str, each: str) -> None:
    units = (
        PlannedUnit(("trunk.0",), "block", 1234, is_checkpointed=True),
        PlannedUnit(("norm", "tied"), "norm", 6, is_float32=True),
        PlannedUnit(("",), "root", 1),
    )
    lines = WrapPlan(level, num_ranks, "bfloat16", units, ("trunk.0",)).describe().splitlines()
    assert lines[0].startswith(first)
    table = [
        "  block  trunk.0              1,234  bfloat16, recomputed",
        "  norm   norm + tied              6  float32, bound by a tied parameter",
        "  root   (model)                  1  bfloat16",
        f"  largest unit 1,234 parameters, each rank keeps about {each}",
    ]
    assert lines[1:] == [*table[: 4 * (level > 0)], "  recomputed in backward: trunk.0"]
    assert "recomputed" not in WrapPlan(level, num_ranks, "float32", units[1:]).describe()


def test_advice_where_one_unit_has_most_of_a_large_model() -> None:
    def advice(level: int, *sizes: int) -> str:
        units = [PlannedUnit((f"{number}",), "layer", size) for number, size in enumerate(sizes)]
        return WrapPlan(level, 2, "float32", tuple(units)).advice()

    text = advice(3, 4_000_000, 12_000_000)
    assert text.startswith("1 has 75% of the parameters, and level 3 gathers it at once.")
    assert "to 1000000 or so" in text
    assert advice(3, 10_000_000)
    assert [advice(2, 16_000_000), advice(3, 8_000_000, 8_000_000), advice(3, 9_999_999)] == ["", "", ""]
    with torch.device("meta"):
        plan = plan_wrap(timm.create_model("dla34"), ShardingPlan(level=3), 2)
        assert plan.advice().startswith("(model) has 100% ")
        threshold = int(plan.advice().split(") to ")[1].split()[0])
        assert not plan_wrap(timm.create_model("dla34"), ShardingPlan(level=3, wrap_threshold=threshold), 2).advice()


def test_planning_changes_nothing() -> None:
    model = _model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    plan_wrap(model, ShardingPlan(level=3, checkpoint_every=1, precision=HALF), 4)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert not any(unit.checkpoint for unit in model.modules() if isinstance(unit, Unit))
