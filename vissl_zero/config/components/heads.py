"""Keys of the built-in heads, written as ``MODEL.HEAD.PARAMS: [["name", {key: value}]]``."""

from __future__ import annotations

from dataclasses import dataclass

from omegaconf import MISSING


@dataclass
class SwAVHeadConfig:
    """``swav_head``: projection MLP, then one linear layer of prototypes per entry of ``num_clusters``."""

    dims: list[int] = MISSING
    """Widths of the projection MLP, from the trunk's features to the embedding."""
    num_clusters: list[int] = MISSING
    """Number of prototypes of each prototype layer."""
    use_bn: bool = False
    """Batch norm between the layers of the MLP."""
    use_bias: bool = True
    """Bias in the layers of the MLP (prototypes have none)."""
    skip_last_bn: bool = True
    """No batch norm or activation after the last layer of the MLP."""
    normalize_feats: bool = True
    """Divide embeddings by their L2 norm before they are scored."""
    activation_name: str = "ReLU"
    """Activation between the layers: ReLU, GELU or SiLU."""


@dataclass
class MLPConfig:
    """``mlp``: linear layers."""

    dims: list[int] = MISSING
    """Widths, from the trunk's features to the outputs."""
    use_bn: bool = False
    """Batch norm after each layer."""
    use_relu: bool = False
    """ReLU after each layer."""
    use_dropout: bool = False
    """Dropout after each layer."""
    dropout_rate: float = 0.5
    """Share of activations dropped where ``use_dropout``."""
    use_bias: bool = True
    """Bias in each layer."""
    skip_last_layer_relu_bn: bool = True
    """Nothing after the last layer."""
