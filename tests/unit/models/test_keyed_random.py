"""Dropout masks are a function of seed, step, sample, layer, crop and resolution, and of nothing else."""

from __future__ import annotations

import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn

from vissl_zero.errors import ConfigError
from vissl_zero.models import keyed_random
from vissl_zero.models.keyed_random import (
    KeyedDropout,
    KeyedDropPath,
    key_random_layers,
    keyed_bits,
    refuse_unkeyed_randomness,
    resolution_scope,
    set_random_key,
    stable_hash,
)

SAMPLES = torch.tensor([40, 7, 1234567, 8, 9, 3])
WIDTH = 32


def _bits(samples: Tensor = SAMPLES, crops: int = 2, seed: int = 0, step: int = 5, layer: str = "a") -> Tensor:
    set_random_key(seed, step, samples)
    return keyed_bits(crops * len(samples), WIDTH, layer, torch.device("cpu"))


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_rows_of_rank_slices_are_rows_of_the_whole_batch(num_ranks: int) -> None:
    whole = _bits().view(2, len(SAMPLES), WIDTH)
    for part in torch.arange(len(SAMPLES)).tensor_split(num_ranks):
        assert torch.equal(_bits(SAMPLES[part]).view(2, len(part), WIDTH), whole[:, part])


def test_everything_in_the_key_changes_the_numbers() -> None:
    base = _bits()
    others = [_bits(SAMPLES + 1), _bits(seed=1), _bits(step=6), _bits(layer="b")]
    with resolution_scope(1):
        others.append(_bits())
    others.append(base.view(2, len(SAMPLES), WIDTH).flip(0).reshape(base.shape))  # another crop
    for other in others:
        assert (other == base).sum() == 0
    assert torch.equal(_bits(), base)


def test_numbers_are_uniform_and_uncorrelated() -> None:
    uniform = _bits(torch.arange(500), crops=2).double() / 2**53
    count = uniform.numel()
    assert uniform.min() >= 0 and uniform.max() < 1
    # Five standard deviations of the mean of uniform numbers, and of a correlation.
    assert abs(uniform.mean() - 0.5) < 5 * (1 / 12 / count) ** 0.5
    histogram = torch.histc(uniform, bins=16, min=0, max=1)
    assert ((histogram - count / 16) ** 2 / (count / 16)).sum() < 60  # chi-square, 15 degrees of freedom
    centered = (uniform - 0.5) * 12**0.5
    for shifted in (centered.roll(1, 0), centered.roll(1, 1), centered.roll(500, 0)):
        assert abs((centered * shifted).mean()) < 5 / count**0.5


def test_numbers_are_those_of_splitmix64_in_plain_integers() -> None:
    """Pinned, so that runs of different versions stay comparable."""
    assert stable_hash(0, "trunk.stem.0.weight") == 8755290633505021868
    mask, gamma = 2**64 - 1, 0x9E3779B97F4A7C15

    def mix(x: int) -> int:
        x &= mask
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & mask
        return x ^ (x >> 31)

    bits, base = _bits().view(2, len(SAMPLES), WIDTH), stable_hash(0, 5, "a", 0)
    for crop, row, element in ((0, 0, 0), (1, 2, 31), (1, 5, 7)):
        row_key = mix(mix(int(SAMPLES[row]) * gamma + base) + crop * gamma)
        assert bits[crop, row, element] == mix(row_key + (element + 1) * gamma) >> 11


def test_mask_is_the_same_in_every_format_and_drops_its_share() -> None:
    samples = torch.arange(400)
    set_random_key(0, 0, samples)
    layer = KeyedDropout(0.3, "layer").train()
    masks = [layer(torch.ones(400, 5, 2, dtype=dtype)) != 0 for dtype in (torch.float64, torch.float32, torch.bfloat16)]
    assert torch.equal(masks[0], masks[1]) and torch.equal(masks[0], masks[2])
    assert abs((~masks[0]).double().mean() - 0.3) < 5 * (0.3 * 0.7 / 4000) ** 0.5
    kept = layer(torch.ones(400, 5, dtype=torch.float64))
    torch.testing.assert_close(kept[kept != 0], torch.full_like(kept[kept != 0], 1 / 0.7))


def test_dropout_is_off_in_evaluation_and_needs_a_key_in_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keyed_random, "_current", None)
    x = torch.ones(4, 3)
    assert KeyedDropout(0.5).eval()(x) is x
    with pytest.raises(RuntimeError, match="set_random_key"):
        KeyedDropout(0.5).train()(x)
    set_random_key(0, 0, torch.arange(3))
    with pytest.raises(RuntimeError, match="4 rows are no multiple of the 3 samples"):
        KeyedDropout(0.5).train()(x)
    with pytest.raises(ValueError, match=r"in \[0, 1\), got 1.0"):
        KeyedDropout(1.0)


def test_a_rank_without_samples_gets_no_rows() -> None:
    set_random_key(0, 0, torch.arange(0))
    assert KeyedDropout(0.5).train()(torch.ones(0, 3)).shape == (0, 3)


def test_plain_dropout_is_replaced_and_named() -> None:
    model = nn.ModuleDict({"head": nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.25))})
    key_random_layers(model)
    layer = model["head"][1]  # type: ignore[index]
    assert isinstance(layer, KeyedDropout)
    assert (layer.p, layer.layer) == (0.25, "head.1")


def test_windows_of_a_row_are_keyed_by_its_sample() -> None:
    """Attention in windows sees each row of the batch several times in a row: the same numbers on any rank."""
    set_random_key(0, 0, SAMPLES)
    with resolution_scope(0, 2 * len(SAMPLES)):
        whole = keyed_bits(2 * len(SAMPLES) * 4, 3, "a", torch.device("cpu")).view(2, len(SAMPLES), 4, 3)
    assert len(whole.unique()) == whole.numel()
    for part in torch.arange(len(SAMPLES)).tensor_split(3):
        set_random_key(0, 0, SAMPLES[part])
        with resolution_scope(0, 2 * len(part)):
            mine = keyed_bits(2 * len(part) * 4, 3, "a", torch.device("cpu")).view(2, len(part), 4, 3)
        assert torch.equal(mine, whole[:, part])
    with resolution_scope(0, 4), pytest.raises(RuntimeError, match="are no multiple of the 4 rows"):
        keyed_bits(6, 3, "a", torch.device("cpu"))


def test_random_layers_of_libraries_are_replaced() -> None:
    block = timm.models.vision_transformer.Block(8, 2, attn_drop=0.5, drop_path=0.25, proj_drop=0.5)
    model = nn.Sequential(block, torchvision.ops.StochasticDepth(0.5, "row"), nn.Dropout(0.5))
    key_random_layers(model)
    path = model[0].drop_path1
    assert isinstance(path, KeyedDropPath) and (path.p, path.layer) == (0.25, "0.drop_path1")
    assert isinstance(model[1], KeyedDropPath) and isinstance(model[2], KeyedDropout)
    assert not block.attn.fused_attn and isinstance(block.attn.attn_drop, KeyedDropout)
    set_random_key(0, 0, SAMPLES)
    before = torch.get_rng_state()
    x = torch.randn(len(SAMPLES), 4, 8, generator=torch.Generator().manual_seed(0))
    with refuse_unkeyed_randomness(model):
        first = model(x)
    assert torch.equal(model(x), first) and torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(model.eval()(x), first)
    # It drops all rows or none, which no key of a sample can say.
    batches = nn.Sequential(torchvision.ops.StochasticDepth(0.5, "batch"))
    key_random_layers(batches)
    assert isinstance(batches[0], torchvision.ops.StochasticDepth)


def test_dropped_paths_are_whole_rows_and_the_mean_stays() -> None:
    samples = torch.arange(4000)
    set_random_key(0, 0, samples)
    rows = KeyedDropPath(0.2, "layer")(torch.ones(4000, 2, 3))
    assert ((rows == 0).all(dim=(1, 2)) | (rows == 1 / 0.8).all(dim=(1, 2))).all()
    assert rows.mean().item() == pytest.approx(1.0, abs=5 * (0.25 / 4000) ** 0.5)
    unscaled = KeyedDropPath(0.2, "layer", scale_by_keep=False)(torch.ones(4000, 2, 3))
    torch.testing.assert_close(unscaled / 0.8, rows)
    with pytest.raises(ValueError, match=r"\[0, 1\)"):
        KeyedDropPath(1.0)


class _Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand_like(x) if self.training else x


class _FusedAttention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        q = x.view(1, 1, *x.shape)
        return nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=0.5).view(x.shape)


@pytest.mark.parametrize("layer", [_Noise(), nn.Dropout1d(0.5), nn.AlphaDropout(0.5), nn.RReLU(), _FusedAttention()])
def test_a_layer_that_draws_from_the_global_generator_is_refused_by_name(layer: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Identity(), layer))
    with refuse_unkeyed_randomness(model), pytest.raises(ConfigError) as error:
        model(torch.zeros(3, 4))
    assert "layer '1.1'" in str(error.value) and type(layer).__name__ in str(error.value)
    assert "keyed_bits" in str(error.value)
    model(torch.zeros(3, 4))  # afterwards nobody looks
    if not isinstance(layer, _FusedAttention):
        with refuse_unkeyed_randomness(model.eval()):
            model(torch.zeros(3, 4))


@pytest.mark.parametrize("kind", [KeyedDropout, KeyedDropPath])
def test_a_printed_model_shows_what_its_random_layers_drop(kind: type[nn.Module]) -> None:
    assert str(kind(0.25, "trunk.drop")) == f"{kind.__name__}(p=0.25, layer='trunk.drop')"
