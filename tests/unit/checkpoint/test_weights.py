"""What a path stands for: a file of weights, a checkpoint, or a run, and which of the models in it."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.unit.checkpoint.test_format import NUM_RANKS, _manifest, write
from vissl_zero.checkpoint import open_checkpoint, shard_file
from vissl_zero.checkpoint.folder import Checkpoint
from vissl_zero.checkpoint.saver import commit, write_rank
from vissl_zero.checkpoint.shard_file import DTYPES, Entry, in_file_order, write_shard_file
from vissl_zero.checkpoint.weights import (
    WeightsFile,
    config_of,
    final_step,
    is_torch_file,
    open_store,
    open_weights,
    weights_of,
)
from vissl_zero.errors import CheckpointError
from vissl_zero.sharding.state.saved_state import Part


def _file(path: Path, step: str | None = None, **tensors: torch.Tensor) -> Path:
    entries = [Entry.of(name, tensor) for name, tensor in (tensors or {"w": torch.ones(2)}).items()]
    write_shard_file(path, entries, None if step is None else {"step": step}, with_checksums=True)
    return path


def test_a_file_holds_every_format_the_widest_first(tmp_path: Path) -> None:
    tensors = {name: torch.arange(5).to(dtype) for name, dtype in DTYPES.items()}
    path = _file(tmp_path / "all.safetensors", **tensors)
    for name, tensor in load_file(path).items():
        assert tensor.dtype == DTYPES[name] and tensor.equal(tensors[name])
    entries = [Entry.of(name, tensor) for name, tensor in tensors.items()]
    sizes = [entry.dtype.itemsize for entry in in_file_order(entries)]
    assert sizes == sorted(sizes, reverse=True)
    assert list(WeightsFile(path).tensors) == sorted(tensors)


def test_checksums_are_of_all_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_file, "SLICE_BYTES", 16)
    path = _file(tmp_path / "a.safetensors", w=torch.arange(11.0), v=torch.arange(3, dtype=torch.int8), e=torch.ones(0))
    file = WeightsFile(path)
    assert file.has_checksums and list(file.verify()) == []
    for back in (1, 4, 17, 30, 43):  # v, then w from its end
        damaged = bytearray(path.read_bytes())
        damaged[-back] ^= 1
        (tmp_path / "b.safetensors").write_bytes(damaged)
        (sentence,) = WeightsFile(tmp_path / "b.safetensors").verify()
        assert f"the data of {'v' if back < 4 else 'w'} do not fit" in sentence
        with pytest.raises(CheckpointError, match="do not fit their checksum"):
            open_store(tmp_path / "b.safetensors", with_data=True)
        open_store(tmp_path / "b.safetensors")


@pytest.mark.parametrize(
    ("text", "step"),
    [
        *(("12", 12), ("0", 0), ("9" * 19, int("9" * 19)), ("9" * 20, None), (None, None), ("", None)),
        *((text, None) for text in ("-1", "1.5", "\u0661", "\u00b2")),
    ],
)
def test_the_step_of_the_weights_at_the_end_of_a_run(text: str | None, step: int | None, tmp_path: Path) -> None:
    assert final_step(tmp_path) is None
    _file(tmp_path / "weights.safetensors", text)
    assert final_step(tmp_path) == step


@pytest.mark.parametrize(
    ("step", "is_file"), [("3", False), ("4", False), ("5", True), (None, False)], ids=lambda value: str(value)
)
def test_of_a_run_the_newest_weights_count(step: str | None, is_file: bool, tmp_path: Path) -> None:
    for number in (2, 4):
        write(tmp_path, number)
    _file(tmp_path / "weights.safetensors", step)
    with_file = open_store(tmp_path)
    assert isinstance(with_file, WeightsFile) == is_file
    if isinstance(with_file, Checkpoint):
        assert with_file.manifest.step == 4
    checkpoint = open_store(tmp_path / "checkpoints" / "step_000000002")
    assert isinstance(checkpoint, Checkpoint) and checkpoint.manifest.step == 2


def test_a_newer_checkpoint_that_does_not_open_is_passed_over(tmp_path: Path) -> None:
    for number in (2, 4):
        write(tmp_path, number)
    (tmp_path / "checkpoints" / "step_000000004" / "manifest.json").write_text("{")
    passed_over: list[str] = []
    store = open_store(tmp_path, passed_over)
    assert isinstance(store, Checkpoint) and store.manifest.step == 2 and len(passed_over) == 1


def test_a_run_without_checkpoints_has_its_weights_alone(tmp_path: Path) -> None:
    _file(tmp_path / "weights.safetensors")
    assert isinstance(open_store(str(tmp_path)), WeightsFile)


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("weights.pt", b"PK\x03\x04....", "was written by torch.save. Convert it first: vissl-zero checkpoint import"),
        ("photo.JPG", b"\xff\xd8\xff", "is an image, not weights. Images are named after the weights"),
        ("other.safetensors", None, r"There is no .*other\.safetensors\..*Did you mean"),
        ("", None, "holds neither checkpoints nor weights.safetensors. Give a run folder"),
        ("photos", None, "holds images, not weights"),
        ("run", None, "holds neither checkpoints nor weights.safetensors. Give a run folder"),  # with a picture of it
    ],
)
def test_what_is_no_weights_is_named(name: str, content: bytes | None, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    if name in ("photos", "run"):
        path.mkdir()
        (path / "a.jpg").write_bytes(b"\xff\xd8\xff")
    if name == "run":
        (path / "config.resolved.yaml").touch()
    if name == "other.safetensors":
        _file(tmp_path / "others.safetensors")
    with pytest.raises(CheckpointError, match=sentence):
        open_store(path)


@pytest.mark.parametrize(
    ("start", "is_torchs"),
    [
        (b"PK\x03\x04", True),
        (b"PK\x05\x06", False),
        (b"\x80\x02c1234567", True),
        (b"\x80" + b"\0" * 7 + b"{}", False),  # a header of 128 bytes
        (struct.pack("<Q", 200) + b"{", False),
        (b"", False),
    ],
)
def test_files_of_torch_save_by_their_first_bytes(start: bytes, is_torchs: bool, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(start)
    assert is_torch_file(tmp_path / "file") is is_torchs
    assert not is_torch_file(tmp_path) and not is_torch_file(tmp_path / "nothing")


STORED = {
    "model/w": 1,
    "buffer/mean": 2,
    "average/w": 3,
    "buffer/average:mean": 4,
    "teacher/w": 5,
    "buffer/teacher:mean": 6,
    "optimizer/momentum_buffer/w": 7,
    "of_rank/1/buffer/mean": 8,
}
EXPECTED = {"student": {"w": 1, "mean": 2}, "average": {"w": 3, "mean": 4}, "teacher": {"w": 5, "mean": 6}}


def _checkpoint(folder: Path, names: Any) -> Checkpoint:
    parts = [
        Part(name, torch.Size((2,)), 0, 2, torch.float32, lambda name=name: torch.full((2,), float(STORED[name])))
        for name in names
    ]
    for rank in range(NUM_RANKS):
        write_rank(folder, 3, rank, parts if rank == 0 else [], {}, {})
    return open_checkpoint(commit(folder, _manifest(3, NUM_RANKS)))


@pytest.mark.parametrize("which", EXPECTED)
def test_each_model_of_a_checkpoint_under_its_plain_names(which: str, tmp_path: Path) -> None:
    with weights_of(_checkpoint(tmp_path, STORED), which) as weights:
        assert {name: weights.read(name).tolist() for name in weights.tensors} == {
            name: [float(value)] * 2 for name, value in EXPECTED[which].items()
        }
        assert weights.read_range("mean", 1, 1).tolist() == [float(EXPECTED[which]["mean"])]
        weights.require_undamaged()
        weights.require_undamaged(["mean"])


def test_a_model_that_a_checkpoint_lacks_is_refused(tmp_path: Path) -> None:
    store = _checkpoint(tmp_path, ["model/w", "buffer/mean"])
    assert list(weights_of(store).tensors) == ["w", "mean"]
    with pytest.raises(CheckpointError, match=r"holds no teacher\. docs/methods\.md says which methods have one"):
        weights_of(store, "teacher")
    with pytest.raises(CheckpointError, match=r"holds no running average\. config\.HOOKS\.EMA_MODEL"):
        weights_of(store, "average")


def test_a_file_holds_one_model_and_says_nothing_of_its_run(tmp_path: Path) -> None:
    store = open_store(_file(tmp_path / "weights.safetensors"))
    with pytest.raises(CheckpointError, match="holds one set of weights"):
        weights_of(store, "average")
    assert list(weights_of(store, "teacher").tensors) == ["w"]
    assert config_of(store) == {}  # no resolved recipe beside it
    (tmp_path / "config.resolved.yaml").write_text("{")
    assert config_of(store) == {}
    (tmp_path / "config.resolved.yaml").write_text("config: {SEED_VALUE: 3}")
    assert config_of(store) == {"config": {"SEED_VALUE": 3}}
    assert config_of(open_store(_file(tmp_path / "mine.safetensors"))) == {}  # it may be of another run
    with open_weights(tmp_path / "mine.safetensors") as weights:
        assert weights.read("w").tolist() == [1.0, 1.0]
