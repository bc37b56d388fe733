"""fairscale's OSS, ShardedDataParallel and FullyShardedDataParallel as an engine."""
