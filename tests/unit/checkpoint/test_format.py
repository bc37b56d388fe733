"""The files of a checkpoint: what is written comes back in any cut, and nothing damaged or foreign is taken."""

from __future__ import annotations

import json
import os
import pickle
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from vissl_zero.checkpoint import find_checkpoints, newest_checkpoint, open_checkpoint
from vissl_zero.checkpoint.folder import (
    LaterFormatError,
    Manifest,
    prune,
    read_json,
    remove_leftovers,
    write_json,
)
from vissl_zero.checkpoint.resume import find_resumable
from vissl_zero.checkpoint.saver import commit, write_rank
from vissl_zero.checkpoint.shard_file import CHECKSUMS, Entry, _header_digest, write_shard_file
from vissl_zero.checkpoint.weights import open_weights
from vissl_zero.errors import CheckpointError
from vissl_zero.sharding.state.saved_state import Part

NUM_RANKS = 3
TENSORS = {
    "model/trunk.stem.0.weight": torch.arange(35.0, dtype=torch.float64).view(7, 5),
    "model/heads.0.weight": torch.arange(11, dtype=torch.float32).to(torch.bfloat16),
    "model/scalar": torch.tensor(3.0),
    "optimizer/momentum_buffer/trunk.stem.0.weight": torch.randn(7, 5, dtype=torch.float64),
    "buffer/num_batches": torch.tensor([5]),
    "model/nothing": torch.zeros(0, 4),
}


def _cut(tensor: torch.Tensor, rank: int) -> tuple[int, int]:
    """Uneven runs; the last rank has what the others leave."""
    bounds = [0, tensor.numel() // 5, tensor.numel() // 2, tensor.numel()]
    return bounds[rank], bounds[rank + 1]


def write(folder: Path, step: int) -> Path:
    for rank in range(NUM_RANKS):
        parts = []
        for name, tensor in TENSORS.items():
            begin, end = _cut(tensor, rank)
            if end > begin or (rank == 0 and not tensor.numel()):
                flat = tensor.reshape(-1)[begin:end]
                parts.append(Part(name, tensor.shape, begin, end - begin, tensor.dtype, lambda flat=flat: flat))
        scalars = {"trunk.stem.0.weight": {"step": {"dtype": "float32", "value": 4.0}}} if rank == 1 else {}
        write_rank(folder, step, rank, parts, scalars, {"torch": "ab"})
    return commit(folder, _manifest(step, NUM_RANKS))


def _manifest(step: int, num_ranks: int) -> Manifest:
    return Manifest(
        step=step,
        epoch=1,
        epoch_samples=12,
        position=48,
        world_size=num_ranks,
        level=3,
        engine="torch",
        global_batch=12,
        recipe="r",
        vissl_zero="0",
        torch="2",
        created="2026-01-01T00:00:00Z",
        ranks={},
        config={"config": {"IMPORTS": ["os"]}},
    )


def test_any_range_of_any_tensor_comes_back(tmp_path):
    with open_checkpoint(write(tmp_path, 4)) as checkpoint:
        assert list(checkpoint.verify()) == []
        assert checkpoint.manifest.step == 4 and checkpoint.manifest.config["config"]["IMPORTS"] == ["os"]
        assert checkpoint.scalars("trunk.stem.0.weight") == {"step": {"dtype": "float32", "value": 4.0}}
        assert checkpoint.tensors.keys() == TENSORS.keys()
        for name, tensor in TENSORS.items():
            info = checkpoint.tensors[name]
            assert (info.dtype, info.shape) == (tensor.dtype, tuple(tensor.shape))
            assert torch.equal(checkpoint.read(name), tensor)
            for begin in range(tensor.numel()):
                for end in range(begin, tensor.numel() + 1):
                    expected = tensor.reshape(-1)[begin:end]
                    assert torch.equal(checkpoint.read_range(name, begin, end - begin), expected)
        other_type = torch.empty(35, dtype=torch.float32)
        checkpoint.read_into("model/trunk.stem.0.weight", 0, other_type)
        assert torch.equal(other_type, torch.arange(35.0))
        with pytest.raises(CheckpointError, match="34 to 36 were asked for"):
            checkpoint.read_range("model/trunk.stem.0.weight", 34, 2)


def test_a_piece_without_elements_hides_none_that_begins_where_it_does(tmp_path):
    whole = torch.arange(4.0)
    for rank, flat in enumerate((whole, whole[:0])):
        part = Part("model/w", whole.shape, 0, flat.numel(), whole.dtype, lambda flat=flat: flat)
        write_rank(tmp_path, 4, rank, [part], {}, {})
    with open_checkpoint(commit(tmp_path, _manifest(4, num_ranks=2))) as checkpoint:
        assert torch.equal(checkpoint.read("model/w"), whole)


@pytest.mark.parametrize("length", range(8))
def test_data_begin_at_a_multiple_of_eight_bytes_whatever_the_header_takes(tmp_path: Path, length: int) -> None:
    path = tmp_path / "weights.safetensors"
    write_shard_file(path, [Entry.of("w" * (length + 1), torch.arange(3.0))])
    (header_bytes,) = struct.unpack("<Q", path.read_bytes()[:8])
    assert header_bytes % 8 == 0
    assert load_file(path)["w" * (length + 1)].tolist() == [0.0, 1.0, 2.0]


def test_the_data_files_are_plain_safetensors(tmp_path):
    path = write(tmp_path, 4)
    tensors = load_file(path / "rank00002.safetensors")
    assert torch.equal(tensors["model/heads.0.weight"], TENSORS["model/heads.0.weight"][5:])


@pytest.mark.parametrize("name", ["manifest.json", "rank00001.json", "rank00001.safetensors"])
@pytest.mark.parametrize("how", ["missing", "empty", "cut", "longer", "pickle", "text", "link", "fifo", "folder"])
def test_what_is_not_whole_does_not_open(tmp_path, name, how):
    path = write(tmp_path, 4)
    target, canary = path / name, tmp_path / "canary"
    data = target.read_bytes()
    if how == "missing":
        target.unlink()
    elif how == "link":
        target.rename(tmp_path / "elsewhere")
        target.symlink_to(tmp_path / "elsewhere")
    elif how in ("fifo", "folder"):
        target.unlink()
        os.mkfifo(target) if how == "fifo" else target.mkdir()
    else:
        target.write_bytes(
            {
                "empty": b"",
                "cut": data[: len(data) * 2 // 3],
                "longer": data + b"\0",
                "pickle": pickle.dumps(_Payload(f"touch {canary}")),
                "text": b"import os\nos.system('touch %s')\n" % str(canary).encode(),
            }[how]
        )
    with pytest.raises(CheckpointError, match=str(path)):
        open_checkpoint(path)
    assert not canary.exists()
    write(tmp_path, 3)
    (tmp_path / "manifest.json").write_text("{}")  # somebody else's
    assert find_resumable(tmp_path).path == path.with_name("step_000000003")


class _Payload:
    def __init__(self, command: str):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


def test_every_flipped_bit_is_found(tmp_path):
    path = write(tmp_path, 4)
    for target in sorted(path.iterdir()):
        data = bytearray(target.read_bytes())
        for place in range(0, len(data), 7):
            bit = 1 << place % 8
            data[place] ^= bit
            target.write_bytes(data)
            try:
                with open_checkpoint(path) as checkpoint:
                    problems = list(checkpoint.verify())
                    # A blank between JSON tokens may turn into another blank, and nothing has changed.
                    assert problems or (target.suffix == ".json" and bytes([data[place]]).isspace()), (
                        target.name,
                        place,
                    )
            except CheckpointError:
                pass
            data[place] ^= bit
        target.write_bytes(data)
    with open_checkpoint(path) as checkpoint:
        assert list(checkpoint.verify()) == []


@pytest.mark.parametrize("stem", ["../../secret", "/etc/passwd", "rank00001/../../x", "rank1", ""])
def test_names_that_lead_elsewhere_are_refused(tmp_path, stem):
    path = write(tmp_path, 4)
    _change(path / "manifest.json", lambda body: body["ranks"].update({stem: "0" * 16}))
    with pytest.raises(CheckpointError, match="files belong to a checkpoint"):
        open_checkpoint(path)


@pytest.mark.parametrize("value", [-1, 2**63, 1.0, True, "4", None])
@pytest.mark.parametrize("key", ["step", "world_size"])
def test_a_number_in_a_manifest_that_counts_nothing_is_refused(tmp_path: Path, key: str, value: Any) -> None:
    path = write(tmp_path, 4)
    _change(path / "manifest.json", lambda body: body.update({key: value}))
    with pytest.raises(CheckpointError, match=r"has fields of the wrong kind\.$"):
        open_checkpoint(path)


@pytest.mark.parametrize("value", [-1, 2**63, 1.0, True, "4", None])
@pytest.mark.parametrize("key", ["first_element", "num_elements"])
def test_a_number_of_a_piece_that_counts_nothing_is_refused(tmp_path: Path, key: str, value: Any) -> None:
    path = write(tmp_path, 4)
    changed = _change(path / "rank00001.json", lambda body: next(iter(body["pieces"].values())).update({key: value}))
    _change(path / "manifest.json", lambda body: body["ranks"].update({"rank00001": changed}))
    with pytest.raises(CheckpointError, match="lacks what a rank's manifest must have"):
        open_checkpoint(path)


def test_a_later_version_and_foreign_json_are_named(tmp_path):
    path = write(tmp_path, 4)
    manifest = path / "manifest.json"
    text = manifest.read_text()
    manifest.write_text(text.replace('"format_version": 1', '"format_version": 7'))
    with pytest.raises(LaterFormatError, match="format version 7"):
        open_checkpoint(path)
    manifest.write_text('{"weight_map": {}}')
    with pytest.raises(CheckpointError, match="not part of a vissl_zero checkpoint"):
        open_checkpoint(path)
    manifest.write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match="is damaged"):
        open_checkpoint(path)


@pytest.mark.parametrize("name", ["manifest.json", "rank00001.json"])
def test_a_checkpoint_of_a_later_version_is_neither_passed_over_nor_replaced(tmp_path, name):
    write(tmp_path, 3)
    path = write(tmp_path, 4)
    text = (path / name).read_text().replace('"format_version": 1', '"format_version": 2')
    (path / name).write_text(text)
    for find in (find_resumable, newest_checkpoint):
        with pytest.raises(LaterFormatError, match=rf"{name} has format version 2"):
            find(tmp_path)
    if name == "manifest.json":
        with pytest.raises(LaterFormatError, match="format version 2"):
            write(tmp_path, 4)
    assert (path / name).read_text() == text


def test_a_save_does_not_follow_links(tmp_path):
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "rank00000.json").write_text("mine")
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    (tmp_path / "run/checkpoints/.step_000000004.partial").symlink_to(mine)
    remove_leftovers(tmp_path / "run")
    (tmp_path / "run/checkpoints/step_000000004").symlink_to(mine)
    assert list(open_checkpoint(write(tmp_path / "run", 4)).verify()) == []
    assert [(p.name, p.read_text()) for p in mine.iterdir()] == [("rank00000.json", "mine")]


def test_a_flipped_bit_in_any_byte_of_a_file_of_weights_is_found(tmp_path):
    path = tmp_path / "weights.safetensors"
    entries = [Entry.of(name.replace("/", "."), tensor) for name, tensor in TENSORS.items()]
    write_shard_file(path, entries, {"recipe": "r"}, with_checksums=True)
    assert all(torch.equal(load_file(path)[entry.key], entry.read()) for entry in entries)
    data = bytearray(path.read_bytes())
    for place in range(len(data)):
        bit = 1 << place % 8
        data[place] ^= bit
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match="is damaged"), open_weights(path) as weights:
            weights.require_undamaged()
        data[place] ^= bit


def test_what_is_read_is_closed(tmp_path):
    path = tmp_path / "weights.safetensors"
    write_shard_file(path, [Entry.of("trunk.weight", torch.ones(3))], {}, with_checksums=True)
    (tmp_path / "damaged.safetensors").write_bytes(path.read_bytes()[:20])

    def num_open() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    before = num_open()
    for weights_path in (path, write(tmp_path, 4)):
        with open_weights(weights_path) as weights:
            for name in weights.tensors:
                weights.read(name)
            assert num_open() > before
        assert num_open() == before
    with pytest.raises(CheckpointError):
        open_weights(tmp_path / "damaged.safetensors")
    assert num_open() == before


def test_files_of_two_checkpoints_do_not_mix(tmp_path):
    path = write(tmp_path, 4)
    _change(path / "rank00001.json", lambda body: body["rng"].update(torch="cd"))
    with pytest.raises(CheckpointError, match="not the file that the manifest lists"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    "change",
    [
        {"first_element": "0"},
        {"num_elements": -1},
        {"shape": None},
        {"shape": [-1]},
        {"shape": [2**40, 2**40, 0]},
        {"dtype": "PICKLE"},
        {"dtype": ["F32"]},
        {"digest": 3},
    ],
)
def test_fields_of_the_wrong_kind_are_refused(tmp_path, change):
    path = write(tmp_path, 4)
    digest = _change(path / "rank00001.json", lambda body: body["pieces"]["model/heads.0.weight"].update(change))
    _change(path / "manifest.json", lambda manifest: manifest["ranks"].update(rank00001=digest))
    with pytest.raises(CheckpointError, match=str(path)):
        open_checkpoint(path)


def test_parts_must_make_up_the_whole(tmp_path):
    path = write(tmp_path, 4)
    piece = "model/trunk.stem.0.weight"
    body = _change(path / "rank00001.json", lambda body: body["pieces"][piece].update(first_element=8))
    _change(path / "manifest.json", lambda manifest: manifest["ranks"].update(rank00001=body))
    with pytest.raises(CheckpointError, match="overlap or leave gaps"):
        open_checkpoint(path)


def test_a_header_that_points_outside_its_file_is_refused(tmp_path):
    path = write(tmp_path, 4) / "rank00000.safetensors"
    header = json.dumps({"x": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 64)
    with pytest.raises(CheckpointError, match="is damaged"):
        open_checkpoint(path.parent)


@pytest.mark.parametrize("shape", [[-2, -1], [True, 2], [2.0], [1] * 64 + [2], [2, "1"]])
def test_a_shape_that_no_tensor_has_is_refused(tmp_path, shape):
    header = json.dumps({"x": {"dtype": "F32", "shape": shape, "data_offsets": [0, 8]}}).encode()
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 8)
    with pytest.raises(CheckpointError, match="its header is invalid"):
        open_weights(tmp_path / "x.safetensors")


def test_every_tensor_of_a_file_with_checksums_needs_its_own(tmp_path):
    path = tmp_path / "x.safetensors"
    write_shard_file(path, [Entry.of(name, torch.ones(2)) for name in "ab"], {}, with_checksums=True)
    (length,), data = struct.unpack("<Q", path.read_bytes()[:8]), path.read_bytes()
    header = json.loads(data[8 : 8 + length])
    checksums = json.loads(header["__metadata__"][CHECKSUMS])
    del checksums["tensors"]["a"]
    header["__metadata__"][CHECKSUMS] = json.dumps(checksums)
    path.write_bytes(data[:8] + json.dumps(header).encode().ljust(length) + data[8 + length :])
    with pytest.raises(CheckpointError, match="its header is invalid"):
        open_weights(path)


def test_the_newest_that_opens_is_found_and_old_ones_are_pruned(tmp_path):
    for step in (1, 2, 3, 4, 6):
        write(tmp_path, step)
    (tmp_path / "checkpoints" / "notes.txt").write_text("mine")
    (tmp_path / "checkpoints" / ".step_000000009.partial").mkdir()
    assert [path.name for path in find_checkpoints(tmp_path)] == [f"step_{step:09d}" for step in (6, 4, 3, 2, 1)]
    (tmp_path / "checkpoints" / "step_000000006" / "manifest.json").unlink()
    assert newest_checkpoint(tmp_path).manifest.step == 4
    assert remove_leftovers(tmp_path) == [".step_000000009.partial"]
    assert prune(tmp_path, keep_last=-1, keep_every=-1) == []
    removed = prune(tmp_path, keep_last=2, keep_every=3)
    assert [path.name for path in removed] == [f"step_{step:09d}" for step in (2, 1)]
    assert [path.name for path in find_checkpoints(tmp_path)] == [f"step_{step:09d}" for step in (6, 4, 3)]
    assert (tmp_path / "checkpoints" / "notes.txt").exists()


def test_a_second_try_takes_the_place_of_the_first(tmp_path):
    write(tmp_path, 4)
    assert list(open_checkpoint(write(tmp_path, 4)).verify()) == []
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_000000004"]


def _change(path: Path, change) -> str:
    """Change the body of a JSON file and give it the checksum that fits, as an attacker would."""
    body, _ = read_json(path)
    change(body)
    path.unlink()
    return write_json(path, body)


def test_a_tensor_that_safetensors_has_no_name_for_is_refused_by_its_own(tmp_path: Path) -> None:
    phases = Entry.of("buffer/phases", torch.ones(2, dtype=torch.complex128))
    with pytest.raises(CheckpointError, match=r"buffer/phases is of torch.complex128.*persistent=False"):
        write_shard_file(tmp_path / "a.safetensors", [phases])


def test_a_damaged_one_that_is_passed_over_is_closed(tmp_path: Path) -> None:
    write(tmp_path, 1)
    path = next(write(tmp_path, 2).glob("*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    before, passed_over = len(list(Path("/proc/self/fd").iterdir())), list[str]()
    with newest_checkpoint(tmp_path, with_data=True, passed_over=passed_over) as checkpoint:
        assert checkpoint.manifest.step == 1
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert len(passed_over) == 1 and path.name in passed_over[0]


def test_a_header_of_an_earlier_version_still_has_its_checksum() -> None:
    """Whatever the order of its keys, and whatever has been said of its tensors."""
    header = {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, "__metadata__": {"b": "1", "a": "2"}}
    other = {
        "__metadata__": {"a": "2", CHECKSUMS: "{}", "b": "1"},
        "w": {key: header["w"][key] for key in sorted(header["w"])},
    }
    assert _header_digest(header) == _header_digest(other) == "504660b8ef401c29"
    assert _header_digest({**header, "__metadata__": {"a": "2"}}) != _header_digest(header)


def test_a_file_may_be_as_deep_as_a_hundred_levels(tmp_path: Path) -> None:
    text = "{}"
    for level in range(99):
        text = ("[1, %s]" if level % 2 else '{"a": %s}') % text
    write_json(tmp_path / "deep.json", json.loads(text))
    assert read_json(tmp_path / "deep.json")[0] == json.loads(text)
    write_json(tmp_path / "deeper.json", json.loads(text.replace("{}", "[{}]")))
    with pytest.raises(CheckpointError, match=r"deeper\.json is damaged: it is nested deeper than 100 levels"):
        read_json(tmp_path / "deeper.json")
