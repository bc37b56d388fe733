"""torch's ``fully_shard`` as level 3, and hooks on gradients as levels 0 to 2."""
