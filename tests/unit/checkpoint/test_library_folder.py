"""Which files of a folder of transformers or timm are its weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from vissl_zero.checkpoint.foreign_layouts import read_foreign
from vissl_zero.checkpoint.library_folder import at_root, is_library_folder, library_files
from vissl_zero.checkpoint.shard_file import Entry
from vissl_zero.errors import CheckpointError

TENSORS, PICKLED = "model.safetensors", "pytorch_model.bin"


def _folder(path: Path, files: dict[str, Any]) -> Path:
    for name, index in files.items():
        (path / name).write_text(json.dumps({"weight_map": index}) if isinstance(index, dict) else index)
    return path


@pytest.mark.parametrize(
    ("files", "weights"),
    [
        ({TENSORS: ""}, [TENSORS]),
        ({PICKLED: ""}, [PICKLED]),
        ({PICKLED: "", TENSORS: ""}, [TENSORS]),
        ({PICKLED: "", f"{TENSORS}.index.json": {"a": "2.st", "b": "1.st", "c": "2.st"}, "1.st": "", "2.st": ""},
         ["1.st", "2.st"]),
        ({f"{PICKLED}.index.json": {"a": "1.bin"}, "1.bin": "", "2.bin": ""}, ["1.bin"]),
    ],
)  # fmt: skip
def test_whole_files_come_before_parts_and_safetensors_before_pickles(
    tmp_path: Path, files: dict[str, Any], weights: list[str]
) -> None:
    folder = _folder(tmp_path, files)
    assert is_library_folder(folder)
    assert library_files(folder) == [tmp_path / name for name in weights]


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({}, "holds no weights"),
        ({"other.safetensors": ""}, "holds no weights"),
        ({f"{TENSORS}.index.json": "{"}, "is not a valid index of weights"),
        ({f"{TENSORS}.index.json": "[]"}, "is not a valid index of weights"),
        ({f"{TENSORS}.index.json": {"a": "../1.st"}, "1.st": ""}, "leads out of"),
        ({f"{TENSORS}.index.json": {"a": 1}}, "leads out of"),
        ({f"{TENSORS}.index.json": {"a": "1.st", "b": "2.st"}, "1.st": ""}, r"lists 2\.st, which is not in its folder"),
    ],
)
def test_a_folder_without_weights_is_refused(tmp_path: Path, files: dict[str, Any], reason: str) -> None:
    with pytest.raises(CheckpointError, match=reason):
        library_files(_folder(tmp_path, files))


def test_a_folder_of_other_files_is_none_of_a_library(tmp_path: Path) -> None:
    assert not is_library_folder(_folder(tmp_path, {"other.safetensors": "", "config.json": ""}))


@pytest.mark.parametrize("pickled", [(), ("1",), ("1", "2"), ("2",), ("1", "2", "3")])
def test_every_file_of_a_folder_is_read_whatever_its_form(pickled: tuple[str, ...], tmp_path: Path) -> None:
    for name in ("1", "2", "3"):
        tensors = {f"layer{name}.weight": torch.full((2,), float(name))}
        (torch.save if name in pickled else save_file)(tensors, tmp_path / name)
    _folder(tmp_path, {f"{TENSORS}.index.json": {"a": "1", "b": "2", "c": "3"}})
    foreign = read_foreign(tmp_path)
    assert {entry.key: entry.read().tolist() for entry in foreign.entries} == {
        f"layer{name}.weight": [float(name)] * 2 for name in ("1", "2", "3")
    }


def _at_root(*names: str) -> tuple[list[str], str]:
    entries, note = at_root([Entry.of(name, torch.ones(1)) for name in names])
    return [entry.key for entry in entries], note


def test_of_several_networks_the_average_is_taken_and_the_others_named() -> None:
    mark = "patch_embed.proj.weight"
    student, teacher = f"student.{mark}", f"teacher.backbone.{mark}"
    taken = ([mark], ", its teacher.backbone (left out: student)")
    assert _at_root(student, teacher, "teacher.head.w") == taken
    assert _at_root(teacher, student) == taken
    assert _at_root(f"target_net.{mark}", f"ema.{mark}") == ([mark], ", its ema (left out: target_net)")
    assert _at_root(f"b.{mark}", f"a.{mark}") == ([mark], ", its a (left out: b)")  # by name
    assert _at_root(f"backbone.{mark}", f"encoder_q.{mark}") == ([mark], ", its encoder_q (left out: backbone)")
    four = [f"{name}.{mark}" for name in ("d", "c", "b", "a")]
    assert _at_root(*four) == ([mark], ", its a (left out: b, c, d)")
    # Five are layers of one network.
    assert _at_root(*four, f"e.{mark}") == ([*four, f"e.{mark}"], "")


def test_one_network_keeps_what_is_beside_it() -> None:
    mark = "conv1.weight"
    assert _at_root("odd.conv1.weight", "odd.layer1.0.conv1.weight", "head.w") == (
        ["conv1.weight", "layer1.0.conv1.weight", "head.w"],
        "",
    )
    # What is here already under the name that it would get is not taken twice.
    assert _at_root("odd.conv1.weight", "odd.head.w", "head.w") == (["conv1.weight", "head.w"], "")
    # A prefix that every reader takes off is left to it.
    assert _at_root(f"module.{mark}", "module.fc.w") == ([f"module.{mark}", "module.fc.w"], "")
    assert _at_root(mark, "fc.w") == ([mark, "fc.w"], "") and _at_root("fc.w") == (["fc.w"], "")
