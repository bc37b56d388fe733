"""Checks that all ranks are at the same point, and that parameters are used as sharding allows."""
