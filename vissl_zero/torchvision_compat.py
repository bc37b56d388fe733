"""Make ``import torchvision`` work with a CPU build of torch; import this first, for its effect.

torchvision's wheel declares its C++ operators for CUDA builds. With a CPU torch its import fails with "operator
torchvision::nms does not exist", though nothing here uses detection operators. Declaring the two schemas that its
Python code registers fake kernels for is enough; a torchvision that imports by itself is left alone.
"""

from __future__ import annotations

import sys

import torch

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)

# Kept alive for the life of the process: the schemas go when the library object does.
_library: torch.library.Library | None = None


def _forget_half_imported() -> None:
    for name in [name for name in sys.modules if name == "torchvision" or name.startswith("torchvision.")]:
        del sys.modules[name]


try:
    import torchvision
except RuntimeError as error:
    if "torchvision::nms" not in str(error):
        raise
    _forget_half_imported()
    _library = torch.library.Library("torchvision", "FRAGMENT")
    for _schema in _SCHEMAS:
        _library.define(_schema)
    import torchvision  # noqa: F401
