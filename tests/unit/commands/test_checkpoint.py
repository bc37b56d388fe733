"""``vissl-zero checkpoint inspect | verify | diff | export``, as a user types them."""

from __future__ import annotations

import re
import sys

import pytest
import torch
from safetensors.torch import load_file

import vissl_zero  # noqa: F401  (before torchvision)
from tests.blocks import model_block
from tests.unit.commands.example_checkpoint import state_of, tiny_model, write_checkpoint
from vissl_zero.cli import main

# isort: split
from torchvision.models import resnet18
from torchvision.models.regnet import BlockParams, RegNet

from vissl_zero.models.model import build_model
from vissl_zero.models.weight_names import to_other_names, to_our_names


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture
def run(tmp_path, model):
    """A run folder with a checkpoint after 4 steps."""
    write_checkpoint(tmp_path / "run", state_of(model), config={"SEED_VALUE": 3, "IMPORTS": ["os"]})
    return tmp_path / "run"


def call(*words):
    return main(["checkpoint", *map(str, words)])


def test_inspect_says_what_there_is(run, model, capsys):
    assert call("inspect", run, "--tensors") == 0
    text = capsys.readouterr().out
    assert "step        4" in text and "ZeRO level 3, torch engine, 3 processes" in text
    num = sum(p.numel() for p in model.parameters())
    for kind in ("parameters", "optimizer: momentum_buffer"):
        (line,) = [line for line in text.splitlines() if line.startswith(kind)]
        assert str(num) in line.split()
    assert "config.SEED_VALUE  3" in text
    assert "model/trunk.stem.0.weight" in text and "[16, 3, 3, 3]" in text


def test_what_a_file_says_cannot_reach_the_terminal_as_a_command(tmp_path, capsys):
    write_checkpoint(tmp_path, {"model/a\x1b[2Jb": torch.ones(2)}, config={"X": "\x1b]0;owned\x07 [bold]"})
    assert call("inspect", tmp_path, "--tensors") == 0
    text = capsys.readouterr().out
    assert "\x1b" not in text and "\x07" not in text and "[bold]" in text


def test_names_in_an_error_cannot_reach_the_terminal_as_a_command(tmp_path, capsys):
    write_checkpoint(tmp_path, {"model/heads.a\x1b[2Jb": torch.ones(2)})
    assert call("export", tmp_path, "--to", tmp_path / "x.pt", "--part", "trunk") == 2
    error = capsys.readouterr().err
    assert "\x1b" not in error and "a\\x1b[2Jb" in error


@pytest.mark.parametrize("word", ["verify", "diff", "export", "import"])
def test_one_flipped_bit_of_a_file_of_weights_is_found_by_every_reader(run, tmp_path, capsys, word):
    file = tmp_path / "weights.safetensors"
    assert call("export", run, "--to", file) == 0
    data = bytearray(file.read_bytes())
    data[-1000] ^= 1
    file.write_bytes(data)
    words = {"verify": (), "diff": (run,), "export": ("--to", tmp_path / "x.pt"), "import": ("--to", tmp_path / "y")}
    assert call(word, file, *words[word]) in (1, 2)
    done = capsys.readouterr()
    assert "is damaged: the data of" in " ".join((done.out + done.err).split())


def test_what_a_saved_configuration_says_is_shown_and_compared_and_never_run(tmp_path, model, capsys, monkeypatch):
    canary = tmp_path / "canary"
    (tmp_path / "planted.py").write_text(f"open({str(canary)!r}, 'w').close()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("SECRET", "hunter2")
    trunk = {"NAME": "regnet", "REGNET": {"name": "${oc.env:SECRET}"}, "_target_": "planted.run"}
    config = {
        "IMPORTS": ["planted"],
        "SLURM": {"SETUP": [f"touch {canary}"]},
        "MODEL": {"TRUNK": trunk},
        "LOSS": {"_target_": "os.system", "_args_": [f"touch {canary}"]},
    }
    run = tmp_path / "run"
    write_checkpoint(run, state_of(model), config=config)
    write_checkpoint(tmp_path / "other", state_of(model), config={"SEED_VALUE": 3})
    assert call("inspect", run) == 0
    assert call("diff", run, tmp_path / "other") == 0, "tensors count, settings are listed"
    assert call("verify", run) == 0
    assert call("export", run, "--to", tmp_path / "w.safetensors") == 0
    assert call("import", run, "--to", tmp_path / "again.safetensors") == 0
    begin = [
        "config=quickstart/swav_digits",
        "config.MODEL.TRUNK.NAME=auto",
        f"config.MODEL.WEIGHTS_INIT.PARAMS_FILE={run}",
    ]
    main([*begin, "--dry-run"])
    said = "".join(capsys.readouterr())
    assert "${oc.env:SECRET}" in said and "hunter2" not in said and "planted" in said
    assert not canary.exists() and "planted" not in sys.modules


def test_verify_names_what_is_torn(run, model, capsys):
    write_checkpoint(run, state_of(model), step=8)
    assert call("verify", run) == 0
    assert capsys.readouterr().out.count("complete: ") == 2
    folder = run / "checkpoints" / "step_000000008"
    data = folder / "rank00001.safetensors"
    content = bytearray(data.read_bytes())
    content[-3] ^= 4
    data.write_bytes(content)
    assert call("verify", run) == 1
    text = capsys.readouterr().out
    assert f"complete: {run}/checkpoints/step_000000004" in text and f"INCOMPLETE OR DAMAGED: {folder}" in text
    assert "rank00001.safetensors is damaged" in text
    data.write_bytes(content[:-10])
    assert call("verify", folder) == 1
    assert "rank00001.safetensors" in capsys.readouterr().out
    assert call("inspect", run) == 0
    text = capsys.readouterr().out
    assert "passed over: " in text and "rank00001.safetensors" in text and "step        4" in text
    (folder / "manifest.json").unlink()
    assert call("verify", folder) == 1
    assert "manifest.json cannot be read" in capsys.readouterr().out


def test_diff_finds_settings_and_the_largest_difference(tmp_path, run, model, capsys):
    state = state_of(model)
    changed = {name: tensor.clone() for name, tensor in state.items()}
    changed["model/trunk.stem.0.weight"][3, 1, 2, 0] += 0.25
    changed["buffer/trunk.stem.1.running_var"][2] = float("nan")
    changed["model/extra"] = torch.zeros(3)
    changed["model/heads.0.clf.0.weight"] = changed["model/heads.0.clf.0.weight"].double()
    del changed["model/heads.0.clf.0.bias"]
    write_checkpoint(tmp_path / "other", changed, step=6, config={"SEED_VALUE": 4, "IMPORTS": ["os"]})
    assert call("diff", run, run) == 0
    capsys.readouterr()
    assert call("diff", run, tmp_path / "other") == 1
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in capsys.readouterr().out.splitlines() if line}
    assert rows["step"] == "4 6" and rows["config.SEED_VALUE"] == "3 4"
    assert rows["model/trunk.stem.0.weight"] == "values 1 of 432 elements 0.25"
    assert rows["buffer/trunk.stem.1.running_var"] == "values 1 of 16 elements nan"
    assert rows["model/extra"].startswith("only in B")
    assert rows["model/heads.0.clf.0.bias"].startswith("only in A")
    assert rows["model/heads.0.clf.0.weight"] == "type float32 and float64"
    assert "5" in rows  # tensors differ
    assert not any("config.IMPORTS" in row for row in rows)


@pytest.mark.parametrize("ending", ["safetensors", "pt"])
def test_export_gives_the_model_and_no_more(tmp_path, run, model, ending):
    target = tmp_path / f"model.{ending}"
    assert call("export", run, "--to", target) == 0
    state = _read(target)
    assert state.keys() == model.state_dict().keys()
    fresh = tiny_model()
    fresh.load_state_dict(state, strict=True)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert call("export", run, "--to", target) == 2  # it exists
    assert call("export", run, "--to", target, "--part", "trunk", "--overwrite") == 0
    assert _read(target).keys() == {name for name in model.state_dict() if name.startswith("trunk.")}
    assert sorted(tmp_path.iterdir()) == sorted([run, target])


def test_export_takes_the_weights_or_their_running_average(tmp_path, run, model, capsys):
    average = {name: tensor.detach() / 3 for name, tensor in model.named_parameters()}
    averaged_buffers = {name: buffer * 2 for name, buffer in model.named_buffers()}
    stored = {f"average/{name}": tensor for name, tensor in average.items()}
    stored |= {f"buffer/average:{name}": tensor for name, tensor in averaged_buffers.items()}
    write_checkpoint(tmp_path / "ema", state_of(model) | stored)
    for options, expected in (([], model.state_dict()), (["--average"], average | averaged_buffers)):
        assert call("export", tmp_path / "ema", "--to", tmp_path / "out.safetensors", "--overwrite", *options) == 0
        found = load_file(tmp_path / "out.safetensors")
        assert found.keys() == expected.keys() == model.state_dict().keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    capsys.readouterr()
    assert call("export", run, "--to", tmp_path / "none.pt", "--average") == 2
    assert "holds no running average" in capsys.readouterr().err
    assert call("export", tmp_path / "out.safetensors", "--to", tmp_path / "none.pt", "--average") == 2
    assert "weights_ema.safetensors" in capsys.readouterr().err and not (tmp_path / "none.pt").exists()


def test_export_under_torchvisions_names_is_torchvisions_model(tmp_path, run, model):
    blocks = BlockParams([1, 1, 2], [16, 32, 64], [8, 8, 8], [1.0] * 3, [2] * 3, 0.25)
    theirs = RegNet(blocks, num_classes=7, stem_width=16).eval()
    assert call("export", run, "--to", tmp_path / "all.pt", "--names", "torchvision") == 0
    theirs.load_state_dict(_read(tmp_path / "all.pt"), strict=True)
    images = torch.rand(2, 3, 48, 48)
    with torch.no_grad():
        ours = model([images])[0]
        torch.testing.assert_close(theirs(images), ours, rtol=0, atol=0)
    assert float(ours.std(dim=0).min()) > 0  # the images do matter
    assert call("export", run, "--to", tmp_path / "trunk.pt", "--names", "torchvision", "--part", "trunk") == 0
    theirs.fc = torch.nn.Identity()
    theirs.load_state_dict(_read(tmp_path / "trunk.pt"), strict=True)


def test_names_of_other_libraries_go_there_and_back(model):
    head = {"PARAMS": [["mlp", {"dims": [512, 1000]}]], "BATCHNORM_EPS": 1e-5, "BATCHNORM_MOMENTUM": 0.1}
    resnet = build_model(model_block({"TRUNK": {"NAME": "resnet", "RESNETS": {"DEPTH": 18}}, "HEAD": head})).eval()
    for ours in (resnet, model):
        for style in ("torchvision", "timm"):
            there = to_other_names(ours.state_dict(), style)
            assert not there.unknown
            back = to_our_names(there.names)
            assert not back.unknown and back.names == {old: new for new, old in there.names.items()}
    theirs = resnet18().eval()
    there = to_other_names(resnet.state_dict(), "torchvision")
    theirs.load_state_dict({new: resnet.state_dict()[old] for new, old in there.names.items()}, strict=True)
    images = torch.rand(1, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(theirs(images), resnet([images])[0], rtol=0, atol=0)
    timm = to_other_names(model.state_dict(), "timm").names  # checked against timm 1.0's regnety_004 by hand
    assert {"stem.conv.weight", "s3.b2.conv3.bn.running_var", "s1.b1.downsample.conv.weight", "head.fc.bias"} <= set(
        timm
    )


def test_damaged_data_are_not_exported(tmp_path, model, capsys):
    weights = {name: tensor for name, tensor in state_of(model).items() if not name.startswith("optimizer/")}
    data = write_checkpoint(tmp_path / "run", weights) / "rank00002.safetensors"
    content = bytearray(data.read_bytes())
    content[-5] ^= 1
    data.write_bytes(content)
    assert call("export", tmp_path / "run", "--to", tmp_path / "model.pt") == 2
    assert "rank00002.safetensors is damaged" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["frobnicate"], "must be one of inspect, verify, diff, export, import"),
        (["inspect"], "the following arguments are required: path"),
        (["inspect", "{tmp}/none"], "There is no"),
        (["inspect", "{tmp}"], "holds neither checkpoints nor weights.safetensors"),
        (["inspect", "{tmp}/text"], "damaged or no safetensors file"),
        (["inspect", "{tmp}/zip.pt"], "Convert it first: vissl-zero checkpoint import"),
        (["inspect", "{tmp}/link"], "There is no|cannot be read"),
        (["verify", "{tmp}/text"], "damaged or no safetensors file"),
        (["verify", "{tmp}"], "holds neither"),
        (["diff", "{tmp}/run", "{tmp}/none"], "There is no"),
        (["diff", "{tmp}/run", "{tmp}/run", "--tolerance", "x"], "invalid float value: 'x'"),
        (["export", "{tmp}/run", "--to", "{tmp}/model.zip"], "the ending decides the format"),
        (["export", "{tmp}/run", "--to", "/proc/none/model.pt"], "cannot be written"),
        (["export", "{tmp}/run", "--to", "{tmp}/model.pt", "--part", "eyes"], "invalid choice: 'eyes'"),
        (
            ["export", "{tmp}/run", "--to", "{tmp}/x.pt", "--part", "heads", "--names", "timm"],
            r"but none for this trunk\. Leave out",
        ),
    ],
)
def test_bad_input_is_one_sentence(tmp_path, run, capsys, words, says):
    (tmp_path / "text").write_text("hello, world")
    torch.save({"a": torch.ones(1)}, tmp_path / "zip.pt")
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    capsys.readouterr()
    assert call(*[word.format(tmp=tmp_path) for word in words]) == 2
    captured = capsys.readouterr()
    assert re.search(says, captured.err), captured.err
    assert "Traceback" not in captured.err and captured.err.count("\n") == 1


def _read(path):
    if path.suffix == ".safetensors":
        return load_file(path)
    return torch.load(path, weights_only=True, mmap=True)
