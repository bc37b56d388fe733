"""Which tensors of a file go where: by name, shape and size of image; what does not fit is counted and named."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vissl_zero.checkpoint import first_weights
from vissl_zero.checkpoint.first_weights import Match, _adapt, _require, load_first_weights, load_teacher, match
from vissl_zero.checkpoint.foreign_layouts import Foreign
from vissl_zero.checkpoint.shard_file import Entry
from vissl_zero.errors import CheckpointError
from vissl_zero.models.trunks.token_embedding import interpolated
from vissl_zero.models.trunks.vision_transformer import VisionTransformer

SHAPES = {"trunk.a.weight": (2, 3), "trunk.a.bias": (2,), "trunk.bn.num_batches_tracked": (), "heads.0.weight": (4, 2)}


def _foreign(shapes: dict[str, tuple[int, ...]], **more: Any) -> Foreign:
    return Foreign("", [Entry.of(name, torch.ones(shape)) for name, shape in shapes.items()], **more)


def _facts(matched: Match) -> dict[str, Any]:
    facts = {name: value for name, value in vars(matched).items() if value and name != "entries"}
    return facts | {"entries": [entry.key for entry in matched.entries]}


def test_every_tensor_is_taken_missing_of_another_shape_or_unknown() -> None:
    theirs = {"trunk.a.weight": (2, 3), "trunk.a.bias": (3,), "trunk.more": (1,), "optimizer.x": (1,)}
    assert _facts(match(_foreign(theirs, no_tensors=["epoch"]), SHAPES)) == {
        "entries": ["trunk.a.weight"],
        "theirs": {"trunk.a.weight": "trunk.a.weight"},
        "missing": ["heads.0.weight", "trunk.bn.num_batches_tracked"],
        "other_shape": {"trunk.a.bias": ((3,), (2,))},
        "names_of_others": {"trunk.a.bias": "trunk.a.bias"},
        "unknown": ["trunk.more", "optimizer.x"],
        "no_tensors": ["epoch"],
        "num_foreign": 4,
    }


@pytest.mark.parametrize(
    ("prefixes", "names"),
    [
        ({}, {}),
        ({"remove_prefix": "net."}, {}),
        ({"append_prefix": "trunk."}, {}),
        ({"remove_prefix": "net.", "append_prefix": "trunk."}, {"trunk.a.weight": "net.a.weight"}),
        ({"remove_prefix": "net.a.", "append_prefix": "trunk.a."}, {"trunk.a.weight": "net.a.weight"}),
    ],
)
def test_a_prefix_is_taken_off_and_another_put_before(prefixes: dict[str, str], names: dict[str, str]) -> None:
    assert match(_foreign({"net.a.weight": (2, 3)}), {"trunk.a.weight": (2, 3)}, **prefixes).theirs == names


def test_what_is_skipped_is_neither_taken_nor_missing() -> None:
    matched = match(_foreign({"trunk.a.weight": (2, 3), "heads.0.weight": (9, 9)}), SHAPES, skip=["a.", "heads"])
    assert _facts(matched) == {"entries": [], "missing": ["trunk.bn.num_batches_tracked"], "num_foreign": 2}
    below_adapters = {"trunk.a.base_layer.weight": (2, 3)}  # skipped under the name without them
    assert _facts(match(_foreign({}), below_adapters, skip=["a.weight"])) == {"entries": []}


def test_what_a_part_lacks_is_named_but_for_counters() -> None:
    matched = match(_foreign({"trunk.a.weight": (3, 3)}), SHAPES)
    assert matched.lacks("trunk") == ["trunk.a.bias", "trunk.a.weight"] and matched.lacks("heads") == ["heads.0.weight"]
    assert list(matched.sentences()) == [
        "1 other shape, left out:\n  trunk.a.weight [3, 3] in the file, [2, 3] here",
        "2 not in the file:\n  heads.0.weight\n  trunk.a.bias",
    ]


def test_long_lists_are_cut_and_decoders_have_a_sentence_of_their_own() -> None:
    names = [f"decoder.layer{number}.weight" for number in range(5)] + [f"x{number}" for number in range(4)]
    matched = Match(unknown=names, no_tensors=["epoch", "step"])
    assert list(matched.sentences(most=2)) == [
        "decoder left out, as it is no part of the trunk: decoder.layer0.weight, decoder.layer1.weight, "
        "decoder.layer2.weight and 2 more",
        "4 not understood, left out:\n  x0\n  x1\n  ... and 2 more",
        "2 not plain tensors, left out:\n  epoch\n  step",
    ]
    assert "more" not in "".join(Match(unknown=names[:3], no_tensors=names[5:]).sentences(most=4))


class _Net(nn.Module):
    """Three embeddings of 4 x 4 patches, of which a file may have other sizes."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"IMAGE_SIZE": 16, "PATCH_SIZE": 4, "NUM_LAYERS": 1, "NUM_HEADS": 1, "HIDDEN_DIM": 4, "MLP_DIM": 4}
        trunks = [VisionTransformer(**sizes, QKV_BIAS=True) for _ in range(3)]
        self.nets = nn.ModuleList([_embedding(trunk) for trunk in trunks])


def _embedding(trunk: nn.Module) -> nn.Module:
    return next(part for part in trunk.modules() if type(part).__name__ == "TokenEmbedding")


@pytest.mark.parametrize(
    ("count", "width", "fits"),
    [(10, 4, True), (26, 4, True), (5, 4, True), (11, 4, False), (10, 3, False), (1, 4, False), (0, 4, False)],
)
def test_positions_of_another_image_size_are_interpolated(count: int, width: int, fits: bool) -> None:
    """1 for the class token, and the rest a square."""
    model, values = _Net(), torch.randn(1, count, width)
    good = torch.randn(1, 10, 4)
    files = {"nets.0.pos_embed": values, "nets.1.cls_token": good, "nets.2.pos_embed": good}
    ours = {name: tuple(model.get_parameter(name).shape) for name in files}
    assert ours["nets.2.pos_embed"] == (1, 17, 4)
    matched = Match(
        other_shape={name: (tuple(tensor.shape), ours[name]) for name, tensor in files.items()},
        names_of_others={name: f"theirs.{name}" for name in files},
    )
    _adapt(matched, model, {f"theirs.{name}": Entry.of(f"theirs.{name}", tensor) for name, tensor in files.items()})
    resized = [name for name in files if name == "nets.2.pos_embed" or (fits and name == "nets.0.pos_embed")]
    assert matched.resized == [entry.key for entry in matched.entries] == list(matched.theirs) == resized
    assert matched.theirs == {name: f"theirs.{name}" for name in resized}
    assert list(matched.other_shape) == [name for name in files if name not in resized]
    for entry in matched.entries:
        source: Tensor = files[entry.key]
        side = round((source.shape[1] - 1) ** 0.5)
        patches = interpolated(source[:, 1:], (side, side), (4, 4), model.get_submodule("nets.0").position_resize)  # type: ignore[arg-type]
        assert entry.shape == (1, 17, 4) and torch.equal(entry.read(), torch.cat([source[:, :1], patches], dim=1))


HEAD, TRUNK = "heads.0.weight", "trunk.a.weight"


@pytest.mark.parametrize(
    ("lost", "wrong", "needs", "may_lack", "sentence"),
    [
        ([], [], "trunk", "", ""),
        ([HEAD], [], "trunk", "", ""),
        ([], [HEAD], "trunk", "", ""),
        ([HEAD], [], "head shapes", "", ""),
        (
            [],
            [HEAD],
            "head shapes",
            "",
            r"\(1 of its 2 tensors fit, 1 of the model's lack theirs\): heads\.0\.weight\.",
        ),
        ([], [HEAD], "heads", "", r"no trained weights of heads that this run measures \(heads\.0\.weight\)"),
        ([f"heads.{n}.w" for n in range(4)], [], "heads", "", r"\(heads\.0\.w, heads\.1\.w, heads\.2\.w, \.\.\.\)"),
        ([f"heads.{n}.w" for n in range(3)], [], "heads", "", r"\(heads\.0\.w, heads\.1\.w, heads\.2\.w\)"),
        (
            [TRUNK],
            [],
            "trunk",
            "",
            r"does not fit the model .*: trunk\.a\.weight\. Write config\.MODEL\.TRUNK\.NAME=auto",
        ),
        ([], [TRUNK], "trunk", "", r"does not fit the model .*: trunk\.a\.weight\."),
        ([TRUNK], [], "trunk", "weight", ""),
        ([TRUNK], [], "trunk", "bias", "does not fit the model"),
        ([f"trunk.{n}" for n in range(5)], [], "trunk", "", r"trunk\.0, trunk\.1, trunk\.2 and 2 more\."),
        ([f"trunk.{n}" for n in range(3)], [], "trunk", "", r"trunk\.0, trunk\.1, trunk\.2\."),
    ],
)
def test_a_file_that_lacks_what_a_run_needs_is_refused(
    lost: list[str], wrong: list[str], needs: Any, may_lack: str, sentence: str
) -> None:
    entries = [Entry.of("trunk.b", torch.ones(1))]
    matched = Match(entries, missing=lost, other_shape=dict.fromkeys(wrong, ((1,), (2,))), num_foreign=2)
    if sentence:
        with pytest.raises(CheckpointError, match=sentence):
            _require(matched, "a.pt", needs, may_lack)
    else:
        _require(matched, "a.pt", needs, may_lack)


def test_a_file_of_which_nothing_fits_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"a\.pt does not fit the model .*: no tensor matches\."):
        _require(Match(num_foreign=3), "a.pt", "trunk")


FROZEN, EVALUATED = "FREEZE_TRUNK_AND_HEAD", "EVAL_MODE_ON"


@pytest.mark.parametrize(
    ("settings", "test_only", "wants_heads", "needs"),
    [
        ({}, False, True, "trunk"),
        ({"ASSERT_HEAD_LAYER_SHAPE_INIT": True}, False, True, "head shapes"),
        ({}, True, True, "heads"),  # what is measured must have been trained
        ({FROZEN: True}, False, True, "heads"),
        ({FROZEN: True, "EXTRACT_TRUNK_FEATURES_ONLY": True}, False, True, "trunk"),
        ({EVALUATED: True}, False, False, "trunk"),
        ({EVALUATED: True}, True, False, "trunk"),
        ({EVALUATED: True, "ASSERT_HEAD_LAYER_SHAPE_INIT": True}, False, False, "trunk"),
        ({EVALUATED: True, "EVAL_TRUNK_AND_HEAD": True}, True, True, "heads"),
        ({EVALUATED: True, "EVAL_TRUNK_AND_HEAD": True}, False, True, "trunk"),
    ],
)
def test_what_a_run_needs_of_its_weights(
    settings: dict[str, bool], test_only: bool, wants_heads: bool, needs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    none: dict[str, Any] = dict.fromkeys(
        (FROZEN, EVALUATED, "EVAL_TRUNK_AND_HEAD", "EXTRACT_TRUNK_FEATURES_ONLY"), False
    )
    chosen = SimpleNamespace(**{**none, "ASSERT_HEAD_LAYER_SHAPE_INIT": False, **settings})
    options = SimpleNamespace(PARAMS_FILE="a.pt")
    lora = SimpleNamespace(USE_LORA=False)
    model = SimpleNamespace(WEIGHTS_INIT=options, FEATURE_EVAL_SETTINGS=chosen, LORA=lora)
    plan: Any = SimpleNamespace(config=SimpleNamespace(MODEL=model, TEST_ONLY=test_only))
    monkeypatch.setattr(first_weights, "_fill", lambda net, given, *decided: {"decided": (given, *decided)})
    assert load_first_weights(nn.Identity(), plan) == {"decided": (options, wants_heads, needs)}
    options.PARAMS_FILE = ""
    assert load_first_weights(nn.Identity(), plan) == {}


def test_a_teacher_comes_with_its_heads_and_says_how_its_images_are_normalized(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(first_weights, "_fill", lambda *args, **more: asked.append((args, more)) or {"w": None})
    model, options = nn.Identity(), object()
    teacher = SimpleNamespace(TEACHER_MODEL=SimpleNamespace(WEIGHTS_INIT=options))
    keys = {"x": {"teacher_mean": [0.5], "teacher_std": [0.25]}}
    for loss, said in ((keys, "Its images are normalized by mean [0.5] and std [0.25]."), ({"x": {}}, "")):
        plan: Any = SimpleNamespace(config=SimpleNamespace(DISTILLATION=teacher, LOSS={"name": "x", **loss}))
        assert load_teacher(model, plan) == {"w": None}
        assert capsys.readouterr().out.strip() == said
        assert asked.pop() == (
            (model, options),
            {"wants_heads": True, "needs": "head shapes", "opening": "The teacher has"},
        )
