"""Keys of VISSL that are accepted without effect: 40 of them, drawn by a seed, change no resolved run and are named.

Beside each drawn key stands why it changes no result in VISSL either, or why the program reads it nowhere.
"""

from __future__ import annotations

import copy
import hashlib
from dataclasses import replace
from typing import Any

import pytest

from vissl_zero.config.compose import compose
from vissl_zero.config.run_config import RunConfig
from vissl_zero.resolve.host import Host
from vissl_zero.resolve.resolve import resolve
from vissl_zero.resolve.resolved import ResolvedRun
from vissl_zero.resolve.saved import config_data
from vissl_zero.vissl.keys import vissl_keys

NUM_DRAWN, SEED = 40, 15
# Blocks that VISSL's training never reads, by the file that does.
OTHER_PROGRAMS = {
    "EXTRACT_FEATURES": "tools/run_distributed_engines.py, engine extract_features",
    "GEO_LOCALIZATION": "tools/geolocalization_test.py",
    "RANKING": "tools/rank_features.py",
}
# What VISSL's key is about, where training does read it: display, speed, memory or a file, and no number of the run.
NO_NUMBER = {
    "STRATIFIED_SAMPLER": "read with its ENABLED alone, which is refused",
    "POWER_LAW_SAMPLER": "read with its ENABLED alone, which is refused",
    "ENABLE_QUEUE_DATASET": "which image stands in for a broken one; ON_BROKEN_IMAGE asks for that here",
    "CHECKPOINT_MLP": "recomputation, the same numbers",
    "VISION_TRANSFORMERS.name": "read nowhere in VISSL, where sizes define the network too",
    "dino_loss.normalize_last_layer": "read nowhere in VISSL; that of dino_head counts",
    "USE_FEATURE_EXTRACTION_ENGINE": "which of VISSL's programs computes the features",
    "FEATURE_EXTRACTION_DIR": "where features lie that the run computes itself",
    "LOW_SHOT_BENCHMARK.FEATURES.PATH": "where features lie that the run computes itself",
    "CLUSTERFIT.FEATURES.PATH": "where features lie that the run computes itself",
    "SAVE_FEATURES": "where features lie",
    "EVAL_BINARY_PATH": "a program whose rule is followed here",
    "COPY_DESTINATION_DIR": "where images lie",
    "COPY_TO_LOCAL_DISK": "where images lie",
    "MMAP_MODE": "how images are read",
    "output_dir": "where files lie",
    "HOOKS": "what is displayed and logged",
    "METERS": "what is measured",
    "MONITORING": "what is logged",
    "PROFILING": "what is profiled",
    "OPTIMIZE_MEMORY": "memory of kNN",
    "CHECKPOINT_ATTN_BLOCK": "recomputation, the same numbers",
    "TEACHER_MODEL.FSDP_CONFIG": "how the frozen teacher is wrapped",
    "TEACHER_MODEL.ACTIVATION_CHECKPOINTING": "recomputation, and the teacher has no backward pass",
    "TEACHER_MODEL.SINGLE_PASS_EVERY_CROP": "a teacher in evaluation mode sees each crop by itself",
    "BROADCAST_BUFFERS": "buffers of the other ranks, which VISSL does not save; explain says what it evaluates",
    "num_train_samples": "a size that the data says",
    "num_crops": "a number that the transforms say",
    "DROP_LAST": "a size that the data says",
    "PERF_STAT_FREQUENCY": "what is displayed",
    "embedding_dim": "a size that the head says",
    "world_size": "a size that VISSL itself fills in",
    "update_mem_with_emb_index": "which of several embeddings is remembered: here there is one, others are refused",
    "loss_scale": "apex's scaling of half-precision gradients, which are unscaled before they are used",
    "INIT_METHOD": "how processes meet",
    "DISTR_ON": "read nowhere in VISSL",
    "ENABLE_ASYNC_GPU_COPY": "how batches travel",
    "CONVIT.QK_SCALE": "read under VISION_TRANSFORMERS in VISSL too",
    "VERBOSE": "what is displayed",
    "MONITOR_PERF_STATS": "what is displayed",
    "BATCHSIZE_PER_REPLICA": "a size that the data says",
    "effective_batch_size": "a size that the data says",
    "master_weights": "apex's copies of half-precision weights; here weights are never in half precision",
    "keep_batchnorm_fp32": "batch norm is never in half precision",
    "ASSERT_HEAD_LAYER_SHAPE_INIT": "a check, which is always made of a teacher",
    "CUDA_CACHE": "memory",
    "NCCL_SOCKET_NTHREADS": "how bytes travel",
    "OVERWRITE_EXISTING": "which files are replaced; a run goes on from its folder's newest checkpoint either way",
    "local_queue_length": "set by VISSL itself from queue_length",
}


def _drawn() -> list[str]:
    """The first in the order of a hash with the seed: a key that is moved leaves the others drawn."""
    paths = (key.path for key in vissl_keys() if not key.is_refused)
    return sorted(paths, key=lambda path: hashlib.sha256(f"{SEED} {path}".encode()).digest())[:NUM_DRAWN]


def _resolved(run: RunConfig) -> ResolvedRun:
    return resolve(run, "/nowhere", host=Host(num_gpus=0, why_no_gpu="", num_cores=1))


def _set(run: RunConfig, path: str, allowed: tuple[Any, ...]) -> None:
    node: Any = run
    *parents, last = path.split(".")
    for part in parents:
        node = node[part] if isinstance(node, dict) else getattr(node, part)
    value = allowed[0]
    other: Any = not value if isinstance(value, bool) else [7] if isinstance(value, list) else 7
    if isinstance(node, dict):
        node[last] = other
    else:
        setattr(node, last, other)


def _without(tree: Any, path: str) -> Any:
    """A configuration without one key, and without blocks that it leaves empty."""
    first, _, rest = path.partition(".")
    if not isinstance(tree, dict) or first not in tree:
        return tree
    inner = _without(tree[first], rest) if rest else {}
    return {**{key: value for key, value in tree.items() if key != first}, **({first: inner} if inner else {})}


@pytest.mark.slow
def test_forty_drawn_keys_change_no_run_and_are_named() -> None:
    composed = compose("quickstart/swav_digits")
    plain, keys = _resolved(composed.run), {key.path: key for key in vissl_keys()}
    for path in _drawn():
        run = copy.deepcopy(composed.run)
        _set(run, path, keys[path].allowed)
        plan = _resolved(run)
        named = [note for note in plan.notes if note not in plain.notes]
        assert any(part in note for note in named for part in (path, path.split(".")[0])), (path, named)
        trees = [config_data(one.config, one.learns_from_other) for one in (plan, plain)]
        assert _without(trees[0], path) == _without(trees[1], path), path
        assert replace(plan, config=plain.config, notes=()) == replace(plain, notes=()), path


@pytest.mark.parametrize("path", _drawn())
def test_each_of_them_is_justified(path: str) -> None:
    whole = f"{path}."
    reasons = [why for block, why in OTHER_PROGRAMS.items() if whole.startswith(f"{block}.")]
    reasons += [why for part, why in NO_NUMBER.items() if path.startswith(f"{part}.") or f"{part}." in whole]
    assert reasons, f"{path}: say here why it changes no result, or move it to vissl_zero's refused keys"
