"""Convert errors of OmegaConf into problems: the key, what it must be, what to write instead."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

from omegaconf import (
    BooleanNode,
    Container,
    DictConfig,
    FloatNode,
    IntegerNode,
    ListConfig,
    Node,
    OmegaConf,
    StringNode,
    UnionNode,
    ValueNode,
)
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigIndexError,
    ConfigKeyError,
    ConfigTypeError,
    InterpolationResolutionError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)

from vissl_zero.config.recipes import list_recipes
from vissl_zero.errors import Problem, did_you_mean

MOST_LISTED = 20


# Key -> common names that users write for it, in lower case without underscores.
EVERYDAY = {
    "config.OPTIMIZER.lr": ("lr", "learningrate", "baselr", "maxlr", "rate"),
    "config.OPTIMIZER.weight_decay": ("weightdecay", "wd", "decay"),
    "config.OPTIMIZER.num_epochs": ("epochs", "epoch", "numepochs", "maxepochs", "nepochs"),
    "config.TRAINER.MAX_STEPS": ("steps", "maxsteps", "numsteps", "maxiter", "maxiterations", "iterations"),
    "config.DATA.TRAIN.BATCHSIZE_PER_REPLICA": ("batchsize", "batch", "bs", "batchsizeperreplica", "batchsizepergpu"),
    "config.DATA.IMG_SIZE": ("imgsize", "imagesize", "size", "resolution", "cropsize", "inputsize"),
    "config.DATA.TRAIN.DATA_PATHS": ("data", "datapath", "datapaths", "datadir", "dataset", "images", "trainpath"),
    "config.DATA.NUM_DATALOADER_WORKERS": ("workers", "numworkers", "numdataloaderworkers"),
    "config.ZERO.LEVEL": ("zero", "level", "stage", "zerolevel", "zerostage"),
    "config.DISTRIBUTED.NUM_PROC_PER_NODE": ("gpus", "numgpus", "procs", "nproc", "nprocpernode", "numprocpernode"),
    "config.MACHINE.DEVICE": ("device",),
    "config.SEED_VALUE": ("seed",),
    "config.CHECKPOINT.DIR": ("output", "outputdir", "out", "dir", "rundir", "outdir", "savedir"),
    "config.MODEL.WEIGHTS_INIT.PARAMS_FILE": ("weights", "pretrained", "paramsfile", "checkpoint", "ckpt"),
}


def explain_value(error: OmegaConfBaseException, tree: DictConfig, prefix: str = "") -> Problem:
    """Return the problem of an unknown key or a wrong value.

    Args:
        error: error that OmegaConf raised.
        tree: the typed tree, or the one block of it that was checked.
        prefix: key path of that block, with a dot at its end.
    """
    # OmegaConf writes a position behind a position as "[0]1".
    key = prefix + re.sub(r"\](\d+)", r"][\1]", str(error.full_key or error.key or "configuration"))
    if isinstance(error, (ConfigAttributeError, ConfigKeyError)):
        return unknown_key(key.removeprefix(prefix), tree, prefix)
    if isinstance(error, MissingMandatoryValue):
        return Problem(key, "", "must be given", f"Write {key}=<value>.")
    if isinstance(error, InterpolationResolutionError):
        if missing := _unset_variable(error):
            fix = "Set it, or give a default as in ${oc.env:NAME,default}."
            return Problem(key, "", f"needs the environment variable {missing}, which is not set", fix)
        return Problem(key, "", _sentence(error), "Correct the text in ${...}.")
    return _wrong_type(key, error)


def _sentence(error: OmegaConfBaseException) -> str:
    return str(error.msg or error).split("\n", 1)[0].strip().rstrip(".")


def _unset_variable(error: InterpolationResolutionError) -> str:
    """Return the name of the first environment variable in a value that is not set; empty if all are set."""
    node = error.parent_node._get_node(error.key) if isinstance(error.parent_node, Container) else None
    names = _VARIABLE.findall(str(node._value())) if isinstance(node, Node) else []
    return next((name for name in names if name not in os.environ), "")


_VARIABLE = re.compile(r"\$\{oc\.env:(\w+)\}")
_WITH_UNIT = re.compile(r"(\d+\.?\d*) ?Gi?B?", re.IGNORECASE)
# Typed node -> its allowed values, in words.
_TAKES: dict[type[Node], str] = {
    IntegerNode: "a whole number",
    FloatNode: "a number",
    BooleanNode: "true or false",
    StringNode: "text",
    ListConfig: "a list",
    DictConfig: "a block of keys",
}
_ITEMS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
_EITHER = {"typing.Union[int, str]": "a number or a word", "typing.Union[bool, float]": "true, false or a number"}


def _wrong_type(key: str, error: OmegaConfBaseException) -> Problem:
    if isinstance(error, ConfigIndexError):
        must, fix = "must be a position that the list has, counted from 0", f"Correct the value of {key}."
        return Problem(key, "", must, fix)
    node, value = error.child_node, error.value
    if node is not None and value is None:
        return Problem(key, "null", "must have a value", "Leave the key out to get its default.")
    if node is None and isinstance(error, ConfigTypeError):  # a list instead of a block, or vice versa
        node = error.parent_node
    takes = _EITHER.get(str(node._metadata.ref_type)) if isinstance(node, UnionNode) else _TAKES.get(type(node))
    if node is None and isinstance(error.parent_node, ListConfig):  # one of its items
        takes = _ITEMS.get(error.parent_node._metadata.element_type)
    if not takes:
        return Problem(key, "", _sentence(error), "See docs/configuration.md.")
    got = "" if value is None or isinstance(node, ListConfig) else repr(str(value))
    unit = _WITH_UNIT.fullmatch(str(value)) if key.endswith(("_GB", "_GIB")) else None
    card = (
        f" For a card of {unit[1]} GB write {0.95 * float(unit[1]):.3g}."
        if unit and key.endswith("ZERO.MEMORY_GB")
        else ""
    )
    fix = f"Write {unit[1]} (GiB, no unit).{card}" if unit else f"Correct the value of {key}."
    if isinstance(node, ListConfig) and (listed := _in_a_list(value, node)):
        fix = f"Write {key}={listed}."
    return Problem(key, got, f"must be {takes}", fix)


def _in_a_list(value: Any, node: ListConfig) -> str:
    """Return a single value as a list with this item; empty if the list does not accept the item."""
    item = value._value() if isinstance(value, ValueNode) else value
    if not isinstance(item, (str, int, float)):
        return ""
    try:
        ListConfig([item], element_type=node._metadata.element_type)
    except OmegaConfBaseException:
        return ""
    return f"[{item}]"


def unknown_key(key: str, tree: DictConfig, prefix: str = "") -> Problem:
    """Return the problem of an unknown key, with the closest keys in its block or the paths of keys of this name.

    Args:
        key: key path in ``tree``.
        tree: the typed tree or a block of it.
        prefix: prefix of the path, for messages.
    """
    node: Any = tree
    parts, depth = key.split("."), 0
    while depth < len(parts) - 1 and isinstance(node, DictConfig) and parts[depth] in node:
        node = node._get_node(parts[depth])
        depth += 1
    wrong, full = parts[depth], prefix + key
    if "/" in wrong:
        known = ", ".join(recipe.argument for recipe in list_recipes() if recipe.is_part)
        return Problem(f"+{full}", "", "must name a folder of recipes and a file in it", f"Parts: {known}.")
    if OmegaConf.get_type(node) is dict:
        near = did_you_mean(wrong, [str(name) for name in node or ()]).strip()
        fix = f"In a file, write it there; on the command line, new keys of this block need a plus: +{full}=<value>."
        return Problem(full, "", "is not in the recipe yet", f"{near} {fix}".strip())
    siblings = [str(name) for name in node] if isinstance(node, DictConfig) and not node._is_none() else []
    word = wrong.lower().replace("_", "").replace("-", "")
    # Asked first: the nearest spelling of an everyday word may be a key of another meaning.
    if wish := next((full_key for full_key, words in EVERYDAY.items() if word in words), ""):
        return Problem(full, "", "is not a key", f"Write {wish}=<value>.")
    elsewhere = [prefix + path for path in _paths(tree) if path.rsplit(".", 1)[-1] == wrong][:3]
    fix = did_you_mean(wrong, siblings).strip()
    # Without this line, Hydra puts the keys of a file below the name of its group.
    if full.startswith("config.config"):
        fix = "Start the recipe's file with the line '# @package _global_'."
    elif elsewhere:  # an equal name says more than a similar one
        fix = f"A key of that name stands at {', '.join(elsewhere)}.{' ' + fix if fix else ''}"
    return Problem(full, "", "is not a key", fix or f"Keys there: {', '.join(siblings[:MOST_LISTED])}.")


def _paths(node: DictConfig, prefix: str = "") -> Iterator[str]:
    """Yield every key path below a node."""
    for name in map(str, node):
        yield f"{prefix}{name}"
        child = node._get_node(name)
        if isinstance(child, DictConfig) and not child._is_none():
            yield from _paths(child, f"{prefix}{name}.")
