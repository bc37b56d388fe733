"""Trunks, heads, taps, keyed randomness and initialization."""
