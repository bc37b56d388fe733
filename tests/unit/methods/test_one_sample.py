"""A mean over samples is that of one sample where there is only one, as at the end of an epoch of small batches."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from vissl_zero.methods.dino import Center, dino_loss, masked_patch_loss
from vissl_zero.methods.distillation import dino_distillation_loss, distillation_loss
from vissl_zero.methods.feature_distillation import feature_distance, queue_distillation_loss
from vissl_zero.methods.gather import weighted_mean
from vissl_zero.methods.lejepa import sigreg
from vissl_zero.methods.masked_modeling import latent_regression
from vissl_zero.methods.pretext import MemoryBank, info_nce_loss, nce_loss
from vissl_zero.methods.prototypes import msn_loss
from vissl_zero.methods.supervised import binary_cross_entropy, soft_cross_entropy
from vissl_zero.methods.two_views import cosine, info_nce, vicreg_loss
from vissl_zero.methods.vicregl import _terms_of_matches, global_loss, spread_and_redundancy

SCORES, OTHERS = torch.tensor([0.3, -1.2, 0.7]).double(), torch.tensor([-0.4, 0.9, 0.1]).double()
SHARES, NUMBER = OTHERS.softmax(dim=0), torch.tensor([2.5]).double()
UNIT = torch.eye(3).double()


def _times(row: Tensor, count: int) -> Tensor:
    return row.expand(count, -1)


def _center(count: int) -> Tensor:
    center = Center(3, momentum=0.0)
    center.update(torch.cat((count * SCORES, torch.tensor([count]))).float())
    return center.mean


def _masked(count: int) -> Tensor:
    """Of one image, of whose four equal patches so many are masked."""
    is_masked = (torch.arange(4) < count)[None]
    return masked_patch_loss(_times(SCORES, 4)[None], _times(SHARES, 4)[None], is_masked, 0.5)


# The loss of so many equal samples, or numbers where the divisor counts numbers
LOSSES: dict[str, Callable[[int], Tensor]] = {
    "mse": lambda n: distillation_loss(_times(NUMBER, n), _times(-NUMBER, n), 1.0, "mse"),
    "kl": lambda n: distillation_loss(_times(SCORES, n), _times(OTHERS, n), 2.0, "kl_divergence"),
    "dino": lambda n: dino_loss(_times(SCORES, n).repeat(2, 1, 1), _times(SHARES, n)[None], 0.5),
    "dino_distillation": lambda n: dino_distillation_loss(_times(SCORES, n)[None], _times(SHARES, n)[None], 0.5, False),
    "center": _center,
    "masked_patches": _masked,
    "images": lambda n: masked_patch_loss(
        SCORES.expand(n, 2, -1), SHARES.expand(n, 2, -1), torch.ones(n, 2, dtype=torch.bool), 0.5
    ),
    "queue_distillation": lambda n: queue_distillation_loss(_times(UNIT[0], n), _times(UNIT[1], n), UNIT, 0.5),
    "features": lambda n: feature_distance(_times(NUMBER, n), _times(-NUMBER, n), False),
    "directions": lambda n: feature_distance(_times(NUMBER, n), _times(-NUMBER, n), True),
    "weighted": lambda n: weighted_mean(NUMBER.expand(n), torch.full((n,), 3.0).double(), n),
    "latents": lambda n: latent_regression(_times(NUMBER, n), _times(NUMBER, n), 1.0),
    "bank": lambda n: info_nce_loss(_times(SCORES, n), 0.5),
    "npid": lambda n: nce_loss(_times(SCORES, n), MemoryBank(5, 3, 0.5), 0.5),
    "lejepa": lambda n: sigreg(_times(SCORES, n)[None], UNIT, 17, 5.0) / n,  # a sum over samples
    "msn": lambda n: msn_loss(_times(SCORES, n)[None], _times(OTHERS, n), 0.5, 0.5, 1.0, 1.0, False),
    "soft_labels": lambda n: soft_cross_entropy(_times(SCORES, n), _times(SHARES, n)),
    "binary": lambda n: binary_cross_entropy(_times(NUMBER, n), torch.ones(n, 1)),
    "moco": lambda n: info_nce(_times(SCORES, n), _times(OTHERS, n), UNIT, 0.5),
    "cosine": lambda n: cosine(_times(SCORES, n), _times(OTHERS, n)),
    "vicreg": lambda n: vicreg_loss(_times(NUMBER, n), _times(-NUMBER, n), 1.0, 0.0, 0.0),
    "vicregl": lambda n: global_loss(torch.stack((_times(NUMBER, n), _times(-NUMBER, n))), (1.0, 0.0, 0.0)),
    "matches": lambda n: _terms_of_matches(_times(NUMBER, n)[:, None], _times(-NUMBER, n)[:, None])[0],
}


@pytest.mark.parametrize("name", LOSSES)
def test_the_loss_of_one_sample_is_that_of_several_that_are_equal(name: str) -> None:
    one, three = LOSSES[name](1), LOSSES[name](3)
    assert bool(one.abs().max() > 0.01)
    torch.testing.assert_close(one, three)


def test_the_variance_of_two_samples_is_unbiased() -> None:
    rows = torch.tensor([[0.1, 0.2], [0.3, -0.2]]).double()
    deviations = (rows.var(dim=0) + 1e-4).sqrt()
    torch.testing.assert_close(vicreg_loss(rows, rows, 0.0, 1.0, 0.0), (1 - deviations).mean())
    products = rows.T.cov()
    torch.testing.assert_close(vicreg_loss(rows, rows, 0.0, 0.0, 1.0), 2 * products[0, 1] ** 2)
    spread, redundancy = spread_and_redundancy(rows[:, None])
    torch.testing.assert_close(spread, (1 - deviations).mean())
    torch.testing.assert_close(redundancy, products[0, 1] ** 2)
