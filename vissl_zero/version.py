"""The version: of the package, and in what it writes."""

__version__ = "0.2.0"
