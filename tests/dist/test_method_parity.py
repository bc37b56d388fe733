"""Every method at every level: the losses, weights and teacher of plain torch in one process, to 1e-10 in float64.

The reference has one process, the whole batch, torch's own SGD, and a teacher that follows by two lines of arithmetic.
Exact accumulation is held to the same reference: one rank with four micro-batches is four ranks with one.
"""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import vissl_zero
from tests.dist.case import Case, Trunk
from tests.ranks import run_on_ranks
from tests.unit.evaluation.example_run import make_config, make_plan
from vissl_zero.checkpoint.folder import newest_checkpoint
from vissl_zero.checkpoint.resume import restore
from vissl_zero.checkpoint.saver import Saver
from vissl_zero.data.loader import build_loader
from vissl_zero.engine.build import build_run, other_model
from vissl_zero.engine.hook import Hook, Run, Step, StepRecord
from vissl_zero.engine.loop import train
from vissl_zero.errors import CheckpointError
from vissl_zero.methods.method import build_method
from vissl_zero.models.init import initialize_
from vissl_zero.models.keyed_random import set_random_key
from vissl_zero.models.model import build_model
from vissl_zero.planner.dry_run import DryRun, dry_run
from vissl_zero.registry import METHODS, TRUNKS
from vissl_zero.reporting.dry_run_lines import dry_run_lines
from vissl_zero.reporting.quantity import bytes_text
from vissl_zero.resolve.resolved import OffloadPlan, OptimizerPlan, ResolvedRun

NUM_STEPS, BATCH, LR = 4, 12, 0.05
TOLERANCE = 1e-10
MLP = ["mlp", {"dims": [6, 9, 4], "use_relu": True}]
SIAMESE = ["siamese_head", {"dims": [6, 9, 4], "predictor_dims": [5], "use_bn": False}]
SWAV = ["swav_head", {"dims": [6, 9, 4], "num_clusters": [5]}]
PIRL = ["pirl_head", {"dims": [6, 4], "num_towers": 4}]
JIGSAW = ["jigsaw_head", {"dims": [6, 5], "num_towers": 4, "num_permutations": 7}]
DINO = ["swav_head", {"dims": [6, 9, 4], "num_clusters": [5], "use_weight_norm_prototypes": True}]
IBOT = ["ibot_head", {"dims": [6, 9, 4], "num_clusters": [5, 7]}]
PATCHES: list[Any] = ["patch_predictor", {"dims": [6, 8, 12], "depth": 1, "num_heads": 2}]
CLUSTERS = {"num_crops": 3, "num_prototypes": [5], "embedding_dim": 4, "queue": {"queue_length": 20, "start_iter": 1}}
# method -> loss, its keys, head, crops of each of two sizes
CASES: dict[str, tuple[str, dict[str, Any], Any, list[int]]] = {
    "supervised": ("CrossEntropyLoss", {}, ["mlp", {"dims": [6, 10]}], [2, 1]),
    # Not all pixels count, and more of them on some ranks than on others; see make_method_plan.
    "segmentation": ("segmentation_loss", {}, ["fcn_head", {"dims": [-1, 5, 11]}], [1]),
    "simclr": ("simclr_info_nce_loss", {"temperature": 0.3}, MLP, [2]),
    "simsiam": ("simsiam_loss", {}, SIAMESE, [2]),
    "barlow_twins": ("barlow_twins_loss", {"lambda_": 0.1}, MLP, [2]),
    "vicreg": ("vicreg_loss", {"sim_coeff": 1.0, "std_coeff": 1.0, "cov_coeff": 0.1}, MLP, [2]),
    # Fewer matches than places, of the first map.
    "vicregl": (
        "vicregl_loss",
        {"sim_coeff": 1.0, "std_coeff": 1.0, "cov_coeff": 0.1, "alpha": 0.6, "num_matches": [2, 1]},
        ["vicregl_head", {"dims": [6, 9, 4], "map_dims": [7, 5]}],
        [2, 1],
    ),
    "byol": ("byol_loss", {"momentum": 0.7}, SIAMESE, [2]),
    # Longer than a batch and no multiple of it: which keys are dropped depends on their order.
    "moco_v2": ("moco_loss", {"embedding_dim": 4, "queue_size": 20, "momentum": 0.7}, MLP, [2]),
    "moco_v3": ("moco_v3_loss", {"momentum": 0.7}, SIAMESE, [2]),
    "nnclr": ("nnclr_loss", {"embedding_dim": 4, "queue_size": 20, "temperature": 0.5}, SIAMESE, [2]),
    "supcon": ("supcon_loss", {"temperature": 0.5}, MLP, [2]),
    "lejepa": ("lejepa_loss", {"num_slices": 7, "lambda_": 0.2}, MLP, [2, 1]),
    "visreg": ("visreg_loss", {"num_slices": 7, "lambda_": 0.6}, MLP, [2, 1]),
    "swav": ("swav_loss", CLUSTERS, SWAV, [2, 1]),
    "swav_momentum": ("swav_momentum_loss", {**CLUSTERS, "momentum": 0.7}, SWAV, [2, 1]),
    "mae": ("mae_loss", {"mask_ratio": 0.6}, PATCHES, [2]),
    "simmim": ("simmim_loss", {"mask_patch_size": 4}, ["pixel_head", {"dims": [6, 12]}], [2]),
    "maskfeat": ("maskfeat_loss", {"cell_size": 2}, ["hog_head", {"dims": [6, 27]}], [2]),
    "ijepa": ("ijepa_loss", {"momentum": 0.7}, ["patch_predictor", {**PATCHES[1], "dims": [6, 8, 6]}], [2]),
    "data2vec": ("data2vec_loss", {"momentum": 0.7, "average_top_k_layers": 2}, ["latent_head", {"dims": [6, 6]}], [2]),
    "ibot": ("ibot_loss", {"out_dim": 5, "patch_out_dim": 7, "teacher_momentum": 0.7}, IBOT, [2, 1]),
    "dinov2": (
        "dinov2_loss",
        {"momentum": 0.7},
        ["ibot_head", {**IBOT[1], "num_clusters": [5], "normalize_last_layer": False}],
        [2, 1],
    ),
    # The anchor is taken after the first step and after the second.
    "dinov3": (
        "dinov3_loss",
        {"momentum": 0.7, "gram_start": 0.25, "gram_interval": 1, "gram_updates": 2},
        ["dinov3_head", IBOT[1]],
        [2, 1],
    ),
    "msn": ("msn_loss", {"output_dim": 5, "momentum": 0.7, "patch_drop": 0.4}, DINO, [3, 1]),
    "npid": (
        "nce_loss_with_memory",
        {"embedding_dim": 4, "temperature": 0.5, "negative_sampling_params": {"num_negatives": 7}},
        MLP,
        [1],
    ),
    "pirl": (
        "pirl_loss",
        {"num_towers": 4, "embedding_dim": 4, "temperature": 0.5, "negative_sampling_params": {"num_negatives": 7}},
        PIRL,
        [2],
    ),
    "deepcluster_v2": ("deepclusterv2_loss", {"embedding_dim": 4, "num_clusters": [5, 3]}, MLP, [2, 1]),
    "distillation": (
        "distillation_loss",
        {"teacher": "digits", "temperature": 2.0, "soft_target_alpha": 0.7},
        ["mlp", {"dims": [6, 10]}],
        [2, 1],
    ),
    # The queue is longer than a batch's crops and no multiple of them; the widths of both models differ.
    "feature_distillation": (
        "feature_distillation_loss",
        {
            "embedding_dim": 10,
            "queue_size": 40,
            "temperature": 0.5,
            "global_weight": 0.3,
            "dense_weight": 0.7,
            "teacher_mean": [0.2, 0.3, 0.4],
        }
        | {"teacher_std": [0.2, 0.3, 0.5], "student_mean": [0.3] * 3, "student_std": [0.4] * 3},
        ["map_projection_head", {"dims": [6, 10]}],
        [2, 1],
    ),
    "rotnet": ("rotnet_loss", {}, ["mlp", {"dims": [6, 4]}], [2]),
    "jigsaw": ("jigsaw_loss", {"num_towers": 4, "num_permutations": 7}, JIGSAW, [2]),
    "dino": ("dino_loss", {"output_dim": 5, "momentum": 0.7, "teacher_temp_warmup_iters": 3}, DINO, [2, 1]),
}
# Methods that look at patches.
TRANSFORMERS = ("mae", "simmim", "maskfeat", "ijepa", "data2vec", "ibot", "dinov2", "dinov3", "msn")
MASK_TOKEN = ("simmim", "maskfeat", "data2vec", "ibot", "dinov2", "dinov3")
TIMM_VIT = {"img_size": 8, "patch_size": 2, "depth": 2, "num_heads": 2, "embed_dim": 6, "mlp_ratio": 1.5}
# Of methods that learn from the model under DISTILLATION, which has random weights here.
OTHER_TEACHER: dict[str, dict[str, Any]] = {
    "feature_distillation": {
        "TRUNK": {
            "NAME": "vision_transformer",
            "VISION_TRANSFORMERS": {"IMAGE_SIZE": 8, "PATCH_SIZE": 2, "NUM_LAYERS": 1, "NUM_HEADS": 2}
            | {"HIDDEN_DIM": 10, "MLP_DIM": 14},
        },
        "HEAD": {"PARAMS": [["feature_maps", {}]]},
    }
}
VIT = {"IMAGE_SIZE": 8, "PATCH_SIZE": 2, "NUM_LAYERS": 2, "NUM_HEADS": 2, "HIDDEN_DIM": 6, "MLP_DIM": 10}


# Maps of a chain of units, and of units within timm's own forward pass.
MAPS = {
    "timm/convnext_atto": {"depths": (1, 1, 1, 2), "dims": (5, 6, 7, 8)},
    "timm/xcit_nano_12_p16_224": {"depth": 1, "embed_dim": 8, "num_heads": 2, "cls_attn_layers": 1},
}


@dataclass
class TrunkKeys:
    norm: str = "batch"


@TRUNKS.register("parity_trunk", config=TrunkKeys)
def parity_trunk(norm: str) -> Trunk:
    """The tiny trunk of the parity tests: uneven widths, so that ranks hold few rows or none."""
    return Trunk(Case(norm=norm))


@dataclass
class Result:
    """Of a run: the loss of every step, full tensors at the end (the teacher's behind "teacher:", state of the loss
    behind "loss:"), bytes of the teacher on rank 0; of the reference, the norm of the gradients of every step, and the
    figures of the last."""

    losses: list[float] = field(default_factory=list)
    state: dict[str, Tensor] = field(default_factory=dict)
    teacher_bytes: int = 0
    norms: list[float] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)

    def distance(self, other: Result) -> float:
        assert len(self.losses) == len(other.losses) and self.state.keys() == other.state.keys()
        tensors = [(self.state[name] - other.state[name]).abs().max().item() for name in self.state]
        return max([*tensors, *(abs(a - b) for a, b in zip(self.losses, other.losses, strict=True))])


def make_method_plan(
    method: str, level: int, world_size: int, norm: str, folder: str = "", **changes: Any
) -> ResolvedRun:
    loss, keys, head, crops = CASES[method]
    config = make_config(USE_KNN=False)
    data = config["DATA"]["TRAIN"]
    data["DATA_LIMIT"] = 2 * BATCH
    sizes = {"size_crops": [8, 6][: len(crops)], "num_crops": crops, "total_num_crops": sum(crops)}
    scales = {"crop_scales": [[0.5, 1.0], [0.4, 0.8]][: len(crops)]}
    data["TRANSFORMS"] = [{"name": "ImgPilToMultiCrop", **sizes, **scales}, *data["TRANSFORMS"]]
    if method == "vicregl":
        head = [head[0], {**head[1], "norm": "batch" if norm == "batch" else "layer"}]
        mirrored = {"name": "RandomHorizontalFlip"}
        data["TRANSFORMS"] = [data["TRANSFORMS"][0] | {"keeps_boxes": True}, mirrored, *data["TRANSFORMS"][1:]]
    if method == "segmentation":
        head = [head[0], {**head[1], "use_bn": norm == "batch"}]
        data |= {"DATA_SOURCES": ["digit_scenes"], "DEFAULT_GRAY_IMG_SIZE": 64 if norm in MAPS else 8}
        shifted = {"name": "RandomAffine", "degrees": 30, "translate": [0.4, 0.4]}  # what is left free does not count
        data["TRANSFORMS"] = [shifted, *data["TRANSFORMS"][1:]]
    config["MODEL"]["TRUNK"] = {"NAME": "parity_trunk", "PARAMS": {"norm": norm}}
    if method in TRANSFORMERS or norm == "vit":
        vit = {**VIT, "USE_MASK_TOKEN": method in MASK_TOKEN}
        config["MODEL"]["TRUNK"] = {"NAME": "vision_transformer", "VISION_TRANSFORMERS": vit}
    if norm == "timm":
        name, has_token = "vit_tiny_patch16_224", method in MASK_TOKEN
        keys_of_timm = {"name": name, "use_mask_token": has_token, "model_args": TIMM_VIT}
        config["MODEL"]["TRUNK"] = {"NAME": f"timm/{name}", "PARAMS": keys_of_timm}
    if norm in MAPS:
        config["MODEL"]["TRUNK"] = {
            "NAME": norm,
            "PARAMS": {"name": norm.removeprefix("timm/"), "model_args": MAPS[norm]},
        }
    config["MODEL"]["HEAD"]["PARAMS"] = [copy.deepcopy(head)]  # a test may change its own
    config["LOSS"] = {"name": loss, loss: keys}
    has_other = method in OTHER_TEACHER
    if has_other:
        config["DISTILLATION"]["TEACHER_MODEL"] |= OTHER_TEACHER[method]
    plan = make_plan(config, folder, level=level, world_size=world_size, learns_from_other=has_other)
    sgd = OptimizerPlan("sgd", {"momentum": 0.9}, lr={"name": "constant", "value": LR})
    fields = {"batch_per_rank": BATCH // world_size, "global_batch": BATCH, "max_steps": NUM_STEPS, "optimizer": sgd}
    return dataclasses.replace(plan, **(fields | changes))


class _ViewByView:
    """A model that is called once for each crop of an image, for methods with two crops of one size."""

    def __init__(self, model: torch.nn.Module):
        self.model = model

    def __call__(self, images: list[Tensor], *others: Any) -> list[Any]:
        parts = [self.model([view]) for view in images[0].chunk(2)]
        columns = zip(*map(pytree.tree_leaves, parts), strict=True)
        joined = [torch.cat(column) if isinstance(column[0], Tensor) else column[0] for column in columns]
        return pytree.tree_unflatten(joined, pytree.tree_structure(parts[0]))  # type: ignore[no-any-return]


@cache
def plain(method: str, norm: str, num_micro: int = 1, clip: float | None = None, views_apart: bool = False) -> Result:
    """The reference: torch, one process, the whole batch, or the mean of the losses of its parts; gradients clipped."""
    plan = make_method_plan(method, 0, 1, norm)
    model = build_model(plan.config.MODEL)
    initialize_(model, plan.seed)
    model.double().train()
    loader = build_loader(plan.config.DATA, "TRAIN", plan.seed, BATCH // num_micro, 0, 1, num_micro)
    rule = build_method(plan.config.LOSS, len(loader.source)).double()
    origin = other_model(plan, 0)
    if origin is not None:
        initialize_(origin, plan.seed)
    teacher = rule.make_teacher(origin or copy.deepcopy(model)).double().train(rule.teacher_follows)
    unit_rows = rule.normalized_rows()
    params = dict(model.named_parameters())
    followers = dict(teacher.named_parameters()) if rule.teacher_follows else {}
    for weights in (params, followers):
        for name in unit_rows:
            weights[name].data /= weights[name].data.norm(dim=1, keepdim=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    rule.set_length(2 * loader.steps_per_epoch, loader.steps_per_epoch)
    result, step = Result(), 0
    see: Any = _ViewByView if views_apart else (lambda model: model)
    if rule.needs_initial_embeddings:
        rule.on_step(0, 0)
        before = copy.deepcopy(model.state_dict())
        for micro_batches in loader.epoch(0):
            for batch in [part.to("cpu", torch.float64) for part in micro_batches]:
                with torch.no_grad():
                    rule.update_state([rule.observe(rule.run_student(model, batch), batch)])
        model.load_state_dict(before)  # running statistics
    for epoch in range(2):
        rule.on_epoch(epoch)
        for micro_batches in loader.epoch(epoch):
            rule.on_step(step, epoch)
            optimizer.zero_grad()
            total, observed = 0.0, []
            for batch in [part.to("cpu", torch.float64) for part in micro_batches]:
                set_random_key(plan.seed, step, batch.sample_ids)
                with torch.no_grad():
                    teacher_outputs = rule.run_teacher(see(teacher), batch) if rule.has_teacher else None
                outputs = rule.run_student(see(model), batch)
                loss = rule.loss(outputs, batch, teacher_outputs) / num_micro
                loss.backward()
                observed.append(rule.observe(outputs, batch, teacher_outputs))
                total += loss.item()
            rule.update_state(observed)
            norm_of_all = torch.nn.utils.clip_grad_norm_(model.parameters(), torch.inf if clip is None else clip)
            result.norms.append(norm_of_all.item())
            optimizer.step()
            with torch.no_grad():
                for name in unit_rows:
                    params[name] /= params[name].norm(dim=1, keepdim=True)
                if rule.has_teacher and rule.teacher_follows:
                    momentum = rule.momentum(step)
                    for name in unit_rows:
                        followers[name] /= followers[name].norm(dim=1, keepdim=True)
                    for name in followers.keys() & params.keys():
                        followers[name].copy_(momentum * followers[name] + (1 - momentum) * params[name])
                    for name in followers.keys() - params.keys() if rule.moves_anchor(step) else ():
                        followers[name].copy_(followers[name.replace("anchor.", "trunk.", 1)])
            result.losses.append(total)
            step += 1
    result.state = _state(model.state_dict(), teacher.state_dict() if rule.has_teacher else {}, rule)
    result.figures = rule.health(rule.health_sums().double())
    return result


def _state(model: dict[str, Tensor], teacher: dict[str, Tensor], rule: Any) -> dict[str, Tensor]:
    found = {name: tensor.detach().clone() for name, tensor in model.items()}
    found |= {f"teacher:{name}": tensor.clone() for name, tensor in teacher.items() if ".predictor." not in name}
    found |= {f"loss:{n}": t.double().clone() for n, t in rule.state_dict().items() if isinstance(t, Tensor)}
    return {name: tensor for name, tensor in found.items() if "num_batches" not in name}


class _Losses(Hook):
    def __init__(self, saver: Saver | None = None):
        self.losses: list[float] = []
        self.saver = saver

    def on_record(self, run: Run, record: StepRecord) -> None:
        assert record.loss is not None
        self.losses.append(record.loss)

    def on_step(self, run: Run, step: Step) -> None:
        if self.saver is not None:
            self.saver.save(run, [], is_epoch_over=False)
            self.saver.finish()


def _train(plan: ResolvedRun, saver: Saver | None = None, from_folder: str = "") -> Result:
    run, schedules, frozen = build_run(plan, torch.device("cpu"))
    hook = _Losses(saver)
    if from_folder:
        with newest_checkpoint(from_folder) as checkpoint:
            restore(run, [], checkpoint)
    train(run, schedules, frozen, [hook])
    run.sharded.consolidate_buffers()
    teacher = run.sharded.full_teacher_state()
    result = Result(hook.losses, _state(run.sharded.full_state(), teacher, run.method), run.sharded.ledger().teacher)
    run.sharded.close()
    return result if run.is_main else Result()


def _levels(method: str, world_size: int, levels: list[int], folder: str) -> list[Result]:
    """In one task of the pool. The last cell has parameters and the optimizer on NVMe, the teacher's with them."""
    plans = [make_method_plan(method, level, world_size, "batch") for level in levels]
    if world_size == 2:
        tiers = {key: OffloadPlan("nvme", nvme_path=folder) for key in ("offload_params", "offload_optimizer")}
        plans[-1] = dataclasses.replace(plans[-1], sharding=dataclasses.replace(plans[-1].sharding, **tiers))
    return [_train(plan) for plan in plans]


def _on_trunks(norm: str) -> list[Any]:
    """List methods and trunks: the slow tests take convolutions with ``norm`` and a transformer in turn, soak both."""
    params = []
    for index, name in enumerate(CASES):
        in_turn = "vit" if name in TRANSFORMERS or index % 2 else norm
        kinds = ["vit"] if name in TRANSFORMERS else [norm, "vit"]
        params += [pytest.param(name, k, marks=pytest.mark.slow if k == in_turn else pytest.mark.soak) for k in kinds]
    return params


# One method of each kind (pairs, prototypes, teacher, patches, anchor) is enough for every change.
OF_EACH_KIND = ("simclr", "swav", "dino", "mae", "dinov3")


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("method", "world_size"),
    [
        *(pytest.param(name, 3, marks=[] if name in OF_EACH_KIND else pytest.mark.slow) for name in CASES),
        *(pytest.param(name, ranks, marks=pytest.mark.soak) for name in CASES for ranks in (1, 2)),
    ],
)
def test_a_method_equals_plain_torch(method: str, world_size: int, tmp_path: Path) -> None:
    levels = {1: [0], 2: [1, 3], 3: [0, 1, 2, 3]}[world_size]
    for level, result in zip(
        levels, run_on_ranks(world_size, _levels, method, world_size, levels, str(tmp_path))[0], strict=True
    ):
        assert result.distance(plain(method, "batch")) < TOLERANCE, f"level {level}"


def _apart(method: str, world_size: int, levels: list[int]) -> list[Result]:
    plans = [make_method_plan(method, level, world_size, "batch") for level in levels]
    for plan in plans:
        plan.config.MODEL.VIEWS_APART = True
    return [_train(plan) for plan in plans]


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "method", ["byol", *(pytest.param(name, marks=pytest.mark.slow) for name in ("simsiam", "barlow_twins", "moco_v3"))]
)
def test_views_apart_are_a_pass_per_view(method: str) -> None:
    """Batch norm's statistics, running ones too, are those of a call of the model for each view."""
    expected = plain(method, "batch", views_apart=True)
    assert expected.distance(plain(method, "batch")) > 1e-3
    for world_size, levels in ((1, [0]), (3, [0, 3])):
        for level, result in zip(levels, run_on_ranks(world_size, _apart, method, world_size, levels)[0], strict=True):
            assert result.distance(expected) < TOLERANCE, f"level {level}, {world_size} ranks"


STATEFUL = ("dino", "ibot", "feature_distillation", "moco_v2", "nnclr", "npid", "pirl", "deepcluster_v2")


def _one_step(methods: list[str], num_micro: int) -> list[Result]:
    changes = {"batch_per_rank": BATCH // num_micro, "accumulation_steps": num_micro, "max_steps": 1}
    return [_train(make_method_plan(name, 0, 1, "vit" if name == "ibot" else "group", **changes)) for name in methods]


@pytest.mark.timeout(200)
def test_a_state_moves_once_a_step_however_many_micro_batches_there_are() -> None:
    """Centers, queues and memories after one step are those of the step's samples, by one batch or by four."""
    whole, parts = (run_on_ranks(1, _one_step, STATEFUL, num_micro)[0] for num_micro in (1, 4))
    for method, one, four in zip(STATEFUL, whole, parts, strict=True):
        # NCE's normalizer is no moving state: the first micro-batch of a run sets it, and its loss needs it.
        names = [name for name in one.state if name.startswith("loss:") and "normalizer" not in name]
        assert names, method
        for name in names:
            assert torch.allclose(one.state[name], four.state[name], rtol=0, atol=1e-12), (method, name)


NUM_MICRO = 2  # in a step of every cell of the whole matrix


@cache
def _clip(method: str, norm: str) -> float:
    """A limit that all steps of the whole matrix reach."""
    return 0.25 * min(plain(method, norm, NUM_MICRO).norms)


def _make_cell(
    method: str, norm: str, world_size: int, level: int, clip: float, folder: str, **changes: Any
) -> ResolvedRun:
    size = BATCH // world_size // NUM_MICRO
    plan = make_method_plan(
        method, level, world_size, norm, folder, batch_per_rank=size, accumulation_steps=NUM_MICRO, **changes
    )
    sharding = dataclasses.replace(plan.sharding, clip_grad=clip)
    if level == 3 and world_size == 2:
        tier = OffloadPlan("nvme", nvme_path=folder)
        sharding = dataclasses.replace(sharding, offload_params=tier, offload_optimizer=tier)
    return dataclasses.replace(plan, sharding=sharding)


def _at_all_levels(method: str, norm: str, world_size: int, clip: float, folder: str) -> list[Result]:
    return [_train(_make_cell(method, norm, world_size, level, clip, folder)) for level in range(4)]


def _save_cell(method: str, norm: str, clip: float, folder: str) -> None:
    saver = Saver(Path(folder), is_async=False, keep_last=-1, keep_every=-1)
    _train(_make_cell(method, norm, 3, 3, clip, folder, max_steps=2), saver)
    saver.close()


def _resume_cell(method: str, norm: str, world_size: int, level: int, clip: float, folder: str) -> Result:
    return _train(_make_cell(method, norm, world_size, level, clip, folder), from_folder=folder)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("method", "norm"), _on_trunks("batch"))
def test_every_cell_with_accumulation_clipping_nvme_and_another_layout_after_a_stop(
    method: str, norm: str, tmp_path: Path
) -> None:
    """Levels 0 to 3 on 1, 2 and 3 ranks; the level 3 of 2 ranks rests on NVMe; 3 ranks at level 3 go on as others."""
    clip, largest = _clip(method, norm), 0.0
    reference = plain(method, norm, NUM_MICRO, clip)
    assert min(reference.norms) > clip, "nothing is clipped"
    for world_size in (1, 2, 3):
        results = run_on_ranks(world_size, _at_all_levels, method, norm, world_size, clip, str(tmp_path))[0]
        for level, result in enumerate(results):
            distance = result.distance(reference)
            assert distance < TOLERANCE, f"level {level}, {world_size} ranks"
            largest = max(largest, distance)
    run_on_ranks(3, _save_cell, method, norm, clip, str(tmp_path))
    for world_size, level in ((2, 1), (1, 0), (2, 3)):
        result = run_on_ranks(world_size, _resume_cell, method, norm, world_size, level, clip, str(tmp_path))[0]
        result.losses = reference.losses[:2] + result.losses
        distance = result.distance(reference)
        assert distance < TOLERANCE, f"resumed at level {level}, {world_size} ranks"
        largest = max(largest, distance)
    print(f"{method}, {norm}: 15 runs, largest difference {largest:.1e}")


def _fairscale(method: str) -> list[Result]:
    plans = [make_method_plan(method, level, 2, "batch") for level in (1, 2)]
    return [_train(dataclasses.replace(p, sharding=dataclasses.replace(p.sharding, engine="fairscale"))) for p in plans]


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "method",
    [pytest.param(name, marks=[pytest.mark.slow] * (name not in ("byol", "swav_momentum"))) for name in CASES],
)
def test_a_method_under_fairscale(method: str) -> None:
    for result in run_on_ranks(2, _fairscale, method)[0]:
        assert result.distance(plain(method, "batch")) < TOLERANCE


def _masked(method: str, cells: list[tuple[str, int]]) -> list[Result]:
    plans = [(engine, make_method_plan(method, level, 2, "timm")) for engine, level in cells]
    return [_train(dataclasses.replace(p, sharding=dataclasses.replace(p.sharding, engine=name))) for name, p in plans]


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "method", ["ibot", *(pytest.param(name, marks=pytest.mark.slow) for name in ("mae", "dinov2"))]
)
def test_a_method_that_masks_takes_a_trunk_of_timms_and_fairscale(method: str) -> None:
    cells = [("torch", 0), ("torch", 3), ("fairscale", 1), ("fairscale", 2)]
    for cell, result in zip(cells, run_on_ranks(2, _masked, method, cells)[0], strict=True):
        assert result.distance(plain(method, "timm")) < TOLERANCE, cell


def _mapped(trunk: str, levels: list[int]) -> list[Result]:
    return [_train(make_method_plan("segmentation", level, 2, trunk)) for level in levels]


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("trunk", MAPS)
def test_segmentation_takes_maps_of_timms(trunk: str) -> None:
    for level, result in zip((1, 3), run_on_ranks(2, _mapped, trunk, [1, 3])[0], strict=True):
        assert result.distance(plain("segmentation", trunk)) < TOLERANCE, f"level {level}"


def _exactly(method: str, norm: str, world_size: int, level: int, num_micro: int) -> Result:
    size = BATCH // world_size // num_micro
    changes = {"batch_per_rank": size, "accumulation_steps": num_micro, "exact_accumulation": num_micro > 1}
    return _train(make_method_plan(method, level, world_size, norm, **changes))


@pytest.mark.timeout(200)
@pytest.mark.parametrize(("method", "norm"), _on_trunks("group"))
def test_exact_accumulation_equals_as_many_ranks(method: str, norm: str) -> None:
    for world_size, level, num_micro in ((1, 0, 4), (4, 3, 1), (2, 2, 3)):
        result = run_on_ranks(world_size, _exactly, method, norm, world_size, level, num_micro)[0]
        assert result.distance(plain(method, norm)) < TOLERANCE, f"{world_size} ranks x {num_micro}"


def test_plain_accumulation_is_another_thing() -> None:
    """Or the test above could not fail."""
    changes = {"batch_per_rank": BATCH // 4, "accumulation_steps": 4}
    result = run_on_ranks(1, _train, make_method_plan("simclr", 0, 1, "group", **changes))[0]
    assert result.distance(plain("simclr", "group")) > 1e-4


def _save(folder: str, method: str) -> Result:
    plan = make_method_plan(method, 3, 3, "batch", folder, max_steps=2)
    saver = Saver(Path(folder), is_async=False, keep_last=-1, keep_every=-1)
    result = _train(plan, saver)
    saver.close()
    return result


def _resume(folder: str, method: str, level: int, world_size: int) -> Result:
    return _train(make_method_plan(method, level, world_size, "batch", folder), from_folder=folder)


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("method", ["byol", "moco_v2", "dino", pytest.param("ijepa", marks=pytest.mark.slow)])
def test_a_teacher_resumes_in_another_layout(method: str, tmp_path: Path) -> None:
    saved = run_on_ranks(3, _save, str(tmp_path), method)[0]
    with pytest.warns(UserWarning, match="no final weights yet"):
        trunk = vissl_zero.load_trunk(tmp_path, which="teacher").trunk
    for name, tensor in trunk.named_parameters():
        assert torch.equal(tensor, saved.state[f"teacher:trunk.{name}"].float())
    students = {name: saved.state[f"trunk.{name}"].float() for name, _ in trunk.named_parameters()}
    assert not all(torch.equal(tensor, students[name]) for name, tensor in trunk.named_parameters())
    for world_size, level in ((2, 1), (1, 0), (2, 3)):
        result = run_on_ranks(world_size, _resume, str(tmp_path), method, level, world_size)[0]
        result.losses = plain(method, "batch").losses[:2] + result.losses
        assert result.distance(plain(method, "batch")) < TOLERANCE, f"level {level}, {world_size} ranks"


@pytest.mark.timeout(200)
@pytest.mark.parametrize("method", ["deepcluster_v2", pytest.param("pirl", marks=pytest.mark.slow)])
def test_a_memory_resumes_in_another_layout(method: str, tmp_path: Path) -> None:
    """The checkpoint is of the end of the first epoch: the second one clusters what it holds."""
    run_on_ranks(3, _save, str(tmp_path), method)
    result = run_on_ranks(2, _resume, str(tmp_path), method, 1, 2)[0]
    result.losses = plain(method, "batch").losses[:2] + result.losses
    assert result.distance(plain(method, "batch")) < TOLERANCE


def _resume_with_fewer_images(folder: str, method: str) -> str:
    plan = make_method_plan(method, 0, 1, "batch", folder)
    plan.config.DATA.TRAIN.DATA_LIMIT = BATCH + 1
    run, _, _ = build_run(plan, torch.device("cpu"))
    with newest_checkpoint(folder) as checkpoint, pytest.raises(CheckpointError) as raised:
        restore(run, [], checkpoint)
    run.sharded.close()
    return str(raised.value)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("method", ["npid", "pirl", "deepcluster_v2"])
def test_a_memory_of_other_images_is_refused(method: str, tmp_path: Path) -> None:
    run_on_ranks(3, _save, str(tmp_path), method)
    message = run_on_ranks(1, _resume_with_fewer_images, str(tmp_path), method)[0]
    assert f"remembers each of {2 * BATCH} training images" in message
    assert f"there are {BATCH + 1} here. Train on the same images" in message


@pytest.mark.slow
def test_a_rank_holds_its_share_of_the_teacher_and_a_dry_run_says_so() -> None:
    held = {}
    for level in (0, 1, 3):
        plan = make_method_plan("moco_v3", level, 3, "batch")
        held[level] = run_on_ranks(3, _train, plan)[0].teacher_bytes
        assert dry_run(plan).forecast.memory.teacher == held[level]
    assert held[3] < 0.45 * held[0]  # a third, and what 5 and 7 rows over 3 ranks leave uneven


def _teacher_on_disk(plan: ResolvedRun) -> tuple[int, int]:
    """Bytes of the teacher in memory, and in the records of its files."""
    run, _, _ = build_run(plan, torch.device("cpu"))
    store = run.sharded._teacher._own_store  # type: ignore[attr-defined]
    found = run.sharded.ledger().teacher, sum(store.layout.sizes)
    run.sharded.close()
    return found


def test_a_teacher_rests_on_nvme_with_the_parameters_and_every_forecast_says_so(tmp_path: Path) -> None:
    def forecast(tier: OffloadPlan) -> tuple[ResolvedRun, DryRun]:
        plan = make_method_plan("moco_v3", 3, 2, "batch")
        plan = dataclasses.replace(plan, sharding=dataclasses.replace(plan.sharding, offload_params=tier))
        return plan, dry_run(plan)

    inside = forecast(OffloadPlan())[1]
    plan, outside = forecast(OffloadPlan("nvme", nvme_path=str(tmp_path)))
    in_memory, on_disk = run_on_ranks(2, _teacher_on_disk, plan)[0]
    memory, taught = outside.forecast.memory, outside.forecast.teacher_params
    assert memory.teacher == in_memory == outside.forecast.teacher_buffers > 0
    assert taught == on_disk == inside.forecast.memory.teacher - memory.teacher > 0
    assert outside.tiers["disk"] == memory.params + memory.grads + taught
    assert outside.tiers["device"] == inside.tiers["device"] - outside.tiers["disk"]
    assert inside.forecast.step and outside.forecast.step
    assert outside.forecast.step.disk_bytes == outside.tiers["disk"]
    # A unit that is gathered at the peak is all that the device has of the parameters.
    moved = inside.forecast.step.by_kind["teacher"] - outside.forecast.step.by_kind["teacher"]
    assert 0 < moved <= inside.forecast.memory.teacher
    said = next(line for line in dry_run_lines(outside) if line.startswith("  teacher"))
    assert said.endswith(f"{bytes_text(in_memory)}; {bytes_text(on_disk)} more stored on nvme")


def test_every_method_is_held() -> None:
    assert CASES.keys() == set(METHODS.builtin())
