"""``MODEL.TRUNK.NAME: auto`` takes the trunk from a saved run, as data."""

from __future__ import annotations

import json
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch

from tests.unit.commands.example_checkpoint import write_checkpoint
from tests.unit.config.example_config import CPU_HOST
from tests.unit.data.conftest import save_image
from vissl_zero.config.blocks.model_and_loss import Trunk
from vissl_zero.config.compose import compose
from vissl_zero.errors import CheckpointError, ConfigError
from vissl_zero.evaluation.opening import recognized
from vissl_zero.resolve.components import normalization, saved_config, trunk_of
from vissl_zero.resolve.resolve import resolve
from vissl_zero.resolve.saved import RESOLVED_FILE
from vissl_zero.weights.reading import network_of

REGNET = {"depth": 3, "w_0": 16, "w_a": 16.0, "w_m": 2.0, "group_width": 8, "block_type": "RES_BASIC_BLOCK"}


DATA = {
    "TRAIN": {
        "DATA_SOURCES": ["synthetic"],
        "DATA_PATHS": [],
        "DATA_LIMIT": 200,
        "DEFAULT_GRAY_IMG_SIZE": 48,
        "TRANSFORMS": [
            {"name": "ImgPilToMultiCrop", "size_crops": [24, 40], "crop_scales": [[0.1, 0.2], [0.3, 1.0]]},
            {"name": "ImgPilColorDistortion", "strength": 1.0},
            {"name": "RandomHorizontalFlip"},
            {"name": "ToTensor"},
            {"name": "Normalize", "mean": [0.1, 0.2, 0.3], "std": [1, 1, 1]},
        ],
    },
    "TEST": {"DATA_SOURCES": ["synthetic"], "TRANSFORMS": [{"name": "CenterCrop", "size": 40}, {"name": "ToTensor"}]},
}


def resolved(weights, *overrides):
    words = ([f"config.MODEL.WEIGHTS_INIT.PARAMS_FILE={weights}"] if weights else []) + list(overrides)
    composed = compose("benchmark/linear", words)
    return resolve(composed.run, "runs/x", recipe="benchmark/linear", written=composed.written, host=CPU_HOST)


def _run(folder, trunk, **more):
    state = {"model/trunk.weight": torch.ones(3)}
    write_checkpoint(folder, state, config={"MODEL": {"TRUNK": trunk}, "DATA": DATA, **more})
    return folder


def test_it_comes_from_a_run_folder_or_a_checkpoint_in_it(tmp_path, monkeypatch):
    run = _run(tmp_path / "run", {"NAME": "regnet", "REGNET": REGNET})
    for weights in (run, run / "checkpoints" / "step_000000004"):
        plan = resolved(weights)
        trunk = plan.config.MODEL.TRUNK
        assert trunk.NAME == "regnet" and REGNET.items() <= vars(trunk.REGNET).items()
        assert plan.config.MODEL.NON_TRAINABLE_PARAMS == ["trunk"]
    monkeypatch.chdir(tmp_path)
    assert str(run) == resolved("run").config.MODEL.WEIGHTS_INIT.PARAMS_FILE  # workers may start elsewhere
    assert resolved("run", "config.MODEL.TRUNK.NAME=resnet").config.MODEL.TRUNK.NAME == "resnet"


def test_the_newest_configuration_that_can_be_read_is_taken(tmp_path):
    run = _run(tmp_path / "run", {"NAME": "regnet", "REGNET": REGNET})
    (run / RESOLVED_FILE).write_text("config: {MODEL: 3}")
    for step, text in (
        (5, None),
        (6, '{"body": {"config": {"config": {"MODEL": {"TRUNK": 1}, "DATA": {}}}}}'),
        (7, "["),
    ):
        folder = run / "checkpoints" / f"step_{step:09d}"
        folder.mkdir()
        if text is None:
            older = json.loads((run / "checkpoints" / "step_000000004" / "manifest.json").read_text())
            older["body"]["config"]["config"]["MODEL"]["TRUNK"]["REGNET"]["depth"] = 5
            text = json.dumps(older)
        (folder / "manifest.json").write_text(text)
    other = run / "checkpoints" / "step_000000008.tmp"  # not yet whole
    shutil.copytree(run / "checkpoints" / "step_000000004", other)
    for name in ("", "weights.torch"):
        assert saved_config(run / name)["MODEL"]["TRUNK"]["REGNET"]["depth"] == 5
    assert saved_config(run / "checkpoints" / "step_000000004")["MODEL"]["TRUNK"]["REGNET"]["depth"] == 3
    assert saved_config(run / "checkpoints" / "step_000000007") is None


def test_nothing_in_it_is_run(tmp_path, monkeypatch):
    (tmp_path / "canary_module.py").write_text("raise SystemExit('ran')")
    monkeypatch.syspath_prepend(str(tmp_path))
    trunk = {"NAME": "regnet", "REGNET": {**REGNET, "_target_": "os.system", "name": None}, "PARAMS": {"x": "${env:Y}"}}
    run = _run(tmp_path / "run", trunk, IMPORTS=["canary_module"], SLURM={"SETUP": ["touch canary"]})
    with pytest.raises(ConfigError, match="is for trunks of your own"):
        resolved(run)
    del trunk["PARAMS"]
    plan = resolved(_run(tmp_path / "other", trunk, IMPORTS=["canary_module"]))
    assert "canary_module" not in sys.modules and plan.config.IMPORTS == []
    assert "_target_" not in vars(plan.config.MODEL.TRUNK.REGNET)


def test_a_trunk_of_ones_own_must_be_imported_by_the_user(tmp_path):
    run = _run(tmp_path / "run", {"NAME": "theirs", "PARAMS": {"width": 3}}, IMPORTS=["their_module"])
    with pytest.raises(ConfigError, match=r"must be a known trunk \(got 'theirs'\)"):
        resolved(run)


def test_without_a_run_it_says_what_to_write(tmp_path):
    with pytest.raises(ConfigError, match=r"PARAMS_FILE: must name weights, as config.MODEL.TRUNK.NAME is auto"):
        resolved(None)
    with pytest.raises(ConfigError, match=r"PARAMS_FILE: must name a run folder, .* that exists \(got '/none'\)"):
        resolved("/none")
    with pytest.raises(ConfigError) as caught:
        resolved(
            None, f"config.DATA.TRAIN.DATA_PATHS=[{tmp_path}/none]", "config.DATA.TRAIN.DATA_SOURCES=[disk_folder]"
        )
    keys = [problem.key for problem in caught.value.problems]
    assert keys == ["config.MODEL.WEIGHTS_INIT.PARAMS_FILE", "config.DATA.TRAIN.DATA_PATHS"]
    (tmp_path / "w.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"w\.safetensors"):
        resolved(tmp_path / "w.safetensors", "config.DATA.IMG_SIZE=64")  # of transforms that the weights would name


def test_weights_of_no_known_network_have_the_trunk_that_is_named(tmp_path):
    """What they lack is the loader's to say; the launcher needs size and normalization alone."""
    torch.save({"conv1.weight": torch.ones(64, 3, 7, 7)}, tmp_path / "part.pth")
    with pytest.raises(CheckpointError, match=r"No network .* has the 1 tensor conv1.weight. Write the trunk"):
        network_of(str(tmp_path / "part.pth"))
    save_image(tmp_path / "a.png", 0)
    images = f"config.DATA.TRAIN.DATA_PATHS=[{tmp_path}]", f"config.DATA.TEST.DATA_PATHS=[{tmp_path}]"
    plan = resolved(tmp_path / "part.pth", "config.MODEL.TRUNK.NAME=timm/vit_base_patch16_384", *images)
    entries = {entry["name"]: entry for entry in plan.config.DATA.TRAIN.TRANSFORMS}
    assert entries["RandomResizedCrop"]["size"] == 384
    assert entries["Normalize"]["mean"] == [0.485, 0.456, 0.406]
    assert recognized(SimpleNamespace(plan=plan)) == "timm/vit_base_patch16_384"


@pytest.mark.parametrize("recipe", ["benchmark/linear", "benchmark/knn", "benchmark/extract_features"])
def test_images_size_and_range_are_those_of_the_run(recipe, tmp_path):
    run = _run(tmp_path / "run", {"NAME": "regnet", "REGNET": REGNET})
    composed = compose(recipe, [f"config.MODEL.WEIGHTS_INIT.PARAMS_FILE={run}"])
    data = resolve(composed.run, "runs/x", host=CPU_HOST).config.DATA
    for split in ("TRAIN", "TEST"):
        assert getattr(data, split).DATA_SOURCES == ["synthetic"], split
    assert (data.TRAIN.DATA_LIMIT, data.TRAIN.DEFAULT_GRAY_IMG_SIZE) == (200, 48)
    views = data.TRAIN.TRANSFORMS
    assert views[0] == {"name": "RandomResizedCrop", "size": 40, "scale": [0.3, 1.0]}
    assert [view["name"] for view in views[1:]] == ["RandomHorizontalFlip", "ToTensor", "Normalize"]
    assert views[-1]["mean"] == [0.1, 0.2, 0.3] and DATA["TEST"]["TRANSFORMS"] == data.TEST.TRANSFORMS


def test_images_that_the_user_names_are_used_at_the_runs_size(tmp_path):
    run = _run(tmp_path / "run", {"NAME": "regnet", "REGNET": REGNET})
    for split in ("train", "test"):
        for name in ("a/1.png", "b/2.png"):
            (tmp_path / split / name).parent.mkdir(parents=True)
            (tmp_path / split / name).touch()
    train, test = (f"config.DATA.{name.upper()}.DATA_PATHS=[{tmp_path / name}]" for name in ("train", "test"))
    data = resolved(run, train, test).config.DATA
    for split in ("TRAIN", "TEST"):
        assert getattr(data, split).DATA_SOURCES == ["disk_folder"] and getattr(data, split).DATA_LIMIT == -1
    assert data.TRAIN.TRANSFORMS[0]["size"] == 40
    assert data.TEST.TRANSFORMS == []  # resized and cropped as TRAIN's, whatever size the images have
    (tmp_path / "x.csv").write_text("path,label\ntrain/a/1.png,a\n")
    table = f"config.DATA.TRAIN.DATA_PATHS=[{tmp_path / 'x.csv'}]"
    assert resolved(run, table, test).config.DATA.TRAIN.DATA_SOURCES == ["manifest"]
    # The run's own TEST has other classes, so it is not taken.
    with pytest.raises(ConfigError, match="must name the images"):
        resolved(run, train)


def test_paths_from_the_environment_must_be_named(tmp_path):
    masked = {**DATA["TRAIN"], "DATA_SOURCES": ["disk_folder"], "DATA_PATHS": ["${oc.env:HOME}"]}
    run = _run(tmp_path / "run", {"NAME": "regnet", "REGNET": REGNET}, DATA={**DATA, "TRAIN": masked})
    with pytest.raises(ConfigError, match="paths from environment variables"):
        resolved(run)


def test_a_sweep_of_rates_makes_a_head_for_each(tmp_path):
    run = _run(tmp_path / "run", {"NAME": "regnet", "REGNET": REGNET})
    factors = "config.OPTIMIZER.head_optimizer_params.lr_factors"
    plan = resolved(run, f"{factors}=[1,2,3]")
    assert len(plan.config.MODEL.HEAD.PARAMS) == 3 and plan.optimizer.head_lr_factors == (1.0, 2.0, 3.0)
    for words, message in [
        ([f"{factors}=[1,-2]"], "lr_factors"),
        (["config.ZERO.clip_grad=1.0"], "cannot go with clipping"),
        (["config.MODEL.FEATURE_EVAL_SETTINGS.FREEZE_TRUNK_ONLY=false"], "needs a frozen trunk"),
        (["config.MODEL.HEAD.PARAMS=[[mlp,{dims:[-1,-1]}],[mlp,{dims:[-1,-1]}]]"], "one after another"),
    ]:
        with pytest.raises(ConfigError, match=message):
            resolved(run, *words)


def test_adapters_of_a_run_go_on_as_they_were(tmp_path):
    """Also where the recipe names the trunk itself: another LORA_ALPHA would scale what was trained."""
    trunk, model = {"NAME": "regnet", "REGNET": REGNET}, "config.MODEL.TRUNK.NAME=regnet"
    run = _run(tmp_path / "run", trunk)
    write_checkpoint(
        run, {}, config={"MODEL": {"TRUNK": trunk, "LORA": {"USE_LORA": True, "LORA_ALPHA": 4}}, "DATA": DATA}
    )
    words = [
        f"config.DATA.{split}.{key}"
        for split in ("TRAIN", "TEST")
        for key in ("DATA_SOURCES=[digits]", "TRANSFORMS=[{name: ToTensor}]")
    ]
    with pytest.raises(ConfigError, match=r"config.MODEL.LORA: must be as in the run .*LORA_ALPHA: 4,"):
        resolved(run, model, *words, "config.MODEL.LORA.USE_LORA=true", "config.MODEL.LORA.LORA_ALPHA=8")


def test_normalization_is_that_of_the_last_normalize():
    first, last = ({"name": "Normalize", "mean": [mean] * 3, "std": [0.5] * 3} for mean in (0.1, 0.2))
    for transforms in ([first, last, {"name": "ToTensor"}, "RandomErasing"], [last]):
        assert normalization(transforms) == ([0.2] * 3, [0.5] * 3)
    assert normalization([{"name": "ToTensor"}, "Normalize"]) == ([0.0] * 3, [1.0] * 3)
    # One number stands for all channels, and there may be others than three.
    assert normalization([{"name": "Normalize", "mean": [0.2], "std": [0.5]}]) == ([0.2] * 3, [0.5] * 3)
    assert normalization([], 5) == ([0.0] * 5, [1.0] * 5)


def test_images_have_the_channels_of_the_run(tmp_path):
    data = {split: {**keys, "TRANSFORMS": [{"name": "ToTensor"}]} for split, keys in DATA.items()}
    model = {"TRUNK": {"NAME": "resnet"}, "IN_CHANNELS": 4}
    write_checkpoint(tmp_path / "run", {"model/trunk.weight": torch.ones(3)}, config={"MODEL": model, "DATA": data})
    sources = [
        f"config.DATA.{split}.{key}" for split in data for key in ("DATA_SOURCES=[disk_folder]", "DATA_PATHS=[x]")
    ]
    config = resolved(tmp_path / "run", "config.DRY_RUN=true", *sources).config
    assert config.DATA.IN_CHANNELS == config.MODEL.IN_CHANNELS == 4


TIMM = {"name": "vit_tiny_patch16_224", "model_args": {"depth": 1}}
SAVED_TRUNKS = [
    # saved, whether the recipe's method needs a mask token, block of the trunk, its keys
    ({"NAME": "regnet", "REGNET": {"depth": 7, "of_another_release": 1}}, False, "REGNET", {"depth": 7}),
    ({"NAME": "resnet", "RESNETS": {"DEPTH": 18}}, False, "RESNETS", {"DEPTH": 18}),
    ({"NAME": "vision_transformer", "VISION_TRANSFORMERS": {"NUM_LAYERS": 3}}, False, "VISION_TRANSFORMERS",
     {"NUM_LAYERS": 3, "USE_MASK_TOKEN": False}),
    ({"NAME": "vision_transformer", "VISION_TRANSFORMERS": {"NUM_LAYERS": 3}}, True, "VISION_TRANSFORMERS",
     {"NUM_LAYERS": 3, "USE_MASK_TOKEN": True}),
    ({"NAME": "timm", "PARAMS": TIMM}, False, "PARAMS", TIMM),
    ({"NAME": "timm/vit_tiny_patch16_224", "PARAMS": TIMM}, False, "PARAMS", {"model_args": {"depth": 1}}),
    ({"NAME": "timm/vit_tiny_patch16_224", "PARAMS": TIMM}, True, "PARAMS",
     {"model_args": {"depth": 1}, "use_mask_token": True}),
    ({"NAME": "timm", "PARAMS": TIMM}, True, "VISION_TRANSFORMERS", {"USE_MASK_TOKEN": False}),
    ({"NAME": "mine", "PARAMS": {"name": "small"}}, False, "PARAMS", {"name": "small"}),
]  # fmt: skip


@pytest.mark.parametrize(("saved", "needs_mask", "block", "keys"), SAVED_TRUNKS)
def test_a_trunk_has_the_keys_of_the_run(saved, needs_mask, block, keys):
    recipe = Trunk(NAME="auto")
    recipe.VISION_TRANSFORMERS.USE_MASK_TOKEN = needs_mask
    trunk = trunk_of(recipe, saved)
    found = trunk.PARAMS if block == "PARAMS" else {key: getattr(getattr(trunk, block), key) for key in keys}
    assert (trunk.NAME, found) == (saved["NAME"], keys)
