"""VISSL's forms of RotNet, Jigsaw, PIRL, iBOT and MSN are our own keys, exactly, or are refused with the fix."""

from __future__ import annotations

import pytest

from tests.unit.config.example_config import CPU_HOST
from vissl_zero.config.compose import compose
from vissl_zero.errors import ConfigError
from vissl_zero.resolve.components import loss_options
from vissl_zero.resolve.decisions import Decisions
from vissl_zero.resolve.inactive import no_effect
from vissl_zero.resolve.resolve import problems

TRAIN = "config.DATA.TRAIN.TRANSFORMS"
END = "{name: ToTensor}"
CLASSES = "config.LOSS.name=cross_entropy_multiple_output_single_target"
CUT = "{name: RandomCrop, size: 16}, {name: ToTensor}, {name: ImgPatchesFromTensor, num_patches: 4, patch_jitter: 2}"
TOWER = "[mlp,{dims:[64,8],use_bn:true,use_relu:true,skip_last_layer_relu_bn:false}]"
PIRL = [
    "config.LOSS.name=nce_loss_with_memory",
    "config.LOSS.nce_loss_with_memory={temperature: 0.2, loss_type: cross_entropy, loss_weights: [0.25, 0.75], "
    "update_mem_with_emb_index: 1, negative_sampling_params: {num_negatives: 9, type: random}, "
    "memory_params: {momentum: 0.4, update_mem_on_forward: false}}",
    f"{TRAIN}=[{{name: ImgPilToPatchesAndImage, crop_size_image: 16, crop_size_patches: 90}}, {END}]",
    "config.DATA.TRAIN.COLLATE_FUNCTION=patch_and_image_collator",
    "config.DATA.TRAIN.INPUT_KEY_NAMES=[patches, images]",
    "config.MODEL.MULTI_INPUT_HEAD_MAPPING=[[patches, [flatten]], [images, [flatten]]]",
    "config.MODEL.HEAD.PARAMS=[[[mlp,{dims:[64,8]}],[siamese_concat_view,{num_towers: 9}],[mlp,{dims:[72,8]}]],"
    "[[mlp,{dims:[64,64,8]},{use_relu: true}]]]",
]
MASKS = "{name: MaskedImageModeling, pred_ratio_mean: [0.0, 0.3], pred_ratio_var: [0.0, 0.2], patch_size: 4}"
CROPS = (
    "{name: ImgPilToMultiCrop, total_num_crops: 3, num_crops: [2, 1], size_crops: [16, 8], "
    "crop_scales: [[0.4, 1], [0.1, 0.4]]}"
)
IBOT = [
    f"{TRAIN}=[{CROPS}, {END}, {MASKS}]",
    "config.DATA.TRAIN.COLLATE_FUNCTION=ibot_multicrop_masking_collator",
    "config.DATA.TRAIN.INPUT_KEY_NAMES=[global_views, local_views, mask]",
    "config.DATA.TRAIN.TARGET_KEY_NAMES=[mask]",
    "config.MODEL.MULTI_INPUT_HEAD_MAPPING=[[global_views, {feat_names: [lastBLK], additional_keys: [mask]}], "
    "[local_views, {feat_names: [lastCLS]}]]",
    "config.MODEL.TRUNK.VISION_TRANSFORMERS.USE_MASK_TOKEN=false",
    "config.MODEL.TRUNK.VISION_TRANSFORMERS.MASKED_IMAGE_MODELING={NAME: ibot, PARAMS: {}}",
    "config.MODEL.HEAD.PARAMS=[[ibot_head,{in_dim: 64, out_dim: 30, shared_head: true, normalize_last_layer: false}]]",
    "config.MODEL.TEMP_FROZEN_PARAMS_ITER_MAP=[[module.heads.0.prototypes0.weight_v, 2], "
    "[module.heads.0.prototypes1.weight_v, 2]]",
]
MSN = [
    "config.MODEL.TRUNK.VISION_TRANSFORMERS.MASKED_IMAGE_MODELING.NAME=msn",
    "+config.MODEL.TRUNK.VISION_TRANSFORMERS.MASKED_IMAGE_MODELING.PARAMS.drop_ratio=0.7",
    "config.MODEL.HEAD.PARAMS=[[msn_head,{in_dim: 64, num_prototypes: 30, use_bn: true, temperature: 0.2}]]",
]


def run_of(recipe, *overrides):
    """The typed configuration, which no rule has anything against."""
    composed = compose(recipe, ["config.DRY_RUN=true", *overrides])
    assert problems(Decisions(composed.run, CPU_HOST)) == []
    return composed.run, composed.notes


def names(entries):
    return [entry["name"] for entry in entries]


def test_rotnet():
    turned = f"[{{name: ImgRotatePil}}, {{name: CenterCrop, size: 8}}, {END}]"
    run, (note,) = run_of(
        "digits/rotnet",
        CLASSES,
        f"{TRAIN}={turned}",
        f"config.DATA.TEST.TRANSFORMS={turned}",
        "+config.LOSS.ignore_index=-1",
    )
    assert run.LOSS["name"] == "rotnet_loss"
    assert loss_options(run) == {"all_angles": False}
    assert names(run.DATA.TRAIN.TRANSFORMS) == names(run.DATA.TEST.TRANSFORMS) == ["CenterCrop", "ToTensor"]
    assert "one angle" in note
    assert no_effect(run) == []  # VISSL's recipe has ignore_index beside the loss's name, where VISSL reads none


@pytest.mark.parametrize(("file", "used"), [("https://example.org/orders.npy", ""), ("orders.npy", "orders.npy")])
def test_jigsaw(file, used):
    shuffle = f"{{name: ShuffleImgPatches, perm_file: '{file}'}}"
    heads = f"[{TOWER},[siamese_concat_view,{{num_towers: 4}}],[mlp,{{dims:[32,20]}}]]"
    run, (note,) = run_of(
        "digits/jigsaw",
        CLASSES,
        f"{TRAIN}=[{CUT}, {shuffle}]",
        f"config.MODEL.HEAD.PARAMS={heads}",
        "config.DATA.TRAIN.COLLATE_FUNCTION=siamese_collator",
    )
    assert run.LOSS["name"] == "jigsaw_loss"
    assert loss_options(run) == {"num_towers": 4, "num_permutations": 20, "perm_file": used, "are_cut": True}
    assert names(run.DATA.TRAIN.TRANSFORMS)[-1] == "ImgPatchesFromTensor"
    assert ("copy of it on disk" in note) == (used == "")


def test_jigsaw_refuses_other_tiles_than_the_head_takes():
    heads = f"[{TOWER},[siamese_concat_view,{{num_towers: 9}}],[mlp,{{dims:[72,20]}}]]"
    cfg = compose("digits/jigsaw", [f"{TRAIN}=[{CUT}]", f"config.MODEL.HEAD.PARAMS={heads}"]).run
    (problem,) = problems(Decisions(cfg, CPU_HOST))
    assert (problem.must, problem.fix) == ("must make the 9 tiles that the head takes", "Write num_patches: 9.")


def test_pirl():
    run, _ = run_of("digits/pirl", *PIRL)
    assert run.LOSS["name"] == "pirl_loss"
    keys = loss_options(run)
    assert (keys["loss_type"], keys["temperature"], keys["tile_weight"], keys["are_cut"]) == (
        "cross_entropy",
        0.2,
        0.25,
        True,
    )
    assert (keys["negative_sampling_params"], keys["memory_params"]) == ({"num_negatives": 9}, {"momentum": 0.4})
    ((name, head),) = run.MODEL.HEAD.PARAMS
    assert (name, head["dims"], head["num_towers"]) == ("pirl_head", [64, 8], 9)
    assert head["of_image"] == [["mlp", {"dims": [64, 64, 8]}]]  # VISSL reads no third part of a head
    assert names([{"name": name} for name, _ in head["of_tiles"]]) == ["mlp", "siamese_concat_view", "mlp"]


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("config.LOSS.nce_loss_with_memory.loss_weights=[1.0, 1.0]", "loss_weights"),
        ("config.LOSS.nce_loss_with_memory.update_mem_with_emb_index=0", "MULTI_INPUT_HEAD_MAPPING"),
        ("config.MODEL.MULTI_INPUT_HEAD_MAPPING=[[patches, [res4]], [images, [flatten]]]", "MULTI_INPUT_HEAD_MAPPING"),
    ],
)
def test_what_is_not_exactly_the_form_stays_refused(override, key):
    found = problems(Decisions(compose("digits/pirl", [*PIRL, override]).run, CPU_HOST))
    assert any(key in problem.key for problem in found)


def test_ibot():
    run, _ = run_of("digits/ibot", *IBOT)
    keys = loss_options(run)
    assert (keys["mask_ratio"], keys["mask_probability"]) == ([0.1, 0.5], 0.5)
    assert (keys["out_dim"], keys["patch_out_dim"], keys["num_global_crops"]) == (30, 30, 2)
    assert run.MODEL.TRUNK.VISION_TRANSFORMERS.USE_MASK_TOKEN
    assert run.MODEL.HEAD.PARAMS[0][0] == "ibot_dino_head"
    assert run.MODEL.TEMP_FROZEN_PARAMS_ITER_MAP == [["module.heads.0.prototypes0.weight_v", 2]]


@pytest.mark.parametrize(
    ("was", "now", "said"),
    [
        ("pred_ratio_mean: [0.0, 0.3]", "pred_ratio_mean: [0.2, 0.3]", "one range of shares"),
        ("patch_size: 4", "patch_size: 16", "the trunk's, 4"),
        ("patch_size: 4", "patch_size: 4, log_aspect_ratio: [0.3, 2]", "left out"),
    ],
)
def test_masks_that_cannot_be_had_are_refused(was, now, said):
    with pytest.raises(ConfigError, match=said):
        compose("digits/ibot", [override.replace(was, now) for override in IBOT])


def test_msn():
    run, _ = run_of("digits/msn", *MSN)
    keys = loss_options(run)
    assert (keys["patch_drop"], keys["temperature"], keys["output_dim"]) == (0.7, 0.2, 30)
    assert run.MODEL.HEAD.PARAMS == [["msn_head", {"in_dim": 64, "num_prototypes": 30, "use_bn": True}]]


def test_distillation_of_msn(tmp_path):
    (tmp_path / "weights.torch").touch()
    teacher = "config.DISTILLATION.TEACHER_MODEL"
    run, _ = run_of(
        "digits/msn",
        *MSN[:2],
        "config.MODEL.HEAD.PARAMS=[[mlp,{dims: [64, 30]}]]",
        "config.LOSS.name=msn_distillation_loss",
        "+config.LOSS.msn_distillation_loss={student_temperature: 0.2, teacher_num_crops: 1, student_num_crops: 3}",
        f"{teacher}.TRUNK.NAME=vision_transformer",
        f"{teacher}.TRUNK.VISION_TRANSFORMERS.IMAGE_SIZE=16",
        f"{teacher}.TRUNK.VISION_TRANSFORMERS.PATCH_SIZE=4",
        f"{teacher}.TRUNK.VISION_TRANSFORMERS.MASKED_IMAGE_MODELING.NAME=none",
        f"{teacher}.HEAD.PARAMS=[[msn_head,{{in_dim: 768, num_prototypes: 30, temperature: 0.025}}]]",
        f"{teacher}.WEIGHTS_INIT.PARAMS_FILE={tmp_path}/weights.torch",
    )
    assert run.LOSS["name"] == "dino_distillation_loss"
    keys = loss_options(run)
    found = (keys["teacher_temperature"], keys["student_temperature"], keys["teacher_num_crops"], keys["patch_drop"])
    assert found == (0.025, 0.2, 1, 0.7)


def test_distillation_of_ibot(tmp_path):
    (tmp_path / "weights.torch").touch()
    teacher = "config.DISTILLATION.TEACHER_MODEL"
    mapping = IBOT[4].split("=", 1)[1]
    run, _ = run_of(
        "digits/ibot",
        *IBOT,
        "config.MODEL.TEMP_FROZEN_PARAMS_ITER_MAP=[]",
        "config.LOSS.name=ibot_distillation_loss",
        f"{teacher}.MULTI_INPUT_HEAD_MAPPING={mapping}",
        f"{teacher}.TRUNK.NAME=vision_transformer",
        f"{teacher}.HEAD.PARAMS=[[ibot_head,{{in_dim: 768, out_dim: 30, shared_head: true}}]]",
        f"{teacher}.WEIGHTS_INIT.PARAMS_FILE={tmp_path}/weights.torch",
    )
    keys = loss_options(run)
    assert (keys["num_global_crops"], keys["student_num_crops"], keys["mask_ratio"]) == (2, 3, [0.1, 0.5])
    run.DISTILLATION.TEACHER_MODEL.HEAD.PARAMS = [["mlp", {"dims": [768, 30]}]]
    (problem,) = problems(Decisions(run, CPU_HOST))
    assert (problem.key, problem.got) == ("config.DISTILLATION.TEACHER_MODEL.HEAD.PARAMS", "['mlp']")
