"""Where weights from elsewhere are written to, and what is said of the state of their optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from tests.unit.checkpoint.test_format import write
from vissl_zero.checkpoint import find_checkpoints, open_checkpoint
from vissl_zero.checkpoint.exchange import _some, export, write_imported
from vissl_zero.checkpoint.first_weights import Match
from vissl_zero.checkpoint.foreign_layouts import Foreign
from vissl_zero.checkpoint.foreign_state import OptimizerState
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
