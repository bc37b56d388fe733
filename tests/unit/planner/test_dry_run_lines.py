"""A dry run describes any machine, gives a verdict, and refuses what the run would refuse."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from PIL import Image
from rich.console import Console

from tests.unit.commands.example_checkpoint import write_checkpoint
from vissl_zero.config.compose import compose
from vissl_zero.errors import CheckpointError, ConfigError, LaunchError
from vissl_zero.launch.run import DOES_NOT_FIT, print_dry_run
from vissl_zero.planner.dry_run import dry_run
from vissl_zero.reporting.dry_run_lines import verdict
from vissl_zero.resolve.host import Host
from vissl_zero.resolve.resolve import resolve
from vissl_zero.resolve.saved import as_data

NO_QUEUE = "config.LOSS.swav_loss.queue.queue_length=0"  # it must hold a batch


def planned(recipe, *overrides, folder="/nowhere", host=None):
    composed = compose(recipe, ["config.DRY_RUN=true", *overrides])
    return resolve(composed.run, folder, recipe=recipe, host=host)


def said(plan) -> tuple[int, str]:
    console = Console(file=io.StringIO())
    code = print_dry_run(plan, console=console)
    return code, console.file.getvalue()


def test_a_machine_with_gpus_and_images_that_are_elsewhere():
    words = [
        NO_QUEUE,
        "config.MACHINE.DEVICE=gpu",
        "config.DISTRIBUTED.NUM_PROC_PER_NODE=8",
        "config.DISTRIBUTED.NUM_NODES=4",
    ]
    words += ["config.DATA.TRAIN.DATA_SOURCES=[disk_folder]", "config.DATA.TRAIN.DATA_PATHS=[/imagenet/train]"]
    words += ["config.DATA.TEST.DATA_SOURCES=[disk_folder]", "config.DATA.TEST.DATA_PATHS=[/imagenet/val]"]
    plan = planned("quickstart/swav_digits", *words)
    run = dry_run(plan)
    assert (plan.device, plan.world_size, run.num_images) == ("cuda", 32, 1_281_167)
    assert run.steps_per_epoch == 1_281_167 // (32 * 32)
    code, text = said(plan)
    assert "2 of 16 x 16 pixels" in text
    assert code == 0 and "Assumed: machines with 8 GPU(s) each" in text and "a GPU of 80 GiB, assumed" in text
    assert "images in 1,000 classes are assumed" in text and "/imagenet/train, /imagenet/val" in text
    assert dry_run(planned("quickstart/swav_digits", *words, "config.DATA.TRAIN.DATA_LIMIT=5120")).num_images == 5120


def test_a_job_planned_for_cpus_says_so_and_fit_has_one_budget():
    slurm = ["config.SLURM.USE_SLURM=true", "config.MACHINE.MEMORY_GIB=200"]
    plan = planned("quickstart/swav_digits", NO_QUEUE, *slurm)
    assert any("no GPUs are requested" in note for note in plan.notes)
    assert not any("planned for CPUs" in note for note in planned("quickstart/swav_digits", NO_QUEUE).notes)
    console = Console(file=io.StringIO())
    print_dry_run(plan, console=console, budget_bytes=2**30)
    verdict_line = console.file.getvalue().split("verdict")[1].split("\n")[0]
    assert "(the budget of config.ZERO.LEVEL=fit)" in verdict_line and "200" not in verdict_line


def test_a_path_that_is_mistyped_is_no_other_machine(tmp_path):
    for folder in ("train", "val"):
        (tmp_path / folder).mkdir()
        Image.new("RGB", (32, 32)).save(tmp_path / folder / "image.png")
    paths = {"TRAIN": tmp_path / "train", "TEST": tmp_path / "vall"}
    words = [f"config.DATA.{split}.DATA_PATHS=[{path}]" for split, path in paths.items()]
    with pytest.raises(ConfigError, match=r"'vall' in it does not\. Did you mean 'val'"):
        planned("quickstart/swav_digits", *words)
    with pytest.raises(ConfigError, match="Did you mean 'train'"):
        planned("quickstart/swav_digits", f"config.DATA.TRAIN.DATA_PATHS=[{tmp_path / 'trian'}]")


def test_weights_of_another_network_are_refused(tmp_path):
    torch.save({"layer1.0.conv1.weight": torch.zeros(4, 3, 3, 3)}, tmp_path / "weights.pt")
    weights = f"config.MODEL.WEIGHTS_INIT.PARAMS_FILE={tmp_path / 'weights.pt'}"
    with pytest.raises(CheckpointError, match="does not fit the model"):
        said(planned("quickstart/swav_digits", weights, NO_QUEUE))


def test_a_run_of_the_same_recipe_is_refused():
    composed = compose("quickstart/swav_digits", ["config.MACHINE.DEVICE=gpu", "config.DATA.TRAIN.DATA_PATHS=[/none]"])
    with pytest.raises(ConfigError, match=r"MACHINE.DEVICE: cannot be used here"):
        resolve(composed.run, "/nowhere", host=Host())


@pytest.mark.slow
def test_the_verdict_says_by_how_much_and_what_would_help():
    batch = "config.DATA.TRAIN.BATCHSIZE_PER_REPLICA=700"
    code, text = said(planned("quickstart/swav_digits", NO_QUEUE, batch, "config.MACHINE.MEMORY_GIB=1.15"))
    assert code == DOES_NOT_FIT and "too much. What would help:" in text and "for 2 processes" in text
    assert "config.DATA.TRAIN.BATCHSIZE_PER_REPLICA=350" in text and "USE_ACTIVATION_CHECKPOINTING=True" in text
    code, text = said(planned("quickstart/swav_digits", NO_QUEUE, batch, "config.MACHINE.MEMORY_GIB=200"))
    assert code == 0 and "verdict             fits:" in text and "to spare" in text


def test_tiers_are_counted_apart(tmp_path):
    inside = dry_run(planned("quickstart/swav_digits"))
    disk = f"config.ZERO.offload_optimizer_config={{device: nvme, nvme_path: {tmp_path}}}"
    outside = dry_run(planned("quickstart/swav_digits", disk))
    state = inside.forecast.memory.optimizer
    assert inside.tiers.keys() == {"device"} and outside.tiers["disk"] == state > 0
    assert outside.tiers["device"] == inside.tiers["device"] - state
    assert verdict(inside)[0]


def test_it_refuses_classes_without_an_output_and_labels_that_are_not_there(tmp_path):
    head = "config.MODEL.HEAD.PARAMS=[[mlp,{dims:[64,5]}]]"
    with pytest.raises(ConfigError, match="there is an image of class 9"):
        dry_run(planned("supervised/digits", head))
    for index in range(40):
        (tmp_path / "up" / ("train", "val")[index % 2]).mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40, 40)).save(tmp_path / "up" / ("train", "val")[index % 2] / f"{index}.png")
    classes = ["config.DATA.TRAIN.DATA_SOURCES=[disk_folder]", f"config.DATA.TRAIN.DATA_PATHS=[{tmp_path / 'up'}]"]
    assert "40 images in 2 classes (train, val)" in said(planned("supervised/digits", *classes))[1]
    for index in range(40):
        Image.new("RGB", (40, 40)).save(tmp_path / f"{index}.png")
    photos = ["config.DATA.TRAIN.DATA_SOURCES=[disk_folder]", f"config.DATA.TRAIN.DATA_PATHS=[{tmp_path}]"]
    console = Console(file=io.StringIO(), width=200)
    with pytest.raises(ConfigError, match="needs one label for each image"):
        print_dry_run(planned("supervised/digits", *photos), console=console)
    assert isinstance(console.file, io.StringIO)  # its title is there while the model is built
    assert "dry run of supervised/digits: nothing was started\n" in console.file.getvalue()


def test_a_folder_with_a_run_in_it(tmp_path):
    recipe = "supervised/digits"
    plan = planned(recipe, folder=tmp_path)
    write_checkpoint(tmp_path, {"model/trunk.weight": torch.ones(3)}, resolved=as_data(plan))
    code, text = said(planned(recipe, folder=tmp_path))
    assert code == 0 and "step_000000004" in text.split("resume:")[1]
    with pytest.raises(ConfigError, match="must make steps of 32 images"):
        said(planned(recipe, "config.DATA.TRAIN.BATCHSIZE_PER_REPLICA=64", folder=tmp_path))
    with pytest.raises(ConfigError, match=r"got 32 x 2 processes .*= 64\)\. Write .*PER_REPLICA=16,"):
        said(planned(recipe, "config.DISTRIBUTED.NUM_PROC_PER_NODE=2", folder=tmp_path))
    Path(tmp_path / "metrics.jsonl").touch()
    with pytest.raises(LaunchError, match="already holds a run"):
        said(planned(recipe, "config.CHECKPOINT.AUTO_RESUME=false", folder=tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize(("trunk", "reason"), [("timm/resnet10t", "TimmTrunk gives several units"), ("regnet", "")])
def test_what_is_built_whole_at_the_start_is_said_and_counted(trunk: str, reason: str):
    words = ["config.ZERO.LEVEL=3", f"config.MODEL.TRUNK.NAME={trunk}"]
    run = dry_run(planned("digits/supervised", *words))
    assert reason in run.built_whole and bool(run.built_whole) == bool(reason)
    _, text = said(planned("digits/supervised", *words))
    assert ("start  " in text) == bool(reason)
    assert run.start_bytes == (4 * (2 * run.num_params - 10 * 513) if reason else 0)  # the head is drawn in place
    assert not dry_run(planned("digits/supervised", words[1], "config.ZERO.LEVEL=0")).built_whole


@pytest.mark.slow
def test_a_start_that_takes_more_than_a_step_decides_the_verdict():
    words = ["config.ZERO.LEVEL=3", "config.MODEL.TRUNK.NAME=timm/resnet50", "config.DISTRIBUTED.NUM_PROC_PER_NODE=16"]
    run = dry_run(planned("digits/supervised", *words, "config.MACHINE.MEMORY_GIB=1000"))
    assert run.start_bytes > run.tiers["device"]
    per_rank = (run.start_bytes + run.tiers["device"]) / 2 + 2**29
    memory = f"config.MACHINE.MEMORY_GIB={16 * per_rank / 2**30}"
    assert not verdict(dry_run(planned("digits/supervised", *words, memory)))[0]
