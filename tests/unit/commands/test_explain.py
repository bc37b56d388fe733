"""``vissl-zero explain``: each key of a recipe in its list, all problems at once, copies without internal paths."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from vissl_zero.cli import main
from vissl_zero.commands.explain import account_of, explain
from vissl_zero.commands.train import train
from vissl_zero.config.compose import compose
from vissl_zero.config.recipes import RecipeFile, recipe_file, recipe_files
from vissl_zero.errors import ConfigError

RECIPE = """# @package _global_
config:
  VERBOSE: False
  SEED_VALUE: 3
  DATA:
    TRAIN:
      DATA_SOURCES: [{source}]
      LABEL_SOURCES: [disk_filelist]
      DATASET_NAMES: [photos]
      TRANSFORMS: [{{name: Resize, size: [32, 32]}}, {{name: ToTensor}}]
  MODEL:
    TRUNK: {{NAME: {trunk}, RESNETS: {{DEPTH: 18}}}}
    HEAD: {{PARAMS: [["mlp", {{"dims": [512, 10]}}]]}}
    WEIGHTS_INIT:
      PARAMS_FILE: "{weights}"
  LOSS: {{name: CrossEntropyLoss}}
  OPTIMIZER: {{name: sgd, num_epochs: 100{more}}}
"""
INTERNAL = "manifold://tree/users/x/dino_vitbase16_pretrain.pth"


@pytest.fixture
def write(tmp_path):
    def file(
        name: str, source: str = "disk_filelist", trunk: str = "resnet", weights: str = "", more: str = ""
    ) -> Path:
        path = tmp_path / "configs" / "config" / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(RECIPE.format(source=source, trunk=trunk, weights=weights, more=more))
        return path

    return file


def test_each_key_is_used_without_effect_or_different(write):
    account = account_of(recipe_file(write("mine", weights=INTERNAL)))
    assert account.is_accepted, account.refused
    assert {"OPTIMIZER.name", "MODEL.TRUNK.RESNETS.DEPTH", "LOSS.name"} <= set(account.used)
    assert account.without_effect["VERBOSE"] == "Output is concise and complete."
    assert "one stream" in account.differs["SEED_VALUE"].lower()
    assert not set(account.used) & set(account.without_effect)
    keys = [problem.key for problem in account.yours]
    assert keys == ["config.DATA.TRAIN.DATASET_NAMES", "config.MODEL.WEIGHTS_INIT.PARAMS_FILE"]
    assert "https://dl.fbaipublicfiles.com/dino/dino_vitbase16_pretrain" in account.yours[1].fix


def test_mistyped_keys_do_not_hide_what_rules_refuse(write):
    account = account_of(recipe_file(write("mine", trunk="resnext", more=", lerning_rate: 3")))
    assert {problem.key for problem in account.refused} == {"config.OPTIMIZER.lerning_rate", "config.MODEL.TRUNK.NAME"}
    assert "OPTIMIZER.lerning_rate" not in account.used


def test_an_overlay_is_explained_on_the_nearest_complete_recipe(write):
    write("task/base")
    overlay = write("task/models/wide")
    overlay.write_text("# @package _global_\nconfig: {MODEL: {TRUNK: {NAME: resnet, RESNETS: {DEPTH: 34}}}}\n")
    recipe = recipe_file(overlay)
    assert (recipe.recipe, recipe.overlay) == ("task/base", "task/models/wide")
    assert account_of(recipe).is_accepted
    folder = overlay.parents[1]
    assert [str(found) for found in recipe_files(folder)] == ["task/base"]
    assert [str(found) for found in recipe_files(folder, with_parts=True)] == ["task/base", str(recipe)]


def test_a_folder_is_one_table_and_a_count(write, capsys):
    write("good")
    folder = write("bad", trunk="resnext").parent
    assert main(["explain", str(folder)]) == 1
    out = capsys.readouterr().out
    assert "1 of 2 recipes are accepted" in out
    assert "1      1  MODEL.TRUNK.NAME 'resnext'" in out
    assert main(["explain", str(folder), "--json"]) == 1
    rows = json.loads(capsys.readouterr().out)
    assert [(row["name"], row["accepted"]) for row in rows] == [("bad", False), ("good", True)]


def test_fix_replaces_what_only_facebook_has_and_nothing_else(write, tmp_path, capsys):
    path = write("mine", source="everstore", weights=INTERNAL)
    before = yaml.safe_load(path.read_text())
    assert main(["explain", str(path), "--fix", str(tmp_path / "out")]) == 0
    assert "1 files" in capsys.readouterr().out
    text = (tmp_path / "out" / "config" / "mine.yaml").read_text()
    after = yaml.safe_load(text)
    assert after["config"]["MODEL"]["WEIGHTS_INIT"]["PARAMS_FILE"] == "/path/to/dino_vitbase16_pretrain.pth"
    assert after["config"]["DATA"]["TRAIN"]["DATA_SOURCES"] == ["disk_filelist"]
    assert f"was {INTERNAL}, public: https://dl.fbaipublicfiles.com/dino/" in text
    after["config"]["MODEL"]["WEIGHTS_INIT"]["PARAMS_FILE"] = INTERNAL
    after["config"]["DATA"]["TRAIN"]["DATA_SOURCES"] = ["everstore"]
    assert after == before
    assert path.read_text() == RECIPE.format(source="everstore", trunk="resnet", weights=INTERNAL, more="")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--fiks", "a"], "Did you mean '--fix'"),
        (["a", "b"], "must name one recipe, file or folder"),
        (["/no/such.yaml"], "must exist"),
        (["a", "--fix"], "needs a folder"),
        (["digits/swav", "--fix", "out"], "needs a file or a folder"),
    ],
)
def test_wrong_arguments_are_answered_in_a_sentence(arguments, said, capsys):
    assert main(["explain", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_no_torch_is_imported():
    code = "import sys; from vissl_zero.cli import main; main(['explain', 'digits/swav'])"
    code += "; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("digits/swav: accepted")


@pytest.mark.parametrize(
    "word", ["config.LOSS=" + "{a: " * 500 + "1" + "}" * 500, "config.LOSS=" + "[" * 500 + "]" * 500]
)
def test_a_command_line_that_is_nested_too_deeply_is_one_sentence(word: str) -> None:
    with pytest.raises(ConfigError, match="must not be nested too deeply"):
        train(["config=quickstart/swav_digits", word, "--dry-run"])


def test_a_recipe_that_begins_with_itself_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "config/x.yaml").write_text("# @package _global_\ndefaults: [/config/x]\n")
    with pytest.raises(ConfigError, match="check that no recipe lists itself"):
        train(["config=x", f"--config-dir={tmp_path}", "--dry-run"])


@pytest.mark.timeout(60)
def test_texts_that_name_each_other_do_not_fill_the_memory() -> None:
    words = ["config.LOSS.x0=abcdefghi"]
    words += [f"config.LOSS.x{i}='{f'${{config.LOSS.x{i - 1}}}' * 9}'" for i in range(1, 12)]
    with pytest.raises(ConfigError, match="must not make the texts longer"):
        compose("quickstart/swav_digits", [f"+{word}" for word in words])


def test_a_recipe_that_names_its_own_base_is_explained_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where both lie at the root of config/, so that one could be taken for a part of the other."""
    folder = tmp_path / "configs" / "config"
    folder.mkdir(parents=True)
    (folder / "base.yaml").write_text(
        "# @package _global_\ndefaults: [/config/digits/supervised]\nconfig: {SEED_VALUE: 2}\n"
    )
    (folder / "more.yaml").write_text(
        "# @package _global_\ndefaults: [/config/base]\nconfig: {OPTIMIZER: {weight_decay: 0.1}}\n"
    )
    assert explain([str(folder / "more.yaml")]) == 0
    assert capsys.readouterr().out.startswith("more: accepted")
    assert explain(["more", "--config-dir", str(tmp_path / "configs"), "config.SEED_VALUE=x"]) == 1
    assert "more: refused: 1 problem;" in capsys.readouterr().out


@pytest.mark.parametrize("form", ["--config-dir={}", "hydra.searchpath=[file://{}]"])
def test_a_mistyped_recipe_is_looked_for_where_the_command_line_says(tmp_path: Path, form: str) -> None:
    (tmp_path / "config/mine").mkdir(parents=True)
    (tmp_path / "config/mine/odd_recipe.yaml").write_text("# @package _global_\nconfig: {SEED_VALUE: 1}\n")
    with pytest.raises(ConfigError, match="Did you mean config=mine/odd_recipe"):
        train(["config=mine/odd_recpe", form.format(tmp_path), "--dry-run"])


def test_a_recipe_of_retrieval_is_sent_to_its_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "config/find.yaml").write_text(
        "# @package _global_\nconfig:\n  MODEL: {TRUNK: {NAME: resnet}}\n"
        "  IMG_RETRIEVAL: {EVAL_DATASET_NAME: roxford5k, DATASET_PATH: /tmp}\n"
    )
    assert main(["config=find", f"--config-dir={tmp_path}", "--dry-run"]) == 2
    assert "Write vissl-zero instance_retrieval_test config=find." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ("", "config.MODEL.WEIGHTS_INIT.PARAMS_FILE: must name weights, as config.MODEL.TRUNK.NAME is auto"),
        (
            "nope.pth",
            "config.MODEL.WEIGHTS_INIT.PARAMS_FILE: must name a run folder, a checkpoint or a file of weights",
        ),
        ("torchhub:dinov2_vits14", "torchhub:dinov2_vits14 is not in torch's cache. Fill it where there is a network"),
    ],
)
def test_weights_that_are_not_here_do_not_hide_what_does_not_depend_on_them(
    weights: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    words = [f"config.MODEL.WEIGHTS_INIT.PARAMS_FILE={weights}", "config.ZERO.LEVEL=9", "config.OPTIMIZER.num_epochs=0"]
    account = account_of(RecipeFile("finetune/lora"), words)
    assert str(account.refused[0]).startswith(said)
    keys = {problem.key for problem in account.refused[1:]}
    assert {"config.ZERO.LEVEL", "config.OPTIMIZER.num_epochs", "config.DATA.TRAIN.DATA_PATHS"} <= keys
    # What the weights would say is not held against the recipe.
    assert not keys & {"config.MODEL.TRUNK.NAME", "config.DATA.TRAIN.TRANSFORMS", "config.DATA.TEST.TRANSFORMS"}


def test_a_teacher_that_the_loss_names_needs_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    word = "config.LOSS.feature_distillation_loss.teacher=torchhub:dinov2_vits14"
    account = account_of(RecipeFile("distill/photos"), [word])
    assert account.yours == []
    assert [problem.key for problem in account.refused] == ["", "config.DATA.TRAIN.DATA_PATHS"]
    assert str(account.refused[0]).startswith("torchhub:dinov2_vits14 is not in torch's cache.")


def test_a_loss_without_a_teacher_asks_for_it_in_one_place() -> None:
    account = account_of(RecipeFile("distill/photos"), [])
    assert account.yours == []
    assert [problem.key for problem in account.refused] == [
        "config.DATA.TRAIN.DATA_PATHS",
        "config.LOSS.feature_distillation_loss.teacher",
    ]
