"""What each private name of torch is relied on for. A failure names what this version of torch no longer does."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from datetime import timedelta
from inspect import signature
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.autograd.graph import save_on_cpu
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as fsdp_param_group
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import flop_registry

from vissl_zero.errors import VisslZeroError
from vissl_zero.sharding import torch_private as private
from vissl_zero.sharding.engines.gradient_average import OrderedReduceScatter
from vissl_zero.sharding.engines.torch.unit_guard import _apply_or_refuse, _GuardedUnit
from vissl_zero.sharding.engines.torch.unit_transfers import PackedAllGather, UnitOnDisk, _AllGather, _ReduceScatter

TORCH = f"torch {torch.__version__} no longer"


@pytest.fixture
def unit(group) -> nn.Module:
    """A model that is one unit of ``fully_shard``, after its first forward pass."""
    model = nn.Linear(3, 2)
    fully_shard(model)
    model(torch.rand(4, 3))
    return model


class Held(nn.Parameter):
    """A parameter that shows users a gradient of its own, as the classes of shard.py do."""

    grad = property(lambda self: "another")  # type: ignore[assignment]


def test_foreach_kernels_compute_what_their_names_say():
    tensors = [torch.tensor([3.0, 4.0]), torch.tensor([6.0, 8.0])]
    norms = private.foreach_norm(tensors, 2, dtype=torch.float64)
    assert [norm.item() for norm in norms] == [5.0, 10.0], f"{TORCH} has _foreach_norm"
    private.foreach_mul_(tensors, [2.0, 0.5])
    private.foreach_addcmul_(tensors, [torch.ones(2)] * 2, [torch.ones(2)] * 2, 1.0)
    copies = [torch.empty(2), torch.empty(2)]
    private.foreach_copy_(copies, tensors)
    assert [copy.tolist() for copy in copies] == [[7.0, 9.0], [4.0, 5.0]], f"{TORCH} has the _foreach kernels"


def test_the_real_gradient_is_behind_a_subclass_property():
    param = Held(torch.ones(2))
    (param * 3).sum().backward()
    found = private.real_grad(param)
    assert found is not None and found.tolist() == [3.0, 3.0], f"{TORCH} keeps gradients in TensorBase.grad"
    private.set_real_grad(param, None)
    assert private.real_grad(param) is None and param.grad == "another"


def test_fake_tensors_pass_through_the_collectives_of_pretended_ranks():
    with private.pretended_ranks(5), FakeTensorMode():
        assert dist.get_world_size() == 5, f"{TORCH} has the fake process group"
        gathered = torch.empty(10)
        dist.all_gather_into_tensor(gathered, torch.empty(2))
    assert not dist.is_initialized()


def test_data_parallel_is_seen_while_it_is_built_and_while_it_runs(group):
    seen: list[bool] = []

    class Model(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(private.runs_in_data_parallel())
            return super().forward(x)

        def named_parameters(self, *args, **kwargs):
            built.append(private.is_building_data_parallel())
            return super().named_parameters(*args, **kwargs)

    built: list[bool] = []
    model = Model(2, 2)
    wrapped = DistributedDataParallel(model)
    wrapped(torch.rand(1, 2))
    model(torch.rand(1, 2))
    assert seen == [True, False], f"{TORCH} sets DistributedDataParallel._active_ddp_module"
    assert any(built), f"{TORCH} reads the parameters in DistributedDataParallel.__init__"
    assert not private.is_building_data_parallel()


def test_a_callback_runs_at_the_end_of_the_backward_pass():
    events: list[str] = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2

    def hook(grad: Tensor) -> None:
        assert private.is_in_backward() and not private.is_nested_backward(), f"{TORCH} tells a backward pass by its id"
        private.call_after_backward(lambda: events.append("end"))
        events.append("hook")

    y.register_hook(hook)
    x.register_hook(lambda grad: events.append("first layer"))
    assert not private.is_in_backward()
    y.sum().backward()
    assert events == ["hook", "first layer", "end"], f"{TORCH} calls queue_callback's functions last"


def test_reentrant_checkpointing_is_found_on_the_stack():
    seen: list[tuple[bool, bool]] = []

    def segment(x: Tensor) -> Tensor:
        seen.append((private.is_in_reentrant_checkpoint(), private.is_in_backward()))
        y = x * x
        if y.requires_grad:
            y.register_hook(lambda grad: nested.append(private.is_nested_backward()))
        return y

    nested: list[bool] = []
    x = torch.ones(2, requires_grad=True)
    checkpoint(segment, x, use_reentrant=True).sum().backward()
    assert seen == [(True, False), (True, True)], f"{TORCH} runs a reentrant segment in CheckpointFunction"
    assert nested == [True], f"{TORCH} runs a reentrant segment's backward pass inside the outer one"
    seen.clear()
    checkpoint(segment, x, use_reentrant=False).sum().backward()
    assert [is_reentrant for is_reentrant, _ in seen] == [False, False]


def test_saved_tensor_hooks_are_seen():
    assert not private.has_saved_tensor_hooks()
    with save_on_cpu():
        assert private.has_saved_tensor_hooks(), f"{TORCH} tells the innermost saved-tensor hooks"


def test_a_unit_shows_its_modules_parameters_and_rows(unit):
    state = private.unit_state(unit)
    assert private.modules_of(state) == (unit,), f"{TORCH} keeps a unit's modules in its state"
    group = private.group_of(state)
    weight, bias = group.fsdp_params
    assert (private.owner_of(weight).module, private.owner_of(weight).param_name) == (unit, "weight"), TORCH
    assert (private.name_of(weight), private.name_of(bias)) == ("weight", "bias"), f"{TORCH} sets _param_fqn"
    assert not private.is_being_gathered(group)
    assert private.shard_data(weight).tolist() == private.local_tensor(unit.weight).flatten().tolist(), TORCH


def test_other_rows_of_a_unit_are_what_its_next_gather_sends(unit):
    weight = private.group_of(private.unit_state(unit)).fsdp_params[0]
    unit.reshard()
    rows = torch.full((2, 3), 7.0)
    private.set_shard_data(weight, rows.view(-1))
    private.set_local_tensor(unit.weight, rows)
    assert private.local_tensor(unit.weight) is rows, f"{TORCH} keeps a DTensor's rows in _local_tensor"
    unit.unshard()
    assert torch.equal(unit.weight, rows), f"{TORCH} gathers _sharded_param_data"


def test_a_unit_of_several_dtypes_reduces_each_by_itself(group):
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2, dtype=torch.bfloat16), nn.Linear(2, 1, dtype=torch.float64))
    expected = [param.detach().clone().requires_grad_() for param in model.parameters()]
    fully_shard(model)
    state = private.unit_state(model)
    of_unit, reduced = private.group_of(state), []
    private.reduce_by_dtype(of_unit)
    post_backward = of_unit.post_backward
    private.lazy_init(model)
    reduce = fsdp_param_group.foreach_reduce

    def loss(params: Sequence[Tensor]) -> Tensor:
        hidden = torch.ones(4, 3)
        for weight, bias in zip(params[::2], params[1::2], strict=True):
            hidden = hidden.to(weight.dtype) @ weight.T + bias
        return hidden.sum()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fsdp_param_group, "foreach_reduce", lambda *args: reduced.append(args[5:7]) or reduce(*args))
        layers = list(model.children())
        model.forward = lambda _: loss([param for layer in layers for param in layer.parameters()])
        model(torch.ones(1)).backward()
    loss(expected).backward()
    wide = [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.float64, torch.float64)]
    assert reduced == wide, f"{TORCH} reduces in _orig_dtype and _reduce_dtype"
    assert of_unit.post_backward == post_backward and not of_unit.is_unsharded, f"{TORCH} reshards in reshard"
    for param, plain in zip(model.parameters(), expected, strict=True):
        assert param.grad.dtype == plain.dtype and torch.equal(param.grad.to_local(), plain.grad)


def test_a_plain_tensor_is_its_own_local_part():
    plain = torch.ones(2)
    assert private.local_tensor(plain) is plain and not isinstance(plain, DTensor)


def test_the_first_unit_that_is_settled_is_the_root(group):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    for module in (model[0], model):
        fully_shard(module)
    private.lazy_init(model)
    states = [private.unit_state(module) for module in (model, model[0])]
    assert [state._is_root for state in states] == [True, False], f"{TORCH} settles the root in _lazy_init"


def test_a_unit_gathers_in_its_hook_and_reduces_after_the_backward_pass(group):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    for module in (*model, model):
        fully_shard(module)
    private.lazy_init(model)
    state = private.unit_state(model[0])
    x = torch.rand(3, 2, requires_grad=True)
    y = x * 1
    y.register_hook(private.gather_hook(state))
    is_sharded: list[bool] = []
    x.register_hook(lambda grad: is_sharded.append(isinstance(model[0].weight, DTensor)))
    y.sum().backward()
    assert is_sharded == [False], f"{TORCH} gathers a unit in _pre_backward"
    assert isinstance(model[0].weight, DTensor), f"{TORCH} frees units when the backward pass ends"
    loss = model(x).sum()
    loss.register_hook(lambda grad: private.finish_unit_after_backward(private.unit_state(model)))
    loss.backward()
    assert isinstance(model[0].weight, DTensor) and model[0].weight.grad is not None, TORCH


def test_tables_of_a_module_can_be_read_and_written():
    norm = nn.BatchNorm1d(2)
    norm.register_buffer("extra", torch.zeros(1), persistent=False)
    assert set(private.own_parameters(norm)) == {"weight", "bias"}, TORCH
    assert {"running_mean", "extra"} <= set(private.own_buffers(norm)) and private.unsaved_buffers(norm) == {"extra"}
    replaced = nn.Parameter(torch.full((2,), 5.0))
    private.own_parameters(norm)["weight"] = replaced
    assert norm.weight is replaced, f"{TORCH} reads a module's parameters from _parameters"


def test_moves_and_casts_of_a_module_can_be_refused():
    layer, seen = nn.Linear(1, 1), []

    def before(module, apply, *args, **kwargs):
        seen.append(module)
        return apply(*args, **kwargs)

    private.put_before_moves(layer, before)
    layer.double()
    nn.Sequential(layer).to(torch.float32)
    assert seen == [layer, layer], f"{TORCH} moves and casts through _apply"
    assert layer.weight.dtype == torch.float32


def test_an_operation_shows_its_name_its_overloads_and_whether_it_writes():
    add, add_ = torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor
    assert private.operation_name(add) == "aten::add", f"{TORCH} names operations in _schema"
    assert not private.writes_in_place(add) and private.writes_in_place(add_), f"{TORCH} tells writes in _schema"
    assert private.overloads_of(add) is torch.ops.aten.add, f"{TORCH} has _overloadpacket"
    assert flop_registry.keys() >= {*private.ATTENTION_ON_CPU.values()}, f"{TORCH} counts attention's flops"


def test_a_unit_shows_what_gathers_it(unit):
    gather = private.gather_of(private.group_of(private.unit_state(unit)))
    assert callable(gather.allocate), f"{TORCH} gathers a unit by _all_gather_comm"


def test_hooks_are_counted():
    layer = nn.Linear(1, 1)
    assert not private.has_forward_hooks(layer) and private.num_gradient_hooks(layer.weight) == 0
    handle = layer.register_forward_hook(lambda module, inputs, output: None)
    assert list(private.forward_hooks(layer)) == [handle.id], f"{TORCH} keeps hooks in _forward_hooks"
    handle.remove()
    layer.register_forward_pre_hook(lambda module, inputs: None)
    assert private.has_forward_hooks(layer)
    layer.weight.register_hook(lambda grad: grad)
    layer.weight.register_post_accumulate_grad_hook(lambda param: None)
    assert private.num_gradient_hooks(layer.weight) == 2, f"{TORCH} keeps a tensor's hooks where they were"


def test_writes_are_counted_and_storages_told_apart():
    tensor = torch.zeros(2)
    before = private.num_writes(tensor)
    tensor.add_(1)
    assert private.num_writes(tensor) == before + 1, f"{TORCH} counts writes in _version"
    meta = torch.empty(2, device="meta")
    view, other = meta[:1], torch.empty(2, device="meta")
    address = private.object_address(meta.untyped_storage())
    assert private.object_address(view.untyped_storage()) == address, f"{TORCH} gives a storage one _cdata"
    assert private.object_address(other.untyped_storage()) != address


def test_data_parallel_leaves_alone_what_it_is_told_to(group):
    model = nn.Linear(2, 2)
    assert private.left_to_itself(model) is None
    private.set_left_to_itself(model, ["bias"])
    assert private.left_to_itself(model) == ["bias"]
    wrapped = DistributedDataParallel(model)
    assert wrapped.parameters_to_ignore == {"bias"}, f"{TORCH} reads _ddp_params_and_buffers_to_ignore"


def test_a_group_tells_its_timeout(group):
    assert private.timeout_of(group) == timedelta(seconds=77), f"{TORCH} shows a group's timeout"


def test_a_gradient_is_handed_over_and_its_owner_not_kept_alive():
    class Owner:
        def __init__(self) -> None:
            self.seen: list[Tensor] = []

        def note(self, param: Tensor) -> None:
            self.seen.append(param)

    owner, param = Owner(), nn.Parameter(torch.ones(2))
    private.call_on_gradient([param], owner.note)
    (param * 2).sum().backward()
    assert owner.seen == [param] and param.grad is not None and param.grad.tolist() == [2.0, 2.0]
    del owner
    gc.collect()
    with pytest.raises(VisslZeroError, match="is gone"):
        (param * 2).sum().backward()


def test_compilation_keeps_a_graph_for_each_shape_and_counts_them():
    tracing, graphs = private.Tracing(), []

    def backend(graph, inputs):
        graphs.append(inputs)
        return private.compile_graph("eager", graph, inputs)

    assert not tracing.has_failed()
    double = private.compiled(lambda x: x * 2, backend, 5)
    assert double(torch.ones(2)).tolist() == [2.0, 2.0] and double(torch.ones(3)).tolist() == [2.0] * 3
    assert len(graphs) == 2, f"{TORCH} compiles a graph for each shape with dynamic=False"
    assert not tracing.has_failed() and private.Tracing._counts() != tracing._before, f"{TORCH} counts frames"
    aside = private.left_out_of_graphs(lambda x: x + 1)
    graphs.clear()
    assert private.compiled(lambda x: aside(x * 3) * 2, backend, 5)(torch.ones(1)).item() == 8.0
    assert len(graphs) == 2, f"{TORCH} ends a graph before a function that is left out"


def test_written_arguments_are_those_that_the_schema_marks():
    left, right = torch.zeros(2), torch.ones(2)
    aten = torch.ops.aten
    assert private.written_arguments(aten.add_.Tensor, (left, right), {}) == [left]
    assert private.written_arguments(aten.add.Tensor, (left, right), {}) == []
    assert private.written_arguments(aten._foreach_mul_.Scalar, ([left, right], 2.0), {})[1] is right


def test_a_tensor_without_memory_has_facts_and_sends_operations_below():
    class Refusing(Tensor):
        __torch_function__ = private.without_functions

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[override]
            raise VisslZeroError(private.operation_name(func))

    made = private.without_memory(Refusing, torch.zeros(2, 3, dtype=torch.float64))
    assert (tuple(made.shape), made.dtype, made.is_leaf) == ((2, 3), torch.float64, True)
    with pytest.raises(VisslZeroError, match="aten::add"):
        made + 1


def test_versions_of_modules_are_copied_between_state_dicts():
    given = nn.BatchNorm1d(2).state_dict()
    state = type(given)(given.items())
    private.copy_versions(state, given)
    assert state._metadata[""]["version"] == 2


def test_the_modules_of_a_module_are_in_a_table():
    model = nn.Sequential(nn.Linear(2, 2))
    assert private.own_modules(model)["0"] is model[0]


def test_a_transform_of_torch_func_is_seen():
    found = []
    torch.func.grad(lambda x: found.append(private.is_in_functional_transform()) or x.sum())(torch.ones(2))
    assert found == [True] and not private.is_in_functional_transform()


def test_sharded_tensors_know_whether_they_are_cut_alike(group):
    mesh = init_device_mesh("cpu", (1,))
    one, same = (DTensor.from_local(torch.zeros(2, 3), mesh, [Shard(0)]) for _ in range(2))
    assert private.same_layout(one, same)
    assert not private.same_layout(one, DTensor.from_local(torch.zeros(2, 4), mesh, [Shard(0)]))


def test_operations_on_a_new_mesh_do_not_return_an_earlier_equal_one(group):
    for _ in range(2):
        private.forget_meshes()
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("new",))
        assert DTensor.from_local(torch.zeros(2, 3), mesh, [Shard(0)]).detach().device_mesh is mesh


def test_a_view_knows_the_tensor_that_it_is_of() -> None:
    param = nn.Parameter(torch.zeros(4))
    assert private.viewed(param[1:]) is param and private.viewed(param.view(2, 2)[0]) is param
    assert private.viewed(param) is None and private.viewed(param[1:].clone()) is None


def test_hooks_before_and_after_a_forward_pass_are_seen():
    module = nn.Linear(1, 1)
    assert not private.has_forward_hooks(module)
    for register in (module.register_forward_pre_hook, module.register_forward_hook):
        handle = register(lambda *_: None)
        assert private.has_forward_hooks(module), f"{TORCH} has forward hooks where it had them"
        handle.remove()
    assert not private.has_forward_hooks(module)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (PackedAllGather.__call__, AllGather.__call__),
        (_AllGather.__call__, AllGather.__call__),
        (_ReduceScatter.__call__, ReduceScatter.__call__),
        (OrderedReduceScatter.__call__, ReduceScatter.__call__),
        (UnitOnDisk.unshard, fsdp_param_group.FSDPParamGroup.unshard),
        (_GuardedUnit.unshard, fsdp_param_group.FSDPParamGroup.unshard),
        (_apply_or_refuse, nn.Module._apply),
    ],
)
def test_what_stands_in_for_a_function_of_torchs_has_its_defaults(
    ours: Callable[..., Any], theirs: Callable[..., Any]
) -> None:
    defaults = [
        {name: item.default for name, item in signature(function).parameters.items() if item.default is not item.empty}
        for function in (ours, theirs)
    ]
    assert defaults[0] == defaults[1] != {}
