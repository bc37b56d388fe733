"""A trunk and its heads as one module of units, independent of sharding.

A unit is the part of a model that is gathered, resharded and recomputed at once. It takes the list of all resolutions
of a step, so that its parameters are gathered once per step and not once per resolution. Sharding uses hooks on the
unit's ``__call__``: call units, and never their layers from outside.

``Taps`` feed heads with pooled outputs of named layers of a frozen trunk.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from vissl_zero.config.blocks.model_and_loss import FeatureEvalSettings, ModelConfig, TeacherModel, Trunk
from vissl_zero.config.components.heads import KEY, POOLINGS
from vissl_zero.config.components.trunks import TRUNK_BLOCKS, own_trunk_keys, trunk_component
from vissl_zero.errors import ConfigError, Problem, did_you_mean
from vissl_zero.models.keyed_random import key_random_layers, resolution_scope
from vissl_zero.models.mlp_heads import MLP
from vissl_zero.models.packing import KEY as PACKING
from vissl_zero.models.patches import ChoosePatches, PatchView, Tokens, grid_of
from vissl_zero.registry import HEADS, TRUNKS, require_interface

# (outputs of each tapped layer, the trunk's features) -> outputs of the tap; each a tensor per resolution.
Combine = Callable[[list[list[Tensor]], list[Tensor]], list[Tensor]]


@dataclass(frozen=True)
class LayerTap:
    """The way to read one named output of a trunk.

    Attributes:
        layers: paths of modules in the trunk whose outputs are caught.
        combine: function of these outputs; None: the output of the single layer.
    """

    layers: tuple[str, ...]
    combine: Combine | None = None


class Taps:
    """Catches the outputs of layers in the trunk's forward pass, and pools them.

    Args:
        trunk: unsharded trunk. It may have ``tap(name) -> LayerTap | None`` for its own names; every other name is the
            path of a module, whose output must be maps, vectors or a list of them.
        entries: entries of LINEAR_EVAL_FEAT_POOL_OPS_MAP, one per head.
        should_flatten: flatten pooled outputs to vectors.
    Raises:
        ConfigError: a name is neither.
    """

    def __init__(self, trunk: nn.Module, entries: Sequence[Any], should_flatten: bool):
        self._caught: dict[str, list[Tensor]] = {}
        self._should_flatten = should_flatten
        self._taps = [_tap(trunk, name) for name, _ in entries]
        self._pools = [_pooling(name, args) for _, (name, args) in entries]
        self.names = [name for name, _ in entries]
        self.widths = [0] * len(entries)  # widths of the last pass's vectors
        for path in dict.fromkeys(path for tap in self._taps for path in tap.layers):
            # Hooks, because a trunk has no argument for the outputs of its layers.
            trunk.get_submodule(path).register_forward_hook(self._catch(path))

    def _catch(self, path: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            # A unit returns the list of all resolutions; a layer inside a unit is called for each.
            self._caught.setdefault(path, []).extend(output if isinstance(output, (list, tuple)) else [output])

        return hook

    def clear(self) -> None:
        """Drop caught outputs: before a forward pass, and after it to free their memory."""
        self._caught.clear()

    def __call__(self, features: list[Tensor]) -> list[Tensor]:
        """Return the input of each head, rows of all resolutions. Call it after the trunk's forward pass.

        Args:
            features: the trunk's features, a tensor (b_r, F) per resolution.
        """
        inputs = []
        for index, (tap, pool) in enumerate(zip(self._taps, self._pools, strict=True)):
            caught = [self._caught[path] for path in tap.layers]
            outputs = tap.combine(caught, features) if tap.combine else caught[0]
            rows = [pool(_with_room(pool, index, x)) for x in outputs]
            inputs.append(torch.cat([x.flatten(1) for x in rows] if self._should_flatten else rows))
        self.widths = [rows.shape[1] for rows in inputs]
        self.clear()
        # Caught maps of all layers would stay in memory until the next pass.
        return inputs


def _tap(trunk: nn.Module, name: str) -> LayerTap:
    find: Any = getattr(trunk, "tap", None)
    tap = find(name) if callable(find) else None
    if isinstance(tap, LayerTap):
        return tap
    paths = [path for path, _ in trunk.named_modules() if path]
    if name not in paths:
        names = [*getattr(trunk, "tap_names", ()), *paths]
        fix = f"Name a layer of the trunk: {', '.join(names[:20])}, ...{did_you_mean(name, names)}"
        raise ConfigError([Problem(KEY, repr(name), "must name layers of the trunk", fix)])
    return LayerTap((name,))


def _pooling(name: str, args: Sequence[Any]) -> nn.Module:
    pooling: nn.Module = getattr(nn, name)(*[tuple(arg) if isinstance(arg, list) else arg for arg in args])
    assert name in POOLINGS
    return pooling


def _with_room(pooling: nn.Module, index: int, x: Tensor) -> Tensor:
    """Return a layer's maps, after checking that a pooling's window fits into them. Reads shapes only.

    Raises:
        ConfigError: the maps are smaller, or the layer has none.
    """
    if isinstance(pooling, nn.Identity):
        return x
    options = [getattr(pooling, name, default) for name, default in _WINDOW.items()]
    pairs = [option if isinstance(option, tuple) else (option, option) for option in options]
    # A last window that begins inside the maps counts, with ceil_mode.
    spare = [stride - 1 if getattr(pooling, "ceil_mode", False) else 0 for stride in pairs[1]]
    windows = zip(pairs[0], pairs[2], pairs[3], spare, strict=True)
    least = [dilation * (kernel - 1) + 1 - 2 * padding - left for kernel, padding, dilation, left in windows]
    has_maps = x.ndim in (3, 4)  # as torch's poolings have it
    if has_maps and all(size >= needed for size, needed in zip(x.shape[-2:], least, strict=True)):
        return x
    got = f"maps of {x.shape[-2]} x {x.shape[-1]}" if has_maps else f"vectors of {x.shape[-1]}"
    fix = 'Write a smaller window, a layer with larger maps, or ["Identity", []] for a layer of vectors.'
    must = f"must pool a layer whose maps have room for {pooling}"
    raise ConfigError([Problem(f"{KEY}[{index}]", got, must, fix)])


# Of poolings with windows, and what they are without.
_WINDOW = {"kernel_size": 1, "stride": 1, "padding": 0, "dilation": 1}


def _require_width(head: nn.Module, index: int, rows: Tensor) -> None:
    """Check that a head's first layer takes these features.

    Raises:
        ConfigError: the widths differ; names the widths to write.
    """
    first = next((layer for layer in head.modules() if isinstance(layer, nn.Linear)), None)
    norm = getattr(head, "channel_bn", None)
    width, key = rows[0].numel(), f"config.MODEL.HEAD.PARAMS[{index}]"
    problems = []
    if first is not None and first.in_features != width:
        must = f"must begin with the {width} features that the layer has after pooling"
        problems.append(Problem(f"{key}.dims", str(first.in_features), must, f"Write dims: [{width}, ...]."))
    if norm is not None and norm.num_features != rows.shape[1]:
        must = f"must be the channels of the layer, {rows.shape[1]}"
        fix = f"Write in_channels: {rows.shape[1]}."
        problems.append(Problem(f"{key}.in_channels", str(norm.num_features), must, fix))
    if problems:
        raise ConfigError(problems)


_thread = threading.local()


def is_recomputing() -> bool:
    """Check whether the calling thread recomputes a checkpointed forward pass.

    Layers with side effects in forward (running statistics of batch norm) must skip them in a recomputation.
    """
    return getattr(_thread, "depth", 0) > 0


class Unit(nn.Sequential):
    """A sequence of layers, applied to each resolution of a list.

    Attributes:
        checkpoint: in training, keep only the inputs and recompute the layers in the backward pass.
    """

    checkpoint: bool = False

    def forward(self, xs: list[Tensor], *others: Sequence[Any] | None) -> list[Tensor]:
        """Apply all layers to each of the R tensors of ``xs``; their leading dimensions may differ. See ``each``."""
        if self.checkpoint and self.training and torch.is_grad_enabled():
            # Reentrant checkpointing of sharded modules gives wrong gradients with two forwards in one backward.
            result: list[Tensor] = checkpoint(
                self.each, xs, *others, use_reentrant=False, context_fn=recomputation_contexts
            )
            return result
        return self.each(xs, *others)

    def each(self, xs: list[Tensor], *others: Sequence[Any] | None) -> list[Tensor]:
        """Run ``apply_layers`` for each resolution, in the ``resolution_scope`` of its index.

        Args:
            xs: R tensors.
            others: further arguments, each with one value per resolution; None: None for all resolutions.
        """
        outputs = []
        for index, x in enumerate(xs):
            with resolution_scope(index, len(x)), attention_for(x):
                outputs.append(self.apply_layers(x, *(other[index] if other else None for other in others)))
        return outputs

    def apply_layers(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Apply the layers to one resolution. This is the part of the forward pass that is compiled."""
        return super().forward(x)


def attention_for(x: Tensor) -> AbstractContextManager[Any]:
    """Return a context manager in which attention accepts ``x``, which may have no rows."""
    # cuDNN's attention returns None for an empty batch.
    return nullcontext() if len(x) else sdpa_kernel(SDPBackend.MATH)


def recomputation_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the contexts around the first run and the recomputation of a checkpointed unit."""
    return nullcontext(), _recomputing()


@contextmanager
def _recomputing() -> Iterator[None]:
    _thread.depth = getattr(_thread, "depth", 0) + 1
    try:
        yield
    finally:
        _thread.depth -= 1


class Model(nn.Module):
    """A trunk that pools each image to a feature vector, and heads on top of it.

    Args:
        trunk: list of R image tensors -> list of R features (b_r, F).
        heads: each takes the concatenated rows of all resolutions. ``forward`` may have further parameters: ``probe``
            (see ``Method.probe``); ``tokens``, a list of ``Tokens``, one per resolution, for vision transformers only;
            ``maps``, the trunk's last maps (b_r, map_dim, h_r, w_r), one per resolution.
        taps: replaces the trunk's features by those of a layer for each head.

    Attributes:
        trunk_is_frozen: the trunk stays in evaluation mode and records no gradients.
        keeps_features: keep the trunk's features of the last pass in ``kept_features``, without graph.
        anchor: a second trunk of a teacher, constant while the teacher moves (see ``Method.moves_anchor``).
        views_apart: heads are called for each resolution separately.
        is_channels_last: images are converted to channels-last format before the trunk.
        features_are_embeddings: ``features_only`` returns the first head's embeddings, not the trunk's features.
        feature_taps: ``features_only`` returns its outputs, concatenated; None: the trunk's features.
    """

    def __init__(self, trunk: nn.Module, heads: Sequence[nn.Module], taps: Taps | None = None):
        super().__init__()
        self.trunk_is_frozen = False
        self.keeps_features = False
        self.views_apart = False
        self.is_channels_last = False
        self.kept_features: list[Tensor] = []
        self.features_are_embeddings = False
        self._is_checked = self._has_checked_heads = False
        self.trunk = trunk
        self.anchor: nn.Module | None = None
        self.heads = nn.ModuleList(heads)
        self.taps = taps
        self.feature_taps: Taps | None = None
        self._extras = [_EXTRAS & inspect.signature(head.forward).parameters.keys() for head in heads]
        self._shows_tokens = any("tokens" in names for names in self._extras)
        self._shows_maps = any("maps" in names for names in self._extras)
        if self._shows_tokens:
            _require_patches(trunk)

    def forward(
        self,
        images: list[Tensor],
        probe: Tensor | None = None,
        features_only: bool = False,
        choose_patches: ChoosePatches | None = None,
        anchored: bool = False,
    ) -> list[Any]:
        """Run one pass over all resolutions.

        Args:
            images: R tensors (b_r, 3, H_r, W_r), crop-major.
            probe: (q, D) rows that the heads score in the same pass, without gradient.
            features_only: stop after the trunk, or after the first head if ``features_are_embeddings``; see
                ``feature_taps``.
            choose_patches: selects which patches are masked, which are visible, and which are returned; None: all are
                visible.
            anchored: append the anchor's patches of the first resolution (b_0, P, F) to the outputs.
        Returns:
            One output per head, or the R features (b_r, F) of the trunk.
        """
        for taps in filter(None, (self.taps, self.feature_taps)):
            taps.clear()
        with torch.no_grad() if self.trunk_is_frozen else nullcontext():
            # A frozen trunk keeps no activations, so a linear probe needs memory for its heads only.
            tokens, maps, features = self._of_trunk(images, choose_patches, features_only)
        is_first, self._is_checked = not self._is_checked, True
        if is_first:
            # Only once: the form of a custom trunk's outputs does not change.
            _require_features(self.trunk, images, features)
        if self.keeps_features:  # independent of training mode: a teacher is always in evaluation mode
            self.kept_features = [rows.detach() for rows in features]
        if features_only:
            return self._features_to_show(features)
        if self.views_apart:
            return self._view_by_view(features, maps)
        # All resolutions in one call, so that a head is gathered once and batch norm sees all crops (as SwAV's
        # multi-crop).
        inputs = self.taps(features) if self.taps is not None else [torch.cat(features)] * len(self.heads)
        # Asked apart: kNN before the first step passes the trunk alone.
        is_first, self._has_checked_heads = not self._has_checked_heads, True
        if is_first and self.taps is not None:
            for index, (head, rows) in enumerate(zip(self.heads, inputs, strict=True)):
                _require_width(head, index, rows)
        extras = {"probe": probe, "tokens": tokens, "maps": maps}
        heads = zip(self.heads, inputs, self._extras, strict=True)
        outputs = [head(rows, **{name: extras[name] for name in names}) for head, rows, names in heads]
        if anchored:
            anchor: Any = self.anchor
            outputs.append(anchor(images[:1], return_tokens=True)[0][:, anchor.num_prefix_tokens :])
        return outputs

    def _view_by_view(self, features: list[Tensor], maps: list[Tensor]) -> list[Any]:
        """Call each head for each resolution separately, and join the outputs."""
        outputs = []
        for head, names in zip(self.heads, self._extras, strict=True):
            extras = [{"maps": [own]} for own in maps] if "maps" in names else [{}] * len(features)
            outputs.append(_joined([head(rows, **more) for rows, more in zip(features, extras, strict=True)]))
        return outputs

    def _features_to_show(self, features: list[Tensor]) -> list[Any]:
        """Return the features of ``features_only``: the trunk's, the first head's embeddings, or tapped layers."""
        lengths = [len(rows) for rows in features]
        if self.features_are_embeddings:
            outputs: Any = self.heads[0](torch.cat(features))
            return list(getattr(outputs, "embeddings", outputs).split(lengths))
        if self.feature_taps is not None:
            return list(torch.cat(self.feature_taps(features), dim=1).split(lengths))
        return features

    def _of_trunk(
        self, images: list[Tensor], choose_patches: ChoosePatches | None, features_only: bool
    ) -> tuple[list[Tokens], list[Tensor], list[Tensor]]:
        """Compute tokens and maps, if heads have these parameters, and features."""
        if self.is_channels_last:  # images only: level 3 needs contiguous weights
            images = [image.contiguous(memory_format=torch.channels_last) for image in images]
        if choose_patches is not None or (self._shows_tokens and not features_only):
            tokens, features = self._encode_patches(images, choose_patches)
            return tokens, [], features
        if features_only or not self._shows_maps:
            return [], [], self.trunk(images)
        shown: list[Tensor] = self.trunk(images, return_maps=True)
        return [], shown[: len(images)], shown[len(images) :]

    def _encode_patches(
        self, images: list[Tensor], choose_patches: ChoosePatches | None
    ) -> tuple[list[Tokens], list[Tensor]]:
        """Compute tokens and features of images with masked or dropped patches."""
        trunk: Any = _require_patches(self.trunk)
        size = trunk.patch_size
        views = [PatchView() for _ in images] if choose_patches is None else choose_patches(images, size)
        masked, kept = [view.masked for view in views], [view.kept for view in views]
        last_blocks = max(view.last_blocks for view in views)
        if last_blocks > len(trunk.blocks):
            must = f"must have at least the {last_blocks} blocks that the method looks at"
            fix = "Take a deeper trunk, or lower the method's number of blocks."
            raise ConfigError([Problem("config.MODEL.TRUNK", f"{len(trunk.blocks)} blocks", must, fix)])
        tokens = trunk(images, masked, kept, return_tokens=True, last_blocks=last_blocks)
        rows, blocks = tokens[: len(images)], tokens[len(images) :]
        shown = [
            Tokens(own, trunk.num_prefix_tokens, grid_of(image, size), view, tuple(blocks[index :: len(images)]))
            for index, (own, image, view) in enumerate(zip(rows, images, views, strict=True))
        ]
        return shown, trunk.pooled(rows)

    def train(self, mode: bool = True) -> Model:
        """Switch between training and evaluation; a frozen trunk stays in evaluation, batch norm included."""
        super().train(mode)
        if self.trunk_is_frozen:
            self.trunk.eval()
        return self

    def as_teacher(self) -> Model:
        """Freeze this copy of the trained model, and drop modules that only the student needs; in place.

        A head lists these in its attribute ``student_only``; they become None.
        """
        for head in self.heads:
            for name in getattr(head, "student_only", ()):
                # None instead of a removed attribute: heads test for it.
                setattr(head, name, None)
        return self.requires_grad_(False)

    def zero_units(self) -> list[nn.Module]:
        """List the units of sharding in forward order: the trunk's outermost units, then the heads.

        A trunk without units is itself a unit. A trunk's parameters outside of its units belong to the root. Each head
        is a unit, and so are the units inside it.
        """
        units = _outermost_units(self.trunk) or [self.trunk]
        if self.anchor is not None:
            units += _outermost_units(self.anchor)
        for head in self.heads:
            # A head is a unit even if it has units: else its other layers would belong to the root.
            units += dict.fromkeys([*_outermost_units(head), head])
        return units


_EXTRAS = {"probe", "tokens", "maps"}


def _require_patches(trunk: nn.Module) -> nn.Module:
    """Return the trunk, after checking that it is a vision transformer. Raises ConfigError."""
    if not hasattr(trunk, "pooled"):
        must = "must be a vision transformer: the method or its head looks at patches"
        fix = "Write NAME: vision_transformer, or timm/vit_small_patch16_224, for example."
        raise ConfigError([Problem("config.MODEL.TRUNK.NAME", type(trunk).__name__, must, fix)])
    return trunk


def _require_features(trunk: nn.Module, images: list[Tensor], features: Any) -> None:
    """Check that the trunk returned a list with the features of each resolution. Reads shapes only."""
    wanted = [(len(image), trunk.feature_dim) for image in images]
    is_list = isinstance(features, (list, tuple)) and all(isinstance(rows, Tensor) for rows in features)
    got = [tuple(rows.shape) for rows in features] if is_list else type(features).__name__
    if got != wanted:
        must = (
            f"{type(trunk).__qualname__}.forward must return a list with a tensor (images, feature_dim) per resolution"
        )
        fix = f"Return shapes {wanted}: forward gets a list of {len(images)} tensors. See docs/extending.md."
        raise ConfigError([Problem("config.MODEL.TRUNK.NAME", str(got), must, fix)])


def _outermost_units(module: nn.Module) -> list[nn.Module]:
    if isinstance(module, Unit):
        return [module]
    return [unit for child in module.children() for unit in _outermost_units(child)]


# A seed, because constructors may draw, and all ranks must draw the same. initialize_ then overwrites most weights.
_CONSTRUCTION_SEED = 0


def build_model(model_config: ModelConfig | TeacherModel, num_classes: int = 0) -> Model:
    """Build trunk and heads by name, in float32 on the CPU; call ``initialize_`` next.

    Args:
        model_config: ``config.MODEL`` after resolution, or the teacher under ``config.DISTILLATION``.
        num_classes: number of classes of the images, for a head whose last width is -1; 0: no classes.

    Raises:
        ConfigError: a name or a key is wrong, or a head does not fit the trunk.
    """
    head_config = model_config.HEAD
    settings = model_config.FEATURE_EVAL_SETTINGS if isinstance(model_config, ModelConfig) else FeatureEvalSettings()
    # No devices: constructors draw on the CPU, and saving a GPU's generator would start CUDA here.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_CONSTRUCTION_SEED)
        trunk = build_trunk(model_config.TRUNK)
        _see_as(trunk, model_config.INPUT_TYPE, model_config.TRUNK.NAME)
        num_channels = getattr(model_config, "IN_CHANNELS", None) or 3
        _set_input_channels(trunk, num_channels, model_config.TRUNK.NAME)
        if isinstance(model_config, ModelConfig) and model_config.LORA.USE_LORA:
            from vissl_zero.models.lora import adapt_  # peft takes seconds to import, and may not be installed

            adapt_(trunk, model_config.LORA)
        entries, heads = settings.LINEAR_EVAL_FEAT_POOL_OPS_MAP, []
        taps = Taps(trunk, entries, settings.SHOULD_FLATTEN_FEATS) if entries else None
        feature_taps = None
        if settings.EXTRACT_TRUNK_FEATURES_ONLY:
            taps, feature_taps = None, taps
        for head_name, params in head_config.PARAMS:
            build = HEADS.get(head_name).build
            width = _width_for(build, trunk)
            options = params if taps else _with_width(params, width)
            last = _numbers_of_patch(trunk, num_channels) if getattr(build, "predicts_pixels", False) else num_classes
            options = _with_last(options, last)
            if taps is None:
                _check_input_dim(head_name, options, width)
            heads.append(build(**options))
            require_interface(HEADS, head_name, heads[-1], base=nn.Module)
        model = Model(trunk, heads, taps)
    # After all parts are built: keys are full names in the model.
    key_random_layers(model)
    model.trunk_is_frozen = settings.FREEZE_TRUNK_ONLY
    model.feature_taps = feature_taps
    if isinstance(model_config, ModelConfig):
        _apply_switches(model, model_config)
    model.features_are_embeddings = settings.FREEZE_TRUNK_AND_HEAD
    for module in model.heads.modules():
        if isinstance(module, MLP):
            # Applied when weights are drawn, since they may be on the meta device now.
            module.first_scale = head_config.PARAMS_MULTIPLIER
        if isinstance(module, _BatchNorm):
            module.eps = head_config.BATCHNORM_EPS
            module.momentum = head_config.BATCHNORM_MOMENTUM
    return model


def _apply_switches(model: Model, config: ModelConfig) -> None:
    """Apply VIEWS_APART, CHANNELS_LAST and PACK_CROPS to a model. In place. Raises ConfigError."""
    model.views_apart, model.is_channels_last = config.VIEWS_APART, config.CHANNELS_LAST
    if config.PACK_CROPS:
        _pack_crops(model.trunk)


def _pack_crops(trunk: nn.Module) -> None:
    """Make the trunk run the crops of all sizes as one sequence of tokens. In place. Raises ConfigError."""
    pack_crops: Any = getattr(trunk, "pack_crops", None)
    if not callable(pack_crops):
        must = "must be false for a trunk that is no vision transformer: its layers would mix the crops"
        raise ConfigError([Problem(PACKING, f"true with {type(trunk).__name__}", must, "Leave it out.")])
    pack_crops()


def _joined(parts: Sequence[Any]) -> Any:
    """Concatenate a head's outputs for each resolution."""
    columns = zip(*map(pytree.tree_leaves, parts), strict=True)
    # What is no tensor, such as the None of a teacher without a predictor, is the same for every view.
    joined = [torch.cat(column) if isinstance(column[0], Tensor) else column[0] for column in columns]
    return pytree.tree_unflatten(joined, pytree.tree_structure(parts[0]))


def _see_as(trunk: nn.Module, input_type: str, name: str) -> None:
    """Convert the channels of a trunk's input to VISSL's INPUT_TYPE. In place."""
    if input_type == "bgr":
        # A hook, because weights of Caffe expect blue first; the loader stays the same for all trunks.
        trunk.register_forward_pre_hook(lambda _, args: ([x.flip(1) for x in args[0]], *args[1:]))
    if input_type == "lab" and name == "resnet":
        stem: Any = trunk.get_submodule("stem")
        first = stem[0]
        stem[0] = nn.Conv2d(1, first.out_channels, first.kernel_size, first.stride, first.padding, bias=False)
        trunk.register_forward_pre_hook(lambda _, args: ([x[:, :1] for x in args[0]], *args[1:]))


def _set_input_channels(trunk: nn.Module, channels: int, name: str) -> None:
    """Replace a trunk's first convolution of three channels by one of ``channels``. In place. Raises ConfigError."""
    if channels == 3:
        return
    for path, first in trunk.named_modules():
        # The first such convolution in the order of the modules takes the images.
        if isinstance(first, nn.Conv2d) and first.in_channels == 3 and first.groups == 1:
            shape = (channels, first.out_channels, first.kernel_size, first.stride, first.padding, first.dilation)
            parent, _, own_name = path.rpartition(".")
            setattr(trunk.get_submodule(parent), own_name, nn.Conv2d(*shape, bias=first.bias is not None))  # type: ignore[arg-type]
            return
    must = f"must begin with a convolution of three channels, which can be made one of {channels}"
    raise ConfigError([Problem("config.MODEL.TRUNK.NAME", name, must, "Write another trunk, such as resnet.")])


def build_trunk(trunk_config: Trunk) -> nn.Module:
    """Build the trunk of ``config.MODEL.TRUNK`` after resolution, with ``feature_dim``. Raises ConfigError."""
    name = trunk_config.NAME
    component = TRUNKS.get(trunk_component(name))
    options = trunk_config.PARAMS
    if name in TRUNK_BLOCKS and component.config is not None:
        options = own_trunk_keys(trunk_config, component.config)
    trunk: nn.Module = component.build(**options)
    require_interface(TRUNKS, name, trunk, nn.Module, {"feature_dim": "an int, the features of an image"})
    return trunk


def _width_for(head: Any, trunk: nn.Module) -> int | None:
    """Return the width of a head's input: the trunk's maps if ``forward`` has ``maps``, else its features."""
    forward = getattr(head, "forward", None)
    if forward is None or "maps" not in inspect.signature(forward).parameters:
        return getattr(trunk, "feature_dim", None)
    width: int | None = getattr(trunk, "map_dim", None)
    if width is None:
        must = "must be a trunk with maps (map_dim, and forward with return_maps), which the head looks at"
        fix = "Write NAME: resnet, regnet, vision_transformer, or a model of timm's; see docs/extending.md."
        raise ConfigError([Problem("config.MODEL.TRUNK.NAME", type(trunk).__name__, must, fix)])
    return width


def _with_width(options: Mapping[str, Any], feature_dim: int | None) -> Mapping[str, Any]:
    """Replace a first width of -1 by the width of the trunk's features."""
    dims = options.get("dims")
    return {**options, "dims": [feature_dim, *dims[1:]]} if dims and dims[0] == -1 and feature_dim else options


def _numbers_of_patch(trunk: nn.Module, num_channels: int) -> int:
    """Count the numbers of a patch: its pixels in all channels."""
    height, width = getattr(_require_patches(trunk), "patch_size")  # noqa: B009 - of a module, which may hold anything
    return num_channels * int(height) * int(width)


def _with_last(options: Mapping[str, Any], width: int) -> Mapping[str, Any]:
    """Replace a last width of -1 by ``width``: the number of classes, or of a patch's pixels."""
    dims = options.get("dims")
    if not dims or dims[-1] != -1:
        return options
    if width < 1:
        must = "must end in the number of classes: the images have no labels to count them by"
        fix = (
            "Put the images of each class in a folder of its own (a single folder is no class), or write the number in "
            "place of the last -1."
        )
        raise ConfigError([Problem("config.MODEL.HEAD.PARAMS", str(list(dims)), must, fix)])
    return {**options, "dims": [*dims[:-1], width]}


def _check_input_dim(name: str, options: Mapping[str, Any], feature_dim: int | None) -> None:
    if links := options.get("heads"):  # a chain: its first head sees the features, and is the one that was written
        name, options = links[0]
    dims = options.get("dims")
    if dims and feature_dim is not None and dims[0] not in (feature_dim, -1):
        must = f"dims of {name} must begin with the trunk's {feature_dim} features"
        fix = f"Write dims: {[feature_dim, *dims[1:]]}."
        raise ConfigError([Problem("config.MODEL.HEAD.PARAMS", str(list(dims)), must, fix)])
