"""The ``zero`` argument: forms, synonyms, and one sentence per mistake."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from omegaconf import OmegaConf

from vissl_zero.errors import ConfigError
from vissl_zero.integration.settings import read_settings
from vissl_zero.resolve.offload import offload_notes, offload_plans
from vissl_zero.resolve.resolved import Float8Plan


def test_the_three_forms_say_the_same(tmp_path):
    keys = {"level": 3, "clip_grad": 1.0, "offload_optimizer_config": {"device": "cpu"}}
    path = tmp_path / "zero.yaml"
    for root in (keys, {"zero": keys}, {"config": {"ZERO": {"LEVEL": 3} | {k: keys[k] for k in list(keys)[1:]}}}):
        path.write_text(OmegaConf.to_yaml(OmegaConf.create(root)))
        assert read_settings(str(path)) == read_settings(keys)
    assert read_settings(OmegaConf.create(keys)) == read_settings(keys)


@pytest.mark.parametrize("level", [1, 2, 3])
def test_type_is_a_synonym_of_level(level):
    typed = read_settings({"type": f"ZeroRedundancyOptimizer_Level_{level}"})
    assert (typed.level, typed.is_typed) == (level, True)
    assert read_settings({"type": f"ZeroRedundancyOptimizer_Level_{level}", "level": level}).level == level


def test_a_number_under_fast_init_is_max_in_cpu():
    settings = read_settings({"level": 3, "offload_param_config": {"device": "cpu", "fast_init": 1e9}})
    _, plan = offload_plans(settings.offload_optimizer, settings.offload_params)
    assert (plan.max_in_cpu, plan.fast_init) == (10**9, False)
    notes = offload_notes(settings.offload_optimizer, settings.offload_params, has_gpu=True, root="zero")
    assert notes[0] == "zero.offload_param_config.fast_init=1e+09 is a number and is read as max_in_cpu."


def test_a_block_with_parameters_off_the_device_and_no_level_is_level_3():
    """The last dictionary of ColossalAI's page, which names none; a whole number, as a constant may be."""
    nvme = {"device": "nvme", "nvme_path": "/nvme_data", "pin_memory": True}
    zero = {"offload_optimizer_config": nvme, "offload_param_config": nvme | {"fast_init": 10**9}}
    settings = read_settings(zero)
    assert (settings.level, settings.is_typed) == (3, False)
    assert offload_plans(settings.offload_optimizer, settings.offload_params)[1].max_in_cpu == 10**9
    assert settings.notes == ("zero.level is not given: 3, the one level whose parameters can be offloaded.",)
    assert read_settings(zero | {"level": 3}).notes == ()


def test_what_has_no_effect_at_level_0_is_said():
    keys = {"wrap_threshold": 5, "shard_group_size": 2}
    assert read_settings({"level": 0, **keys}).notes == tuple(
        f"zero.{key} has no effect at level 0: nothing is sharded." for key in keys
    )
    assert read_settings({"level": 1, **keys}).notes == ()


def test_float8_is_a_switch_or_a_pattern():
    assert read_settings({"level": 1}).float8 == read_settings({"level": 1, "float8": False}).float8 == Float8Plan()
    assert re.search(read_settings({"level": 1, "float8": True}).float8.layers, "blocks.0.mlp.fc1")
    assert read_settings({"level": 1, "float8": "dense"}).float8 == Float8Plan("dense")
    scales = {"level": 1, "float8_scales": "mx"}
    assert read_settings({**scales, "float8": "dense"}).float8 == Float8Plan("dense", "mx")
    assert read_settings(scales).notes == ("zero.float8_scales has no effect without zero.float8.",)
    sent = {"float8": "dense", "float8_gather": True}
    assert read_settings({"level": 3, **sent}).float8 == Float8Plan("dense", gather=True)
    assert read_settings({"level": 3, **sent}).notes == ()
    (note,) = read_settings({"level": 2, **sent}).notes
    assert note.startswith("zero.float8_gather: ") and note.endswith("level 2 sends none in float8.")
    with pytest.raises(ConfigError, match="float8_gather: needs layers"):
        read_settings({"level": 3, "float8_gather": True})
    with pytest.raises(ConfigError, match="float8_scales: must be rows or mx"):
        read_settings({"level": 1, "float8": True, "float8_scales": "blocks"})
    for pattern in ("(", ""):
        with pytest.raises(ConfigError, match="float8: must be a regular expression"):
            read_settings({"level": 1, "float8": pattern})
    with pytest.raises(ConfigError, match="must be torch with float8"):
        read_settings({"level": 1, "engine": "fairscale", "float8": True})


def test_deepspeed_names_are_read(tmp_path):
    """A file as DeepSpeed's users have it; what is decided elsewhere is said, key by key."""
    given = {
        "train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "fp16": {"enabled": False, "loss_scale": 0},
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": True,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "offload_param": {"device": "cpu"},
        },
    }
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(given))
    ours = {
        "level": 3,
        "gradient_accumulation_steps": 2,
        "clip_grad": 1.0,
        "fp16": False,
        "bf16": True,
        "offload_optimizer_config": {"device": "cpu", "pin_memory": True},
        "offload_param_config": {"device": "cpu"},
    }
    notes = (
        "zero.zero_optimization.overlap_comm has no effect: it tunes DeepSpeed's messages and changes no number.",
        "zero.train_batch_size has no effect: your loader decides it.",
    )
    assert read_settings(str(path)) == read_settings(given) == replace(read_settings(ours), notes=notes)
    assert read_settings({"zero_optimization": {}, "gradient_clipping": 0}) == read_settings({"level": 0})
    filled_in = {"zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"}, "train_batch_size": "auto"}
    assert len(read_settings(filled_in).notes) == 2


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (
            {"gradient_clipping": 1.0, "clip_grad": 0.1},
            "zero.clip_grad: says the same as DeepSpeed's zero.gradient_clip",
        ),
        ({"level": 2}, "zero.level: says the same as DeepSpeed's zero.zero_optimization.stage"),
        (
            {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 8},
            "Write gradient_accumulation_steps=64 / (8 x ranks)",
        ),
        (
            {"optimizer": {"type": "Adam", "params": {"lr": "auto"}}},
            "zero.optimizer: is not read from zero. Remove this block: initialize() uses the optimizer that you pass",
        ),
        (
            {"scheduler": {"type": "WarmupLR"}},
            "zero.scheduler: is not read from zero. Remove this block: build torch's",
        ),
        (
            {"gradient_clipping": "auto"},
            "zero.gradient_clipping: is filled in by Hugging Face's Trainer, and by nothing here (got 'auto').",
        ),
        ({"fp16": {"enabled": "auto"}}, "zero.fp16.enabled: is filled in by Hugging Face's Trainer"),
        ({"fp16": {"enabled": True, "loss_scale": 128}}, "zero.fp16.loss_scale: cannot be a fixed number"),
        ({"zero_optimization": {"stage": 3, "mics_shard_size": 2}}, "mics_shard_size: is a DeepSpeed key"),
        ({"zero_optimization": {"stage": 4}}, "zero.level: must be 0, 1, 2 or 3 (got 4)"),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}}, "ratio"),
    ],
)
def test_what_deepspeed_would_do_otherwise_is_refused(more, sentence):
    with pytest.raises(ConfigError) as caught:
        read_settings({"zero_optimization": {"stage": 1}} | more)
    assert sentence in str(caught.value)


def test_max_in_cpu_as_yaml_writes_it(tmp_path):
    path = tmp_path / "zero.yaml"
    path.write_text("level: 3\noffload_param_config: {device: cpu, pin_memory: true, max_in_cpu: 1e9}\n")
    assert read_settings(path).offload_params.max_in_cpu == 1e9
    path.write_text("level: 3\noffload_param_config: {device: cpu, max_in_cpu: 0}\n")
    assert read_settings(path).offload_params.max_in_cpu == 0


@pytest.mark.parametrize(
    ("zero", "sentence"),
    [
        ({"levl": 3}, "zero.levl: is not a key. Did you mean 'level'?"),
        ({}, "zero.level: must be given: 0, 1, 2, 3 or 'fit'. Write zero=dict(level=3)."),
        ({"stage": 3}, "zero.stage: is DeepSpeed's key. Write level, or give the keys in DeepSpeed's format."),
        (
            {"level": 3, "gradient_clipping": 1.0},
            "zero.gradient_clipping: is DeepSpeed's key. Write clip_grad, or give the keys in DeepSpeed's format.",
        ),
        (
            {"level": 3, "train_micro_batch_size_per_gpu": 8},
            "zero.train_micro_batch_size_per_gpu: is DeepSpeed's key. Leave it out: your loader decides it.",
        ),
        ({"level": 3, "overlap_comm": True}, "zero.overlap_comm: is DeepSpeed's key. Leave it out: it tunes"),
        ({"level": 3, "optimizer": {}}, "zero.optimizer: is DeepSpeed's key. Remove this block: initialize() uses"),
        (
            {"level": 3, "offload": "cpu"},
            "zero.offload: is not a key. Write offload_optimizer_config=dict(device='cpu'), and offload_param_config=",
        ),
        ({"level": 4}, "zero.level: must be 0, 1, 2 or 3 (got 4)."),
        ({"level": "x"}, "zero.level: must be a whole number (got 'x')."),
        (
            {"level": 1, "type": "ZeroRedundancyOptimizer_Level_3"},
            "zero.level: contradicts zero.type=ZeroRedundancyOptimizer_Level_3 (got 1). Leave one of them out.",
        ),
        ({"type": "ZeroRedundancyOptimizer"}, "zero.type: must be ZeroRedundancyOptimizer_Level_1, _2 or _3"),
        ({"level": 1, "fp16": True, "bf16": True}, "zero.bf16: contradicts zero.fp16=True"),
        (
            {"level": 1, "gradient_accumulation_steps": 0},
            "zero.gradient_accumulation_steps: must be at least 1",
        ),
        ({"LEVEL": 1, "ENGINE": "fairscal"}, "zero.engine: must be torch or fairscale (got 'fairscal')"),
        ({"LEVEL": 3, "ENGINE": "fairscale"}, "zero.engine: must be torch at levels 0 and 3, which fairscale"),
        ({"level": 1, "shard_group_size": 0}, "zero.shard_group_size: must be -1 for all ranks"),
        ({"level": 1, "clip_grad": 0.0}, "zero.clip_grad: must be above 0 (got 0.0)"),
        (
            {"level": 3, "offload_param_config": {"device": "cpu", "nvm_path": "/x"}},
            "zero.offload_param_config.nvm_path: is not a key. Did you mean 'nvme_path'?",
        ),
        ({"level": 3, "offload_param_config": "cpu"}, "zero.offload_param_config: must be a dict (got 'cpu')"),
        (
            {"level": 3, "offload_param_config": {"fast_init": 5.0, "max_in_cpu": 6}},
            "zero.offload_param_config.fast_init: is a number, and max_in_cpu is given too (got 5.0)",
        ),
        (7, "zero: must be a dict, a DictConfig or the path of a YAML file (got int)"),
        ("missing.yaml", "zero: must name a YAML file that can be read (got missing.yaml)"),
    ],
)
def test_one_sentence_per_mistake(zero, sentence):
    with pytest.raises(ConfigError) as caught:
        read_settings(zero)
    assert str(caught.value).startswith(sentence)
    assert "\n" not in str(caught.value)


def test_all_mistakes_at_once():
    with pytest.raises(ConfigError) as caught:
        read_settings({"level": 9, "clip_grad": -1, "gradient_accumulation_steps": 0})
    assert len(caught.value.problems) == 3
    with pytest.raises(ConfigError, match=r"(?s)zero\.stage: is DeepSpeed's key.*zero\.levl: is not a key"):
        read_settings({"stage": 3, "levl": 3})
