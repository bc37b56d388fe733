"""The training loop and its hook interface. No code here depends on the sharding level."""
