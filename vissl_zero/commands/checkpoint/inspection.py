"""``vissl-zero checkpoint inspect``: what a checkpoint or a file of weights holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from vissl_zero.checkpoint.comparison import settings_that_differ
from vissl_zero.checkpoint.manifest import TensorInfo
from vissl_zero.checkpoint.reader import Checkpoint
from vissl_zero.checkpoint.weights import WeightsFile, config_of
from vissl_zero.commands.checkpoint.terminal import Parser, opened, say, table
from vissl_zero.config.run import RunConfig
from vissl_zero.config.vissl import without_vissl_keys
from vissl_zero.reporting.quantity import bytes_text

_KINDS = {
    "model": "parameters",
    "buffer": "buffers",
    "average": "running average of parameters",
    "teacher": "parameters of the teacher",
    "optimizer": "optimizer state",
    "criterion": "state of the loss",
    "of_rank": "of single ranks",
}


def inspect(arguments: Sequence[str]) -> int:
    """Print what is in it; returns 0. Headers and manifests are read, data are not."""
    parser = Parser("inspect", "What a checkpoint holds. Reads the manifests, not the data.")
    parser.add_argument("path", help="run folder, checkpoint folder or safetensors file")
    parser.add_argument("--tensors", action="store_true", help="list every tensor")
    parser.add_argument("--config", action="store_true", help="list every setting, those at their defaults too")
    options = parser.parse_args(arguments)
    store = opened(options.path)
    try:
        _facts(store)
        _bytes(store)
        _settings(store, options.config)
        if options.tensors:
            _tensors(store.tensors.values())
        else:
            say(f"\n{len(store.tensors)} tensors; --tensors lists them.")
    finally:
        store.close()
    return 0


def _facts(store: Checkpoint | WeightsFile) -> None:
    if isinstance(store, WeightsFile):
        table([("weights", store.path), *store.metadata.items()])
        return
    m = store.manifest
    ranks = "1 process" if m.world_size == 1 else f"{m.world_size} processes"
    images = f"{m.position} images in all, {m.epoch_samples} of epoch {m.epoch}, {m.global_batch} per step"
    rows: list[tuple[str, object]] = [
        ("checkpoint", store.path),
        ("recipe", m.recipe),
        ("step", m.step),
        ("images", images),
        ("sharding", f"ZeRO level {m.level}, {m.engine} engine, {ranks}"),
        ("written", f"{m.created} by vissl_zero {m.vissl_zero}, torch {m.torch}"),
    ]
    if m.loss_scale is not None:
        rows.append(("loss scale", m.loss_scale.get("scale")))
    rows += [(name, value) for name, value in m.results.items() if isinstance(value, (int, float, str))]
    table(rows)


def _bytes(store: Checkpoint | WeightsFile) -> None:
    sums: dict[str, list[int]] = {}
    for name, info in store.tensors.items():
        kind = _KINDS.get(name.split("/")[0], "other") if isinstance(store, Checkpoint) else "weights"
        if kind == "optimizer state":
            kind = f"optimizer: {name.split('/')[1]}"
        entry = sums.setdefault(kind, [0, 0, 0])
        for index, amount in enumerate((1, info.num_elements, info.num_bytes)):
            entry[index] += amount
    total = [sum(entry[index] for entry in sums.values()) for index in range(3)]
    rows = [(kind, *entry[:2], bytes_text(entry[2])) for kind, entry in [*sums.items(), ("in all", total)]]
    say("")
    table(rows, ("kind", "tensors", "elements", "size"), right=(1, 2, 3))
    if isinstance(store, Checkpoint) and len(store.ranks) > 1:
        parts = ", ".join(f"{stem} {bytes_text(rank.num_bytes)}" for stem, rank in list(store.ranks.items())[:8])
        say(f"files: {parts}{', ...' if len(store.ranks) > 8 else ''}")


def _settings(store: Checkpoint | WeightsFile, is_all: bool) -> None:
    config = config_of(store).get("config")
    if not isinstance(config, Mapping) or not config:
        return
    defaults: dict[str, Any] = {} if is_all else without_vissl_keys(asdict(RunConfig()))
    found = settings_that_differ(defaults, config)
    rows = [(f"config.{key}", value) for key, (_, value) in found.items() if value != "-"]
    say("\nSettings:" if is_all else "\nSettings other than the defaults:")
    table(rows)


def _tensors(infos: Iterable[TensorInfo]) -> None:
    rows = [(i.name, str(i.dtype).removeprefix("torch."), list(i.shape), bytes_text(i.num_bytes)) for i in infos]
    say("")
    table(rows, ("tensor", "type", "shape", "size"), right=(3,))
