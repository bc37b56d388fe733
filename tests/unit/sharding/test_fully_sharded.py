"""A sharded model under a user's hands: what works as before, and what is refused with a sentence. One process."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import vissl_zero
from vissl_zero.errors import VisslZeroError


def _shard(model: nn.Module, level: int = 3) -> tuple[Any, Any]:
    model, optimizer = vissl_zero.initialize(model, {"type": "SGD", "lr": 0.1}, {"level": level})
    return model, optimizer


def _encoder(**options: Any) -> Any:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 1, **options)


MASK = torch.tensor([[False, False, True]] * 2)


@pytest.mark.parametrize(
    ("arguments", "keywords", "is_training", "is_nested", "is_refused"),
    [
        ((), {}, False, True, False),
        ((), {"src_key_padding_mask": MASK}, False, True, True),
        ((None, MASK), {}, False, True, True),
        ((None, None), {}, False, True, False),
        ((torch.zeros(3, 3),), {"src_key_padding_mask": MASK}, False, True, True),
        ((torch.zeros(3, 3),), {}, False, True, False),
        ((), {"src_key_padding_mask": MASK}, True, True, False),
        ((), {"src_key_padding_mask": MASK}, False, False, False),
    ],
)
def test_padding_in_evaluation_is_refused_where_torch_would_zero_it(
    arguments: tuple[Any, ...], keywords: dict[str, Any], is_training: bool, is_nested: bool, is_refused: bool
) -> None:
    model, _ = _shard(_encoder(enable_nested_tensor=is_nested))
    model.train(is_training)
    with torch.no_grad():
        if is_refused:
            with pytest.raises(VisslZeroError, match="zeroes padded positions in evaluation"):
                model(torch.ones(2, 3, 8), *arguments, **keywords)
        else:
            assert model(torch.ones(2, 3, 8), *arguments, **keywords).shape == (2, 3, 8)
    assert model(torch.ones(2, 3, 8), *arguments, **keywords).shape == (2, 3, 8)  # with gradients


def _net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


@pytest.mark.parametrize("level", [1, 3])
def test_a_state_dict_is_loaded_into_the_parameters_that_there_are(level: int) -> None:
    model, _ = _shard(_net(), level)
    with torch.no_grad():
        model(torch.ones(1, 3))  # level 1 leaves units whole
    state = {name: torch.full(tuple(param.shape), 2.0) for name, param in model.named_parameters()}
    model.load_state_dict(state)
    with torch.no_grad():
        assert model(torch.ones(1, 3)).tolist() == [[66.0, 66.0]]  # 4 * (3 * 2 + 2) * 2 + 2
    if level == 3:
        with pytest.raises(VisslZeroError, match=r"load_state_dict\(assign=True\) would put other parameters"):
            model.load_state_dict(state, assign=True)


class _Net(nn.Sequential):
    """Saves itself as models of Hugging Face do."""

    def save_pretrained(self, folder: str, state_dict: Any = None) -> Any:
        return folder, state_dict


def test_save_pretrained_wants_the_full_state() -> None:
    model, _ = _shard(_Net(nn.Linear(3, 4), nn.Linear(4, 2)))
    for call in (lambda: model.save_pretrained("folder"), lambda: model.save_pretrained("folder", None)):
        with pytest.raises(VisslZeroError, match=r"save_pretrained\(\) would write this rank's parts"):
            call()
    state: Mapping[str, Any] = {"w": 1}
    assert model.save_pretrained("folder", state) == model.save_pretrained("folder", state_dict=state)
    assert model.save_pretrained("folder", state_dict=state) == ("folder", state)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda model: model.double(), "memory of sharded parameters cannot be replaced"),
        (lambda model: model.to("meta"), "memory of sharded parameters cannot be replaced"),
        (copy.deepcopy, "cannot be copied or pickled"),
        (pickle.dumps, "cannot be copied or pickled"),
        (lambda model: pickle.dumps(model[0].weight), "A sharded tensor cannot be pickled"),
        (lambda model: type("Other", (type(model),), {}), "A class was derived from that of a sharded module"),
        (
            lambda model: torch.autograd.grad(model(torch.ones(1, 3)).sum(), model[0].weight),
            r"torch\.autograd\.grad\(\) with respect to a sharded parameter finds nothing",
        ),
        (
            lambda model: model(torch.ones(1, 3)).sum().backward(inputs=list(model[0].parameters())),
            r"backward\(inputs=\.\.\.\) with respect to a sharded parameter finds nothing",
        ),
        (
            lambda model: torch.autograd.backward(model(torch.ones(1, 3)).sum(), inputs=model[0].weight),
            r"backward\(inputs=\.\.\.\) with respect to a sharded parameter finds nothing",
        ),
    ],
)
def test_what_would_break_shards_is_refused(call: Callable[[Any], Any], sentence: str) -> None:
    model, _ = _shard(_net())
    with pytest.raises(VisslZeroError, match=sentence):
        call(model)


def test_what_changes_nothing_is_allowed() -> None:
    model, _ = _shard(_net())
    assert model.to("cpu") is model.float() is model
    weight = model[0].weight
    assert repr(weight) == (
        "ShardedTensor(shape=(4, 3), rows of this rank=(4, 3), dtype=torch.float32); full_tensor() has all"
    )
    memo: dict[int, Any] = {}
    copied = copy.deepcopy(weight, memo)
    assert copied is copy.deepcopy(weight, memo) is not weight
    with torch.no_grad():
        weight.zero_()
    assert copied.full_tensor().any() and not weight.full_tensor().any()
    weight.data = torch.ones(4, 3)
    assert weight.full_tensor().tolist() == [[1.0] * 3] * 4
    assert weight.set_(torch.zeros(4, 3)) is weight and not weight.full_tensor().any()
    for wrong in (torch.ones(3, 4), torch.ones(4, 3).double(), model[1].weight):
        with pytest.raises(VisslZeroError):
            weight.data = wrong


def test_a_parameter_that_was_replaced_is_not_used_any_more_and_its_flags_go_on() -> None:
    model = nn.Linear(3, 2)
    model.register_parameter("scale", nn.Parameter(torch.tensor(1.0)))
    weight, scale = model.weight, model.scale
    weight.no_decay = True  # type: ignore[assignment]
    model, _ = _shard(model)
    assert model.weight is not weight and model.weight.no_decay
    assert weight.shape == (2, 3) and weight.requires_grad and len(weight) == 2  # what it was may be asked
    for call in (lambda: weight + 1, lambda: weight.sum(), lambda: weight.grad, lambda: weight.data):
        with pytest.raises(VisslZeroError, match="was called with a parameter as it was before initialize"):
            call()
    assert float((scale + 1).detach()) == 2.0, "a number cannot be cut, and stays"


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def test_a_layer_is_called_from_outside_its_unit_with_gradients_and_without() -> None:
    blocks = nn.Sequential(_Block(), _Block())
    plain: Any = copy.deepcopy(blocks)
    model, optimizer = _shard(blocks)
    inputs = torch.ones(1, 3)
    assert model(inputs).equal(plain(inputs))
    for _ in range(2):
        with torch.no_grad():
            assert model[0].first(inputs).equal(plain[0].first(inputs))
        optimizer.backward(model[0].first(inputs).sum())
        plain[0].first(inputs).sum().backward()
        assert model(inputs).equal(plain(inputs))
    assert model[0].first.weight.grad.full_tensor().equal(plain[0].first.weight.grad)


LISTS: dict[str, tuple[Callable[[list[Tensor], list[Tensor]], Any], float]] = {
    "add a number": (lambda params, _: torch._foreach_add_(params, 1.0), 2.0),
    "multiply": (lambda params, _: torch._foreach_mul_(params, 3.0), 3.0),
    "add full tensors": (lambda params, others: torch._foreach_add_(params, others), 5.0),
    "copy": (lambda params, others: torch._foreach_copy_(params, others), 4.0),
    "zero": (lambda params, _: torch._foreach_zero_(params), 0.0),
}


@pytest.mark.parametrize("name", LISTS)
def test_operations_on_lists_of_parameters(name: str) -> None:
    model, _ = _shard(_net())
    plain = torch.ones(3)
    params = [*model.parameters(), plain]
    others = [torch.full(tuple(param.shape), 4.0) for param in params]
    call, value = LISTS[name]
    with torch.no_grad():
        for param in params:
            param.fill_(1.0)
        call(params, others)
        assert all((param == value).all() for param in (*(p.full_tensor() for p in params[:-1]), plain))
        norms = torch._foreach_norm(params)
    assert [float(norm) for norm in norms] == pytest.approx([value * other.numel() ** 0.5 for other in others])


def _deep() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4)), nn.Linear(4, 2)).double()


def _gradients(model: nn.Module) -> list[Tensor | None]:
    return [
        None if (grad := param.grad) is None else getattr(grad, "full_tensor", lambda: grad)()
        for param in model.parameters()
    ]


def test_a_loss_of_features_that_a_hook_has_kept_reaches_the_parameters() -> None:
    x = torch.ones(2, 3, dtype=torch.float64)
    plain, (model, optimizer) = _deep(), _shard(_deep())
    num_hooks = len(model[0][1]._forward_hooks)
    for one in (plain, model):
        kept: list[Tensor] = []
        hook = one[0][1].register_forward_hook(lambda module, inputs, output, kept=kept: kept.append(output))
        one(x)
        hook.remove()
        (optimizer.backward if one is model else Tensor.backward)(kept[0].square().sum())
    expected = [grad for grad in _gradients(plain) if grad is not None]
    found = _gradients(model)[: len(expected)]
    assert len(expected) == 2 and all(torch.equal(grad, same) for grad, same in zip(found, expected, strict=True))
    for _ in range(4):
        model(x)
    assert len(model[0][1]._forward_hooks) <= num_hooks, "nothing listens to a layer that nobody listens to"


def test_layers_are_listened_to_in_the_first_passes_alone_unless_the_loop_calls_them() -> None:
    """A hook on each layer costs time in each pass."""
    x = torch.ones(2, 3, dtype=torch.float64)
    plain, (model, _) = _deep(), _shard(_deep())
    layers = [model[0][0], model[0][2]]
    assert all(layer._forward_pre_hooks and layer._forward_hooks for layer in layers)
    with torch.no_grad():
        assert torch.equal(layers[0](x), plain[0][0](x)), "called from outside of its unit"
    for _ in range(4):
        assert torch.equal(model(x), plain(x))
    assert [bool(layer._forward_pre_hooks) for layer in layers] == [True, False]
    assert [bool(layer._forward_hooks) for layer in layers] == [True, False]
    with torch.no_grad():
        assert torch.equal(layers[0](x), plain[0][0](x))
