"""Metrics that show the collapse of a self-supervised model before its loss does."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


@torch.no_grad()
def clustering_sums(embeddings: Tensor, assignments: Sequence[Tensor]) -> Tensor:
    """Compute this rank's terms of ``clustering_health``, to be summed over ranks.

    Args:
        embeddings: (m, D) of this rank; any m.
        assignments: per layer of prototypes (m, K_i), rows sum to 1.
    Returns:
        1-d, float64: X^T X of the embeddings, m, and per layer the sum of entropies and, for each prototype, the number
        of rows that assign the most to it.
    """
    wide = embeddings.double()  # X^T X squares the condition number
    parts = [(wide.T @ wide).flatten(), wide.new_tensor([len(wide)])]
    for rows in assignments:
        probabilities = rows.double()
        parts.append(-torch.xlogy(probabilities, probabilities).sum().reshape(1))
        parts.append(torch.bincount(probabilities.argmax(dim=1), minlength=rows.shape[1]).double())
    return torch.cat(parts)


def clustering_health(sums: Tensor, dim: int, num_prototypes: Sequence[int]) -> dict[str, float]:
    """Compute assignment entropy, prototypes in use and effective rank.

    Args:
        sums: ``clustering_sums`` over all samples.
        dim: D, of the embeddings.
        num_prototypes: K_i of each layer.
    Returns:
        ``assignment_entropy``: mean entropy of a row over ln K, mean over layers; 1: all assignments are uniform.
        ``prototypes_in_use``: number of prototypes to which at least one row assigns the most, summed over layers.
        ``effective_rank``: see ``effective_rank``; 1: all embeddings have the same direction.
    Cost: one transfer to the host and the eigenvalues of a D x D matrix.
    """
    sizes = [dim * dim, 1, *(size for count in num_prototypes for size in (1, count))]
    gram, num_rows, *per_layer = sums.cpu().split(sizes)
    entropies, counts = per_layer[::2], per_layer[1::2]
    count = max(float(num_rows), 1.0)
    # A single prototype has ln 1 = 0 and entropy 0: the ratio is 0, not NaN.
    scales = [count * max(math.log(number), 1e-12) for number in num_prototypes]
    return {
        "assignment_entropy": sum(float(e) / s for e, s in zip(entropies, scales, strict=True)) / len(scales),
        "prototypes_in_use": float(sum(int((c > 0).sum()) for c in counts)),
        "effective_rank": effective_rank(gram.view(dim, dim)),
    }


def effective_rank(gram: Tensor) -> float:
    """Compute the exp of the entropy of normalized singular values (Roy and Vetterli 2007; RankMe, arXiv 2210.02885).

    Args:
        gram: (D, D) float64, X^T X of the rows X, not centered, so that a model with one output for all images has
            rank 1.
    Returns:
        Between 1 and D; NaN for a matrix with NaN or infinity, 0 for no rows.
    """
    if not bool(torch.isfinite(gram).all()):
        return math.nan
    # Singular values of X are square roots of X^T X's eigenvalues. Eigenvalues within rounding error of 0 count as 0:
    # their square roots, about 1e-8, differ between processors.
    eigenvalues = torch.linalg.eigvalsh(gram)
    rounding = float(eigenvalues[-1]) * len(gram) * torch.finfo(gram.dtype).eps
    singular_values = torch.where(eigenvalues > rounding, eigenvalues, 0.0).sqrt()
    total = float(singular_values.sum())
    if total == 0.0:
        return 0.0
    shares = singular_values / total
    return math.exp(float(-torch.xlogy(shares, shares).sum()))


_MOST_FEATURES = 256  # the all-reduce has D * D float64: with D = 2,048 it would be 32 MiB


@torch.no_grad()
def embedding_sums(embeddings: Tensor) -> Tensor:
    """Compute X^T X of unit rows for ``embedding_rank``, to be summed over ranks: float64, 1-d.

    Args:
        embeddings: (m, D) of this rank; any m; only the first 256 features are used.
    """
    rows = F.normalize(embeddings[:, :_MOST_FEATURES].double())
    return (rows.T @ rows).flatten()


def embedding_rank(sums: Tensor) -> dict[str, float]:
    """Compute ``effective_rank`` of the embeddings of all ranks; 1: all have the same direction.

    Args:
        sums: ``embedding_sums``, summed over all ranks.
    """
    dim = math.isqrt(sums.numel())
    return {"effective_rank": effective_rank(sums.cpu().view(dim, dim))}


class CollapseRule(ABC):
    """Decides from a method's metrics, step by step, whether its model collapses."""

    @abstractmethod
    def update(self, step: int, loss: float | None, watch: Mapping[str, float]) -> str | None:
        """Add one step, and return the warning to print, or None.

        Args:
            step: optimizer step.
            loss: loss of the step; None if the step was skipped.
            watch: metrics of the step (``Method.health``).
        """


class _RecentMetrics:
    """Means of the metrics of the last ``WINDOW`` steps, and of at least ``FEWEST`` measurements.

    Metrics are measured every LOG_FREQUENCY-th step.
    """

    # A single batch may have a low rank by chance, and early steps always do.
    WINDOW = 20
    FEWEST = 5

    def __init__(self) -> None:
        self._recent: deque[tuple[int, tuple[float, ...]]] = deque()
        self._first_step: int | None = None

    def means(self, step: int, metrics: tuple[float, ...]) -> tuple[float, ...] | None:
        """Add the finite metrics of a step, and return the means; None before there are enough measurements."""
        if self._first_step is None:
            self._first_step = step
        self._recent.append((step, metrics))
        while len(self._recent) > self.FEWEST and self._recent[0][0] <= step - self.WINDOW:
            self._recent.popleft()
        if len(self._recent) < self.FEWEST or step - self._first_step + 1 < self.WINDOW:
            return None
        columns = zip(*(row for _, row in self._recent), strict=True)
        return tuple(sum(column) / len(self._recent) for column in columns)


class Since:
    """Counts for how many consecutive steps a condition has held."""

    def __init__(self) -> None:
        self._begin: int | None = None

    def num_steps(self, step: int, holds: bool) -> int:
        """Add a step, and return the number of consecutive steps, this one included; 0 if the condition is false."""
        if not holds:
            self._begin = None
            return 0
        if self._begin is None:
            self._begin = step
        return step - self._begin + 1


class ClusteringCollapse(CollapseRule):
    """Decides from the metrics of ``clustering_health`` whether a clustering method collapses.

    A collapsed model has the same embedding for every image: the effective rank of the embeddings approaches 1, every
    assignment becomes uniform (entropy 1 as a share of its maximum), and the loss stays at chance level. None of these
    is enough alone: an untrained model may have all three, and a model that learns few clusters loses rank too. So
    there are two conditions for a warning, both on means (``_RecentMetrics``):

    - *falling*: the entropy is at least ``UNIFORM``, and the rank at most half of the highest mean so far;
    - *stuck*: the entropy is at least ``UNIFORM``, and the loss within 1 % of chance, for ``patience`` steps in a row.

    Measured on SwAV on digits, a RegNet of 24 k parameters, 30 prototypes, 88 to 176 steps: in five runs that ended
    worse than they began (kNN .67 -> .53 to .62) the entropy passed .97 within 20 to 90 steps while the rank fell from
    12 to between 1.0 and 5.3; in runs that learned (loss 3.4 -> 2.1) the entropy stayed below .86, though the rank fell
    to between 2.9 and 5.1 before it rose again. The loss reached chance level up to 80 steps after the entropy.

    Args:
        guessing: loss at chance level, with the same probability for every prototype.
        patience: steps without progress before the warning *stuck*.
        advice: remedies, as the end of a sentence.
    """

    UNIFORM = 0.97

    def __init__(self, guessing: float, patience: int, advice: str):
        self._guessing = guessing
        self._advice = advice
        self._patience = patience
        self._recent = _RecentMetrics()
        self._highest_rank = 0.0
        self._stuck = Since()

    def update(self, step: int, loss: float | None, watch: Mapping[str, float]) -> str | None:
        """Update the verdict with one step; see ``CollapseRule``."""
        entropy, rank = (watch.get(name, math.nan) for name in ("assignment_entropy", "effective_rank"))
        if loss is None or not all(map(math.isfinite, (loss, entropy, rank))):
            return None
        means = self._recent.means(step, (loss, entropy, rank))
        if means is None:
            return None
        loss, entropy, rank = means
        self._highest_rank = max(self._highest_rank, rank)
        is_uniform = entropy >= self.UNIFORM
        # Relative, because chance level is the logarithm of the number of prototypes.
        is_guessing = abs(loss - self._guessing) <= 0.01 * self._guessing
        num_stuck = self._stuck.num_steps(step, is_uniform and is_guessing)
        if is_uniform and rank <= 0.5 * self._highest_rank:
            sign = f"the effective rank of its embeddings fell from {self._highest_rank:.1f} to {rank:.1f}"
        elif num_stuck >= self._patience:
            sign = f"it has not learned anything in {num_stuck} steps"
        else:
            return None
        return (
            f"the model collapses (step {step}): {sign}, all images get nearly the same assignment "
            f"({100 * entropy:.0f} % of the largest entropy), and the loss is {loss:.3f} where guessing gives "
            f"{self._guessing:.3f}. What helps: {self._advice}."
        )


def trivial_loss(num_prototypes: Sequence[int]) -> float:
    """Return the loss at chance level: the mean of ``ln(prototypes)`` over the prototype layers of a head."""
    return sum(math.log(count) for count in num_prototypes) / len(num_prototypes)


class RankCollapse(CollapseRule):
    """Decides from the effective rank of embeddings whether a model collapses to one embedding for all images.

    The model collapses if the mean rank (``_RecentMetrics``) falls below ``LEAST`` from at least twice ``LEAST``, or
    stays below it for ``patience`` steps in a row.

    Args:
        patience: steps without progress before the warning *stuck*.
    """

    LEAST = 1.5

    def __init__(self, patience: int):
        self._patience = patience
        self._recent = _RecentMetrics()
        self._highest = 0.0
        self._stuck = Since()

    def update(self, step: int, loss: float | None, watch: Mapping[str, float]) -> str | None:
        """Update the verdict with one step; see ``CollapseRule``."""
        newest = watch.get("effective_rank", math.nan)
        if loss is None or not math.isfinite(newest):
            return None
        means = self._recent.means(step, (newest,))
        if means is None:
            return None
        (rank,) = means
        self._highest = max(self._highest, rank)
        is_low = rank < self.LEAST
        num_stuck = self._stuck.num_steps(step, is_low)
        if not is_low or not (self._highest >= 2 * self.LEAST or num_stuck >= self._patience):
            return None
        return (
            f"the model collapses (step {step}): all images get nearly the same embedding, of effective rank "
            f"{rank:.1f} (at most {self._highest:.1f} so far). What helps: a lower learning rate, a longer "
            "warm-up, batch norm in the head, and for a teacher a momentum nearer to 1."
        )
