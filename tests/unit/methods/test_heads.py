"""Heads of methods give the numbers of their authors' and of VISSL's, on the same weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from vissl_zero.methods.dino import DINOHead, IBOTDINOHead, IBOTHead
from vissl_zero.methods.prototypes import MSNHead
from vissl_zero.methods.swav import SwAVHead
from vissl_zero.models.init import initialize_
from vissl_zero.models.patches import PatchView, Tokens


@pytest.mark.parametrize("is_unit", [True, False])
def test_swav_head_learns_the_lengths_of_prototypes_as_vissl(is_unit):
    """torch's weight_norm with lengths 1 at the start, vissl 09270ed swav_prototypes_head.py; its names too."""
    keys = {"use_weight_norm_prototypes": True, "normalize_last_layer": is_unit}
    head = SwAVHead([8, 6], [20], **keys).double()
    initialize_(head, 0)
    lengths = head.prototypes0.weight_g
    assert lengths.requires_grad != is_unit and bool((lengths == 1).all())
    with torch.no_grad():
        lengths.mul_(torch.rand(20, 1) + 0.5)
    output = head(torch.randn(4, 8).double())
    weight = torch._weight_norm(head.prototypes0.weight_v, lengths, 0)
    torch.testing.assert_close(output.scores[0], output.embeddings @ weight.T, rtol=0, atol=1e-12)


@pytest.mark.parametrize("is_unit", [True, False])
def test_ibot_head_learns_the_lengths_of_prototypes_where_they_are_not_kept_at_one(is_unit):
    """norm_last_layer of bytedance/ibot models/head.py: torch's weight_norm, lengths 1 at the start."""
    head = IBOTHead([8, 6], [20, 7], normalize_last_layer=is_unit).double()
    initialize_(head, 0)
    for part in (head.class_head, head.patch_head):
        assert part.prototypes0.weight_g.requires_grad != is_unit
        assert bool((part.prototypes0.weight_g == 1).all())
    with torch.no_grad():
        head.patch_head.prototypes0.weight_g.mul_(torch.rand(7, 1) + 0.5)
    rows = torch.randn(4, 3, 8).double()
    out = head(rows[:, 0], [Tokens(rows, 1, (1, 2), PatchView())])
    embeddings = head.patch_head(rows[:, 1:].flatten(0, 1)).embeddings
    prototypes = head.patch_head.prototypes0
    wanted = embeddings @ torch._weight_norm(prototypes.weight_v, prototypes.weight_g, 0).T
    torch.testing.assert_close(out.patch_scores.flatten(0, 1), wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("is_unit", [True, False])
def test_dino_head_is_the_authors(is_unit):
    """mlp, L2 norm, torch's weight_norm; https://github.com/facebookresearch/dino/blob/main/vision_transformer.py"""
    head = DINOHead(8, [20], normalize_last_layer=is_unit, num_layers=3, hidden_dim=12, bottleneck_dim=6).double()
    initialize_(head, 0)
    shapes = {name: tuple(tensor.shape) for name, tensor in head.named_parameters()}
    assert list(shapes)[-2:] == ["prototypes0.weight_v", "prototypes0.weight_g"]
    assert [shapes[f"mlp.{layer}.weight"] for layer in (0, 2, 4)] == [(12, 8), (12, 12), (6, 12)]
    assert head.prototypes0.weight_g.requires_grad != is_unit
    assert 0.01 < head.mlp[2].weight.std() < 0.03 and not head.mlp[2].bias.any()
    reference = nn.utils.weight_norm(nn.Linear(6, 20, bias=False).double())
    with torch.no_grad():
        if not is_unit:
            head.prototypes0.weight_g.mul_(torch.rand(20, 1) + 0.5)
        reference.weight_v.copy_(head.prototypes0.weight_v)
        reference.weight_g.copy_(head.prototypes0.weight_g)
    rows = torch.randn(4, 8).double()
    output = head(rows)
    embeddings = nn.functional.normalize(head.mlp(rows), dim=1)
    torch.testing.assert_close(output.embeddings, embeddings, rtol=0, atol=1e-12)
    torch.testing.assert_close(output.scores[0], reference(embeddings), rtol=0, atol=1e-12)


def _filled(head):
    """Parameters by name, drawn one after another."""
    for seed, (_, parameter) in enumerate(sorted(head.named_parameters()), start=100):
        parameter.data = torch.randn(
            parameter.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
        )
    return head


def _drawn(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_ibot_dino_head_is_vissl_s_ibot_head():
    """models/heads/ibot_head.py at 09270ed2, on the same numbers under the same names."""
    head = _filled(IBOTDINOHead(4, 5, 6, normalize_last_layer=False, hidden_dim=3, bottleneck_dim=2).double())
    rows = _drawn(8, 2, 3, 4)
    out = head(rows[:, 0], [Tokens(rows, 1, (1, 2), PatchView())])
    crops = """0.36384607179012696 -0.24292593017421404 -0.4088129224947511 -1.5107455393184899 0.2850767584939187
    -0.6850717442991805 -0.014236118808084938 -0.1642241977380633 -1.019032535080739 -0.14405996861612236"""
    patches = """2.1182532735556348 0.4135549232680364 1.6948000881612286
    0.03255194942689579 2.0201391884030357 0.7216918026036818"""
    torch.testing.assert_close(out.scores.flatten().tolist(), [float(number) for number in crops.split()])
    torch.testing.assert_close(out.patch_scores.sum((0, 1)).tolist(), [float(number) for number in patches.split()])
    assert IBOTDINOHead(4, 5, shared_head=True).prototypes1 is None


def test_msn_head_is_vissl_s():
    """models/heads/msn_head.py at 09270ed2, which gives the softmax of scores divided by 0.1."""
    head = _filled(MSNHead(4, 5, use_bn=True, hidden_dim=3, output_dim=2).double())
    probe = _drawn(10, 2, 2)
    out = head(_drawn(9, 6, 4), probe)
    wanted = [
        2.1320005749806165e-09,
        0.9999987446486479,
        1.3290979461492851e-08,
        2.994775514168488e-07,
        9.404508208666035e-07,
    ]
    torch.testing.assert_close((out.scores[0][0] / 0.1).softmax(0).tolist(), wanted)
    unit = torch.nn.functional.normalize(head.prototypes, dim=1)
    torch.testing.assert_close(out.probe_scores[0], probe @ unit.T)
    alone = head(_drawn(9, 6, 4))
    assert torch.equal(alone.embeddings, out.embeddings) and torch.equal(alone.scores[0], out.scores[0])
    assert alone.probe_scores is None
    initialize_(head, 0)
    assert not any(layer.bias.any() for layer in (head.fc.fc1, head.fc.fc2, head.fc.fc3))


def test_msn_head_begins_as_vissl_s():
    """Layers from a normal of deviation 0.02 cut at 2, prototypes uniform within one over the root of their width."""
    head = MSNHead(64, 200, hidden_dim=64, output_dim=64)
    initialize_(head, 0)
    assert [float(layer.weight.detach().std()) for layer in head.fc if isinstance(layer, nn.Linear)] == pytest.approx(
        [0.02] * 3, rel=0.05
    )
    drawn = head.prototypes.detach()
    assert 0.99 / 8 < drawn.max() <= 1 / 8 and -1 / 8 <= drawn.min() < -0.99 / 8
