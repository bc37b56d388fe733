"""Keys of the built-in components: dataclasses only, so that a recipe is checked without importing torch."""

from __future__ import annotations

from vissl_zero.config.components.heads import MLPConfig, SwAVHeadConfig
from vissl_zero.config.components.losses import CrossEntropyConfig, SwAVLossConfig
from vissl_zero.config.components.optimizers import AdamConfig, AdamWConfig, LARSConfig, SGDConfig
from vissl_zero.config.components.trunks import RegNetConfig, ResNetConfig

# kind (the registry's own word) -> name -> keys
BUILTIN: dict[str, dict[str, type]] = {
    "trunk": {"regnet": RegNetConfig, "resnet": ResNetConfig},
    "head": {"swav_head": SwAVHeadConfig, "mlp": MLPConfig},
    "loss": {
        "swav_loss": SwAVLossConfig,
        "CrossEntropyLoss": CrossEntropyConfig,
        "cross_entropy_multiple_output_single_target": CrossEntropyConfig,
    },
    "base optimizer": {"sgd": SGDConfig, "adam": AdamConfig, "adamw": AdamWConfig, "lars": LARSConfig},
}
