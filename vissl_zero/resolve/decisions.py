"""What rules read in addition to the configuration: the machine, and each decision, derived once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from vissl_zero.config.run_config import RunConfig
from vissl_zero.resolve.host import Host
from vissl_zero.resolve.placement_plan import Placement, placement
from vissl_zero.resolve.sharding_plan import level


@dataclass(frozen=True)
class Decisions:
    """The decisions that follow from a configuration on one machine.

    Each decision is derived on its first use and cached.
    """

    cfg: RunConfig
    host: Host

    # Lazy: deriving a decision can raise, which must not stop the rules that do not need it.
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
        """Number of ranks; torchrun's number wins over the configuration's."""
        return self.placement.world_size

    @property
    def micro_batch(self) -> int:
        """Source images per micro-batch, summed over ranks."""
        return self.cfg.DATA.TRAIN.BATCHSIZE_PER_REPLICA * self.world_size

    @property
    def global_batch(self) -> int:
        """Source images per optimizer step, summed over ranks and micro-batches."""
        return self.micro_batch * self.cfg.ZERO.gradient_accumulation_steps
