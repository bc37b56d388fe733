"""Composing: mistyped keys and values, free blocks, where recipes come from."""

from __future__ import annotations

import re
import subprocess
import sys
import warnings
from pathlib import Path

import cloudpickle
import hydra
import pytest
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from vissl_zero.cli import main
from vissl_zero.config.compose import _run_dir, compose, every_mistake, explain, load, register, untyped
from vissl_zero.config.recipes import list_recipes
from vissl_zero.config.sources import ModerateFiles, register_sources
from vissl_zero.errors import ConfigError

RECIPE = "quickstart/swav_digits"
MISTYPED = {
    "key": (["config.ZERO.LEVL=2"], "config.ZERO.LEVL: is not a key. Did you mean 'LEVEL'?"),
    "block": (["config.MODLE.TRUNK.NAME=resnet"], "config.MODLE: is not a key. Did you mean 'MODEL'"),
    "key of a loss": (["config.LOSS.swav_loss.epslon=1"], "config.LOSS.swav_loss.epslon: is not a key. Did you mean"),
    "key like no other": (["config.ZERO.qqqq=1"], "config.ZERO.qqqq: is not a key. Keys there: LEVEL, MEMORY_GB, "),
    "block like no other": (["qqqq=1"], "qqqq: is not a key. Keys there: VERSION, node_id, engine_name, config."),
    "key added with a plus": (["+config.ZERO.LEVL=2"], "config.ZERO.LEVL: is not a key. Did you mean 'LEVEL'?"),
    "key of elsewhere": (
        ["config.OPTIMIZER.base_optimizer.regularize_bn=3"],
        "A key of that name stands at config.OPTIMIZER.regularize_bn.",
    ),
    "new key of a free block": (["config.MODEL.TRUNK.PARAMS.a=1"], "need a plus: +config.MODEL.TRUNK.PARAMS.a=<value>"),
    "mistyped key of a free block": (
        ["config.LOSS.swav_los.epsilon=1"],
        "is not in the recipe yet. Did you mean 'swav_loss'",
    ),
    "whole number": (
        ["config.DATA.TRAIN.BATCHSIZE_PER_REPLICA=many"],
        "config.DATA.TRAIN.BATCHSIZE_PER_REPLICA: must be a whole number (got 'many')",
    ),
    "number": (["config.OPTIMIZER.weight_decay=little"], "must be a number (got 'little')"),
    "number in a list": (["config.OPTIMIZER.betas=[a,b]"], "config.OPTIMIZER.betas[0]: must be a number (got 'a')"),
    "version": (["VERSION=2"], "VERSION: must be 1 (got 2). Use a recipe of version 1."),
    "left to be given": (["config.SEED_VALUE='???'"], "config.SEED_VALUE: must be given. Write config.SEED_VALUE="),
    "truth": (["config.DATA.TRAIN.DROP_LAST=maybe"], "must be true or false (got 'maybe')"),
    "text": (["config.TRAINER.DTYPE=[a]"], "config.TRAINER.DTYPE: must be text"),
    "list": (
        ["config.HOOKS.LOGGERS=wandb"],
        "config.HOOKS.LOGGERS: must be a list. Write config.HOOKS.LOGGERS=[wandb].",
    ),
    "list of numbers": (["config.SEEDS=3"], "config.SEEDS: must be a list. Write config.SEEDS=[3]."),
    "list of others": (["config.SEEDS=some"], "config.SEEDS: must be a list. Correct the value of config.SEEDS."),
    "block as a value": (["config.DATA=3"], "config.DATA: must be a block of keys (got '3')"),
    "block as a list": (["config.DATA=[1]"], "config.DATA: must be a block of keys. Correct the value of config.DATA."),
    "list as a block": (["config.SEEDS={a: 1}"], "config.SEEDS: must be a list. Correct the value of config.SEEDS."),
    "list of words as a block": (["config.DATA.TRAIN.DATA_SOURCES={a: 1}"], "DATA_SOURCES: must be a list. Correct"),
    "null": (["config.SEED_VALUE=null"], "config.SEED_VALUE: must have a value (got null)"),
    "level": (["config.ZERO.LEVEL=[1]"], "config.ZERO.LEVEL: must be a number or a word"),
    "override": (["config.ZERO"], "command line: must be an override (got 'config.ZERO')"),
    "part": (["+config/zeroo=fsdp"], "+config/zeroo: must name a folder of recipes and a file in it. Parts: "),
    "file of a part": (["+config/zero=fsdpp"], "Did you mean +config/zero=fsdp"),
    "choice of Hydra": (
        ["hydra/launcher=nowhere"],
        "command line: must name a configuration file that exists (got 'hydra/launcher/nowhere'). Known: basic, ",
    ),
    "environment": (
        ["config.CHECKPOINT.DIR=${oc.env:NOT_SET_ANYWHERE}"],
        "needs the environment variable NOT_SET_ANYWHERE, which is not set",
    ),
    "key without its block": (["ZERO.LEVEL=2"], "ZERO.LEVEL: is not a key. Write config.ZERO.LEVEL=2."),
    "engine of elsewhere": (
        ["engine_name=knn_segmentation"],
        "engine_name: must be a program that is here (got 'knn_segmentation'). VISSL's segmentation by kNN",
    ),
    "engine like no other": (["engine_name=zzz"], "engine_name: must be train or extract_features or"),
    "engine": (["engine_name=extract_featurs"], "(got 'extract_featurs'). Did you mean 'extract_features'"),
}


@pytest.mark.parametrize("name", MISTYPED)
def test_mistakes_on_the_command_line(name):
    overrides, text = MISTYPED[name]
    with pytest.raises(ConfigError) as caught:
        compose(RECIPE, overrides)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


KINDS = {
    "SLURM": ([1], "must be a block of keys (got '[1]'). Correct the value of config.SLURM."),
    "MODEL.TRUNK.PARAMS": (3, "must be a block of keys (got '3'). Correct the value of config.MODEL.TRUNK.PARAMS."),
    "SEEDS": ({"a": 1}, "must be a list. Correct the value of config.SEEDS."),
    "HOOKS.EXTRA": (None, "must have a value (got null). Leave the key out to get its default."),
    "HOOKS.LOGGERS": ("a", "must be a list. Write config.HOOKS.LOGGERS=[a]."),
    "SEED_VALUE": ([1], "must be a whole number (got '[1]'). Correct the value of config.SEED_VALUE."),
    "ZERO.LEVEL": ({"a": 1}, "must be a number or a word (got \"{'a': 1}\"). Correct the value of config.ZERO.LEVEL."),
    "ZERO.MEMORY_GB": (
        "80 GiB",
        "must be a number (got '80 GiB'). Write 80 (GiB, no unit). For a card of 80 GB write 76.",
    ),
    "ZERO.HOST_MEMORY_GB": ("80.5g", "must be a number (got '80.5g'). Write 80.5 (GiB, no unit)."),
    "ZERO.DISK_GB": ("a80G", "must be a number (got 'a80G'). Correct the value of config.ZERO.DISK_GB."),
    "DATA.WORKER_TIMEOUT_S": (
        "80G",
        "must be a number (got '80G'). Correct the value of config.DATA.WORKER_TIMEOUT_S.",
    ),
    "DATA.TRAIN.DROP_LAST": (
        3.5,
        "must be true or false (got '3.5'). Correct the value of config.DATA.TRAIN.DROP_LAST.",
    ),
    "ZERO.LEVL": (1, "is not a key. Did you mean 'LEVEL'?"),
}


def test_every_mistake_of_a_tree_is_named_with_what_the_key_takes() -> None:
    tree = OmegaConf.create({"config": {}})
    for key, (value, _) in KINDS.items():
        OmegaConf.update(tree, f"config.{key}", value, force_add=True)
    tree.config.LOSS = {"mine": {"free": 1}}
    found = {problem.key: str(problem) for problem in every_mistake(tree)}
    assert found == {f"config.{key}": f"config.{key}: {text}" for key, (_, text) in KINDS.items()}


HEADS = "config.MODEL.HEAD.PARAMS"
LOST = {
    "name in a list": ([f"{HEADS}.swav_head.dims=[64,32]"], f"Write {HEADS}[0][1].dims=<value>."),
    "key of a list in a list": ([f"{HEADS}[0].dims=[64,32]"], f"Write {HEADS}[0][1].dims=<value>."),
    "name of a transform": (
        ["config.DATA.TRAIN.TRANSFORMS.Normalize.mean=[0,0,0]"],
        "Write config.DATA.TRAIN.TRANSFORMS[{Normalize}].mean=<value>.",
    ),
    "new key in a list": ([f"+{HEADS}.swav_head=1"], f"Write the whole list, {HEADS}=[...]."),
    "new key twice": ([f"++{HEADS}.a.b=1"], f"Write the whole list, {HEADS}=[...]."),
    "key taken out": ([f"~{HEADS}.a"], f"Write the whole list, {HEADS}=[...]."),
    "item taken out": ([f"~{HEADS}[0]"], f"{HEADS}[0]: is not a key: {HEADS} has 1 item, counted from 0"),
    "item added": ([f"+{HEADS}[1]=a"], f"{HEADS}[1]: is not a key: {HEADS} has 1 item, counted from 0"),
    "position too high": ([f"{HEADS}[3][1].dims=[1]"], f"{HEADS}[3][1].dims: is not a key: {HEADS} has 1 item"),
    "of a list of this command": (
        [f"{HEADS}=[[mlp,{{dims: [1,2]}}]]", f"{HEADS}.mlp.dims=[2,3]"],
        f"Write {HEADS}[0][1].dims=<value>.",
    ),
    "behind a value": (
        ["config.SEED_VALUE.a=1"],
        "config.SEED_VALUE.a: is not a key: config.SEED_VALUE is one value, which has no keys. Write",
    ),
    "new behind a value": (["+config.SEED_VALUE.a=1"], "Write config.SEED_VALUE=<value>."),
    "taken out behind a value": (["~config.SEED_VALUE.a"], "Write config.SEED_VALUE=<value>."),
    "behind a value in a list": ([f"{HEADS}[0][0].a=1"], f"Write {HEADS}[0][0]=<value>."),
    "behind a value of a loss": (
        ["config.LOSS.swav_loss.epsilon.a=1"],
        "Write config.LOSS.swav_loss.epsilon=<value>.",
    ),
}


@pytest.mark.parametrize("name", LOST)
def test_overrides_through_lists_and_values(name):
    overrides, text = LOST[name]
    transforms = [entry["name"] for entry in load(RECIPE).DATA.TRAIN.TRANSFORMS]
    with pytest.raises(ConfigError) as caught:
        compose(RECIPE, overrides)
    assert text.replace("{Normalize}", str(transforms.index("Normalize"))) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_position_that_no_list_has_and_what_has_no_words_of_its_own_are_one_sentence() -> None:
    with pytest.raises(OmegaConfBaseException) as caught:
        OmegaConf.create({"a": [1]}).a[5]
    assert str(explain(caught.value)).startswith("a[5]: must be a position that the list has, counted from 0")
    other = OmegaConfBaseException("something else.\nMore of it")
    assert str(explain(other)) == "configuration: something else. See docs/configuration.md."


@pytest.mark.timeout(20)
def test_errors_that_are_causes_of_each_other_are_one_sentence() -> None:
    """As under a debugger."""
    first, second = HydraException("something"), KeyError("else")
    first.__cause__, second.__cause__ = second, first
    assert str(explain(first)) == "command line: something. See vissl-zero --help."


def test_composing_warns_of_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compose(RECIPE)
        untyped([f"config={RECIPE}"])


def test_what_a_message_proposes_can_be_written():
    run = load(RECIPE, [f"{HEADS}[0][1].dims=[64,16]", "config.DATA.TRAIN.TRANSFORMS[0].name=Resize"])
    assert run.MODEL.HEAD.PARAMS[0][1]["dims"] == [64, 16] and run.DATA.TRAIN.TRANSFORMS[0]["name"] == "Resize"


def test_a_lost_override_does_not_hide_other_mistakes(capsys):
    words = [f"config={RECIPE}", f"{HEADS}.a=1", "config.SEED_VALUE=abc", "config.SEED_VALU=3"]
    assert main([*words, "--dry-run"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[0] for line in lines] == [f"{HEADS}.a", "config.SEED_VALUE", "config.SEED_VALU"]


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("config:\n  ZERO: {LEVL: 2}\n", "config.ZERO.LEVL: is not a key. Did you mean 'LEVEL'?"),
        (
            "config:\n  OPTIMIZER: {num_epochs: long}\n",
            "config.OPTIMIZER.num_epochs: must be a whole number (got 'long')",
        ),
        ("config:\n  LOSS: {swav_loss: {queue: {length: 3}}}\n", "config.LOSS.swav_loss.queue.length: is not a key"),
        ("config: [unclosed\n", "is not YAML"),
    ],
)
def test_mistakes_in_a_file(tmp_path, monkeypatch, body, text):
    write_recipe(tmp_path, "mine", body)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        load("mine")
    assert text in str(caught.value)


def write_recipe(folder: Path, name: str, body: str) -> None:
    path = folder / "configs" / "config" / f"{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"# @package _global_\n# A recipe of mine.\n{body}")


def test_recipes_of_the_working_directory_are_found_and_may_build_on_packaged_ones(tmp_path, monkeypatch):
    write_recipe(tmp_path, "group/mine", f"defaults: [/config/{RECIPE}]\nconfig: {{SEED_VALUE: 7}}\n")
    monkeypatch.chdir(tmp_path)
    cfg = load("group/mine")
    assert cfg.SEED_VALUE == 7
    assert cfg.LOSS["name"] == "swav_loss"
    assert "group/mine" in [recipe.name for recipe in list_recipes()]


def test_a_packaged_recipe_wins_over_one_of_the_same_name(tmp_path, monkeypatch):
    write_recipe(tmp_path, RECIPE, "config: {SEED_VALUE: 7}\n")
    monkeypatch.chdir(tmp_path)
    assert load(RECIPE).SEED_VALUE == 0


def test_a_file_in_place_of_a_recipe_is_told_where_it_belongs():
    fix = r"got 'my_dinov2\.yaml'\)\. Put it in configs/config/ and write config=my_dinov2\."
    with pytest.raises(ConfigError, match=fix):
        compose("my_dinov2.yaml")


def test_the_path_of_a_recipe_is_answered_with_its_name(tmp_path, monkeypatch):
    write_recipe(tmp_path, "group/mine", "config: {SEED_VALUE: 7}\n")
    monkeypatch.chdir(tmp_path)
    for path in ("configs/config/group/mine.yaml", tmp_path / "configs/config/group/mine.yaml"):
        with pytest.raises(ConfigError, match=r"not a file .*\. Write config=group/mine\.$"):
            compose(str(path))


def test_no_foreign_recipes():
    # classy-vision puts recipes called "args" and more into every Hydra program's config group.
    with pytest.raises(ConfigError, match="must name a recipe"):
        load("args")


def test_an_unknown_recipe_lists_the_closest():
    with pytest.raises(ConfigError, match=r"config: must name a recipe \(got 'quickstart/swav'\).*swav_digits"):
        load("quickstart/swav")


def test_free_blocks_take_new_keys():
    cfg = load(RECIPE, ["+config.MODEL.TRUNK.PARAMS.width=3", "+config.LOSS.my_loss.margin=0.5"])
    assert cfg.MODEL.TRUNK.PARAMS == {"width": 3}
    assert cfg.LOSS["my_loss"] == {"margin": 0.5}


def test_nested_blocks_can_be_filled_from_the_command_line():
    base = "config.OPTIMIZER.base_optimizer"
    cfg = load(RECIPE, ["config.OPTIMIZER.name=zero", f"{base}.name=sgd", f"{base}.larc_config.eps=1e-6"])
    assert cfg.OPTIMIZER.base_optimizer.name == "sgd"
    assert cfg.OPTIMIZER.base_optimizer.larc_config.eps == 1e-6


def test_user_yaml_is_a_recipe_that_gives_the_same_run(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_FOLDER", "/secret/place")
    composed = compose(RECIPE, ["config.CHECKPOINT.DIR=${oc.env:MY_FOLDER}/run", "config.SEED_VALUE=3"])
    text = composed.user_yaml()
    assert "${oc.env:MY_FOLDER}/run" in text
    assert "secret" not in text
    path = tmp_path / "configs" / "config" / "again.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    monkeypatch.chdir(tmp_path)
    assert load("again") == composed.run


def test_a_composed_tree_reaches_another_process(tmp_path: Path) -> None:
    """As submitit sends it to the jobs of a sweep, which have imported nothing yet."""
    register()
    GlobalHydra.instance().clear()
    with hydra.initialize_config_module("vissl_zero.conf", version_base="1.3"):
        tree = hydra.compose("defaults", ["config=quickstart/swav_digits"])
    (tmp_path / "tree.pkl").write_bytes(cloudpickle.dumps(tree))
    read = f"import pickle; print(pickle.load(open({str(tmp_path / 'tree.pkl')!r}, 'rb')).config.LOSS.name)"
    done = subprocess.run([sys.executable, "-c", read], capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout == "swav_loss\n", done.stderr


@pytest.mark.parametrize(
    ("value", "paths"),
    [
        ("/my photos ü", ["/my photos ü"]),
        ("[/my photos ü, /b]", ["/my photos ü", "/b"]),
        ("./photos (2)/a&b", ["./photos (2)/a&b"]),
        ("[/photos (2)]", ["/photos (2)"]),
        ("['/a, b']", ["/a, b"]),
    ],
)
def test_a_folder_may_have_any_name(value: str, paths: list[str]) -> None:
    """Whoever composes: the command line, plan, verify, explain."""
    composed = compose("pretrain/swav/my_photos", [f"config.DATA.TRAIN.DATA_PATHS={value}"])
    assert paths == composed.run.DATA.TRAIN.DATA_PATHS


def test_a_folder_of_recipes_may_have_any_name(tmp_path: Path) -> None:
    (folder := tmp_path / "my, 'recipes'" / "config").mkdir(parents=True)
    (folder / "mine.yaml").write_text(
        "# @package _global_\ndefaults: [/config/supervised/digits]\nconfig: {SEED_VALUE: 7}\n"
    )
    assert untyped(["config=mine"], [str(folder.parent)]).config.SEED_VALUE == 7


def test_a_value_that_hydra_cannot_read_is_answered_with_both_quotes() -> None:
    with pytest.raises(ConfigError, match=r"needs quotes twice, for the shell and for Hydra: .*'/my, photos'"):
        compose("pretrain/swav/my_photos", ["config.DATA.TRAIN.DATA_PATHS=['/a, b]"])


def test_a_job_of_a_sweep_may_register_hydras_sources_again():
    """As a job of submitit does after it has unpickled the registry: ours stays."""
    register_sources()
    SourcesRegistry.instance().register(FileConfigSource)
    assert SourcesRegistry.instance().types["file"] is ModerateFiles


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (FileExistsError(17, "File exists", "a"), "must name a folder, and a file is there (got 'a')"),
        (NotADirectoryError(20, "Not a directory", "a"), "must name a folder, and a file is there (got 'a')"),
        (PermissionError(13, "Permission denied", "a"), "a: cannot be used (Permission denied). Name another"),
        (OSError("no space"), "command line: no space. See vissl-zero --help and --hydra-help."),
        (ValueError("two  words."), "command line: two words. See vissl-zero --help and --hydra-help."),
        (UserWarning("provider=x, path=/no is not available."), "must name folders that exist (got '/no')"),
    ],
)
def test_what_hydra_raises_around_a_job_is_one_sentence(error: Exception, text: str) -> None:
    (problem,) = explain(error).problems
    assert text in str(problem)


def test_a_run_has_a_folder_of_its_millisecond() -> None:
    assert re.fullmatch(r"runs/\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d-\d{3}_digits-dino", _run_dir(None, "digits/dino"))
    assert re.fullmatch(r"runs/[\d_-]{24}several", _run_dir(None, None))
    assert _run_dir("~/mine", "digits/dino") == str(Path.home() / "mine")


def test_the_saved_recipe_names_its_program():
    composed = compose("digits/simclr", ["engine_name=train_svm"])
    assert "PROGRAM: train_svm" in composed.user_yaml()
    assert compose("digits/simclr", ["config.PROGRAM=train_svm"]).run == composed.run


def test_a_configuration_of_detectron_is_no_recipe(tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    for name, text in (("detect", "SOLVER: {BASE_LR: 0.02}\nMODEL: {}\n"), ("other", "MODEL: {}\nZZZ: 1\n")):
        (tmp_path / f"config/{name}.yaml").write_text(text)
    with pytest.raises(ConfigError) as error:
        compose("detect", [f"hydra.searchpath=['file://{tmp_path}']"])
    (problem,) = error.value.problems
    assert (problem.key, problem.must) == (
        "config",
        "must name a recipe, and this is a configuration of Detectron2",
    )
    with pytest.raises(ConfigError) as error:
        compose("other", [f"hydra.searchpath=['file://{tmp_path}']"])
    assert "Detectron2" not in str(error.value)
