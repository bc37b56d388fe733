"""Names of weights: a path, or a name in a library (``timm:resnet18.a1_in1k``). Imports no torch."""

from __future__ import annotations

from pathlib import Path

_SCHEMES = {"hf", "timm", "torchvision", "torchhub"}


def scheme_of(name: str) -> str:
    """Return the library of a name of weights; empty for a path."""
    # A path that looks like ``timm:x`` can be written as ``./timm:x``.
    start, colon, rest = name.partition(":")
    return start if colon and rest and start in _SCHEMES else ""


def absolute(name: str) -> str:
    """Return the name with an absolute path, so that it is valid in every working directory; also after ``hf:``."""
    if not scheme_of(name):
        return str(Path(name).expanduser().absolute())
    folder = Path(name.removeprefix("hf:")).expanduser()
    return f"hf:{folder.absolute()}" if name.startswith("hf:") and folder.is_dir() else name
