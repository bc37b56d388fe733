"""DeepSpeed's ZeRO, as ``step_cost.py`` compares it where it is installed; never a dependency.

    apt-get install g++ libaio-dev
    DS_BUILD_OPS=0 pip install -e .[deepspeed]                     # into an environment beside the project's own
    export DS_ACCELERATOR=cpu PATH=<environment>/bin:$PATH         # it calls ninja
    python benchmarks/step_cost_deepspeed.py                       # once: build what it would build in the first run

Its operators are compiled when first used, minutes each. A build that is killed leaves a file ``lock`` in its folder of
TORCH_EXTENSIONS_DIR, and every later one waits for that for ever: remove it.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from pathlib import Path
from typing import Any, ClassVar

import deepspeed
import torch
from step_cost_systems import OPTIMIZERS, SYSTEMS, System, storage_bytes
from torch import Tensor, nn

BUCKET_ELEMENTS = 6_553_600  # 25 MiB, DDP's; the default of 5e8 allocates 2 GB at once
# Ours has one update of a few MiB at a time; DeepSpeed's unit is a sub-group, by default all parameters of a rank.
SUB_GROUP_ELEMENTS = 2_400_000


class DeepSpeed(System):
    """deepspeed.initialize over the process group there is; defaults but for the bucket's size and clipping."""

    level = 1
    offload: ClassVar[dict[str, Any]] = {}
    further: ClassVar[dict[str, Any]] = {}
    is_muon: ClassVar[bool] = False

    def build(self, model: nn.Module, optimizer: str) -> None:
        """See ``System``."""
        # Of use to inference only.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        sharding = {"stage": self.level, "reduce_bucket_size": BUCKET_ELEMENTS, **self.further}
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": 0.0,  # else 1.0
            "zero_allow_untested_optimizer": True,
            "zero_optimization": sharding,
        }
        given = None
        if self.is_muon:
            # Its own; a scatter of gradients is refused with it at ZeRO-3.
            for param in model.parameters():
                param.use_muon = param.dim() == 2  # type: ignore[attr-defined]
            sharding["reduce_scatter"] = False
            config["optimizer"] = {"type": "Muon", "params": {"lr": 1e-4}}
        elif self.offload:
            assert optimizer == "adamw"
            folder = Path(os.environ["NVME"]) / "deepspeed"
            sharding["offload_optimizer"] = {"nvme_path": str(folder), **self.offload}
            # Its own for the CPU.
            config["optimizer"] = {
                "type": "AdamW",
                "params": {"lr": 1e-4, "weight_decay": 1e-2},
            }
        else:
            kind, options = OPTIMIZERS[optimizer]
            given = kind(model.parameters(), **options)
        self.model, self.optimizer, *_ = deepspeed.initialize(
            model=model, optimizer=given, config=config, dist_init_required=False
        )

    def backward(self, loss: Tensor) -> None:
        """See ``System``."""
        self.model.backward(loss)  # type: ignore[operator]

    def update(self) -> None:
        """See ``System``."""
        self.model.step()  # type: ignore[operator]

    def state_bytes(self) -> int:
        """All tensors there are: its gradients are nowhere else to be had. Buffers are among them."""
        return storage_bytes(found for found in gc.get_objects() if type(found) in (Tensor, nn.Parameter))


def _system(
    level: int, further: dict[str, Any] | None = None, *, is_muon: bool = False, **offload: Any
) -> type[DeepSpeed]:
    values = {"level": level, "offload": offload, "further": further or {}, "is_muon": is_muon}
    return type(f"DeepSpeed{level}", (DeepSpeed,), values)


SYSTEMS |= {
    **{f"DeepSpeed ZeRO-{level}": _system(level) for level in (1, 2, 3)},
    **{f"DeepSpeed ZeRO-{level}, Muon": _system(level, is_muon=True) for level in (1, 2, 3)},
    "DeepSpeed ZeRO-3, optimizer on CPU": _system(3, device="cpu", pin_memory=True),
    "DeepSpeed ZeRO-3, optimizer on NVMe": _system(3, device="nvme", pin_memory=True),
    "DeepSpeed ZeRO-3, optimizer on NVMe, pipelined": _system(
        3,
        {"sub_group_size": SUB_GROUP_ELEMENTS},
        device="nvme",
        pin_memory=True,
        buffer_count=16,
        pipeline_read=True,
        pipeline_write=True,
    ),
}


def main() -> None:
    """Build the operators."""
    from deepspeed.ops.op_builder import AsyncIOBuilder, CPUAdamBuilder

    for builder in CPUAdamBuilder, AsyncIOBuilder:
        start = time.perf_counter()
        builder().load()
        print(f"{builder.NAME}: {time.perf_counter() - start:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
