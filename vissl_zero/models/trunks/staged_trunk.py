"""What RegNet and ResNet share: a stem, stages of blocks, average pooling, and weight standardisation."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from vissl_zero.models.taps import LayerTap
from vissl_zero.models.unit import Unit

_EPS = 1e-5


class StandardizedConv2d(nn.Conv2d):
    """A convolution whose filters are brought to mean 0 and standard deviation 1 whenever it is applied."""

    def forward(self, x: Tensor) -> Tensor:
        """x (b, C, H, W) -> (b, C', H', W')."""
        centred = self.weight - self.weight.mean(dim=(1, 2, 3), keepdim=True)
        # The square root of the variance plus eps, not the deviation plus eps: differentiable for a constant filter.
        scale = centred.square().mean(dim=(1, 2, 3), keepdim=True).add(_EPS**2).rsqrt()
        return self._conv_forward(x, centred * scale, self.bias)


def standardize_convolutions(module: nn.Module) -> None:
    """Turn every convolution in ``module`` into a ``StandardizedConv2d``, in place; parameters and names stay."""
    for layer in module.modules():
        if type(layer) is nn.Conv2d:
            layer.__class__ = StandardizedConv2d


class StagedTrunk(nn.Module):
    """A convolutional trunk in which the stem and every block are one unit each.

    Args:
        stem: first layers.
        stages: blocks of each stage, in order.
        feature_dim: channels of the last block, F.

    Attributes:
        stem: a Unit.
        stages: list of lists of Units.
        feature_dim: F.
    """

    def __init__(self, stem: Unit, stages: Sequence[Sequence[nn.Module]], feature_dim: int):
        super().__init__()
        self.stem = stem
        self.stages = nn.ModuleList(nn.ModuleList(Unit(block) for block in stage) for stage in stages)
        self.feature_dim = feature_dim

    def forward(self, images: list[Tensor]) -> list[Tensor]:
        """R image tensors (b_r, 3, H_r, W_r) -> R average-pooled features (b_r, F)."""
        xs: list[Tensor] = self.stem(images)
        for stage in self.stages:
            assert isinstance(stage, nn.ModuleList)
            for unit in stage:
                xs = unit(xs)
        return [x.mean(dim=(2, 3)) for x in xs]

    tap_names = ("conv1", "res1", "res2", "res3", "res4", "res5", "res5avg", "avgpool", "flatten")

    def tap(self, name: str) -> LayerTap | None:
        """VISSL's names: the stem (conv1), its pooled output (res1), the stages from res2, and the pooled features.

        As in VISSL, conv1 of a ResNet is after its activation, and res5avg has shape (n, F, 1, 1).
        """
        last = {f"res{index}": f"stages.{index - 2}.{len(stage) - 1}" for index, stage in enumerate(self.stages, 2)}  # type: ignore[arg-type]
        if name in last:
            return LayerTap((last[name],))
        if name in ("res5avg", "avgpool"):
            return LayerTap((), lambda _, features: [x[:, :, None, None] for x in features])
        if name == "flatten":
            return LayerTap((), lambda _, features: features)
        if name == "res1":
            return LayerTap(("stem",))
        return LayerTap((self.conv1_path,)) if name == "conv1" else None

    conv1_path = "stem"
