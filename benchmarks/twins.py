"""Train each method beside the code that people trust: from the same weights, on the same crops, in float64.

    pip install -r requirements-dev.txt                  # has lightly
    python benchmarks/twins.py                           # against lightly
    python benchmarks/twins.py --repositories ~/peers    # and against the authors' code

``--repositories`` names a folder with a clone of each repository of ``REPOSITORIES``, under its name. The classes and
functions named there are read from the commit named there with ``git show``, and run; nothing of them is kept here.

Each twin makes 50 steps of SGD. Peers of lightly have its heads, losses, memory bank and EMA; authors' code has losses,
centers, schedules and updates of the teacher, on a copy of our model. After each step the loss, every weight of student
and teacher, centers and queues are compared; the largest difference of all goes into the table of docs/methods.md.
"""

from __future__ import annotations

import argparse
import ast
import copy
import logging
import math
import subprocess
import tempfile
import types
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count, cycle
from pathlib import Path
from typing import Any, Union
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from scipy.sparse import csr_matrix
from torch import Tensor, nn

from vissl_zero.methods.lejepa import random_directions
from vissl_zero.methods.method import Method, build_method
from vissl_zero.models.init import initialize_
from vissl_zero.models.keyed_random import set_random_key
from vissl_zero.models.model import Model
from vissl_zero.models.patches import Tokens
from vissl_zero.models.trunks.vision_transformer import VisionTransformer
from vissl_zero.registry import HEADS
from vissl_zero.sharding.model.batch_norm import frozen_statistics

NUM_STEPS, PER_EPOCH, BATCH, LR = 50, 5, 8, 0.05
PAGE = Path("docs/methods.md")
MARKS = "<!-- twins: written by benchmarks/twins.py -->", "<!-- end of twins -->"
LIGHTLY = "lightly 1.6.0"
# name of the folder -> owner, commit, files and what is taken of them
REPOSITORIES: dict[str, tuple[str, str, dict[str, list[str]]]] = {
    "dino": (
        "facebookresearch",
        "7c446df5b9f45747937fb0d72314eb9f7b66930a",
        {"main_dino.py": ["DINOLoss"], "utils.py": ["cosine_scheduler"]},
    ),
    "ibot": ("bytedance", "da316d82636a7a7356835ef224b13d5f3ace0489", {"main_ibot.py": ["iBOTLoss"]}),
    "dinov2": (
        "facebookresearch",
        "b8931f7bf91576930313be2c6d6af376033b35f0",
        {
            "dinov2/loss/dino_clstoken_loss.py": ["DINOLoss"],
            "dinov2/loss/ibot_patch_loss.py": ["iBOTPatchLoss"],
            "dinov2/loss/koleo_loss.py": ["KoLeoLoss"],
            "dinov2/utils/utils.py": ["CosineScheduler"],
        },
    ),
    "dinov3": (
        "facebookresearch",
        "6876159a11b4df116f30f667f8c9888617df0751",
        {"dinov3/loss/gram_loss.py": ["GramLoss"]},
    ),
    "mae": (
        "facebookresearch",
        "efb2a8062c206524e35e47d04501ed4f544c0ae8",
        {"models_mae.py": ["MaskedAutoencoderViT"]},
    ),
    "SlowFast": (
        "facebookresearch",
        "287ec0076846560f44a9327e931a5a2360240533",
        {"slowfast/models/operators.py": ["HOGLayerC"]},
    ),
    "msn": (
        "facebookresearch",
        "4388dc1eadbe3042b85d3296d41b9b207656e043",
        {"src/losses.py": ["init_msn_loss", "distributed_sinkhorn"]},
    ),
    "moco-v3": (
        "facebookresearch",
        "c349e6e24f40d3fedb22d973f92defa4cedf37a7",
        {"moco/builder.py": ["MoCo", "concat_all_gather"]},
    ),
    "vicreg": (
        "facebookresearch",
        "4e12602fd495af83efd1631fbe82523e6db092e0",
        {"main_vicreg.py": ["VICReg", "off_diagonal", "FullGatherLayer"]},
    ),
    "barlowtwins": (
        "facebookresearch",
        "8e8d284ca0bc02f88b92328e53f9b901e86b4a3c",
        {"main.py": ["BarlowTwins", "off_diagonal"]},
    ),
    "solo-learn": (
        "vturrisi",
        "9187ea39c2c3f43c455ab06664d2b019a9802954",
        {"solo/losses/nnclr.py": ["nnclr_loss_func"]},
    ),
    "VICRegL": (
        "facebookresearch",
        "803ae4c8cd1649a820f03afb4793763e95317620",
        {
            "main_vicregl.py": [
                *("VICRegL", "batched_index_select", "neirest_neighbores", "neirest_neighbores_on_l2"),
                "neirest_neighbores_on_location",
            ],
            "utils.py": ["FullGatherLayer", "batch_all_gather", "gather_center", "off_diagonal"],
            "transforms.py": ["_location_to_NxN_grid"],
        },
    ),
    "visreg": ("HaiyuWu", "074fb516935c8978fea2c930ae04909eb3697be3", {"visreg/losses/visreg.py": ["VISReg"]}),
    "SupContrast": ("HobbitLong", "66a8fe53880d6a1084b2e4e0db0a019024d6d41a", {"losses.py": ["SupConLoss"]}),
    "SimMIM": ("microsoft", "d3e29bcac950b83edc34ca33fe4404f38309052c", {"models/simmim.py": ["SimMIM"]}),
    "data2vec_vision": (
        "facebookresearch",
        "af9a36349aaed59ae66e69b5dabeef2d62fdc5da",
        {"beit/engine_for_cyclical.py": ["train_one_epoch"]},
    ),
    "ijepa": (
        "facebookresearch",
        "52c1ae95d05f743e000e8f10a1f3a79b10cff048",
        {
            "src/utils/tensors.py": [
                *("_no_grad_trunc_normal_", "trunc_normal_", "apply_masks", "repeat_interleave_batch")
            ],
            "src/models/vision_transformer.py": [
                *("get_2d_sincos_pos_embed", "get_2d_sincos_pos_embed_from_grid", "get_1d_sincos_pos_embed_from_grid"),
                *("MLP", "Attention", "Block", "VisionTransformerPredictor"),
            ],
        },
    ),
    "vissl": (
        "facebookresearch",
        "09270ed25a6c2cf71263d955b64cbe076d34ac45",
        {
            "vissl/utils/misc.py": ["get_indices_sparse"],
            "vissl/losses/distibuted_sinkhornknopp.py": ["distributed_sinkhornknopp"],
            "vissl/losses/swav_loss.py": ["SwAVCriterion"],
            "vissl/losses/swav_momentum_loss.py": ["SwAVMomentumLoss"],
            "vissl/hooks/swav_momentum_hooks.py": ["SwAVMomentumHook", "SwAVMomentumNormalizePrototypesHook"],
            "vissl/losses/dino_loss.py": ["DINOLoss"],
            "vissl/hooks/hook_utils.py": ["MomentumTeacherInLossHook"],
            "vissl/hooks/dino_hooks.py": ["DINOHook"],
            "vissl/losses/deepclusterv2_loss.py": ["DeepClusterV2Loss"],
            "vissl/losses/nce_loss.py": ["NCELossWithMemory", "NCEAverage", "NCECriterion", "AliasMethod"],
        },
    ),
}


class Net(nn.Module):
    """Convolutions with batch norm; 16 features."""

    feature_dim = map_dim = 16

    def __init__(self) -> None:
        super().__init__()
        first = (nn.Conv2d(3, 8, 3, 2, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.net = nn.Sequential(*first, nn.Conv2d(8, 16, 3, 2, bias=False), nn.BatchNorm2d(16), nn.ReLU())

    def forward(self, images: list[Tensor], return_maps: bool = False) -> list[Tensor]:
        maps = [self.net(image) for image in images]
        return [*(maps if return_maps else ()), *(x.mean(dim=(2, 3)) for x in maps)]


def transformer(class_token: bool) -> VisionTransformer:
    sizes = {"IMAGE_SIZE": 16, "PATCH_SIZE": 4, "NUM_LAYERS": 2, "NUM_HEADS": 2, "HIDDEN_DIM": 16, "MLP_DIM": 32}
    return VisionTransformer(**sizes, QKV_BIAS=True, USE_MASK_TOKEN=True, USE_CLASS_TOKEN=class_token)


@dataclass(frozen=True)
class Crops:
    """A ``Batch`` of random crops."""

    images: list[Tensor]
    num_crops: list[int]
    sample_ids: Tensor
    targets: Tensor
    boxes: Tensor
    num_local: int = BATCH
    num_global: int = BATCH


def crops_of_step(step: int, num_crops: list[int], side: int) -> Crops:
    generator = torch.Generator().manual_seed(1000 + step)
    sides = [side - 4 * index for index in range(len(num_crops))]
    images = [
        torch.randn(count * BATCH, 3, size, size, dtype=torch.float64, generator=generator)
        for count, size in zip(num_crops, sides, strict=True)
    ]
    # Each image once in an epoch.
    ids, targets = torch.arange(BATCH) + step % PER_EPOCH * BATCH, torch.randint(0, 3, (BATCH,), generator=generator)
    # A crop is mirrored where its left edge is right of its right one.
    boxes = torch.rand(sum(num_crops) * BATCH, 4, dtype=torch.float64, generator=generator) * 100
    boxes[:, 2] += boxes[:, 0]
    return Crops(images, num_crops, ids, targets, boxes)


class Ours:
    """Our method in a plain loop: the one that all levels are compared with."""

    def __init__(self, twin: Twin):
        torch.manual_seed(0)
        self.twin = twin
        trunk = transformer(twin.class_token) if twin.is_transformer else Net()
        name, keys = twin.head
        self.model = Model(trunk, [HEADS.get(name).build(**keys)])
        initialize_(self.model, 0)
        self.model.views_apart = twin.is_apart and not twin.is_transformer and twin.num_crops == [2]
        self.model.double().train()
        self.method: Method = build_method({"name": twin.loss, twin.loss: twin.keys}, BATCH * PER_EPOCH).double()
        self.method.views_apart = self.model.views_apart
        self.teacher = self.method.make_teacher(copy.deepcopy(self.model))
        self.rows = self.method.normalized_rows()
        self._normalize()
        followers = zip(self.teacher.parameters(), self._student_of(self.teacher), strict=True)
        for follower, weight in followers:
            follower.data.copy_(weight)
        self.method.set_length(NUM_STEPS, PER_EPOCH)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=twin.lr, momentum=0.9)
        if self.method.needs_initial_embeddings:
            self._embed_images()

    @torch.no_grad()
    def _embed_images(self) -> None:
        with frozen_statistics(self.model):
            for step in range(PER_EPOCH):
                batch = self.method.prepare(crops_of_step(step, self.twin.num_crops, 16))
                outputs = self.method.run_student(self.model, batch)
                self.method.update_state([self.method.observe(outputs, batch)])

    def _student_of(self, teacher: nn.Module) -> list[Tensor]:
        weights = dict(self.model.named_parameters())
        return [weights[name.replace("anchor.", "trunk.", 1)] for name, _ in teacher.named_parameters()]

    def _normalize(self) -> None:
        weights = dict(self.model.named_parameters())
        for name in self.rows:
            weights[name].data /= weights[name].data.norm(dim=1, keepdim=True)

    def step(self, step: int, given: Crops) -> float:
        method = self.method
        if step % PER_EPOCH == 0:
            method.on_epoch(step // PER_EPOCH)
        method.on_step(step, step // PER_EPOCH)
        batch = method.prepare(given)
        set_random_key(0, step, batch.sample_ids)
        taught = None
        if method.has_teacher:
            with torch.no_grad():
                taught = method.run_teacher(self.teacher, batch)
        outputs = method.run_student(self.model, batch)
        loss = method.loss(outputs, batch, taught)
        self.optimizer.zero_grad()
        loss.backward()
        method.update_state([method.observe(outputs, batch, taught)])
        self.optimizer.step()
        self._normalize()
        if method.has_teacher:
            moves = method.moves_anchor(step)
            own = dict(self.teacher.named_parameters())
            for name in self.rows:
                own[name].data /= own[name].data.norm(dim=1, keepdim=True)
            for (name, follower), weight in zip(own.items(), self._student_of(self.teacher), strict=True):
                if not name.startswith("anchor."):
                    m = method.momentum(step)
                    follower.data = m * follower.data + (1 - m) * weight.data
            for name, follower in own.items() if moves else ():
                if name.startswith("anchor."):
                    follower.data.copy_(own[name.replace("anchor.", "trunk.", 1)].data)
        return float(loss.detach())

    def state(self) -> list[Tensor]:
        state = [*self.model.parameters()]
        if self.method.has_teacher:
            state += [p for name, p in self.teacher.named_parameters() if not name.startswith("anchor.")]
        return state + [buffer for buffer in self.method.buffers() if buffer.is_floating_point()]


class Peer:
    """A copy of our model, trained by other code: subclasses define ``loss`` and perhaps more.

    Attributes:
        ours: whose weights it begins with.
        code: what was read from the repositories.
    """

    def __init__(self, ours: Ours, code: dict[str, Any]):
        self.ours, self.code = ours, code
        self.keys = ours.twin.keys
        self.model: Any = copy.deepcopy(ours.model)
        self.teacher: Any = copy.deepcopy(ours.teacher)
        self.make()
        self.optimizer = torch.optim.SGD(self.weights(), lr=ours.twin.lr, momentum=0.9)

    def make(self) -> None:
        """Other modules in place of ours."""

    def weights(self) -> list[Tensor]:
        return list(self.model.parameters())

    def loss(self, step: int, crops: Crops) -> Tensor:
        raise NotImplementedError

    def momentum(self, step: int) -> float:
        return float("nan")

    def after(self, step: int) -> None:
        """Move the teacher, as ``param_k.data.mul_(m).add_((1 - m) * param_q.detach().data)``."""
        if not self.ours.method.has_teacher:
            return
        weights, m = dict(self.model.named_parameters()), self.momentum(step)
        for name, follower in self.teacher.named_parameters():
            if not name.startswith("anchor."):
                follower.data.mul_(m).add_((1 - m) * weights[name].detach().data)

    def buffers(self) -> list[Tensor]:
        return []

    def step(self, step: int, crops: Crops) -> float:
        set_random_key(0, step, crops.sample_ids)
        loss = self.loss(step, crops)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.after(step)
        return float(loss.detach())

    def state(self) -> list[Tensor]:
        state = self.weights()
        if self.ours.method.has_teacher:
            state = state + [p for name, p in self.teacher.named_parameters() if not name.startswith("anchor.")]
        return state + self.buffers()

    def views(self, crops: Crops) -> list[Tensor]:
        return [
            view for images, count in zip(crops.images, crops.num_crops, strict=True) for view in images.chunk(count)
        ]


def copied(module: nn.Module, source: nn.Module) -> nn.Module:
    """Give ``module`` the weights of ours, in their order."""
    module = module.double()
    for own, other in zip(module.parameters(), source.parameters(), strict=True):
        own.data.copy_(other.data.view_as(own))
    return module.train()


class LightlyPeer(Peer):
    """lightly's heads on a copy of our trunk."""

    def heads(self) -> list[nn.Module]:
        raise NotImplementedError

    def sources(self, model: Model) -> list[nn.Module]:
        return [model.heads[0]]

    def make(self) -> None:
        self.parts = self._parts(self.ours.model)
        self.teacher_parts = self._parts(self.ours.teacher) if self.ours.method.has_teacher else []

    def _parts(self, model: Model) -> list[nn.Module]:
        found = [copy.deepcopy(model.trunk)]
        for head, source in zip(self.heads(), self.sources(model), strict=False):
            if source is not None:
                found.append(copied(head, source))
        return found

    def weights(self) -> list[Tensor]:
        return [weight for part in self.parts for weight in part.parameters()]

    def through(self, parts: list[nn.Module], view: Tensor) -> list[Tensor]:
        """Return what each head gives, one after the other."""
        outputs = [parts[0]([view])[0]]
        for head in parts[1:]:
            outputs.append(head(outputs[-1]))
        return outputs[1:]

    def after(self, step: int) -> None:
        from lightly.models.utils import update_momentum

        for student, teacher in zip(self.parts, self.teacher_parts, strict=False):
            update_momentum(student, teacher, self.momentum(step))

    def state(self) -> list[Tensor]:
        taught = [weight for part in self.teacher_parts for weight in part.parameters()]
        return [*self.weights(), *taught, *self.buffers()]


class SimCLR(LightlyPeer):
    def heads(self) -> list[nn.Module]:
        from lightly.loss import NTXentLoss
        from lightly.models.modules import SimCLRProjectionHead

        self.criterion = NTXentLoss(temperature=self.keys["temperature"])
        return [SimCLRProjectionHead(16, 12, 8, batch_norm=False)]

    def loss(self, step: int, crops: Crops) -> Tensor:
        first, second = (self.through(self.parts, view)[0] for view in self.views(crops))
        return self.criterion(first, second)  # type: ignore[no-any-return]


class MoCoV2(LightlyPeer):
    def heads(self) -> list[nn.Module]:
        from lightly.loss import NTXentLoss
        from lightly.models.modules import MoCoProjectionHead

        queue = self.ours.method.queue.keys  # type: ignore[attr-defined]
        self.criterion = NTXentLoss(self.keys["temperature"], memory_bank_size=tuple(queue.shape)).double()
        self.criterion.memory_bank.bank = queue.clone()
        return [MoCoProjectionHead(16, 12, 8)]

    def loss(self, step: int, crops: Crops) -> Tensor:
        first, second = self.views(crops)
        with torch.no_grad():
            keys = self.through(self.teacher_parts, second)[0]
        return self.criterion(self.through(self.parts, first)[0], keys)  # type: ignore[no-any-return]

    def momentum(self, step: int) -> float:
        return float(self.keys["momentum"])

    def buffers(self) -> list[Tensor]:
        return [self.criterion.memory_bank.bank]


class BYOL(LightlyPeer):
    def heads(self) -> list[nn.Module]:
        from lightly.loss import NegativeCosineSimilarity
        from lightly.models.modules import BYOLPredictionHead, BYOLProjectionHead

        self.criterion = NegativeCosineSimilarity()
        return [BYOLProjectionHead(16, 12, 8), BYOLPredictionHead(8, 12, 8)]

    def sources(self, model: Model) -> list[nn.Module]:
        return [model.heads[0].projector, model.heads[0].predictor]  # type: ignore[list-item]

    def loss(self, step: int, crops: Crops) -> Tensor:
        views = self.views(crops)
        (_, p0), (_, p1) = (self.through(self.parts, view) for view in views)
        with torch.no_grad():
            z0, z1 = (self.through(self.teacher_parts, view)[0] for view in views)
        return 4 + 4 * 0.5 * (self.criterion(p0, z1) + self.criterion(p1, z0))  # type: ignore[no-any-return]

    def momentum(self, step: int) -> float:
        from lightly.utils.scheduler import cosine_schedule

        # It ends at step max_steps - 1; the paper's K is the number of steps.
        return cosine_schedule(step, NUM_STEPS + 1, self.keys["momentum"], 1.0)


class SimSiam(LightlyPeer):
    def heads(self) -> list[nn.Module]:
        from lightly.loss import NegativeCosineSimilarity
        from lightly.models.modules import SimSiamPredictionHead, SimSiamProjectionHead

        self.criterion = NegativeCosineSimilarity()
        return [SimSiamProjectionHead(16, 12, 8), SimSiamPredictionHead(8, 6, 8)]

    sources = BYOL.sources

    def loss(self, step: int, crops: Crops) -> Tensor:
        (z0, p0), (z1, p1) = (self.through(self.parts, view) for view in self.views(crops))
        # SimSiam's paper stops the gradient, lightly's loss does too.
        return 0.5 * (self.criterion(p0, z1.detach()) + self.criterion(p1, z0.detach()))  # type: ignore[no-any-return]


class BarlowTwins(LightlyPeer):
    def heads(self) -> list[nn.Module]:
        from lightly.loss import BarlowTwinsLoss
        from lightly.models.modules import BarlowTwinsProjectionHead

        self.criterion = BarlowTwinsLoss(lambda_param=self.keys.get("lambda_", 0.0051))
        head = BarlowTwinsProjectionHead(16, 12, 8)
        head.layers[-1] = nn.Linear(12, 8, bias=False)  # as in the authors' code, where lightly's has a bias
        return [head]

    def loss(self, step: int, crops: Crops) -> Tensor:
        first, second = (self.through(self.parts, view)[0] for view in self.views(crops))
        return self.criterion(first, second)  # type: ignore[no-any-return]


class VICReg(BarlowTwins):
    def heads(self) -> list[nn.Module]:
        from lightly.loss import VICRegLoss

        head = super().heads()
        self.criterion = VICRegLoss()
        return head


class SwAV(LightlyPeer):
    def heads(self) -> list[nn.Module]:
        from lightly.loss import SwaVLoss
        from lightly.models.modules import SwaVPrototypes

        self.criterion = SwaVLoss()
        prototypes = SwaVPrototypes(8, 5)
        prototypes.heads[0] = nn.Linear(8, 5, bias=False)
        return [nn.Sequential(nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 8)), prototypes]

    def sources(self, model: Model) -> list[nn.Module]:
        return [model.heads[0].projection_head, model.heads[0].prototypes0]  # type: ignore[list-item]

    def loss(self, step: int, crops: Crops) -> Tensor:
        trunk, head, prototypes = self.parts
        prototypes.normalize()  # type: ignore[operator]
        # Crops of one size go through the trunk together, as in the authors' MultiCropWrapper.
        rows = torch.cat([trunk([images])[0] for images in crops.images])
        scores = list(prototypes(F.normalize(head(rows), dim=1)).chunk(sum(crops.num_crops)))
        return self.criterion(scores[: crops.num_crops[0]], scores[crops.num_crops[0] :])[0]  # type: ignore[no-any-return]

    def after(self, step: int) -> None:
        self.parts[2].normalize()  # type: ignore[operator]


class LeJEPA(LightlyPeer):
    def heads(self) -> list[nn.Module]:
        from lightly.loss import LeJEPALoss

        self.criterion: Any = LeJEPALoss(self.keys["lambda_"], sigreg_num_vectors=self.keys["num_slices"]).double()
        sigreg = self.criterion.sigreg
        # Built in float32.
        sigreg.t = torch.linspace(0, 3, 17, dtype=torch.float64)
        sigreg.phi = torch.exp(-sigreg.t.square() / 2)
        spacing = torch.full((17,), 2 * 3 / 16, dtype=torch.float64)
        spacing[[0, -1]] /= 2
        sigreg.weights = spacing * sigreg.phi
        return [nn.Sequential(nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 8))]

    def loss(self, step: int, crops: Crops) -> Tensor:
        trunk, head = self.parts
        views = head(torch.cat([trunk([images])[0] for images in crops.images])).unflatten(0, (-1, BATCH))
        directions = random_directions(8, self.keys["num_slices"], step, views)
        self.criterion.sigreg._generate_unit_vectors = lambda *_, **__: directions
        count = crops.num_crops[0]
        return self.criterion(local_proj=views[count:], global_proj=views[:count])  # type: ignore[no-any-return]


def by_view(peer: Peer, model: Model, crops: Crops) -> list[Any]:
    """Return what the first head gives for each view by itself."""
    return [model([view])[0] for view in peer.views(crops)]


class DINO(Peer):
    def make(self) -> None:
        temperatures = self.keys["teacher_temp_min"], self.keys["teacher_temp_max"]
        epochs = self.keys["teacher_temp_warmup_iters"] // PER_EPOCH, NUM_STEPS // PER_EPOCH
        self.criterion = self.code["dino"]["DINOLoss"](5, 3, *temperatures, *epochs).double()
        self.momenta = self.code["dino"]["cosine_scheduler"](self.keys["momentum"], 1, epochs[1], PER_EPOCH)

    def loss(self, step: int, crops: Crops) -> Tensor:
        with torch.no_grad():
            taught = self.teacher(crops.images[:1])[0].scores[0]
        scores = self.model(crops.images)[0].scores[0]
        return self.criterion(scores, taught, step // PER_EPOCH)  # type: ignore[no-any-return]

    def momentum(self, step: int) -> float:
        return float(self.momenta[step])

    def buffers(self) -> list[Tensor]:
        return [self.criterion.center[0]]


def masks_of(ours: Ours, model: Model, crops: Crops, masks: bool) -> Any:
    """Return the first head's output for crops that our method masks."""
    images = crops.images if masks else crops.images[:1]
    return model(images, choose_patches=lambda x, size: ours.method._choose_patches(x, size, masks=masks))[0]  # type: ignore[operator]


class IBOT(Peer):
    def make(self) -> None:
        epochs = 4, NUM_STEPS // PER_EPOCH
        self.criterion = self.code["ibot"]["iBOTLoss"](5, 7, 2, 1, 0.04, 0.07, 0.04, 0.07, *epochs).double()
        self.momenta = self.code["dino"]["cosine_scheduler"](self.keys["teacher_momentum"], 1, epochs[1], PER_EPOCH)

    momentum = DINO.momentum

    def loss(self, step: int, crops: Crops) -> Tensor:
        with torch.no_grad():
            taught = masks_of(self.ours, self.teacher, crops, masks=False)
        own = masks_of(self.ours, self.model, crops, masks=True)
        first = 2 * BATCH
        masks = list(own.is_masked[:, None].chunk(2))
        student = own.scores[:first], own.patch_scores
        terms = self.criterion(
            student, (taught.scores, taught.patch_scores), own.scores[first:], masks, step // PER_EPOCH
        )
        return terms["loss"]  # type: ignore[no-any-return]

    def buffers(self) -> list[Tensor]:
        return [self.criterion.center[0], self.criterion.center2[0, 0]]


class DINOv2(Peer):
    def make(self) -> None:
        code = self.code["dinov2"]
        self.dino, self.koleo = code["DINOLoss"](5).double(), code["KoLeoLoss"]().double()
        self.patches = code["iBOTPatchLoss"](7).double()
        self.temperatures = code["CosineScheduler"](0.07, 0.07, 20, 20, 0.04)
        self.momenta = code["CosineScheduler"](self.keys["momentum"], 1, NUM_STEPS)

    momentum = DINO.momentum

    def loss(self, step: int, crops: Crops) -> Tensor:
        """dinov2/train/ssl_meta_arch.py, with its scales."""
        with torch.no_grad():
            taught = masks_of(self.ours, self.teacher, crops, masks=False)
        own = masks_of(self.ours, self.model, crops, masks=True)
        temperature = float(self.temperatures[step])
        targets = self.dino.sinkhorn_knopp_teacher(taught.scores, temperature).chunk(2)
        views = own.scores.chunk(3)
        crops_loss = (
            self.dino([views[2]], targets) + self.dino([views[0]], [targets[1]]) + self.dino([views[1]], [targets[0]])
        )
        masked = own.is_masked
        counts = torch.tensor([int(masked.sum())])
        of_patches = self.patches.sinkhorn_knopp_teacher(taught.patch_scores[masked], temperature, counts)
        patch_loss = self.patches.forward_masked(own.patch_scores[masked], of_patches, masked)
        koleo = sum(self.koleo(view) for view in own.features[: 2 * BATCH].chunk(2))
        self.own = own
        return crops_loss / 4 + patch_loss + 0.1 * koleo  # type: ignore[no-any-return]


class DINOv3(DINOv2):
    def make(self) -> None:
        super().make()
        self.gram = self.code["dinov3"]["GramLoss"](apply_norm=True, remove_neg=False)

    def loss(self, step: int, crops: Crops) -> Tensor:
        loss = super().loss(step, crops)
        if step < NUM_STEPS // 2:
            return loss
        anchor = self.teacher.anchor
        with torch.no_grad():
            patches = anchor(crops.images[:1], return_tokens=True)[0][:, anchor.num_prefix_tokens :]
        return loss + 2.0 * self.gram(self.own.patches, patches)  # type: ignore[no-any-return]

    def after(self, step: int) -> None:
        super().after(step)
        # ``update_gram(m=0)`` after the iterations that the keys name
        if step + 1 in (25, 35, 45):
            for own, other in zip(self.teacher.anchor.parameters(), self.teacher.trunk.parameters(), strict=True):
                own.data.copy_(other.data)


class MAE(Peer):
    def loss(self, step: int, crops: Crops) -> Tensor:
        theirs = self.code["mae"]["MaskedAutoencoderViT"]
        settings = types.SimpleNamespace(patch_embed=types.SimpleNamespace(patch_size=(4, 4)), norm_pix_loss=True)
        settings.patchify = lambda images: theirs.patchify(settings, images)
        own = self.model(crops.images, choose_patches=self.ours.method._choose_patches)[0]
        every = torch.zeros(BATCH, 16, 48, dtype=torch.float64)
        index = own.wanted[:, :, None].expand(-1, -1, 48)
        mask = torch.zeros(BATCH, 16, dtype=torch.float64).scatter(1, own.wanted, 1.0)
        predictions = every.scatter(1, index, own.predictions)
        return theirs.forward_loss(settings, crops.images[0], predictions, mask)  # type: ignore[no-any-return]


class MaskFeat(Peer):
    def make(self) -> None:
        self.histograms = self.code["SlowFast"]["HOGLayerC"](nbins=9, pool=self.keys["cell_size"]).double()

    def loss(self, step: int, crops: Crops) -> Tensor:
        """slowfast/models/masked.py ``_get_hog_label_2d``, and ``mse_loss`` of models/losses.py."""
        cells = self.histograms(crops.images[0]).flatten(1, 2).permute(0, 2, 3, 1)
        labels = cells.unfold(1, 2, 2).unfold(2, 2, 2).flatten(1, 2).flatten(2)
        own = self.model(crops.images, choose_patches=self.ours.method._choose_patches)[0]
        wanted = own.wanted[:, :, None].expand(-1, -1, labels.shape[2])
        return F.mse_loss(own.predictions, labels.gather(1, wanted))


class MSN(Peer):
    def make(self) -> None:
        self.criterion = self.code["msn"]["init_msn_loss"](num_views=2, tau=0.1)

    def loss(self, step: int, crops: Crops) -> Tensor:
        views = self.views(crops)
        with torch.no_grad():
            target = self.teacher([views[0]])[0].embeddings
        images = [torch.cat(views[1:])]
        own = self.model(images, choose_patches=self.ours.method._choose_patches)[0].embeddings
        prototypes = self.model.heads[0].prototypes0.weight
        terms = self.criterion(own, target, prototypes, torch.eye(5, dtype=torch.float64), 0.25, use_sinkhorn=True)
        return terms[0] + terms[1]  # type: ignore[no-any-return]

    def momentum(self, step: int) -> float:
        return 0.9 + (1 - 0.9) / (NUM_STEPS * 1.25) * step  # src/msn_train.py


class MoCoV3(Peer):
    def loss(self, step: int, crops: Crops) -> Tensor:
        theirs = self.code["moco-v3"]["MoCo"].contrastive_loss
        settings = types.SimpleNamespace(T=self.keys["temperature"])
        own = by_view(self, self.model, crops)
        with torch.no_grad():
            keys = [output.projections for output in by_view(self, self.teacher, crops)]
        pairs = (own[0].predictions, keys[1]), (own[1].predictions, keys[0])
        return sum(theirs(settings, q, k) for q, k in pairs)  # type: ignore[no-any-return]

    def momentum(self, step: int) -> float:
        """main_moco.py ``adjust_moco_momentum``."""
        return 1.0 - 0.5 * (1.0 + math.cos(math.pi * step / NUM_STEPS)) * (1.0 - float(self.keys["momentum"]))


class NNCLR(Peer):
    def make(self) -> None:
        self.queue = self.ours.method.queue.keys.clone()  # type: ignore[attr-defined, union-attr, operator]
        self.place = 0

    def loss(self, step: int, crops: Crops) -> Tensor:
        """solo/methods/nnclr.py ``training_step``."""
        own = by_view(self, self.model, crops)
        z = [F.normalize(output.projections, dim=-1) for output in own]
        near = [self.queue[(one @ self.queue.T).max(dim=1)[1]] for one in z]
        theirs = self.code["solo-learn"]["nnclr_loss_func"]
        loss = sum(theirs(near[i], own[1 - i].predictions, self.keys["temperature"]) / 2 for i in (0, 1))
        self.queue[self.place : self.place + BATCH] = z[0].detach()
        self.place = (self.place + BATCH) % len(self.queue)
        return loss  # type: ignore[return-value]

    def buffers(self) -> list[Tensor]:
        return [self.queue]


class SupCon(Peer):
    def loss(self, step: int, crops: Crops) -> Tensor:
        temperature = self.keys["temperature"]
        criterion = self.code["SupContrast"]["SupConLoss"](temperature, base_temperature=temperature)
        views = torch.stack([F.normalize(rows, dim=1) for rows in by_view(self, self.model, crops)], dim=1)
        return criterion(views, crops.targets)  # type: ignore[no-any-return]


class BarlowTwinsOfAuthors(Peer):
    def loss(self, step: int, crops: Crops) -> Tensor:
        theirs = self.code["barlowtwins"]["BarlowTwins"].forward
        args = types.SimpleNamespace(batch_size=BATCH, lambd=self.keys["lambda_"])
        norm = nn.BatchNorm1d(8, affine=False).double()
        rows = iter(by_view(self, self.model, crops))
        settings = types.SimpleNamespace(args=args, bn=norm, backbone=lambda _: next(rows), projector=lambda x: x)
        return theirs(settings, None, None)  # type: ignore[no-any-return]


class VICRegOfAuthors(Peer):
    def loss(self, step: int, crops: Crops) -> Tensor:
        theirs = self.code["vicreg"]["VICReg"].forward
        args = types.SimpleNamespace(batch_size=BATCH, sim_coeff=25.0, std_coeff=25.0, cov_coeff=1.0)
        rows = iter(by_view(self, self.model, crops))
        settings = types.SimpleNamespace(
            args=args, num_features=8, backbone=lambda _: next(rows), projector=lambda x: x
        )
        return theirs(settings, None, None)  # type: ignore[no-any-return]


class VICRegLOfAuthors(Peer):
    def make(self) -> None:
        code = self.code["VICRegL"]
        names = ("batch_all_gather", "gather_center", "off_diagonal")
        code["utils"] = types.SimpleNamespace(**{name: code[name] for name in names})

    def loss(self, step: int, crops: Crops) -> Tensor:
        """main_vicregl.py ``forward``, without its classifier of labels."""
        theirs, (output,) = self.code["VICRegL"]["VICRegL"], self.model(crops.images)
        weights = {"inv_coeff": 25.0, "var_coeff": 25.0, "cov_coeff": 1.0}
        matches = {"num_matches": self.keys["num_matches"], "l2_all_matches": 1, "fast_vc_reg": 0}
        settings = types.SimpleNamespace(args=types.SimpleNamespace(**weights, **matches), embedding_dim=8)
        for name in ("_vicreg_loss", "_local_loss"):
            setattr(settings, name, getattr(theirs, name).__get__(settings))
        counts = zip(output.maps, crops.num_crops, strict=True)
        maps = [view.flatten(2).transpose(1, 2) for both, count in counts for view in both.chunk(count)]
        boxes = crops.boxes.chunk(len(maps))
        places = [self._places(box, round(view.shape[1] ** 0.5)) for box, view in zip(boxes, maps, strict=True)]
        alpha = self.keys["alpha"]
        whole = sum(theirs.global_loss(settings, output.embeddings.chunk(len(maps))))
        return alpha * whole + (1 - alpha) * sum(theirs.local_loss(settings, maps, places))  # type: ignore[no-any-return]

    def _places(self, boxes: Tensor, side: int) -> Tensor:
        grids = []
        for top, left, bottom, right in boxes.tolist():
            whole = (top, min(left, right), bottom - top, abs(right - left), 0, 0)
            grids.append(self.code["VICRegL"]["_location_to_NxN_grid"](whole, side, flip=right < left))
        return torch.stack(grids)


class VISRegOfAuthors(Peer):
    def make(self) -> None:
        self.criterion = self.code["visreg"]["VISReg"](self.keys["num_slices"])
        # Theirs are of float32, whatever it is given.
        quantiles = torch.arange(1, BATCH + 1, dtype=torch.float64) / (BATCH + 1)
        self.criterion._cached_B, self.criterion._cached_target = BATCH, math.sqrt(2) * torch.erfinv(2 * quantiles - 1)

    def loss(self, step: int, crops: Crops) -> Tensor:
        """train.py ``main``, without its probe."""
        projections = self.model(crops.images)[0].unflatten(0, (-1, BATCH))
        directions = random_directions(8, self.keys["num_slices"], step, projections)
        self.code["visreg"]["F"] = types.SimpleNamespace(normalize=lambda *_, **__: directions)
        distance = (projections - projections[: crops.num_crops[0]].mean(0, keepdim=True)).square().mean()
        weight = self.keys["lambda_"]
        return self.criterion(projections) * weight + distance * (1 - weight)  # type: ignore[no-any-return]


class TokensAndHead(nn.Module):
    """A head that gives the trunk's tokens, and holds what the authors' code makes of them."""

    def __init__(self, theirs: nn.Module):
        super().__init__()
        self.theirs = theirs

    def forward(self, features: Tensor, tokens: list[Tokens]) -> Tokens:
        return tokens[0]


class SimMIM(Peer):
    def make(self) -> None:
        encoder = nn.Module()
        encoder.num_features, encoder.in_chans, encoder.patch_size = 16, 3, 4  # type: ignore[assignment]
        self.theirs = self.code["SimMIM"]["SimMIM"](encoder, encoder_stride=4)
        copied(self.theirs.decoder, self.ours.model.heads[0])
        self.model.heads[0] = TokensAndHead(self.theirs)

    def loss(self, step: int, crops: Crops) -> Tensor:
        tokens = self.model(crops.images, choose_patches=self.ours.method._choose_patches)[0]
        patches = tokens.rows[:, tokens.num_prefix :].transpose(1, 2).unflatten(2, tokens.grid)
        self.theirs.encoder.forward = lambda images, mask: patches
        mask = tokens.view.masked.unflatten(1, tokens.grid).long()
        num_pixels = int(mask.sum()) * 4 * 4
        # Theirs divides by the masked pixels and 1e-5.
        return self.theirs(crops.images[0], mask) * (num_pixels + 1e-5) / num_pixels  # type: ignore[no-any-return]


class IJEPA(Peer):
    def make(self) -> None:
        norm = partial(nn.LayerNorm, eps=1e-6)
        self.predictor = self.code["ijepa"]["VisionTransformerPredictor"](16, 16, 8, 1, 2, norm_layer=norm).double()
        trained = [weight for weight in self.predictor.parameters() if weight.requires_grad]
        for own, other in zip(trained, self.ours.model.heads[0].parameters(), strict=True):
            own.data.copy_(other.data.view_as(own))
        self.model.heads[0] = TokensAndHead(self.predictor)

    def weights(self) -> list[Tensor]:
        return [weight for weight in self.model.parameters() if weight.requires_grad]

    def loss(self, step: int, crops: Crops) -> Tensor:
        """src/train.py ``train_step``."""
        images, method = crops.images, self.ours.method
        with torch.no_grad():
            rows = self.teacher.trunk(images, return_tokens=True)[0]
        tokens = self.model(images, choose_patches=partial(method._choose_patches, all_are_seen=False))[0]
        targets = list(tokens.view.wanted.unbind(1))
        labels = self.code["ijepa"]["apply_masks"](F.layer_norm(rows, (rows.size(-1),)), targets)
        return F.smooth_l1_loss(self.predictor(tokens.rows, [tokens.view.kept], targets), labels)

    def momentum(self, step: int) -> float:
        """src/train.py ``momentum_scheduler``."""
        first = float(self.keys["momentum"])
        return first + step * (1.0 - first) / NUM_STEPS


class Data2Vec(Peer):
    """Their whole step: forward passes, targets, loss, update of the teacher."""

    def make(self) -> None:
        self.output = self.model.heads[0].output
        self.model.heads[0] = TokensAndHead(self.output)
        self.value = float("nan")

    def step(self, step: int, crops: Crops) -> float:
        set_random_key(0, step, crops.sample_ids)
        choose = partial(self.ours.method._choose_patches, is_teacher=False)
        (view,) = choose(crops.images, (4, 4))
        blocks, decay = self.keys["average_top_k_layers"], self.keys["momentum"]

        def student(images: Tensor, bool_masked_pos: Tensor, return_all_tokens: bool) -> Tensor:
            tokens = self.model([images], choose_patches=choose)[0]
            return self.output(tokens.rows[:, tokens.num_prefix :][bool_masked_pos])  # type: ignore[no-any-return]

        def teacher(images: Tensor, **_: Any) -> list[Tensor]:
            trunk = self.teacher.trunk
            _, *rows = trunk([images], return_tokens=True, last_blocks=blocks)
            return [row[:, trunk.num_prefix_tokens :] for row in rows]

        def update(_: Any, update_fn: Callable[[Tensor, Tensor], Tensor]) -> None:
            weights = dict(self.model.named_parameters())
            for name, follower in self.teacher.named_parameters():
                follower.data = update_fn(follower.data, weights[name].detach())

        def learn(loss: Tensor, optimizer: torch.optim.Optimizer, **_: Any) -> None:
            self.value = float(loss.detach())
            loss.backward()
            optimizer.step()

        student.train, student.parameters = self.model.train, self.weights  # type: ignore[attr-defined]
        learn.state_dict = lambda: {"scale": 1.0}  # type: ignore[attr-defined]
        average = types.SimpleNamespace(module=teacher, _update=update)
        with patch.object(torch.cuda, "synchronize"):
            self.code["data2vec_vision"]["train_one_epoch"](
                *(student, average, 0, decay, decay, range(blocks), [((crops.images[0], view.masked), None)]),
                *(self.optimizer, "cpu", 0, learn),
                l1_beta=self.keys["beta"],
                start_steps=step,
                post_target_layer_norm=True,
            )
        return self.value


class Keys(dict[str, Any]):
    """Keys as attributes, as VISSL's ``AttrDict`` has them."""

    __getattr__ = dict.__getitem__


class SwAVOfVISSL(Peer):
    def make(self) -> None:
        length = self.keys["queue"]["queue_length"]
        # temperature, crops, iterations, epsilon, precision, prototypes, queue, width, hard assignments, folder
        options = (0.1, [0, 1], 3, 3, 0.05, False, [5], length, 8, 0, "")
        self.criterion = self.code["vissl"]["SwAVCriterion"](*options).double()
        fill_queue(self.ours, self.criterion.local_emb_queue)
        self.criterion.use_queue = True
        self.model.heads[0].nmb_heads = 1

    def loss(self, step: int, crops: Crops) -> Tensor:
        """vissl/losses/swav_loss.py ``SwAVLoss.forward``, after the hook that scores the queue."""
        output = self.model(crops.images)[0]
        self.criterion.compute_queue_scores(self.model.heads[0])
        loss = self.criterion(output.scores[0], 0)
        self.criterion.update_emb_queue(output.embeddings.detach())
        return loss  # type: ignore[no-any-return]

    def after(self, step: int) -> None:
        weight = self.model.heads[0].prototypes0.weight
        weight.data = F.normalize(weight.data, dim=1)

    def buffers(self) -> list[Tensor]:
        return [self.criterion.local_emb_queue]


def fill_queue(ours: Ours, rows: Tensor) -> None:
    """Fill our queue as VISSL's begins, with random rows; ours begins empty."""
    queue: Any = ours.method.queue
    queue.embeddings.copy_(rows)
    queue.num_filled = rows.shape[1]


class SwAVMomentum(Peer):
    def make(self) -> None:
        code = self.code["vissl"]
        keys = {"temperature": 0.1, "epsilon": 0.05, "num_iters": 3, "crops_for_assign": [0, 1], **self.keys}
        keys["queue"] = Keys(start_iter=0, local_queue_length=self.keys["queue"]["queue_length"])
        self.criterion = code["SwAVMomentumLoss"](Keys(keys, normalize_last_layer=True)).double()
        fill_queue(self.ours, self.criterion.local_emb_queue)
        for model in (self.model, self.teacher):
            model.heads[0].nmb_heads = 1
        self.criterion.momentum_encoder = self.teacher
        self.follow = code["SwAVMomentumHook"](self.keys["momentum"], 0, [0, 1])._update_momentum_network
        self.normalize = code["SwAVMomentumNormalizePrototypesHook"]().on_update
        loss = Keys(name="swav_momentum_loss", swav_momentum_loss=Keys(normalize_last_layer=True))
        self.task = Keys(config=Keys(LOSS=loss), model=self.model, base_model=self.model, loss=self.criterion)

    def loss(self, step: int, crops: Crops) -> Tensor:
        with torch.no_grad():
            taught = self.teacher(crops.images)[0]
        self.criterion.momentum_scores, self.criterion.momentum_embeddings = taught.scores, taught.embeddings
        own = self.model(crops.images)[0]
        return self.criterion([own.embeddings, *own.scores])  # type: ignore[no-any-return]

    def after(self, step: int) -> None:
        self.normalize(self.task)
        self.follow(self.task)

    def buffers(self) -> list[Tensor]:
        return [self.criterion.local_emb_queue]


class DINOOfVISSL(Peer):
    def make(self) -> None:
        code = self.code["vissl"]
        keys = Keys(self.keys, num_crops=3, crops_for_teacher=[0, 1], student_temp=0.1, ema_center=0.9)
        self.criterion = code["DINOLoss"](keys).double()
        self.criterion.momentum_teacher = self.teacher
        self.follow = code["MomentumTeacherInLossHook"].update_momentum_network
        self.warm_up = code["DINOHook"]().update_teacher_temperature
        self.task: Any = types.SimpleNamespace(model=self.model, loss=self.criterion)
        self.task.max_iteration, self.task.additional_log_data = NUM_STEPS, {}

    def loss(self, step: int, crops: Crops) -> Tensor:
        """vissl/hooks/dino_hooks.py ``on_forward``, then the loss."""
        self.task.iteration = step
        with torch.no_grad():
            self.criterion.teacher_output = self.teacher(crops.images[:1])[0].scores[0]
        self.warm_up(self.task)
        return self.criterion(self.model(crops.images)[0].scores)  # type: ignore[no-any-return]

    def after(self, step: int) -> None:
        self.follow(self.task, self.criterion.teacher_momentum)

    def buffers(self) -> list[Tensor]:
        return [self.criterion.center[0]]


class DeepClusterV2(Peer):
    def make(self) -> None:
        memory = Keys(crops_for_mb=[0], embedding_dim=8)
        sizes = {"num_train_samples": PER_EPOCH * BATCH, "BATCHSIZE_PER_REPLICA": BATCH, "DROP_LAST": True}
        keys = Keys(self.keys, num_crops=2, temperature=0.1, kmeans_iters=10, memory_params=memory, **sizes)
        self.criterion = self.code["vissl"]["DeepClusterV2Loss"](keys).double()
        batches = (crops_of_step(step, [2], 16) for step in range(PER_EPOCH))
        inputs = [{"data": [self.views(crops)], "data_idx": [crops.sample_ids.repeat(2)]} for crops in batches]
        with frozen_statistics(self.model):
            self.criterion.init_memory(inputs, lambda images: self.model([images]))

    def loss(self, step: int, crops: Crops) -> Tensor:
        if step % PER_EPOCH == 0:
            clusterings = count()
            draw = torch.randperm

            def first_centroids(num_images: int) -> Tensor:
                seed = step // PER_EPOCH * 101 + next(clusterings)
                return draw(num_images, generator=torch.Generator().manual_seed(seed))

            with patch.object(torch, "randperm", first_centroids):
                self.criterion.cluster_memory()
        rows = torch.cat(by_view(self, self.model, crops))
        return self.criterion(rows, crops.sample_ids.repeat(2))  # type: ignore[no-any-return]

    def buffers(self) -> list[Tensor]:
        return [self.criterion.local_memory_embeddings, self.criterion.centroids0, self.criterion.centroids1]


class NPID(Peer):
    """With one embedding of an image, or as PIRL has it with that of its tiles too."""

    def make(self) -> None:
        bank, temperature = self.ours.method.bank, self.keys["temperature"]
        negatives = Keys(self.keys["negative_sampling_params"], type="random")
        is_pirl = self.ours.twin.method == "pirl"
        layers = ["memory_bank.transformed", "memory_bank.image"] if is_pirl else ["memory_bank"]
        memory = Keys(embedding_dim=8, momentum=0.5, norm_init=True, update_mem_on_forward=not is_pirl)
        counts = {"num_train_samples": PER_EPOCH * BATCH, "update_mem_with_emb_index": 1, "norm_constant": -1}
        keys = Keys(counts, loss_type=self.keys["loss_type"], norm_embedding=True, temperature=temperature)
        keys |= {"memory_params": memory, "negative_sampling_params": negatives}
        self.criterion = self.code["vissl"]["NCELossWithMemory"](
            Keys(keys, loss_weights=[0.5, 0.5] if is_pirl else [1.0])
        )
        self.scores = self.criterion.nce_average
        self.scores.memory.copy_(bank.memory)  # type: ignore[union-attr]
        layer = cycle(layers)

        def draw(embedding: Tensor, y: Tensor, num_negatives: int) -> Tensor:
            drawn = bank.draw_negatives(len(y), num_negatives, next(layer))  # type: ignore[union-attr, operator]
            return torch.cat((y[:, None], drawn), dim=1)

        self.scores.do_negative_sampling = draw

    def loss(self, step: int, crops: Crops) -> Tensor:
        output = self.ours.method.run_student(self.model, crops)[0]
        outputs = [output] if isinstance(output, Tensor) and not isinstance(output, tuple) else output[::-1]
        return self.criterion(list(outputs), crops.sample_ids)  # type: ignore[no-any-return]

    def buffers(self) -> list[Tensor]:
        return [self.scores.memory, self.scores.params[2]]


@dataclass(frozen=True)
class Twin:
    """A method, its settings scaled down, and who trains it too.

    Attributes:
        method: name in METHODS.
        loss, keys, head, num_crops: of our recipe.
        peer: trains the copy.
        repository: key of REPOSITORIES; empty: lightly.
        differs: on purpose, in words.
        is_transformer: the trunk; else convolutions with batch norm.
        lr: of both; a large one lets rounding grow from step to step.
        class_token: of a transformer.
        is_apart: two views of one size go through the model one after the other.
    """

    method: str
    loss: str
    keys: dict[str, Any]
    head: tuple[str, dict[str, Any]]
    num_crops: list[int]
    peer: type[Peer]
    repository: str = ""
    differs: str = ""
    is_transformer: bool = False
    lr: float = LR
    class_token: bool = True
    is_apart: bool = True


_MLP = ("mlp", {"dims": [16, 12, 8], "use_relu": True})
_BARLOW = ("mlp", {"dims": [16, 12, 12, 8], "use_relu": True, "use_bn": True, "use_bias": False})
_BYOL = ("siamese_head", {"dims": [16, 12, 8], "predictor_dims": [12]})
_SIMSIAM = ("siamese_head", {"dims": [16, 12, 12, 8], "predictor_dims": [6], "projector_last_bn": True})
_MOCO_V3 = (
    "siamese_head",
    {"dims": [16, 12, 8], "predictor_dims": [12], "projector_last_bn": True, "predictor_last_bn": True},
)
_DINO_KEYS = {
    "output_dim": 5,
    "momentum": 0.9,
    "teacher_temp_min": 0.04,
    "teacher_temp_max": 0.07,
    "teacher_temp_warmup_iters": 20,
    "teacher_temp_interval": "epoch",
}
_PATCHES = {"dims": [16, 12, 8], "num_clusters": [5, 7]}
_DINO_HEAD = {
    "dims": [16, 12, 8],
    "num_clusters": [5],
    "activation_name": "GELU",
    "use_weight_norm_prototypes": True,
    "normalize_last_layer": True,
}
_NPID_KEYS = {
    "embedding_dim": 8,
    "loss_type": "nce",
    "temperature": 0.2,
    "negative_sampling_params": {"num_negatives": 16},
}
_DINOV2_KEYS = {"num_global_crops": 2, "momentum": 0.9, "teacher_temp_warmup_iters": 20}
_APART = "`VIEWS_APART: true`"
_INDEX = "the momentum's last step: lightly's schedule ends one step earlier, the paper's formula is ours"
TWINS = (
    Twin("simclr", "simclr_info_nce_loss", {"temperature": 0.2}, _MLP, [2], SimCLR, differs=_APART),
    Twin(
        "moco_v2",
        "moco_loss",
        {"embedding_dim": 8, "queue_size": 32, "momentum": 0.9, "temperature": 0.2},
        _MLP,
        [2],
        MoCoV2,
        differs="the teacher moves at the end of a step, not at the start of the next: the same in each forward pass",
    ),
    Twin(
        "byol",
        "byol_loss",
        {"momentum": 0.9},
        _BYOL,
        [2],
        BYOL,
        differs=f"{_APART}; the loss is 4 + 4 times lightly's; {_INDEX}",
    ),
    Twin("simsiam", "simsiam_loss", {}, _SIMSIAM, [2], SimSiam, differs=_APART),
    Twin(
        "barlow_twins",
        "barlow_twins_loss",
        {"lambda_": 0.0051, "scale_loss": 1.0},
        _BARLOW,
        [2],
        BarlowTwins,
        differs=f"{_APART}; `scale_loss: 1.0`; the projector's last layer has no bias, as in the authors' code",
    ),
    Twin(
        "barlow_twins",
        "barlow_twins_loss",
        {"lambda_": 0.0051, "scale_loss": 1.0},
        _BARLOW,
        [2],
        BarlowTwinsOfAuthors,
        "barlowtwins",
        f"{_APART}; `scale_loss: 1.0`",
    ),
    Twin("vicreg", "vicreg_loss", {}, _BARLOW, [2], VICReg, differs=_APART, lr=0.005),
    Twin("vicreg", "vicreg_loss", {}, _BARLOW, [2], VICRegOfAuthors, "vicreg", _APART, lr=0.005),
    Twin(
        "vicregl",
        "vicregl_loss",
        {"alpha": 0.75, "num_matches": [4, 2]},
        ("vicregl_head", {"dims": [16, 12, 8], "map_dims": [12, 8]}),
        [2, 1],
        VICRegLOfAuthors,
        "VICRegL",
        "boxes of mirrored crops are mirrored, theirs with `--no-flip-grid 0`; no classifier of labels",
        lr=0.005,
    ),
    Twin(
        "swav",
        "swav_loss",
        {"num_crops": 3, "num_prototypes": [5], "embedding_dim": 8},
        ("swav_head", {"dims": [16, 12, 8], "num_clusters": [5]}),
        [2, 1],
        SwAV,
        differs="no queue: lightly's is the user's to keep; prototypes have no bias, as the authors', lightly's do",
    ),
    Twin(
        "lejepa",
        "lejepa_loss",
        {"num_global_crops": 2, "lambda_": 0.05, "num_slices": 32},
        _MLP,
        [2, 1],
        LeJEPA,
        differs="directions, which are ours: lightly draws its own",
    ),
    Twin(
        "visreg",
        "visreg_loss",
        {"num_global_crops": 2, "lambda_": 0.9, "num_slices": 32},
        _MLP,
        [2, 1],
        VISRegOfAuthors,
        "visreg",
        "directions, which are ours: theirs are drawn on each process; quantiles of float64",
    ),
    Twin(
        "dino",
        "dino_loss",
        _DINO_KEYS,
        ("swav_head", _DINO_HEAD),
        [2, 1],
        DINO,
        "dino",
        "`teacher_temp_interval: epoch`",
    ),
    Twin(
        "ibot",
        "ibot_loss",
        {
            "out_dim": 5,
            "patch_out_dim": 7,
            "teacher_momentum": 0.9,
            "warmup_teacher_temp_epochs": 4,
            "mask_ratio": [0.5, 0.5],
            "mask_probability": 1.0,
        },
        ("ibot_head", _PATCHES),
        [2, 1],
        IBOT,
        "ibot",
        "masks, which are ours; the center of patches is over masked ones",
        True,
    ),
    Twin(
        "dinov2",
        "dinov2_loss",
        _DINOV2_KEYS,
        ("ibot_head", _PATCHES),
        [2, 1],
        DINOv2,
        "dinov2",
        "masks, which are ours",
        True,
    ),
    Twin(
        "dinov3",
        "dinov3_loss",
        {**_DINOV2_KEYS, "gram_start": 0.5, "gram_interval": 10, "gram_updates": 3},
        ("dinov3_head", _PATCHES),
        [2, 1],
        DINOv3,
        "dinov3",
        "as DINOv2; the anchor sees the teacher's crops; the other losses are dinov2's",
        True,
    ),
    Twin(
        "mae",
        "mae_loss",
        {"mask_ratio": 0.75},
        ("patch_predictor", {"dims": [16, 8, 48], "depth": 1, "num_heads": 2}),
        [1],
        MAE,
        "mae",
        "masks, which are ours; the decoder sees hidden patches in another order",
        True,
    ),
    Twin(
        "maskfeat",
        "maskfeat_loss",
        {"mask_ratio": 0.4, "cell_size": 2},
        ("hog_head", {"dims": [16, 108]}),
        [1],
        MaskFeat,
        "SlowFast",
        "masks, which are ours",
        True,
    ),
    Twin(
        "msn",
        "msn_loss",
        {"output_dim": 5, "momentum": 0.9, "final_momentum": 0.98, "patch_drop": 0.25},
        ("swav_head", _DINO_HEAD),
        [3],
        MSN,
        "msn",
        "which patches are dropped is ours; `final_momentum`",
        True,
    ),
    Twin(
        "moco_v3",
        "moco_v3_loss",
        {"momentum": 0.9, "temperature": 0.2},
        _MOCO_V3,
        [2],
        MoCoV3,
        "moco-v3",
        f"{_APART}; the teacher moves at the end of a step, theirs at the start of the next",
    ),
    Twin(
        "nnclr",
        "nnclr_loss",
        {"embedding_dim": 8, "queue_size": 32, "temperature": 0.2},
        _SIMSIAM,
        [2],
        NNCLR,
        "solo-learn",
        _APART,
    ),
    Twin(
        "supcon",
        "supcon_loss",
        {"temperature": 0.2},
        _MLP,
        [2],
        SupCon,
        "SupContrast",
        f"{_APART}; theirs is multiplied by temperature / base_temperature, 1 here",
    ),
    Twin(
        "dino",
        "dino_loss",
        {**_DINO_KEYS, "teacher_temp_interval": "step"},
        ("swav_head", _DINO_HEAD),
        [2, 1],
        DINOOfVISSL,
        "vissl",
    ),
    Twin(
        "swav",
        "swav_loss",
        {"num_crops": 3, "num_prototypes": [5], "embedding_dim": 8, "queue": {"queue_length": 32}},
        ("swav_head", {"dims": [16, 12, 8], "num_clusters": [5]}),
        [2, 1],
        SwAVOfVISSL,
        "vissl",
        "the queue begins empty, theirs with random rows",
    ),
    Twin(
        "swav_momentum",
        "swav_momentum_loss",
        {"num_crops": 2, "num_prototypes": [5], "embedding_dim": 8, "momentum": 0.9, "queue": {"queue_length": 32}},
        ("swav_head", {"dims": [16, 12, 8], "num_clusters": [5]}),
        [2],
        SwAVMomentum,
        "vissl",
        "the queue begins empty, theirs with random rows; the teacher's batch norm has no running statistics",
        is_apart=False,
    ),
    Twin(
        "deepcluster_v2",
        "deepclusterv2_loss",
        {"embedding_dim": 8, "num_clusters": [5, 4]},
        _MLP,
        [2],
        DeepClusterV2,
        "vissl",
        f"{_APART}; the images that clusterings begin with, which are ours",
    ),
    Twin("npid", "nce_loss_with_memory", _NPID_KEYS, _MLP, [1], NPID, "vissl", "negatives, which are ours"),
    Twin(
        "pirl",
        "pirl_loss",
        {**_NPID_KEYS, "num_towers": 4},
        ("pirl_head", {"dims": [16, 8], "num_towers": 4}),
        [2],
        NPID,
        "vissl",
        "negatives and orders of tiles, which are ours",
        is_apart=False,
    ),
    Twin(
        "simmim",
        "simmim_loss",
        {"mask_ratio": 0.6, "mask_patch_size": 4},
        ("pixel_head", {"dims": [16, 48]}),
        [1],
        SimMIM,
        "SimMIM",
        "masks, which are ours; theirs divides by the masked pixels + 1e-5",
        True,
    ),
    Twin(
        "ijepa",
        "ijepa_loss",
        {"momentum": 0.9, "num_targets": 2, "target_scale": 0.2, "context_scale": 0.6},
        ("patch_predictor", {"dims": [16, 8, 16], "depth": 1, "num_heads": 2}),
        [1],
        IJEPA,
        "ijepa",
        "masks, which are ours; no class token",
        True,
        class_token=False,
    ),
    Twin(
        "data2vec",
        "data2vec_loss",
        {"momentum": 0.9, "mask_ratio": 0.6, "average_top_k_layers": 2, "beta": 2.0},
        ("latent_head", {"dims": [16, 16]}),
        [1],
        Data2Vec,
        "data2vec_vision",
        "masks, which are ours; `--post_target_layer_norm`",
        True,
    ),
)


# What files of VISSL import from elsewhere, in one process.
_OF_VISSL: dict[str, Any] = {
    **{name: lambda x: x for name in ("all_reduce_sum", "all_reduce_mean", "all_reduce_max", "gather_from_all")},
    **{"get_world_size": lambda: 1, "is_distributed_training_run": lambda: False, "get_cuda_device_index": lambda: -1},
    **{"register_loss": lambda name: lambda criterion: criterion, "is_pos_int": lambda number: number > 0},
    **{"ClassyLoss": nn.Module, "ClassyHook": type("ClassyHook", (), {"_noop": None}), "AttrDict": Keys},
    **{
        "tasks": types.SimpleNamespace(ClassyTask=None),
        "get_no_ddp_model": lambda model: model,
        "csr_matrix": csr_matrix,
        "logging": logging,
    },
    **{"List": list, "Union": Union},
}


class _MetricLogger:
    """Stands for data2vec's, and prints nothing."""

    def __init__(self, delimiter: str):
        self.meters: dict[str, Any] = {}

    def log_every(self, batches: list[Any], *_: Any) -> list[Any]:
        return batches

    def synchronize_between_processes(self) -> None: ...

    add_meter = update = lambda *_, **__: None


def read_code(folder: Path, repositories: Collection[str]) -> dict[str, dict[str, Any]]:
    """Run the definitions that REPOSITORIES names of some of them, as they are at its commits."""
    found: dict[str, dict[str, Any]] = {}
    for name in repositories:
        _, commit, files = REPOSITORIES[name]
        space: dict[str, Any] = {"torch": torch, "nn": nn, "F": F, "np": np, "math": math, "dist": dist}
        space |= {"gather": lambda x: x, "get_rank": lambda: 0, "AllReduce": _Itself, "optim": torch.optim}
        space |= _OF_VISSL | {"utils": types.SimpleNamespace(MetricLogger=_MetricLogger, SmoothedValue=dict)}
        space |= {"Iterable": Iterable, "print": lambda *_, **__: None}
        for path, names in files.items():
            text = subprocess.check_output(
                ["git", "-C", str(folder / name), "show", f"{commit or 'HEAD'}:{path}"], text=True
            )
            nodes = [node for node in ast.parse(text).body if getattr(node, "name", None) in names]
            for node in [*_others(ast.parse(text)), *nodes]:
                exec(compile(ast.Module([node], []), path, "exec"), space)
        found[name] = space
    return found


def _others(tree: ast.Module) -> Iterator[ast.stmt]:
    """Find what takes over where xformers is missing."""
    for node in tree.body:
        if isinstance(node, ast.Try):
            yield from node.handlers[0].body


class _Itself:
    """Stands for ``AllReduce.apply`` of one process."""

    @staticmethod
    def apply(x: Tensor) -> Tensor:
        return x


@contextmanager
def one_process_on_the_cpu() -> Iterator[None]:
    """Join a group of one, which authors' code asks for; ``cuda()`` and ``float()`` leave tensors as they are."""
    kept = Tensor.cuda, Tensor.float, torch.float
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        torch.set_default_dtype(torch.float64)  # weights of masks, 1 / count, are made in it
        Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign, assignment]
        torch.float = torch.float64  # type: ignore[misc]
        Tensor.float = lambda self: self.double()  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            torch.set_default_dtype(torch.float32)
            Tensor.cuda, Tensor.float, torch.float = kept  # type: ignore[method-assign]
            dist.destroy_process_group()


def largest_difference(twin: Twin, code: dict[str, Any], num_steps: int = NUM_STEPS) -> float:
    """Compare losses, weights, teacher and state over all steps. Raises ValueError if both sides hold other tensors."""
    ours = Ours(twin)
    peer, largest = twin.peer(ours, code), 0.0
    first = [weight.detach().clone() for weight in ours.model.parameters()]
    for step in range(num_steps):
        crops = crops_of_step(step, twin.num_crops, 16)
        largest = max(largest, abs(ours.step(step, crops) - peer.step(step, crops)))
        for own, other in zip(ours.state(), peer.state(), strict=True):
            largest = max(largest, float((own.detach() - other.detach().view_as(own)).abs().max()))
    moved = max(
        float((new.detach() - old).abs().max()) for new, old in zip(ours.model.parameters(), first, strict=True)
    )
    if not 1e-2 < moved < 1e3:
        raise ValueError(f"{twin.method} moved its weights by {moved:.1e}: nothing is compared")
    return largest


def peer_name(twin: Twin) -> str:
    if not twin.repository:
        return LIGHTLY
    owner, commit, _ = REPOSITORIES[twin.repository]
    return f"{owner}/{twin.repository} {commit[:7]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", 1)[0])
    parser.add_argument("--repositories", type=Path, help="folder with clones of the authors' repositories")
    parser.add_argument("--only", default="", help="names of methods, with commas between")
    parser.add_argument("--write", action="store_true", help="write the table into docs/methods.md")
    args = parser.parse_args()
    torch.set_num_threads(1)
    twins = [twin for twin in TWINS if not args.only or twin.method in args.only.split(",")]
    repositories = dict.fromkeys(twin.repository for twin in twins if twin.repository)
    code = read_code(args.repositories, repositories) if args.repositories else {}
    rows = ["| method | peer | steps | largest difference | what differs on purpose |", f"|{' --- |' * 5}"]
    run: Callable[[], Any] = one_process_on_the_cpu
    with run():
        for twin in twins:
            if twin.repository and not code:
                continue
            found = largest_difference(twin, code)
            rows.append(
                f"| `{twin.method}` | {peer_name(twin)} | {NUM_STEPS} | {found:.1e} | {twin.differs or 'nothing'} |"
            )
            print(rows[-1], flush=True)
    if args.write:
        page = PAGE.read_text()
        begin, end = page.index(MARKS[0]) + len(MARKS[0]), page.index(MARKS[1])
        PAGE.write_text("\n".join([page[:begin], *rows, page[end:]]))


if __name__ == "__main__":
    main()
