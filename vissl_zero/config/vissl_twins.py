"""VISSL has a second name for what it shards: here each is an alias of the one class, which every level trains.

``regnet_fsdp`` is ``regnet``, ``swav_head_fsdp`` is ``swav_head``, ``mlp_fsdp`` is ``mlp``, ``sgd_fsdp`` is ``sgd``
(its LARC is ``use_larc``, as VISSL's recipes write it). The tasks ``self_supervision_sdp_task`` and
``self_supervision_fsdp_task`` are VISSL's way to say levels 2 and 3: see ``derive/level.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vissl_zero.config.run import RunConfig

TRUNKS = {"regnet_fsdp": "regnet"}
HEADS = {"swav_head_fsdp": "swav_head", "mlp_fsdp": "mlp"}
OPTIMIZERS = {"sgd_fsdp": "sgd"}
TASK_LEVELS = {"self_supervision_sdp_task": 2, "self_supervision_fsdp_task": 3}


def use_own_names(cfg: RunConfig) -> None:
    """Put the one name in the place of each alias, in place."""
    model, optimizer = cfg.MODEL, cfg.OPTIMIZER
    model.TRUNK.NAME = TRUNKS.get(model.TRUNK.NAME, model.TRUNK.NAME)
    model.HEAD.PARAMS = [_head(entry) for entry in model.HEAD.PARAMS]
    for block in (optimizer, optimizer.base_optimizer):
        block.name = OPTIMIZERS.get(block.name or "", block.name)


def _head(entry: Any) -> Any:
    """``[name, keys]`` under the one name; anything else is for a rule to refuse."""
    if isinstance(entry, list) and entry and isinstance(entry[0], str):
        return [HEADS.get(entry[0], entry[0]), *entry[1:]]
    return entry
