"""Maps between our weight names and those of VISSL, classy-vision, torchvision and timm.

The blocks are the same, so every tensor has the same shape and layout; only names differ. A vision transformer has
timm's names, which DINO, DINOv2 and MAE from torch hub have too, with units in between. torchvision and timm use the
same names for a ResNet. RegNet has other names only where its blocks are bottlenecks, the only ones those libraries
have.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

STYLES = ("torchvision", "timm")
# Wrappers that other frameworks leave in names, and prefixes.
_WRAPPERS = {"_fsdp_wrapped_module", "_fpw_module", "_orig_mod", "_checkpoint_wrapped_module"}
_PREFIXES = ("module.", "model.", "trunk.", "base_model.", "_feature_blocks.", "backbone.")
_STAT = r"(weight|bias|running_mean|running_var|num_batches_tracked)"

_Rules = tuple[tuple[str, str], ...]

# Patterns of names in other libraries -> ours, below ``trunk.``; "": a block, whose name ``_our_block`` builds.
_TO_OURS: _Rules = (
    # VISSL's and classy-vision's RegNet; VISSL's FSDP twin puts stretches called part<n> around the blocks.
    (rf"(?:conv1\.|stem\.)stem\.([013])\.{_STAT}", r"stem.\1.\2"),
    (r"(?:res\d+|trunk_output\.block\d+)\.(?:block\d+-part\d+\.)?block(?P<stage>\d+)-(?P<at>\d+)\.(?P<rest>.+)", ""),
    # torchvision's and VISSL's ResNet, and timm's.
    (r"conv1\.(weight|bias)", r"stem.0.\1"),
    (rf"bn1\.{_STAT}", r"stem.1.\1"),
    (r"layer(?P<stage>\d+)\.(?P<at>\d+)\.(?P<rest>.+)", ""),
    # timm's RegNet counts blocks from 1.
    (r"stem\.conv\.(weight|bias)", r"stem.0.\1"),
    (rf"stem\.bn\.{_STAT}", r"stem.1.\1"),
    (r"s(?P<stage>\d+)\.b(?P<at_from_1>\d+)\.(?P<rest>.+)", ""),
    (r"(stem\.\d\..+|stages\.\d+\.\d+\.0\..+)", r"\1"),
    # Vision transformers: timm's, torch hub's DINO, DINOv2 and MAE.
    (r"((?:embedding|norm|pooling|blocks\.\d+)\.unit\..+)", r"\1"),
    (r"(cls_token|reg_token|pos_embed|mask_token|patch_embed\..+|norm_pre\..+)", r"embedding.unit.\1"),
    (r"register_tokens", r"embedding.unit.reg_token"),
    (r"patch_masking\.masked_embed", r"embedding.unit.mask_token"),  # VISSL's iBOT
    (r"(blocks\.\d+)\.(.+)", r"\1.unit.\2"),
    (r"norm\.(weight|bias)", r"norm.unit.\1"),
    (r"((?:fc_norm|attn_pool)\..+)", r"pooling.unit.\1"),
)
# torchvision's vision transformer -> timm's names.
_TORCHVISION_TRANSFORMER: tuple[tuple[str, str], ...] = (
    ("class_token", "cls_token"),
    ("conv_proj.", "patch_embed.proj."),
    ("encoder.pos_embedding", "pos_embed"),
    ("encoder.ln.", "norm."),
)
_TORCHVISION_BLOCK: tuple[tuple[str, str], ...] = (
    ("ln_1.", "norm1."),
    ("ln_2.", "norm2."),
    ("self_attention.in_proj_", "attn.qkv."),
    ("self_attention.out_proj.", "attn.proj."),
    ("mlp.0.", "mlp.fc1."),
    ("mlp.3.", "mlp.fc2."),
    ("mlp.linear_1.", "mlp.fc1."),
    ("mlp.linear_2.", "mlp.fc2."),
)
_TRANSFORMER_PARTS = {"unit", "embedding", "pooling"}  # in our names, and not in timm's
# Inside a RegNet block: ours, torchvision's, timm's.
_REGNET_BLOCK = (
    ("proj", "proj.0", "downsample.conv"),
    ("bn", "proj.1", "downsample.bn"),
    ("f.a.0", "f.a.0", "conv1.conv"),
    ("f.a.1", "f.a.1", "conv1.bn"),
    ("f.b.0", "f.b.0", "conv2.conv"),
    ("f.b.1", "f.b.1", "conv2.bn"),
    ("f.se.excitation.0", "f.se.fc1", "se.fc1"),
    ("f.se.excitation.2", "f.se.fc2", "se.fc2"),
    ("f.c", "f.c.0", "conv3.conv"),
    ("f.final_bn", "f.c.1", "conv3.bn"),
)
_INNER_TO_OURS = {other: ours for ours, *others in _REGNET_BLOCK for other in others}
CLASSIFIER = "heads.0.clf.0"
_OUR_TRANSFORMER = re.compile(r"trunk\.(?:embedding|norm|pooling|blocks\.\d+)\.unit\.")
_TIMM_TRUNK = "trunk.net."
_OUR_BLOCK = re.compile(r"trunk\.stages\.(\d+)\.(\d+)\.0\.(.+)")


@dataclass
class Renamed:
    """A renaming of tensors.

    Attributes:
        names: new name -> old name.
        unknown: old names without a new name.
    """

    names: dict[str, str] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)


def to_our_names(names: Iterable[str], ours: Iterable[str] = ()) -> Renamed:
    """Translate names of another library to ours (``trunk.stem.0.weight``).

    Known are our names, VISSL's (``trunk._feature_blocks. ...``, with or without ``trunk.base_model.`` and FSDP's
    wrappers), classy-vision's, torchvision's and timm's. ``heads.`` is kept; ``fc.`` is the first head's layer.

    Args:
        names: names of the tensors in a file.
        ours: names in the model, from which the units of a ``timm/...`` trunk are known.
    """
    by_timm_name = {timm_name(name): name for name in ours if name.startswith(_TIMM_TRUNK)}
    result = Renamed()
    for name in names:
        our_name = by_timm_name.get(plain_name(name)) or _our_name(name)
        # Two tensors for one name: the first is kept, and the other is reported.
        if our_name is None or our_name in result.names:
            result.unknown.append(name)
        else:
            result.names[our_name] = name
    return result


def to_other_names(names: Iterable[str], style: str) -> Renamed:
    """Translate our trunk's names, and those of a one-layer classifier, to torchvision's or timm's.

    Args:
        names: ours.
        style: one of ``STYLES``.
    """
    ours = list(names)
    # Only RegNet's blocks have a module f; a ResNet has the same names otherwise.
    is_regnet = any(".f." in name for name in ours if name.startswith("trunk.stages."))
    has_bottlenecks = any(".f.c." in name for name in ours)
    classifier = _classifier_name(ours, style, is_regnet) if has_classifier(ours) else None
    result = Renamed()
    for name in ours:
        has_name = not (is_regnet and not has_bottlenecks) and (classifier or not name.startswith("heads."))
        other = _other_name(name, style, is_regnet, classifier) if has_name else None
        if other is None:
            result.unknown.append(name)
        else:
            result.names[other] = name
    return result


def has_classifier(names: Iterable[str]) -> bool:
    """Check for a classifier: the only head is one linear layer."""
    return {name.rpartition(".")[0] for name in names if name.startswith("heads.")} == {CLASSIFIER}


def without_base_layer(name: str) -> str:
    """Return the name of a frozen weight without peft's ``base_layer``."""
    return name.replace(".base_layer.", ".")


def is_adapters(name: str) -> bool:
    """Check whether a name, ours or peft's, is of a LoRA adapter's tensor."""
    return ".lora_A." in name or ".lora_B." in name


def adapter_name(name: str) -> str:
    """Return peft's name of an adapter's tensor, ``trunk.<layer>.lora_A.default.weight`` here."""
    return f"base_model.model.{timm_name(name).replace('.default.', '.')}"


def without_wrappers(name: str) -> str:
    """Remove the components of sharding and compilers from a parameter's name."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def plain_name(name: str) -> str:
    """Return a name without wrappers and prefixes; names of torchvision's transformers are converted to timm's."""
    plain = without_wrappers(name)
    # Prefixes nest, such as module.backbone.model.
    while (shorter := _without_prefix(plain)) != plain:
        plain = shorter
    if match := re.fullmatch(r"encoder\.layers\.encoder_layer_(\d+)\.(.+)", plain):
        return f"blocks.{match[1]}.{_replaced(match[2], _TORCHVISION_BLOCK)}"
    return _replaced(plain, _TORCHVISION_TRANSFORMER)


def _replaced(name: str, starts: Iterable[tuple[str, str]]) -> str:
    """Replace the prefix of ``name`` by the first pair (old, new) that matches."""
    return next((new + name.removeprefix(old) for old, new in starts if name.startswith(old)), name)


def timm_name(name: str) -> str:
    """Return timm's name of a parameter of our transformer or of a ``timm/...`` trunk."""
    plain = name.removeprefix(_TIMM_TRUNK) if name.startswith(_TIMM_TRUNK) else name.removeprefix("trunk.")
    return ".".join(part for part in plain.split(".") if part not in _TRANSFORMER_PARTS)


def _torchvision_transformer_name(name: str) -> str | None:
    timm = timm_name(name)
    if match := re.fullmatch(r"blocks\.(\d+)\.(.+)", timm):
        inner = _replaced(match[2], [(ours, theirs) for theirs, ours in _TORCHVISION_BLOCK[:6]])
        return f"encoder.layers.encoder_layer_{match[1]}.{inner}" if inner != match[2] else None
    other = _replaced(timm, [(ours, theirs) for theirs, ours in _TORCHVISION_TRANSFORMER])
    return other if other != timm else None


def _our_name(name: str) -> str | None:
    plain = plain_name(name)
    if plain.startswith("heads."):
        return plain
    if match := re.fullmatch(r"(?:head\.)?fc\.(weight|bias)", plain):
        return f"{CLASSIFIER}.{match[1]}"
    if match := re.fullmatch(r"(?:dino_)?head\.mlp\.(\d+\..+)", plain):  # of DINO's and DINOv2's training
        return f"heads.0.mlp.{match[1]}"
    if match := re.fullmatch(r"(?:dino_)?head\.last_layer\.(weight_[gv])", plain):
        return f"heads.0.prototypes0.{match[1]}"
    for pattern, replacement in _TO_OURS:
        if match := re.fullmatch(pattern, plain):
            inner = match.expand(replacement) if replacement else _our_block(match.groupdict())
            return f"trunk.{inner}"
    return None


def _without_prefix(name: str) -> str:
    return next((name.removeprefix(prefix) for prefix in _PREFIXES if name.startswith(prefix)), name)


def _our_block(sizes: dict[str, str]) -> str:
    at = int(sizes["at"]) if "at" in sizes else int(sizes["at_from_1"]) - 1
    layer, _, stat = sizes["rest"].rpartition(".")
    # A ResNet's ``conv1`` and ``bn1`` are in no RegNet; names of RegNet's that are ours already stay.
    return f"stages.{int(sizes['stage']) - 1}.{at}.0.{_INNER_TO_OURS.get(layer, layer)}.{stat}"


def _classifier_name(ours: Iterable[str], style: str, is_regnet: bool) -> str | None:
    """Return the other library's name of this trunk's classifier; None if our names do not determine it."""
    if is_regnet:
        return "head.fc" if style == "timm" else "fc"
    names = [name for name in ours if name.startswith("trunk.")]
    if any(map(_OUR_TRANSFORMER.match, names)):
        return "head" if style == "timm" else "heads.head"
    of_timm = {timm_name(name).partition(".")[0] for name in names if name.startswith(_TIMM_TRUNK)}
    if {"blocks", "patch_embed"} <= of_timm:
        return "head"
    return "fc" if not of_timm or "layer1" in of_timm else None


def _other_name(name: str, style: str, is_regnet: bool, classifier: str | None) -> str | None:
    if name.startswith(_TIMM_TRUNK):
        return timm_name(name) if style == "timm" else None
    if _OUR_TRANSFORMER.match(name):
        return timm_name(name) if style == "timm" else _torchvision_transformer_name(name)
    if name.startswith(f"{CLASSIFIER}."):
        return f"{classifier}.{name.removeprefix(f'{CLASSIFIER}.')}"
    if match := re.fullmatch(rf"trunk\.stem\.([01])\.{_STAT}", name):
        return _other_stem(match[1], match[2], style, is_regnet)
    match = _OUR_BLOCK.fullmatch(name)
    if not match:
        return None
    stage, at, rest = int(match[1]) + 1, int(match[2]), match[3]
    if not is_regnet:
        return f"layer{stage}.{at}.{rest}"
    layer, _, stat = rest.rpartition(".")
    inner = {ours: others for ours, *others in _REGNET_BLOCK}.get(layer)
    if inner is None:
        return None
    if style == "timm":
        return f"s{stage}.b{at + 1}.{inner[1]}.{stat}"
    return f"trunk_output.block{stage}.block{stage}-{at}.{inner[0]}.{stat}"


def _other_stem(layer: str, stat: str, style: str, is_regnet: bool) -> str:
    if not is_regnet:
        return f"{('conv1', 'bn1')[int(layer)]}.{stat}"
    return f"stem.{('conv', 'bn')[int(layer)]}.{stat}" if style == "timm" else f"stem.{layer}.{stat}"
