"""Losses that couple samples: over several ranks with uneven rows they are those of one process, gradients included."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.ranks import run_on_ranks
from vissl_zero import collectives
from vissl_zero.methods.contrastive import nnclr_loss, supcon_loss
from vissl_zero.methods.dino import Center, dino_loss, dinov2_loss, koleo, masked_patch_loss, sinkhorn_targets
from vissl_zero.methods.gather import count_samples
from vissl_zero.methods.lejepa import lejepa_loss, random_directions
from vissl_zero.methods.masked_modeling import latent_regression, mae_loss, simmim_loss
from vissl_zero.methods.pretext import MemoryBank, pirl_loss
from vissl_zero.methods.prototypes import NOT_ASSIGNED, ClusterMemory, deepcluster_loss, msn_loss
from vissl_zero.methods.two_views import KeyQueue, barlow_twins_loss, info_nce, nt_xent, symmetric_info_nce, vicreg_loss
from vissl_zero.methods.vicregl import global_loss, local_loss
from vissl_zero.methods.visreg import visreg_loss
from vissl_zero.models.keyed_random import set_random_key

NUM_IMAGES, DIM = 12, 4
# Rows of each rank. The last rank may hold none.
SPLITS = {1: [7], 2: [5, 2], 3: [4, 3, 0]}


def _constant(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _mask(mine: slice) -> Tensor:
    """(n, 4), with a different number of masked patches in each image, and none in one."""
    mask = _constant(50, 7, 4) > 0
    mask[1] = False
    return mask[mine]


def _pirl(x: Tensor, mine: slice) -> Tensor:
    """Twice, as the memory that the first call updates enters the second."""
    bank, sample_ids = MemoryBank(NUM_IMAGES, DIM, momentum=0.5).double(), torch.arange(7)[mine] * 5 % NUM_IMAGES
    total = x.new_zeros(())
    for step in range(2):
        set_random_key(0, step, sample_ids)
        total = total + pirl_loss(
            x[:, 0], x[:, 1], sample_ids, bank, 3, temperature=0.5, weight=0.5, use_info_nce=False
        )
        bank.update(x[:, 0].detach(), sample_ids)
    return total


def _deepcluster(x: Tensor, mine: slice) -> Tensor:
    memory, sample_ids = (
        ClusterMemory(NUM_IMAGES, DIM, [3, 2], num_crops=1).double(),
        torch.arange(7)[mine] * 5 % NUM_IMAGES,
    )
    memory.update(x[:, 0][None].detach(), sample_ids)
    memory.cluster(epoch=0, num_iters=3)
    assignments = memory.assignments[:, sample_ids]
    assignments[:, sample_ids == 5] = NOT_ASSIGNED
    return deepcluster_loss(x.transpose(0, 1), memory.centroids, assignments, temperature=0.1)


def _moco_v2(x: Tensor, mine: slice) -> Tensor:
    queue = KeyQueue(10, DIM).double()
    queue.push(x[:, 2].detach())
    return info_nce(x[:, 0], x[:, 1], queue.keys, 0.3)


def _dino(x: Tensor, mine: slice) -> Tensor:
    center = Center(DIM, momentum=0.9).double()
    teacher = x[:, :2].detach().transpose(0, 1) * 2
    center.update(center.sums(teacher))
    return dino_loss(x.transpose(0, 1), center.targets(teacher, 0.3), student_temperature=0.1)


def _ibot(x: Tensor, mine: slice) -> Tensor:
    mask = _mask(mine)
    patches = x[:, :4]
    return masked_patch_loss(
        patches, sinkhorn_targets(patches.detach().flip(2), 0.4, counts=mask), mask, student_temperature=0.1
    )


def _dinov2(x: Tensor, mine: slice) -> Tensor:
    views, mask = x.transpose(0, 1), _mask(mine).repeat(2, 1)
    patches = torch.cat((x[:, :4], x[:, 2:6]))
    teacher = views[:2].detach() * 1.5
    return dinov2_loss(
        (views, teacher),
        (patches, patches.detach() * 2),
        mask,
        views[2:4],
        0.5,
        student_temperature=0.1,
        weights=(1.0, 1.0, 0.1),
    )


def _msn(x: Tensor, mine: slice) -> Tensor:
    views = F.normalize(x.transpose(0, 1), dim=2)
    return msn_loss(
        views[1:], views[0], 0.2, use_sinkhorn=True, entropy_weight=0.5, sharpening=0.25, mean_entropy_weight=1.0
    )


def _simmim(x: Tensor, mine: slice) -> Tensor:
    return simmim_loss(
        x.unflatten(2, (2, 2)).repeat(1, 1, 2, 2), _constant(51, 7, 6, 4, 4)[mine], _mask(mine).view(-1, 2, 2)
    )


def _vicregl(x: Tensor, mine: slice) -> Tensor:
    """Three views of 2, 2 and 1 places, whose boxes are drawn for the whole batch."""
    maps = [part.transpose(1, 2)[:, :, None] * 0.3 for part in x[:, :5].split([2, 2, 1], dim=1)]
    boxes = _constant(55, 7, 3, 4)[mine].transpose(0, 1)
    return global_loss(x[:, :3].transpose(0, 1) * 0.3, (1, 1, 1)) + local_loss(maps, boxes, (1, 2), (1, 1, 1))


# Each takes (n, 6, DIM) and the slice of the whole batch that these are.
LOSSES: dict[str, Callable[[Tensor, slice], Tensor]] = {
    "simclr": lambda x, _: nt_xent((x[:, 0], x[:, 1]), 0.3),
    "multicrop_simclr": lambda x, _: nt_xent(x[:, :4].unbind(1), 0.3),
    "moco_v2": _moco_v2,
    "moco_v3": lambda x, _: symmetric_info_nce((x[:, 0], x[:, 1]), (x[:, 2], x[:, 3]), 0.3),
    "barlow_twins": lambda x, _: barlow_twins_loss(x[:, 0], x[:, 1], 0.1, scale=1.0),
    "vicreg": lambda x, _: vicreg_loss(x[:, 0] * 0.3, x[:, 1] * 0.3, invariance=25.0, variance=25.0, covariance=1.0),
    "vicregl": _vicregl,
    "nnclr": lambda x, _: nnclr_loss(
        (x[:, 0], x[:, 1]), (x[:, 2], x[:, 3]), F.normalize(_constant(54, 9, DIM), dim=1), 0.3
    ),
    "supcon": lambda x, mine: supcon_loss(x[:, :2].unbind(1), torch.tensor([0, 1, 0, 2, -1, -1, 1])[mine], 0.3),
    "lejepa": lambda x, _: lejepa_loss(
        x.transpose(0, 1), 2, random_directions(DIM, 5, 3, x), weight=0.05, num_points=17, max_point=3
    ),
    "visreg": lambda x, _: visreg_loss(x.transpose(0, 1), 2, random_directions(DIM, 5, 3, x), weight=0.9),
    "koleo": lambda x, _: koleo(x[:, 0]),
    "dino": _dino,
    "ibot": _ibot,
    "dinov2": _dinov2,
    "msn": _msn,
    "mae": lambda x, mine: mae_loss(x[:, :4], _constant(52, 7, 4, DIM)[mine], _mask(mine)),
    "simmim": _simmim,
    "ijepa": lambda x, mine: latent_regression(x, _constant(53, 7, 6, DIM)[mine], beta=1.0),
    "pirl": _pirl,
    "deepcluster_v2": _deepcluster,
}


def _train_step(counts: list[int]) -> dict[str, tuple[float, Tensor]]:
    """Loss and gradient of a linear layer as the training loop gets them, for every method."""
    rank, world_size, total = collectives.rank(), collectives.world_size(), sum(counts)
    mine = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
    images = _constant(1, total, 6, 5)[mine]
    results = {}
    for name, loss_of in LOSSES.items():
        weight = _constant(2, DIM, 5).requires_grad_()
        loss = loss_of(images @ weight.T, mine)
        assert loss.isfinite(), name
        (loss * (counts[rank] * world_size / total)).backward()
        assert weight.grad is not None
        results[name] = (
            collectives.all_reduce_sum(loss.detach() * (counts[rank] / total)).item(),
            collectives.all_reduce_sum(weight.grad) / world_size,
        )
    return results


def test_losses_and_gradients_do_not_depend_on_the_number_of_ranks():
    (alone,) = run_on_ranks(1, _train_step, SPLITS[1])
    for world_size in (2, 3):
        for of_rank in run_on_ranks(world_size, _train_step, SPLITS[world_size]):
            for name, (loss, gradient) in of_rank.items():
                assert loss == pytest.approx(alone[name][0], rel=1e-12, abs=1e-12), (name, world_size)
                difference = (gradient - alone[name][1]).abs().max().item()
                assert difference <= 1e-12 * max(1.0, alone[name][1].abs().max().item()), (name, world_size)
                assert gradient.abs().max() > 1e-3, name


def _state_after_updates(counts: list[int]) -> list[Tensor]:
    rank = collectives.rank()
    mine = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
    queue = KeyQueue(10, DIM).double()
    for step in range(3):
        queue.push(_constant(step, 7, DIM)[mine])
    known = count_samples(len(range(*mine.indices(7))), torch.device("cpu"))
    assert (known.per_rank, known.local, known.first) == (tuple(counts), counts[rank], mine.start)
    return [queue.keys, queue.position]


def test_queue_holds_samples_in_one_order():
    (alone,) = run_on_ranks(1, _state_after_updates, SPLITS[1])
    for world_size in (2, 3):
        for state in run_on_ranks(world_size, _state_after_updates, SPLITS[world_size]):
            assert all(torch.equal(one, other) for one, other in zip(state, alone, strict=True))
