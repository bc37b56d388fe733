"""Keys of the built-in components: dataclasses only, so that a recipe is checked without importing torch."""

from __future__ import annotations

from functools import cache

from vissl_zero.config.components.heads import (
    ChainConfig,
    EvalMLPConfig,
    IdentityHeadConfig,
    MLPConfig,
    MobileNetHeadConfig,
    PatchPredictorConfig,
    SiameseHeadConfig,
    VisionTransformerHeadConfig,
)
from vissl_zero.config.components.optimizers import (
    AdafactorConfig,
    AdamConfig,
    AdamW8bitConfig,
    AdamWConfig,
    LambConfig,
    LARSConfig,
    LionConfig,
    MuonConfig,
    NorMuonConfig,
    ScheduleFreeConfig,
    SGDConfig,
    ShampooConfig,
)
from vissl_zero.config.components.trunks import (
    BeitConfig,
    ConvitConfig,
    ConvNextConfig,
    EfficientNetConfig,
    MobileNetConfig,
    NoKeys,
    RegNetConfig,
    ResNetConfig,
    ResNetSkConfig,
    SwinConfig,
    TimmConfig,
    VisionTransformerConfig,
    XcitConfig,
)
from vissl_zero.registry import METHODS

# kind (the registry's own word) -> name -> keys
BUILTIN: dict[str, dict[str, type]] = {
    "trunk": {
        "regnet": RegNetConfig,
        "resnet": ResNetConfig,
        "vision_transformer": VisionTransformerConfig,
        "beit": BeitConfig,
        "xcit": XcitConfig,
        "resnet_sk": ResNetSkConfig,
        "efficientnet": EfficientNetConfig,
        "mobilenetv3_tv": MobileNetConfig,
        "mobilenetv3_timm": MobileNetConfig,
        "convnext": ConvNextConfig,
        "swin_transformer": SwinConfig,
        "convit": ConvitConfig,
        **{f"alexnet_{name}": NoKeys for name in ("bvlc", "colorization", "deepcluster", "jigsaw", "rotnet")},
        "timm": TimmConfig,
    },
    "head": {
        "mlp": MLPConfig,
        "eval_mlp": EvalMLPConfig,
        "chain": ChainConfig,
        "siamese_head": SiameseHeadConfig,
        "identity": IdentityHeadConfig,
        "mobilenet_v3_head": MobileNetHeadConfig,
        "mobilenet_v3_head_timm": MobileNetHeadConfig,
        "vision_transformer_head": VisionTransformerHeadConfig,
        "patch_predictor": PatchPredictorConfig,
    },
    "base optimizer": {
        "sgd": SGDConfig,
        "adam": AdamConfig,
        "adamw": AdamWConfig,
        "lion": LionConfig,
        "adamw_schedule_free": ScheduleFreeConfig,
        "lars": LARSConfig,
        "muon": MuonConfig,
        "lamb": LambConfig,
        "adafactor": AdafactorConfig,
        "normuon": NorMuonConfig,
        "shampoo": ShampooConfig,
        "adamw_8bit": AdamW8bitConfig,
    },
}
_TABLES = {"loss": "losses", "head": "heads"}  # of a MethodSpec


@cache
def builtin_keys(kind: str) -> dict[str, type]:
    """Keys of the built-in components of a kind by name, losses and heads of the methods among them."""
    keys = dict(BUILTIN.get(kind, {}))
    if kind in ("loss", "head"):
        specs = [METHODS.get(method).build() for method in METHODS.builtin()]
        keys |= {name: schema for spec in specs for name, schema in getattr(spec, _TABLES[kind]).items()}
    return keys
