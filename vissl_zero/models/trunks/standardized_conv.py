"""Weight standardisation (https://arxiv.org/abs/1903.10520)."""

from __future__ import annotations

from torch import Tensor, nn

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
