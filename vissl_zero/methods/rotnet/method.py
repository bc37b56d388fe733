"""RotNet: its loss, and the method as the loop runs it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from vissl_zero.errors import ConfigError, Problem
from vissl_zero.methods.method import Batch
from vissl_zero.methods.pretext import PretextTask
from vissl_zero.methods.rotnet.keys import NUM_ANGLES, RotNetLossConfig
from vissl_zero.models.keyed_random import keyed_bits
from vissl_zero.registry import LOSSES


@LOSSES.register("rotnet_loss", config=RotNetLossConfig)
class RotNet(PretextTask):
    """RotNet: predicts which of four rotations an image has.

    Args: the fields of ``RotNetLossConfig``.
    """

    def __init__(self, all_angles: bool = True) -> None:
        super().__init__(NUM_ANGLES)
        self.all_angles = all_angles

    def run_student(self, model: nn.Module, batch: Batch) -> list[Any]:
        """Every crop at 0, 90, 180 and 270 degrees, or at one of them: rows by angle, then by crop, then by sample.

        Raises:
            ConfigError: images are not square.
        """
        (images,) = batch.images
        if images.shape[2] != images.shape[3]:
            got = f"{images.shape[2]} x {images.shape[3]} pixels"
            fix = "Crop images to a square: {name: CenterCrop, size: 224}."
            raise ConfigError([Problem("config.DATA.TRAIN.TRANSFORMS", got, "must make square images", fix)])
        turned = torch.stack([torch.rot90(images, turns, (2, 3)) for turns in range(NUM_ANGLES)])
        rows = torch.arange(len(images), device=images.device)
        one_of_each = (self.labels(batch, len(images), images.device), rows)
        outputs: list[Any] = model([turned.flatten(0, 1) if self.all_angles else turned[one_of_each]])
        return outputs

    def labels(self, batch: Batch, num_rows: int, device: torch.device) -> Tensor:
        """Quarter turns; see ``PretextTask``."""
        if not self.all_angles:
            return keyed_bits(num_rows, 1, "rotnet", device)[:, 0] % NUM_ANGLES
        return torch.arange(NUM_ANGLES, device=device).repeat_interleave(num_rows // NUM_ANGLES)
