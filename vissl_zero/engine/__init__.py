"""The training loop and its hook interface: small, with no case for any sharding level."""
