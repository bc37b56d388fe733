"""Numbers that each method must have, from its paper or its authors' code: parity cannot see them.

Parity runs the same method on both sides, so a share of kept patches or a temperature that is wrong is equal on both.
Each entry of ``CONSTANTS`` names its source; the arithmetic is done here, not by the code under test.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.blocks import model_block
from tests.configs.test_recipes import resolved
from vissl_zero.data.source import UNLABELLED
from vissl_zero.methods.contrastive import supcon_loss
from vissl_zero.methods.gather import EmbeddingQueue
from vissl_zero.methods.masked_modeling import hog_targets
from vissl_zero.methods.method import Method, build_method
from vissl_zero.methods.two_views import KeyQueue
from vissl_zero.methods.visreg import normal_quantiles
from vissl_zero.models.keyed_random import set_random_key
from vissl_zero.models.model import build_model
from vissl_zero.models.patches import sine_positions
from vissl_zero.optim.param_groups import param_groups
from vissl_zero.optim.schedules import build_schedule
from vissl_zero.registry import LOSSES, METHODS
from vissl_zero.resolve.pairs import IGNORED

NUM_STEPS, PER_EPOCH = 1000, 10
GRID, PATCH = 14, 16


def _make(loss: str, **keys: Any) -> Method:
    """With the defaults of its keys, as a recipe that says nothing has them."""
    config = LOSSES.get(loss).config
    assert config is not None
    defaults = {key: value for key, value in asdict(config()).items() if value is not None}
    method = build_method({"name": loss, loss: defaults | keys}, 50)
    method.set_length(NUM_STEPS, PER_EPOCH)
    return method


def _cosine(start: float, step: int) -> float:
    """facebookresearch/dino utils.cosine_scheduler; moco-v3 adjust_moco_momentum; BYOL, section 3.2."""
    return 1 - (1 - start) * (math.cos(math.pi * step / NUM_STEPS) + 1) / 2


def _views(method: Any, **options: Any) -> Any:
    """What a method does with the patches of 64 crops of 224 pixels in patches of 16, of the first size."""
    set_random_key(0, 0, torch.arange(64))
    return method._choose_patches([torch.zeros(64, 3, GRID * PATCH, GRID * PATCH)], (PATCH, PATCH), **options)[0]


def _momenta(method: Method) -> list[float]:
    return [method.momentum(step) for step in (0, NUM_STEPS // 2, NUM_STEPS)]


def _dino(interval: str, step: int, **keys: Any) -> float:
    method: Any = _make("dino_loss", output_dim=5, teacher_temp_interval=interval, **keys)
    method.on_step(step, step // PER_EPOCH)
    return method.temperature.at(method._step, PER_EPOCH)  # type: ignore[no-any-return]


def dino() -> None:
    """facebookresearch/dino 7c446df main_dino.py, ``DINOLoss`` and the defaults of its arguments."""
    method: Any = _make("dino_loss", output_dim=5)
    assert _momenta(method) == pytest.approx([0.996, 0.998, 1.0])
    constant = _make("dino_loss", output_dim=5, momentum=0.99, final_momentum=0.99)
    assert _momenta(constant) == pytest.approx([0.99] * 3)
    assert (method.student_temp, method.center.momentum) == (0.1, 0.9)
    # VISSL's dino_hooks.py: torch.linspace(.04, .07, 101), indexed by the step
    by_step = [_dino("step", step, teacher_temp_warmup_iters=101) for step in (0, 1, 50, 99, 100, 999)]
    assert by_step == pytest.approx([0.04, 0.0403, 0.055, 0.0697, 0.07, 0.07])
    # np.linspace(.04, .07, 10 epochs), indexed by the epoch
    by_epoch = [_dino("epoch", step, teacher_temp_warmup_iters=100) for step in (0, 9, 10, 49, 89, 90, 999)]
    assert by_epoch == pytest.approx(
        [0.04, 0.04, 0.04 + 0.03 / 9, 0.04 + 0.03 * 4 / 9, 0.04 + 0.03 * 8 / 9, 0.07, 0.07]
    )
    for interval in ("step", "epoch"):
        assert _dino(interval, 0, teacher_temp_warmup_iters=0) == 0.07  # no warm-up: the maximum at once
    # np.linspace(.04, .07, 1) is .04
    for interval, iters, last_of_low in (("step", 1, 0), ("epoch", 10, 9), ("epoch", 20, 9)):
        ends = [_dino(interval, step, teacher_temp_warmup_iters=iters) for step in (last_of_low, last_of_low + 1)]
        assert ends == pytest.approx([0.04, 0.07])


def ibot() -> None:
    """bytedance/ibot da316d8 main_ibot.py: masks of 10 to 50 % in half of the crops; temperatures as DINO's."""
    method: Any = _make("ibot_loss", out_dim=5, patch_out_dim=7, num_global_crops=2)
    assert _momenta(method) == pytest.approx([0.996, 0.998, 1.0])
    assert (method.center.momentum, method.patch_center.momentum, method.weights) == (0.9, 0.9, (1.0, 1.0))
    weighted: Any = _make("ibot_loss", out_dim=5, patch_out_dim=7, num_global_crops=2, lambda1=2.0, lambda2=3.0)
    assert weighted.weights == (2.0, 3.0)  # of crops, of patches
    temperatures = [method.crop_temperature.at(step, PER_EPOCH) for step in (0, 10 * 29, 999)]
    assert temperatures == pytest.approx([0.04, 0.07, 0.07])
    counts = _views(method, masks=True).masked.sum(dim=1)
    assert counts.max() <= GRID * GRID // 2 and counts[counts > 0].min() >= int(0.1 * GRID * GRID)
    assert 16 <= (counts > 0).sum() <= 48


def dinov2() -> None:
    """facebookresearch/dinov2 configs/ssl_default_config.yaml; the temperature changes by step (train/train.py)."""
    method: Any = _make("dinov2_loss", num_global_crops=2)
    assert _momenta(method) == pytest.approx([0.992, 0.996, 1.0])
    assert method.weights == (1.0, 1.0, 0.1)
    # np.linspace(.04, .07, 37500), indexed by the step
    temperatures = [method.temperature.at(step, 1250) for step in (0, 18750, 37499, 37500)]
    assert temperatures == pytest.approx([0.04, 0.04 + 0.03 * 18750 / 37499, 0.07, 0.07], rel=1e-9)


def dinov3() -> None:
    """facebookresearch/dinov3 configs/train/dinov3_vit7b16_gram_anchor.yaml: three anchors, 10,000 steps apart."""
    method: Any = _make("dinov3_loss", num_global_crops=2)
    assert (method.gram_weight, method.gram_interval, method.gram_updates) == (2.0, 10_000, 3)
    method.gram_interval = 20
    assert [step for step in range(NUM_STEPS) if method.moves_anchor(step)] == [899, 919, 939]
    method.on_step(899, 0)
    assert not method._is_anchored()
    method.on_step(900, 0)
    assert method._is_anchored()
    method.gram_weight = 0.5
    assert method._is_anchored()
    method.gram_weight = 0.0  # without weight there is nothing to run the anchor for
    assert not method._is_anchored()


def mae() -> None:
    """facebookresearch/mae models_mae.py ``random_masking``: 49 of 196 patches are kept, 147 are predicted."""
    view = _views(_make("mae_loss"))
    assert view.kept.shape == (64, 49) and view.wanted.shape == (64, 147)
    together = torch.cat([view.kept, view.wanted], dim=1).sort(dim=1).values
    assert torch.equal(together, torch.arange(196).expand(64, -1))


def simmim() -> None:
    """microsoft/SimMIM data/data_simmim.py: squares of 32 pixels, ceil(49 * .6) = 30 of them masked, 4 patches each."""
    assert torch.equal(_views(_make("simmim_loss")).masked.sum(dim=1), torch.full((64,), 120))


def maskfeat() -> None:
    """facebookresearch/SlowFast 287ec00 in1k_VIT_B_MaskFeat_PT.yaml: 78 patches, round(196 * .4); 3 x 9 x 4."""
    method: Any = _make("maskfeat_loss")
    view = _views(method)
    assert torch.equal(view.masked.sum(dim=1), torch.full((64,), 78)) and view.wanted.shape == (64, 78)
    assert (method.num_bins, method.cell_size) == (9, 8)
    assert hog_targets(torch.zeros(1, 3, 224, 224), (GRID, GRID), num_bins=9, cell_size=8).shape == (1, 196, 108)


def ijepa() -> None:
    """facebookresearch/ijepa 52c1ae9: momentum .996 + i * .004 / steps; 4 targets of .15 to .2 of the patches."""
    method: Any = _make("ijepa_loss")
    assert _momenta(method) == pytest.approx([0.996, 0.998, 1.0])
    view = _views(method, all_are_seen=False)
    assert view.wanted.shape == (64, 4, 34)  # int(196 * .175)


def data2vec() -> None:
    """facebookresearch/data2vec_vision: 120 of 196 patches in BEiT's blocks."""
    view = _views(_make("data2vec_loss", mask_ratio=120 / 196), is_teacher=False)
    assert torch.equal(view.masked.sum(dim=1), torch.full((64,), 120))


def msn() -> None:
    """facebookresearch/msn 4388dc1: floor(196 * .85) patches kept; the momentum's line is 1.25 times as long."""
    method: Any = _make("msn_loss", output_dim=5, final_momentum=0.9992)
    assert _views(method).kept.shape == (64, 166)
    assert _momenta(method) == pytest.approx([0.996 + 0.004 * step / 1250 for step in (0, 500, 1000)])
    assert (method.temperature, method.sharpening, method.mean_entropy_weight) == (0.1, 0.25, 1.0)


def moco_v2() -> None:
    """facebookresearch/moco 78b69ca main_moco.py."""
    method: Any = _make("moco_loss", embedding_dim=4)
    assert (len(method.queue.keys), _momenta(method), method.temperature) == (65536, [0.999] * 3, 0.2)


def moco_v3() -> None:
    """facebookresearch/moco-v3 c349e6e main_moco.py: -m .99, --moco-m-cos, -t .2 for ViTs."""
    method: Any = _make("moco_v3_loss")
    assert _momenta(method) == pytest.approx([_cosine(0.99, step) for step in (0, 500, 1000)])
    assert method.temperature == 0.2


def byol() -> None:
    """https://arxiv.org/abs/2006.07733, section 3.2; two unrelated unit vectors are at a squared distance of 2."""
    method: Any = _make("byol_loss", momentum=0.996)
    assert _momenta(method) == pytest.approx([_cosine(0.996, step) for step in (0, 500, 1000)])
    assert _momenta(_make("byol_loss", momentum=0.98, final_momentum=0.99)) == pytest.approx([0.98, 0.985, 0.99])
    assert method.guessing_loss == 4.0


def simsiam() -> None:
    """https://arxiv.org/abs/2011.10566, equation 2: minus the cosine."""
    assert _make("simsiam_loss").guessing_loss == 0.0


def simclr() -> None:
    """https://arxiv.org/abs/2002.05709, appendix B.7."""
    assert _make("simclr_info_nce_loss").temperature == 0.1


def nnclr() -> None:
    """https://arxiv.org/abs/2104.14548, section 4.1."""
    method: Any = _make("nnclr_loss", embedding_dim=4)
    assert (len(method.queue.keys), method.temperature) == (98304, 0.1)


def supcon() -> None:
    """https://arxiv.org/abs/2004.11362: all 2 n - 1 others equally alike, the loss is ln(2 n - 1)."""
    assert _make("supcon_loss").temperature == 0.1
    same = torch.ones(5, 3, dtype=torch.float64)
    assert float(supcon_loss((same, same), torch.tensor([0, 0, 1, 1, -1]), temperature=0.1)) == pytest.approx(
        math.log(9)
    )


def lejepa() -> None:
    """https://arxiv.org/abs/2511.08544: weight .05, 1,024 directions, 17 points up to 3."""
    method: Any = _make("lejepa_loss", num_global_crops=2)
    assert (method.weight, method.num_slices, method.points) == (0.05, 1024, (17, 3.0))


def visreg() -> None:
    """HaiyuWu/visreg 074fb51 configs/default.yaml and configs/loss/visreg.yaml; quantiles i / (B + 1) of its loss."""
    method: Any = _make("visreg_loss", num_global_crops=2)
    assert (method.weight, method.num_slices) == (0.9, 4096)
    expected = torch.tensor([-0.6744897501960817, 0.0, 0.6744897501960817], dtype=torch.float64)  # quartiles
    torch.testing.assert_close(normal_quantiles(3, expected), expected)


def barlow_twins() -> None:
    """facebookresearch/barlowtwins 8e8d284 main.py."""
    assert _make("barlow_twins_loss").lambda_ == 0.0051


def vicreg() -> None:
    """facebookresearch/vicreg main_vicreg.py."""
    assert _make("vicreg_loss").weights == (25.0, 25.0, 1.0)


def vicregl() -> None:
    """facebookresearch/VICRegL 803ae4c main_vicregl.py: defaults of its arguments; pairs of its ``local_loss``."""
    method: Any = _make("vicregl_loss")
    assert (method.weights, method.alpha, method.num_matches) == ((25.0, 25.0, 1.0), 0.75, (20, 4))


def swav() -> None:
    """facebookresearch/swav main_swav.py: the queue is used from its first step on, with what it then holds."""
    keys = {"queue_length": 6, "start_iter": 0, "start_epoch": 2}
    method: Any = _make("swav_loss", embedding_dim=4, num_crops=2, num_prototypes=[3], queue=keys)
    assert (method.temperature, method.epsilon, method.num_iters) == (0.1, 0.05, 3)
    for epoch, is_on in ((0, False), (1, False), (2, True), (3, True)):
        method.on_step(epoch * PER_EPOCH, epoch)
        assert method._is_queue_on() == is_on


def swav_momentum() -> None:
    """VISSL 09270ed swav_momentum_loss.py."""
    method: Any = _make("swav_momentum_loss", embedding_dim=4, num_crops=2, num_prototypes=[3])
    assert _momenta(method) == [0.99] * 3


def deepcluster_v2() -> None:
    """facebookresearch/swav main_deepclusterv2.py: ten rounds of k-means, temperature .1."""
    method: Any = _make("deepclusterv2_loss", embedding_dim=4, num_clusters=[3])
    assert (method.kmeans_iters, method.temperature) == (10, 0.1)


def npid() -> None:
    """https://arxiv.org/abs/1805.01978, section 4: temperature .07, memory's momentum .5."""
    method: Any = _make("nce_loss_with_memory", embedding_dim=4)
    assert (method.temperature, method.memory_momentum) == (0.07, 0.5)


def pirl() -> None:
    """https://arxiv.org/abs/1912.01991, section 4: temperature .07, weight .5."""
    method: Any = _make("pirl_loss", embedding_dim=4, num_towers=9)
    assert (method.temperature, method.memory_momentum, method.tile_weight) == (0.07, 0.5, 0.5)


def rotnet() -> None:
    """https://arxiv.org/abs/1803.07728: four angles."""
    assert _make("rotnet_loss").guessing_loss == pytest.approx(math.log(4))


def jigsaw() -> None:
    """https://arxiv.org/abs/1603.09246: guessing is one of the orders."""
    assert _make("jigsaw_loss", num_towers=9, num_permutations=100).guessing_loss == pytest.approx(math.log(100))


def segmentation() -> None:
    """PASCAL VOC's border is 255, and no class has a weight of its own."""
    assert IGNORED == 255
    assert _make("segmentation_loss").class_weights is None


def supervised() -> None:
    """Labels of -1 do not count, as in VISSL; images without a label have it."""
    assert _make("CrossEntropyLoss").ignored_label == UNLABELLED == -1


def distillation() -> None:
    """https://arxiv.org/abs/1503.02531: the teacher stays as it is."""
    assert not METHODS.get("distillation").build().teacher_follows


def feature_distillation() -> None:
    """lightly-train distillation.py: temperature .07, 8,192 features for large data, all rows of unit length."""
    method: Any = _make("feature_distillation_loss", embedding_dim=4)
    assert (method.temperature, method.queue.embeddings.shape, method.normalize) == (0.07, (1, 8192, 4), True)
    assert not METHODS.get("feature_distillation").build().teacher_follows


CONSTANTS: dict[str, Callable[[], None]] = {
    check.__name__: check
    for check in (
        *(dino, ibot, dinov2, dinov3, mae, simmim, maskfeat, ijepa, data2vec, msn, moco_v2, moco_v3, byol, simsiam),
        *(simclr, nnclr, supcon, lejepa, visreg, barlow_twins, vicreg, vicregl, swav, swav_momentum, deepcluster_v2),
        *(npid, pirl, rotnet, jigsaw, supervised, segmentation, distillation, feature_distillation),
    )
}


def test_every_method_has_constants() -> None:
    assert set(CONSTANTS) == set(METHODS.builtin())


@pytest.mark.parametrize("method", CONSTANTS)
def test_constants(method: str) -> None:
    CONSTANTS[method]()


def test_queues_hold_no_infinity() -> None:
    """A step that the loss scaler skips pushes infinities; they must not stay."""
    rows = torch.tensor([[torch.inf, 1.0, -torch.inf], [3.0, torch.nan, 4.0]])
    keys, embeddings = KeyQueue(2, 3), EmbeddingQueue(1, 2, 3)
    keys.push(rows)
    embeddings.push(rows[None])
    torch.testing.assert_close(keys.keys, torch.tensor([[0.0, 1.0, 0.0], [0.6, 0.0, 0.8]]))  # of unit length
    assert embeddings.embeddings.tolist() == [[[0.0, 1.0, 0.0], [3.0, 0.0, 4.0]]]


def test_sine_positions_are_maes() -> None:
    """facebookresearch/mae util/pos_embed.py: "here w goes first"; values by its formula for row 1, column 2."""
    positions = sine_positions((3, 4), 8, torch.zeros(1, dtype=torch.float64))
    rates = [1.0, 0.01]
    column, row = ([f(at * rate) for f in (math.sin, math.cos) for rate in rates] for at in (2, 1))
    torch.testing.assert_close(positions[1 * 4 + 2], torch.tensor([*column, *row], dtype=torch.float64))


def test_a_stretched_schedule_ends_before_its_end() -> None:
    """facebookresearch/msn src/utils.py ``CosineWDSchedule`` with T_max = 1.25 * steps."""
    keys = {"name": "cosine", "start_value": 0.04, "end_value": 0.4, "update_interval": "step", "stretch": 1.25}
    value = build_schedule(keys, 10, 100)
    expected = [0.4 + (0.04 - 0.4) * 0.5 * (1 + math.cos(math.pi * step / 1250)) for step in (0, 500, 999)]
    assert [value(step) for step in (0, 500, 999)] == pytest.approx(expected, abs=1e-5)


def _not_vectors(name: str, parameter: Tensor) -> bool:
    """All but biases and vectors; a mask token is (1, 1, D) there."""
    return (parameter.ndim > 1 and not name.endswith("bias")) or "mask_token" in name


def _all(name: str, parameter: Tensor) -> bool:
    return True


# Recipe -> whether a parameter decays, by its name and dimensions, as the authors' code decides.
DECAYS: dict[str, Callable[[str, Tensor], bool]] = {
    "dino/vit_small": _not_vectors,  # utils.get_params_groups
    "ibot/vit_small": _not_vectors,
    "dinov2/vit_large": lambda name, p: _not_vectors(name, p) and "gamma" not in name,  # dinov2/utils/param_groups.py
    "dinov3/vit_large": lambda name, p: _not_vectors(name, p) and "gamma" not in name,
    "mae/vit_large": _not_vectors,  # timm's optim_factory.add_weight_decay
    "ijepa/vit_huge": _not_vectors,  # src/helper.py init_opt
    "msn/vit_small": lambda name, p: _not_vectors(name, p) and "prototypes" not in name,  # src/msn_train.py init_opt
    "moco_v3/vit_base": _all,  # main_moco.py: model.parameters()
    "simsiam/resnet50": _all,  # main_simsiam.py
    "moco_v2/resnet50": _all,  # main_moco.py
    "barlow_twins/resnet50": _not_vectors,  # weight_decay_filter
    "vicreg/resnet50": _not_vectors,  # exclude_bias_and_norm
    "vicregl/resnet50": _not_vectors,  # exclude_bias_and_norm
    "vicregl/convnext_small": _not_vectors,  # optimizers.py add_weight_decay
    "visreg/vit_base": _not_vectors,  # visreg/utils.py get_parameter_groups
    "byol/resnet50": _not_vectors,
    "simclr/resnet50": _not_vectors,
}


@pytest.mark.parametrize("recipe", DECAYS)
def test_what_decays(recipe: str) -> None:
    plan = resolved(f"pretrain/{recipe}", "config.DATA.TRAIN.DATA_SOURCES=[synthetic]")
    with torch.device("meta"):
        model = build_model(model_block(plan.config.MODEL))
    decayed = {name for group in param_groups(model, plan.optimizer) if group.is_decayed for name in group.params}
    expected = {name for name, parameter in model.named_parameters() if DECAYS[recipe](name, parameter)}
    assert decayed == expected


def test_of_the_smallest_shares_one_patch_is_seen_and_one_is_predicted() -> None:
    assert _views(_make("mae_loss", mask_ratio=0.999)).kept.shape == (64, 1)
    assert _views(_make("maskfeat_loss", mask_ratio=0.001)).wanted.shape == (64, 1)
    assert _views(_make("data2vec_loss", mask_ratio=0.001), is_teacher=False).masked.sum() == 64
    assert _views(_make("ijepa_loss", target_scale=0.001), all_are_seen=False).wanted.shape == (64, 4, 1)
    assert _views(_make("ijepa_loss", context_scale=0.001), all_are_seen=False).kept.shape == (64, 1)
    ibot = {
        "num_global_crops": 2,
        "out_dim": 5,
        "patch_out_dim": 5,
        "mask_ratio": [0.0, 0.001],
        "mask_probability": 1.0,
    }
    assert _views(_make("ibot_loss", **ibot), masks=True).wanted.shape == (64, 1)
