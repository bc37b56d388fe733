"""The optimizer step on a rank's shards: norms, clipping, whole-tensor rules."""
