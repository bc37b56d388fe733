"""``weights.safetensors``: the trained model's whole parameters and buffers under their plain names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from vissl_zero.atomic import replacing
from vissl_zero.checkpoint.shard_file import Entry, write_shard_file
from vissl_zero.checkpoint.weights import TEACHER_WEIGHTS_FILE
from vissl_zero.engine.hook import Hook, Run
from vissl_zero.errors import CheckpointError

FILE_NAME = "weights.safetensors"
BEST_FILE_NAME = "weights_best.safetensors"


class WeightsFile(Hook):
    """Gathers the whole model at the end of the run and writes it on rank 0.

    Cost: the model is gathered tensor by tensor (rank 0 holds all of it in CPU memory), then written once.
    """

    def on_end(self, run: Run) -> None:
        _write(run, FILE_NAME)
        if run.method.has_teacher:
            _write(run, TEACHER_WEIGHTS_FILE, which="teacher")


class BestWeights(Hook):
    """Writes ``weights_best.safetensors`` whenever the top-1 on TEST is higher than ever before; ``top1_best`` says it.

    Comes after the hook that measures. Cost: as ``WeightsFile``, at each such epoch.
    """

    def __init__(self) -> None:
        self._best: list[float] = []  # [step, top-1]

    def state_dict(self) -> dict[str, Any]:
        """The best so far."""
        return {"best": self._best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._best = list(state["best"])

    def on_epoch_end(self, run: Run) -> None:
        self._keep_if_best(run)

    def on_end(self, run: Run) -> None:
        self._keep_if_best(run)

    def _keep_if_best(self, run: Run) -> None:
        curve = run.results.get("top1_by_step") or []
        if not curve or curve[-1][0] != run.step:
            return
        if not self._best or curve[-1][1] > self._best[1]:
            self._best = list(curve[-1])
            _write(run, BEST_FILE_NAME)
        run.results["top1_best"], run.results["best_step"] = self._best[1], self._best[0]


def _write(run: Run, name: str, which: str = "student") -> None:
    run.sharded.consolidate_buffers()  # running statistics may differ between ranks; the file has their mean
    # A collective: every rank.
    with run.sharded.evaluated():
        state = run.sharded.full_state() if which == "student" else run.sharded.full_teacher_state()
    if not run.is_main:
        return
    metadata = {"format": "pt", "recipe": run.plan.recipe, "step": str(run.step)}
    try:
        save_weights(state, run.folder / name, metadata)
    except OSError as error:
        raise CheckpointError(
            f"{run.folder / name} cannot be written ({error}). Make room; the same command goes on from the last "
            "checkpoint."
        ) from error


def save_weights(state: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    """Write tensors as one safetensors file with checksums, complete or not at all.

    Args:
        state: CPU tensors by full name; tied ones (one storage, several names) are written under each name.
        path: where to; an older file is replaced.
        metadata: strings for the file's header.
    """
    entries = [Entry.of(name, tensor) for name, tensor in state.items()]
    with replacing(path) as temporary:
        write_shard_file(temporary, entries, metadata, with_checksums=True)
