"""A unit applies its layers per resolution, and recomputes them under a flag that layers can see."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vissl_zero.models.keyed_random import KeyedDropout, set_random_key
from vissl_zero.models.model import Unit, is_recomputing


class _Witness(nn.Module):
    """Notes, at every call, whether it is a recomputation."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(is_recomputing())
        return x.sin()


def _unit(*extra: nn.Module) -> Unit:
    torch.manual_seed(0)
    return Unit(nn.Linear(5, 7), nn.ReLU(), *extra, nn.Linear(7, 3)).double()


def _crops(*rows: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(n, 5, dtype=torch.float64, generator=generator).requires_grad_() for n in rows]


def _loss(outputs: list[Tensor]) -> Tensor:
    return torch.cat(outputs).square().sum()


def test_each_resolution_goes_through_all_layers() -> None:
    unit, xs = _unit(), _crops(2, 6)
    for x, y in zip(xs, unit(xs), strict=True):
        torch.testing.assert_close(y, unit[2](unit[1](unit[0](x))))


def test_checkpointed_gradients_are_bit_equal_and_layers_run_twice() -> None:
    gradients = []
    for is_checkpointed in (False, True):
        witness, xs = _Witness(), _crops(2, 6)
        unit = _unit(witness)
        unit.checkpoint = is_checkpointed
        _loss(unit(xs)).backward()
        gradients.append([p.grad for p in unit.parameters()] + [x.grad for x in xs])
        assert witness.calls == ([False, False, True, True] if is_checkpointed else [False, False])
        assert not is_recomputing()
    for plain, recomputed in zip(*gradients, strict=True):
        assert plain is not None and recomputed is not None
        assert torch.equal(plain, recomputed)


def test_nothing_is_recomputed_in_evaluation_or_without_gradients() -> None:
    witness = _Witness()
    unit = _unit(witness)
    unit.checkpoint = True
    with torch.no_grad():
        assert not unit(_crops(2))[0].requires_grad
    unit.eval()
    _loss(unit(_crops(2))).backward()
    assert witness.calls == [False, False]


def test_keyed_dropout_is_the_same_when_recomputed() -> None:
    set_random_key(0, 3, torch.arange(2))
    gradients = []
    for is_checkpointed in (False, True):
        unit, xs = _unit(KeyedDropout(0.5, "unit.2")), _crops(2, 6)
        unit.checkpoint = is_checkpointed
        _loss(unit(xs)).backward()
        gradients.append([x.grad for x in xs])
    for plain, recomputed in zip(*gradients, strict=True):
        assert plain is not None and recomputed is not None
        assert torch.equal(plain, recomputed)
        assert plain.abs().sum() > 0


def test_keyed_dropout_differs_between_resolutions() -> None:
    set_random_key(0, 0, torch.arange(2))
    small, large = Unit(KeyedDropout(0.5, "layer"))([torch.ones(2, 50), torch.ones(2, 50)])
    assert not torch.equal(small, large)


def test_no_rows_meet_plain_attention_and_rows_whatever_is_fastest() -> None:
    seen: dict[int, bool] = {}

    class Block(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen[len(x)] = torch.backends.cuda.cudnn_sdp_enabled() or torch.backends.cuda.flash_sdp_enabled()
            q = x[:, None]
            return nn.functional.scaled_dot_product_attention(q, q, q)[:, 0]

    full, empty = Unit(Block())([torch.randn(2, 5, 8), torch.randn(0, 5, 8)])
    assert seen == {2: True, 0: False}
    assert full.shape == (2, 5, 8) and empty.shape == (0, 5, 8)
