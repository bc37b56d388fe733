"""The version; everything may import it, and it imports nothing."""

__version__ = "0.1.0"
