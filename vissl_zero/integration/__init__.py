"""``vissl_zero.initialize``: the same sharding under a user's own loop."""
