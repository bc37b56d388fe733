"""Makes ``import torchvision`` work beside a CPU build of torch, once ``vissl_zero`` is imported.

torchvision's wheel on PyPI brings C++ operators for CUDA builds. With a CPU torch they do not load, and the import
fails with "operator torchvision::nms does not exist", though nothing here uses detection operators. Declaring the two
schemas that its Python code registers fake kernels for is enough. A torchvision whose operators load is left alone.

Imports no torch: ``vissl_zero/__init__.py`` installs the finder, which acts when torchvision is imported.
"""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
# torchvision imports this module right after it has tried to load its operators.
_NEEDS_OPERATORS = "torchvision._meta_registrations"

# Kept alive for the life of the process: the schemas go when the library object does.
_library: Any = None


class _OperatorFinder(MetaPathFinder):
    """Finds nothing. Declares the missing operators at the moment when torchvision needs them."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname == _NEEDS_OPERATORS:
            _declare_missing()
        return None


def install() -> None:
    """Watch for the import of torchvision. Installing twice changes nothing."""
    if not any(isinstance(finder, _OperatorFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _OperatorFinder())


def is_repaired() -> bool:
    """Check whether torchvision was imported and its operators did not load."""
    return _library is not None


def _declare_missing() -> None:
    global _library
    import torch

    if _library is None and not hasattr(torch.ops.torchvision, "nms"):
        _library = torch.library.Library("torchvision", "FRAGMENT")
        for schema in _SCHEMAS:
            _library.define(schema)
