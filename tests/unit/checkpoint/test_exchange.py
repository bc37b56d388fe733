"""Where weights from elsewhere are written to, and what is said of the state of their optimizer."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn

from tests.unit.checkpoint.test_format import write
from vissl_zero.checkpoint import exchange, find_checkpoints, open_checkpoint
from vissl_zero.checkpoint.exchange import _loss_parts, _some, export, write_imported
from vissl_zero.checkpoint.first_weights import Match
from vissl_zero.checkpoint.foreign_layouts import Foreign
from vissl_zero.checkpoint.foreign_state import LossState, OptimizerState
from vissl_zero.checkpoint.shard_file import Entry
from vissl_zero.checkpoint.weights import open_weights
from vissl_zero.errors import CheckpointError

TENSORS = {"trunk.w": torch.arange(4.0), "trunk.bn.running_mean": torch.ones(2)}
MATCHED = Match([Entry.of(*item) for item in TENSORS.items()], {name: f"their.{name}" for name in TENSORS})
STATE = {"their.trunk.w": {"step": 3.0, "exp_avg": torch.ones(4), "exp_avg_sq": torch.zeros(4)}}


def _import(target: Path, name: str = "", overwrite: bool = False, **optimizer: Any) -> tuple[Path, str]:
    foreign = Foreign("VISSL", iteration=7, epoch=2, optimizer=OptimizerState(**optimizer))
    config = {"optimizer": {"name": name}, "global_batch": 16} if name else None
    return write_imported(MATCHED, foreign, target, config, overwrite)


def test_a_file_of_weights_is_replaced_only_where_that_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "deeper" / "a.safetensors"
    assert _import(path) == (path, "")
    with pytest.raises(CheckpointError, match=r"exists, and nothing is overwritten\. Name another, or add --overwrite"):
        _import(path)
    assert _import(path, overwrite=True, of=STATE) == (
        path,
        "Optimizer state is not imported: a file of weights has no place for it; a folder (--to) has.",
    )
    assert _import(path, overwrite=True, reason="x")[1] == "Optimizer state is not imported: x."
    with safe_open(path, "pt") as file:
        assert file.metadata()["format"] == "pt" and file.metadata()["imported"] == "VISSL"
    with open_weights(path, with_data=True) as weights:
        assert {name: weights.read(name).tolist() for name in weights.tensors} == {
            name: tensor.tolist() for name, tensor in TENSORS.items()
        }


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.pt", None, "must end in .safetensors, or name a new run folder"),
        ("file", b"", "must end in .safetensors, or name a new run folder"),
        ("run", None, "has checkpoints, and nothing is overwritten. Name another folder"),
    ],
)
def test_other_targets_are_refused(name: str, content: bytes | None, sentence: str, tmp_path: Path) -> None:
    target = tmp_path / name
    if content is not None:
        target.write_bytes(content)
    if name == "run":
        target.mkdir()
        write(target, 1)
    with pytest.raises(CheckpointError, match=sentence):
        _import(target, overwrite=True)


ANEW = "A run that resumes from here starts with none."


@pytest.mark.parametrize(
    ("of", "name", "note"),
    [
        ({}, "adamw", ""),
        (STATE, "adamw", "Optimizer state is imported: exp_avg, exp_avg_sq, step of 1 parameters."),
        (STATE, "adam", "Optimizer state is imported: exp_avg, exp_avg_sq, step of 1 parameters."),
        (STATE, "sgd", f"Optimizer state is not imported: it is exp_avg, exp_avg_sq, step, and the recipe's "
                       f"optimizer is sgd. {ANEW}"),
        (STATE, "", "Optimizer state is not imported: without a recipe (config=...) the optimizer is not known. "
                    f"{ANEW}"),
        ({**STATE, "their.lost": STATE["their.trunk.w"]}, "adamw", "Optimizer state is not imported: 1 parameters that "
         f"have some are left out themselves, such as their.lost. {ANEW}"),
    ],
)  # fmt: skip
def test_state_of_the_optimizer_is_imported_as_a_whole_or_not(of: Any, name: str, note: str, tmp_path: Path) -> None:
    path, text = _import(tmp_path / "run", name, of=of)
    assert text == note and [path] == find_checkpoints(tmp_path / "run")
    with open_checkpoint(path) as checkpoint:
        manifest = checkpoint.manifest
        assert (manifest.step, manifest.epoch, manifest.global_batch) == (7, 2, 16 if name else 0)
        assert manifest.recipe.endswith("VISSL")
        state = {f"optimizer/{key}/trunk.w" for key in ("exp_avg", "exp_avg_sq")} if "is imported" in note else set()
        assert checkpoint.tensors.keys() == {"model/trunk.w", "buffer/trunk.bn.running_mean"} | state
        step = {"step": {"dtype": "float32", "value": 3.0}} if state else {}
        assert checkpoint.scalars("trunk.w") == step and list(checkpoint.verify()) == []


@pytest.mark.parametrize("ending", ["safetensors", "pt", "pth", "torch", "bin", "SAFETENSORS", "txt", ""])
def test_the_ending_decides_the_format(ending: str, tmp_path: Path) -> None:
    source, target = tmp_path / "a.safetensors", tmp_path / f"b.{ending}".rstrip(".")
    _import(source)
    if ending in ("SAFETENSORS", "txt", ""):
        with pytest.raises(
            CheckpointError, match=r"the ending decides the format, and must be one of \.safetensors, \.pt"
        ):
            export(open_weights(source), target)
        return
    exported = export(open_weights(source), target, part="trunk")
    assert sorted(exported.names) == sorted(TENSORS) and exported.num_bytes == target.stat().st_size
    assert exported.left_out == []
    with pytest.raises(CheckpointError, match=r"exists, and nothing is overwritten\. Name another file"):
        export(open_weights(source), target)
    assert export(open_weights(source), target, overwrite=True).path == target
    with pytest.raises(CheckpointError, match=r"has no heads: its tensors are trunk\.bn\.running_mean, trunk\.w\."):
        export(open_weights(source), target, part="heads", overwrite=True)


def test_long_lists_of_names_are_cut() -> None:
    assert _some(["a", "b", "c"]) == "a, b, c" and _some(["a", "b", "c", "d"]) == "a, b, c and 1 more"


class _Teacher(nn.Module):
    """As a method's: a trunk with batch norm, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.heads = nn.BatchNorm1d(2, affine=False), nn.ModuleList([nn.Linear(2, 1, bias=False)])


@pytest.mark.parametrize("file_has", ["all", "no counter", "no head", "nothing"])
def test_a_teacher_is_the_file_s_or_a_copy_of_the_model(file_has: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of a teacher is none: half of it would be of another network."""
    method = SimpleNamespace(has_teacher=True, make_teacher=lambda model: model)
    monkeypatch.setattr(exchange, "method_of", lambda loss, state: method)
    asked: list[Any] = []

    def as_ours(*args: Any) -> tuple[dict[str, torch.Tensor], list[str]]:
        asked.append(args)
        return {"center": torch.ones(3)}, ["The center is imported."]

    monkeypatch.setattr(exchange, "as_ours", as_ours)
    monkeypatch.setattr(exchange, "build_model", lambda config: _Teacher())
    names = ["trunk.running_mean", "trunk.running_var", "trunk.num_batches_tracked", "heads.0.weight"]
    student = {name: tensor + 5 for name, tensor in _Teacher().state_dict().items()}
    left_out = {"no counter": names[2:3], "no head": names[3:], "nothing": names}.get(file_has, [])
    teacher = {name: tensor + 9 for name, tensor in _Teacher().state_dict().items() if name not in left_out}
    foreign = Foreign("VISSL", loss=LossState(teacher=[Entry.of(*item) for item in teacher.items()]))
    matched = Match([Entry.of(*item) for item in student.items()])
    tree = {"LOSS": {"name": "x"}, "MODEL": {}}
    parts, sentences = _loss_parts(matched, foreign, {"config": tree})
    assert asked == [(method, tree["LOSS"], foreign.loss)]
    found = {part.name: part.read() for part in parts}
    is_whole = file_has in ("all", "no counter")
    wanted = student | (teacher if is_whole else {})
    assert sentences == ["The center is imported."] + (
        [f"The teacher is imported: {len(teacher)} tensors."]
        if is_whole
        else ["The file has no matching teacher, so the teacher starts as a copy of the model."]
    )
    stored = {name: "teacher/" if name == names[3] else "buffer/teacher:" for name in names}
    assert found.keys() == {"criterion/center"} | {stored[name] + name for name in names}
    assert all(torch.equal(found[stored[name] + name], wanted[name]) for name in names)
    # No teacher: of a method without one, and of distillation, whose teacher has weights of its own.
    assert _loss_parts(matched, foreign, {"config": tree | {"DISTILLATION": {}}})[1] == ["The center is imported."]
    method.has_teacher = False
    assert [part.name for part in _loss_parts(matched, foreign, {"config": tree})[0]] == ["criterion/center"]
    assert _loss_parts(matched, foreign, {}) == ([], [])
