"""The fast backend's color and filter transforms, applied to a batch on the device with numbers drawn by workers.

A change is torch operations on the crops of the batch for which it was drawn. Nothing is drawn here, and nothing is
read back from the device. No crop's values depend on other crops, bit for bit: sums are of integers, and filters are
sums of shifted images, because a convolution or a matrix product may add in another order for another number of crops.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto

import torch
import torch.nn.functional as F
from torch import Tensor

GRAY = (0.299, 0.587, 0.114)
DROPPED = -0.5  # see data/fast/color.py, which has the mathematics of colors
_HUES = 256


class Kind(Enum):
    """A kind of change; the comments name its values."""

    COLOR = auto()  # factor, share of gray, offset: x' = factor x + share gray(x) + offset
    CONTRAST = auto()  # factor
    SETTLE = auto()  # apply the pending color matrix
    HUE = auto()  # steps of 256
    MIRROR = auto()
    BLUR = auto()  # the kernel
    SOLARIZE = auto()  # threshold
    POSTERIZE = auto()  # bits
    SHARPEN = auto()  # share
    SPREAD = auto()
    THICKEN = auto()  # share
    THIN = auto()  # share


Change = tuple[Kind, tuple[float, ...]]


@dataclass(frozen=True)
class Changes:
    """Pending changes of the crops of one resolution.

    Attributes:
        rounds: (kind, number of crops, number of values per crop) of each round.
        rows: int64, crop indices of all rounds, concatenated.
        values: float64, values of these crops, concatenated.
        levels: (3, 256) float32, the float value of each channel for each uint8 value: ToTensor and Normalize.
    """

    rounds: tuple[tuple[Kind, int, int], ...]
    rows: Tensor
    values: Tensor
    levels: Tensor

    @staticmethod
    def of(noted: Sequence[Sequence[Sequence[Change]]], levels: Tensor) -> Changes:
        """Group the changes of crops into rounds: equal kinds at the same position of a transform are one round.

        Args:
            noted: changes in order, for each crop and each of its transforms.
            levels: see the class.
        """
        notes: dict[tuple[int, int, int], list[tuple[int, tuple[float, ...]]]] = defaultdict(list)
        for row, transforms in enumerate(noted):
            for number, changes in enumerate(transforms):
                for place, (kind, values) in enumerate(changes):
                    notes[number, place, kind.value].append((row, values))
        rounds, rows, numbers = [], list[int](), list[float]()
        # In the order of transforms, then of a transform's changes. Changes of different crops commute.
        for (_, _, kind_value), changed in sorted(notes.items()):
            width = max(len(values) for _, values in changed)
            rounds.append((Kind(kind_value), len(changed), width))
            for row, values in changed:
                outside = (0.0,) * ((width - len(values)) // 2)  # pads a shorter blur kernel on both sides
                rows.append(row)
                numbers += (*outside, *values, *outside)
        return Changes(tuple(rounds), torch.tensor(rows), torch.tensor(numbers, dtype=torch.float64), levels)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors."""
        return self.rows, self.values, self.levels

    def each(self, copy: Callable[[Tensor], Tensor]) -> Changes:
        """Return these changes with copies of all tensors."""
        return replace(self, rows=copy(self.rows), values=copy(self.values), levels=copy(self.levels))

    def __call__(self, pixels: Tensor) -> Tensor:
        """Apply the changes to crops on the same device.

        Args:
            pixels: (N, 3, H, W) uint8; modified in place.
        Returns:
            (N, 3, H, W) float32.
        """
        pictures = _Pictures(pixels)
        sizes = [count for _, count, _ in self.rounds]
        lengths = [count * width for _, count, width in self.rounds]
        for (kind, count, width), rows, values in zip(
            self.rounds, self.rows.split(sizes), self.values.split(lengths), strict=True
        ):
            pictures.change(kind, rows, values.view(count, width))
        return _looked_up(pictures.pixels, self.levels)


def _looked_up(pixels: Tensor, levels: Tensor) -> Tensor:
    looked_up = torch.empty(pixels.shape, dtype=levels.dtype, device=pixels.device)
    for channel, values in enumerate(levels):
        plane = pixels[:, channel]
        # A table instead of arithmetic: the values are those that ToTensor and Normalize give on the CPU, bit for bit.
        looked_up[:, channel] = values.index_select(0, plane.reshape(-1).int()).view(plane.shape)
    return looked_up


class _Pictures:
    """Crops between changes, and the pending color matrix of each crop."""

    def __init__(self, pixels: Tensor):
        self.pixels = pixels
        self._none = torch.eye(3, 4, dtype=torch.float64, device=pixels.device)
        self._matrices = self._none.repeat(len(pixels), 1, 1)

    def change(self, kind: Kind, rows: Tensor, values: Tensor) -> None:
        """Apply one round."""
        # Color changes are composed and rounded once, in SETTLE: data/fast/color.py says why.
        if kind is Kind.COLOR:
            factor, share, offset = values[:, :, None, None].unbind(1)
            matrices = self._matrices[rows]
            self._put(rows, factor * matrices + share * _gray(matrices)[:, None], offset[:, 0])
        elif kind is Kind.CONTRAST:
            matrices, factor = self._matrices[rows], values[:, :, None]
            mean = _mean_gray(self.pixels[rows], matrices)[:, None]
            self._put(rows, factor * matrices, (1 - values) * mean + DROPPED)
        elif kind is Kind.SETTLE:
            self.pixels.index_copy_(0, rows, _eight_bits(_transformed(self.pixels[rows], self._matrices[rows])))
            self._matrices.index_copy_(0, rows, self._none.expand(len(rows), 3, 4))
        else:
            self.pixels.index_copy_(0, rows, _CHANGES[kind](self.pixels[rows], values))

    def _put(self, rows: Tensor, matrices: Tensor, offset: Tensor) -> None:
        matrices[:, :, 3] += offset
        self._matrices.index_copy_(0, rows, matrices)


def _gray(planes: Tensor) -> Tensor:
    """Return the gray (n, ...) of three planes (n, 3, ...)."""
    red, green, blue = planes.unbind(1)
    return GRAY[0] * red + GRAY[1] * green + GRAY[2] * blue


def _mean_gray(pixels: Tensor, matrices: Tensor) -> Tensor:
    """Return the mean gray (n,) of images under their pending matrices, rounded."""
    height, width = pixels.shape[2:]
    # Sums of integers are exact in any order. Sums of floats depend on the device.
    red, green, blue = (pixels.sum((2, 3), dtype=torch.int64).double() / (height * width)).unbind(1)
    of_red, of_green, of_blue, offset = _gray(matrices).unbind(1)
    return (of_red * red + of_green * green + of_blue * blue + offset + 0.5).trunc()


def _transformed(pixels: Tensor, matrices: Tensor) -> Tensor:
    red, green, blue = pixels.float().unbind(1)
    rows = matrices.float()[..., None, None].unbind(1)  # three times (n, 4, 1, 1)
    return torch.stack([row[:, 0] * red + row[:, 1] * green + row[:, 2] * blue + row[:, 3] for row in rows], 1)


def _eight_bits(values: Tensor) -> Tensor:
    return values.round().clamp(0, 255).to(torch.uint8)


def _blurred(pixels: Tensor, kernels: Tensor) -> Tensor:
    """Filter along rows and then columns with symmetric kernels (n, 2 r + 1)."""
    # A sum of shifted images, not a convolution; see the module. Symmetry halves the multiplications.
    radius = kernels.shape[1] // 2
    weights = kernels.float()[:, :, None, None, None].unbind(1)
    filtered = pixels.float()
    for dim, edges in ((3, (radius, radius, 0, 0)), (2, (0, 0, radius, radius))):
        length, wide = filtered.shape[dim], F.pad(filtered, edges, mode="replicate")
        filtered = weights[radius] * wide.narrow(dim, radius, length)
        for step in range(1, radius + 1):
            both = wide.narrow(dim, radius - step, length) + wide.narrow(dim, radius + step, length)
            filtered += weights[radius - step] * both
    return _eight_bits(filtered)


def _hue_turned(pixels: Tensor, steps: Tensor) -> Tensor:
    """Shift the hue in 8-bit HSV, as OpenCV converts: to HSV in integers, back in float32."""
    red, green, blue = pixels.int().unbind(1)
    value, least = pixels.int().amax(1), pixels.int().amin(1)
    range_ = value - least
    level = torch.arange(1, 256, dtype=torch.float64, device=pixels.device)
    per_value, per_range = (F.pad((most / level).round().int(), (1, 0)) for most in (255 * 4096, 256 * 4096 / 6))
    saturation = _times_table(range_, per_value, value)
    sixth = torch.where(
        value == red,
        green - blue,
        torch.where(value == green, blue - red + 2 * range_, red - green + 4 * range_),
    )
    hue = (_times_table(sixth, per_range, range_) + steps.int()[:, :, None]) % _HUES
    return _from_hsv(hue, saturation, value)


def _times_table(numbers: Tensor, table: Tensor, places: Tensor) -> Tensor:
    """Multiply by a table's entries, which are fixed-point numbers with 12 fractional bits, and round."""
    entries = table.index_select(0, places.reshape(-1)).view(places.shape)
    return (numbers * entries + 2048) >> 12


def _from_hsv(hue: Tensor, saturation: Tensor, value: Tensor) -> Tensor:
    turned, share, most = hue.float() * (6 / 255), saturation.float() * (1 / 255), value.float() * (1 / 255)
    sector = turned.floor()
    part = turned - sector  # OpenCV's full-range hue has 256 steps on the way to HSV, and 255 on the way back
    least, down, up = most * (1 - share), most * (1 - share * part), most * (1 - share * (1 - part))
    sector = sector.int() % 6
    # Red, green and blue of the sectors 0 to 4; the sixth is the default below.
    sectors = ((most, up, least), (down, most, least), (least, most, up), (least, down, most), (up, least, most))
    planes = [most, least, down]
    for number, thirds in enumerate(sectors):
        planes = [torch.where(sector == number, third, plane) for third, plane in zip(thirds, planes, strict=True)]
    return _eight_bits(torch.stack(planes, 1) * 255)


def _solarized(pixels: Tensor, thresholds: Tensor) -> Tensor:
    return torch.where(pixels < thresholds[:, :, None, None], pixels, 255 - pixels)


def _posterized(pixels: Tensor, bits: Tensor) -> Tensor:
    step = (2 ** (8 - bits))[:, :, None, None].int()
    return (pixels.int() // step * step).to(torch.uint8)


def _sharpened(pixels: Tensor, share: Tensor) -> Tensor:
    values = pixels.float()
    height, width = values.shape[2:]
    # Pillow's kernel of SMOOTH: 1 around a center of 5, over 13.
    around = 4 * values[:, :, 1:-1, 1:-1]
    for down in range(3):
        for across in range(3):
            around = around + values[:, :, down : down + height - 2, across : across + width - 2]
    smooth = values.clone()
    smooth[:, :, 1:-1, 1:-1] = (around / 13).round()
    return _blended(smooth, values, share)


def _spread(pixels: Tensor, _: Tensor) -> Tensor:
    least, most = pixels.amin((2, 3), keepdim=True).double(), pixels.amax((2, 3), keepdim=True).double()
    # In float64 and truncated, as Pillow's autocontrast computes its table.
    scale = 255 / (most - least).clamp(min=1)
    spread = (pixels.double() * scale - least * scale).to(torch.uint8)
    return torch.where(most > least, spread, pixels)


def _thickened(pixels: Tensor, share: Tensor) -> Tensor:
    values = pixels.float()
    return _blended(values, F.max_pool2d(values, 3, 1, padding=1), share)


def _thinned(pixels: Tensor, share: Tensor) -> Tensor:
    values = pixels.float()
    return _blended(values, -F.max_pool2d(-values, 3, 1, padding=1), share)


def _blended(first: Tensor, second: Tensor, share: Tensor) -> Tensor:
    """Blend two images as Pillow does, which truncates."""
    share = share[:, :, None, None].float()
    return _eight_bits(first * (1 - share) + second * share + DROPPED)


_CHANGES: dict[Kind, Callable[[Tensor, Tensor], Tensor]] = {
    Kind.HUE: _hue_turned,
    Kind.MIRROR: lambda pixels, _: pixels.flip(3),
    Kind.BLUR: _blurred,
    Kind.SOLARIZE: _solarized,
    Kind.POSTERIZE: _posterized,
    Kind.SHARPEN: _sharpened,
    Kind.SPREAD: _spread,
    Kind.THICKEN: _thickened,
    Kind.THIN: _thinned,
}
