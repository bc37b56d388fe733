"""A linear classifier on the trunk's features, trained beside the model without touching it.

Its accuracy during training estimates that of a linear probe afterward. It has a separate update rule, and does not
change the model's loss, gradients, gradient norm or optimizer.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vissl_zero.collectives import all_reduce_sum
from vissl_zero.errors import ConfigError, Problem
from vissl_zero.methods.method import Batch

_BETAS = (0.9, 0.999)
_EPS = 1e-8
_LEAST_STATISTICS_RATE = 0.01  # the features' mean and variance follow the trunk over about 100 steps


class OnlineProbe(nn.Module):
    """Softmax regression by Adam (Kingma and Ba 2015) on standardized features.

    All state is in buffers, so it is saved, restored and compared with the rest of the method's. Every rank has all of
    it, about 3 C (F + 1) numbers.

    **Exact.** A step's gradient is the mean over the samples of all ranks and micro-batches, summed in one all-reduce.
    Features are standardized by the mean and variance of the *previous* steps. So the first step changes no weight.

    Args:
        feature_dim: F.
        num_classes: C.
        lr: Adam's rate.
        dtype: data type of the state; float32 or float64.
        device: device of the state.
    """

    weight: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    mean: Tensor
    mean_square: Tensor
    num_steps: Tensor

    def __init__(
        self,
        feature_dim: int,
        num_classes: int,
        lr: float,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ):
        super().__init__()
        self._lr = lr
        self._widths = (num_classes, feature_dim)

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.register_buffer("weight", zeros(num_classes, feature_dim + 1))  # the last column is the bias
        self.register_buffer("exp_avg", zeros(num_classes, feature_dim + 1))
        self.register_buffer("exp_avg_sq", zeros(num_classes, feature_dim + 1))
        self.register_buffer("mean", zeros(feature_dim))
        self.register_buffer("mean_square", zeros(feature_dim))
        self.register_buffer("num_steps", zeros())
        self._sums = self._no_sums()

    @torch.no_grad()
    def learn(self, features: list[Tensor], batch: Batch) -> None:
        """Add the rows of the first resolution to the gradient of this step. Not a collective.

        Args:
            features: features of the trunk, per resolution (crops * B, F), crop-major; only the first is used.
            batch: micro-batch of the features; samples with a negative label are ignored.
        Raises:
            ConfigError: there are no labels, or they are no class numbers.
        """
        targets = batch.targets
        if targets is None or targets.dtype != torch.int64:
            must = "needs a class for each training image" if targets is None else "does not go with mixed labels"
            fix = "Set it to false, or train on labeled images without mixing them."
            raise ConfigError([Problem("config.ONLINE_PROBE.USE_PROBE", "true", must, fix)])
        if not batch.num_local:
            return
        # Detached: the probe must not train the trunk.
        rows = features[0].detach().to(self.mean.dtype)
        labels = targets.repeat(len(rows) // batch.num_local)
        counts = (labels >= 0).to(rows.dtype)
        inputs = self._inputs(rows)
        scores = inputs @ self.weight.T
        right = ((scores.argmax(dim=1) == labels) * counts).sum()
        one_hot = torch.zeros_like(scores).scatter_(1, labels.clamp(min=0)[:, None], 1.0)
        # The gradient of softmax regression in closed form: no graph, and no hook of the sharded model.
        errors = (scores.softmax(dim=1) - one_hot) * counts[:, None]
        gradient = errors.T @ inputs
        weighted = rows * counts[:, None]
        # One vector, so that a step needs one all-reduce.
        parts = [gradient.flatten(), weighted.sum(dim=0), (weighted * rows).sum(dim=0), counts.sum()[None], right[None]]
        self._sums = self._sums + torch.cat(parts)

    @torch.no_grad()
    def step(self) -> tuple[Tensor, Tensor]:
        """Update the weights by the gradient since the last call. Collective: every rank, once per optimizer step.

        Cost: one all-reduce of C (F + 1) + 2 F + 2 numbers. Does not wait for the device.

        Returns:
            Number of samples, and of those classified correctly before the update; 0-d, over all ranks.
        """
        num_classes, feature_dim = self._widths
        split = [num_classes * (feature_dim + 1), feature_dim, feature_dim, 1, 1]
        gradient, mean, mean_square, count, right = all_reduce_sum(self._sums).split(split)
        self._sums = self._no_sums()
        num_samples = count.clamp(min=1)
        # A factor of 0 or 1 instead of a branch, which would wait for the device. The statistics of the step itself
        # would need a second all-reduce, before the gradient.
        has_statistics = (self.num_steps > 0).to(gradient.dtype)
        gradient = has_statistics * gradient.view(num_classes, feature_dim + 1) / num_samples
        # Plain Adam, as the defaults of torch: the probe is a measurement, with no schedule to tune.
        self.exp_avg.lerp_(gradient, 1 - _BETAS[0])
        self.exp_avg_sq.lerp_(gradient.square(), 1 - _BETAS[1])
        updates = self.num_steps.clamp(min=1)
        average = self.exp_avg / (1 - _BETAS[0] ** updates)
        spread = (self.exp_avg_sq / (1 - _BETAS[1] ** updates)).sqrt() + _EPS
        self.weight -= has_statistics * self._lr * average / spread
        # First a plain mean over steps, later an exponential one. A step without labeled samples changes nothing.
        rate = (1 / (self.num_steps + 1)).clamp(min=_LEAST_STATISTICS_RATE) * (count > 0)
        self.mean.lerp_(mean / num_samples, rate.squeeze())
        self.mean_square.lerp_(mean_square / num_samples, rate.squeeze())
        self.num_steps += 1
        return count.squeeze(), right.squeeze()

    @torch.no_grad()
    def scores(self, rows: Tensor) -> Tensor:
        """Compute logits (N, C) of features (N, F). Not a collective."""
        return self._inputs(rows.to(self.mean.dtype)) @ self.weight.T

    def _inputs(self, rows: Tensor) -> Tensor:
        """Standardize the features (N, F) and append a column of ones for the bias: (N, F + 1)."""
        # Rounding may leave a difference below 0, and a constant feature has a variance of 0.
        variance = (self.mean_square - self.mean.square()).clamp(min=0)
        return torch.cat([(rows - self.mean) / (variance + 1e-6).sqrt(), rows.new_ones(len(rows), 1)], dim=1)

    def _no_sums(self) -> Tensor:
        num_classes, feature_dim = self._widths
        return self.mean.new_zeros(num_classes * (feature_dim + 1) + 2 * feature_dim + 2)
