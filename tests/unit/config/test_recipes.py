from __future__ import annotations

import os
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from vissl_zero.commands.explain import explain
from vissl_zero.commands.plan import plan
from vissl_zero.commands.train import train
from vissl_zero.config import recipes
from vissl_zero.config.recipes import (
    RecipeFile,
    find_recipe,
    list_recipes,
    recipe_file,
    recipe_files,
    recipe_folders,
    recipe_packages,
    recipe_text,
    require_moderate,
)
from vissl_zero.errors import ConfigError


def test_each_recipe_is_found_by_its_name() -> None:
    recipes = list_recipes()
    assert len(recipes) > 100
    assert [find_recipe(recipe.name) for recipe in recipes] == recipes


def test_the_recipes_of_a_checkout_come_before_those_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "configs").mkdir()
    monkeypatch.chdir(tmp_path)
    checkout = Path(__file__).parents[3] / "configs"
    assert recipe_folders()[:2] == [checkout, tmp_path / "configs"]


def test_no_recipe_is_found_by_a_name_that_no_file_has() -> None:
    assert [find_recipe(name) for name in ("", "digits", "digits/no_such", "a\0b", "a" * 300)] == [None] * 5


def test_a_number_may_not_have_more_digits_than_a_thousand_and_a_text_may_be_long() -> None:
    require_moderate(f"a: {'1' * 1000}\nb: {'x' * 9000}\nc: {'1' * 9000}x")
    for sign in ("", "-", "+"):
        with pytest.raises(ValueError, match="digits"):
            require_moderate(f"a: {sign}{'1' * 1001}")


def test_a_package_of_recipes_is_found_and_a_broken_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    values = ("vissl_zero.conf", "vissl_zero.nowhere", "nowhere.at_all", "vissl_zero.errors")
    points = [EntryPoint(f"plugin {value}", value, "vissl_zero.recipes") for value in values]
    monkeypatch.setattr(recipes, "entry_points", lambda group: [point for point in points if point.group == group])
    folders, broken = recipe_packages.__wrapped__()
    assert folders == [Path(recipes.__file__).parents[1] / "conf"]
    assert [problem.got for problem in broken] == list(values[1:])
    assert "there is no package vissl_zero.nowhere" in str(broken[0]) and "No module named 'nowhere'" in str(broken[1])


def test_values_levels_and_digits_of_a_recipe_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipes, "_MAX_VALUES", 9)
    monkeypatch.setattr(recipes, "_MAX_DEPTH", 4)
    monkeypatch.setattr(recipes, "_MAX_DIGITS", 3)
    # A mapping, its two keys, a list of two (3) and its alias (3); three lists; as many digits as there may be.
    for most, more in (("{a: &x [b, c], d: *x}", "{a: &x [b, c], d: *x, e}"), ("[[[]]]", "[[[[]]]]"), ("999", "1000")):
        recipes.require_moderate(most)
        with pytest.raises(ValueError, match=r"it has more|it is nested|it has a number"):
            recipes.require_moderate(more)


LAUGHS = "x0: &x0 [a]\n" + "".join(f"x{i}: &x{i} [{', '.join([f'*x{i - 1}'] * 9)}]\n" for i in range(1, 10))


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (f"{LAUGHS}config:\n  IMPORTS: *x9\n", "more than 100,000 values, with aliases unfolded"),
        ("config: &c\n  DATA: *c\n", "stands in its own block"),
        ("config: " + "[" * 5000 + "]" * 5000, "nested deeper than 50 levels"),
        ("config:\n  SEED_VALUE: " + "9" * 5000, "a number of more than 1000 digits"),
        ("config: \udc80", "can't decode byte 0x80"),
        ("config: [", "while parsing"),
        (None, "it is a named pipe"),
    ],
)
def test_a_hostile_recipe_is_one_sentence(tmp_path: Path, text: str | None, reason: str) -> None:
    """Hydra unfolds aliases for ever, and its YAML reader ends in RecursionError, ValueError or UnicodeDecodeError."""
    path = tmp_path / "config" / "x.yaml"
    path.parent.mkdir()
    if text is None:
        os.mkfifo(path)
    else:
        path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match=rf"(?s)x\.yaml: must be a recipe that can be read \(.*{reason}"):
        recipe_text(path)
    refused = "x.yaml, line 1: is not YAML" if reason == "while parsing" else rf"(?s)x\.yaml: .*{reason}"
    for place in (f"--config-dir={tmp_path}", f"hydra.searchpath=[file://{tmp_path}]"):
        with pytest.raises(ConfigError, match=refused):
            train(["config=x", place, "--dry-run"])
    if text is not None:
        for command in (plan, explain):
            with pytest.raises(ConfigError, match="must be a recipe that can be read"):
                command([str(path)])


def test_the_aliases_of_a_plain_recipe_are_read(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("a: &a {b: 1}\nc: [*a, *a]\nd: &d 1\ne: *d\n")
    assert recipe_text(tmp_path / "x.yaml").startswith("a: &a")


def test_a_file_says_which_program_it_is_for(tmp_path: Path) -> None:
    body = (
        "config: {{MODEL: {{TRUNK: {{NAME: resnet}}}}, DATA: {{TRAIN: {{DATA_SOURCES: [disk_folder]}}}}, SVM: {svm}}}"
    )
    wanted = {"svm": ("{normalize: true}", "train_svm"), "low": ("{low_shot: {k_values: [1]}}", "train_svm_low_shot")}
    for name, (block, _) in wanted.items():
        file = tmp_path / "config" / name / "eval.yaml"
        file.parent.mkdir(parents=True)
        file.write_text(body.format(svm=block))
    for name, (_, program) in wanted.items():
        found = recipe_file(tmp_path / "config" / name / "eval.yaml")
        assert found.program == program and f"engine_name={program}" in found.overrides
    assert {recipe.program for recipe in recipe_files(tmp_path / "config")} == {"train_svm", "train_svm_low_shot"}


# The blocks that make a file a complete recipe.
TRUNK, DATA = "MODEL: {TRUNK: {NAME: resnet}}", "DATA: {TRAIN: {DATA_SOURCES: [digits]}}"
OPTIMIZER, LOSS = "OPTIMIZER: {name: sgd}", "LOSS: {name: CrossEntropyLoss}"
COMPLETE = f"config: {{{TRUNK}, {DATA}, {OPTIMIZER}, {LOSS}}}"


def _without(block: str) -> str:
    return f"config: {{{', '.join(each for each in (TRUNK, DATA, OPTIMIZER, LOSS) if each != block)}}}"


def write(folder: Path, files: dict[str, str]) -> Path:
    """Write files below ``folder/config``, which is returned."""
    for name, text in files.items():
        path = folder / "config" / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder / "config"


@pytest.mark.parametrize(
    ("text", "is_complete"),
    [
        (COMPLETE, True),
        (COMPLETE.replace("TRAIN", "TEST"), True),
        *((_without(block), False) for block in (TRUNK, DATA, OPTIMIZER, LOSS)),
        (COMPLETE.replace("NAME: resnet", "NAME: ''"), False),
        (COMPLETE.replace("name: CrossEntropyLoss", "name: ''"), False),
        (COMPLETE.replace("LOSS: {name: CrossEntropyLoss}", "LOSS: CrossEntropyLoss"), False),
        *((f"config: {{{TRUNK}, {DATA}, {block}: {{a: 1}}}}", True) for block in ("NEAREST_NEIGHBOR", "SVM")),
        *((f"config: {{{TRUNK}, {DATA}, {block}: {{}}}}", False) for block in ("NEAREST_NEIGHBOR", "SVM")),
        (f"config: {{{TRUNK}, IMG_RETRIEVAL: {{a: 1}}}}", True),
        (f"config: {{{DATA}, IMG_RETRIEVAL: {{a: 1}}}}", False),
        (f"config: {{{TRUNK}, DATA: {{TRAIN: {{BATCHSIZE_PER_REPLICA: 4}}}}, SVM: {{a: 1}}}}", False),
        (f"engine_name: extract_features\nconfig: {{{TRUNK}, {DATA}}}", True),
        *((f"engine_name: {name}\nconfig: {{{TRUNK}, {DATA}}}", False) for name in ("train", "[]", "no_such")),
        ("defaults: [/config/digits/supervised]\nconfig: {OPTIMIZER: {name: sgd}}", True),
        ("defaults: [config/digits/supervised, {a: b}]\nconfig: {OPTIMIZER: {name: sgd}}", False),
        ("defaults: /config/digits/supervised\nconfig: {OPTIMIZER: {name: sgd}}", False),
        ("[1]", False),
        ("config: [1]", False),
        ("[1]: 2", False),
        ("a: 2020-13-45", False),
        ("config: [", False),
    ],
)
def test_a_complete_recipe_has_the_blocks_of_a_run(tmp_path: Path, text: str, is_complete: bool) -> None:
    folder = write(tmp_path, {"x": text})
    assert [str(found) for found in recipe_files(folder)] == ["x"] * is_complete


def test_an_overlay_is_composed_on_the_nearest_complete_recipe_above(tmp_path: Path) -> None:
    folder = write(
        tmp_path,
        {
            "task/a": COMPLETE,
            "task/b": COMPLETE,
            "task/deep/c": COMPLETE,
            "task/deep/models/wide": f"config: {{{TRUNK}}}",
            "task/models/longer": _without(LOSS),
            "task/models/seed": "config: {SEED_VALUE: 1}",
            "task/models/other": f"config: {{{DATA}, {OPTIMIZER}}}",
            "lonely/part": _without(LOSS),
        },
    )
    (tmp_path / "above.yaml").write_text(COMPLETE)  # not below config/, so it has no name
    longer, wide = "task/a + task/models/longer", "task/deep/c + task/deep/models/wide"
    complete = ["task/a", "task/b", "task/deep/c"]
    assert [str(found) for found in recipe_files(folder)] == [*complete, longer]
    assert [str(found) for found in recipe_files(folder, with_parts=True)] == [*complete, wide, longer]
    assert [str(found) for found in recipe_files(folder / "task/models")] == [longer]
    for name in ("task/a", "lonely/part"):
        assert recipe_file(folder / f"{name}.yaml") == RecipeFile(name, folder=str(tmp_path))
    assert str(recipe_file(folder / "task/models/longer.yaml")) == longer
    assert str(recipe_file(folder / "task/deep/models/wide.yaml")) == wide


def test_a_recipe_that_begins_with_another_is_no_part_of_its_neighbor(tmp_path: Path) -> None:
    own = "defaults: [/config/digits/supervised]\nconfig: {SEED_VALUE: 2}"
    folder = write(tmp_path, {"a": COMPLETE, "own": own})
    assert recipe_file(folder / "own.yaml") == RecipeFile("own", folder=str(tmp_path))
    assert [str(found) for found in recipe_files(folder)] == ["a"]  # names none of the blocks


def test_the_arguments_of_a_file_compose_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    svm = f"config: {{{TRUNK}, {DATA}, SVM: {{normalize: true}}}}"
    folder = write(
        tmp_path,
        {"task/eval": svm, "task/models/wide": f"config: {{{TRUNK}}}", "named": f"engine_name: train_svm\n{svm}"},
    )
    place = f"hydra.searchpath=[file://{tmp_path}]"
    monkeypatch.chdir(folder / "task")
    complete, overlay = recipe_file(Path("eval.yaml")), recipe_file(Path("models/wide.yaml"))
    assert (complete.recipe, complete.overrides) == ("task/eval", [place, "engine_name=train_svm"])
    assert complete.file == folder / "task/eval.yaml"
    assert overlay == list(recipe_files(folder / "task", with_parts=True))[1]
    assert overlay.recipe == "task/eval" and overlay.file == folder / "task/models/wide.yaml"
    assert overlay.overrides == [place, "engine_name=train_svm", "+config/task/models=wide"]
    # A file that names its program needs no word for it, and a recipe of the package no folder.
    assert recipe_file(folder / "named.yaml").overrides == [place]
    assert RecipeFile("digits/swav").overrides == []


def test_a_recipe_lies_below_a_folder_called_config(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text(COMPLETE)
    for find in (lambda: recipe_file(tmp_path / "x.yaml"), lambda: list(recipe_files(tmp_path))):
        with pytest.raises(ConfigError, match="must stand in or below a folder called config"):
            find()
