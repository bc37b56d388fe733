"""Dynamic loss scaling for float16, where small gradients would underflow to zero.

torch's GradScaler keeps its own view of what an optimizer step is; here the step has more to it (norms, clipping,
layer-wise adaptation, agreement between ranks), so the scale is a number and the rule to change it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class LossScale:
    """The factor the loss is multiplied by. Halves after a step with an inf or NaN, doubles after many without.

    The rule and its constants are those of https://arxiv.org/abs/1710.03740 and of torch.amp.GradScaler. Equal on all
    ranks as long as all are told the same outcome of every step.

    Attributes:
        scale: the factor now.
        growth_interval: steps without inf after which it doubles.
        good_steps: steps without inf since it last changed.
    """

    scale: float = 65536.0
    growth_interval: int = 2000
    good_steps: int = 0

    def update(self, found_inf: bool) -> None:
        """Learn what the step that just ended, or was skipped, found in the gradients."""
        if found_inf:
            self.scale, self.good_steps = self.scale / 2, 0
            return
        self.good_steps += 1
        if self.good_steps == self.growth_interval:
            self.scale, self.good_steps = self.scale * 2, 0

    def state_dict(self) -> dict[str, float]:
        """For checkpoints."""
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore what ``state_dict`` gave."""
        self.scale, self.good_steps = float(state["scale"]), int(state["good_steps"])
