"""``vissl-zero checkpoint import``: VISSL's layouts and plain weights come in whole, and nothing in them is run."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import re
from collections import OrderedDict

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.unit.checkpoint.hostile_files import Called, in_a_process
from tests.unit.commands.example_checkpoint import state_of, tiny_model, write_checkpoint
from tests.unit.commands.vissl_files import (
    consolidated,
    optimizer_groups,
    save_sharded,
    save_sliced,
    trained,
    vissl_names,
)
from vissl_zero.checkpoint import open_checkpoint
from vissl_zero.checkpoint.weights import open_weights
from vissl_zero.cli import main
from vissl_zero.models.weight_names import to_other_names


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def call(*words):
    return main(["checkpoint", "import", *map(str, words)])


def put_consolidated(path, model):
    torch.save(consolidated(model), path)


def put_feature_extractor(path, model):
    """From a linear evaluation: the trunk stands below base_model, and the file is of torch before 1.6."""
    content = consolidated(model)
    inner = content["classy_state_dict"]["base_model"]["model"]
    inner["trunk"] = {f"base_model.{name}": tensor for name, tensor in inner["trunk"].items()}
    torch.save(content, path, _use_new_zipfile_serialization=False)


def put_shards(path, model):
    save_sharded(model, path, world_size=3, flatten=False)


def put_flat_shards(path, model):
    save_sharded(model, path, world_size=3, flatten=True)


def put_plain(path, model):
    """A plain state dict under DDP's names, some tensors as NumPy's."""
    state = {f"module.{name}": tensor for name, tensor in model.state_dict().items()}
    state["module.trunk.stem.0.weight"] = state["module.trunk.stem.0.weight"].numpy()
    torch.save({"state_dict": state, "epoch": np.int64(3)}, path)


def put_torchvision(path, model):
    names = to_other_names(model.state_dict(), "torchvision").names
    torch.save({new: model.state_dict()[old] for new, old in names.items()}, path)


def put_safetensors(path, model):
    save_file(dict(model.state_dict()), path)


LAYOUTS = [
    (put_consolidated, "VISSL, consolidated"),
    (put_feature_extractor, "VISSL, consolidated"),
    (put_shards, "VISSL, 3 shards"),
    (put_flat_shards, "VISSL, 3 shards"),
    (save_sliced_ := lambda path, model: save_sliced(model, path), "VISSL, sliced"),
    (put_plain, "a torch file, at state_dict"),
    (put_torchvision, "a plain state dict"),
    (put_safetensors, "safetensors"),
]


@pytest.mark.parametrize(("put", "layout"), LAYOUTS)
def test_weights_come_in_whole(tmp_path, model, capsys, put, layout):
    put(tmp_path / "their.torch", model)
    write_checkpoint(tmp_path / "like", state_of(model))
    assert call(tmp_path / "their.torch", "--to", tmp_path / "ours.safetensors", "--like", tmp_path / "like") == 0
    text = capsys.readouterr().out
    assert f"{layout}, " in text and "left out" not in text and "not in the file" not in text
    with safe_open(tmp_path / "ours.safetensors", "pt") as file:  # transformers asks for the format
        assert file.metadata()["format"] == "pt" and file.metadata()["imported"].startswith(layout)
    state = load_file(tmp_path / "ours.safetensors")
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


def test_a_checkpoint_of_ours_comes_out_too(tmp_path, model):
    torch.save(consolidated(model), tmp_path / "model_phase5.torch")
    assert call(tmp_path / "model_phase5.torch", "--to", tmp_path / "run") == 0
    with open_checkpoint(tmp_path / "run" / "checkpoints" / "step_000000420") as checkpoint:
        assert checkpoint.manifest.epoch == 6
        assert list(checkpoint.verify()) == []
    with open_weights(tmp_path / "run") as weights:
        assert all(torch.equal(tensor, weights.read(name)) for name, tensor in model.state_dict().items())
    assert call(tmp_path / "model_phase5.torch", "--to", tmp_path / "run") == 2


RECIPE, SGD = ["config=supervised/digits"], ["config.OPTIMIZER.name=sgd"]


def test_what_does_not_match_is_listed(tmp_path, capsys):
    """Against the model of a recipe: the same trunk, another number of classes, and names nobody knows."""
    content = consolidated(tiny_model(num_classes=3))
    trunk = content["classy_state_dict"]["base_model"]["model"]["trunk"]
    trunk["_feature_blocks.extra.weight"] = torch.ones(2)
    torch.save(content, tmp_path / "their.torch")
    assert call(tmp_path / "their.torch", "--to", tmp_path / "ours.safetensors", *RECIPE) == 0
    text = capsys.readouterr().out
    assert "2 other shape, left out:\n  heads.0.clf.0.weight [3, 64] in the file, [10, 64] here" in text
    assert "1 not understood, left out:\n  trunk._feature_blocks.extra.weight" in text
    name = next(name for name in trunk if name.endswith("block3-1.f.c.weight"))
    del trunk[name]
    torch.save(content, tmp_path / "their.torch")
    target = tmp_path / "incomplete.safetensors"
    assert call(tmp_path / "their.torch", "--to", target, *RECIPE) == 1
    text = capsys.readouterr().out
    assert "1 not in the file:\n  trunk.stages.2.1.0.f.c.weight" in text and "Not written" in text
    assert not target.exists()
    assert call(tmp_path / "their.torch", "--to", target, "--partial", *RECIPE) == 1
    assert "trunk.stages.2.1.0.f.c.weight" not in load_file(target)


def _import_with_state(folder, model, state, capsys, *words):
    content = consolidated(model)
    content["classy_state_dict"]["optimizer"] = state
    torch.save(content, folder / "their.torch")
    assert call(folder / "their.torch", "--to", folder / "run", *RECIPE, *words) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("how", ["norms do not", "neither", "heads alone", "one group", "adamw"])
def test_momentum_finds_its_parameters_however_vissl_has_sorted_them(tmp_path, capsys, how):
    model = tiny_model(num_classes=10)
    groups = optimizer_groups(model, regularize_bias=how != "neither", regularize_bn=how == "heads alone")
    if how == "heads alone":
        groups[0]["params"], groups[1]["params"] = [], []
    if how == "one group":
        groups = list(model.parameters())
    is_adamw = how == "adamw"
    optimizer = torch.optim.AdamW(groups) if is_adamw else torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    words = ["config.OPTIMIZER.name=adamw" if is_adamw else "config.OPTIMIZER.name=sgd"]
    said = _import_with_state(tmp_path, model, trained(optimizer), capsys, *words)
    names = {param: name for name, param in model.named_parameters()}
    keys = ("exp_avg", "exp_avg_sq") if is_adamw else ("momentum_buffer",)
    expected = {f"optimizer/{key}/{names[p]}": state[key] for p, state in optimizer.state.items() for key in keys}
    assert f"Optimizer state is imported: {', '.join([*keys, 'step'][: len(keys) + is_adamw])} of " in said
    with open_checkpoint(tmp_path / "run" / "checkpoints" / "step_000000420") as checkpoint:
        found = {name: checkpoint.read(name) for name in checkpoint.tensors if name.startswith("optimizer/")}
        steps = {"step": {"dtype": "float32", "value": 2.0}} if is_adamw else {}
        assert all(checkpoint.scalars(names[param]) == steps for param in optimizer.state)
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def _shuffled(state):
    """As another sorting would number it: shapes do not fit."""
    state["optim"]["param_groups"][0]["params"].reverse()


def _of_other_kind(state):
    state["optim"]["state"][0]["mu"] = state["optim"]["state"][0].pop("momentum_buffer")


def _hostile(state):
    state["optim"]["state"][0]["momentum_buffer"] = torch.eye(3).to_sparse()


@pytest.mark.parametrize(
    ("change", "words", "says"),
    [
        (_shuffled, SGD, "not imported: its numbers, which stand for parameters, fit no order in which VISSL sorts"),
        (_of_other_kind, SGD, "not imported: mu: not state of SGD, Adam or AdamW"),
        (_hostile, SGD, "not imported: the file holds none that torch's optimizers have written"),
        (
            None,
            ("config.OPTIMIZER.name=adamw",),
            "not imported: it is momentum_buffer, and the recipe's optimizer is adamw",
        ),
    ],
)
def test_state_that_cannot_be_told_apart_is_left_out_and_said_so(tmp_path, capsys, change, words, says):
    model = tiny_model(num_classes=10)
    state = trained(torch.optim.SGD(optimizer_groups(model, True, False), lr=0.1, momentum=0.9))
    if change is not None:
        change(state)
    assert says in _import_with_state(tmp_path, model, state, capsys, *words)
    with open_checkpoint(tmp_path / "run" / "checkpoints" / "step_000000420") as checkpoint:
        assert not any(name.startswith("optimizer/") for name in checkpoint.tensors)


class _Payload:
    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


def _places(tmp_path, model, put):
    """Every file that a layout consists of."""
    put(tmp_path / "their.torch", model)
    return sorted(path for path in tmp_path.rglob("*.torch"))


@pytest.mark.parametrize("how", ["inside", "pickle", "legacy"])
@pytest.mark.parametrize("put", [put_consolidated, put_shards, save_sliced_])
def test_a_planted_payload_is_refused_and_does_not_run(tmp_path, model, capsys, put, how):
    folder, canary = tmp_path / "files", tmp_path / "canary"
    folder.mkdir()
    for path in _places(folder, model, put)[:6]:
        whole = path.read_bytes()
        payload = _Payload(f"touch {canary}")
        if how == "pickle":
            path.write_bytes(pickle.dumps(payload))
        else:
            content = torch.load(path, weights_only=False)
            content["meters"] = [payload]
            torch.save(content, path, _use_new_zipfile_serialization=how != "legacy")
        assert call(folder / "their.torch", "--to", tmp_path / "ours.safetensors") == 2
        error = capsys.readouterr().err
        assert f"{path} is refused" in error and "Nothing was run" in error and error.count("\n") == 1
        if how != "pickle":
            assert "system" in error
        path.write_bytes(whole)
    assert not canary.exists()
    assert not (tmp_path / "ours.safetensors").exists()
    assert call(folder / "their.torch", "--to", tmp_path / "ours.safetensors") == 0  # without it, it comes in


def _array_of_pointers():
    """NumPy believes the flags of this dtype, and takes its bytes for addresses of objects."""
    state = (3, "|", None, ("a",), {"a": (Called(np.dtype, "O"), 0)}, 8, 1, 1)
    content = (1, (1,), Called(np.dtype, "V8", state=state), False, b"A" * 8)
    return Called(np._core.multiarray._reconstruct, np.ndarray, (0,), b"b", state=content)


def _nested_tuple():
    """As a key of a dict it is hashed: 2**60 elements."""
    found = (0, 0)
    for _ in range(60):
        found = (found, found)
    return found


HOSTILE = {
    "pointers": lambda: {"a": _array_of_pointers(), "b": torch.ones(1)},
    "hash": lambda: {"a": [_nested_tuple()], "b": torch.ones(1)},
    "key": lambda: {("a", (1, 2)): torch.ones(1)},
    "stride": lambda: {"a": torch.ones(1).expand(2**40)},
    "memory": lambda: {"a": Called(torch.storage.UntypedStorage, 2**45)},
    "bytes": lambda: {"a": Called(bytearray, 2**45)},
    "array": lambda: {
        "a": Called(torch._utils._rebuild_tensor_v2, torch.ones(1).storage(), 0, (2**40,), (1,), False, OrderedDict())
    },
    "complex": lambda: {"trunk.a": torch.ones(1, dtype=torch.complex64)},
    "shards": lambda: {"type": "shard_list", "shards": [["a"]]},
    "slices": lambda: {"type": "slice_list", "layers": 3},
    "heads": lambda: {"classy_state_dict": {"base_model": {"model": {"trunk": {}, "heads": [3]}}}},
}


@pytest.mark.parametrize("is_legacy", [False, True])
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_one_sentence(tmp_path, name, is_legacy):
    """In a process of its own, since what is held here is that it lives."""
    torch.save(HOSTILE[name](), tmp_path / "their.torch", _use_new_zipfile_serialization=not is_legacy)

    def work(sender):
        output = io.StringIO()
        with contextlib.redirect_stderr(output):
            code = call(tmp_path / "their.torch", "--to", tmp_path / "ours.safetensors")
        os.write(sender, f"{code} {output.getvalue()}".encode())

    text, ended = in_a_process(work)
    assert not ended and text.startswith("2 ") and text.count("\n") == 1, (text, ended)
    assert not (tmp_path / "ours.safetensors").exists()


def test_too_few_tensors_that_are_understood_are_an_error(tmp_path, model, capsys):
    """As of a language model: a norm and a bias have names that others have too."""
    state = {f"transformer.h.{i}.attn.c_attn.weight": torch.ones(1) for i in range(5)}
    torch.save({**state, "layer1.0.conv1.weight": torch.ones(1)}, tmp_path / "their.torch")
    target = tmp_path / "ours.safetensors"
    assert call(tmp_path / "their.torch", "--to", target) == 2
    assert "only 1 of 6 tensors have a name" in capsys.readouterr().err
    assert not target.exists()
    assert call(tmp_path / "their.torch", "--to", target, "--partial") == 1
    assert len(load_file(target)) == 1


def test_a_run_folder_gives_its_newest_complete_checkpoint_and_says_which(tmp_path, model, capsys):
    for step in (4, 5):
        write_checkpoint(tmp_path / "run", state_of(model), step)
    file = tmp_path / "run/checkpoints/step_000000005/rank00001.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert call(tmp_path / "run", "--to", tmp_path / "ours.safetensors") == 0
    text = capsys.readouterr().out.replace("\n", "")
    assert "passed over: " in text and "rank00001.safetensors is damaged" in text
    assert "the checkpoint of step 4, " in text


@pytest.mark.parametrize(
    "name", ["../their.torch", "sub/their.torch", "/etc/passwd", "..", "", "link.torch", "gone.torch"]
)
def test_a_list_that_leads_elsewhere_is_refused(tmp_path, model, capsys, name):
    put_shards(tmp_path / "their.torch", model)
    (tmp_path / "link.torch").symlink_to(tmp_path / "their_shard0.torch")
    torch.save({"type": "shard_list", "shards": [name]}, tmp_path / "list.torch")
    assert call(tmp_path / "list.torch", "--to", tmp_path / "ours.safetensors") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and ("refused" in error or "there is no" in error), error


def test_shards_that_do_not_fit_together_are_refused(tmp_path, model, capsys):
    put_shards(tmp_path / "their.torch", model)
    shards = [f"their_shard{rank}.torch" for rank in (0, 1)]
    torch.save({"type": "shard_list", "shards": shards}, tmp_path / "their.torch")
    assert call(tmp_path / "their.torch", "--to", tmp_path / "ours.safetensors") == 2
    assert "a shard is missing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "words", "says"),
    [
        ("none", [], "There is no file"),
        ("cut", [], "is damaged, or not a torch.save file|is refused"),
        ("text", [], "damaged or no safetensors file"),
        ("one_shard", [], "is one shard of a checkpoint. Give the file that lists all of them"),
        ("list", [], "holds no state dict but a list"),
        ("nested", [], "has no tensors at its top; it has a. Name the key of the state dict"),
        ("nested", ["--key", "a.c"], "has no 'c'"),
        ("no_slices", [], "holds no weights"),
        ("other", [], "no tensor has a name or shape that is understood"),
        ("good", ["--like", "{tmp}/none"], "There is no"),
        ("good", ["config=pretrain/none"], "none"),
        ("good", ["stray"], "neither a recipe"),
        ("good", ["--to", "{tmp}/x.bin"], "must end in .safetensors"),
    ],
)
def test_bad_input_is_one_sentence(tmp_path, model, capsys, name, words, says):
    good = tmp_path / "good"
    put_consolidated(good, model)
    (tmp_path / "cut").write_bytes(good.read_bytes()[:-3000])
    (tmp_path / "text").write_text("hello, world")
    torch.save({"type": "shard"}, tmp_path / "one_shard")
    torch.save({"type": "slice_list", "layers": {}}, tmp_path / "no_slices")
    torch.save([1], tmp_path / "list")
    torch.save({"a": {"b": torch.ones(1)}}, tmp_path / "nested")
    torch.save({"encoder.block.weight": torch.ones(1)}, tmp_path / "other")
    target = [] if "--to" in words else ["--to", tmp_path / "ours.safetensors"]
    assert call(tmp_path / name, *target, *[word.format(tmp=tmp_path) for word in words]) == 2
    error = capsys.readouterr().err

    assert re.search(says, error) and "Traceback" not in error, error


def test_names_below_a_key_and_a_prefix(tmp_path, model, capsys):
    trunk, _ = vissl_names(model)
    torch.save({"a": {"b": {f"encoder.{name}": tensor for name, tensor in trunk.items()}}}, tmp_path / "their.pt")
    words = ["--key", "a.b", "--remove-prefix", "encoder."]
    assert call(tmp_path / "their.pt", "--to", tmp_path / "ours.safetensors", *words) == 0
    assert load_file(tmp_path / "ours.safetensors").keys() == {n for n in model.state_dict() if n.startswith("trunk.")}
