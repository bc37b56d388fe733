"""``vissl-zero data bench``: the parts of loading, the arithmetic of waiting, and what to change."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.blocks import data_block
from tests.unit.config.example_config import CPU_HOST, config
from tests.unit.data.conftest import MakeData
from tests.unit.reporting.example_run import make_record
from vissl_zero.cli import main
from vissl_zero.data import bench
from vissl_zero.data.bench import LoadingCost, Supply, advice, measure, supply_of
from vissl_zero.data.pipeline import Pipeline
from vissl_zero.errors import DataError
from vissl_zero.reporting.metrics_file import line
from vissl_zero.resolve.resolve import resolve

RECIPE = "config=quickstart/swav_digits"


@pytest.mark.parametrize(
    ("backend", "transforms"),
    [
        ("pil", ["ImgPilToMultiCrop", "RandomHorizontalFlip", "ImgPilColorDistortion", "ImgPilGaussianBlur"]),
        ("fast", ["CutBoxes", "Flip", "ColorDistortion", "Blur"]),
    ],
)
def test_each_part_has_its_time(make_data: MakeData, photos: Path, backend: str, transforms: list[str]) -> None:
    (photos / "a/3.jpg").write_bytes(b"no image")
    cost = measure(data_block(make_data("disk_folder", photos) | {"BACKEND": backend}), 1, 4, 64)
    last = ["ToTensor", "Normalize"] if backend == "pil" else []
    assert list(cost.seconds) == ["read", "decode", *transforms, *last, "collate"]
    assert (cost.num_images, cost.num_broken) == (10, 1) and all(seconds >= 0 for seconds in cost.seconds.values())
    assert cost.total == pytest.approx(sum(cost.seconds.values())) and cost.total > 0
    for path in photos.rglob("*.*"):
        path.write_bytes(b"no image")
    with pytest.raises(DataError, match="None of 11 images can be used"):
        measure(data_block(make_data("disk_folder", photos)), 1, 4, 64)


def test_one_thread_is_measured_and_torchs_threads_are_left_as_they_were(
    make_data: MakeData, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, stack = torch.get_num_threads(), Pipeline.stacked
    seen = set()

    def noted(self: Pipeline, crops: Any) -> Any:
        seen.add(torch.get_num_threads())
        return stack(self, crops)

    monkeypatch.setattr(Pipeline, "stacked", noted)
    try:
        torch.set_num_threads(2)
        measure(data_block(make_data("digits")), 1, 4, 8)
        assert torch.get_num_threads() == 2 and seen == {1}
    finally:
        torch.set_num_threads(before)


def test_batches_are_put_together_as_in_training(make_data: MakeData, monkeypatch: pytest.MonkeyPatch) -> None:
    stacked, stack = [], Pipeline.stacked

    def noted(self: Pipeline, crops: Any) -> Any:
        stacked.append(len(crops))
        return stack(self, crops)

    monkeypatch.setattr(Pipeline, "stacked", noted)
    measure(data_block(make_data("digits")), 1, 4, 8)
    assert stacked[-2:] == [4 * 2, 4 * 3]  # four images, by the size of their crops
    stacked.clear()
    assert measure(data_block(make_data("digits")), 1, 4, 6).num_images == 6
    assert stacked[-4:] == [4 * 2, 4 * 3, 2 * 2, 2 * 3]


def test_the_share_of_waiting_follows_from_rate_and_step() -> None:
    here = Supply(images_per_step=100, workers=0, cores=4, seconds=0.01)
    assert (here.rate, here.step_seconds, here.data_wait(3.0)) == pytest.approx((100, 1.0, 0.25))
    workers = Supply(images_per_step=100, workers=2, cores=4, seconds=0.01)
    assert (workers.step_seconds, workers.data_wait(0.4), workers.data_wait(0.6)) == pytest.approx((0.5, 0.2, 0.0))
    assert Supply(100, 9, 4, 0.01).rate == pytest.approx(400)  # there are no more cores
    assert workers.workers_for(0.3) == 4 and workers.workers_for(9.0) == 1


def test_a_step_loads_all_its_micro_batches() -> None:
    cfg = config(DATA__TRAIN__BATCHSIZE_PER_REPLICA=24, ZERO__gradient_accumulation_steps=3)
    supply = supply_of(resolve(cfg, "/nowhere", host=CPU_HOST), LoadingCost(8, 0, {"read": 0.5}))
    assert (supply.images_per_step, supply.seconds) == (24 * 3, 0.5)


@pytest.mark.parametrize(
    ("ranks", "machines", "cores", "of_each"), [(1, 1, 8, 8), (4, 1, 8, 2), (4, 2, 8, 4), (4, 1, 3, 1), (1, 2, 8, 8)]
)
def test_the_ranks_of_a_machine_share_its_cores(
    ranks: int, machines: int, cores: int, of_each: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    plan = resolve(config(DATA__NUM_DATALOADER_WORKERS=3), "/nowhere", host=CPU_HOST)
    supply = supply_of(replace(plan, world_size=ranks, num_nodes=machines), LoadingCost(8, 0, {"read": 0.5}))
    assert (supply.cores, supply.workers) == (of_each, 3)


def test_what_to_change_fits_the_cause(make_data: MakeData) -> None:
    data = data_block(make_data("digits", num_workers=2))
    cost = LoadingCost(64, 0, {"read": 0.004, "decode": 0.004, "Crop": 0.001, "collate": 0.001})
    supply = Supply(100, 2, 4, cost.total)
    assert advice(data, cost, supply, step_seconds=1.0) == []
    workers, fast, packed, smaller = advice(data, cost, supply, 0.3)
    assert "NUM_DATALOADER_WORKERS=4: there are 4 cores" in workers and "DATA.BACKEND=fast: all transforms" in fast
    assert "data pack" in packed and "--size 512" in smaller
    (one, *_) = advice(data, cost, Supply(100, 0, 1, cost.total), None)
    assert one == "Write config.DATA.NUM_DATALOADER_WORKERS=1: there is 1 core for each rank."
    quick = LoadingCost(64, 0, {"read": 0.001, "decode": 0.001, "Crop": 0.008})
    assert len(advice(data, quick, Supply(100, 4, 4, 0.01), None)) == 1  # the backend
    slow = data_block(make_data("digits", num_workers=4, TRANSFORMS=[{"name": "RandAugment"}, {"name": "ToTensor"}]))
    assert advice(slow, quick, Supply(100, 4, 4, 0.01), 0.1)[0].startswith("Make fewer or smaller crops")


def test_the_command_prints_a_table_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "bench", RECIPE, "--images", "40", "--step-seconds", "1000"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("40 images, one core, BACKEND pil\npart ") and "\nRandomAffine " in said
    assert "A step takes 1e+03 s beside loading: training will wait 0 % of the time.\n" in said
    records = [make_record(step, images_per_s=100.0, data_wait=0.75) for step in range(1, 4)]
    (tmp_path / "metrics.jsonl").write_text("".join(line(record) + "\n" for record in records))
    words = [RECIPE, "config.DATA.NUM_DATALOADER_WORKERS=1", "--images", "40", "--run", str(tmp_path), "--json"]
    assert main(["data", "bench", *words]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    images = found["step_seconds"] * 100 / 0.25  # a quarter of the time was not for waiting
    assert images == pytest.approx(round(images)) and found["data_wait"] == 0.0 and found["advice"] == []
    assert found["images_per_s"] == pytest.approx(1 / sum(found["seconds"].values()))
    assert main(["data", "bench", RECIPE]) == 0
    assert "--run <run folder> or --step-seconds tells" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["config.SEED_VALUE=1"], "needs a recipe"),
        ([RECIPE, "--images", "0"], "must be a whole number, at least 1"),
        ([RECIPE, "--step-seconds", "-1"], "must be a number of seconds above 0"),
        ([RECIPE, "--run", "none"], "none/metrics.jsonl cannot be read"),
        ([RECIPE, "--run", "none", "--step-seconds", "1"], "not allowed with argument"),
        ([RECIPE, "config.DATA.BACKEDN=fast"], "BACKEDN"),
    ],
)
def test_wrong_words_are_one_sentence(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "bench", *words]) == 2
    said = capsys.readouterr()
    assert says in said.err and said.out == "" and "Traceback" not in said.err


@pytest.mark.parametrize("lacks", ["", "simplejpeg", "cv2"])
def test_the_fast_backend_comes_with_what_it_needs(
    lacks: str, make_data: MakeData, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "find_spec", lambda name: None if name == lacks else object())
    cost = LoadingCost(1, 0, {"read": 0.0, "decode": 0.0, "Crop": 1.0})
    (sentence,) = advice(data_block(make_data("digits", num_workers=1)), cost, Supply(100, 1, 1, 1.0), None)
    install = " (pip install vissl-zero[fast])" if lacks else ""
    assert sentence == f"Write config.DATA.BACKEND=fast{install}: all transforms have a fast form."
