"""VISSL's whole tree: every key is there, at its default nothing is said, and its recipes' other values are told apart.

``vissl_keys.txt`` lists the keys of VISSL 0.1.6.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from tests.unit.config.example_config import CPU_HOST, complaints, config
from vissl_zero.config.compose import load
from vissl_zero.config.run_config import Root
from vissl_zero.resolve.inactive import no_effect, refused
from vissl_zero.resolve.resolve import problems
from vissl_zero.vissl.keys import OTHER_LOSSES, vissl_keys, without_vissl_keys

KEYS = (Path(__file__).parent / "vissl_keys.txt").read_text().split()
RECIPE = """# @package _global_
config:
  VERBOSE: True
  REPRODUCIBILITY: {{CUDDN_DETERMINISTIC: {is_set}}}
  HOOKS: {{PERF_STATS: {{MONITOR_PERF_STATS: True}}, LOG_GPU_STATS: False}}
  DATA:
    TRAIN: {{COLLATE_FUNCTION: multicrop_collator, COPY_TO_LOCAL_DISK: True}}
  METERS: {{name: accuracy_list_meter, accuracy_list_meter: {{num_meters: 2}}}}
  MODEL:
    TRUNK: {{SWIN_TRANSFORMER: {{IMAGE_SIZE: 160}}, EFFICIENT_NETS: {{model_version: B1}}}}
    AMP_PARAMS: {{AMP_TYPE: apex}}
  LOSS: {{msn_distillation_loss: {{swapped_assignment: true}}, swav_loss: {{output_dir: /tmp}}}}
  DISTILLATION: {{TEACHER_MODEL: {{TRUNK: {{REGNET: {{depth: 3}}}}}}}}
  SLURM: {{PARTITION: gpu}}
"""


def test_every_key_of_vissl_has_its_place():
    tree = OmegaConf.structured(Root)
    known = set(OTHER_LOSSES)
    missing = [
        key
        for key in KEYS
        if OmegaConf.select(tree, f"config.{key}", default="missing") == "missing"
        and not (key.startswith("LOSS.") and key.split(".")[1] in known)
    ]
    assert len(KEYS) == 599
    assert missing == []


def test_defaults_say_nothing():
    cfg = config()
    assert refused(cfg, CPU_HOST) == []
    assert no_effect(cfg) == []


@pytest.fixture
def composed(tmp_path, monkeypatch):
    def compose(is_set: bool):
        path = tmp_path / "configs" / "config" / "extra" / "vissl.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(RECIPE.format(is_set=is_set))
        monkeypatch.chdir(tmp_path)
        return load("quickstart/swav_digits", ["+config/extra=vissl"])

    return compose


def test_keys_without_effect_are_accepted_in_a_file_and_listed_once(composed):
    cfg = composed(False)
    assert problems(cfg, CPU_HOST) == []
    assert no_effect(cfg) == [
        "Keys without effect here: VERBOSE, HOOKS.PERF_STATS.MONITOR_PERF_STATS, HOOKS.LOG_GPU_STATS, "
        "DATA.TRAIN.COPY_TO_LOCAL_DISK, METERS.accuracy_list_meter.num_meters, "
        "LOSS.swav_loss.output_dir, LOSS.msn_distillation_loss, "
        "SLURM (USE_SLURM is off)."
    ]


def test_keys_that_would_change_the_result_are_refused_by_name(composed):
    said = [str(problem) for problem in problems(composed(True), CPU_HOST)]
    key, why = "config.REPRODUCIBILITY.CUDDN_DETERMINISTIC", "TRAINER.DETERMINISTIC fixes the order of sums here."
    assert said == [f"{key}: must be False: nothing else is implemented (got True). {why} Leave the key out."]


def test_another_collator_is_refused():
    (found,) = complaints(DATA__TRAIN__COLLATE_FUNCTION="targets_one_hot_default_collator")
    assert "config.DATA.TRAIN.COLLATE_FUNCTION: must be " in found and "multicrop_collator" in found


def test_they_work_on_the_command_line_too():
    cfg = load(
        "quickstart/swav_digits", ["config.GEO_LOCALIZATION.TRAIN_LABEL_MAPPING=a.json", "config.RANKING.USE_GPU=true"]
    )
    assert no_effect(cfg) == ["Keys without effect here: RANKING.USE_GPU, GEO_LOCALIZATION.TRAIN_LABEL_MAPPING."]


def test_no_key_is_in_both_tables():
    paths = [key.path for key in vissl_keys()]
    assert len(paths) == len(set(paths))


def test_a_pruned_tree_keeps_what_was_set():
    tree = {
        "VERBOSE": True,
        "REPRODUCIBILITY": {"CUDDN_DETERMINISTIC": False},
        "RANKING": {"RANKING_BACKEND": "faiss", "PCA_DIM": 64},
        "MINE": {"a": {}},
    }
    assert without_vissl_keys(tree) == {"VERBOSE": True, "RANKING": {"PCA_DIM": 64}, "MINE": {"a": {}}}
