"""Checkpoints: one format on disk for every ZeRO level, engine, number of ranks and offload tier.

To read one::

    from vissl_zero.checkpoint import open_checkpoint

    checkpoint = open_checkpoint("runs/my_run/checkpoints/step_000000100")
    checkpoint.manifest.step
    for name, info in checkpoint.tensors.items():  # "model/trunk.stem.0.weight", "optimizer/momentum_buffer/..."
        print(name, info.dtype, info.shape)
    weight = checkpoint.read("model/trunk.stem.0.weight")

The format: ``docs/checkpoints.md``. Reading runs no code from the files: JSON and safetensors only.
"""

from vissl_zero.checkpoint.folder import (
    Checkpoint,
    Manifest,
    TensorInfo,
    find_checkpoints,
    newest_checkpoint,
    open_checkpoint,
)

__all__ = ["Checkpoint", "Manifest", "TensorInfo", "find_checkpoints", "newest_checkpoint", "open_checkpoint"]
