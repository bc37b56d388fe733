"""Networks of timm, cut into units: any by name, or by VISSL's keys.

timm: https://github.com/huggingface/pytorch-image-models. Plain vision transformers become a ``TransformerTrunk``. For
other models, one traced forward pass detects whether the model is a chain: modules called in sequence, each with the
previous output. ConvNeXt, Swin, EfficientNet, ResNet, RegNet and most others are chains, and each link becomes a unit
that takes all resolutions at once. Others (XCiT, BEiT, EVA) keep timm's forward pass, and each of their blocks becomes
a unit that is gathered once per resolution.

VISSL's keys build timm's classes of the same architectures, and MobileNet v3 also from torchvision.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import timm
import torch
import torchvision
from timm.models.beit import Beit
from timm.models.convit import ConVit
from timm.models.convnext import ConvNeXt
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import VisionTransformer as TimmVisionTransformer
from timm.models.xcit import Xcit
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from vissl_zero.config.components.trunks import (
    BeitConfig,
    ConvitConfig,
    ConvNextConfig,
    EfficientNetConfig,
    MobileNetConfig,
    SwinConfig,
    TimmConfig,
    XcitConfig,
    size_problems,
)
from vissl_zero.errors import ConfigError, Problem, did_you_mean
from vissl_zero.models.keyed_random import current_scope, resolution_scope
from vissl_zero.models.model import LayerTap, Unit, attention_for, recomputation_contexts
from vissl_zero.models.patches import grid_of
from vissl_zero.models.trunks.vision_transformer import TransformerTrunk
from vissl_zero.models.weight_names import is_adapters, without_base_layer
from vissl_zero.registry import TRUNKS

_KEY = "config.MODEL.TRUNK"
# Methods that a subclass must not override: TransformerTrunk replaces them.
_TRANSFORMER_METHODS = ("forward_features", "_pos_embed", "pool", "forward_head")
# timm's arguments that our units would ignore -> fix for the error.
_WITHOUT_EFFECT = {
    "patch_drop_rate": f"Write {_KEY}.PARAMS.patch_drop_rate instead.",
    "drop_rate": "Write use_dropout and dropout_rate in an mlp head instead: timm drops before its classifier.",
}
# A module with less than 1 / 64 of the model's parameters is not split further: tiny units cost a collective each.
_MOST_UNITS = 64
_MOST_PREFIX = 32  # largest number of class and register tokens before the patches
_PROBE_SIDE = 64  # side of the traced image, for models of any size


@TRUNKS.register("timm", config=TimmConfig)
def build_timm_trunk(
    name: str,
    use_mask_token: bool = False,
    patch_drop_rate: float = 0.0,
    drop_path_rate: float | None = None,
    layer_norm_eps: float | None = None,
    last_norm_eps: float | None = None,
    position_resize: str = "antialiased",
    model_args: dict[str, Any] | None = None,
) -> nn.Module:
    """Build any timm model by name, without its classifier.

    Args: the fields of ``TimmConfig``.

    Raises:
        ConfigError: there is no such model, it does not take an argument, or an argument would have no effect.
    """
    arguments = dict(model_args or {})
    if drop_path_rate is not None:
        arguments["drop_path_rate"] = drop_path_rate
    build = partial(_create_with_norms, name, arguments, layer_norm_eps, last_norm_eps)
    net = build()
    if isinstance(net, TimmVisionTransformer) and _is_plain(type(net)):
        must = "must be left out: the units of a vision transformer do not read it"
        problems = [
            Problem(f"{_KEY}.PARAMS.model_args.{key}", str(arguments[key]), must, fix)
            for key, fix in _WITHOUT_EFFECT.items()
            if arguments.get(key)
        ]
        if problems:
            raise ConfigError(problems)
        return TransformerTrunk(net, use_mask_token, patch_drop_rate, position_resize)
    if use_mask_token or patch_drop_rate or position_resize != "antialiased":
        must = "use_mask_token, patch_drop_rate and position_resize are for plain vision transformers"
        raise ConfigError([Problem(f"{_KEY}.NAME", f"timm/{name}", must, "Leave them out.")])
    return TimmTrunk(net, build)


class TimmTrunk(nn.Module):
    """A timm model in units. Parameters have timm's names below ``net.``, with ``.unit`` after a unit's module.

    Args:
        net: model without a classifier; its modules are moved into units.
        build: builds the same model again.

    Attributes:
        feature_dim: F, width of the pooled features.
        map_dim: channels of the last maps; None if no maps were detected.
        is_chain: whether units take all resolutions at once; else a unit is gathered once per resolution.
    """

    def __init__(self, net: nn.Module, build: Callable[[], nn.Module]):
        super().__init__()
        self._build = build
        links, self.feature_dim, last_map = _trace(net)
        self._map_link, self.map_dim, self._is_channels_last = last_map
        self.is_chain = links is not None
        for name in links or _blocks(net):
            parent, _, child = name.rpartition(".")
            kind = Unit if self.is_chain else _SingleUnit
            module = net.get_submodule(name)
            if next(module.parameters(), None) is not None:
                # A module without parameters has nothing to gather.
                setattr(net.get_submodule(parent), child, kind(OrderedDict(unit=module)))
        self.net = net
        self._links = [f"net.{name}" for name in links or ()]

    def forward(self, images: list[Tensor], return_maps: bool = False) -> list[Tensor]:
        """Compute pooled features (b_r, F) of R image tensors (b_r, 3, H_r, W_r).

        Args:
            images: images of each resolution.
            return_maps: also return the last maps (b_r, map_dim, h_r, w_r), before the features.
        """
        maps: list[Tensor] = []
        if self.is_chain:
            xs = images
            for name in self._links:
                link = self.get_submodule(name)
                xs = link(xs) if isinstance(link, Unit) else [link(x) for x in xs]
                if return_maps and name == f"net.{self._map_link}":
                    maps = xs
            return [*self._as_maps(maps, images), *xs]
        features = []
        for index, x in enumerate(images):
            with resolution_scope(index, len(x)), self._caught_maps(maps if return_maps else None):
                features.append(self.net(x))
        return [*self._as_maps(maps, images), *features]

    def _as_maps(self, outputs: list[Tensor], images: list[Tensor]) -> list[Tensor]:
        """Convert the outputs of the layer of the last maps to maps, for each resolution; empty if there are none."""
        pairs = zip(outputs, images, strict=bool(outputs))
        return [_as_map(output, image, self.net, self._is_channels_last) for output, image in pairs]

    @contextmanager
    def _caught_maps(self, maps: list[Tensor] | None) -> Iterator[None]:
        """Append the outputs of the layer of the last maps to ``maps``, unless None. A context manager."""
        if maps is None:
            yield
            return
        handle = self.net.get_submodule(self._map_link).register_forward_hook(lambda *call: maps.append(call[2]))
        try:
            yield
        finally:
            handle.remove()

    def last_link(self, path: str) -> str:
        """Return the path of the link with the output of ``path``, a module that may be split into links."""
        inside = [link for link in self._links if link == f"net.{path}" or link.startswith(f"net.{path}.")]
        return inside[-1] if inside else f"net.{path}"

    @torch.no_grad()
    def init_parameters(self, generator_for: Callable[[str], torch.Generator]) -> None:
        """Draw the weights as timm does, under a generator keyed by the run's seed."""
        # By building the model again: timm draws weights in constructors, across the borders of units.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(generator_for("").initial_seed())
            fresh = self._build().state_dict()
        for name, tensor in self.net.state_dict().items():
            if not is_adapters(name):
                plain = without_base_layer(name)
                tensor.copy_(fresh[".".join(part for part in plain.split(".") if part != "unit")])


class _SingleUnit(Unit):
    """A unit inside timm's forward pass, which takes one resolution and the other arguments of its block."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        # Captured now: in a recomputation, the scope is no longer that of this resolution.
        scope = current_scope()

        def run(x: Tensor) -> Any:
            with resolution_scope(*scope), attention_for(x):
                return self.apply_layers(x, *args, **kwargs)

        if self.checkpoint and self.training and torch.is_grad_enabled():
            return checkpoint(run, x, use_reentrant=False, context_fn=recomputation_contexts)
        return run(x)

    def apply_layers(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the unit's layers; see ``Unit``."""
        return self[0](x, *args, **kwargs)


@dataclass
class _Call:
    """A call of a module in a traced forward pass; (tensor, version) each, as in-place changes increase the version."""

    name: str
    num_params: int
    owns_parameters: bool
    entered: tuple[Any, int]
    left: tuple[Any, int] = (None, 0)
    inner: list[_Call] = field(default_factory=list)

    def links(self, least_params: int) -> list[str]:
        """Return the names of inner modules whose sequence equals this call; its own name if there is no such sequence.

        Args:
            least_params: a module with fewer parameters is not split.
        """
        if self.num_params < least_params:
            return [self.name]
        current, names = self.entered, list[str]()
        for call in self.inner:
            # Another input than the last output: a shortcut, or arithmetic between the modules.
            if not _same(call.entered, current):
                return [self.name]
            names += call.links(least_params)
            current = call.left
        # Parameters of its own would be used outside of all links.
        is_chain = self.inner and not self.owns_parameters and _same(current, self.left)
        return names if is_chain and len(set(names)) == len(names) else [self.name]


_LastMap = tuple[str, int | None, bool]  # link with the last map, its channels, whether channels are the last dimension


def _trace(net: nn.Module) -> tuple[list[str] | None, int, _LastMap]:
    """Trace a training pass; return the chain's links (None: no chain), the number of features, and the last map."""
    names = {module: name for name, module in net.named_modules()}
    root = _Call("", 0, False, (None, 0))
    stack = [root]

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        owns = next(module.parameters(recurse=False), None) is not None
        size = sum(param.numel() for param in module.parameters())
        # A link takes one tensor: a call with anything else ends the chain.
        call = _Call(names[module], size, owns, _versioned(args[0] if len(args) == 1 and not kwargs else None))
        stack[-1].inner.append(call)
        stack.append(call)

    def leave(_module: nn.Module, _args: Any, output: Any) -> None:
        stack.pop().left = _versioned(output)

    handles = [module.register_forward_pre_hook(enter, with_kwargs=True) for module in names]
    handles += [module.register_forward_hook(leave) for module in names]
    # The traced pass moves running statistics, which must not count it.
    buffers = [(buffer, buffer.clone()) for buffer in net.buffers()]
    try:
        with torch.no_grad():
            probe = _probe(net)
            try:
                # In training mode: some models run other modules in evaluation.
                features = net.train()(probe)
            except RuntimeError:  # the model needs larger images: try the size of its pre-training
                root.inner.clear()
                del stack[1:]
                probe = _probe(net, is_own_size=True)
                features = net(probe)
    finally:
        for handle in handles:
            handle.remove()
        for buffer, before in buffers:
            buffer.copy_(before)
    (call,) = root.inner
    links = call.links(call.num_params // _MOST_UNITS)
    num_features = int(features.shape[1])
    if links == [""]:
        height, width = _patches(probe, net)
        return None, num_features, _last_map(call, [inner.name for inner in call.inner], num_features, height * width)
    return links, num_features, _last_map(call, links, num_features)


def _last_map(call: _Call, links: list[str], num_features: int, num_patches: int = 0) -> _LastMap:
    """Return the last link whose output is a map, or tokens of all patches."""
    outputs = {inner.name: inner.left[0] for inner in _calls_below(call)}
    for name in reversed(links):
        output = outputs.get(name)
        if output is None:
            break
        if output.ndim == 3:
            are_patches = 0 < num_patches <= output.shape[1] < num_patches + _MOST_PREFIX
            return (name, int(output.shape[2]), True) if are_patches else ("", None, False)
        if output.ndim == 4 and output[0].numel() > max(output.shape[1], output.shape[3]):  # more than one pixel
            is_last = output.shape[1] != num_features == output.shape[3]
            return name, int(output.shape[3 if is_last else 1]), is_last
    return "", None, False


def _calls_below(call: _Call) -> Iterator[_Call]:
    for inner in call.inner:
        yield inner
        yield from _calls_below(inner)


def _as_map(output: Tensor, image: Tensor, net: Any, is_channels_last: bool) -> Tensor:
    """Convert a map, channels last or not, or tokens (b, prefix + h * w, D) to a map (b, D, h, w)."""
    if output.ndim == 4:
        return output.permute(0, 3, 1, 2) if is_channels_last else output
    grid = _patches(image, net)
    return output[:, output.shape[1] - grid[0] * grid[1] :].transpose(1, 2).unflatten(2, grid)


def _patches(image: Tensor, net: Any) -> tuple[int, int]:
    """Count a network's patches per column and row of an image; 0 if it has no patches."""
    side = getattr(getattr(net, "patch_embed", None), "patch_size", None)
    if side is None:
        return 0, 0
    return grid_of(image, (side, side) if isinstance(side, int) else (int(side[0]), int(side[1])))


def _versioned(value: Any) -> tuple[Any, int]:
    return (value, value._version) if isinstance(value, Tensor) else (None, 0)


def _same(one: tuple[Any, int], other: tuple[Any, int]) -> bool:
    return one[0] is not None and one[0] is other[0] and one[1] == other[1]


def _blocks(net: nn.Module) -> Iterator[str]:
    """Yield the paths of the model's blocks: the members of its lists, and of lists in these."""
    for name, child in list(net.named_children()):
        if isinstance(child, nn.Sequential | nn.ModuleList):
            yield from (f"{name}.{member}" for member in _members(child))


def _members(blocks: nn.Module) -> Iterator[str]:
    for key, member in blocks.named_children():
        if isinstance(member, nn.ModuleList):
            yield from (f"{key}.{inner}" for inner in _members(member))
        elif any(True for _ in member.parameters()):
            yield key


def _probe(net: nn.Module, is_own_size: bool = False) -> Tensor:
    config: dict[str, Any] = getattr(net, "pretrained_cfg", None) or {}
    is_own_size = is_own_size or bool(config.get("fixed_input_size"))
    side = config.get("input_size", (3, 224, 224))[-1] if is_own_size else _PROBE_SIDE
    size = getattr(getattr(net, "patch_embed", None), "img_size", None) or (side, side)
    weight = next(net.parameters())
    # Two images: batch norm needs more than one value for each channel.
    return torch.zeros(2, 3, *size, dtype=weight.dtype, device=weight.device)


def _is_plain(kind: type) -> bool:
    return all(getattr(kind, name) is getattr(TimmVisionTransformer, name) for name in _TRANSFORMER_METHODS)


def _create_with_norms(
    name: str, arguments: dict[str, Any], layer_norm_eps: float | None, last_norm_eps: float | None
) -> nn.Module:
    net = _create(name, arguments)
    norms = [module for module in net.modules() if isinstance(module, nn.LayerNorm)]
    for module in norms:
        module.eps = layer_norm_eps or module.eps
    if norms and last_norm_eps:
        norms[-1].eps = last_norm_eps
    return net


def _create(name: str, arguments: dict[str, Any]) -> nn.Module:
    if not timm.is_model(name):
        fix = f"See https://huggingface.co/timm.{did_you_mean(name, timm.list_models())}"
        raise ConfigError([Problem(f"{_KEY}.NAME", f"timm/{name}", "must name a model of timm", fix)])
    build = partial(timm.create_model, name, pretrained=False, num_classes=0, **arguments)
    try:
        try:
            net: nn.Module = build(dynamic_img_size=True)  # crops of any size, for vision transformers
        except TypeError as error:
            if "dynamic_img_size" not in str(error):
                raise
            net = build()
    except TypeError as error:
        raise ConfigError([Problem(f"{_KEY}.PARAMS.model_args", str(arguments), str(error), "Correct it.")]) from error
    return net


_NORM = partial(nn.LayerNorm, eps=1e-6)
_Keys = TypeVar("_Keys", BeitConfig, XcitConfig, ConvNextConfig, SwinConfig)


@TRUNKS.register("beit", config=BeitConfig)
class BeitTrunk(TimmTrunk):
    """BEiT by width, depth, heads and patch size. Images have one size.

    Args:
        options: fields of ``BeitConfig``.
    Raises:
        ConfigError: the keys make no BEiT.
    """

    tap_names = ("lastCLS", "concatCLS4", "blkCLS0")

    def __init__(self, **options: Any):
        self._tapped: set[int] = set()
        self._classes: list[dict[int, Tensor]] = []
        build = _checked("BEIT", _beit, BeitConfig(**options))
        super().__init__(build(), build)

    def forward(self, images: list[Tensor], return_maps: bool = False) -> list[Tensor]:
        """Compute R class tokens (b_r, F) of R image tensors (b_r, 3, H, W); as a ``TimmTrunk``."""
        maps, features, self._classes = list[Tensor](), [], []
        for index, x in enumerate(images):
            with resolution_scope(index, len(x)):
                last, inner = self.net.forward_intermediates(  # type: ignore[operator]
                    x, indices=sorted(self._tapped) or [0], return_prefix_tokens=True, norm=True, output_fmt="NLC"
                )
            features.append(last[:, 0])
            if return_maps:
                maps.append(_as_map(last, x, self.net, is_channels_last=True))
            self._classes.append(
                {b: t[1][:, 0] for b, t in zip(sorted(self._tapped), inner, strict=bool(self._tapped))}
            )
        return [*maps, *features]

    def tap(self, name: str) -> LayerTap | None:
        """Tap VISSL's names, class tokens after the last norm.

        These are of the last block (lastCLS), of the last n concatenated (concatCLSn), of block n (blkCLSn).
        """
        depth = len(self.net.blocks)  # type: ignore[arg-type]
        match = re.fullmatch(r"(last|concat|blk)CLS(\d*)", name)
        if match is None or (match[1] == "last") == bool(match[2]):
            return None
        count = int(match[2] or 1)
        blocks = [count] if match[1] == "blk" else [*range(max(0, depth - count), depth)]
        if max(blocks, default=depth) >= depth or (match[1] != "blk" and count > depth):
            return None
        self._tapped |= set(blocks)

        def combine(_caught: list[list[Tensor]], features: list[Tensor]) -> list[Tensor]:
            return [torch.cat([tokens[block] for block in blocks], dim=1) for tokens in self._classes]

        return LayerTap((), combine)


def _beit(config: BeitConfig) -> nn.Module:
    net = Beit(
        img_size=config.IMAGE_SIZE,
        patch_size=config.PATCH_SIZE,
        num_classes=0,
        global_pool="token",
        embed_dim=config.HIDDEN_DIM,
        depth=config.NUM_LAYERS,
        num_heads=config.NUM_HEADS,
        qkv_bias=config.QKV_BIAS,
        mlp_ratio=config.MLP_RATIO,
        pos_drop_rate=config.DROPOUT_RATE,
        proj_drop_rate=config.DROPOUT_RATE,
        attn_drop_rate=config.ATTENTION_DROPOUT_RATE,
        drop_path_rate=config.DROP_PATH_RATE,
        norm_layer=_NORM,  # type: ignore[arg-type]  # timm passes partials itself
        init_values=float(config.INIT_VALUES) or None,
        use_abs_pos_emb=config.USE_ABS_POS_EMB,
        use_rel_pos_bias=config.USE_REL_POS_BIAS,
        use_shared_rel_pos_bias=config.USE_SHARED_REL_POS_BIAS,
    )
    if config.USE_MEAN_POOLING:
        net.norm = nn.Identity()
    return net


class _OneFeature(TimmTrunk):
    """A network of which only the feature can be tapped, by the name in VISSL's recipes.

    Args:
        build: builds the network.
    """

    tap_names = ("lastCLS",)

    def __init__(self, build: Callable[[], nn.Module]):
        super().__init__(build(), build)

    def tap(self, name: str) -> LayerTap | None:
        """Tap lastCLS, VISSL's name of the feature: a transformer's class token after the last norm."""
        # VISSL ignores the name and returns the feature for any.
        return LayerTap((), lambda _, features: features) if name == "lastCLS" else None


@TRUNKS.register("xcit", config=XcitConfig)
def build_xcit(**options: Any) -> nn.Module:
    """Build XCiT by width, depth, heads and patch size; images of any size. Raises ConfigError for bad keys."""
    return _OneFeature(_checked("XCIT", _xcit, XcitConfig(**options)))


def _xcit(config: XcitConfig) -> nn.Module:
    return Xcit(
        img_size=config.IMAGE_SIZE,
        patch_size=config.PATCH_SIZE,
        num_classes=0,
        embed_dim=config.HIDDEN_DIM,
        depth=config.NUM_LAYERS,
        num_heads=config.NUM_HEADS,
        mlp_ratio=config.MLP_RATIO,
        qkv_bias=config.QKV_BIAS,
        pos_drop_rate=config.DROPOUT_RATE,
        proj_drop_rate=config.DROPOUT_RATE,
        attn_drop_rate=config.ATTENTION_DROPOUT_RATE,
        drop_path_rate=config.DROP_PATH_RATE,
        eta=config.ETA,
        tokens_norm=config.TOKENS_NORM,
    )


@TRUNKS.register("convnext", config=ConvNextConfig)
def build_convnext(**options: Any) -> nn.Module:
    """Build ConvNeXt by depth and width of each stage. Raises ConfigError where the keys make none."""
    return _OneFeature(_checked("CONVNEXT", _convnext, ConvNextConfig(**options)))


def _convnext(config: ConvNextConfig) -> nn.Module:
    return ConvNeXt(
        num_classes=0, depths=tuple(config.DEPTH), dims=tuple(config.DIMS), drop_path_rate=config.DROP_PATH_RATE
    )


@TRUNKS.register("swin_transformer", config=SwinConfig)
def build_swin(**options: Any) -> nn.Module:
    """Build Swin by width, and depth and heads of each stage. Raises ConfigError where the keys make none."""
    return _OneFeature(_checked("SWIN_TRANSFORMER", _swin, SwinConfig(**options)))


def _swin(config: SwinConfig) -> nn.Module:
    return SwinTransformer(
        img_size=config.IMAGE_SIZE,
        patch_size=config.PATCH_SIZE,
        num_classes=0,
        embed_dim=config.EMBED_DIM,
        depths=tuple(config.DEPTHS),
        num_heads=tuple(config.NUM_HEADS),
        window_size=config.WINDOW_SIZE,
        dynamic_img_size=True,
        mlp_ratio=config.MLP_RATIO,
        qkv_bias=config.QKV_BIAS,
        proj_drop_rate=config.DROPOUT_RATE,
        attn_drop_rate=config.ATTENTION_DROPOUT_RATE,
        drop_path_rate=config.DROP_PATH_RATE,
    )


@TRUNKS.register("convit", config=ConvitConfig)
def build_convit(**options: Any) -> nn.Module:
    """Build ConViT by width, depth, heads and number of gated blocks. Images have one size."""
    build = partial(_convit, ConvitConfig(**options))
    return TimmTrunk(build(), build)


def _convit(config: ConvitConfig) -> nn.Module:
    return ConVit(
        img_size=config.IMAGE_SIZE,
        patch_size=config.PATCH_SIZE,
        num_classes=0,
        global_pool="token" if config.CLASSIFIER == "token" else "avg",
        embed_dim=config.HIDDEN_DIM // config.NUM_HEADS,  # timm's embed_dim is per head
        depth=config.NUM_LAYERS,
        num_heads=config.NUM_HEADS,
        mlp_ratio=config.MLP_DIM / config.HIDDEN_DIM,
        qkv_bias=config.QKV_BIAS,
        pos_drop_rate=config.DROPOUT_RATE,
        proj_drop_rate=config.DROPOUT_RATE,
        attn_drop_rate=config.ATTENTION_DROPOUT_RATE,
        drop_path_rate=config.DROP_PATH_RATE,
        norm_layer=nn.LayerNorm,
        local_up_to_layer=config.N_GPSA_LAYERS,
        locality_strength=config.LOCALITY_STRENGTH,
    )


_FEATURE_DROPOUT = {"B0": 0.2, "B1": 0.2, "B2": 0.3, "B3": 0.3, "B4": 0.4, "B5": 0.4, "B6": 0.5, "B7": 0.5}


@TRUNKS.register("efficientnet", config=EfficientNetConfig)
class EfficientNetTrunk(TimmTrunk):
    """EfficientNet B0 to B7, padded as in TensorFlow and classy-vision, with dropout of its feature as in VISSL.

    Args:
        options: fields of ``EfficientNetConfig``.
    """

    tap_names = ("conv_final", "flatten")

    def __init__(self, **options: Any):
        build = partial(_efficientnet, EfficientNetConfig(**options))
        super().__init__(build(), build)

    def tap(self, name: str) -> LayerTap | None:
        """Tap VISSL's conv_final, the maps before pooling, and flatten, their mean."""
        maps = (self.last_link("bn2"),)
        if name == "conv_final":
            return LayerTap(maps)
        return LayerTap(maps, lambda caught, _: [x.mean(dim=(2, 3)) for x in caught[0]]) if name == "flatten" else None


def _efficientnet(config: EfficientNetConfig) -> nn.Module:
    net: nn.Module = timm.create_model(
        f"tf_efficientnet_{config.model_version.lower()}",
        num_classes=0,
        bn_momentum=config.bn_momentum,
        bn_eps=config.bn_epsilon,
        drop_path_rate=config.drop_connect_rate,
        channel_divisor=config.width_divisor,
    )
    # VISSL's trunk drops elements of its feature, with the rate of each version.
    net.classifier = nn.Dropout(_FEATURE_DROPOUT[config.model_version])
    return net


class _MobileNetTrunk(TimmTrunk):
    """MobileNet v3.

    Args:
        build: builds the network.
        maps: path of the module whose output is pooled.
        has_wide_feature: whether the feature is wider than the pooled maps.
    """

    tap_names = ("trunk", "trunk_pool", "trunk_pool_norm", "flatten", "flatten_norm")

    def __init__(self, build: Any, maps: str, has_wide_feature: bool):
        super().__init__(build(), build)
        self._maps = self.last_link(maps)
        self._has_wide_feature = has_wide_feature

    def tap(self, name: str) -> LayerTap | None:
        """Tap VISSL's trunk (last maps), trunk_pool (their mean) or flatten (timm's feature); _norm: of unit length."""
        kind = name.removesuffix("_norm")
        if kind == "trunk" and kind == name:
            return LayerTap((self._maps,))
        if kind not in ("trunk_pool", "flatten") or (kind == "flatten" and not self._has_wide_feature):
            return None

        def combine(caught: list[list[Tensor]], features: list[Tensor]) -> list[Tensor]:
            rows = features if kind == "flatten" else [x.mean(dim=(2, 3)) for x in caught[0]]
            return [functional.normalize(x, dim=-1) for x in rows] if kind != name else rows

        return LayerTap((self._maps,), combine)


@TRUNKS.register("mobilenetv3_tv", config=MobileNetConfig)
def build_torchvision_mobilenet(**options: Any) -> nn.Module:
    """Build MobileNet v3 of torchvision, without its classifier. Args: the fields of ``MobileNetConfig``."""
    return _MobileNetTrunk(partial(_torchvision_mobilenet, MobileNetConfig(**options)), "features", False)


def _torchvision_mobilenet(config: MobileNetConfig) -> nn.Module:
    size = config.NAME.split("_")[1]
    # torchvision's own MobileNet has an eps of 0.001 and a momentum of 0.01.
    norm = partial(nn.BatchNorm2d, eps=1e-5, momentum=0.1) if config.TIMM_BN else None
    net: Any = getattr(torchvision.models, f"mobilenet_v3_{size}")(weights=None, norm_layer=norm)
    # torchvision flattens in its forward pass; as a layer, it keeps the model a chain.
    return nn.Sequential(OrderedDict(features=net.features, avgpool=net.avgpool, flatten=nn.Flatten()))


@TRUNKS.register("mobilenetv3_timm", config=MobileNetConfig)
def build_timm_mobilenet(**options: Any) -> nn.Module:
    """Build MobileNet v3 of timm, without its classifier. Args: the fields of ``MobileNetConfig``."""
    config = MobileNetConfig(**options)
    return _MobileNetTrunk(partial(_timm_mobilenet, config), "blocks", not config.TRUNK_ONLY)


def _timm_mobilenet(config: MobileNetConfig) -> nn.Module:
    net: nn.Module = timm.create_model(config.NAME, num_classes=0)
    if config.TRUNK_ONLY:
        # Replaced and not removed, because timm's forward pass calls them.
        net.conv_head, net.norm_head, net.act2 = nn.Identity(), nn.Identity(), nn.Identity()
    return net


def _checked(block: str, build: Callable[[_Keys], nn.Module], config: _Keys) -> Callable[[], nn.Module]:
    """Bind ``build`` to its keys. Raises ConfigError if the keys of ``MODEL.TRUNK.<block>`` make no network."""
    if problems := size_problems(f"config.MODEL.TRUNK.{block}", config):
        raise ConfigError(problems)
    return partial(build, config)
