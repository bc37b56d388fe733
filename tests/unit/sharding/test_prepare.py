"""What is refused before a model is sharded, and which number formats it has afterwards."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from vissl_zero.errors import ConfigError
from vissl_zero.resolve.resolved import Precision, ShardingPlan
from vissl_zero.sharding.model.prepare import prepare

CPU = torch.device("cpu")
PLAIN: tuple[type[nn.Module], dict[str, object]] = nn.Embedding, {}
MOVED = nn.Embedding, {"max_norm": 1.0}
SPARSE = nn.EmbeddingBag, {"sparse": True}
BOTH = nn.EmbeddingBag, {"sparse": True, "max_norm": 1.0}


@pytest.mark.parametrize(
    ("level", "layer", "keys"),
    [
        (3, PLAIN, []),
        (3, MOVED, ["words.max_norm"]),
        (3, SPARSE, ["words.sparse"]),
        (3, BOTH, ["words.max_norm", "words.sparse"]),
        (2, BOTH, []),  # one process
    ],
)
def test_embeddings_that_every_rank_would_change_by_itself_are_refused(
    level: int, layer: tuple[type[nn.Module], dict[str, object]], keys: list[str], group: dist.ProcessGroup
) -> None:
    kind, options = layer
    model = nn.ModuleDict({"linear": nn.Linear(3, 3), "words": kind(4, 3, **options)})
    try:
        prepare(model, ShardingPlan(level=level), CPU)
    except ConfigError as error:
        assert [problem.key for problem in error.problems] == keys != []
    else:
        assert keys == []


class _Sharing(nn.Module):
    """Two tensors over parts of the same memory, and a parameter of its own."""

    def __init__(self, first: Tensor, second: Tensor, num_params: int) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.zeros(2))
        for index, (name, tensor) in enumerate((("first", first), ("second", second))):
            if index < num_params:
                self.register_parameter(name, nn.Parameter(tensor))
            else:
                self.register_buffer(name, tensor)


MEMORY = torch.zeros(20)
SPANS = [
    (MEMORY[:10], MEMORY[10:], False),  # they touch
    (MEMORY[:10], MEMORY[9:], True),
    (MEMORY[9:], MEMORY[:10], True),
    (MEMORY[:9:2], MEMORY[9:], False),
    (MEMORY[:9:2], MEMORY[8:], True),
    (MEMORY[:16].view(4, 4)[:, 2:], MEMORY[16:], False),
    (MEMORY[:16].view(4, 4)[:, 2:], MEMORY[15:], True),
    (MEMORY[:10], torch.zeros(20)[:10], False),
    (MEMORY[:10], MEMORY[5:5], False),  # no elements
]


@pytest.mark.parametrize(("first", "second", "is_shared"), SPANS)
def test_parameters_that_share_memory_are_refused_where_they_are_cut(
    first: Tensor, second: Tensor, is_shared: bool, group: dist.ProcessGroup
) -> None:
    for level, num_params in ((0, 2), (1, 0), (1, 1), (1, 2), (3, 2)):
        model = _Sharing(first, second, num_params)
        if is_shared and level and num_params:
            with pytest.raises(ConfigError, match=r"must not share memory with (first|second) above ZeRO level 0"):
                prepare(model, ShardingPlan(level=level), CPU)
        else:
            prepare(model, ShardingPlan(level=level), CPU)


@pytest.mark.parametrize(
    ("formats", "master", "found"),
    [
        ((torch.float64, torch.float64, torch.float64), "float32", (torch.float32,) * 3),
        ((torch.float32, torch.float32, torch.float64), "float32", (torch.float32, torch.float32, torch.float64)),
        ((torch.float32, torch.float64, torch.float64), "float32", (torch.float32, torch.float64, torch.float64)),
    ],
)
def test_a_model_of_one_format_gets_that_of_the_recipe(
    formats: tuple[torch.dtype, ...], master: str, found: tuple[torch.dtype, ...]
) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].to(formats[0])
    model[1].to(formats[1])
    model.register_buffer("mean", torch.zeros(2, dtype=formats[2]))
    prepare(model, ShardingPlan(level=0, precision=Precision(master=master, compute=master, reduce=master)), CPU)
    assert (model[0].weight.dtype, model[1].weight.dtype, model.mean.dtype) == found
