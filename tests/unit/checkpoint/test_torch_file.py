"""Files of torch.save: what is written opens everywhere, and arrays, numbers and tensors of others come in whole."""

from __future__ import annotations

import argparse
import os
import pickle
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from vissl_zero.checkpoint import torch_file
from vissl_zero.checkpoint.shard_file import Entry
from vissl_zero.checkpoint.torch_file import (
    NumpyArray,
    _Dtype,
    _scalar,
    can_hold,
    is_plain_tensor,
    read_pickle,
    read_torch_file,
    write_torch_file,
)
from vissl_zero.errors import CheckpointError

REAL = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)


def test_every_format_and_shape_that_is_written_opens_in_torch(tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    tensors = {str(dtype): torch.arange(6).view(2, 3).to(dtype) for dtype in (*REAL, *WHOLE)}
    tensors |= {str(shape): torch.ones(shape) for shape in ((), (1,), (0,), (0, 3), (2, 0, 4), (2, 3, 4))}
    write_torch_file(path, [Entry.of(name, tensor) for name, tensor in tensors.items()])
    for is_mapped in (False, True):
        state = torch.load(path, weights_only=True, mmap=is_mapped)
        assert list(state) == list(tensors)
        for name, tensor in tensors.items():
            assert state[name].dtype == tensor.dtype and state[name].equal(tensor), name
            assert state[name].stride() == tensor.stride() and not state[name].requires_grad
    assert list(read_torch_file(path)) == list(tensors)
    assert not any(map(can_hold, (torch.float8_e4m3fn, torch.uint16, torch.complex64)))
    with pytest.raises(FileExistsError):
        write_torch_file(path, [])


def test_data_begin_where_they_can_be_mapped(tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    write_torch_file(path, [Entry.of("w" * count, torch.arange(count)) for count in range(1, 70)])
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        members = {member.filename: member for member in archive.infolist()}
        for member in members.values():
            file.seek(member.header_offset + 26)
            name_bytes, extra_bytes = (int.from_bytes(file.read(2), "little") for _ in range(2))
            assert (member.header_offset + 30 + name_bytes + extra_bytes) % 64 == 0, member.filename
            assert extra_bytes < 64 + 4, "no more padding than that takes"
        assert {"archive/data.pkl", "archive/byteorder", "archive/version", "archive/data/68"} <= members.keys()
        assert archive.read("archive/byteorder") == b"little" and archive.read("archive/version") == b"3\n"
        assert archive.read("archive/data/2") == torch.arange(3).numpy().tobytes()


def test_a_field_for_large_files_moves_the_data_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond 4 GiB less 5 %, zipfile adds 20 bytes of its own."""
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 2100)
    path = tmp_path / "weights.pt"
    for numel in (240, 250, 251, 260, 300):  # 1.05 * 8 * 250 == 2100
        path.unlink(missing_ok=True)
        write_torch_file(path, [Entry.of("w", torch.arange(numel))])
        with zipfile.ZipFile(path) as archive, path.open("rb") as file:
            offset = archive.getinfo("archive/data/0").header_offset
            file.seek(offset + 26)
            sizes = [int.from_bytes(file.read(2), "little") for _ in range(2)]
        assert (offset + 30 + sum(sizes)) % 64 == 0, numel


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("text", ["?", "i1", "<i2", ">i2", "i4", ">i8", "u1", "f2", "<f4", ">f4", "f8", ">f8"])
@pytest.mark.parametrize("protocol", [0, 2])
def test_arrays_and_numbers_of_numpy_are_read(protocol: int, text: str, order: Any, tmp_path: Path) -> None:
    array = np.array([[0, 1, 2], [3, 4, 5]]).astype(text, order=order)
    (tmp_path / "a.pkl").write_bytes(pickle.dumps([array, array[1, 2]], protocol))
    taken, number = read_pickle(tmp_path / "a.pkl")
    tensor = taken.tensor()
    assert tensor.tolist() == array.tolist() and tensor.is_contiguous()
    assert tensor.dtype == torch.from_numpy(array.astype(array.dtype.newbyteorder("="))).dtype
    assert number == array[1, 2].item() and type(number) is type(array[1, 2].item())


@pytest.mark.parametrize(
    "array",
    [
        np.array(["a", "bc"]),
        np.array([b"a"]),
        np.array([1 + 2j]),
        np.array(["2020-01-01"], dtype="datetime64[D]"),
        np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f4")]),
        np.array([1], dtype=object),
    ],
    ids=lambda array: str(array.dtype),
)
def test_arrays_of_anything_but_numbers_are_nothing(array: Any, tmp_path: Path) -> None:
    (tmp_path / "a.pkl").write_bytes(pickle.dumps(array, 2))
    assert read_pickle(tmp_path / "a.pkl").tensor() is None


@pytest.mark.parametrize(
    ("shape", "data", "reason"),
    [
        ((2,), b"1234567", "do not fit its shape"),
        ((2,), b"123456789", "do not fit its shape"),
        ((-2,), b"", "impossible shape"),
        ((2.0,), b"12345678", "impossible shape"),
        ((True, 2), b"12345678", "impossible shape"),
        ((2,), bytearray(8), "impossible shape"),
    ],
)
def test_arrays_that_claim_more_than_they_have_are_refused(shape: Any, data: Any, reason: str) -> None:
    NumpyArray().__setstate__((1, (2,), _Dtype("f4"), False, b"12345678"))
    with pytest.raises(ValueError, match=reason):
        NumpyArray().__setstate__((1, shape, _Dtype("f4"), False, data))


def test_numbers_are_of_a_known_format_and_as_long_as_it_is() -> None:
    assert _scalar(_Dtype("i2"), b"\1\1") == 257
    assert _scalar("i2", b"\1\1") is _scalar(_Dtype("O"), b"\1\1") is _scalar(_Dtype("i2"), "ab") is None
    assert _Dtype(3).text is _Dtype("V8").text is None
    with pytest.raises(ValueError, match="do not fit its type"):
        _scalar(_Dtype("i4"), b"\1\1")


def test_what_counts_as_a_plain_tensor() -> None:
    values = torch.arange(6.0)
    plain: list[Any] = [values, values[2:], values.view(2, 3).T, nn.Parameter(values), torch.zeros(0), torch.tensor(1)]
    other: list[Any] = [
        values.expand(2, 6),
        values.to("meta"),
        values.to_sparse(),
        values.to(torch.complex64),
        torch.nested.nested_tensor([values, values[:2]]),
        torch.quantize_per_tensor(values, 0.1, 0, torch.qint8),
        nn.Buffer(values).as_subclass(_Subclass),
        [1.0],
        None,
    ]
    assert all(map(is_plain_tensor, plain)) and not any(map(is_plain_tensor, other))


class _Subclass(Tensor):
    """Not torch's own."""


class _Runs:
    def __reduce__(self) -> Any:
        return os.system, ("true",)


@pytest.mark.parametrize("is_zip", [True, False])
def test_both_forms_of_torchs_files_are_read_and_run_nothing(is_zip: bool, tmp_path: Path) -> None:
    path, content = tmp_path / "a.pt", {"w": torch.arange(3.0), "numbers": np.arange(2), "epoch": 3}
    torch.save(content, path, _use_new_zipfile_serialization=is_zip)
    state = read_torch_file(path)
    assert state["w"].tolist() == [0.0, 1.0, 2.0] and state["numbers"].tensor().tolist() == [0, 1]
    assert state["epoch"] == 3
    torch.save({**content, "more": _Runs()}, path, _use_new_zipfile_serialization=is_zip)
    with pytest.raises(CheckpointError, match=r"holds more than data \(posix\.system\)"):
        read_torch_file(path)


@pytest.mark.parametrize("is_zip", [True, False])
def test_the_arguments_of_a_training_program_are_left_out(is_zip: bool, tmp_path: Path) -> None:
    arguments = argparse.Namespace(arch="vit_tiny", output_dir=tmp_path, nested=argparse.Namespace(lr=1.0))
    file = tmp_path / "a.pt"
    torch.save({"w": torch.arange(3.0), "args": arguments}, file, _use_new_zipfile_serialization=is_zip)
    state = read_torch_file(file)
    assert state["w"].tolist() == [0.0, 1.0, 2.0] and not vars(state["args"])
    # Only what they are is harmless: what they hold is checked too.
    torch.save({"args": argparse.Namespace(lr=_Runs())}, file, _use_new_zipfile_serialization=is_zip)
    with pytest.raises(CheckpointError, match=r"holds more than data \(posix\.system\)"):
        read_torch_file(file)


def test_a_pickle_has_a_largest_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = pickle.dumps(["a" * 50, 1], 2)
    last = len(content) - 1  # where its last opcode begins
    (tmp_path / "a.pkl").write_bytes(content)
    monkeypatch.setattr(torch_file, "_MAX_PICKLE_BYTES", last)
    read_pickle(tmp_path / "a.pkl")
    monkeypatch.setattr(torch_file, "_MAX_PICKLE_BYTES", last - 1)
    with pytest.raises(CheckpointError, match=f"its pickle has more than {last - 1} bytes"):
        read_pickle(tmp_path / "a.pkl")


def test_a_link_that_the_user_names_is_followed(tmp_path: Path) -> None:
    (tmp_path / "a.pkl").write_bytes(pickle.dumps([1], 2))
    torch.save({"w": torch.ones(1)}, tmp_path / "a.pt")
    for name in ("a.pkl", "a.pt"):
        (tmp_path / f"link.{name}").symlink_to(tmp_path / name)
    assert read_pickle(tmp_path / "link.a.pkl") == [1]
    assert read_torch_file(tmp_path / "link.a.pt")["w"].tolist() == [1.0]


@pytest.mark.parametrize("is_zip", [True, False])
def test_a_file_of_another_pickle_protocol_is_read_without_a_warning(is_zip: bool, tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    torch.save({"a": torch.arange(3)}, path, pickle_protocol=3, _use_new_zipfile_serialization=is_zip)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read_torch_file(path)["a"].tolist() == [0, 1, 2]


def test_a_damaged_file_is_one_sentence_whatever_torch_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.pt"
    torch.save({"w": torch.ones(1)}, path)
    for error, reason in ((ValueError("odd\n  " + "x" * 200), f"odd {'x' * 116}"), (KeyError(), "KeyError")):

        def fails(*_: Any, error: Exception = error, **__: Any) -> None:
            raise error

        monkeypatch.setattr(torch, "load", fails)
        with pytest.raises(CheckpointError) as caught:
            read_torch_file(path)
        assert str(caught.value) == f"{path} is damaged, or not a torch.save file ({reason}). Copy it again."
