"""Rules of offload tiers, for recipes and ``initialize``, and limits of the engines under ``initialize``."""

from __future__ import annotations

import math

from vissl_zero.config.blocks.sharding import OffloadOptimizer, OffloadParam
from vissl_zero.errors import Problem, did_you_mean
from vissl_zero.resolve.resolved import TIERS, OffloadPlan

DEVICES = tuple(TIERS)


def offload_plans(optimizer: OffloadOptimizer, params: OffloadParam) -> tuple[OffloadPlan, OffloadPlan]:
    """Return the plans of two blocks that have passed ``offload_problems``."""
    return (
        OffloadPlan(
            device=optimizer.device,
            nvme_path=optimizer.nvme_path,
            # Not set means on: only page-locked memory is copied while the GPU computes.
            pin_memory=optimizer.pin_memory is not False,
            fast_init=optimizer.fast_init,
            keep_files=optimizer.keep_files,
        ),
        OffloadPlan(
            device=params.device,
            nvme_path=params.nvme_path,
            pin_memory=params.pin_memory is not False,
            fast_init=params.fast_init is True,
            max_in_cpu=max_in_cpu(params),
        ),
    )


def max_in_cpu(params: OffloadParam) -> int | None:
    """Return ``max_in_cpu``, also if its number is written under ``fast_init``."""
    # ColossalAI's documentation prints the number under fast_init, and recipes copy it.
    if params.max_in_cpu is not None:
        # YAML reads 1e9 as a float.
        return int(params.max_in_cpu)
    return None if isinstance(params.fast_init, bool) else int(params.fast_init)


def offload_problems(optimizer: OffloadOptimizer, params: OffloadParam, level: int, root: str) -> list[Problem]:
    """Return a problem for each setting of the two offload blocks that is not supported.

    Args:
        optimizer, params: the two blocks.
        level: ZeRO level.
        root: key path of the parent of both blocks, such as ``config.ZERO``.
    """
    problems: list[Problem] = []
    for name, block in (("offload_optimizer_config", optimizer), ("offload_param_config", params)):
        key = f"{root}.{name}"
        if block.device not in DEVICES:
            fix = did_you_mean(block.device, DEVICES).strip() or "Choose one of them."
            problems.append(Problem(f"{key}.device", repr(block.device), "must be none, cpu or nvme", fix))
        if TIERS.get(block.device) == "disk" and not block.nvme_path:
            problems.append(
                Problem(f"{key}.nvme_path", "", "must be given with nvme", "Name a folder on a local disk.")
            )
    if optimizer.device in DEVICES[1:] and level == 0:
        must = "needs ZeRO level 1, 2 or 3: at level 0 nothing is sharded, and every rank would move the whole state"
        problems.append(
            Problem(f"{root}.offload_optimizer_config.device", repr(optimizer.device), must, "Raise the level.")
        )
    problems += _param_problems(params, level, f"{root}.offload_param_config")
    return problems


def _param_problems(params: OffloadParam, level: int, key: str) -> list[Problem]:
    problems = []
    if params.device in DEVICES[1:] and level != 3:
        must = f"needs ZeRO level 3: at level {level} parameters are whole in memory throughout a step"
        problems.append(Problem(f"{key}.device", repr(params.device), must, "Use level 3, or device: none."))
    if params.max_in_cpu is not None and not isinstance(params.fast_init, bool):
        fix = "Write the number under max_in_cpu, and true or false under fast_init."
        problems.append(
            Problem(f"{key}.fast_init", str(params.fast_init), "is a number, and max_in_cpu is given too", fix)
        )
    written = (
        params.fast_init if params.max_in_cpu is None and not isinstance(params.fast_init, bool) else params.max_in_cpu
    )
    if written is not None and not math.isfinite(written):
        must = "must be a number of elements"
        problems.append(
            Problem(
                f"{key}.max_in_cpu", str(written), must, "Write 1e9, for example, or device: cpu to keep all there."
            )
        )
    elif written is not None and written < 0:
        problems.append(
            Problem(f"{key}.max_in_cpu", f"{written:g}", "must be at least 0", "Write 0 to keep none there.")
        )
    return problems


def offload_notes(optimizer: OffloadOptimizer, params: OffloadParam, has_gpu: bool, root: str) -> tuple[str, ...]:
    """Return notes on keys without effect, and on keys that are read as another key.

    Args:
        optimizer, params, root: as for ``offload_problems``.
        has_gpu: training runs on a GPU.
    """
    notes = []
    defaults = OffloadOptimizer(), OffloadParam()
    blocks: dict[str, OffloadOptimizer | OffloadParam]
    blocks = {"offload_optimizer_config": optimizer, "offload_param_config": params}
    for (name, block), default in zip(blocks.items(), defaults, strict=True):
        key = f"{root}.{name}"
        if block.device == "none":
            if block != default:
                notes.append(f"{key} has no effect: its device is none.")
            continue
        if not isinstance(block.fast_init, bool):
            notes.append(f"{key}.fast_init={block.fast_init:g} is a number and is read as max_in_cpu.")
        if block.pin_memory and not has_gpu:
            notes.append(f"{key}.pin_memory has no effect without an accelerator.")
        elif block.pin_memory and TIERS[block.device] == "disk" and isinstance(block, OffloadParam):
            notes.append(f"{key}.pin_memory has no effect with device: {block.device}.")
        elif block.pin_memory and isinstance(block, OffloadOptimizer) and params.device != "none":
            notes.append(
                f"{key}.pin_memory has no effect: what the update needs is stored with the parameters already."
            )
        if block.device == "cpu":
            if not has_gpu:
                notes.append(f"{key}.device=cpu: training runs on the CPU, where this state is in any case.")
            notes += [f"{key}.{name} has no effect with device: cpu." for name in _nvme_keys(block)]
    return tuple(notes)


def _nvme_keys(block: OffloadOptimizer | OffloadParam) -> list[str]:
    """Return the keys of ``block`` that are set and have an effect with nvme only."""
    keys = ["fast_init"] if block.fast_init is True else []
    keys += ["nvme_path"] if block.nvme_path else []
    return keys + (["max_in_cpu"] if isinstance(block, OffloadParam) and max_in_cpu(block) is not None else [])


_ENGINES = ("torch", "fairscale")
_ENGINE_KEY = "zero.engine"


def engine_of(name: str) -> str:
    """Return the name of the engine: torch for ``auto``."""
    return "torch" if name == "auto" else name


def engine_problems(
    name: str, level: int, *, is_half: bool, is_offloaded: bool, shard_group_size: int, is_float8: bool
) -> list[Problem]:
    """Return a problem for each setting of ``initialize`` that the engine does not support.

    Args:
        name: engine as the user wrote it.
        level: ZeRO level.
        is_half: half precision is requested, or implied by ``type=``.
        is_offloaded: optimizer state or parameters are offloaded.
        shard_group_size: ranks per copy of the state; -1: all ranks.
        is_float8: linear layers multiply in float8.
    """
    if engine_of(name) not in _ENGINES:
        fix = did_you_mean(name, _ENGINES).strip() or "Leave it out."
        return [Problem(_ENGINE_KEY, repr(name), "must be torch or fairscale", fix)]
    if name != "fairscale":
        return []
    cannot = {
        "at levels 0 and 3, which fairscale does not have in custom loops": level not in (1, 2),
        "with half precision, since fairscale keeps one copy of the parameters (fp16=False)": is_half,
        "with offload, which fairscale does not have": is_offloaded,
        "with float8, whose parity has not been shown on fairscale": is_float8,
        "with shard_group_size, since fairscale shares one copy among all ranks": shard_group_size != -1,
    }
    fix = "Leave it out, or the other."
    return [Problem(_ENGINE_KEY, repr(name), f"must be torch {words}", fix) for words, holds in cannot.items() if holds]
