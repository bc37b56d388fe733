"""Facts that rules read beside the configuration: the machine, and each decision, derived once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from vissl_zero.config.run_config import RunConfig
from vissl_zero.resolve.host import Host
from vissl_zero.resolve.placement_plan import Placement, placement
from vissl_zero.resolve.sharding_plan import level


@dataclass(frozen=True)
class Decisions:
    """The machine, and what follows for a configuration on it.

    Each is derived on its first use and kept: a rule that reads none of them runs whatever else is wrong.
    """

    cfg: RunConfig
    host: Host

    @cached_property
    def placement(self) -> Placement:
        """Device, ranks and threads."""
        return placement(self.cfg, self.host)

    @cached_property
    def level_and_notes(self) -> tuple[int, tuple[str, ...]]:
        """The ZeRO level, and a note for each switch that it overrides."""
        return level(self.cfg)

    @property
    def level(self) -> int:
        """The ZeRO level."""
        return self.level_and_notes[0]

    @property
    def world_size(self) -> int:
        """Ranks of the run; torchrun's number wins."""
        return self.placement.world_size

    @property
    def micro_batch(self) -> int:
        """Source images per micro-batch over all ranks."""
        return self.cfg.DATA.TRAIN.BATCHSIZE_PER_REPLICA * self.world_size

    @property
    def global_batch(self) -> int:
        """Source images per optimizer step over all ranks and micro-batches."""
        return self.micro_batch * self.cfg.ZERO.gradient_accumulation_steps
