"""Checkpoints in VISSL's layouts, as vissl/utils/checkpoint.py and fairscale write them."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


def vissl_names(model: nn.Module, is_fsdp: bool = False) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """State of trunk and heads under VISSL's names: ``_feature_blocks.res2.block1-0...`` and ``0.clf.0.weight``."""
    trunk, heads = {}, {}
    for name, tensor in model.state_dict().items():
        if name.startswith("heads."):
            heads[name.removeprefix("heads.")] = tensor
            continue
        inner = name.removeprefix("trunk.")
        if match := re.fullmatch(r"stages\.(\d+)\.(\d+)\.0\.(.+)", inner):
            stage, at = int(match[1]) + 1, match[2]
            part = f"block{stage}-part0." if is_fsdp else ""
            inner = f"res{stage + 1}.{part}block{stage}-{at}.{match[3]}"
        else:
            inner = f"conv1.stem.{inner.removeprefix('stem.')}"
        trunk[f"_feature_blocks.{inner}"] = tensor
    return trunk, heads


def consolidated(model: nn.Module) -> dict[str, Any]:
    """What ``save_consolidated_checkpoint`` is given, with all that a run of VISSL leaves in it."""
    trunk, heads = vissl_names(model)
    meter = {"name": "accuracy_list_meter", "top_1": {0: np.float64(41.5)}, "counts": np.arange(3), "t": torch.ones(2)}
    classy = {
        "train": True,
        "base_model": {"model": {"trunk": trunk, "heads": heads}, "meta": {"trunk": {}, "heads": []}},
        "meters": [meter],
        "optimizer": {"optim": {"state": {0: {"momentum_buffer": torch.zeros(3)}}, "param_groups": [{"lr": 0.3}]}},
        "phase_idx": 5,
        "train_phase_idx": 5,
        "losses": [0.5, np.float32(0.25)],
        "hooks": {"LogGpuStatsHook": {}},
        "loss": {},
    }
    numbers = {"phase_idx": 5, "iteration": 420, "iteration_num": 69, "train_phase_idx": 5}
    return {**numbers, "loss": {"queue": torch.zeros(2, 4)}, "classy_state_dict": classy, "type": "consolidated"}


def optimizer_groups(model: nn.Module, regularize_bias: bool, regularize_bn: bool) -> list[dict[str, Any]]:
    """As vissl/optimizers/param_groups/default.py sorts parameters: four groups, and a fifth for what is left."""
    groups: list[list[nn.Parameter]] = [[], [], [], [], []]
    for name, module in model.named_modules():
        first = 2 if "head" in name else 0
        is_norm = isinstance(module, (nn.modules.batchnorm._BatchNorm, nn.LayerNorm))
        if isinstance(module, (nn.Linear, nn.Conv2d)) or is_norm:
            if module.weight is not None:
                groups[first + (is_norm and not regularize_bn)].append(module.weight)
            if module.bias is not None:
                groups[first + (not regularize_bias or (is_norm and not regularize_bn))].append(module.bias)
        else:
            groups[4] += module.parameters(recurse=False)
    return [{"params": group} for group in (groups if groups[4] else groups[:4])]


def trained(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state of an optimizer after two steps with gradients of its own for every parameter."""
    generator = torch.Generator().manual_seed(3)
    for _ in range(2):
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.grad = torch.randn(param.shape, generator=generator)
        optimizer.step()
    return {"optim": optimizer.state_dict()}


def save_sharded(model: nn.Module, path: Path, world_size: int, flatten: bool) -> None:
    """A ``shard_list`` and its shards, one FSDP unit for the stem and one for each block, as fairscale cuts them."""
    trunk, heads = vissl_names(model, is_fsdp=True)
    states_of_trunk, metas_of_trunk = _fsdp(trunk, world_size, flatten, _unit_of_trunk)
    head = {name.removeprefix("0."): tensor for name, tensor in heads.items()}
    states_of_head, metas_of_head = _fsdp(head, world_size, flatten, lambda name: "")
    names = [f"{path.stem}_shard{rank}.torch" for rank in range(world_size)]
    for rank, name in enumerate(names):
        state = {"trunk": states_of_trunk[rank], "heads": [states_of_head[rank]]}
        meta = {"trunk": metas_of_trunk[rank], "heads": [metas_of_head[rank]]}
        content = {**consolidated(model), "type": "shard"}
        content["classy_state_dict"] = {"base_model": {"model": state, "meta": meta}, "train_phase_idx": 5}
        torch.save(content, path.with_name(name))
    torch.save({"type": "shard_list", "shards": names}, path)


def save_sliced(model: nn.Module, path: Path) -> Path:
    """A ``slice_list`` and its slices; gives their folder."""
    return slices(*vissl_names(model), path)


def slices(trunk: dict[str, Tensor], heads: dict[str, Tensor], path: Path) -> Path:
    """As ``save_sliced``, of tensors under VISSL's names."""
    folder = path.with_name(f"{path.stem}_layers")
    folder.mkdir()

    def save(name: str, tensor: Tensor) -> str:
        file = folder / f"{hashlib.sha1(name.encode()).hexdigest()}.torch"
        torch.save({"type": "slice", "weight": tensor.clone()}, file)
        return f"/checkpoint/of/another/machine/{folder.name}/{file.name}"

    saved = {part: {n: save(n, t) for n, t in state.items()} for part, state in (("trunk", trunk), ("heads", heads))}
    torch.save({"type": "slice_list", "classy_state_dict": {"base_model": {"model": saved}}}, path)
    return folder


def _unit_of_trunk(name: str) -> str:
    match = re.match(r"_feature_blocks\.(?:res\d+\.block\d+-part\d+\.block\d+-\d+|conv1)", name)
    assert match, name
    return match[0]


def _fsdp(state: dict[str, Tensor], world_size: int, flatten: bool, unit_of: Any) -> tuple[list[Any], list[Any]]:
    """``local_state_dict`` and ``local_metadata_dict`` of every rank."""
    is_buffer = re.compile(r"running_mean|running_var|num_batches_tracked").search
    units: dict[str, list[str]] = {}
    for name in state:
        if not is_buffer(name):
            units.setdefault(unit_of(name), []).append(name)
    buffers = {name: tensor for name, tensor in state.items() if is_buffer(name)}
    states: list[dict[str, Tensor]] = [dict(buffers) for _ in range(world_size)]
    metas: list[Any] = [{"param_metadata": [], "buffer_names": list(buffers)} for _ in range(world_size)]
    for path, names in units.items():
        inner = [name.removeprefix(f"{path}.") if path else name for name in names]
        groups = [("flat_param_0", list(zip(inner, names, strict=True)))] if flatten else []
        groups = groups or [(short, [(short, name)]) for short, name in zip(inner, names, strict=True)]
        params: list[dict[str, Any]] = [{} for _ in range(world_size)]
        for key, members in groups:
            whole = torch.cat([state[name].reshape(-1) for _, name in members])
            size = -(-whole.numel() // world_size)
            for rank in range(world_size):
                part = whole[rank * size : (rank + 1) * size]
                padding = size - part.numel()
                full_key = f"{path}.{key}" if path else key
                states[rank][full_key] = torch.cat([part, torch.full((padding,), 9.0)])
                params[rank][key] = {
                    "names": [short for short, _ in members],
                    "shapes": [state[name].shape for _, name in members],
                    "numels": [state[name].numel() for _, name in members],
                    "padding": padding,
                }
        for rank in range(world_size):
            unit = {"fsdp_path": path, "params": params[rank], "no_broadcast_optim_state": False}
            metas[rank]["param_metadata"].append({**unit, "shared_param_info": []})
    return states, metas
