"""Rules that no run shows broken: what is decided stays as it is, and no list is cut to another's length."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "vissl_zero"
# What changes after it was made. A class of keys is filled by Hydra, field by field.
CHANGING = {
    "checkpoint/first_weights.py": ["Match"],
    "checkpoint/foreign_layouts.py": ["Foreign"],
    "checkpoint/foreign_state.py": ["LossState"],
    "checkpoint/resume.py": ["Found"],
    "checkpoint/saver.py": ["_Save"],
    "commands/explain.py": ["Account"],
    "data/batch_memory.py": ["_Block"],
    "data/sources/segmentation.py": ["SegmentationFolderConfig"],
    "engine/hook.py": ["Run"],
    "engine/module_watch.py": ["Seen", "ModuleWatch"],
    "integration/ema.py": ["Ema"],
    "integration/settings.py": ["_Keys", "_AllKeys"],
    "integration/user_optimizer.py": ["_SGDOptions", "_LARCOptions", "_LARSOptions"],
    "integration/verification.py": ["_Trace"],
    "launch/slurm.py": ["SlurmTask"],
    "launch/sweep.py": ["LocalLauncherConfig", "_Job"],
    "methods/dino.py": ["TeacherTemperature"],
    "models/trunks/timm_trunk.py": ["_Call"],
    "models/weight_names.py": ["Renamed"],
    "planner/candidates.py": ["_Part"],
    "planner/forecast.py": ["Subject"],
    "planner/memory_model.py": ["_Step"],
    "planner/step_trace.py": ["StepTrace"],
    "sharding/engines/fairscale/flat_sharded.py": ["FlatShard"],
    "sharding/engines/fairscale/strategy.py": ["OwnedShard"],
    "sharding/model/precision.py": ["LossScale"],
    "sharding/offload/parameter_store.py": ["DiskShard", "HostShard"],
    "sharding/offload/state_place.py": ["UpdatePiece"],
    "sharding/state/shard.py": ["Shard", "RowShard"],
}
# Files with lists that may differ in length, and how many zips they have of them.
UNEVEN = {
    "config/reference.py": 1,
    "data/sources/library_sets.py": 1,
    "integration/sharded_optimizer.py": 1,
    "models/trunks/timm_trunk.py": 2,
    "optim/update_rule.py": 2,
    "reporting/panels.py": 1,
    "reporting/replay_lines.py": 1,
    "sharding/model/wrap_plan.py": 1,
    "sharding/offload/block_file.py": 1,
    "sharding/sharded_model.py": 1,
    "vissl/methods.py": 1,
}


@cache
def _nodes() -> list[tuple[str, ast.Call | ast.ClassDef]]:
    """Every call and class of the package, with its file."""
    return [
        (str(path.relative_to(PACKAGE)), node)
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call | ast.ClassDef)
    ]


def _keyword(call: ast.AST, name: str) -> bool | None:
    values = [k.value for k in getattr(call, "keywords", ()) if k.arg == name]
    return values[0].value if values and isinstance(values[0], ast.Constant) else None  # type: ignore[return-value]


def test_dataclasses_are_frozen() -> None:
    changing: dict[str, list[str]] = {}
    for file, node in _nodes():
        if isinstance(node, ast.ClassDef) and not file.startswith("config/") and not file.endswith("_keys.py"):
            decorators = [one for one in node.decorator_list if "dataclass" in ast.unparse(one)]
            if decorators and not _keyword(decorators[0], "frozen"):
                changing.setdefault(file, []).append(node.name)
    assert changing == CHANGING


def test_zip_refuses_lists_of_different_lengths() -> None:
    uneven: dict[str, int] = {}
    for file, node in _nodes():
        is_zip = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "zip"
        if is_zip and not _keyword(node, "strict"):
            uneven[file] = uneven.get(file, 0) + 1
    assert uneven == UNEVEN
