"""Jobs of VISSL go on: its checkpoint of each method resumes, teacher, queue, memory bank and clusters included.

The reference is a run of ours that goes on by itself. What it holds after its first epoch is written as VISSL would
write it (names of vissl/losses/*.py and vissl/hooks/log_hooks.py at 09270ed2), imported, and trained on: the loss of
the next step is a function of model, teacher and loss state alone.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit.commands.vissl_files import _fsdp, slices, vissl_names
from vissl_zero.checkpoint import newest_checkpoint
from vissl_zero.checkpoint.resume import restore
from vissl_zero.cli import main
from vissl_zero.config.compose import compose
from vissl_zero.engine.build import build_run
from vissl_zero.engine.hook import Hook, Run, Step, StepRecord
from vissl_zero.engine.loop import train
from vissl_zero.resolve.host import Host
from vissl_zero.resolve.resolve import resolve

WORDS = [
    "config.DATA.TRAIN.DATA_LIMIT=64",
    "config.DATA.TRAIN.BATCHSIZE_PER_REPLICA=32",
    "config.DISTRIBUTED.NUM_PROC_PER_NODE=1",
    "config.ZERO.LEVEL=0",
    "config.OPTIMIZER.num_epochs=2",
    "config.NEAREST_NEIGHBOR.USE_KNN=false",
    "config.DATA.NUM_DATALOADER_WORKERS=0",
    "config.MACHINE.DEVICE=cpu",
]
STEPS = 2  # an epoch


class Watch(Hook):
    """The state after the first epoch, and the losses."""

    def __init__(self) -> None:
        self.state: dict[str, Tensor] = {}
        self.loss: dict[str, Tensor] = {}
        self.losses: dict[int, float | None] = {}

    def on_step(self, run: Run, step: Step) -> None:
        if run.step == STEPS:
            self.state = {part.name: part.read().reshape(part.full_shape).clone() for part in run.sharded.parts()}
            self.state |= {f"buffer/{name}": value.clone() for name, value in run.sharded.buffers().items()}
            self.loss = {name: value.clone() for name, value in run.method.state_dict().items()}

    def on_record(self, run: Run, record: StepRecord) -> None:
        self.losses[record.step] = record.loss


def _names(state: dict[str, Tensor], parameters: str, buffers: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Trunk and heads under VISSL's names."""
    own = {
        name.removeprefix(prefix): value
        for prefix in (parameters, buffers)
        for name, value in state.items()
        if name.startswith(prefix) and (prefix == buffers) <= ("teacher:" not in name.removeprefix(buffers))
    }
    if "trunk.embedding.unit.cls_token" not in own:
        return vissl_names(SimpleNamespace(state_dict=lambda: own))  # type: ignore[arg-type]
    # As vissl/models/trunks/vision_transformer.py calls them.
    trunk = {
        name.removeprefix("trunk.").removeprefix("embedding.unit.").replace(".unit.", "."): value
        for name, value in own.items()
        if name.startswith("trunk.")
    }
    if "mask_token" in trunk:
        trunk["patch_masking.masked_embed"] = trunk.pop("mask_token")[0]
    return trunk, {name.removeprefix("heads."): value for name, value in own.items() if name.startswith("heads.")}


def _teacher(watch: Watch, prefix: str) -> dict[str, Tensor]:
    trunk, heads = _names(watch.state, "teacher/", "buffer/teacher:")
    return {f"{prefix}{part}.{n}": v for part, of in (("trunk", trunk), ("heads", heads)) for n, v in of.items()}


def _moco(watch: Watch) -> dict[str, Any]:
    queue = {"queue": watch.loss["queue.keys"].T.clone(), "queue_ptr": watch.loss["queue.position"][None]}
    return {**queue, **_teacher(watch, "moco_encoder.")}


def _dino(watch: Watch) -> dict[str, Any]:
    return {"center": watch.loss["center.mean"][None], **_teacher(watch, "momentum_teacher.module.")}


def _ibot(watch: Watch) -> dict[str, Any]:
    centers = {"center": watch.loss["center.mean"][None], "center2": watch.loss["patch_center.mean"][None, None]}
    return {"criterion": centers, "teacher": _teacher(watch, "module.")}


def _msn(watch: Watch) -> dict[str, Any]:
    return {"teacher": _teacher(watch, "module.")}


def _queue(watch: Watch) -> dict[str, Any]:
    filled = int(watch.loss["queue._extra_state"])
    rows = watch.loss["queue.embeddings"][:, :filled].clone()
    return {"num_iteration": torch.tensor([STEPS]), "local_queue0": torch.rand(2, filled, 3), "local_emb_queue": rows}


def _swav_momentum(watch: Watch) -> dict[str, Any]:
    return {**_queue(watch), **_teacher(watch, "momentum_encoder.module.")}


def _nce(watch: Watch) -> dict[str, Any]:
    params = torch.tensor([256.0, 0.07, float(watch.loss["bank.normalizer"]), 0.5], dtype=torch.float64)
    return {"nce_average.memory": watch.loss["bank.memory"], "nce_average.params": params}


def _clusters(watch: Watch) -> dict[str, Any]:
    found = {name.removeprefix("memory."): value for name, value in watch.loss.items()}
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    memory = {"local_memory_embeddings": found["embeddings"][:, order], "local_memory_index": order}
    return memory | {name: value for name, value in found.items() if name.startswith(("assignments", "centroids"))}


JOBS: dict[str, tuple[Any, list[str]]] = {
    "moco_v2": (_moco, ["config.LOSS.moco_loss.queue_size=96"]),
    "dino": (_dino, []),
    "ibot": (_ibot, []),
    "msn": (_msn, []),
    "swav": (_queue, ["config.LOSS.swav_loss.queue={queue_length: 64, start_iter: 0}"]),
    "swav_momentum": (_swav_momentum, ["config.LOSS.swav_momentum_loss.queue.start_iter=0"]),
    "npid": (_nce, []),
    "pirl": (_nce, []),
    "deepcluster_v2": (_clusters, ["config.LOSS.deepclusterv2_loss.num_clusters=[8,8]"]),
    "barlow_twins": (lambda watch: {}, []),
    "simclr": (lambda watch: {}, []),
    "supervised": (lambda watch: {}, []),
}


def _plan(recipe: str, words: list[str]) -> Any:
    composed = compose(recipe, words)
    return resolve(composed.run, "/nowhere", host=Host(num_gpus=0, why_no_gpu="", num_cores=1))


def _went_on(recipe: str, words: list[str]) -> Watch:
    watch = Watch()
    train(*build_run(_plan(recipe, words), torch.device("cpu")), [watch])
    return watch


def _next_loss(recipe: str, words: list[str], folder: Path) -> float:
    watch = Watch()
    run, schedules, frozen = build_run(_plan(recipe, words), torch.device("cpu"))
    with newest_checkpoint(folder) as checkpoint:
        restore(run, [watch], checkpoint)
    run.num_steps = STEPS + 1
    train(run, schedules, frozen, [watch])
    loss = watch.losses[STEPS + 1]
    assert loss is not None
    return loss


def _save(path: Path, watch: Watch, loss: dict[str, Any], form: str) -> None:
    trunk, heads = _names(watch.state, "model/", "buffer/")
    numbers = {"phase_idx": 0, "train_phase_idx": 0, "iteration": STEPS, "iteration_num": STEPS}
    model = {"model": {"trunk": trunk, "heads": heads}, "meta": {"trunk": {}, "heads": []}}
    classy = {"base_model": model, "train_phase_idx": 0, "loss": {}}
    whole = {**numbers, "loss": loss, "classy_state_dict": classy, "type": "consolidated"}
    if form == "consolidated":
        torch.save(whole, path)
        return
    # FSDP's: each rank stores its part of the teacher in one state dict, ``trunk.`` and ``heads.`` before the names.
    teacher = {f"trunk.{name}": value for name, value in _names(watch.state, "teacher/", "buffer/teacher:")[0].items()}
    head = _names(watch.state, "teacher/", "buffer/teacher:")[1]
    teacher |= {f"heads.{name}": value for name, value in head.items()}

    states, metas = _fsdp(teacher, 2, True, lambda name: name.rpartition(".")[0])  # a unit for each layer
    for rank in range(2):
        of_rank = {"center": loss["center"], "teacher": states[rank], "teacher_meta": metas[rank]}
        torch.save({**whole, "loss": of_rank, "type": "shard"}, path.with_name(f"{path.stem}_shard{rank}.torch"))
    torch.save({"type": "shard_list", "shards": [f"{path.stem}_shard{rank}.torch" for rank in range(2)]}, path)


def _imported(tmp_path: Path, recipe: str, words: list[str]) -> Path:
    folder = tmp_path / "theirs"
    arguments = [str(tmp_path / "vissl.torch"), "--to", str(folder), f"config={recipe}", *words]
    assert main(["checkpoint", "import", *arguments]) == 0
    return folder


FAST = ("moco_v2", "dino", "swav", "npid", "deepcluster_v2")


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in FAST else pytest.mark.slow) for n in JOBS])
def test_a_job_goes_on_as_if_it_had_not_stopped(name, tmp_path, capsys):
    make, more = JOBS[name]
    recipe, words = f"digits/{name}", [*WORDS, *more]
    watch = _went_on(recipe, words)
    _save(tmp_path / "vissl.torch", watch, make(watch), "consolidated")
    folder = _imported(tmp_path, recipe, words)
    said = " ".join(capsys.readouterr().out.split())
    assert ("State of the loss is imported" in said) == bool(watch.loss), said
    assert ("The teacher is imported" in said) == any(key.startswith("teacher/") for key in watch.state), said
    assert _next_loss(recipe, words, folder) == pytest.approx(watch.losses[STEPS + 1], rel=1e-6)


def test_shards_have_their_parts_of_the_teacher(tmp_path, capsys):
    recipe, words = "digits/dino", WORDS
    watch = _went_on(recipe, words)
    _save(tmp_path / "vissl.torch", watch, _dino(watch), "sharded")
    folder = _imported(tmp_path, recipe, words)
    assert "The teacher is imported" in " ".join(capsys.readouterr().out.split())
    assert _next_loss(recipe, words, folder) == pytest.approx(watch.losses[STEPS + 1], rel=1e-6)


@pytest.mark.parametrize("name", ["moco_v2", "npid", pytest.param("swav", marks=pytest.mark.slow)])
def test_a_file_without_state_of_the_loss_starts_it_anew(name, tmp_path, capsys):
    more = JOBS[name][1]
    recipe, words = f"digits/{name}", [*WORDS, *more]
    watch = _went_on(recipe, words)
    _save(tmp_path / "vissl.torch", watch, {}, "consolidated")
    folder = _imported(tmp_path, recipe, words)
    said = " ".join(capsys.readouterr().out.split())
    assert ("from scratch" in said) and ("starts as a copy of the model" in said) == (name == "moco_v2")
    assert _next_loss(recipe, words, folder) > 0


def test_slices_begin_a_job_whose_teacher_is_a_copy(tmp_path, capsys):
    """VISSL's slices hold trunk and heads alone (vissl/utils/checkpoint.py at 09270ed2, _save_slice_list)."""
    recipe, words = "digits/dino", WORDS
    watch = _went_on(recipe, words)
    slices(*_names(watch.state, "model/", "buffer/"), tmp_path / "vissl.torch")
    folder = _imported(tmp_path, recipe, words)
    said = " ".join(capsys.readouterr().out.split())
    assert "VISSL, sliced" in said and "starts as a copy of the model" in said
    assert _next_loss(recipe, words, folder) > 0
