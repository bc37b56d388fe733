"""Any model of timm by name (https://github.com/huggingface/pytorch-image-models), cut into units.

Plain vision transformers become a ``TransformerTrunk``. Of other models, one forward pass tells which modules are
called one after another, each with the output of the one before. ConvNeXt, Swin, EfficientNet, ResNet, RegNet and most
others are such chains, and each link becomes a unit that takes all resolutions at once. Others (XCiT, BEiT, EVA) keep
timm's own forward pass, and each of their blocks becomes a unit that is gathered once per resolution.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import timm
import torch
from timm.models.vision_transformer import VisionTransformer as TimmVisionTransformer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vissl_zero.config.components.trunks import TimmConfig
from vissl_zero.errors import ConfigError, Problem, did_you_mean
from vissl_zero.models.keyed_random import current_scope, resolution_scope
from vissl_zero.models.model import Unit, recomputation_contexts
from vissl_zero.models.trunks.vision_transformer import TransformerTrunk
from vissl_zero.registry import TRUNKS

_KEY = "config.MODEL.TRUNK"
# What a subclass must have left alone for its parts to be taken over.
_TRANSFORMER_METHODS = ("forward_features", "_pos_embed", "pool", "forward_head")
# A module that holds a smaller part of the model is one unit, whatever is in it.
_MOST_UNITS = 64
_PROBE_SIDE = 64  # of the image for models that take any


@TRUNKS.register("timm", config=TimmConfig)
def build_timm_trunk(
    name: str,
    use_mask_token: bool = False,
    patch_drop_rate: float = 0.0,
    drop_path_rate: float | None = None,
    model_args: dict[str, Any] | None = None,
) -> nn.Module:
    """Any timm model by name, without its classifier.

    Args: the fields of ``TimmConfig``.

    Raises:
        ConfigError: there is no such model, or it does not take an argument.
    """
    arguments = dict(model_args or {})
    if drop_path_rate is not None:
        arguments["drop_path_rate"] = drop_path_rate
    net = _create(name, arguments)
    if isinstance(net, TimmVisionTransformer) and _is_plain(type(net)):
        return TransformerTrunk(net, use_mask_token, patch_drop_rate)
    if use_mask_token or patch_drop_rate:
        must = "use_mask_token and patch_drop_rate are for plain vision transformers"
        raise ConfigError([Problem(f"{_KEY}.NAME", f"timm/{name}", must, "Leave them out.")])
    return TimmTrunk(net, partial(_create, name, arguments))


class TimmTrunk(nn.Module):
    """A timm model in units. Parameters have timm's names below ``net.``, with ``.unit`` after a unit's module.

    Args:
        net: built without a classifier; taken apart.
        build: builds the same model again.

    Attributes:
        feature_dim: F, of the pooled features.
        is_chain: units take all resolutions at once; else each is gathered once per resolution.
    """

    def __init__(self, net: nn.Module, build: Callable[[], nn.Module]):
        super().__init__()
        self._build = build
        links, self.feature_dim = _trace(net)
        self.is_chain = links is not None
        for name in links or _blocks(net):
            parent, _, child = name.rpartition(".")
            kind = Unit if self.is_chain else _SingleUnit
            module = net.get_submodule(name)
            if next(module.parameters(), None) is not None:
                setattr(net.get_submodule(parent), child, kind(OrderedDict(unit=module)))
        self.net = net
        self._links = [f"net.{name}" for name in links or ()]

    def forward(self, images: list[Tensor]) -> list[Tensor]:
        """R image tensors (b_r, 3, H_r, W_r) -> R pooled features (b_r, F)."""
        if self.is_chain:
            xs = images
            for name in self._links:
                link = self.get_submodule(name)
                xs = link(xs) if isinstance(link, Unit) else [link(x) for x in xs]
            return xs
        features = []
        for index, x in enumerate(images):
            with resolution_scope(index, len(x)):
                features.append(self.net(x))
        return features

    def last_link(self, path: str) -> str:
        """Path in the trunk of what gives the output of ``path``, a part of the network that may be taken apart."""
        inside = [link for link in self._links if link == f"net.{path}" or link.startswith(f"net.{path}.")]
        return inside[-1] if inside else f"net.{path}"

    @torch.no_grad()
    def init_parameters(self, generator_for: Callable[[str], torch.Generator]) -> None:
        """First weights as timm draws them, under a generator of the run's."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(generator_for("").initial_seed())
            fresh = self._build().state_dict()
        for name, tensor in self.net.state_dict().items():
            tensor.copy_(fresh[".".join(part for part in name.split(".") if part != "unit")])


class _SingleUnit(Unit):
    """A unit inside somebody else's forward pass: it is given one resolution, and what else its block takes."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        scope = current_scope()

        def run(x: Tensor) -> Any:
            with resolution_scope(*scope):
                return self.apply_layers(x, *args, **kwargs)

        if self.checkpoint and self.training and torch.is_grad_enabled():
            return checkpoint(run, x, use_reentrant=False, context_fn=recomputation_contexts)
        return run(x)

    def apply_layers(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """See ``Unit``."""
        return self[0](x, *args, **kwargs)


@dataclass
class _Call:
    """One call of a module in a forward pass; tensors with their version, which a change in place counts up."""

    name: str
    num_params: int
    owns_parameters: bool
    entered: tuple[Any, int]
    left: tuple[Any, int] = (None, 0)
    inner: list[_Call] = field(default_factory=list)

    def links(self, least_params: int) -> list[str]:
        """Names of the modules that do the same one after another; its own name if there are no such.

        Args:
            least_params: a module with fewer parameters is not worth taking apart.
        """
        if self.num_params < least_params:
            return [self.name]
        given, names = self.entered, list[str]()
        for call in self.inner:
            if not _same(call.entered, given):
                return [self.name]
            names += call.links(least_params)
            given = call.left
        is_chain = self.inner and not self.owns_parameters and _same(given, self.left)
        return names if is_chain and len(set(names)) == len(names) else [self.name]


def _trace(net: nn.Module) -> tuple[list[str] | None, int]:
    """Modules that a forward pass in training is a chain of, None if it is none, and the number of features."""
    names = {module: name for name, module in net.named_modules()}
    root = _Call("", 0, False, (None, 0))
    stack = [root]

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        owns = next(module.parameters(recurse=False), None) is not None
        size = sum(param.numel() for param in module.parameters())
        call = _Call(names[module], size, owns, _versioned(args[0] if len(args) == 1 and not kwargs else None))
        stack[-1].inner.append(call)
        stack.append(call)

    def leave(_module: nn.Module, _args: Any, output: Any) -> None:
        stack.pop().left = _versioned(output)

    handles = [module.register_forward_pre_hook(enter, with_kwargs=True) for module in names]
    handles += [module.register_forward_hook(leave) for module in names]
    buffers = [(buffer, buffer.clone()) for buffer in net.buffers()]
    try:
        with torch.no_grad():
            features = net.train()(_probe(net))
    finally:
        for handle in handles:
            handle.remove()
        for buffer, before in buffers:
            buffer.copy_(before)
    (call,) = root.inner
    links = call.links(call.num_params // _MOST_UNITS)
    return (None if links == [""] else links), features.shape[1]


def _versioned(value: Any) -> tuple[Any, int]:
    return (value, value._version) if isinstance(value, Tensor) else (None, 0)


def _same(one: tuple[Any, int], other: tuple[Any, int]) -> bool:
    return one[0] is not None and one[0] is other[0] and one[1] == other[1]


def _blocks(net: nn.Module) -> Iterator[str]:
    """The members of the model's own lists: its blocks."""
    for name, child in list(net.named_children()):
        if isinstance(child, nn.Sequential | nn.ModuleList):
            yield from (
                f"{name}.{key}" for key, member in child.named_children() if any(True for _ in member.parameters())
            )


def _probe(net: nn.Module) -> Tensor:
    config: dict[str, Any] = getattr(net, "pretrained_cfg", None) or {}
    side = config.get("input_size", (3, 224, 224))[-1] if config.get("fixed_input_size") else _PROBE_SIDE
    size = getattr(getattr(net, "patch_embed", None), "img_size", None) or (side, side)
    weight = next(net.parameters())
    return torch.zeros(2, 3, *size, dtype=weight.dtype, device=weight.device)


def _is_plain(kind: type) -> bool:
    return all(getattr(kind, name) is getattr(TimmVisionTransformer, name) for name in _TRANSFORMER_METHODS)


def _create(name: str, arguments: dict[str, Any]) -> nn.Module:
    if not timm.is_model(name):
        fix = f"See https://huggingface.co/timm.{did_you_mean(name, timm.list_models())}"
        raise ConfigError([Problem(f"{_KEY}.NAME", f"timm/{name}", "must name a model of timm", fix)])
    build = partial(timm.create_model, name, pretrained=False, num_classes=0, **arguments)
    try:
        try:
            net: nn.Module = build(dynamic_img_size=True)  # vision transformers take it, and then crops of any size
        except TypeError as error:
            if "dynamic_img_size" not in str(error):
                raise
            net = build()
    except TypeError as error:
        raise ConfigError([Problem(f"{_KEY}.PARAMS.model_args", str(arguments), str(error), "Correct it.")]) from error
    return net
