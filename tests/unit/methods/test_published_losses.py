"""Losses against numbers that the papers' own code, VISSL's and lightly's give for the same inputs, in float64.

The numbers were computed by running that code at the commits named here on ``_randn`` of the seeds named here; where it
needs a process group, with one rank. A number alone says little, so gradients and several ranks are compared with one
process in ``tests/dist/test_method_losses.py``.
"""

from __future__ import annotations

import itertools
import math
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.unit.methods.batches import LossBatch
from vissl_zero.data.dataset import ImageBatch
from vissl_zero.methods.contrastive import nnclr_loss, supcon_loss
from vissl_zero.methods.dino import (
    Center,
    IBOTOutput,
    dino_loss,
    dinov2_loss,
    koleo,
    masked_patch_loss,
    sinkhorn_targets,
)
from vissl_zero.methods.dinov3 import gram_loss
from vissl_zero.methods.distillation import (
    IBOTDistillation,
    SwAVDistillation,
    dino_distillation_loss,
    distillation_loss,
)
from vissl_zero.methods.health import embedding_sums
from vissl_zero.methods.lejepa import lejepa_loss, random_directions
from vissl_zero.methods.masked_modeling import (
    HOGOutput,
    MaskFeat,
    histograms_of_gradients,
    latent_regression,
    mae_loss,
    mean_of_blocks,
    pixel_targets,
    simmim_loss,
)
from vissl_zero.methods.mixing import mix_targets, smooth_targets
from vissl_zero.methods.pretext import MemoryBank, nce_loss, pirl_loss
from vissl_zero.methods.prototypes import ClusterMemory, deepcluster_loss, msn_loss, spherical_kmeans
from vissl_zero.methods.supervised import (
    binary_cross_entropy,
    soft_cross_entropy,
)
from vissl_zero.methods.swav import SwAVLoss, SwAVMomentumLoss, SwAVOutput
from vissl_zero.methods.two_views import (
    KeyQueue,
    barlow_twins_loss,
    byol_loss,
    info_nce,
    nt_xent,
    simsiam_loss,
    symmetric_info_nce,
    vicreg_loss,
)
from vissl_zero.methods.vicregl import global_loss, local_loss
from vissl_zero.methods.visreg import visreg, visreg_loss
from vissl_zero.models.keyed_random import set_random_key
from vissl_zero.models.patches import taken
from vissl_zero.registry import LOSSES


def _randn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


A, B, C, D = (_randn(seed, 6, 5) for seed in (1, 2, 3, 4))


def _is(value: Tensor, published: float | list[float]) -> None:
    torch.testing.assert_close(value.detach(), torch.tensor(published, dtype=torch.float64), rtol=1e-8, atol=1e-12)


def test_simclr():
    """lightly e8d317f lightly/loss/ntx_ent_loss.py; vissl 09270ed simclr_info_nce_loss.py: the same."""
    _is(nt_xent((A, B), 0.2), 3.6582377199659972)


def test_simclr_of_several_crops():
    """vissl 09270ed multicrop_simclr_info_nce_loss.py, one process: of several it masks the others' negatives out."""
    crops = _randn(3, 4, 6, 5)
    _is(nt_xent(crops, 0.2), 4.973078642412923)
    _is(nt_xent(crops[:2], 0.2), 2.9590561629518692)
    alone = crops[:, :1].clone().requires_grad_()
    nt_xent(alone, 0.2).backward()
    assert alone.grad is not None and not alone.grad.any()


def test_moco_v2():
    """lightly e8d317f lightly/loss/ntx_ent_loss.py, with a memory bank."""
    _is(info_nce(A, B, F.normalize(_randn(7, 7, 5), dim=1), 0.2), 3.6862059746484572)


def test_moco_v3():
    """facebookresearch/moco-v3 c349e6e moco/builder.py."""
    _is(symmetric_info_nce((A, B), (C, D), 0.2), 2.6864490096638654)


def test_byol_and_simsiam():
    """lightly e8d317f lightly/loss/negative_negative_similarity.py."""
    negative_ad, negative_bc = 0.2398888478119335, -0.24115833713737014
    _is(byol_loss((A, B), (C, D)), 4 + 2 * negative_ad + 2 * negative_bc)
    _is(simsiam_loss((A, B), (C, D)), (negative_ad + negative_bc) / 2)
    _is(simsiam_loss((A, B), (A, B)), -0.042261560902032175)


def _swav_rows() -> tuple[Tensor, list[Tensor], Tensor]:
    """Embeddings of 4 crops of 6 images, two layers of prototypes, a queue for each of 2 crops; all of unit length."""
    rows, seven, three, queue = (
        F.normalize(_randn(seed, *shape), dim=-1)
        for seed, shape in ((31, (24, 4)), (32, (7, 4)), (34, (3, 4)), (33, (2, 12, 4)))
    )
    return rows, [seven, three], queue


def _swav(
    method: type[SwAVLoss], layers: list[Tensor], queue: Tensor | None, rated: Tensor | None, **keys: Any
) -> Tensor:
    """The loss of ``_swav_rows``; of a teacher's embeddings ``rated``, where it has one."""
    queue_length = {"queue": {"queue_length": 12}} if queue is not None else {}
    widths = [len(layer) for layer in layers]
    loss = method(num_crops=4, num_prototypes=widths, embedding_dim=4, **queue_length, **keys).double()
    if queue is not None:
        assert loss.queue is not None
        loss.queue.push(queue)

    def output(rows: Tensor, probe: Tensor | None) -> SwAVOutput:
        probed = None if probe is None else [probe @ layer.T for layer in layers]
        return SwAVOutput(rows, [rows @ layer.T for layer in layers], probed)

    student = output(_swav_rows()[0], loss.probe())
    teacher_outputs = None if rated is None else [output(rated, loss.probe())]
    return loss.loss([student], LossBatch([2, 2], torch.arange(6), 6), teacher_outputs)


def test_swav():
    """facebookresearch/swav 06b1b7c main_swav.py; vissl 09270ed swav_loss.py, whose assignments aren't rounded here."""
    _, layers, queue = _swav_rows()
    _is(_swav(SwAVLoss, layers[:1], None, None), 7.834550920944263)
    _is(_swav(SwAVLoss, layers[:1], queue, None), 7.831820032831375)
    _is(_swav(SwAVLoss, layers, None, None), 5.9851686289033985)
    _is(_swav(SwAVLoss, layers, None, None, temp_hard_assignment_iters=1), 6.185565634747238)


def test_swav_momentum():
    """vissl 09270ed swav_momentum_loss.py, without its rounding of assignments to float32."""
    _, layers, queue = _swav_rows()
    rated = F.normalize(_randn(35, 12, 4), dim=1)
    _is(_swav(SwAVMomentumLoss, layers, None, rated), 6.157138529772165)
    _is(_swav(SwAVMomentumLoss, layers, queue, rated), 5.887578526344469)
    _is(_swav(SwAVMomentumLoss, layers, None, rated, crops_for_assign=[1, 0]), 6.157138529772165)


def test_barlow_twins():
    """facebookresearch/barlowtwins 8e8d284 main.py; lightly e8d317f lightly/loss/barlow_twins_loss.py: the same."""
    _is(barlow_twins_loss(A, B, 0.0051, scale=1.0), 3.996844846463495)
    _is(barlow_twins_loss(A, B, 0.0051, scale=0.024), 0.024 * 3.996844846463495)


def test_vicreg():
    """facebookresearch/vicreg 4e12602 main_vicreg.py; lightly e8d317f lightly/loss/vicreg_loss.py: the same."""
    _is(vicreg_loss(A, B, invariance=25.0, variance=25.0, covariance=1.0), 51.04880704511413)


def test_vicregl():
    """facebookresearch/VICRegL 803ae4c main_vicregl.py, places by its transforms.py; 10 of 18 boxes are mirrored."""
    weights = (2.0, 3.0, 0.5)
    _is(global_loss(_randn(70, 3, 6, 5), weights), 4.609469028104523)
    maps = [_randn(71, 6, 5, 3, 3), _randn(72, 6, 5, 3, 3), _randn(73, 6, 5, 2, 2)]
    boxes = _randn(74, 3, 6, 4).abs() * 40
    boxes[:, :, 2] += boxes[:, :, 0]
    _is(local_loss(maps, boxes, (5, 2), weights), 7.330048047619595)


def test_dino():
    """facebookresearch/dino 7c446df main_dino.py: two teacher views, four student views, a center."""
    student, teacher = _randn(10, 4, 6, 8), _randn(11, 2, 6, 8)
    center = Center(8, 0.9).double()
    center.mean.copy_(_randn(9, 8) * 0.1)
    _is(dino_loss(student, center.targets(teacher, 0.07), student_temperature=0.1), 12.103813516045745)
    center.update(center.sums(teacher))
    after = [-0.02627772145883702, 0.15383469641282838, -0.036471944648670124, 0.03134863702576182]
    after += [0.1320562308676549, -0.02482915077759862, 0.02988401876559076, 0.01426439333174953]
    _is(center.mean, after)
    center.update(center.sums(teacher * torch.inf))
    _is(center.mean, after)


def test_nnclr():
    """vturrisi/solo-learn 9187ea3 solo/losses/nnclr.py and methods/nnclr.py, temperature 0.2."""
    queue = F.normalize(_randn(60, 16, 5), dim=1)
    projections, predictions = (_randn(61, 6, 5), _randn(62, 6, 5)), (_randn(63, 6, 5), _randn(64, 6, 5))
    _is(nnclr_loss(projections, predictions, queue, 0.2), 3.550465816250187)


def test_supcon():
    """HobbitLong/SupContrast 66a8fe5 losses.py, with base_temperature = temperature = 0.1; without classes, NT-Xent."""
    views = _randn(65, 6, 5), _randn(66, 6, 5)
    _is(supcon_loss(views, torch.tensor([0, 1, 0, 2, 1, 0]), 0.1), 6.367730562773509)
    _is(supcon_loss(views, torch.full((6,), -1), 0.1), float(nt_xent(views, 0.1)))
    # Images without a class are of none that there is, and of one each.
    _is(
        supcon_loss(views, torch.tensor([-1, -1, 0, 0, 1, -1]), 0.1),
        float(supcon_loss(views, torch.tensor([7, 8, 0, 0, 1, 9]), 0.1)),
    )


def test_lejepa():
    """lightly 1.6.0 lightly/loss/lejepa_loss.py, 8 directions, 2 global views and a local one."""
    views = _randn(69, 3, 6, 5)
    _is(
        lejepa_loss(views, 2, random_directions(5, 8, 7, views), weight=0.05, num_points=17, max_point=3),
        1.1944831713686574,
    )


def test_visreg():
    """HaiyuWu/visreg 074fb51 visreg/losses/visreg.py, and train.py's sum; 8 directions, 2 global views."""
    views = _randn(75, 3, 6, 5)
    directions = random_directions(5, 8, 7, views)
    _is(visreg(views, directions), 0.3552030789263369)
    _is(visreg_loss(views, 2, directions, 0.9), 0.39569207452670496)
    # Of embeddings that are all equal the gradient is finite.
    collapsed = views.mean(dim=(0, 1)).expand(3, 6, 5).clone().requires_grad_()
    visreg(collapsed, directions).backward()
    assert collapsed.grad is not None and collapsed.grad.isfinite().all()


def test_gram():
    """facebookresearch/dinov3 6876159 dinov3/loss/gram_loss.py without remove_neg."""
    _is(gram_loss(_randn(67, 3, 4, 5), _randn(68, 3, 4, 5)), 0.3907935763672528)


def _masked() -> tuple[Tensor, Tensor, Tensor]:
    """Patch scores of the student and the teacher, and a mask in which one image has no masked patch."""
    mask = _randn(15, 12, 9) > 0.4
    mask[3] = False
    return _randn(13, 12, 9, 7), _randn(14, 12, 9, 7), mask


def test_ibot():
    """bytedance/ibot da316d8 main_ibot.py."""
    student, teacher, mask = _masked()
    center = Center(7, 0.9).double()
    center.mean.copy_(_randn(12, 7) * 0.1)
    _is(masked_patch_loss(student, center.targets(teacher, 0.07), mask, student_temperature=0.1), 11.88465635487851)
    center.update(center.sums(teacher))
    after = [-0.013543190273707704, -0.12788921485993437, -0.008178795242890474, 0.040424776616997116]
    _is(center.mean, [*after, 0.07057642489994954, -0.10176625646708964, -0.04630791212081803])


def test_dinov2():
    """facebookresearch/dinov2 b8931f7 dinov2/loss/*.py, put together as in dinov2/train/ssl_meta_arch.py."""
    student, teacher = _randn(10, 4, 6, 8), _randn(11, 2, 6, 8)
    patches, teacher_patches, mask = _masked()
    targets = sinkhorn_targets(teacher, 0.3)
    _is(targets.square().sum(), 6.44624902542537)
    _is(dino_loss(student, targets, student_temperature=0.1), 13.30083603195547)
    _is(
        masked_patch_loss(patches, sinkhorn_targets(teacher_patches, 0.3, counts=mask), mask, student_temperature=0.1),
        12.007313762840829,
    )
    loss = dinov2_loss(
        (student, teacher),
        (patches, teacher_patches),
        mask,
        torch.stack((A, B)),
        0.3,
        student_temperature=0.1,
        weights=(1.0, 1.0, 0.1),
    )
    _is(loss, 25.30740474472757)


def test_koleo():
    """facebookresearch/dinov2 b8931f7 dinov2/loss/koleo_loss.py; two cases of lightly's test_koleo_loss.py."""
    _is(koleo(A), -0.15430178770459835)
    assert koleo(torch.tensor([[0.0, 1.0], [0.0, -1.0]])).item() == pytest.approx(-math.log(2), rel=1e-6)
    rows = torch.tensor([[0.0, 1.0], [1.0, 0.0], [1.0, 1.0], [-1.0, 0.0], [0.0, -1.0], [-1.0, -1.0]])
    assert koleo(rows).item() == pytest.approx(0.2674, abs=1e-4)
    assert koleo(A[:1]).item() == 0.0
    _is(koleo(A[:1].repeat(2, 1)), -math.log((math.sqrt(A.shape[1]) + 1) * 1e-8))  # at no distance: of eps alone


@pytest.mark.parametrize(("use_sinkhorn", "cross_entropy"), [(False, 6.252803100554206), (True, 6.304777784886833)])
def test_msn(use_sinkhorn: bool, cross_entropy: float):
    """facebookresearch/msn 4388dc1 src/losses.py: the three terms, entropies weighted 2 and 3 here."""
    prototypes = F.normalize(_randn(18, 8, 5), dim=1)
    anchors, target = (F.normalize(rows, dim=-1) @ prototypes.T for rows in (_randn(16, 3, 6, 5), _randn(17, 6, 5)))
    loss = msn_loss(anchors, target, 0.1, 0.25, 2.0, 3.0, use_sinkhorn)
    _is(loss, cross_entropy + 2 * 0.07796805886569746 + 3 * 0.6403929764538031)


@pytest.mark.parametrize(("normalize", "published"), [(True, 2.1147518036806985), (False, 2.0743800982699727)])
def test_mae(normalize: bool, published: float):
    """facebookresearch/mae efb2a80 models_mae.py."""
    mask = torch.tensor([[1, 1, 0, 1], [1, 0, 1, 1], [1, 1, 1, 0]])
    _is(mae_loss(_randn(20, 3, 4, 48), pixel_targets(_randn(19, 3, 3, 8, 8), 4, normalize), mask), published)


def test_patches_must_fit():
    with pytest.raises(ValueError, match="have no whole patches of 4"):
        pixel_targets(torch.zeros(1, 3, 8, 10), 4, normalize=True)


def test_simmim():
    """microsoft/SimMIM d3e29bc models/simmim.py, which adds 1e-5 to the 96 masked pixels."""
    loss = simmim_loss(_randn(22, 3, 3, 8, 8), _randn(19, 3, 3, 8, 8), _randn(21, 3, 2, 2) > 0)
    _is(loss, 1.1795286730292438 * (96 + 1e-5) / 96)


def test_maskfeat():
    """facebookresearch/SlowFast 287ec00: ``HOGLayerC`` of models/operators.py, labels of masked.py, mse_loss.

    Its histograms are kept in float64 here; 2 x 3 patches of 16 pixels, of which 4 are masked in each image.
    """
    images = _randn(61, 2, 3, 32, 48)
    histograms = histograms_of_gradients(images, num_bins=9, cell_size=8)
    published = [0.6536333287683704, 0.2796935519259096, 0.17854397415495005, 0.23424423345157627, 0.47198856910251447]
    published += [0.2428277152597691, 0.08156411677312453, 0.23582810661616518, 0.25254814836981865]
    _is(histograms[0, 0, :, 0, 0], published)
    _is((histograms * _randn(63, *histograms.shape)).sum(), 10.384291971977344)
    masked = torch.tensor([[0, 2, 3, 5], [1, 2, 4, 5]])
    predictions = taken(_randn(62, 2, 6, 108), masked)
    method = MaskFeat()
    output = HOGOutput(torch.zeros(2, 5), predictions, masked, (2, 3))
    _is(method([output], SimpleNamespace(images=[images])), 0.9887314051889389)


def test_hog_ignores_brightness_and_contrast_of_a_channel_and_counts_opposite_gradients_together():
    images = _randn(61, 2, 3, 16, 16)
    changed = images * torch.tensor([0.5, 2.0, 3.0]).view(3, 1, 1) + 0.7
    histograms = partial(histograms_of_gradients, num_bins=9, cell_size=8)
    torch.testing.assert_close(histograms(images), histograms(changed))
    torch.testing.assert_close(histograms(images), histograms(-images))
    assert not histograms(torch.ones(1, 1, 8, 8)).any()
    ramp = torch.arange(16.0).expand(1, 1, 16, 16)  # brighter to the right: one bin, that of 90 degrees
    assert histograms(ramp)[0, 0, :, 0, 0].tolist() == [0, 0, 0, 0, 1, 0, 0, 0, 0]


def test_ijepa():
    """facebookresearch/ijepa 52c1ae9 src/train.py: smooth_l1_loss onto layer_norm."""
    _is(latent_regression(_randn(23, 3, 2, 4, 5), _randn(24, 3, 2, 4, 5) * 2, beta=1.0), 0.8397889728158877)


def test_data2vec():
    """facebookresearch/data2vec_vision af9a363 beit/engine_for_cyclical.py, --post_target_layer_norm --l1_beta 2."""
    blocks = [_randn(24, 3, 4, 5) * 2, _randn(27, 3, 4, 5) + 0.5, _randn(28, 3, 4, 5) * 0.1]
    _is(latent_regression(_randn(23, 3, 4, 5), mean_of_blocks(blocks), beta=2.0), 0.46239243604983776)


def test_a_memory_begins_the_same_on_every_rank() -> None:
    """Whatever a rank has drawn before: every rank keeps all of it."""
    first = MemoryBank(20, 5, momentum=0.5).memory.clone()
    assert torch.equal(MemoryBank(20, 5, momentum=0.5).memory, first)
    torch.testing.assert_close(first.norm(dim=1), torch.ones(20))


def test_npid():
    """vissl 09270ed nce_loss.py: scores, Z from the first batch, the loss, and the memory afterwards."""
    bank = MemoryBank(20, 5, momentum=0.5).double()
    bank.memory.copy_(F.normalize(_randn(25, 20, 5), dim=1))
    sample_ids, negatives = torch.tensor([3, 17, 0, 8, 11, 5]), torch.arange(24).view(6, 4) * 7 % 20
    _is(nce_loss(bank.similarities(A, sample_ids, negatives), bank, 0.07), 8.237168239379425)
    _is(bank.normalizer, 144036.3129996871)
    _is(nce_loss(bank.similarities(B, sample_ids, negatives), bank, 0.07), 4.945772018712026)
    bank.update(A, sample_ids)
    _is(bank.memory[sample_ids].sum(), -1.207020474447063)
    before = bank.memory.clone()
    bank.update(A * torch.inf, sample_ids)
    assert torch.equal(bank.memory, before)


def test_a_memory_that_is_loaded_again_keeps_its_first_estimate():
    """Of Z, which only the first batch of a run sets."""
    bank, again = MemoryBank(20, 5, momentum=0.5).double(), MemoryBank(20, 5, momentum=0.5).double()
    sample_ids, negatives = torch.arange(6), torch.arange(24).view(6, 4) * 7 % 20
    for is_known in (False, True):
        again.load_state_dict(bank.state_dict())
        assert again.has_normalizer == is_known
        nce_loss(bank.similarities(A, sample_ids, negatives), bank, 0.07)
    nce_loss(again.similarities(B, sample_ids, negatives), again, 0.07)
    assert again.normalizer == bank.normalizer > 0


def test_npid_as_a_cross_entropy():
    """NPID++ (https://arxiv.org/abs/1912.01991): torch's cross-entropy, the image's own memory being the class."""
    method: Any = LOSSES.get("nce_loss_with_memory").build(
        embedding_dim=5, loss_type="cross_entropy", temperature=0.2, negative_sampling_params={"num_negatives": 4}
    )
    method.set_images(20)
    sample_ids = torch.tensor([3, 17, 0, 8, 11, 5])
    set_random_key(0, 0, sample_ids)
    similarities = method.bank.similarities(A, sample_ids, method.bank.draw_negatives(6, 4))
    loss = method([A], LossBatch([1], sample_ids, 6))
    torch.testing.assert_close(loss, F.cross_entropy(similarities / 0.2, torch.zeros(6, dtype=torch.int64)))


def test_pirl_weighs_image_and_patches():
    """Equation 5 of the paper, from NPID's parts, which are checked above."""
    bank, sample_ids = MemoryBank(20, 5, momentum=0.5).double(), torch.tensor([3, 17, 0, 8, 11, 5])
    set_random_key(0, 0, sample_ids)
    loss = pirl_loss(A, B, sample_ids, bank, 4, weight=0.25, temperature=0.07, use_info_nce=False)
    first, second = (
        nce_loss(bank.similarities(rows, sample_ids, bank.draw_negatives(6, 4, f"memory_bank.{name}")), bank, 0.07)
        for rows, name in ((A, "image"), (B, "transformed"))
    )
    _is(loss, (0.75 * first + 0.25 * second).item())
    assert pirl_loss(A, B, sample_ids, bank, 4, use_info_nce=True, temperature=0.07, weight=0.5).item() > 0


@pytest.mark.parametrize(
    ("use_info_nce", "loss", "normalizer"),
    [(False, 9.334260881235801, 52717.42904610769), (True, 7.10354104650453, -1)],
)
def test_pirl_of_tiles_and_images(use_info_nce, loss, normalizer):
    """vissl 09270ed nce_loss.py on [B, A] with loss_weights [.25, .75] and the bank and negatives drawn here."""
    bank, sample_ids = MemoryBank(20, 5, momentum=0.5).double(), torch.tensor([3, 17, 0, 8, 11, 5])
    set_random_key(0, 0, sample_ids)
    _is(pirl_loss(A, B, sample_ids, bank, 4, weight=0.25, use_info_nce=use_info_nce, temperature=0.07), loss)
    _is(bank.normalizer, normalizer)
    bank.update(A, sample_ids)
    after = [-0.2087638198356568, -0.22791185922927104, -0.07521073940970467, -0.77583514832238, -0.5448825738223958]
    _is(bank.memory[3], after)


@pytest.mark.parametrize(
    ("is_swapped", "ibot", "msn"),
    [(False, 21.738998985989248, 16.635586326134238), (True, 19.10871933222454, 13.323630472490478)],
)
def test_distillation_of_ibot_and_msn(is_swapped: bool, ibot: float, msn: float):
    """vissl 09270ed ibot_distillation_loss.py and msn_distillation_loss.py: 3 crops of 3 images, the teacher sees 2."""
    student, patches, teacher, seen = (
        _randn(seed, *shape) for seed, shape in enumerate([(9, 7), (6, 4, 7), (6, 7), (6, 4, 7)], start=1)
    )
    is_masked = (_randn(5, 6, 2, 2) > 0).flatten(1)
    method = IBOTDistillation(3, 2, 0.1, 0.05, 0.06, lambda2=0.5, swapped_assignment=is_swapped)
    ids = torch.arange(3)
    batch = ImageBatch(images=[], num_crops=[2, 1], targets=None, sample_ids=ids, num_global=3)
    teacher_outputs = IBOTOutput(teacher, teacher, teacher, seen, None)
    _is(method([IBOTOutput(student, student, student, patches, is_masked)], batch, [teacher_outputs]), ibot)
    assert torch.equal(method.health_sums(), embedding_sums(student))
    # MSN's head gives the softmax of scores, at its own temperature; see vissl/keys.py.
    targets = F.softmax(teacher / 0.025, dim=1).view(2, 3, 7)
    _is(dino_distillation_loss(student.view(3, 3, 7), targets, 0.1, is_swapped), msn)


def test_ibot_of_vissl():
    """vissl 09270ed ibot_loss.py: 2 large crops of 3 images, 1 small, 4 patches; lambda2 is 0.5."""
    student, patches, teacher, seen = (
        _randn(seed, *shape) for seed, shape in enumerate([(9, 7), (6, 4, 7), (6, 7), (6, 4, 7)], start=1)
    )
    is_masked = (_randn(5, 6, 2, 2) > 0).flatten(1)
    targets = F.softmax((teacher - _randn(6, 1, 7) * 0.1) / 0.05, dim=1).view(2, 3, 7)
    _is(dino_loss(student.view(3, 3, 7), targets, 0.1), 14.701545806561938)
    targets = F.softmax((seen - _randn(7, 1, 1, 7) * 0.1) / 0.06, dim=2)
    _is(0.5 * masked_patch_loss(patches, targets, is_masked, 0.1), 5.4924425940103125)


def test_deepcluster_v2():
    """vissl 09270ed deepclusterv2_loss.py, its random first centroids replaced by the first rows."""
    rows = F.normalize(_randn(26, 20, 5), dim=1)
    (four, of_four), (three, of_three) = (spherical_kmeans(rows, rows[:count], 5) for count in (4, 3))
    _is(torch.stack((four.sum(), three.sum())), [0.032096307305290894, -0.19679273174691447])
    assert of_four.tolist() == [0, 0, 2, 3, 2, 1, 0, 1, 0, 3, 3, 3, 3, 1, 2, 2, 1, 3, 2, 0]
    assert of_three.tolist() == [0, 0, 2, 0, 2, 2, 0, 1, 0, 2, 2, 1, 1, 1, 2, 2, 1, 1, 2, 0]
    sample_ids = torch.tensor([3, 17, 0, 8, 11, 5])
    assignments = torch.stack((of_four, of_three))[:, sample_ids]
    _is(deepcluster_loss(torch.stack((A, B)), [four, three], assignments, temperature=0.1), 4.907553747059038)


def test_a_centroid_that_loses_all_its_rows_stays_where_it_is():
    rows, start = (
        F.normalize(_randn(26, 8, 3), dim=1).abs(),
        torch.eye(3, dtype=torch.float64)[[0, 1]] * torch.tensor([[1.0], [-1.0]]),
    )
    centroids, nearest = spherical_kmeans(rows, start, 3)
    assert torch.equal(centroids[1], start[1]) and not nearest.any()
    _is(centroids[0], F.normalize(rows.mean(dim=0), dim=0).tolist())


def test_a_centroid_of_one_row_moves_to_it():
    rows = torch.tensor([[0.6, 0.8], [0.0, -1.0]], dtype=torch.float64)
    centroids, nearest = spherical_kmeans(rows, torch.tensor([[1.0, 0.0], [-0.8, -0.6]], dtype=torch.float64), 1)
    torch.testing.assert_close(centroids, rows)
    assert nearest.tolist() == [0, 1]


def test_cluster_memory_leaves_unknown_images_out():
    memory = ClusterMemory(30, 5, [4, 3], num_crops=2).double()
    known = torch.arange(0, 30, 2)
    with pytest.raises(ValueError, match="0 images cannot make 4 clusters"):
        memory.cluster(0, num_iters=10)
    memory.update(_randn(27, 2, 15, 5), known)
    memory.cluster(0, num_iters=10)
    assert (memory.assignments[:, 1::2] == -100).all() and (memory.assignments[:, known] >= 0).all()
    counted = deepcluster_loss(
        _randn(28, 2, 4, 5), memory.centroids, memory.assignments[:, [0, 1, 2, 3]], temperature=0.1
    )
    _is(
        deepcluster_loss(
            _randn(28, 2, 4, 5)[:, [0, 2]], memory.centroids, memory.assignments[:, [0, 2]], temperature=0.1
        ),
        counted.item(),
    )


def test_each_clustering_of_each_epoch_starts_from_other_images():
    memory = ClusterMemory(64, 8, [4, 4], 1)
    memory.update(_randn(5, 1, 64, 8), torch.arange(64))
    starts = []
    for epoch in (0, 1, 0):
        memory.cluster(epoch, num_iters=1)
        starts += [centroids.clone() for centroids in memory.centroids]
    assert torch.equal(starts[0], starts[4]) and torch.equal(starts[1], starts[5])
    assert all(not torch.allclose(one, other) for one, other in itertools.combinations(starts[:4], 2))


def test_distillation():
    """vissl 09270ed distillation_loss.py, kl_divergence at temperature 3."""
    _is(distillation_loss(A, B, 3.0, loss_type="kl_divergence"), 0.49994182496656436)
    entropy = -(F.softmax(B / 3, dim=1) * F.log_softmax(B / 3, dim=1)).sum(dim=1).mean() * 9
    _is(distillation_loss(A, B, 3.0, "cross_entropy") - entropy, 0.49994182496656436)
    _is(distillation_loss(A, B, 3.0, "mse"), F.mse_loss(A, B).item())


@pytest.mark.parametrize(("is_swapped", "published"), [(False, 14.524817088940654), (True, 13.122937714616986)])
def test_dino_distillation(is_swapped: bool, published: float):
    """vissl 09270ed dino_distillation_loss.py, 5 crops, of which the teacher sees 2, temperatures 0.07 and 0.1."""
    student, teacher = _randn(0, 5, 3, 6), _randn(1, 2, 3, 6)
    _is(dino_distillation_loss(student, F.softmax(teacher / 0.07, dim=2), 0.1, is_swapped), published)


@pytest.mark.parametrize(
    ("two", "swapped", "queue", "normalized", "published"),
    [
        (False, False, 0, False, [27.438101804054583, 19.767040752816975]),
        (False, True, 16, False, [26.099861177640168, 16.059367890812606]),
        (True, False, 16, False, [27.204144314632536, 24.71706791305241]),
        (True, True, 16, True, [13.33664051753177, 10.645129977629377]),
    ],
)
def test_swav_distillation(two: bool, swapped: bool, queue: int, normalized: bool, published: list[float]):
    """vissl 09270ed swav_distillation_loss.py in two steps, without its rounding of assignments to float32."""
    loss = SwAVDistillation(
        5, [7], 4, queue, 0.1, 0.05, use_teacher_prototypes=True, use_two_crops_for_teacher=two,
        swapped_assignment=swapped, normalize_student_feats=normalized,
    ).double()  # fmt: skip
    loss.prototypes.copy_(_randn(1, 7, 4))
    batch = SimpleNamespace(num_local=6, num_crops=[5])
    for seed, value in zip((2, 5), published, strict=True):
        embeddings = F.normalize(_randn(seed, 12, 4), dim=1)[: 12 if two else 6]
        teacher_outputs = SimpleNamespace(embeddings=embeddings, scores=[embeddings @ loss.prototypes.T])
        _is(loss([_randn(0, 30, 4)], batch, [teacher_outputs]), value)
        assert torch.equal(loss.health_sums(), embedding_sums(_randn(0, 30, 4)))
        loss.update_state([loss.observe([], batch, [teacher_outputs])])


def test_swav_distillations_hard_assignments_end_and_its_queue_begins_when_told():
    """As SwAV's own: the first steps of the run have an index below the number that is written."""
    given = SwAVOutput(F.normalize(_randn(1, 12, 4), dim=1), [_randn(2, 12, 7)], None)
    batch, student = SimpleNamespace(num_local=6, num_crops=[2]), _randn(0, 12, 7)
    keys = {"use_double_precision": True, "swapped_assignment": True}
    soft = SwAVDistillation(2, [7], 4, 0, **keys).double()
    hard = SwAVDistillation(2, [7], 4, 16, temp_hard_assignment_iters=2, queue_start_iter=1, **keys).double()
    for step in range(3):
        hard.on_step(step, 0)
        assert bool(hard([student], batch, [given]) == soft([student], batch, [given])) == (step == 2)
        assert (hard.observe([student], batch, [given]) is None) == (step == 0)


def test_swav_distillation_compares_the_students_scores_or_its_embeddings():
    given = SwAVOutput(_randn(1, 12, 4), [_randn(2, 12, 7)], None)
    batch, student = SimpleNamespace(num_local=6, num_crops=[2]), SwAVOutput(_randn(3, 12, 7), [_randn(4, 12, 7)], None)
    for uses_own, rows in ((True, student.scores[0]), (False, student.embeddings)):
        loss = SwAVDistillation(2, [7], 4, 0, use_student_prototypes=uses_own).double()
        assert loss([student], batch, [given]) == loss([rows], batch, [given])


def test_swav_distillation_trains_nothing_of_the_teacher():
    head = SimpleNamespace(prototypes0=nn.Linear(4, 7, bias=False))
    teacher = nn.Module()
    teacher.heads = [head]  # type: ignore[assignment]
    loss = SwAVDistillation(2, [7], 4, 0)
    loss.make_teacher(teacher)  # type: ignore[arg-type]
    assert torch.equal(loss.prototypes, head.prototypes0.weight) and not loss.prototypes.requires_grad


def test_soft_targets_are_torchs():
    labels = torch.tensor([0, 3, 1, 4, 2, 2])
    targets = smooth_targets(labels, 5, 0.1).double()
    torch.testing.assert_close(
        soft_cross_entropy(A, targets), F.cross_entropy(A, labels, label_smoothing=0.1), rtol=1e-6, atol=0
    )
    mixed = mix_targets(targets, targets.flip(0), torch.tensor([0.25] * 6))
    torch.testing.assert_close(mixed, 0.25 * targets + 0.75 * targets.flip(0))
    torch.testing.assert_close(binary_cross_entropy(A, mixed), F.binary_cross_entropy_with_logits(A, mixed))


def test_key_queue_is_a_ring():
    queue = KeyQueue(4, 5).double()
    assert torch.allclose(queue.keys.norm(dim=1), torch.ones(4, dtype=torch.float64))
    queue.push(A[:3])
    queue.push(B[:2])
    unit_a, unit_b = F.normalize(A, dim=1), F.normalize(B, dim=1)
    torch.testing.assert_close(queue.keys, torch.stack((unit_b[1], unit_a[1], unit_a[2], unit_b[0])))
    queue.push(A)  # more than it holds: the newest stay
    torch.testing.assert_close(queue.keys.sort(dim=0).values, unit_a[2:].sort(dim=0).values)
    assert int(queue.position) == 3
