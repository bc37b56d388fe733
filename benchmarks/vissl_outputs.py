"""Losses, heads, transforms, LARC, LARS, first weights and slices beside VISSL's own code, on the same numbers.

    python benchmarks/vissl_outputs.py <checkout of facebookresearch/vissl>
    python benchmarks/vissl_outputs.py <checkout> --match loss

VISSL's side is its own code, run from the checkout on one process of the CPU, with three changes for the numbers alone:
``.cuda()`` does nothing, ``.float()`` gives float64, and new tensors are float64, so that no difference is rounding.
What it imports and these parts never call has stand-ins. Every part that VISSL registers has a row: ``equal`` with the
greatest difference, ``different`` with the line of docs/configuration.md's table (``differs`` in
vissl/keys.yaml) or of docs/vissl.md that says so, or ``not here`` with the reason. Random numbers are the same
on both sides: seeds where both draw alike, given numbers where they draw from other generators.
The exit code is 1 if a difference has no such line.
"""

from __future__ import annotations

import argparse
import io
import math
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps
from torch import Tensor, nn

from vissl_zero.checkpoint.foreign_layouts import read_foreign
from vissl_zero.data.dataset import ImageBatch
from vissl_zero.data.pipeline import build_pipeline
from vissl_zero.methods.dino import Center, IBOTOutput, dino_loss, masked_patch_loss
from vissl_zero.methods.distillation import (
    IBOTDistillation,
    SwAVDistillation,
    dino_distillation_loss,
    distillation_loss,
)
from vissl_zero.methods.pretext import MemoryBank, info_nce_loss, nce_loss
from vissl_zero.methods.prototypes import deepcluster_loss, spherical_kmeans
from vissl_zero.methods.supervised import CrossEntropy
from vissl_zero.methods.swav import SwAVLoss, SwAVMomentumLoss, SwAVOutput
from vissl_zero.methods.two_views import KeyQueue, barlow_twins_loss, info_nce, nt_xent
from vissl_zero.models.init import initialize_
from vissl_zero.models.patches import PatchView, Tokens
from vissl_zero.optim.adaptation import Larc, Lars, TensorNorms, decay_absorbed
from vissl_zero.registry import HEADS, TRUNKS
from vissl_zero.vissl.keys import DIFFERENCES

TOLERANCE = 1e-10
# Standard deviations of first weights are drawn: so far apart may two be that are meant to be equal, relatively.
DRAWN_TOLERANCE = 0.04
Pairs = Iterator[tuple[Any, Any]]


@dataclass(frozen=True)
class Part:
    """One thing that VISSL has.

    Attributes:
        kind, name: loss, head, ...; as VISSL registers it.
        compare: yields pairs (ours, VISSL's); None where there is nothing to compare.
        said: where a difference is said: ``key: value`` of a row of DIFFERENCES, or a phrase of docs/vissl.md.
        why: why it is not here.
        tolerance: greatest difference of what is equal.
    """

    kind: str
    name: str
    compare: Callable[[], Pairs] | None = None
    said: str = ""
    why: str = ""
    tolerance: float = TOLERANCE


_PARTS: list[Part] = []


def part(kind: str, name: str, **keys: Any) -> Callable[[Callable[[], Pairs]], Callable[[], Pairs]]:
    """Decorator: one row of the table."""

    def note(compare: Callable[[], Pairs]) -> Callable[[], Pairs]:
        _PARTS.append(Part(kind, name, compare, **keys))
        return compare

    return note


def vissl(name: str) -> Any:
    """A module of VISSL's, imported from the checkout."""
    return import_module(f"vissl.{name}")


def use_checkout(checkout: Path) -> None:
    """Make ``vissl`` importable, with stand-ins for packages that these parts never call."""
    sys.path.insert(0, str(checkout))
    for name in ("pandas", "augly", "augly.image"):
        sys.modules.setdefault(name, _StandIn(name))
    resources = ModuleType("pkg_resources")
    resources.resource_filename = lambda package, path: str(checkout / package / path)  # type: ignore[attr-defined]
    sys.modules.setdefault("pkg_resources", resources)


class _StandIn(ModuleType):
    """A package that is imported and not called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


@contextmanager
def _exact() -> Iterator[None]:
    """VISSL's code in float64, on the CPU."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    patches = [
        mock.patch.object(Tensor, "cuda", lambda self, *_, **__: self),
        mock.patch.object(nn.Module, "cuda", lambda self, *_, **__: self),
        mock.patch.object(Tensor, "float", Tensor.double),
    ]
    try:
        for patch in patches:
            patch.start()
        yield
    finally:
        for patch in patches:
            patch.stop()
        torch.set_default_dtype(before)


def _keys(**keys: Any) -> Any:
    """Keys of a block, as VISSL's code reads them."""
    return vissl("config").AttrDict(keys)


def _drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _units(seed: int, *shape: int) -> Tensor:
    return F.normalize(_drawn(seed, *shape), dim=-1)


def _batch(size: int, crops: int) -> ImageBatch:
    ids = torch.arange(size)
    return ImageBatch(images=[], num_crops=[crops], targets=None, sample_ids=ids, num_global=size)


def _with_gradient(loss: Callable[[Tensor], Tensor], rows: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of rows, and its gradient."""
    leaf = rows.clone().requires_grad_()
    value = loss(leaf)
    (gradient,) = torch.autograd.grad(value, leaf)
    return value.detach(), gradient


# ---- losses


def _swav_keys(**keys: Any) -> dict[str, Any]:
    plain = {"temperature": 0.1, "epsilon": 0.05, "num_iters": 3, "crops_for_assign": [0, 1], "num_crops": 4}
    plain |= {"use_double_precision": True, "num_prototypes": [7, 5], "embedding_dim": 4}
    return {**plain, "temp_hard_assignment_iters": 0, **keys}


def _swav(powerlaw: float = 0.0, hard: int = 0, queue: int = 0, steps: int = 1) -> Pairs:
    keys = _swav_keys(temp_hard_assignment_iters=hard, shk_powerlaw=powerlaw)
    prototypes = [_units(8, 7, 4), _units(9, 5, 4)]
    theirs = vissl("losses.swav_loss").SwAVLoss(
        _keys(**keys, output_dir=".", queue=_keys(start_iter=0, local_queue_length=queue, queue_length=queue))
    )
    ours = SwAVLoss(**keys, queue={"queue_length": queue}).double()
    if queue:  # VISSL's begins with random rows, ours empty: both are given the same
        first = _units(1, 2, queue, 4)
        theirs.swav_criterion.local_emb_queue.copy_(first)
        ours.queue.embeddings.copy_(first)
        ours.queue.num_filled = queue
    head = SimpleNamespace(
        nmb_heads=2, **{f"prototypes{i}": lambda rows, p=p: rows @ p.T for i, p in enumerate(prototypes)}
    )
    for step in range(steps):
        rows = _units(step + 2, 24, 4)
        ours.on_step(step, 0)

        def their(rows: Tensor) -> Tensor:
            if queue:
                theirs.swav_criterion.compute_queue_scores(head)
            found: Tensor = theirs([rows, *(rows @ p.T for p in prototypes)], None)
            return found

        def our(rows: Tensor) -> Tensor:
            probe = ours.probe()
            probe_scores = None if probe is None else [probe @ p.T for p in prototypes]
            output = SwAVOutput(rows, [rows @ p.T for p in prototypes], probe_scores)
            found: Tensor = ours([output], _batch(6, 4))
            ours.update_state([ours.observe([output], _batch(6, 4))])
            return found.sum()

        yield from zip(_with_gradient(our, rows), _with_gradient(lambda r: their(r).sum(), rows), strict=True)


@part("loss", "swav_loss")
def _swav_loss() -> Pairs:
    yield from _swav()
    yield from _swav(hard=2)
    yield from _swav(powerlaw=0.5)
    yield from _swav(queue=12, steps=3)


@part("loss", "swav_momentum_loss")
def _swav_momentum() -> Pairs:
    keys = _swav_keys()
    prototypes = [_units(8, 7, 4), _units(9, 5, 4)]
    queue = _keys(start_iter=0, local_queue_length=0, queue_length=0)
    theirs = vissl("losses.swav_momentum_loss").SwAVMomentumLoss(_keys(**keys, queue=queue))
    ours = SwAVMomentumLoss(**keys).double()
    taught = _units(3, 12, 4)
    theirs.momentum_scores = [taught @ p.T for p in prototypes]
    given = SwAVOutput(taught, [taught @ p.T for p in prototypes], None)

    def our(rows: Tensor) -> Tensor:
        found: Tensor = ours([SwAVOutput(rows, [rows @ p.T for p in prototypes], None)], _batch(6, 4), [given])
        return found

    def their(rows: Tensor) -> Tensor:
        found: Tensor = theirs([rows, *(rows @ p.T for p in prototypes)])
        return found

    yield from zip(_with_gradient(our, _units(2, 24, 4)), _with_gradient(their, _units(2, 24, 4)), strict=True)


@part("loss", "swav_distillation_loss")
def _swav_distillation() -> Pairs:
    for two, swapped, own in ((False, False, True), (True, True, True), (True, False, False)):
        keys = {"num_crops": 5, "num_prototypes": [7], "temperature": 0.1, "epsilon": 0.05, "num_iters": 3}
        keys |= {"use_double_precision": True, "temp_hard_assignment_iters": 0, "swapped_assignment": swapped}
        keys |= {"use_teacher_prototypes": not own, "use_student_prototypes": own, "use_two_crops_for_teacher": two}
        theirs = vissl("losses.swav_distillation_loss").SwAVDistillationLoss(
            _keys(**keys, output_dir=".", local_queue_length=0)
        )
        ours = SwAVDistillation(**keys, embedding_dim=4, queue_length=0).double()  # type: ignore[arg-type]
        ours.prototypes.copy_(_units(8, 7, 4))
        taught = _units(3, 12 if two else 6, 4)
        theirs.teacher_prototypes, theirs.teacher_prototypes_scores = ours.prototypes, taught @ ours.prototypes.T
        given = SwAVOutput(taught, [taught @ ours.prototypes.T], None)
        rows = _drawn(2, 30, 7 if own else 4)

        def our(rows: Tensor) -> Tensor:
            found: Tensor = ours([rows], _batch(6, 5), [given])  # noqa: B023 - called at once
            return found

        yield from zip(_with_gradient(our, rows), _with_gradient(lambda r: theirs(r, None), rows), strict=True)  # noqa: B023


def _simclr(name: str, cls: str, crops: int) -> Pairs:
    size = 12 if name == "simclr_info_nce_loss" else 6  # of several crops, VISSL counts the images
    buffer = _keys(world_size=1, embedding_dim=5, effective_batch_size=size)
    keys = _keys(temperature=0.2, buffer_params=buffer, num_crops=crops)
    theirs = getattr(vissl(f"losses.{name}"), cls)(keys)
    rows = _drawn(3, 6 * crops, 5)
    ours = _with_gradient(lambda r: nt_xent(r.unflatten(0, (crops, 6)), 0.2), rows)
    yield from zip(ours, _with_gradient(lambda r: theirs(r, None), rows), strict=True)


@part("loss", "simclr_info_nce_loss")
def _simclr_loss() -> Pairs:
    yield from _simclr("simclr_info_nce_loss", "SimclrInfoNCELoss", 2)


@part("loss", "multicrop_simclr_info_nce_loss")
def _multicrop_simclr() -> Pairs:
    for crops in (2, 4):
        yield from _simclr("multicrop_simclr_info_nce_loss", "MultiCropSimclrInfoNCELoss", crops)


@part("loss", "moco_loss")
def _moco() -> Pairs:
    module = vissl("losses.moco_loss")
    theirs = module.MoCoLoss(module.MoCoLossConfig(embedding_dim=5, queue_size=12, momentum=0.9, temperature=0.2))
    ours = KeyQueue(12, 5).double()
    theirs.queue = ours.keys.T.clone()
    for step in range(3):
        keys, rows = _drawn(step + 5, 6, 5), _drawn(step, 6, 5)
        own = _with_gradient(lambda r: info_nce(r, keys, ours.keys, 0.2), rows)  # noqa: B023
        theirs.key = F.normalize(keys, dim=1)
        yield from zip(own, _with_gradient(theirs, rows), strict=True)
        ours.push(keys)
        yield ours.keys.T, theirs.queue


def _barlow_twins(rows: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    theirs = vissl("losses.barlow_twins_loss").BarlowTwinsLoss(_keys(lambda_=0.0051, scale_loss=0.024, embedding_dim=5))
    ours = _with_gradient(lambda r: barlow_twins_loss(r[:6], r[6:], 0.0051, 0.024), rows)
    return ours, _with_gradient(lambda r: theirs(r, None), rows)


@part("loss", "barlow_twins_loss, of views with the same mean and variance")
def _barlow_twins_alike() -> Pairs:
    rows = _drawn(3, 6, 5)
    ours, theirs = _barlow_twins(torch.cat((rows, rows.flip(0))))
    yield ours[0], theirs[0]


@part("loss", "barlow_twins_loss", said="LOSS.name: barlow_twins_loss")
def _barlow_twins_loss() -> Pairs:
    yield from zip(*_barlow_twins(_drawn(3, 12, 5)), strict=True)


@part("loss", "dino_loss")
def _dino() -> Pairs:
    keys = _keys(
        momentum=0.996, student_temp=0.1, teacher_temp_min=0.04, teacher_temp_max=0.07, teacher_temp_warmup_iters=0,
        crops_for_teacher=[0, 1], ema_center=0.9, output_dim=8, num_crops=4, normalize_last_layer=True,
    )  # fmt: skip
    theirs, center = vissl("losses.dino_loss").DINOLoss(keys), Center(8, 0.9).double()
    for step in range(2):
        rows, taught = _drawn(step, 24, 8), _drawn(step + 5, 2, 6, 8)
        theirs.teacher_output, theirs.teacher_temp = taught.flatten(0, 1), 0.05
        targets = center.targets(taught, 0.05)
        ours = _with_gradient(lambda r: dino_loss(r.unflatten(0, (4, 6)), targets, student_temperature=0.1), rows)  # noqa: B023
        yield from zip(ours, _with_gradient(lambda r: theirs([r]), rows), strict=True)
        center.update(taught)
        yield center.mean, theirs.center[0]


def _patches() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Student's and teacher's scores of 2 large crops of 3 images and of their 4 patches, and which are masked."""
    shapes = [(9, 7), (6, 4, 7), (6, 7), (6, 4, 7)]
    student, patches, teacher, seen = (_drawn(seed, *shape) for seed, shape in enumerate(shapes, start=1))
    return student, patches, teacher, seen, _drawn(5, 6, 2, 2) > 0


@part("loss", "ibot_loss and the center of crops")
def _ibot_loss() -> Pairs:
    yield from list(_ibot())[:3]


@part("loss", "ibot_loss, the center of patches", said="LOSS.name: ibot_loss")
def _ibot_center() -> Pairs:
    yield list(_ibot())[3]


def _ibot() -> Pairs:
    student, patches, teacher, seen, masked = _patches()
    keys = _keys(
        out_dim=7, patch_out_dim=7, num_global_crops=2, num_local_crops=1, warmup_teacher_temp=0.05, teacher_temp=0.05,
        warmup_teacher_patch_temp=0.06, teacher_patch_temp=0.06, warmup_teacher_temp_epochs=0, num_epochs=1,
        student_temp=0.1, center_momentum=0.9, center_momentum2=0.9, lambda1=1.0, lambda2=0.5, mim_start_epoch=0,
        teacher_momentum=0.99,
    )  # fmt: skip
    theirs = vissl("losses.ibot_loss").IBOTLoss(keys)
    theirs.teacher_output = [teacher, seen]
    crops, of_patches = Center(7, 0.9).double(), Center(7, 0.9).double()

    def our(rows: Tensor) -> Tensor:
        first = dino_loss(rows.view(3, 3, 7), crops.targets(teacher.view(2, 3, 7), 0.05), student_temperature=0.1)
        return first + 0.5 * masked_patch_loss(
            patches, of_patches.targets(seen, 0.06), masked.flatten(1), student_temperature=0.1
        )

    def their(rows: Tensor) -> Tensor:
        found: Tensor = theirs([[rows[:6], patches], [rows[6:]]], masked)["loss"]
        return found

    yield from zip(_with_gradient(our, student), _with_gradient(their, student), strict=True)
    crops.update(teacher)
    yield crops.mean, theirs.criterion.center[0]
    of_patches.update(seen, masked.flatten(1))
    yield of_patches.mean, theirs.criterion.center2[0, 0]


@part("loss", "ibot_distillation_loss")
def _ibot_distillation() -> Pairs:
    student, patches, teacher, seen, masked = _patches()
    for swapped in (False, True):
        keys = _keys(
            swapped_assignment=swapped, use_teacher_prototypes=False, num_global_crops=2, student_num_crops=3,
            student_temp=0.1, teacher_temp=0.05, teacher_patch_temp=0.06, lambda1=1.0, lambda2=0.5,
        )  # fmt: skip
        theirs = vissl("losses.ibot_distillation_loss").IBOTDistillationLoss(keys)
        theirs.teacher_scores = [teacher, seen]
        ours = IBOTDistillation(3, 2, 0.1, 0.05, 0.06, lambda2=0.5, swapped_assignment=swapped)
        batch = ImageBatch(images=[], num_crops=[2, 1], targets=None, sample_ids=torch.arange(3), num_global=3)
        output = IBOTOutput(student, student, student, patches, masked.flatten(1))
        taught = IBOTOutput(teacher, teacher, teacher, seen, None)
        yield ours([output], batch, [taught]), theirs([[student[:6], patches], [student[6:]]], masked)


@part("loss", "dino_distillation_loss")
def _dino_distillation() -> Pairs:
    for swapped in (False, True):
        keys = _keys(
            student_num_crops=5, teacher_num_crops=2, student_temperature=0.1, teacher_temperature=0.07,
            swapped_assignment=swapped,
        )  # fmt: skip
        theirs = vissl("losses.dino_distillation_loss").DINODistillationLoss(keys)
        rows, taught = _drawn(0, 15, 6), _drawn(1, 2, 3, 6)
        theirs.teacher_scores = taught.flatten(0, 1)
        targets = F.softmax(taught / 0.07, dim=2)
        ours = _with_gradient(
            lambda r: dino_distillation_loss(r.view(5, 3, 6), targets, 0.1, swapped),  # noqa: B023
            rows,
        )
        yield from zip(ours, _with_gradient(lambda r: theirs(r, None), rows), strict=True)  # noqa: B023


@part("loss", "msn_distillation_loss")
def _msn_distillation() -> Pairs:
    keys = _keys(swapped_assignment=True, student_temperature=0.1, student_num_crops=5, teacher_num_crops=2)
    theirs = vissl("losses.msn_distillation_loss").MSNDistillationLoss(keys)
    rows, targets = _drawn(0, 15, 6), F.softmax(_drawn(1, 2, 3, 6) / 0.025, dim=2)
    theirs.teacher_probs = targets.flatten(0, 1)
    yield dino_distillation_loss(rows.view(5, 3, 6), targets, 0.1, True), theirs([rows])


@part("loss", "distillation_loss")
def _distillation() -> Pairs:
    module = vissl("losses.distillation_loss")
    rows, taught = _drawn(0, 6, 5), _drawn(1, 6, 5)
    for kind in ("kl_divergence", "cross_entropy", "mse"):
        theirs = module.DistillationLoss(soft_target_alpha=1.0, temperature=3.0, loss_type=kind)
        theirs.teacher_logits = taught
        ours = _with_gradient(lambda r: distillation_loss(r, taught, 3.0, kind), rows)  # noqa: B023
        yield from zip(ours, _with_gradient(lambda r: theirs(r, None), rows), strict=True)  # noqa: B023


@part("loss", "nce_loss_with_memory")
def _nce() -> Pairs:
    rows, labels = _drawn(1, 6, 5), torch.tensor([3, 17, 0, 8, 11, 5])
    negatives = torch.arange(24).view(6, 4) * 7 % 20
    for kind in ("nce", "cross_entropy"):
        memory = _keys(memory_size=20, embedding_dim=5, momentum=0.5, norm_init=True, update_mem_on_forward=True)
        sampling = _keys(num_negatives=4, type="random")
        theirs = vissl("losses.nce_loss").NCELossWithMemory(
            _keys(
                memory_params=memory, negative_sampling_params=sampling, num_train_samples=20, loss_type=kind,
                temperature=0.07, norm_constant=-1, norm_embedding=True, loss_weights=[1.0],
                update_mem_with_emb_index=-100,
            )
        )  # fmt: skip
        bank = MemoryBank(20, 5, momentum=0.5).double()
        theirs.nce_average.memory = bank.memory.clone()
        chosen = torch.cat((labels[:, None], negatives), dim=1)
        theirs.nce_average.do_negative_sampling = lambda *_, **__: chosen  # noqa: B023
        similar = bank.similarities(rows, labels, negatives)
        if kind == "nce":
            yield nce_loss(similar, bank, 0.07), theirs(rows, labels)
        else:
            yield info_nce_loss(similar, 0.07), theirs(rows, labels)
        bank.update(rows, labels)
        yield bank.memory, theirs.nce_average.memory


@part("loss", "deepclusterv2_loss")
def _deepcluster() -> Pairs:
    keys = _keys(
        num_train_samples=20, DROP_LAST=False, BATCHSIZE_PER_REPLICA=20, num_clusters=[4, 3], num_crops=2,
        temperature=0.1, kmeans_iters=5, memory_params=_keys(embedding_dim=5, crops_for_mb=[0]),
    )  # fmt: skip
    theirs, rows = vissl("losses.deepclusterv2_loss").DeepClusterV2Loss(keys), _units(26, 20, 5)
    theirs.local_memory_embeddings = rows[None].clone()
    theirs.local_memory_index = torch.arange(20)
    with mock.patch.object(torch, "randperm", lambda count: torch.arange(20)), mock.patch("torch.empty", torch.zeros):
        theirs.cluster_memory()
    found = [spherical_kmeans(rows, rows[:count], 5) for count in (4, 3)]
    for index, (centroids, clusters) in enumerate(found):
        yield centroids, getattr(theirs, f"centroids{index}")
        yield clusters, theirs.assignments[index]
    ids, crops = torch.tensor([3, 17, 0, 8, 11, 5]), _drawn(4, 12, 5)
    theirs.update_memory_bank = lambda *_: None
    assignments = torch.stack([clusters[ids] for _, clusters in found])
    ours = _with_gradient(
        lambda r: deepcluster_loss(
            r.view(2, 6, 5), [centroids for centroids, _ in found], assignments, temperature=0.1
        ),
        crops,
    )
    yield from zip(ours, _with_gradient(lambda r: theirs(r, ids.repeat(2)), crops), strict=True)


@part("loss", "cross_entropy_multiple_output_single_target")
def _cross_entropy() -> Pairs:
    labels, logits = torch.tensor([0, 3, -1, 4, 2, 2]), [_drawn(0, 6, 5), _drawn(1, 6, 5)]
    cls = vissl("losses.cross_entropy_multiple_output_single_target").CrossEntropyMultipleOutputSingleTargetLoss
    batch = ImageBatch(images=[], num_crops=[1], targets=labels, sample_ids=torch.arange(6), num_global=6)
    weight = [0.5, 1.0, 2.0, 1.0, 3.0]
    for keys in ({}, {"temperature": 0.5}, {"normalize_output": True}, {"weight": weight}):
        theirs = dict({"temperature": 1.0, "ignore_index": -1}, **keys)
        if "weight" in keys:
            theirs["weight"] = torch.tensor(weight)
        ours = CrossEntropy(**keys).double()  # type: ignore[arg-type]
        yield ours(logits, batch), cls(_keys(**theirs))(logits, labels)


_PARTS.append(
    Part("loss", "msn_loss", None, said="LOSS.name: msn_loss", why="VISSL's is a placeholder whose value is always 0")
)
_PARTS.append(
    Part(
        "loss",
        "bce_logits_multiple_output_single_target",
        why="several labels an image: refused, one recipe (openimages)",
    )
)


# ---- heads: the same numbers under the same names


def _filled(module: nn.Module) -> dict[str, Tensor]:
    """Every parameter and running statistic drawn by its place among the names."""
    drawn = {}
    for seed, (name, tensor) in enumerate(sorted(module.state_dict().items())):
        values = _drawn(seed, *tensor.shape) if tensor.is_floating_point() else tensor
        drawn[name] = values.abs() + 0.1 if "running_var" in name or "weight_g" in name else values
    return drawn


def _head(name: str, theirs: str, keys: dict[str, Any], ours: dict[str, Any] | None = None) -> tuple[Any, Any]:
    """Both heads, in float64 and with the same tensors."""
    head = _keys(BATCHNORM_EPS=1e-5, BATCHNORM_MOMENTUM=0.1, PARAMS_MULTIPLIER=1.0)
    module = vissl("models.heads").get_model_head(theirs)(_keys(HEAD=head), **keys).double()
    own = HEADS.get(name).build(**(keys if ours is None else ours)).double()
    values = _filled(own)
    own.load_state_dict(values)
    module.load_state_dict(values)
    return own, module


def _both(own: nn.Module, module: nn.Module, rows: Tensor, of: Callable[[Any], Any] = lambda out: out) -> Pairs:
    """Outputs in training, statistics after it, and outputs in evaluation."""
    for is_training in (True, False):
        given, wanted = of(own.train(is_training)(rows)), module.train(is_training)(rows)
        yield from zip(*(out if isinstance(out, (list, tuple)) else [out] for out in (given, wanted)), strict=True)
        state = module.state_dict()
        yield from ((tensor, state[name]) for name, tensor in own.state_dict().items())


@part("head", "mlp")
def _mlp() -> Pairs:
    for keys in ({}, {"use_bn": True, "use_relu": True}, {"use_relu": True, "skip_last_layer_relu_bn": False}):
        yield from _both(*_head("mlp", "mlp", {"dims": [6, 5, 4], **keys}), _drawn(9, 8, 6))


@part("head", "eval_mlp")
def _eval_mlp() -> Pairs:
    for rows in (_drawn(9, 8, 6, 2, 2), _drawn(9, 8, 6)):
        dims = [rows[0].numel(), 4]
        yield from _both(*_head("eval_mlp", "eval_mlp", {"in_channels": 6, "dims": dims}), rows)


@part("head", "swav_head")
def _swav_head() -> Pairs:
    plain = {"dims": [6, 5, 4], "use_bn": True, "num_clusters": [7, 3]}
    for keys in (
        {},
        {"activation_name": "GELU", "use_bias": False},
        {"skip_last_bn": False, "normalize_feats": False},
        {"use_weight_norm_prototypes": True, "normalize_last_layer": True},
    ):
        yield from _both(
            *_head("swav_head", "swav_head", {**plain, **keys}),
            _drawn(9, 8, 6),
            lambda out: [out.embeddings, *out.scores],
        )


@part("head", "dino_head")
def _dino_head() -> Pairs:
    for keys in ({}, {"use_bn": True, "normalize_last_layer": False}, {"num_layers": 1}):
        sizes = {"in_dim": 6, "num_clusters": [7], "hidden_dim": 5, "bottleneck_dim": 4, **keys}
        yield from _both(*_head("dino_head", "dino_head", sizes), _drawn(9, 8, 6), lambda out: out.scores)


@part("head", "ibot_head")
def _ibot_head() -> Pairs:
    for shared in (False, True):
        sizes = {"in_dim": 6, "out_dim": 7, "hidden_dim": 5, "bottleneck_dim": 4, "shared_head": shared}
        sizes |= {"patch_out_dim": 7 if shared else 3}
        own = HEADS.get("ibot_dino_head").build(**sizes).double()
        module = vissl("models.heads").get_model_head("ibot_head")(_keys(), **sizes).double()
        values = _filled(own)
        own.load_state_dict(values)
        module.load_state_dict(values, strict=False)  # VISSL names shared prototypes twice
        tokens = _drawn(9, 4, 5, 6)
        output = own(tokens[:, 0], [Tokens(tokens, 1, (2, 2), PatchView())])
        yield from zip((output.scores, output.patch_scores), module(tokens), strict=True)


@part("head", "msn_head")
def _msn_head() -> Pairs:
    for use_bn in (False, True):
        sizes = {"in_dim": 6, "num_prototypes": 7, "hidden_dim": 5, "output_dim": 4, "use_bn": use_bn}
        own, module = _head("msn_head", "msn_head", sizes)
        yield from _both(own, module, _drawn(9, 8, 6), lambda out: F.softmax(out.scores[0] / 0.1, dim=1))


@part("head", "siamese_concat_view", said="siamese_concat_view")
def _siamese() -> Pairs:
    own, module = _head("siamese_concat_view", "siamese_concat_view", {"num_towers": 3})
    rows = _drawn(9, 4, 3, 6)  # VISSL's rows come image by image, ours tile by tile
    yield own(rows.transpose(0, 1).flatten(0, 1)), module(rows.flatten(0, 1))


@part("head", "vision_transformer_head")
def _vision_transformer_head() -> Pairs:
    for hidden in (None, 5):
        sizes = {"in_plane": 6, "num_classes": 4, "hidden_dim": hidden}
        yield from _both(*_head("vision_transformer_head", "vision_transformer_head", sizes), _drawn(9, 8, 6))


@part("head", "mobilenet_v3_head")
def _mobilenet_head() -> Pairs:
    yield from _mobilenet("mobilenet_v3_head")


@part("head", "mobilenet_v3_head_timm")
def _mobilenet_head_timm() -> Pairs:
    yield from _mobilenet("mobilenet_v3_head_timm")


def _mobilenet(name: str) -> Pairs:
    sizes = {"in_channels": 6, "mid_channels": 5, "num_classes": 4, "drop_out": 0.0}
    own, module = _head_by_order(name, sizes)
    rows = _drawn(9, 8, 6)
    yield own.eval()(rows), module.eval()(rows[:, :, None, None] if name.endswith("timm") else rows)


def _head_by_order(name: str, sizes: dict[str, Any]) -> tuple[nn.Module, nn.Module]:
    """As ``_head`` where VISSL's names are others: tensors in their order."""
    own = HEADS.get(name).build(**sizes).double()
    module = vissl("models.heads").get_model_head(name)(_keys(), **sizes).double()
    values = [_drawn(seed, *tensor.shape) for seed, tensor in enumerate(own.state_dict().values())]
    for one in (own, module):
        one.load_state_dict(
            {key: value.view(old.shape) for (key, old), value in zip(one.state_dict().items(), values, strict=True)}
        )
    return own, module


@part("head", "identity")
def _identity() -> Pairs:
    own, module = _head("identity", "identity", {})
    yield own(_drawn(0, 4, 3)), module(_drawn(0, 4, 3))


for _name, _why in {
    "mlp_res": "no recipe names it",
    "eval_mlp_pooled": "refused; one part names it (test/integration_test/models/deit_tiny_blocks)",
    "ibot_distillation_head": "refused; two students of debugging/pretrain/swav_distillation name it",
    "mlp_fsdp": "mlp: every level trains the one class",
    "eval_mlp_fsdp": "eval_mlp: every level trains the one class",
    "swav_head_fsdp": "swav_head: every level trains the one class",
    "dino_head_fsdp": "dino_head: every level trains the one class",
}.items():
    _PARTS.append(Part("head", _name, why=_why))


# ---- transforms


def _picture(width: int = 40, height: int = 32) -> Image.Image:
    values = np.indices((height, width)).sum(0)[:, :, None] * np.array([3, 5, 2]) + np.arange(3) * 40
    return Image.fromarray((values % 256).astype(np.uint8))


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def _arrays(made: Any) -> list[np.ndarray[Any, Any]]:
    return [np.asarray(one) for one in (made if isinstance(made, list) else [made])]


def _transforms(name: str, images: int = 24, given: Any = None, patched: Any = None, **keys: Any) -> Pairs:
    """Both transforms on the same image, with the same seeds."""
    vissl("data.ssl_transforms")
    from classy_vision.dataset.transforms import build_transform

    theirs = build_transform({"name": name, **keys})
    entry = {"name": name, **keys}
    (ours,) = build_pipeline([entry], "here").transforms
    for seed in range(images):
        image = _picture() if given is None else given
        with patched() if patched else mock.patch("sys.path", sys.path):
            _seed(seed)
            own = ours(image)
            _seed(seed)
            their = theirs(image)
        yield from zip(_arrays(own), _arrays(their), strict=True)


@contextmanager
def _one_stream() -> Iterator[None]:
    """What one side draws from ``random`` and the other from numpy or torch comes from one list of uniform numbers."""
    state = SimpleNamespace(generator=random.Random(0))

    def uniform() -> float:
        return state.generator.random()

    def begin(seed: int) -> None:
        state.generator = random.Random(seed)

    def whole(low: int, high: int) -> int:  # both ends count
        return low + int(uniform() * (high - low + 1))

    replaced = {
        "random.seed": begin,
        "random.random": uniform,
        "random.uniform": lambda low, high: low + (high - low) * uniform(),
        "random.randint": whole,
        "numpy.random.rand": uniform,
        "numpy.random.uniform": lambda low, high: low + (high - low) * uniform(),
        "numpy.random.randint": lambda low, high: whole(low, high - 1),
        "torch.rand": lambda *_: torch.tensor([uniform()]),
    }
    patches = [mock.patch(name, function) for name, function in replaced.items()]
    try:
        for patch in patches:
            patch.start()
        yield
    finally:
        for patch in patches:
            patch.stop()


@part("transform", "ImgPilGaussianBlur")
def _blur() -> Pairs:
    yield from _transforms("ImgPilGaussianBlur", patched=_one_stream, p=0.5, radius_min=0.1, radius_max=2.0)


@part("transform", "ImgPilRandomSolarize")
def _solarize() -> Pairs:
    yield from _transforms("ImgPilRandomSolarize", patched=_one_stream, p=0.7)


@part("transform", "ImgPilRandomPhotometric")
def _photometric() -> Pairs:
    yield from _transforms("ImgPilRandomPhotometric", patched=_one_stream, p=0.7)


@part("transform", "ImgPilColorDistortion with strength")
def _distortion() -> Pairs:
    yield from _transforms("ImgPilColorDistortion", strength=0.5)


@part("transform", "ImgPilColorDistortion with brightness", said="they count; VISSL reads `strength` alone")
def _distortion_of_brightness() -> Pairs:
    yield from _transforms("ImgPilColorDistortion", strength=1.0, brightness=0.2)


@part("transform", "ImgPilToMultiCrop")
def _multi_crop() -> Pairs:
    keys = {"total_num_crops": 5, "num_crops": [2, 3], "size_crops": [24, 12], "crop_scales": [[0.14, 1], [0.05, 0.14]]}
    yield from _transforms("ImgPilToMultiCrop", **keys)


@part("transform", "ImgPilMultiCropRandomApply")
def _multi_crop_apply() -> Pairs:
    inner = [{"name": "ImgPilGaussianBlur", "p": 1.0, "radius_min": 0.1, "radius_max": 2.0}]
    crops = [_picture(), _picture(20, 20)]
    yield from _transforms(
        "ImgPilMultiCropRandomApply", patched=_one_stream, given=crops, transforms=inner, prob=[0.9, 0.4]
    )


@part("transform", "ImgReplicatePil")
def _replicate() -> Pairs:
    yield from _transforms("ImgReplicatePil", images=1, num_times=3)


@part("transform", "ImgPilToRawTensor")
def _raw_tensor() -> Pairs:
    yield from _transforms("ImgPilToRawTensor", images=1)


@part("transform", "MNISTImgPil2RGB")
def _mnist() -> Pairs:
    gray = _picture().convert("L")
    yield from _transforms("MNISTImgPil2RGB", images=1, given=gray)
    yield from _transforms("MNISTImgPil2RGB", images=1, given=gray, size=48, box=[1, 2])


@contextmanager
def _lenient_pillow() -> Iterator[None]:
    """Pillow's posterize of 0 bits, black, which new versions refuse: VISSL's code ends there."""
    posterize = ImageOps.posterize

    def lenient(image: Image.Image, bits: int) -> Image.Image:
        return posterize(image, bits) if bits >= 1 else image.point([0] * 768)

    with mock.patch.object(ImageOps, "posterize", lenient):
        yield


@part("transform", "RandAugment")
def _rand_augment() -> Pairs:
    for keys in (
        {"magnitude": 9, "magnitude_std": 0.5, "increasing_severity": True},
        {"magnitude": 5, "weight_choice": 0},
        {"magnitude": 7, "num_layers": 3},
    ):
        yield from _transforms("RandAugment", images=60, patched=_lenient_pillow, **keys)


@part("transform", "ImgPatchesFromTensor")
def _tiles() -> Pairs:
    from classy_vision.dataset.transforms import build_transform

    vissl("data.ssl_transforms")
    keys = {"name": "ImgPatchesFromTensor", "num_patches": 9, "patch_jitter": 5}
    image = torch.arange(2 * 45 * 45.0).view(2, 45, 45)
    for seed in range(8):
        offsets = np.random.RandomState(seed).randint(0, 5, (2, 3, 3))
        in_order = iter([int(offsets[axis, i, j]) for i in range(3) for j in range(3) for axis in (0, 1)])
        with mock.patch("random.randrange", lambda limit, next_of=in_order: next(next_of)):
            (ours,) = build_pipeline([keys], "here").transforms
            own = ours(image)
        with mock.patch("numpy.random.randint", lambda *_, at=offsets: at):
            their = build_transform(keys)(image)
        yield from zip(_arrays(own), _arrays(their), strict=True)


@part("transform", "ImgPilToPatchesAndImage")
def _tiles_and_image() -> Pairs:
    from classy_vision.dataset.transforms import build_transform

    vissl("data.ssl_transforms")
    keys = {"name": "ImgPilToPatchesAndImage", "crop_size_image": 24, "crop_size_patches": 90}
    zeros = np.zeros((2, 3, 3), dtype=int)
    (ours,) = build_pipeline([keys], "here").transforms
    for seed in range(8):
        order = np.random.RandomState(seed).permutation(9)

        def shuffle(boxes: list[Any], order: Any = order) -> None:
            boxes[:] = [boxes[index] for index in order]

        with mock.patch("random.randrange", lambda _: 0), mock.patch("random.shuffle", shuffle):
            torch.manual_seed(seed)
            own = ours(_picture())
        with (
            mock.patch("numpy.random.randint", lambda *_: zeros),
            mock.patch("numpy.random.permutation", lambda _, order=order: order),
        ):
            torch.manual_seed(seed)
            their = build_transform(keys)(_picture())
        yield from zip(_arrays(own), _arrays(their), strict=True)


@part("transform", "ImgPil2LabTensor", said="values may be off by one step of 8 bits")
def _lab() -> Pairs:
    try:
        import_module("cv2")
    except ImportError:
        return
    yield from _transforms("ImgPil2LabTensor", images=1)


for _name, _why in {
    "ImgRotatePil": "rotnet_loss turns the images (docs/vissl.md)",
    "ShuffleImgPatches": "jigsaw_loss shuffles the tiles (docs/vissl.md)",
    "MaskedImageModeling": "ibot_loss masks the patches (docs/vissl.md)",
    "ImgPilRandomColorJitter": "no recipe names it",
    "ImgPilResizeLargerSide": "IMG_RETRIEVAL resizes the images itself, tests/unit/evaluation/test_retrieval.py",
    "ImgToTensor": "no recipe names it; ToTensor",
    "OneHotEncode": "several labels an image: refused; parts of benchmark/robustness_out_of_distribution name it",
    "VisslAutoAugment": "no recipe names it",
    "SSLTransformsWrapper": "applies a transform to every crop, as the pipeline does",
}.items():
    _PARTS.append(Part("transform", _name, why=_why))


# ---- optimizers


def _layers() -> list[tuple[Tensor, Tensor]]:
    """Parameters and gradients of very different norms, among them zeros."""
    scales = [(1.0, 1.0), (0.1, 1.0), (0.0, 1.0), (1.0, 0.0), (1.0, 1e-6), (1e-2, 1e3)]
    shapes = [(4, 3), (5,), (3,), (2, 2), (6,), (3, 3)]
    return [
        (_drawn(seed, *shape) * of_param, _drawn(seed + 50, *shape) * of_grad)
        for seed, (shape, (of_param, of_grad)) in enumerate(zip(shapes, scales, strict=True))
    ]


def _stepped(optimizer: Any, params: Sequence[nn.Parameter], change: Callable[[int], None]) -> list[Tensor]:
    for step in range(3):
        for param, (_, grad) in zip(params, _layers(), strict=True):
            param.grad = grad * (step + 1)
        change(step)
        optimizer.step()
    return [param.detach() for param in params]


def _adapted(adaptation: Any, lr: float, decay: float, momentum: float) -> list[Tensor]:
    """Ours, as ``update/stepper.py`` runs it: coefficients from the norms, then the base optimizer without decay."""
    params = [nn.Parameter(param.clone()) for param, _ in _layers()]
    optimizer = torch.optim.SGD(params, lr=lr, momentum=momentum, weight_decay=decay)
    count = len(params)

    def change(_: int) -> None:
        grads = [param.grad for param in params]
        rows = [
            torch.stack((p.detach().square().sum(), g.square().sum(), (p.detach() * g).sum()))
            for p, g in zip(params, grads, strict=True)
        ]
        norms = TensorNorms(*torch.stack(rows, dim=1))
        dims = torch.tensor([param.ndim for param in params])
        scale, absorbed = adaptation.coefficients(norms, torch.full((count,), lr), torch.full((count,), decay), dims)
        for param, grad, s, d in zip(params, grads, scale, absorbed, strict=True):
            param.grad = s * (grad + d * param.detach())

    with decay_absorbed(optimizer):
        return _stepped(optimizer, params, change)


@part("optimizer", "sgd_fsdp with LARC (and apex's, whose formula it has)")
def _larc() -> Pairs:
    cls = vissl("optimizers.larc_fsdp").LARC_FSDP
    for clip in (True, False):
        for decay in (0.0, 0.01):
            params = [nn.Parameter(param.clone()) for param, _ in _layers()]
            plain = torch.optim.SGD(params, lr=0.3, momentum=0.9, weight_decay=decay)
            theirs = cls(plain, distributed_norm=True, trust_coefficient=0.02, clip=clip, eps=1e-8)
            with mock.patch("vissl.optimizers.larc_fsdp.get_global_group", lambda: None):
                wanted = _stepped(theirs, params, lambda _: None)
            yield from zip(_adapted(Larc(0.02, clip, 1e-8), 0.3, decay, 0.9), wanted, strict=True)


@part("optimizer", "lars")
def _lars() -> Pairs:
    yield from _lars_with(0.0)


@part("optimizer", "lars with the eps of ours", said="OPTIMIZER.name: lars")
def _lars_as_it_is() -> Pairs:
    yield from _lars_with(Lars.eps)


def _lars_with(eps: float) -> Pairs:
    cls = vissl("optimizers.lars")._LARS
    for exclude in (False, True):
        for decay in (0.0, 0.01):
            params = [nn.Parameter(param.clone()) for param, _ in _layers()]
            theirs = cls(params, lr=0.3, weight_decay=decay, momentum=0.9, eta=0.001, exclude_bias_and_norm=exclude)
            wanted = _stepped(theirs, params, lambda _: None)
            ours = Lars(0.001, eps, exclude)
            yield from zip(_adapted(ours, 0.3, decay, 0.9), wanted, strict=True)


# ---- first weights: the deviation of each tensor, for tensors that are drawn


def _deviations(ours: nn.Module, theirs: nn.Module) -> Pairs:
    """Deviations of the large tensors, those of one fan-in together: their names and their order are not the same."""
    initialize_(ours, 0)

    def found(module: nn.Module) -> dict[int, tuple[int, float]]:
        sums: dict[int, tuple[int, float]] = {}
        for tensor in (param.detach() for param in module.parameters() if param.numel() >= 4000):
            fan_in = tensor.numel() // len(tensor)
            count, squares = sums.get(fan_in, (0, 0.0))
            sums[fan_in] = count + tensor.numel(), squares + tensor.numel() * float(tensor.var())
        return sums

    own, their = found(ours), found(theirs)
    for fan_in in sorted(own.keys() | their.keys()):
        (count, squares), (other_count, other_squares) = own.get(fan_in, (0, 0.0)), their.get(fan_in, (0, 0.0))
        yield torch.tensor(count), torch.tensor(other_count)
        yield torch.tensor(math.sqrt(squares / (other_squares or 1.0))), torch.tensor(float(other_squares > 0))


def _model(**trunk: Any) -> Any:
    """VISSL's MODEL block with a trunk's keys."""
    from omegaconf import OmegaConf

    file = Path(vissl("config").__file__).with_name("defaults.yaml")
    model = OmegaConf.to_container(OmegaConf.load(file).config.MODEL)
    for block, keys in trunk.items():
        model["TRUNK"][block].update(keys)  # type: ignore[index, call-overload]
    return vissl("config").AttrDict({**model, "_MODEL_INIT_SEED": 0})  # type: ignore[dict-item]


def _trunks(name: str, block: str, **keys: Any) -> Pairs:
    torch.set_default_dtype(torch.float32)
    of_vissl = {"min_width": None, "use_se": True} if name == "efficientnet" else {}
    theirs = vissl("models.trunks").get_model_trunk(name)(_model(**{block: {**keys, **of_vissl}}), name)
    yield from _deviations(TRUNKS.get(name).build(**keys), theirs)


@part("first weights", "resnet", said="MODEL.TRUNK.NAME: resnet", tolerance=DRAWN_TOLERANCE)
def _resnet_weights() -> Pairs:
    yield from _trunks("resnet", "RESNETS", DEPTH=50)


@part("first weights", "resnet with RESNETS.FIRST_WEIGHTS=vissl", tolerance=DRAWN_TOLERANCE)
def _resnet_weights_as_vissl() -> Pairs:
    torch.set_default_dtype(torch.float32)
    theirs = vissl("models.trunks").get_model_trunk("resnet")(_model(RESNETS={"DEPTH": 50}), "resnet")
    yield from _deviations(TRUNKS.get("resnet").build(DEPTH=50, FIRST_WEIGHTS="vissl"), theirs)


@part("first weights", "regnet", tolerance=DRAWN_TOLERANCE)
def _regnet_weights() -> Pairs:
    yield from _trunks("regnet", "REGNET", depth=6, w_0=48, w_a=27.89, w_m=2.09, group_width=8)


_VIT = {"IMAGE_SIZE": 32, "PATCH_SIZE": 8, "NUM_LAYERS": 2, "NUM_HEADS": 4, "HIDDEN_DIM": 128, "MLP_DIM": 256}


@part("first weights", "vision_transformer", tolerance=DRAWN_TOLERANCE)
def _vit_weights() -> Pairs:
    yield from _trunks("vision_transformer", "VISION_TRANSFORMERS", **_VIT)


def _small(name: str, block: str, said: str = "", **keys: Any) -> None:
    part("first weights", name, said=said, tolerance=DRAWN_TOLERANCE)(lambda: _trunks(name, block, **keys))


_small("resnet_sk", "RESNETS_SK", DEPTH=152)
_small("beit", "BEIT", **{key: _VIT[key] for key in _VIT if key != "MLP_DIM"})
_small("xcit", "XCIT", **{key: _VIT[key] for key in _VIT if key != "MLP_DIM"})
_small("convnext", "CONVNEXT", DEPTH=[1, 1, 1, 1], DIMS=[32, 64, 96, 128])
_small("swin_transformer", "SWIN_TRANSFORMER", IMAGE_SIZE=224, EMBED_DIM=48, DEPTHS=[2, 2], NUM_HEADS=[3, 6])
_small(
    "efficientnet",
    "EFFICIENT_NETS",
    "MODEL.TRUNK.NAME: efficientnet",
    **{"model_version": "B0", "bn_momentum": 0.01, "bn_epsilon": 0.001, "drop_connect_rate": 0.2, "width_divisor": 8},
)
for _name in ("alexnet_bvlc", "alexnet_deepcluster", "alexnet_jigsaw", "alexnet_rotnet"):
    _small(_name, "RESNETS")
for _name in ("mobilenetv3_tv", "mobilenetv3_timm"):
    _small(_name, "MOBILE_NET")


@part("first weights", "heads mlp, eval_mlp, swav_head, dino_head, msn_head", tolerance=DRAWN_TOLERANCE)
def _head_weights() -> Pairs:
    torch.set_default_dtype(torch.float32)
    head = _keys(BATCHNORM_EPS=1e-5, BATCHNORM_MOMENTUM=0.1, PARAMS_MULTIPLIER=1.0)
    for name, keys in {
        "mlp": {"dims": [200, 300, 100]},
        "eval_mlp": {"in_channels": 200, "dims": [200, 100]},
        "swav_head": {"dims": [200, 300, 100], "num_clusters": [400], "use_bn": True},
        "dino_head": {"in_dim": 200, "num_clusters": [400], "hidden_dim": 300, "bottleneck_dim": 100},
        "msn_head": {"in_dim": 200, "num_prototypes": 400, "hidden_dim": 300, "output_dim": 100},
    }.items():
        theirs = vissl("models.heads").get_model_head(name)(_keys(HEAD=head), **keys)
        yield from _deviations(HEADS.get(name).build(**keys), theirs)


# ---- checkpoints


@part("checkpoint", "slices, cut by VISSL's own converter")
def _slices() -> Pairs:
    trunk = {f"_feature_blocks.layer{index}.weight": _drawn(index, 3, 4) for index in range(3)}
    heads = {"0.clf.0.weight": _drawn(5, 2, 3), "0.clf.0.bias": _drawn(6, 2)}
    model = {"base_model": {"model": {"trunk": trunk, "heads": heads}}}
    with tempfile.TemporaryDirectory() as folder:
        whole, cut = Path(folder) / "whole.torch", Path(folder) / "cut.torch"
        torch.save({"type": "consolidated", "classy_state_dict": model}, whole)
        vissl("utils.checkpoint").CheckpointFormatConverter.to_sliced_checkpoint(str(whole), str(cut))
        found = read_foreign(cut)
        assert found.layout == "VISSL, sliced" and len(found.entries) == len(trunk) + len(heads)
        of_vissl = {f"trunk.{name}": value for name, value in trunk.items()}
        of_vissl |= {f"heads.{name}": value for name, value in heads.items()}
        for entry in found.entries:
            yield entry.read(), of_vissl[entry.key]


# ---- the table


@dataclass(frozen=True)
class Row:
    """One line: the verdict is equal, different, not here, UNSAID for a difference that nothing says, or FAILED."""

    part: Part
    verdict: str
    difference: float
    pairs: int


def row_of(part: Part, page: str) -> Row:
    """Compare one part. ``page``: the text of docs/vissl.md."""
    is_said = bool(part.said) and (_in_table(part.said) or part.said in " ".join(page.split()))
    if part.compare is None:
        return Row(part, "not here" if part.why and (is_said or not part.said) else "UNSAID", 0.0, 0)
    greatest, pairs = 0.0, 0
    with _exact(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        try:
            for ours, theirs in part.compare():
                greatest, pairs = max(greatest, _difference(ours, theirs)), pairs + 1
        except Exception as error:  # noqa: BLE001 - a part that one side cannot run is a row of its own
            return Row(replace(part, why=f"{type(error).__name__}: {error}"), "FAILED", greatest, pairs)
    if not pairs:
        return Row(replace(part, why="needs opencv-python"), "not compared", 0.0, 0)
    equal = greatest <= part.tolerance
    return Row(part, "equal" if equal else "different" if is_said else "UNSAID", greatest, pairs)


def _in_table(said: str) -> bool:
    key, _, value = said.partition(": ")
    return any(row["key"] == key and (not value or value in row.get("values", [])) for row in DIFFERENCES)


def _difference(ours: Any, theirs: Any) -> float:
    """Greatest absolute difference; infinite where shapes are not the same."""
    one, other = (
        torch.as_tensor(np.asarray(x.detach() if isinstance(x, Tensor) else x)).double() for x in (ours, theirs)
    )
    if one.squeeze().shape != other.squeeze().shape:
        return math.inf
    return float((one.squeeze() - other.squeeze()).abs().max()) if one.numel() else 0.0


def main() -> int:
    """Print a row for each part, and the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="a checkout of facebookresearch/vissl")
    parser.add_argument("--match", default="", help="only rows whose kind or name holds this")
    args = parser.parse_args()
    checkout = args.checkout.absolute()
    if not (checkout / "vissl/losses").is_dir():
        parser.error(f"{args.checkout} is no checkout of VISSL: it has no vissl/losses.")
    torch.set_num_threads(1)
    use_checkout(checkout)
    root = Path(__file__).parents[1]
    page = "".join(
        (root / name).read_text(encoding="utf-8") for name in ("docs/vissl.md", "benchmarks/vissl_parity.md")
    )
    rows = []
    with tempfile.TemporaryDirectory() as folder:  # some losses call collectives of one process
        torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        for part in _PARTS:
            if args.match not in f"{part.kind} {part.name}":
                continue
            row = row_of(part, page)
            rows.append(row)
            figure = f"{row.difference:8.1e} of {row.pairs:4}" if row.pairs else " " * 16
            print(
                f"{row.verdict:12} {figure}  {part.kind}: {part.name}  {row.part.why or part.said}".rstrip(), flush=True
            )
        torch.distributed.destroy_process_group()
    print(", ".join(f"{number} {verdict}" for verdict, number in Counter(row.verdict for row in rows).most_common()))
    return int(any(row.verdict in ("UNSAID", "FAILED") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
