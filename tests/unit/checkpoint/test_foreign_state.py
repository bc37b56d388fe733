"""What other libraries keep beside a model: parameters end to end, cut into parts of ranks, and state of losses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from vissl_zero.checkpoint.foreign_state import (
    LossState,
    OptimizerState,
    _default_groups,
    _gather,
    _sortings,
    _take,
    _translated,
    as_ours,
    full_tensors,
    loss_state,
    method_of,
    optimizer_state,
)
from vissl_zero.checkpoint.shard_file import Entry
from vissl_zero.errors import CheckpointError


@pytest.mark.parametrize(
    ("first", "shape", "values"),
    [
        (0, (2,), [0, 1]),
        (1, (2, 2), [[1, 2], [3, 4]]),  # over a border
        (3, (2,), [3, 4]),  # exactly the second part
        (2, (4,), [2, 3, 4, 5]),  # over two borders
        (5, (1, 1), [[5]]),
        (4, (), 4),
        (6, (0, 3), []),
    ],
)
def test_elements_are_taken_over_the_borders_of_parts(first: int, shape: tuple[int, ...], values: object) -> None:
    parts = [torch.arange(6, dtype=torch.bfloat16)[start:stop] for start, stop in ((0, 3), (3, 5), (5, 5), (5, 6))]
    taken = _gather(parts, first, torch.Size(shape).numel(), shape)
    assert (taken.shape, taken.dtype, taken.tolist()) == (shape, torch.bfloat16, values)


def _numbers(*shape: int) -> Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape) + 1


def _is(taken: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    assert taken.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(taken[name], value), name


BANK = {"nce_average.memory": _numbers(4, 2)}
KEYS = _numbers(3, 5)


@pytest.mark.parametrize(
    ("loss", "theirs", "ours"),
    [
        ("dino_loss", {"center": _numbers(1, 3)}, {"center.mean": _numbers(3)}),
        (
            "ibot_loss",
            {"criterion.center": _numbers(1, 3), "criterion.center2": _numbers(1, 1, 4)},
            {"center.mean": _numbers(3), "patch_center.mean": _numbers(4)},
        ),
        ("moco_loss", {"queue": KEYS}, {"queue.keys": KEYS.T}),
        (
            "moco_loss",
            {"queue": KEYS, "queue_ptr": torch.tensor([4])},
            {"queue.keys": KEYS.T, "queue.position": torch.tensor(4)},
        ),
        ("simclr_info_nce_loss", {"queue": KEYS}, {}),
        ("nce_loss_with_memory", BANK, {"bank.memory": _numbers(4, 2)}),
        *(
            (
                "nce_loss_with_memory",
                BANK | {"nce_average.params": torch.tensor([4096.0, 0.07, normalizer, 0.5])},
                {
                    "bank.memory": _numbers(4, 2),
                    "bank.normalizer": torch.tensor(normalizer),
                    "bank._extra_state": torch.tensor(normalizer > 0),
                },
            )
            for normalizer in (-1.0, 2876.5)
        ),
    ],
)
def test_state_of_vissls_losses_has_our_names_and_forms(
    loss: str, theirs: dict[str, Tensor], ours: dict[str, Tensor]
) -> None:
    _is(_translated(loss, {}, theirs, {}), ours)


EMPTY = {"queue.embeddings": torch.zeros(2, 4, 3)}  # layers, rows, width


@pytest.mark.parametrize(
    ("rows", "step", "start", "count"),
    [
        (_numbers(2, 6, 3), 11, 10, 4),  # the first 4 of 6
        (_numbers(2, 3, 3), 11, 10, 3),
        (_numbers(2, 4, 3), 10, 10, None),  # not in use yet
        (_numbers(2, 4, 3), 1, None, 4),
        (_numbers(2, 4, 3), None, None, None),
        (_numbers(1, 4, 3), 11, 10, None),  # of another number of layers
        (_numbers(2, 4, 2), 11, 10, None),  # of another width
    ],
)
def test_the_queue_of_swav_is_taken_once_it_is_in_use(
    rows: Tensor, step: int | None, start: int | None, count: int | None
) -> None:
    config: dict[str, Any] = {} if start is None else {"swav_loss": {"queue": {"start_iter": start}}}
    theirs = {"local_emb_queue": rows} | ({} if step is None else {"num_iteration": torch.tensor([step])})
    wanted = {}
    if count is not None:
        embeddings = torch.zeros(2, 4, 3)
        embeddings[:, :count] = rows[:, :count]
        wanted = {"queue.embeddings": embeddings, "queue._extra_state": torch.tensor(count)}
    _is(_translated("swav_loss", config, theirs, EMPTY), wanted)
    _is(_translated("swav_loss", config, theirs, {}), {})  # the recipe has no queue
    assert not EMPTY["queue.embeddings"].any()


@pytest.mark.parametrize(("shape", "is_taken"), [((2, 4, 3), True), ((1, 4, 3), False), ((2, 4, 2), False)])
def test_the_memory_of_deepcluster_is_taken_by_image(shape: tuple[int, ...], is_taken: bool) -> None:
    """A row without length in one layer was never seen; an index past the images is another data set's."""
    ours = {"memory.embeddings": torch.zeros(2, 5, 3, dtype=torch.bfloat16), "memory.is_known": torch.zeros(5).bool()}
    rows = _numbers(*shape)
    rows[0, 1] = 0
    clusters = {"assignments": _numbers(2, 5), "centroids0": _numbers(7, 3), "centroids12": _numbers(7, 3)}
    theirs = {"local_memory_embeddings": rows, "local_memory_index": torch.tensor([4, 1, 0, 5]), **clusters, "x": KEYS}
    wanted = {f"memory.{name}": value for name, value in clusters.items()}
    _is(_translated("deepclusterv2_loss", {}, {**theirs, "local_memory_index": KEYS}, {}), {})
    if is_taken:
        embeddings = torch.zeros(2, 5, 3, dtype=torch.bfloat16)
        embeddings[:, 4], embeddings[:, 0] = rows[:, 0].bfloat16(), rows[:, 2].bfloat16()
        known = torch.tensor([True, False, False, False, True])
        wanted |= {"memory.embeddings": embeddings, "memory.is_known": known}
    _is(_translated("deepclusterv2_loss", {}, theirs, ours), wanted)
    del theirs["local_memory_index"]
    _is(
        _translated("deepclusterv2_loss", {}, theirs, ours),
        {f"memory.{name}": value for name, value in clusters.items()},
    )


@pytest.mark.parametrize(("tensors", "num_images"), [(BANK, 4), ({}, None)])
def test_a_memory_has_a_row_for_each_image_of_the_file(tensors: dict[str, Tensor], num_images: int | None) -> None:
    loss = {"name": "nce_loss_with_memory", "nce_loss_with_memory": {"embedding_dim": 2}}
    method: Any = method_of(loss, LossState(tensors=tensors))
    assert num_images == (None if method is None else len(method.bank.memory))


def test_the_state_of_a_loss_is_read_from_each_place_that_libraries_keep_it_in() -> None:
    bias, weight = torch.ones(2, requires_grad=True), torch.zeros(3)
    state = {
        "teacher": {"module.trunk.a": bias, "trunk.b": weight, "count": 3},
        "criterion": {"center": bias, "count": 3},
        "momentum_encoder.module.trunk.c": weight,
        "moco_encoder.heads.d": weight,
        "queue": bias,
        "count": 3,
        7: weight,
    }
    for content in (
        {"loss": state},
        {"loss": {}, "classy_state_dict": {"loss": state}},
        {"classy_state_dict": {"loss": state}},
    ):
        loaded = loss_state([content])
        assert sorted(entry.key for entry in loaded.teacher) == ["heads.d", "trunk.a", "trunk.b", "trunk.c"]
        _is(loaded.tensors, {"criterion.center": bias.detach(), "queue": bias.detach()})
        assert not any(tensor.requires_grad for tensor in loaded.tensors.values())
    assert loss_state([{"loss": None}]) == loss_state([{}]) == LossState()
    with pytest.raises(CheckpointError, match="lack parts of the teacher"):
        loss_state([{"loss": {"teacher_meta": {}, "teacher": {}}}, {"loss": {"teacher_meta": {}}}])


def test_a_loss_takes_what_has_its_shape_and_says_what_it_does_not() -> None:
    config = {"name": "dino_loss", "dino_loss": {"output_dim": 4}}
    method = method_of(config, LossState())
    assert method is not None
    tensors, sentences = as_ours(method, config, LossState(tensors={"center": _numbers(1, 4).half()}))
    assert tensors["center.mean"].equal(_numbers(4)) and tensors["center.mean"].dtype == torch.float32
    assert sentences == ["State of the loss is imported: center.mean."]
    tensors, sentences = as_ours(method, config, LossState(tensors={"center": _numbers(1, 5)}))
    assert not tensors["center.mean"].any()
    shapes = "its shape is (5,) in the file, (4,) here"
    assert sentences == [f"The loss's center.mean is not imported: {shapes}. It starts from scratch."]
    both = {"name": "ibot_loss", "ibot_loss": {"out_dim": 4, "patch_out_dim": 4}}
    method_of_both = method_of(both, LossState())
    assert method_of_both is not None
    state = LossState(tensors={"center": _numbers(1, 5), "criterion.center2": _numbers(1, 1, 4)})
    tensors, _ = as_ours(method_of_both, both, state)  # what fits is taken beside what does not
    assert not tensors["center.mean"].any() and tensors["patch_center.mean"].equal(_numbers(4))
    _, sentences = as_ours(method, config, LossState())
    assert sentences == ["The file has no state of the loss: center.mean start from scratch."]


def _entry(key: str, *shape: int) -> Entry:
    return Entry.of(key, torch.zeros(shape))


@pytest.mark.parametrize(
    ("states", "taken"),
    [
        ({0: {"step": 1, "m": (2,), "v": (2,)}, 1: {"step": 1, "m": (3,), "v": (3,)}}, ["a", "b"]),
        ({1: {"step": 1, "m": (3,)}}, ["b"]),  # the other was frozen
        ({0: {"m": (2,), "v": (3,)}}, None),
        ({0: {"m": (3,), "v": (2,)}}, None),
        ({0: {"m": (2,)}, 2: {"m": (2,)}}, None),  # of a parameter that is not there
    ],
)
def test_state_is_taken_where_every_shape_and_every_number_fits(
    states: dict[int, Any], taken: list[str] | None
) -> None:
    tensors = {
        number: {key: torch.zeros(value) if isinstance(value, tuple) else value for key, value in state.items()}
        for number, state in states.items()
    }
    sorting = [[_entry("a", 2)], [_entry("b", 3)]]
    found = _take(sorting, [(0,), (1,)], tensors)
    assert (None if found is None else sorted(found)) == taken
    assert _take(sorting, [(0, 1), ()], tensors) is None


def _unit(path: str, **facts: Any) -> dict[str, Any]:
    return {"fsdp_path": path, **facts}


def _old_unit(names: list[str], shapes: list[tuple[int, ...]], padded: list[int], is_flat: bool) -> dict[str, Any]:
    return _unit("a", param_names=names, param_shapes=shapes, num_padded=padded, is_flat=is_flat)


@pytest.mark.parametrize("is_flat", [True, False])
def test_units_of_older_fairscale_are_put_together(is_flat: bool) -> None:
    """Before 0.4 it wrote one flat tensor a unit, ``flat_param_0``, or a tensor for each parameter."""
    names, shapes = ["w", "b"], [(2, 2), (1,)]
    if is_flat:  # 1 2 3 4 5 on two ranks
        states = [{"a.flat_param_0": _numbers(3)}, {"a.flat_param_0": torch.tensor([4.0, 5.0, 9.0])}]
        paddings = [[0], [1]]
    else:
        states = [
            {"a.w": _numbers(2), "a.b": torch.tensor([5.0])},
            {"a.w": _numbers(4)[2:], "a.b": torch.tensor([9.0])},
        ]
        paddings = [[0, 0], [0, 1]]
    of_ranks = [
        {"param_metadata": [_old_unit(names, shapes, padded, is_flat)], "buffer_names": []} for padded in paddings
    ]
    entries = {entry.key: entry.read() for entry in full_tensors(states, of_ranks)}
    _is(entries, {"a.w": _numbers(2, 2), "a.b": torch.tensor([5.0])})


def _facts(shape: tuple[int, ...], padding: int = 0) -> dict[str, Any]:
    return {"names": ["w"], "shapes": [shape], "padding": padding}


def test_what_ranks_share_or_hold_whole_is_taken_once() -> None:
    """A parameter under two names, one that every rank has whole, and buffers, of which the first rank's count."""
    units = [
        _unit("", params={"w": _facts((2,))}, no_broadcast_optim_state=True, shared_param_info=[("w", "tied.w")]),
        _unit("a.b", params={"w": _facts((2,))}, no_broadcast_optim_state=False, shared_param_info=[]),
    ]
    states = [
        {"w": _numbers(2), "a.b.w": torch.tensor([7.0]), "mean": torch.tensor(3.0)},
        {"w": _numbers(2), "a.b.w": torch.tensor([8.0]), "mean": torch.tensor(4.0)},
    ]
    metas = [{"param_metadata": units, "buffer_names": ["mean"]}] * 2
    entries = {entry.key: entry.read() for entry in full_tensors(states, metas)}
    wanted = {"w": _numbers(2), "a.b.w": torch.tensor([7.0, 8.0]), "tied.w": _numbers(2), "mean": torch.tensor(3.0)}
    _is(entries, wanted)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"a": [torch.zeros(2), torch.zeros(1)]}, "hold 3 elements, its parameters 4: a shard is missing"),
        ({"a": [torch.zeros(2), torch.zeros(2).half()]}, "have different types"),
        ({"a": [torch.zeros(2), torch.zeros(2).to_sparse()]}, "are not plain tensors"),
        ({"padding": 3}, "have impossible padding"),
        ({"padding": -1}, "have impossible padding"),
        ({"shape": (-2, -2)}, "have impossible shapes"),
        ({"shape": (4.0,)}, "have impossible shapes"),
        ({"mean": torch.zeros(2).to_sparse()}, "a buffer is not a plain tensor"),
        ({"source": "nothing"}, "lack what fairscale writes"),
    ],
)
def test_shards_that_do_not_fit_together_are_refused(change: dict[str, Any], sentence: str) -> None:
    parts = change.get("a", [torch.zeros(2), torch.zeros(2)])
    facts = _facts(change.get("shape", (4,)), change.get("padding", 0))
    shared = [(change["source"], "b")] if "source" in change else []
    unit = _unit("", params={"w": facts}, no_broadcast_optim_state=False, shared_param_info=shared)
    states = [{"w": part, "mean": change.get("mean", torch.zeros(2))} for part in parts]
    with pytest.raises(CheckpointError, match=sentence):
        full_tensors(states, [{"param_metadata": [unit], "buffer_names": ["mean"]}] * 2)


NET = [  # VISSL's trunk first, each module's parameters with its buffers
    _entry("trunk.conv.weight", 2, 1, 1, 1),
    _entry("trunk.bn.weight", 2),
    _entry("trunk.bn.bias", 2),
    _entry("trunk.bn.running_mean", 2),
    _entry("trunk.ln.weight", 3),
    _entry("trunk.ln.bias", 3),
    _entry("trunk.token", 1, 4),
    _entry("heads.0.weight_g", 5, 1),
    _entry("heads.0.weight_v", 5, 6),
    _entry("heads.1.weight", 2, 7),
    _entry("heads.1.bias", 7),
]
CONV, BN, LN = ["trunk.conv.weight"], ["trunk.bn.weight", "trunk.bn.bias"], ["trunk.ln.weight", "trunk.ln.bias"]
HEADS = ["heads.0.weight_g", "heads.0.weight_v", "heads.1.weight"]


@pytest.mark.parametrize(
    ("bias", "norm", "is_layer_norm", "groups"),
    [
        (False, False, False, [CONV, BN, HEADS, ["heads.1.bias"], [*LN, "trunk.token"]]),
        (True, False, False, [CONV, BN, [*HEADS, "heads.1.bias"], [], [*LN, "trunk.token"]]),
        (False, True, False, [[*CONV, BN[0]], BN[1:], HEADS, ["heads.1.bias"], [*LN, "trunk.token"]]),
        (True, True, True, [[*CONV, *BN, *LN], [], [*HEADS, "heads.1.bias"], [], ["trunk.token"]]),
    ],
)
def test_vissls_groups_by_decay(bias: bool, norm: bool, is_layer_norm: bool, groups: list[list[str]]) -> None:
    params = [entry for entry in NET if not entry.key.endswith("running_mean")]
    sorted_groups = _default_groups(params, NET, bias, norm, is_layer_norm)
    assert [[entry.key for entry in group] for group in sorted_groups] == groups
    without_rest = [entry for entry in params if entry.key not in (*LN, "trunk.token")]
    assert len(_default_groups(without_rest, NET, bias, norm, is_layer_norm)) == 4
    assert [[entry.key for entry in group] for group in next(iter(_sortings(NET)))] == [[e.key for e in params]]


def _classy(groups: list[list[int]], state: dict[int, Any]) -> dict[str, Any]:
    return {"optimizer": {"optim": {"param_groups": [{"params": numbers} for numbers in groups], "state": state}}}


def _momentum(*shape: int) -> dict[str, Any]:
    return {"momentum_buffer": torch.zeros(shape)}


NONE_OF_TORCHS = "the file holds none that torch's optimizers have written"
NO_ORDER = "its numbers, which stand for parameters, fit no order in which VISSL sorts the parameters of this model"


@pytest.mark.parametrize(
    ("classy", "taken", "reason"),
    [
        ({}, [], NONE_OF_TORCHS),
        (_classy([[0, 1]], {0: {"momentum_buffer": 3}}), [], NONE_OF_TORCHS),
        (_classy([[0, 1]], {}), [], "the file holds none"),
        (_classy([[0, 1]], {0: {"momentum_buffer": None}}), [], "the file holds none"),
        (_classy([[0, 1]], {0: {"square_avg": torch.zeros(2, 3)}}), [], "square_avg: not state of SGD, Adam or AdamW"),
        (_classy([[0, 1]], {0: _momentum(2, 3), 1: _momentum(2)}), ["trunk.a.weight", "trunk.a.bias"], ""),
        (_classy([[0, 1]], {1: _momentum(2)}), ["trunk.a.bias"], ""),  # the other was frozen
        (_classy([[0], [1], [], []], {0: _momentum(2, 3)}), ["trunk.a.weight"], ""),
        (_classy([[0, 1]], {0: _momentum(9)}), [], NO_ORDER),
        (_classy([[0, 1, 2]], {0: _momentum(2, 3)}), [], NO_ORDER),
    ],
)
def test_state_of_vissls_optimizer_goes_to_the_parameters_of_its_numbers(
    classy: dict[str, Any], taken: list[str], reason: str
) -> None:
    state = optimizer_state(classy, [_entry("trunk.a.weight", 2, 3), _entry("trunk.a.bias", 2)])
    assert (list(state.of), state.reason) == (taken, reason)


def test_state_that_fits_two_orders_is_refused() -> None:
    """Where biases decay and norms do not, or norms and no biases, the groups have the same shapes."""
    sizes = {"trunk.a.weight": (2, 2), "trunk.a.bias": (2,), "trunk.n.weight": (2,), "trunk.n.bias": (2,)}
    entries = [_entry(name, *shape) for name, shape in sizes.items()]
    state = {number: _momentum(*shape) for number, shape in zip((0, 1, 2, 3), sizes.values(), strict=True)}
    ambiguous = optimizer_state(_classy([[0, 1], [2, 3], [], []], state), entries)
    assert ambiguous.reason.endswith(
        "which stand for parameters, fit more than one order of the parameters of this model"
    )
    assert optimizer_state(_classy([[0], [1, 2, 3], [], []], state), entries).reason == ""


@pytest.mark.parametrize(
    ("keys", "fitting"),
    [
        (["momentum_buffer"], {"sgd"}),
        (["step", "exp_avg", "exp_avg_sq"], {"adam", "adamw"}),
        (["exp_avg", "exp_avg_sq"], set()),
        (["step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"], set()),
    ],
)
def test_an_optimizer_takes_state_with_all_of_its_keys_and_no_others(keys: list[str], fitting: set[str]) -> None:
    state = OptimizerState({"w": dict.fromkeys(keys, torch.zeros(1))})
    assert {name for name in ("sgd", "adam", "adamw", "lars", "lion") if state.fits(name)} == fitting


def test_a_teacher_in_shards_is_put_together() -> None:
    meta = {
        "param_metadata": [_unit("", params={"w": _facts((3,), 1)}, no_broadcast_optim_state=False)],
        "buffer_names": [],
    }
    whole = {
        "param_metadata": [_unit("", params={"w": _facts((3,))}, no_broadcast_optim_state=False)],
        "buffer_names": [],
    }
    parts = [({"w": torch.tensor([1.0, 2.0])}, whole), ({"w": torch.tensor([3.0, 9.0])}, meta)]
    loaded = loss_state([{"loss": {"teacher": state, "teacher_meta": facts}} for state, facts in parts])
    _is({entry.key: entry.read() for entry in loaded.teacher}, {"w": torch.tensor([1.0, 2.0, 3.0])})


def test_the_step_of_an_optimizer_is_a_number() -> None:
    state = {"step": torch.tensor(3.0), "exp_avg": torch.zeros(2), "exp_avg_sq": torch.zeros(2)}
    taken = optimizer_state(_classy([[0]], {0: state}), [_entry("trunk.a.bias", 2)]).of["trunk.a.bias"]
    assert type(taken["step"]) is float and taken["step"] == 3.0
    assert taken.keys() == state.keys()
