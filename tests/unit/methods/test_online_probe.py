"""The online probe, in one process; ``tests/dist/test_online_probe.py`` compares levels and with plain regression."""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch

from tests.unit.methods.batches import LossBatch
from vissl_zero.methods import online_probe
from vissl_zero.methods.online_probe import OnlineProbe

ROWS = torch.randn(3, 8, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
LABELS = torch.tensor([2, -1, 0, 1, -1, 1, 0, 2])


def _learned(kept: torch.Tensor, steps: int = 3) -> tuple[dict[str, Any], list[tuple[float, float]]]:
    """State and figures after ``steps`` steps of the samples ``kept``, each in two crops."""
    probe, counts = OnlineProbe(4, 3, lr=0.1, dtype=torch.float64), []
    for rows in ROWS[:steps]:
        batch: Any = LossBatch([2], torch.arange(8)[kept], int(kept.sum()), LABELS[kept])
        probe.learn([torch.cat((rows[kept], rows[kept] + 1))], batch)
        counts.append(tuple(number.item() for number in probe.step()))
    return dict(probe.state_dict()), counts


def test_samples_without_a_label_count_for_nothing() -> None:
    state, counts = _learned(torch.ones(8, dtype=torch.bool))
    expected, of_labeled = _learned(LABELS >= 0)
    assert counts == of_labeled and counts[0][0] == 12
    for name, tensor in state.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-12)
    assert state["weight"].abs().sum() > 0


def test_a_batch_without_labels_changes_no_statistics() -> None:
    state, ((count, right),) = _learned(LABELS < 0, steps=1)
    assert (count, right) == (0, 0) and not state["mean"].any() and not state["mean_square"].any()


def test_adams_constants_are_torchs() -> None:
    defaults = {name: item.default for name, item in signature(torch.optim.Adam).parameters.items()}
    assert (defaults["betas"], defaults["eps"]) == (online_probe._BETAS, online_probe._EPS)


def test_statistics_follow_the_trunk_over_a_hundred_steps() -> None:
    """A hundredth of the way a step, once there were as many; before that, they are the mean of all steps."""
    for past, rate, count in ((0, 1.0, 1), (3, 1 / 4, 8), (99, 1 / 100, 8), (1000, 1 / 100, 8)):
        probe = OnlineProbe(4, 3, lr=0.1, dtype=torch.float64)
        probe.num_steps.fill_(past)
        batch: Any = LossBatch([1], torch.arange(count), count, LABELS[:count].clamp(min=0))
        probe.learn([torch.ones(count, 4, dtype=torch.float64)], batch)
        probe.step()
        torch.testing.assert_close(probe.mean, torch.full((4,), rate, dtype=torch.float64))
