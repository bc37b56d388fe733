"""Layouts of files by other programs: where the state dict lies, and which step and epoch they say they are of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from vissl_zero.checkpoint.foreign_layouts import Foreign, _foreign, read_foreign
from vissl_zero.errors import CheckpointError

ONE = torch.ones(2)


def _consolidated(model: Any, **more: Any) -> dict[str, Any]:
    return {"classy_state_dict": {"base_model": {"model": model}}, **more}


def _read(content: Any, key: str = "") -> Foreign:
    return _foreign(content, key, Path("a.torch"))


@pytest.mark.parametrize(
    ("value", "step", "epoch"),
    [
        (0, 0, 1),
        (7, 7, 8),
        (-1, 0, 0),
        (2**53 - 1, 2**53 - 1, 2**53),
        (2**53, 0, 0),
        (1.5, 0, 0),
        ("7", 0, 0),
        (None, 0, 0),
    ],
)
def test_step_and_epoch_are_counts_or_not_told(value: Any, step: int, epoch: int) -> None:
    foreign = _read(_consolidated({"trunk": {"w": ONE}}, iteration=value, train_phase_idx=value))
    assert (foreign.iteration, foreign.epoch) == (step, epoch)
    foreign = _read(_consolidated({"trunk": {"w": ONE}}))
    assert (foreign.iteration, foreign.epoch, foreign.layout) == (0, 0, "VISSL, consolidated")


@pytest.mark.parametrize(
    ("content", "key", "layout"),
    [
        ({"net.w": ONE}, "", "a plain state dict"),
        ({"state_dict": {"net.w": ONE}, "epoch": 3}, "", "a torch file, at state_dict"),
        ({"model": {"net.w": ONE}, "optimizer": {}}, "", "a torch file, at model"),
        ({"a": {"b": {"net.w": ONE}}}, "a.b", "a torch file, at a.b"),
    ],
)
def test_the_state_dict_is_found_or_named(content: Any, key: str, layout: str, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "a.pth")
    foreign = read_foreign(tmp_path / "a.pth", key)
    assert foreign.layout.startswith(layout) and [entry.read().tolist() for entry in foreign.entries] == [[1.0, 1.0]]


def test_what_is_no_tensor_is_named_with_its_place() -> None:
    heads: dict[str, Any] = {"0.w": ONE, "0.note": "text"}
    foreign = _read(_consolidated({"trunk": {"w": ONE, 3: ONE, "count": 3}, "heads": heads}))
    assert [entry.key for entry in foreign.entries] == ["trunk.w", "heads.0.w"]
    assert foreign.no_tensors == ["trunk.3", "trunk.count", "heads.0.note"]
    foreign = _read(_consolidated({"trunk": 3, "heads": heads}))
    assert foreign.no_tensors == ["trunk", "heads.0.note"]


def _shards(folder: Path, models: list[Any], metas: list[Any], **more: Any) -> Path:
    for rank, (model, meta) in enumerate(zip(models, metas, strict=True)):
        content = {
            "classy_state_dict": {"base_model": {"model": model, "meta": meta}},
            "iteration": 5,
            "type": "shard",
            **more,
        }
        torch.save(content, folder / f"shard{rank}.torch")
    torch.save({"type": "shard_list", "shards": [f"shard{rank}.torch" for rank in range(len(models))]}, folder / "a.pt")
    return folder / "a.pt"


def _flat(*values: float) -> dict[str, Any]:
    """A rank's part of ``w`` (3,), over two ranks."""
    return {"w": torch.tensor(values)}


def _meta(padding: int) -> dict[str, Any]:
    params = {"w": {"names": ["w"], "shapes": [(3,)], "padding": padding}}
    unit = {"fsdp_path": "", "params": params, "no_broadcast_optim_state": False}
    return {"param_metadata": [unit], "buffer_names": []}


@pytest.mark.parametrize("has_trunk", [True, False])
@pytest.mark.parametrize("has_head", [True, False])
def test_parts_of_shards_are_cut_or_whole(has_trunk: bool, has_head: bool, tmp_path: Path) -> None:
    """Where FSDP wraps the trunk or a head alone, the other is whole in every shard."""
    parts, whole = [_flat(1.0, 2.0), _flat(3.0, 9.0)], _flat(1.0, 2.0, 3.0)
    models = [{"trunk": part if has_trunk else whole, "heads": [part if has_head else whole, whole]} for part in parts]
    metas = [
        {"trunk": _meta(pad) if has_trunk else {}, "heads": [_meta(pad) if has_head else {}, {}]} for pad in (0, 1)
    ]
    foreign = read_foreign(_shards(tmp_path, models, metas))
    assert (foreign.layout, foreign.iteration) == ("VISSL, 2 shards", 5)
    taken: dict[str, Tensor] = {entry.key: entry.read() for entry in foreign.entries}
    assert list(taken) == ["trunk.w", "heads.0.w", "heads.1.w"]
    assert all(values.tolist() == [1.0, 2.0, 3.0] for values in taken.values())
    assert foreign.optimizer.reason.startswith("each shard numbers the state of its own pieces")


@pytest.mark.parametrize("names", [[], "shard0.torch", None, [f"{number}" for number in range(2**16)]])
def test_a_list_without_shards_is_refused(names: Any) -> None:
    with pytest.raises(CheckpointError, match=r"a\.torch lists no shards|lists 0, and there is no"):
        _read({"type": "shard_list", "shards": names})


@pytest.mark.parametrize("kind", ["shard", "slice"])
def test_one_piece_of_a_checkpoint_is_not_taken_for_all_of_it(kind: str) -> None:
    with pytest.raises(CheckpointError, match=f"is one {kind} of a checkpoint. Give the file that lists all of them"):
        _read({"type": kind, "weight": ONE})


@pytest.mark.parametrize("content", [[ONE], ONE, 3, "text", {}, {"a": 1}, {"a": {"b": 1}}])
def test_what_holds_no_state_dict_is_refused(content: Any) -> None:
    with pytest.raises(CheckpointError, match=r"holds no state dict but a|has no tensors at its top"):
        _read(content)


def test_slices_are_read_one_by_one(tmp_path: Path) -> None:
    (tmp_path / "a_layers").mkdir()
    torch.save({"type": "slice", "weight": ONE}, tmp_path / "a_layers" / "w.torch")
    torch.save({"type": "shard", "weight": ONE}, tmp_path / "a_layers" / "other.torch")
    for name, fits in (("w.torch", True), ("other.torch", False)):
        torch.save({"type": "slice_list", "iteration": 4, "layers": {"w": f"/there/{name}"}}, tmp_path / "a.pt")
        if not fits:
            with pytest.raises(CheckpointError, match="is no slice of a VISSL checkpoint"):
                read_foreign(tmp_path / "a.pt")
            continue
        foreign = read_foreign(tmp_path / "a.pt")
        assert (foreign.layout, foreign.iteration) == ("VISSL, sliced", 4)
        assert foreign.optimizer.reason == "slices are weights alone"
        assert [(entry.key, entry.shape, entry.read().tolist()) for entry in foreign.entries] == [
            ("trunk.w", (2,), [1.0, 1.0])
        ]


def test_heads_of_shards_without_a_description_are_whole(tmp_path: Path) -> None:
    """As of a run whose heads FSDP did not wrap: a state dict of all of them, or one for each."""
    for heads, names in (({"0.w": ONE}, ["heads.0.w"]), ([{"w": ONE}, {"v": ONE}], ["heads.0.w", "heads.1.v"])):
        models = [{"trunk": {"w": ONE}, "heads": heads}] * 2
        foreign = read_foreign(_shards(tmp_path, models, [{"trunk": {}}] * 2, loss={"center": ONE}))
        assert [entry.key for entry in foreign.entries] == ["trunk.w", *names]
        assert foreign.loss.tensors["center"].tolist() == [1.0, 1.0]


def test_slices_of_a_whole_model_have_a_trunk_and_heads(tmp_path: Path) -> None:
    (tmp_path / "a_layers").mkdir()
    for name in ("trunk_w", "head_w"):
        torch.save({"type": "slice", "weight": torch.full((2,), float(len(name)))}, tmp_path / f"a_layers/{name}.torch")
    model = {"trunk": {"w": "trunk_w.torch"}, "heads": {"0.w": "head_w.torch"}}
    torch.save({**_consolidated(model), "type": "slice_list"}, tmp_path / "a.torch")
    foreign = read_foreign(tmp_path / "a.torch")
    assert {entry.key: entry.read().tolist() for entry in foreign.entries} == {
        "trunk.w": [7.0, 7.0],
        "heads.0.w": [6.0, 6.0],
    }


@pytest.mark.parametrize(
    ("key", "sentence"),
    [
        ("modle", r"a.torch has no 'modle' (--key modle); there it has model, epoch. Did you mean 'model'?"),
        ("model.more", "a.torch has no 'more' (--key model.more); there it has w0, w1, w2, w3, w4, w5, w6, w7."),
        ("epoch.x", "a.torch has no 'x' (--key epoch.x); there it has no keys."),
    ],
)
def test_a_key_that_is_not_there_is_answered_with_those_that_are(key: str, sentence: str) -> None:
    content = {"model": {f"w{number}": ONE for number in range(9)}, "epoch": 3}
    with pytest.raises(CheckpointError) as caught:
        _read(content, key)
    assert str(caught.value) == sentence
