"""Mixup and CutMix: shares, boxes and labels as published and as VISSL draws them."""

from __future__ import annotations

import pytest
import torch

from tests.blocks import model_block, split_block
from tests.unit.config.example_config import CPU_HOST, complaints
from vissl_zero.config.blocks.data import MixingConfig
from vissl_zero.config.compose import load
from vissl_zero.data.dataset import ImageBatch
from vissl_zero.errors import ConfigError
from vissl_zero.methods.mixing import Mixing, beta_from, mixing_of, smooth_targets
from vissl_zero.methods.supervised import CrossEntropy, soft_cross_entropy
from vissl_zero.methods.two_views import SimCLR
from vissl_zero.models.init import initialize_
from vissl_zero.models.keyed_random import set_random_key
from vissl_zero.models.mlp_heads import EvalMLP
from vissl_zero.models.model import build_model
from vissl_zero.resolve.data_plan import mixing_notes
from vissl_zero.resolve.decisions import Decisions
from vissl_zero.resolve.resolve import problems

B, C, SIDE = 6, 5, 16
IMAGES = torch.arange(B, dtype=torch.float64)[:, None, None, None].expand(B, 3, SIDE, SIDE).clone()
LABELS = torch.tensor([0, 1, 2, 3, 4, 0])
PARTNERS = [1, 0, 3, 2, 5, 4]


def mixed(step: int = 0, **keys: object) -> tuple[torch.Tensor, torch.Tensor]:
    set_random_key(3, step, torch.arange(B))
    mixing = Mixing(MixingConfig(**{"num_classes": C, "label_smoothing": 0.0, **keys}))  # type: ignore[arg-type]
    (images,), shares = mixing([IMAGES], B)
    return images, mixing.labels(LABELS, shares, torch.float64)


def own_share(labels: torch.Tensor, row: int) -> float:
    return labels[row, LABELS[row]].item()


@pytest.mark.parametrize("mode", ["batch", "pair", "elem"])
def test_an_image_alone_is_mixed_with_itself_in_all_its_crops(mode):
    set_random_key(3, 0, torch.arange(1))
    mixing = Mixing(MixingConfig(num_classes=C, label_smoothing=0.0, mode=mode))
    crops = IMAGES[1:4]
    (images,), shares = mixing([crops], 1)
    assert torch.equal(images, crops)
    labels = mixing.labels(LABELS[2:3], shares, torch.float64)
    torch.testing.assert_close(labels, torch.eye(C).double()[[2, 2, 2]])


@pytest.mark.parametrize("alpha", [0.1, 0.8, 1.0, 2.0])
def test_shares_are_beta_distributed(alpha):
    uniforms = torch.rand(40_000, 64, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    shares = beta_from(uniforms, alpha)
    assert shares.mean().item() == pytest.approx(0.5, abs=0.01)
    assert shares.var().item() == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=0.03)


@pytest.mark.parametrize("mode", ["batch", "pair", "elem"])
def test_mixup_is_a_weighted_mean_of_image_and_label(mode):
    images, labels = mixed(mixup_alpha=0.8, mode=mode)
    shares = []
    for row in range(B):
        partner = row ^ 1
        if LABELS[row] == LABELS[partner]:
            assert labels[row, LABELS[row]] == pytest.approx(1)
            continue
        share = own_share(labels, row)
        shares.append(round(share, 9))
        assert torch.allclose(images[row], torch.full_like(images[row], share * row + (1 - share) * partner))
    assert len(set(shares)) == {"batch": 1, "pair": 3, "elem": 6}[mode]


@pytest.mark.parametrize("keys", [{"cutmix_alpha": 1.0}, {"cutmix_minmax": [0.25, 0.75], "correct_lam": False}])
def test_cutmix_pastes_a_box_of_the_share_that_the_label_has(keys):
    seen = set()
    for step in range(8):
        images, labels = mixed(step, mixup_alpha=0.0, mode="elem", **keys)
        for row in (1, 2, 3, 4):
            pasted = images[row, 0] != row
            assert set(images[row].unique().tolist()) <= {float(row), float(row ^ 1)}
            assert own_share(labels, row) == pytest.approx(1 - pasted.double().mean().item())
            rows, columns = pasted.any(dim=1), pasted.any(dim=0)
            assert torch.equal(pasted, rows[:, None] & columns[None, :])
            seen.add(pasted.sum().item())
            if "cutmix_minmax" in keys:
                assert 4 <= rows.sum() <= 12 and 4 <= columns.sum() <= 12
    assert len(seen) > 5


def test_both_are_drawn_by_switch_prob_and_neither_beyond_prob():
    cut = mean = whole = 0
    for step in range(60):
        images, _ = mixed(step, mixup_alpha=1.0, cutmix_alpha=1.0, switch_prob=0.3, prob=0.5, mode="elem")
        for row in (1, 2, 3, 4):
            values = images[row].unique()
            whole += len(values) == 1 and values[0] == row
            cut += len(values) == 2
            mean += len(values) == 1 and values[0] != row
    assert whole / 240 == pytest.approx(0.5, abs=0.1)
    assert cut / (cut + mean) == pytest.approx(0.3, abs=0.12)


def test_draws_follow_the_step_and_repeat():
    first, again, later = mixed(1), mixed(1), mixed(2)
    assert torch.equal(first[0], again[0]) and not torch.equal(first[0], later[0])


@pytest.mark.parametrize("mode", ["batch", "pair", "elem"])
@pytest.mark.parametrize("cuts", [(2, 4), (4, 2), (2, 2, 2)])
def test_ranks_mix_what_one_process_mixes(mode, cuts):
    keys = {"mixup_alpha": 1.0, "cutmix_alpha": 1.0, "mode": mode}
    whole, labels = mixed(**keys)
    found, first = [], 0
    for size in cuts:
        rows = slice(first, first + size)
        first += size
        set_random_key(3, 0, torch.arange(B)[rows])
        mixing = Mixing(MixingConfig(num_classes=C, label_smoothing=0.0, **keys))
        (images,), shares = mixing([IMAGES[rows]], size)
        found.append((images, mixing.labels(LABELS[rows], shares, torch.float64)))
    assert torch.equal(torch.cat([images for images, _ in found]), whole)
    assert torch.equal(torch.cat([own for _, own in found]), labels)


def test_the_last_of_an_odd_number_is_not_mixed():
    set_random_key(3, 0, torch.arange(5))
    (images,), _ = Mixing(MixingConfig(mixup_alpha=1.0))([IMAGES[:5]], 5)
    assert torch.equal(images[4], IMAGES[4]) and not torch.equal(images[0], IMAGES[0])


def test_the_loss_is_the_cross_entropy_of_the_mixed_labels():
    set_random_key(3, 0, torch.arange(B))
    loss = CrossEntropy()
    loss.mixing = mixing_of(
        split_block({"COLLATE_FUNCTION": "cutmixup_collator", "COLLATE_FUNCTION_PARAMS": {"num_classes": C}})
    )
    model = _Sum().forward
    batch = ImageBatch([IMAGES], [1], LABELS, torch.arange(B), B)
    outputs = loss.run_student(model, batch)  # type: ignore[arg-type]
    assert len(outputs) == 2
    images, labels = mixed(label_smoothing=0.1)
    assert torch.equal(outputs[1], labels)
    assert loss(outputs, batch).item() == pytest.approx(soft_cross_entropy(_Sum().forward([images])[0], labels).item())
    with pytest.raises(ConfigError, match="num_classes: must be the 4 outputs"):
        loss([outputs[0][:, :4], outputs[1]], batch)


def test_mixed_images_without_labels_are_refused_in_a_sentence():
    loss = CrossEntropy()
    loss.mixing = Mixing(MixingConfig(num_classes=C))
    with pytest.raises(ConfigError, match="needs one label for each image"):
        loss.run_student(_Sum().forward, ImageBatch([IMAGES], [1], None, torch.arange(B), B))  # type: ignore[arg-type]


def test_a_loss_without_labels_sees_mixed_images_each_crop_mixed_by_itself():
    """As VISSL's collator does, which calls its Mixup once for each crop (cutmixup_collator.py)."""
    set_random_key(3, 0, torch.arange(B))
    method = SimCLR()
    method.mixing = Mixing(MixingConfig())
    batch = ImageBatch([IMAGES.repeat(2, 1, 1, 1)], [2], None, torch.arange(B), B)
    first, second = method.prepare(batch).images[0].unflatten(0, (2, B))
    shares = [1 - view[0].mean().item() for view in (first, second)]
    assert shares[0] != pytest.approx(shares[1])
    for view, share in zip((first, second), shares, strict=True):
        assert torch.allclose(view, share * IMAGES + (1 - share) * IMAGES[PARTNERS])


class _Sum:
    def forward(self, images, probe=None):
        return [images[0].mean(dim=(1, 2, 3))[:, None] * torch.arange(C, dtype=torch.float64)]


def test_smoothing_is_spread_over_all_classes():
    assert smooth_targets(torch.tensor([1]), 4, 0.2)[0].tolist() == pytest.approx([0.05, 0.85, 0.05, 0.05])


def test_a_recipe_writes_it_where_vissl_has_it():
    words, params = (
        ["config.DATA.TRAIN.COLLATE_FUNCTION=cutmixup_collator"],
        "config.DATA.TRAIN.COLLATE_FUNCTION_PARAMS",
    )
    cfg = load("digits/supervised", [*words, f"+{params}={{cutmix_alpha: 1, num_classes: 10}}"])
    assert problems(Decisions(cfg, CPU_HOST)) == []
    cfg = load("digits/supervised", [*words, f"+{params}={{cutmix: 1, mixup_alpha: 7}}"])
    said = " ".join(map(str, problems(Decisions(cfg, CPU_HOST))))
    assert "cutmix: is not a key" in said
    mixes = {"DATA__TRAIN__COLLATE_FUNCTION": "cutmixup_collator"}
    assert not complaints(**mixes)  # SwAV, whose images alone are mixed
    (found,) = complaints(**mixes, DATA__TRAIN__COLLATE_FUNCTION_PARAMS={"ssl_method": "moco"})
    assert "must be swav for the loss swav_loss" in found
    (found,) = complaints(DATA__TEST__COLLATE_FUNCTION="cutmixup_collator")
    assert "must not mix the images" in found


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["config.DATA.TRAIN.BATCHSIZE_PER_REPLICA=7"], "an even BATCHSIZE_PER_REPLICA"),
        (["config.DATA.TRAIN.BATCHSIZE_PER_REPLICA=8", "config.DATA.TRAIN.DROP_LAST=false"], "DROP_LAST=true"),
        (["config.DATA.TRAIN.BATCHSIZE_PER_REPLICA=8", "config.DATA.TRAIN.DROP_LAST=true"], ""),
    ],
)
def test_ranks_that_part_a_pair_are_told(words, said):
    cfg = load("digits/supervised", ["config.DATA.TRAIN.COLLATE_FUNCTION=cutmixup_collator", *words])
    assert mixing_notes(cfg, world_size=1) == []
    notes = mixing_notes(cfg, world_size=2)
    assert said in "".join(notes) and bool(notes) == bool(said)


def test_params_multiplier_scales_the_first_weights_of_mlps():
    def head(multiplier: float) -> dict[str, torch.Tensor]:
        block = {"NAME": "resnet", "RESNETS": {"DEPTH": 18}}
        params = [["eval_mlp", {"in_channels": 512, "dims": [512, 3]}]]
        settings = {"PARAMS": params, "BATCHNORM_EPS": 1e-5, "BATCHNORM_MOMENTUM": 0.1, "PARAMS_MULTIPLIER": multiplier}
        model = build_model(model_block({"TRUNK": block, "HEAD": settings}))
        initialize_(model, 0)
        assert isinstance(model.heads[0], EvalMLP)
        return model.heads[0].state_dict()

    one, scaled = head(1.0), head(33.0)
    for name in ("clf.clf.0.weight", "clf.clf.0.bias"):
        assert torch.allclose(scaled[name], 33 * one[name])
    assert torch.equal(scaled["channel_bn.weight"], one["channel_bn.weight"])
