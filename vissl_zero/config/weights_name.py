"""Names of weights: a path, or a library's name for them (``timm:resnet18.a1_in1k``). Imports nothing."""

from __future__ import annotations

from pathlib import Path

_SCHEMES = {"hf", "timm", "torchvision", "torchhub"}


def scheme_of(name: str) -> str:
    """Return the library that a name of weights belongs to; empty for a path, which may begin with ``./``."""
    start, colon, rest = name.partition(":")
    return start if colon and rest and start in _SCHEMES else ""


def absolute(name: str) -> str:
    """Return a name that means the same in every folder: paths become absolute, also one after ``hf:``."""
    if not scheme_of(name):
        return str(Path(name).expanduser().absolute())
    folder = Path(name.removeprefix("hf:")).expanduser()
    return f"hf:{folder.absolute()}" if name.startswith("hf:") and folder.is_dir() else name
