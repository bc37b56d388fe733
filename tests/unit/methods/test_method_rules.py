"""What each method refuses in a recipe, and what lies just on the other side."""

from __future__ import annotations

from functools import cache
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from PIL import Image

from tests.unit.config.example_config import CPU_HOST, changed
from vissl_zero.config.compose import load
from vissl_zero.config.run_config import RunConfig
from vissl_zero.data.pipeline import build_pipeline
from vissl_zero.methods.spec import crops_of, num_crops_of
from vissl_zero.resolve.components import method_of
from vissl_zero.resolve.decisions import Decisions
from vissl_zero.resolve.resolve import problems

HEAD, TRANSFORMS = "config.MODEL.HEAD.PARAMS", "config.DATA.TRAIN.TRANSFORMS"
UNLABELED = "config.DATA.TRAIN.LABEL_TYPE=sample_index"
MIXED = ["config.DATA.TRAIN.COLLATE_FUNCTION=cutmixup_collator"]
MIXED += ["config.DATA.TRAIN.COLLATE_FUNCTION_PARAMS={mixup_alpha: 1.0, num_classes: 10}"]


def _head(name: str, **keys: object) -> str:
    inside = ", ".join(f"{key}: {value}" for key, value in keys.items())
    return f"{HEAD}=[[{name}, {{dims: [-1, 64, 32], {inside}}}]]".replace("'", "")


def _crops(counts: list[int]) -> str:
    keys = f"total_num_crops: {sum(counts)}, num_crops: {counts}, size_crops: {[16, 8][: len(counts)]}"
    scales = [[0.5, 1.0], [0.3, 0.5]][: len(counts)]
    return f"{TRANSFORMS}=[{{name: ImgPilToMultiCrop, {keys}, crop_scales: {scales}}}, {{name: ToTensor}}]"


def _chain(num_towers: int | None, width: int) -> str:
    tiles = "" if num_towers is None else f"[siamese_concat_view, {{num_towers: {num_towers}}}], "
    joined = 8 * (num_towers or 1)
    heads = f"[mlp, {{dims: [-1, 8]}}], {tiles}[mlp, {{dims: [{joined}, {width}]}}]"
    return f"{HEAD}=[[chain, {{heads: [{heads}], dims: [-1, {width}]}}]]"


@cache
def _recipe(name: str) -> RunConfig:
    return load(f"digits/{name}")


def _changed(recipe: str, words: list[str]) -> RunConfig:
    """The recipe with these overrides."""
    pairs = (word.removeprefix("config.").partition("=") for word in words)
    return changed(_recipe(recipe), {path: yaml.safe_load(text) for path, _, text in pairs})


QUEUES = (("moco_v2", "moco_loss"), ("nnclr", "nnclr_loss"))
# recipe, changes, what is said; "" where nothing is
CASES = [
    ("supcon", [UNLABELED], "config.DATA.TRAIN.LABEL_TYPE: must be standard for supcon_loss"),
    ("supervised", [UNLABELED], "config.DATA.TRAIN.LABEL_TYPE: must be standard for a supervised loss"),
    (
        "supervised",
        [*MIXED, "config.LOSS.CrossEntropyLoss.weight=[1,1,1,1,1,1,1,1,1,1]"],
        "config.LOSS.CrossEntropyLoss.weight: must be null where images are mixed",
    ),
    ("supervised", [UNLABELED, "config.TEST_ONLY=true"], ""),
    ("supervised", MIXED, ""),
    *(
        ("supervised", [MIXED[0], f"{MIXED[1].split('=')[0]}={{cutmix_minmax: {sides}, num_classes: 10}}"], said)
        for sides, said in (
            ([0.2, 0.8], ""),
            ([0, 1], ""),
            *((wrong, "two shares of the side") for wrong in ([0.5, 0.5], [-0.1, 0.5], [0.5, 1.1], [0.2], [0, 0.5, 1])),
        )
    ),
    *(
        (
            "swav",
            [f"{TRANSFORMS}=[{{name: of_ones_own}}]", "config.LOSS.swav_loss.num_crops=3", crops],
            "config.LOSS.swav_loss.crops_for_assign: must list crops from 0 to 2",
        )
        for crops in ("config.LOSS.swav_loss.crops_for_assign=[0, 3]", "config.LOSS.swav_loss.crops_for_assign=[-1, 0]")
    ),
    ("dino", [_head("swav_head", num_clusters=[5, 5])], f"{HEAD}: must have one layer of prototypes for dino_loss"),
    (
        "dino",
        ["config.LOSS.dino_loss.crops_for_teacher=[1, 0]"],
        "must be the first crops, in order, and at most",
    ),
    ("dino", ["config.LOSS.dino_loss.crops_for_teacher=[0, 1, 2]"], "must be the first crops, in order, and at most"),
    ("dino", ["config.LOSS.dino_loss.crops_for_teacher=[0]"], ""),
    ("ibot", ["config.LOSS.ibot_loss.mask_ratio=[0.5, 0.1]"], "mask_ratio: must be two shares of the patches"),
    ("ibot", ["config.LOSS.ibot_loss.mask_ratio=[0.0, 0.0]"], "mask_ratio: must be two shares of the patches"),
    ("ibot", ["config.LOSS.ibot_loss.mask_ratio=[0.1, 1.1]"], "mask_ratio: must be two shares of the patches"),
    ("ibot", ["config.LOSS.ibot_loss.mask_ratio=[0.0, 1.0]"], ""),
    ("ibot", ["config.LOSS.ibot_loss.mask_probability=1.5"], "mask_probability: must be between 0 and 1"),
    (
        "ibot",
        [_head("ibot_head", num_clusters=[5, 5, 5]), "config.MODEL.TEMP_FROZEN_PARAMS_ITER_MAP=[]"],
        f"{HEAD}: must be one number, or one for crops and one for patches",
    ),
    ("ibot", [_head("ibot_head", num_clusters=[5, 7]), "config.MODEL.TEMP_FROZEN_PARAMS_ITER_MAP=[]"], ""),
    ("rotnet", [f"{HEAD}=[[mlp, {{dims: [-1, 5]}}]]"], f"{HEAD}: must end in 4 outputs for rotnet_loss, one per angle"),
    ("rotnet", [_crops([1, 1])], f"{TRANSFORMS}: must make crops of one size for rotnet_loss"),
    ("jigsaw", [_head("jigsaw_head", num_towers=5, num_permutations=24)], f"{HEAD}: num_towers must be 4 or 9"),
    (
        "jigsaw",
        [_head("jigsaw_head", num_towers=4, num_permutations=25)],
        f"{HEAD}: num_permutations must be at most the 24 orders of 4 tiles",
    ),
    *(
        ("jigsaw", [_chain(towers, 20), f"{TRANSFORMS}=[{{name: ImgPatchesFromTensor, num_patches: 4}}]"], said)
        for towers, said in (
            (4, ""),
            (9, f"{TRANSFORMS}: must make the 9 tiles that the head takes (got 4 tiles). Write num_patches: 9."),
            (5, f"{HEAD}: num_towers must be 4 or 9"),
        )
    ),
    ("jigsaw", [_chain(4, 25)], f"{HEAD}: num_permutations must be at most the 24 orders of 4 tiles"),
    ("jigsaw", [_chain(None, 20)], f"{HEAD}: must be one jigsaw_head for jigsaw_loss"),
    ("jigsaw", [_chain(4, 24)], ""),
    ("npid", [_crops([2])], f"{TRANSFORMS}: must make one crop of an image for nce_loss_with_memory (got [2])"),
    ("npid", [_crops([1, 1])], f"{TRANSFORMS}: must make one crop of an image for nce_loss_with_memory (got [1, 1])"),
    ("npid", [_crops([1])], ""),
    ("npid", [f"{TRANSFORMS}=[{{name: ToTensor}}]"], ""),
    ("jigsaw", ["config.LOSS.jigsaw_loss.perm_file=nowhere.npy"], "perm_file: must name a file that exists"),
    ("jigsaw", ["config.TRAINER.CROP_PASSES=2"], "config.TRAINER.CROP_PASSES: must be 1 for jigsaw_loss"),
    ("pirl", [_head("pirl_head", num_towers=6)], f"{HEAD}: num_towers must be 4 or 9"),
    ("pirl", [_crops([1])], f"{TRANSFORMS}: must make two crops of an image, of one size, for pirl_loss"),
    ("pirl", [_crops([2])], ""),
    (
        "msn",
        [_head("swav_head", num_clusters=[128], use_weight_norm_prototypes="false")],
        f"{HEAD}: must have one layer of prototypes of unit length for msn_loss",
    ),
    (
        "msn",
        [_head("swav_head", num_clusters=[128, 64], use_weight_norm_prototypes="true")],
        f"{HEAD}: must have one layer of prototypes of unit length for msn_loss",
    ),
    ("msn", [_crops([1, 1])], f"{TRANSFORMS}: must begin with two crops of the first size"),
    ("msn", [_crops([2])], ""),
    ("msn", ["config.LOSS.msn_loss.momentum=1.1"], "config.LOSS.msn_loss.momentum: must be between 0 and 1"),
    ("msn", ["config.LOSS.msn_loss.final_momentum=1.1"], "msn_loss.final_momentum: must be between 0 and 1"),
    (
        "swav",
        [_head("swav_head", num_clusters=[8], use_weight_norm_prototypes="true")],
        "config.LOSS.swav_loss.normalize_last_layer: must be false for a head with use_weight_norm_prototypes",
    ),
    (
        "swav",
        [
            _head("swav_head", num_clusters=[8], use_weight_norm_prototypes="true"),
            "config.LOSS.swav_loss.normalize_last_layer=false",
            "config.MODEL.TEMP_FROZEN_PARAMS_ITER_MAP=[]",
        ],
        "",
    ),
    *((recipe, [f"config.LOSS.{loss}.queue_size=128"], "") for recipe, loss in QUEUES),
    *((recipe, [f"config.LOSS.{loss}.queue_size=127"], "must be at least 128 (got 127)") for recipe, loss in QUEUES),
    ("swav", ["config.LOSS.swav_loss.queue.queue_length=128"], ""),
    ("swav", ["config.LOSS.swav_loss.queue.queue_length=127"], "must be 0 (no queue) or at least the batch"),
    ("swav", ["config.LOSS.swav_loss.crops_for_assign=[0, 2]"], "must list crops from 0 to 1"),
    ("swav", ["config.LOSS.swav_loss.num_prototypes=[0]"], "must have at least 1 prototype in each layer"),
    ("swav_momentum", ["config.LOSS.swav_momentum_loss.momentum=1.1"], "momentum: must be between 0 and 1"),
    (
        "distillation",
        ["config.LOSS.distillation_loss.teacher=configs"],
        "has no config.resolved.yaml and no weights",
    ),
    (
        "distillation",
        ["config.LOSS.distillation_loss.soft_target_alpha=0.5", UNLABELED],
        "config.DATA.TRAIN.LABEL_TYPE: must be standard where soft_target_alpha is below 1",
    ),
    ("distillation", ["config.LOSS.distillation_loss.soft_target_alpha=0.5"], ""),
    ("distillation", [UNLABELED], ""),
    ("segmentation", ["config.DATA.BACKEND=fast"], "config.DATA.BACKEND: must be pil for images with masks"),
    ("segmentation", ["config.MODEL.VIEWS_APART=true"], "config.MODEL.VIEWS_APART: must be false: there is one view"),
    ("segmentation", MIXED, "must not mix images with masks"),
]


TEACHER_HEAD = "config.DISTILLATION.TEACHER_MODEL.HEAD.PARAMS"
SWAV = f"{TEACHER_HEAD}=[[swav_head, {{dims: [-1, 64, 16], num_clusters: [12]}}]]"
# loss, changes, keys that are read from the rest of the recipe
INFERRED = [
    ("dino_distillation_loss", [_crops([2, 3])], {"student_num_crops": 5, "output_dim": 10}),
    ("dino_distillation_loss", [f"{TRANSFORMS}=[{{name: ToTensor}}]"], {"student_num_crops": 1, "output_dim": 10}),
    ("dino_distillation_loss", [_head("swav_head", num_clusters=[7])], {"student_num_crops": 2, "output_dim": 7}),
    ("ibot_distillation_loss", [_crops([2, 3])], {"student_num_crops": 5, "num_global_crops": 2}),
    ("ibot_distillation_loss", [f"{TRANSFORMS}=[{{name: ToTensor}}]"], {"num_global_crops": None}),
    (
        "swav_distillation_loss",
        [SWAV, _crops([2, 3]), "config.LOSS.swav_distillation_loss.local_queue_length=100"],
        {"num_crops": 5, "num_prototypes": [12], "embedding_dim": 16, "queue_length": 200},
    ),
    ("swav_distillation_loss", [f"{TRANSFORMS}=[{{name: ToTensor}}]"], {"num_crops": None, "num_prototypes": None}),
    ("distillation_loss", [], {}),
]


# loss, heads of student and teacher, transforms and keys, what is said
ONE, TWO = "num_clusters: [12]", "num_clusters: [12, 3]"
TEACHERS: list[tuple[str, str, list[str], str]] = [
    ("swav", "swav_head", [SWAV, _crops([2, 3])], ""),
    ("swav", "mlp", [SWAV.replace("swav_head, {dims: [-1, 64, 16]", "dino_head, {in_dim: 64"), _crops([2, 3])], ""),
    ("swav", "swav_head", [SWAV.replace(ONE, TWO), _crops([2, 3])], "one swav_head or dino_head with one layer"),
    ("swav", "swav_head", [SWAV.replace("swav_head", "msn_head"), _crops([2, 3])], "one swav_head or dino_head"),
    ("swav", "swav_head", [SWAV, _crops([1])], "must make two crops of an image (got 1)"),
    *(
        ("swav", "swav_head", [SWAV, _crops([1]), *(f"config.LOSS.swav_distillation_loss.{key}" for key in keys)], said)
        for keys, said in (
            (["use_two_crops_for_teacher=false", "swapped_assignment=false"], ""),
            (["use_two_crops_for_teacher=false", "swapped_assignment=true"], "must make two crops"),
            (["use_two_crops_for_teacher=true", "swapped_assignment=false"], "must make two crops"),
        )
    ),
    ("dino", "swav_head", [SWAV, _crops([2, 3]), "config.LOSS.dino_distillation_loss.teacher_num_crops=5"], ""),
    (
        "dino",
        "swav_head",
        [SWAV, _crops([2, 3]), "config.LOSS.dino_distillation_loss.teacher_num_crops=6"],
        "teacher_num_crops: must be at most 5, with 5 crops",
    ),
]


TEACHER = "config.DISTILLATION.TEACHER_MODEL"
OF_PATCHES = "{dims: [-1, 64, 16], num_clusters: [12]}"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], []),
        ([f"{TEACHER_HEAD}=[[swav_head, {OF_PATCHES}]]"], [f"{TEACHER_HEAD}: must be one ibot_head or ibot_dino_head"]),
        ([f"{HEAD}=[[swav_head, {OF_PATCHES}]]"], [f"{HEAD}: must be one ibot_head or ibot_dino_head"]),
        ([f"{TEACHER}.WEIGHTS_INIT.PARAMS_FILE=''"], [f"{TEACHER}.WEIGHTS_INIT.PARAMS_FILE: must name"]),
    ],
)
def test_a_teacher_of_patches_has_patches_and_weights(words: list[str], said: list[str]) -> None:
    given = ["config.LOSS.name=ibot_distillation_loss", f"{TEACHER}.TRUNK.NAME=vision_transformer"]
    given += [f"{TEACHER_HEAD}=[[ibot_head, {OF_PATCHES}]]", f"{TEACHER}.WEIGHTS_INIT.PARAMS_FILE=configs", *words]
    found = [str(problem) for problem in problems(Decisions(_changed("ibot", given), CPU_HOST))]
    assert len(found) == len(said) and all(map(str.startswith, found, said)), found


OF_FEATURES = "config.LOSS.feature_distillation_loss"
MUST_COUNT = f"{OF_FEATURES}.queue_weight: must not be 0 with global_weight 0"
FEATURES: list[tuple[list[str], list[str]]] = [
    ([], []),
    (["queue_weight=0"], [MUST_COUNT]),
    (["queue_weight=0", "global_weight=0.5"], []),
    (["teacher=''", "queue_weight=0"], [f"{OF_FEATURES}.teacher: must name the weights to learn from (got '')"]),
    (["embedding_dim=31"], [f"{HEAD}: must end in 31, the teacher's features (got dims that end in 32)"]),
    (["dense_weight=1"], [f"{HEAD}: must be one map_projection_head"]),
    *(
        ([f"{name}={values}"], [f"{OF_FEATURES}.{name}: must be three numbers{kind}, for red, green and blue"])
        for name, values, kind in (
            ("teacher_mean", "[0.5, 0.5]", ""),
            ("teacher_mean", "[0.5, 0.5, 0.5, 0.5]", ""),
            ("teacher_std", "[0.5, 0.5]", " above 0"),
            ("teacher_std", "[0.5, 0.0, 0.5]", " above 0"),
        )
    ),
    (["teacher_mean=[0, -1, 0]", "teacher_std=[1.0e-3, 1, 9]"], []),
]


@pytest.mark.parametrize(("keys", "said"), FEATURES)
def test_features_are_learned_from_named_weights_of_their_width(keys: list[str], said: list[str]) -> None:
    given = ["teacher=configs", "embedding_dim=32", "teacher_mean=[0.5, 0.5, 0.5]", "teacher_std=[0.5, 0.5, 0.5]"]
    words = [f"{OF_FEATURES}.{key}" for key in [*given, *keys]]
    words += [f"{HEAD}=[[mlp, {{dims: [-1, 32]}}]]", f"{TEACHER_HEAD}=[[identity, {{}}]]"]
    words += [f"{TEACHER}.WEIGHTS_INIT.PARAMS_FILE=configs"]
    found = [str(problem) for problem in problems(Decisions(_changed("feature_distillation", words), CPU_HOST))]
    assert len(found) == len(said) and all(map(str.startswith, found, said)), found


@pytest.mark.parametrize(("loss", "head", "words", "said"), TEACHERS)
def test_a_teacher_of_prototypes_is_refused_where_it_does_not_fit(
    loss: str, head: str, words: list[str], said: str
) -> None:
    weights = "config.DISTILLATION.TEACHER_MODEL.WEIGHTS_INIT.PARAMS_FILE=configs"
    keys = {} if head == "mlp" else {"num_clusters": [12]}
    words = [f"config.LOSS.name={loss}_distillation_loss", weights, _head(head, **keys), *words]
    found = [str(problem) for problem in problems(Decisions(_changed("distillation", words), CPU_HOST))]
    assert any(said in problem for problem in found) if said else not found, found


@pytest.mark.parametrize(("loss", "words", "expected"), INFERRED)
def test_distillation_takes_its_sizes_from_the_recipe(loss: str, words: list[str], expected: dict[str, Any]) -> None:
    cfg = _changed("distillation", [f"config.LOSS.name={loss}", *words])
    found = {key: value for key, (value, _) in method_of(loss).inferred(cfg).items()}
    assert found.keys() >= expected.keys() and {key: found[key] for key in expected} == expected


NO_CROPS = f"{TRANSFORMS}=[{{name: ToTensor}}]"
CUT = f"{TRANSFORMS}=[{{name: ImgPilToPatchesAndImage, num_patches: 4}}, {{name: ToTensor}}]"
MLP = _head("mlp")
SIZES: list[tuple[str, list[str], dict[str, Any]]] = [
    ("simclr", [_crops([2, 3])], {}),
    *(
        ("simclr", ["config.LOSS.name=multicrop_simclr_info_nce_loss", crops], {"num_crops": number})
        for crops, number in ((_crops([2, 3]), 5), (NO_CROPS, None))
    ),
    *((recipe, [MLP], {"embedding_dim": 32}) for recipe in ("moco_v2", "nnclr", "npid", "deepcluster_v2")),
    *((recipe, ["config.MODEL.HEAD.PARAMS=[]"], {"embedding_dim": None}) for recipe in ("moco_v2", "nnclr", "npid")),
    *(
        (
            recipe,
            [_head("swav_head", num_clusters=[7, 5]), _crops([2, 3])],
            {"num_crops": 5, "num_prototypes": [7, 5], "embedding_dim": 32},
        )
        for recipe in ("swav", "swav_momentum")
    ),
    ("swav", [MLP, NO_CROPS], {"num_crops": None, "num_prototypes": None, "embedding_dim": None}),
    ("dino", [_head("swav_head", num_clusters=[7])], {"output_dim": 7}),
    ("msn", [_head("swav_head", num_clusters=[7], use_weight_norm_prototypes="true")], {"output_dim": 7}),
    *((recipe, [_crops([3, 1])], {"num_global_crops": 3}) for recipe in ("dinov2", "dinov3", "lejepa", "visreg")),
    (
        "ibot",
        [_head("ibot_head", num_clusters=[7, 5]), _crops([3, 1])],
        {"num_global_crops": 3, "out_dim": 7, "patch_out_dim": 5},
    ),
    *(
        (
            "ibot",
            [f"{HEAD}=[[ibot_dino_head, {{in_dim: 64, {keys}}}]]"],
            {"num_global_crops": 2, "out_dim": of_crops, "patch_out_dim": of_patches},
        )
        for keys, of_crops, of_patches in (
            ("out_dim: 7, patch_out_dim: 5", 7, 5),
            ("out_dim: 7, patch_out_dim: 5, shared_head: true", 7, 7),
            ("out_dim: 7", 7, 7),
            ("patch_out_dim: 5", None, None),
        )
    ),
    ("ibot", [_head("ibot_head", num_clusters=[7])], {"num_global_crops": 2, "out_dim": 7, "patch_out_dim": 7}),
    (
        "jigsaw",
        [_head("jigsaw_head", num_towers=9, num_permutations=25), CUT],
        {"num_towers": 9, "num_permutations": 25, "are_cut": True},
    ),
    ("jigsaw", [_chain(4, 20)], {"num_towers": 4, "num_permutations": 20, "are_cut": False}),
    ("jigsaw", [_chain(None, 20)], {"num_towers": None, "num_permutations": 20, "are_cut": False}),
    ("jigsaw", [_head("jigsaw_head")], {"num_towers": 9, "num_permutations": 1000, "are_cut": False}),
    ("pirl", [_head("pirl_head", num_towers=4), CUT], {"embedding_dim": 32, "num_towers": 4, "are_cut": True}),
    ("pirl", [_head("pirl_head")], {"embedding_dim": 32, "num_towers": 9, "are_cut": False}),
]


@pytest.mark.parametrize(("recipe", "words", "expected"), SIZES)
def test_a_loss_takes_its_sizes_from_head_and_transforms(
    recipe: str, words: list[str], expected: dict[str, Any]
) -> None:
    cfg = _changed(recipe, words)
    assert {key: value for key, (value, _) in method_of(cfg.LOSS["name"]).inferred(cfg).items()} == expected


@pytest.mark.parametrize(("recipe", "words", "said"), CASES)
def test_a_recipe_is_refused_for_its_method(recipe: str, words: list[str], said: str) -> None:
    found = [str(problem) for problem in problems(Decisions(_changed(recipe, words), CPU_HOST))]
    assert any(said in problem for problem in found) if said else not found, found


@pytest.mark.parametrize(
    "entry",
    [
        {"name": "ImgReplicatePil"},
        {"name": "ImgReplicatePil", "num_times": 3},
        {"name": "ImgPilToPatchesAndImage"},
        {"name": "ImgPilToPatchesAndImage", "num_patches": 4},
        {"name": "ImgPatchesFromTensor"},
        {"name": "ImgPatchesFromTensor", "num_patches": 4},
        {
            "name": "ImgPilToMultiCrop",
            "total_num_crops": 5,
            "num_crops": [2, 3],
            "size_crops": [8, 6],
            "crop_scales": [[0.5, 1.0]] * 2,
        },
    ],
)
def test_crops_are_counted_as_transforms_make_them(entry: dict[str, Any]) -> None:
    end = {"name": "ToTensor"}
    entries = [end, entry] if entry["name"] == "ImgPatchesFromTensor" else [entry, end]
    cfg = RunConfig()
    cfg.DATA.TRAIN.TRANSFORMS = entries
    crops = build_pipeline(entries, "here")(Image.new("RGB", (96, 96)))
    assert crops_of(cfg) == [len(list(group)) for _, group in groupby(crops, key=lambda crop: crop.shape)]


@pytest.mark.parametrize(
    ("transforms", "counts"),
    [
        ([], None),
        (["ToTensor", {"name": "ToTensor"}], None),
        (["ToTensor", {"name": "ImgPilToMultiCrop", "num_crops": [2, 6]}, {"name": "ImgReplicatePil"}], [2, 6]),
        ([{"name": "ImgPilToMultiCrop"}], None),
        ([{"name": "ImgPilToMultiCrop", "num_crops": [2, "6"]}], None),
        ([{"name": "ImgReplicatePil"}, {"name": "ImgPilToMultiCrop", "num_crops": [2, 6]}], [2]),
        ([{"name": "ImgReplicatePil", "num_times": 3}], [3]),
        ([{"name": "ImgReplicatePil", "num_times": "3"}], None),
        ([{"name": "ImgPatchesFromTensor"}], [9]),
        ([{"name": "ImgPilToPatchesAndImage", "num_patches": 4}], [1, 4]),
        ([{"name": "ImgPatchesFromTensor", "num_patches": "4"}], None),
    ],
)
def test_crops_are_counted_as_the_first_transform_that_makes_several_says(transforms, counts):
    cfg: Any = SimpleNamespace(DATA=SimpleNamespace(TRAIN=SimpleNamespace(TRANSFORMS=transforms)))
    assert crops_of(cfg) == counts and num_crops_of(cfg) == (sum(counts) if counts else 1)
