"""A process counts GPUs without loading their driver."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

# A driver of three GPUs, and one that fails. The real one needs a GPU.
_DRIVER = "int cuInit(unsigned flags) { return %d; } int cuDeviceGetCount(int *count) { *count = 3; return 0; }"
_COUNT = """
import vissl_zero.resolve.host as host
host._torch_has_cuda = lambda: True  # the installed torch may be the CPU's
print(host.this_host().num_gpus, "libcuda" in open("/proc/self/maps").read(), host.this_host().why_no_gpu)
"""


def _counted(folder: Path, result_of_init: int) -> str:
    (folder / "driver.c").write_text(_DRIVER % result_of_init)
    command = ["gcc", "-shared", "-fPIC", str(folder / "driver.c"), "-o", str(folder / "libcuda.so.1")]
    subprocess.run(command, check=True)
    environment = {**os.environ, "LD_LIBRARY_PATH": str(folder)}
    return subprocess.run(
        [sys.executable, "-c", _COUNT], env=environment, capture_output=True, text=True, check=True
    ).stdout.strip()


def test_a_process_counts_gpus_without_loading_their_driver(tmp_path: Path) -> None:
    # CUDA refuses the processes that are forked from one that has called cuInit.
    assert _counted(tmp_path, 0) == "3 False"


def test_an_error_of_the_driver_is_a_reason(tmp_path: Path) -> None:
    assert _counted(tmp_path, 100) == "0 False the NVIDIA driver reports an error"


def test_whether_torch_has_cuda_is_read_without_importing_it() -> None:
    code = (
        "import sys; from vissl_zero.resolve.host import _torch_has_cuda as has; print(has(), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(torch.version.cuda is not None), "False"]
