"""LoRA: frozen linear layers plus trained products of two low-rank matrices, through peft.

``build_model`` imports this module only for trunks with adapters, since peft takes seconds to import. An adapted layer
``<name>`` has its frozen weights at ``<name>.base_layer``, and the matrices at ``<name>.lora_A.default`` and
``<name>.lora_B.default``.

LoRA: https://arxiv.org/abs/2106.09685.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterator

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import Linear as PeftLinear
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from vissl_zero.config.blocks.model_and_loss import Lora
from vissl_zero.errors import ConfigError, Problem, did_you_mean
from vissl_zero.models.init import GeneratorFor
from vissl_zero.models.weight_names import timm_name

ADAPTER = "default"  # peft's name of the only adapter of a layer
_TARGETS = "config.MODEL.LORA.TARGET_MODULES"


class AdaptedLinear(PeftLinear):
    """A frozen linear layer with an adapter, which is 0 at the start: A is drawn as in peft, B is 0."""

    @property
    def weight(self) -> Tensor:
        """Raise ConfigError: a trunk that reads the frozen weight itself never calls the adapter."""
        must = "must not name layers whose weight the trunk reads itself, past the adapter"
        got = f"a layer from {self.in_features} to {self.out_features} features"
        raise ConfigError([Problem(_TARGETS, got, must, "Name other layers, such as attn.proj, mlp.fc1 and mlp.fc2.")])

    @torch.no_grad()
    def init_parameters(self, generator_for: GeneratorFor) -> None:
        """Draw A (r, in_features) uniformly within 1 / sqrt(in_features) and set B (out_features, r) to 0."""
        first, second = (getattr(self, key)[ADAPTER].weight for key in ("lora_A", "lora_B"))
        # peft's draw: kaiming_uniform_ with a = sqrt(5) has this bound.
        bound = 1 / math.sqrt(first.shape[1])
        first.copy_(torch.empty(first.shape).uniform_(-bound, bound, generator=generator_for("lora_A")))
        second.zero_()


def adapt_(trunk: nn.Module, options: Lora) -> None:
    """Freeze a trunk and add adapters to its target layers; in place.

    Args:
        trunk: just built; its weights may be on the meta device.
        options: rank, factor, dropout and targets.
    Raises:
        ConfigError: a target names no layer, or no linear layer; or the trunk has running statistics.
    """
    counting = [name for name, m in trunk.named_modules() if isinstance(m, _NormBase) and m.track_running_stats]
    if counting:
        must = "needs a trunk without running statistics, which training would move, and an adapter does not hold"
        fix = "Take a vision transformer, ConvNeXt or Swin, or train all weights."
        raise ConfigError([Problem("config.MODEL.LORA.USE_LORA", f"batch norm at {counting[0]}", must, fix)])
    config = LoraConfig(
        r=options.R,
        lora_alpha=options.LORA_ALPHA,
        lora_dropout=options.LORA_DROPOUT,
        target_modules=_targets(trunk, options.TARGET_MODULES),
        init_lora_weights=False,  # ``init_parameters`` draws, by keys
    )
    # So that peft builds this class, whose ``weight`` raises and whose draws are keyed.
    config._register_custom_module({nn.Linear: AdaptedLinear})
    inject_adapter_in_model(config, trunk)


def adapted_layers(trunk: nn.Module) -> Iterator[tuple[str, AdaptedLinear]]:
    """Yield path and module of each layer with an adapter."""
    return ((name, module) for name, module in trunk.named_modules() if isinstance(module, AdaptedLinear))


def merged(trunk: nn.Module) -> nn.Module:
    """Return a copy of a trunk whose adapters are merged into plain layers: W + lora_alpha / r B A."""
    return _without_adapters(trunk, merges=True)


def unadapted(trunk: nn.Module) -> nn.Module:
    """Return a copy of a trunk with the frozen layers and without adapters."""
    return _without_adapters(trunk, merges=False)


def _without_adapters(trunk: nn.Module, merges: bool) -> nn.Module:
    plain = copy.deepcopy(trunk)
    for name, layer in list(adapted_layers(plain)):
        if merges:
            layer.merge()
        parent, _, child = name.rpartition(".")
        # The plain layer in place of the wrapper: names are those of a model without LoRA.
        setattr(plain.get_submodule(parent), child, layer.base_layer)
    return plain


def _targets(trunk: nn.Module, wanted: str | list[str]) -> list[str]:
    """Return the paths of the target layers, which are matched by their names in timm's model, as peft does."""
    modules = {timm_name(f"trunk.{name}"): (name, module) for name, module in trunk.named_modules() if name}
    linear = [name for name, (_, module) in modules.items() if type(module) is nn.Linear]
    entries = [wanted] if isinstance(wanted, str) else list(wanted)
    targets: dict[str, nn.Module] = {}
    for entry in entries:
        # peft's rules: a string is a pattern of full names; a list has full names or their last components.
        if isinstance(wanted, str):
            matching = [name for name in modules if re.fullmatch(entry, name)]
        else:
            matching = [name for name in modules if f".{name}".endswith(f".{entry}")]
        if not matching:
            near = did_you_mean(entry, {*linear, *(name.rpartition(".")[2] for name in linear)})
            fix = f"Linear layers: {', '.join(linear[:8])}{', ...' * (len(linear) > 8)}.{near}"
            raise ConfigError([Problem(_TARGETS, repr(entry), "must name layers of the trunk", fix)])
        targets |= {modules[name][0]: modules[name][1] for name in matching}
    # Subclasses are refused too: torch's attention reads the weight of its out_proj without calling the layer.
    if other := next((name for name, module in targets.items() if type(module) is not nn.Linear), ""):
        got = f"{timm_name(f'trunk.{other}')}, {type(targets[other]).__name__}"
        fix = f"Write longer ends of names that only linear layers have: {', '.join(linear[:4]) or 'it has none'}."
        raise ConfigError([Problem(_TARGETS, got, "must name linear layers (torch.nn.Linear) alone", fix)])
    return list(targets)
