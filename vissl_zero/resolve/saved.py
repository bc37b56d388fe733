"""``config.resolved.yaml``: the plan of a run on disk, for users and for the workers.

Values from ``${...}`` are saved as ``${...}``: the values of environment variables must not be in files that users keep
or share. A worker resolves them again from its environment.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from vissl_zero.atomic import read_regular, replacing
from vissl_zero.config.block_data import block_of, declared_keys
from vissl_zero.config.blocks.model_and_loss import Trunk
from vissl_zero.config.components import builtin_keys
from vissl_zero.config.components.trunks import TRUNK_BLOCKS, trunk_block_names
from vissl_zero.config.environment import mask_environment
from vissl_zero.config.run_config import RunConfig
from vissl_zero.errors import VisslZeroError
from vissl_zero.resolve.resolved import (
    Float8Plan,
    LarcPlan,
    OffloadPlan,
    OptimizerPlan,
    Precision,
    ResolvedRun,
    ShardingPlan,
)
from vissl_zero.vissl.keys import without_vissl_keys


def leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield key path and value of each leaf of nested dicts and lists; list positions are numbers in the path."""
    if isinstance(tree, Mapping):
        items: Any = tree.items()
    elif isinstance(tree, (list, tuple)):
        items = enumerate(tree)
    else:
        yield prefix, tree
        return
    for key, value in items:
        yield from leaves(value, f"{prefix}.{key}" if prefix else str(key))


def find(tree: Any, path: str) -> tuple[Any, Any] | None:
    """Return (parent dict or list, key in it) of the value at ``path``, or None if there is no such value."""
    *parents, last = path.split(".")
    for part in parents:
        place = _key_at(tree, part)
        if place is None:
            return None
        tree = tree[place]
    place = _key_at(tree, last)
    return None if place is None else (tree, place)


def _key_at(tree: Any, part: str) -> Any:
    if isinstance(tree, Mapping):
        return part if part in tree else None
    return int(part) if isinstance(tree, list) and part.isdigit() and int(part) < len(tree) else None


RESOLVED_FILE = "config.resolved.yaml"
_MAX_BYTES = 2**22  # a plan has some 30 KiB
_REFERENCE = re.compile(r"\$\{config\.([\w.]+)\}")
_RUN_DIR_KEY = "CHECKPOINT.DIR"
_HEADER = "# Every value of this run after resolution; written by vissl_zero, read by its processes.\n"
_CASTS: dict[str, Callable[[str], Any]] = {
    "int": int,
    "float": float,
    # Python's ``bool`` is True for any text, also for that of false.
    "bool": lambda text: text.lower() in ("true", "1", "yes", "on"),
}
_WRITTEN = "interpolations"


def save_resolved(plan: ResolvedRun, path: Path) -> None:
    """Write a plan with ``${...}`` as in the recipe, in the configuration and in values that are copies of it.

    Integers of the plan (seed, batch, processes) are written as numbers.
    """
    text = _HEADER + yaml.safe_dump(as_data(plan), sort_keys=False, width=120)
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def as_data(plan: ResolvedRun) -> dict[str, Any]:
    """Convert a plan to plain containers with ``${...}`` as in the recipe, safe to keep and share."""
    data = _plain(asdict(plan))
    data["config"] = _plain(config_data(plan.config, plan.learns_from_other))
    values, data[_WRITTEN] = _mask(data["config"], plan.interpolations)
    for path, key in plan.copies.items():
        place = find(data, path)
        if place is not None and place[0][place[1]] == values[key]:  # not equal: changed after ``resolve``
            place[0][place[1]] = plan.interpolations[key]
    data["run_dir"] = _masked_folder(plan.run_dir, values.get(_RUN_DIR_KEY), plan.interpolations.get(_RUN_DIR_KEY))
    # Notes quote values, so they could disclose what the configuration masks.
    texts = {value: plan.interpolations[key] for key, value in values.items() if value and isinstance(value, str)}
    data["notes"] = [_masked_text(note, texts) for note in data["notes"]]
    return data


def config_data(config: RunConfig, learns_from_other: bool) -> dict[str, Any]:
    """Return the tree as plain containers, without the blocks of other components and unset unused keys of VISSL.

    Args:
        config: configuration with the keys of the chosen components filled in.
        learns_from_other: keep the model under DISTILLATION.
    """
    tree = without_vissl_keys(asdict(config))
    tree["MODEL"]["TRUNK"] = _trunk_data(config.MODEL.TRUNK)
    loss = config.LOSS["name"]
    tree["LOSS"] = {"name": loss, loss: tree["LOSS"][loss]}
    block, kept = tree.pop("DISTILLATION"), dict[str, Any]()
    if block["CACHE_FEATURES"]:
        kept = {key: block[key] for key in ("CACHE_FEATURES", "CACHE_FOLDER")}
    if learns_from_other:
        teacher = config.DISTILLATION.TEACHER_MODEL
        kept["TEACHER_MODEL"] = {
            "TRUNK": _trunk_data(teacher.TRUNK),
            "HEAD": asdict(teacher.HEAD),
            "INPUT_TYPE": teacher.INPUT_TYPE,
            "WEIGHTS_INIT": asdict(teacher.WEIGHTS_INIT),
        }
    if kept:
        tree["DISTILLATION"] = kept
    return tree


def _trunk_data(trunk: Trunk) -> dict[str, Any]:
    """Return name and keys of the chosen trunk."""
    if trunk.NAME not in TRUNK_BLOCKS:
        return {"NAME": trunk.NAME, "PARAMS": dict(trunk.PARAMS)}
    schema = builtin_keys("trunk")[trunk.NAME]
    blocks = {name: declared_keys(asdict(getattr(trunk, name)), schema) for name in trunk_block_names(trunk.NAME)}
    return {"NAME": trunk.NAME, **blocks}


def copies_of(derive: Callable[[Any], Mapping[str, Any]], cfg: Any, keys: Mapping[str, str]) -> dict[str, str]:
    """Return the values of a plan that are copies of interpolated values: path in the plan -> key under ``config``.

    Cost: derives the plan once per key.

    Args:
        derive: function from a configuration to blocks of the plan, as plain containers by name.
        cfg: the configuration; it is not changed.
        keys: key paths under ``config`` that were interpolated.
    """
    # Equal values may be coincidence. So each key is changed in turn: values that change with it are copies.
    copies: dict[str, str] = {}
    before = dict(leaves(derive(cfg)))
    for key in keys:
        changed = copy.deepcopy(cfg)
        place = _place(changed, key)
        if place is None:
            continue
        value = _get(*place)
        if isinstance(value, bool) or not value or not isinstance(value, (str, float)):
            continue
        # The smallest change, so that all rules still hold. Integers are left out: a plan computes with them, and
        # numbers of images or processes are no secrets.
        other: Any = value + "~" if isinstance(value, str) else math.nextafter(value, 0.0)
        _set(*place, other)
        try:
            after = dict(leaves(derive(changed)))
        except (VisslZeroError, ValueError, LookupError):
            continue  # a name in a registry, such as the optimizer's: the changed name does not exist
        copies |= {path: key for path, leaf in before.items() if leaf == value and after.get(path) == other}
    return copies


def _place(tree: Any, path: str) -> tuple[Any, Any] | None:
    """Return (parent dataclass, dict or list, name in it) of the value at ``path``, or None."""
    *parents, last = path.split(".")
    for name in [*parents, last]:
        known = tree if isinstance(tree, Mapping) else getattr(tree, "__dataclass_fields__", {})
        if isinstance(tree, list):
            known = {str(index): index for index in range(len(tree))}
        if name not in known:
            return None
        holder, at = tree, int(name) if isinstance(tree, list) else name
        tree = _get(holder, at)
    return holder, at


def _get(holder: Any, name: Any) -> Any:
    return holder[name] if isinstance(holder, (dict, list)) else getattr(holder, name)


def _set(holder: Any, name: Any, value: Any) -> None:
    if isinstance(holder, (dict, list)):
        holder[name] = value
    else:
        setattr(holder, name, value)


def _mask(config: dict[str, Any], interpolations: dict[str, str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Replace values by their ``${...}``, in place. Returns key -> value, and key -> text and type of the value."""
    values: dict[str, Any] = {}
    written: dict[str, Any] = {}
    for key, text in interpolations.items():
        place = find(config, key)
        assert place is not None, key
        holder, name = place
        values[key] = holder[name]
        # The environment will give a text again; the type tells what to make of it.
        written[key] = {"text": text, "type": type(holder[name]).__name__}
        holder[name] = text
    return values, written


def _masked_folder(run_dir: str, value: Any, text: str | None) -> str:
    """Return the run folder with the value of ``CHECKPOINT.DIR`` replaced by its ``${...}``."""
    if not text or not isinstance(value, str):
        return run_dir
    if run_dir == str(Path(value).expanduser().absolute()) and value.startswith(("/", "~")):
        return text
    # The last occurrence: a parent folder may have the same name.
    before, separator, after = f"{run_dir}/".rpartition(f"/{Path(value)}/")
    return f"{before}/{text}/{after}".rstrip("/") if separator else run_dir


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _masked_text(text: str, values: Mapping[str, str]) -> str:
    """Replace interpolated strings in a note by their ``${...}``, if they are whole words."""
    for value, written in values.items():
        replacement = written.replace("\\", r"\\")  # a backslash would refer to a group
        # Whole words: a short value such as "1" or "a" would be found in any sentence.
        text = re.sub(rf"(?<![\w.]){re.escape(value)}(?!\w)", replacement, text)
    return text


def read_saved(path: Path) -> dict[str, Any]:
    """Read ``config.resolved.yaml`` as data: nothing in it is resolved, imported or run. Safe for untrusted files.

    Raises:
        OSError: the file cannot be read, or is not a regular file.
        ValueError: the file is not a resolved configuration.
    """
    try:
        data = yaml.load(read_regular(path, _MAX_BYTES), Loader=_Loader)  # noqa: S506 - a safe loader
    except (yaml.YAMLError, RecursionError, TypeError, AttributeError, LookupError, OverflowError) as error:
        raise ValueError(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}") from error
    if not isinstance(data, dict) or not isinstance(data.get("config"), dict):
        raise ValueError("it has no config")
    return data


class _Loader(yaml.SafeLoader):
    def compose_node(self, parent: Any, index: Any) -> Any:
        # Nested aliases can expand a small file to any size in memory.
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("it has aliases, which vissl_zero does not write")
        return super().compose_node(parent, index)


def with_references(config: Mapping[str, Any]) -> dict[str, Any]:
    """Replace each ``${config.A.B}`` in a saved configuration by the value of that key. Nothing else is resolved."""
    tree = copy.deepcopy(dict(config))
    for path, value in leaves(config):
        text = value
        for _ in range(10):  # a reference may lead to another one; the limit ends cycles
            match = _REFERENCE.fullmatch(text) if isinstance(text, str) else None
            target = find(config, match[1]) if match else None
            if target is None:
                break
            text = target[0][target[1]]
        place = find(tree, path)
        if text is not value and place is not None:
            place[0][place[1]] = copy.deepcopy(text)
    return tree


def load_resolved(path: Path) -> ResolvedRun:
    """Read a plan, and resolve ``${...}`` from this process's environment where possible.

    Raises:
        OSError, ValueError: see ``read_saved``.
    """
    mask_environment()
    data = read_saved(path)
    written = data.pop(_WRITTEN)
    root = OmegaConf.create({"config": copy.deepcopy(data["config"])})
    for key, entry in written.items():
        place = find(data["config"], key)
        assert place is not None, key
        holder, name = place
        holder[name] = _cast(_at(root, key, holder[name]), entry["type"])
    for path_of_copy, key in data["copies"].items():
        place, source = find(data, path_of_copy), find(data["config"], key)
        # A copy that was changed after ``resolve`` was saved as its value, and stays that.
        if place is not None and source is not None and place[0][place[1]] == written[key]["text"]:
            place[0][place[1]] = source[0][source[1]]
    data["notes"] = [_unmasked(note, root) for note in data["notes"]]
    if _RUN_DIR_KEY in written:
        run_dir = str(_unmasked(data["run_dir"], root))
        data["run_dir"] = run_dir if "${" in run_dir else str(Path(run_dir).expanduser().absolute())
    sharding, optimizer = data.pop("sharding"), data.pop("optimizer")
    sharding["precision"] = Precision(**sharding["precision"])
    # ``get``, here and below: runs of older versions lack these fields.
    sharding["float8"] = Float8Plan(**sharding.get("float8", {}))
    for tier in ("offload_optimizer", "offload_params"):
        sharding[tier] = OffloadPlan(**sharding[tier])
    # YAML gives lists, and a plan that was read must equal the one that was saved.
    sharding["stage_checkpoints"] = tuple(tuple(stage) for stage in sharding["stage_checkpoints"])
    sharding["checkpoint_blocks"] = tuple(sharding.get("checkpoint_blocks", ()))
    optimizer["larc"] = LarcPlan(**optimizer["larc"]) if optimizer["larc"] else None
    for key in ("non_regularized", "head_lr_factors", "param_rules", "head_rules"):
        optimizer[key] = tuple(optimizer.get(key, ()))
    data["notes"] = tuple(data["notes"])
    data["config"] = block_of(RunConfig, data["config"])
    return ResolvedRun(
        **data,
        sharding=ShardingPlan(**sharding),
        optimizer=OptimizerPlan(**optimizer),
        interpolations={key: entry["text"] for key, entry in written.items()},
    )


def _at(root: DictConfig, key: str, text: str) -> Any:
    """Return the value at ``key`` of the configuration, or ``text`` if the environment lacks a variable."""
    try:
        value = OmegaConf.select(root, f"config.{key}")
    except OmegaConfBaseException:
        return text
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def _cast(value: Any, type_name: str) -> Any:
    if isinstance(value, str) and "${" not in value and type_name in _CASTS:
        return _CASTS[type_name](value)
    return value


def _unmasked(text: str, root: DictConfig) -> str:
    if "${" not in text:
        return text
    try:
        return str(OmegaConf.create({"config": root.config, "value": text}).value)
    except OmegaConfBaseException:
        return text
