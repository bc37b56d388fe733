"""Mixup and CutMix: two images in one, with a label of both (https://arxiv.org/abs/1710.09412, 1905.04899).

Losses without labels see the mixed images alone, each crop mixed by itself, as VISSL's ``cutmixup_collator`` does with
an ``ssl_method``.

An image's partner is its neighbor in the batch (the first and the second, the third and the fourth). Draws are keyed by
(seed, step, image), or by (seed, step) in batch mode. So mixed images are the same at any level, after a resume, and on
any number of ranks whose micro-batches are even. timm and VISSL pair an image with the one at the other end of the
process's micro-batch, and draw once per process; a shuffled batch makes both choices equally random.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from vissl_zero.config.blocks.data import MIXING_COLLATOR, MixingConfig, Split
from vissl_zero.config.components import typed_options
from vissl_zero.models.keyed_random import NUM_BITS, keyed_bits, resolution_scope

# Tries of Johnk's rejection, a constant number: a loop until acceptance would wait for the device. At alpha 2, all
# tries of one image in 100,000 are rejected, and it takes the first.
_TRIES = 64
_SHARES = 6  # uniform numbers per image: whether to mix, mixup or CutMix, and four for the box


def smooth_targets(labels: Tensor, num_classes: int, smoothing: float) -> Tensor:
    """Spread ``smoothing`` of one-hot targets evenly over all classes (https://arxiv.org/abs/1512.00567).

    Args:
        labels: (n,) int64.
    Returns:
        (n, num_classes) float32, rows sum to 1.
    """
    return F.one_hot(labels, num_classes).float() * (1 - smoothing) + smoothing / num_classes


def mix_targets(targets: Tensor, partners: Tensor, shares: Tensor) -> Tensor:
    """Mix the targets of images mixed by mixup or CutMix (https://arxiv.org/abs/1710.09412, 1905.04899).

    Args:
        targets, partners: (n, C) targets of each image, and of the image mixed into it.
        shares: (n,) share of the image itself; for CutMix, its share of the area.
    Returns:
        (n, C).
    """
    return torch.lerp(partners, targets, shares[:, None].to(targets.dtype))


def beta_from(uniforms: Tensor, alpha: float) -> Tensor:
    """Draw Beta(alpha, alpha) by Johnk's method (https://doi.org/10.1007/BF02613800), with all tries at once.

    Args:
        uniforms: (n, tries, 2) in [0, 1).
        alpha: above 0; larger values reject more tries.
    Returns:
        (n,) in [0, 1].
    """
    # In the logarithm: u ** (1 / alpha) underflows for a small alpha.
    logs = torch.log(uniforms.clamp(min=torch.finfo(uniforms.dtype).tiny)) / alpha
    total = torch.logsumexp(logs, dim=2)
    first = (total <= 0).to(torch.int8).argmax(dim=1)  # index of the first accepted try; 0 if none is accepted
    ratios = torch.exp(logs[:, :, 0] - total)
    return ratios.gather(1, first[:, None])[:, 0]


class Mixing:
    """Mixes the images of a micro-batch of one process.

    Args:
        config: keys of the mixing collator.
    """

    def __init__(self, config: MixingConfig):
        self.config = config

    def __call__(self, images: list[Tensor], num_samples: int) -> tuple[list[Tensor], list[Tensor]]:
        """Mix each crop with the same crop of its partner. No communication.

        Args:
            images: R tensors (V_r * B, 3, H_r, W_r), crop-major.
            num_samples: B.
        Returns:
            Images of the same shapes; for each resolution (V_r * B,) float64, the share of each image itself.
        """
        mixed, shares = [], []
        for index, crops in enumerate(images):
            views = len(crops) // max(num_samples, 1)
            is_one = self.config.mode == "batch"  # one draw for each crop, which all samples share
            with resolution_scope(index, views if is_one else len(crops)):
                draws = keyed_bits(
                    views if is_one else len(crops), 4 * _TRIES + _SHARES, "mixing", crops.device, by_sample=not is_one
                )
            uniforms = (draws.double() / 2**NUM_BITS).unflatten(0, (views, 1 if is_one else num_samples))
            if self.config.mode == "pair":
                # Both images of a pair take the draw of the first.
                uniforms = uniforms[:, _places(uniforms.shape[1], crops.device) // 2 * 2]
            uniforms = uniforms.expand(views, num_samples, -1).flatten(0, 1)
            partners = crops.unflatten(0, (views, num_samples))[:, _partners(num_samples, crops.device)].flatten(0, 1)
            images_of_both, kept_shares = self._mix(crops, partners, uniforms)
            mixed.append(images_of_both)
            shares.append(kept_shares)
        return mixed, shares

    def labels(self, targets: Tensor, shares: list[Tensor], dtype: torch.dtype) -> Tensor:
        """Mix the labels of the images that ``__call__`` has mixed.

        Args:
            targets: (B,) int64.
            shares: shares returned by ``__call__``.
            dtype: data type of the labels.
        Returns:
            (rows, num_classes), rows sum to 1.
        """
        # Smoothed before they are mixed, as in timm.
        labels = smooth_targets(targets, self.config.num_classes, self.config.label_smoothing).to(dtype)
        mixed = torch.cat(shares)
        views = len(mixed) // max(len(targets), 1)
        partners = labels[_partners(len(labels), labels.device)]
        return mix_targets(labels.repeat(views, 1), partners.repeat(views, 1), mixed)

    def _mix(self, images: Tensor, partners: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        """Mix each image with its partner; return the mixed images, and (rows,) the share of each image itself."""
        keys, (height, width) = self.config, images.shape[2:]
        tries, (is_off, is_cut, *box) = uniforms[:, :-_SHARES], uniforms[:, -_SHARES:].unbind(1)
        first, second = tries.unflatten(1, (2, _TRIES, 2)).unbind(1)
        has_cut, has_mixup = bool(keys.cutmix_alpha or keys.cutmix_minmax), bool(keys.mixup_alpha)
        cuts = (is_cut < keys.switch_prob) if has_cut and has_mixup else torch.full_like(is_cut, has_cut).bool()
        mixes = is_off < keys.prob
        shares = beta_from(first, keys.mixup_alpha) if has_mixup else torch.ones_like(is_cut)
        areas = beta_from(second, 1.0 if keys.cutmix_minmax else keys.cutmix_alpha) if has_cut else shares
        tall = self._interval(box[0], box[1], areas, height)
        wide = self._interval(box[2], box[3], areas, width)
        # The box is clipped at the border and has whole pixels: label by the area that it really has.
        if keys.correct_lam or keys.cutmix_minmax:
            areas = 1 - tall.sum(dim=1) * wide.sum(dim=1) / (height * width)
        shares = torch.where(mixes, torch.where(cuts, areas, shares), 1.0)
        is_pasted = (tall[:, :, None] & wide[:, None, :] & (cuts & mixes)[:, None, None])[:, None]
        # CutMix pastes the box and does not blend.
        weights = torch.where(cuts, 1.0, shares).to(images.dtype)[:, None, None, None]
        return torch.where(is_pasted, partners, torch.lerp(partners, images, weights)), shares

    def _interval(self, place: Tensor, size: Tensor, areas: Tensor, side: int) -> Tensor:
        """Compute the box's extent along one side, (rows, side) bool."""
        if self.config.cutmix_minmax:
            # Sides are drawn here, not the area (timm's cutmix_minmax).
            least, most = (int(side * share) for share in self.config.cutmix_minmax)
            length = least + (size * (most - least)).long()
            begin = (place * (side - length)).long()
            end = begin + length
        else:
            length = (side * (1 - areas).clamp(min=0).sqrt()).long()
            center = (place * side).long()
            begin, end = center - length // 2, center + length // 2
        cells = torch.arange(side, device=place.device)
        return (cells >= begin[:, None]) & (cells < end[:, None])


def _places(num_samples: int, device: torch.device) -> Tensor:
    return torch.arange(num_samples, device=device)


def _partners(num_samples: int, device: torch.device) -> Tensor:
    """Return the index of each image's partner; with an odd number, the last image is its own partner."""
    places = _places(num_samples, device)
    return torch.where(places ^ 1 < num_samples, places ^ 1, places)


def mixing_of(train: Split) -> Mixing | None:
    """Build the mixing of ``config.DATA.TRAIN`` after resolution; None without a mixing collator."""
    if train.COLLATE_FUNCTION != MIXING_COLLATOR:
        return None
    key = "config.DATA.TRAIN.COLLATE_FUNCTION_PARAMS"
    return Mixing(MixingConfig(**typed_options(MixingConfig, train.COLLATE_FUNCTION_PARAMS, key)))
