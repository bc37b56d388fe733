"""The plan on disk: round trip, and nothing from the environment in it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import yaml

from vissl_zero.config.compose import compose
from vissl_zero.resolve.resolve import load_resolved, resolve, save_resolved
from vissl_zero.resolve.resolved import ResolvedRun
from vissl_zero.resolve.saved import as_data, read_saved

RECIPE = "quickstart/swav_digits"


def planned(*overrides: str) -> ResolvedRun:
    composed = compose(RECIPE, overrides)
    return resolve(composed.run, "runs/test", recipe=composed.recipe, written=composed.written)


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["config.MODEL.FLOAT8.USE_FLOAT8=true", "config.MODEL.FLOAT8.SCALES=mx", "config.MODEL.FLOAT8.GATHER=true"],
        ["config.OPTIMIZER.name=sgd", "config.OPTIMIZER.use_larc=true", "config.ZERO.clip_grad=1e-3"],
        [
            "config.MODEL.ACTIVATION_CHECKPOINTING.USE_ACTIVATION_CHECKPOINTING=true",
            "config.MODEL.TRUNK.REGNET.stage_checkpoints=[[1],[1,2]]",
            "config.OPTIMIZER.momentum=0.5",
        ],
    ],
)
def test_round_trip(tmp_path, overrides):
    plan = planned(*overrides)
    save_resolved(plan, tmp_path / "plan.yaml")
    assert load_resolved(tmp_path / "plan.yaml") == plan


def test_a_plan_of_an_earlier_version_lacks_what_came_later(tmp_path):
    plan = planned()
    save_resolved(plan, tmp_path / "plan.yaml")
    saved = yaml.safe_load((tmp_path / "plan.yaml").read_text())
    for key in ("non_regularized", "head_lr_factors", "param_rules", "head_rules"):
        del saved["optimizer"][key]
    for key in ("float8", "checkpoint_blocks"):
        del saved["sharding"][key]
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(saved))
    assert load_resolved(tmp_path / "plan.yaml") == plan


@pytest.fixture
def secret_plan(monkeypatch):
    monkeypatch.setenv("SCRATCH_FOLDER", "/tmp/very-secret")
    monkeypatch.setenv("DECAY", "0.0123")
    monkeypatch.setenv("COMMENT_TEXT", "do not tell")
    return planned(
        "config.CHECKPOINT.DIR=${oc.env:SCRATCH_FOLDER}/run",
        "config.OPTIMIZER.weight_decay=${oc.env:DECAY}",
        "config.SLURM.COMMENT=${oc.env:COMMENT_TEXT}",
        "config.DATA.TEST.DATA_PATHS=['${config.CHECKPOINT.DIR}/images']",
        "config.DATA.TEST.DATA_SOURCES=[digits]",
        "config.OPTIMIZER.non_regularized_parameters=['${oc.env:COMMENT_TEXT}']",
    )


def test_values_of_the_environment_are_used_and_never_written(tmp_path, secret_plan):
    assert secret_plan.run_dir == "/tmp/very-secret/run"
    assert secret_plan.optimizer.weight_decay == 0.0123
    assert secret_plan.config.DATA.TEST.DATA_PATHS == ["/tmp/very-secret/run/images"]
    save_resolved(secret_plan, tmp_path / "plan.yaml")
    text = (tmp_path / "plan.yaml").read_text()
    for secret in ("very-secret", "0.0123", "do not tell"):
        assert secret not in text
    assert yaml.safe_load(text)["run_dir"] == "${oc.env:SCRATCH_FOLDER}/run"


def test_a_worker_resolves_them_again(tmp_path, secret_plan, monkeypatch):
    save_resolved(secret_plan, tmp_path / "plan.yaml")
    assert load_resolved(tmp_path / "plan.yaml") == secret_plan
    monkeypatch.setenv("DECAY", "0.5")
    assert load_resolved(tmp_path / "plan.yaml").optimizer.weight_decay == 0.5


def test_a_plan_can_be_read_where_the_variables_are_not_set(tmp_path, secret_plan, monkeypatch):
    save_resolved(secret_plan, tmp_path / "plan.yaml")
    monkeypatch.delenv("SCRATCH_FOLDER")
    plan = load_resolved(tmp_path / "plan.yaml")
    assert plan.run_dir == "${oc.env:SCRATCH_FOLDER}/run"
    assert plan.config.MODEL == secret_plan.config.MODEL


def test_the_chosen_components_blocks_are_complete_and_alone(tmp_path):
    plan = planned()
    written = as_data(plan)["config"]
    assert written["MODEL"]["TRUNK"].keys() == {"NAME", "REGNET"}
    assert plan.config.LOSS.keys() == {"name", "swav_loss"}
    swav = plan.config.LOSS["swav_loss"]
    assert (swav["num_crops"], swav["num_prototypes"]) == (2, [60])
    head, options = plan.config.MODEL.HEAD.PARAMS[0]
    assert swav["embedding_dim"] == options["dims"][-1]
    assert options["normalize_feats"] is True
    assert "STRATIFIED_SAMPLER" not in written["DATA"]["TRAIN"]
    assert head == "swav_head"


def test_inferred_keys_that_differ_are_said():
    plan = planned("config.LOSS.swav_loss.num_crops=8", "config.LOSS.swav_loss.num_prototypes=[3000]")
    assert plan.notes == (
        "config.LOSS.swav_loss.num_crops: 2 is used, taken from the transforms, not 8.",
        "config.LOSS.swav_loss.num_prototypes: [60] is used, taken from the head, not [3000].",
    )


def test_run_folder_is_the_given_one_or_the_proposal():
    composed = compose(RECIPE, ['config.CHECKPOINT.DIR="~/mine"'])
    assert resolve(composed.run, "ignored").run_dir == str(Path.home() / "mine")
    assert resolve(compose(RECIPE).run, "somewhere").run_dir == str(Path("somewhere").absolute())


def test_an_unrelated_value_that_happens_to_be_equal_stays_a_value(tmp_path, monkeypatch):
    monkeypatch.setenv("DECAY", "0.9")
    monkeypatch.setenv("WORD", "sgd")
    plan = planned(
        "config.OPTIMIZER.name=sgd",
        "config.OPTIMIZER.momentum=0.9",
        "config.OPTIMIZER.weight_decay=${oc.env:DECAY}",
        "config.SLURM.COMMENT=${oc.env:WORD}",
    )
    save_resolved(plan, tmp_path / "plan.yaml")
    saved = yaml.safe_load((tmp_path / "plan.yaml").read_text())["optimizer"]
    assert (saved["name"], saved["options"]["momentum"]) == ("sgd", 0.9)
    assert saved["weight_decay"] == "${oc.env:DECAY}"
    monkeypatch.setenv("DECAY", "0.1")
    monkeypatch.setenv("WORD", "adamw")
    loaded = load_resolved(tmp_path / "plan.yaml").optimizer
    assert (loaded.name, loaded.options["momentum"], loaded.weight_decay) == ("sgd", 0.9, 0.1)


def test_a_folder_relative_to_here_stays_where_it_was(tmp_path, monkeypatch):
    monkeypatch.setenv("SCRATCH_FOLDER", "secret-name")
    monkeypatch.chdir(tmp_path)
    plan = planned("config.CHECKPOINT.DIR=${oc.env:SCRATCH_FOLDER}/run")
    save_resolved(plan, tmp_path / "plan.yaml")
    assert "secret-name" not in (tmp_path / "plan.yaml").read_text()
    monkeypatch.chdir("/")
    assert load_resolved(tmp_path / "plan.yaml").run_dir == str(tmp_path / "secret-name" / "run")


def test_only_the_interpolated_part_of_a_folder_and_whole_words_of_notes_are_replaced(tmp_path, monkeypatch):
    monkeypatch.setenv("A", "a")
    folder = tmp_path / "anna" / "a"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    plan = planned("config.CHECKPOINT.DIR=${oc.env:A}")
    plan = dataclasses.replace(plan, notes=("Level 3 wins over a plan, and a seed of 13.", "a"))
    save_resolved(plan, tmp_path / "plan.yaml")
    saved = yaml.safe_load((tmp_path / "plan.yaml").read_text())
    assert saved["run_dir"] == f"{folder}/${{oc.env:A}}"
    expected = ["Level 3 wins over ${oc.env:A} plan, and ${oc.env:A} seed of 13.", "${oc.env:A}"]
    assert saved["notes"] == expected


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: &a [x, x]\nconfig: {b: [*a, *a]}", "aliases"),
        ("config: [", "ParserError|expected"),
        ("config: 2001-99-99", "month"),
        ("[" * 5000, "RecursionError"),
        ("config: 3", "no config"),
        ("config: {? {a: b} : c}", "ConstructorError"),
        ("config: !!python/object/apply:os.system [true]", "ConstructorError"),
    ],
)
def test_a_file_that_nobody_has_checked_is_read_as_data(tmp_path, text, says):
    (tmp_path / "config.resolved.yaml").write_text(text)
    with pytest.raises(ValueError, match=says):
        read_saved(tmp_path / "config.resolved.yaml")


def test_a_plan_is_replaced_at_once(tmp_path, monkeypatch):
    """A kill in mid-write leaves the plan before; a link in the place of the file is replaced, not followed."""
    target, path = tmp_path / "mine.txt", tmp_path / "config.resolved.yaml"
    target.write_text("mine")
    path.symlink_to(target)
    plan = planned()
    save_resolved(plan, path)
    assert target.read_text() == "mine" and not path.is_symlink()
    text = path.read_text()
    monkeypatch.setattr("vissl_zero.atomic.os.fsync", lambda fd: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        save_resolved(plan, path)
    assert path.read_text() == text
