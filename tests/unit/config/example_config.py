"""A valid configuration to change one thing in, without Hydra."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import cache
from typing import Any

from vissl_zero.config.compose import load
from vissl_zero.config.run_config import RunConfig
from vissl_zero.resolve.decisions import Decisions
from vissl_zero.resolve.host import Host
from vissl_zero.resolve.resolve import problems

CPU_HOST = Host(num_gpus=0, why_no_gpu="no NVIDIA driver is loaded", num_cores=8)
GPU_HOST = Host(num_gpus=2, why_no_gpu="", num_cores=8)


@cache
def _quickstart() -> RunConfig:
    return load("quickstart/swav_digits")


def config(**values: Any) -> RunConfig:
    """The quickstart recipe with values at key paths, written with ``__`` for dots."""
    return changed(_quickstart(), {path.replace("__", "."): value for path, value in values.items()})


def changed(cfg: RunConfig, values: Mapping[str, Any]) -> RunConfig:
    """A copy with values at key paths. Composing a recipe anew takes five times as long."""
    cfg = copy.deepcopy(cfg)
    for path, value in values.items():
        node: Any = cfg
        *parents, last = path.split(".")
        for part in parents:
            node = node[part] if isinstance(node, dict) else getattr(node, part)
        if isinstance(node, dict):
            node[last] = value
        else:
            assert hasattr(node, last), path
            setattr(node, last, value)
    return cfg


def complaints(host: Host = CPU_HOST, **values: Any) -> list[str]:
    """What the rules say about the quickstart recipe with these values."""
    return [str(problem) for problem in problems(Decisions(config(**values), host))]
