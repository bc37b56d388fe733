"""How many files a reader opens to follow a batch: what runs in a step is recorded, and its files are counted."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import FrameType

import pytest
import torch

import vissl_zero
from tests.ranks import run_on_ranks
from vissl_zero.config.compose import compose
from vissl_zero.engine.build import build_run
from vissl_zero.engine.hook import Hook, Run, Step
from vissl_zero.engine.loop import train
from vissl_zero.resolve.host import Host
from vissl_zero.resolve.resolve import resolve
from vissl_zero.resolve.resolved import ResolvedRun

PACKAGE = Path(vissl_zero.__file__).parent
RECIPE = "quickstart/swav_digits"
OVERRIDES = ("config.ZERO.LEVEL=3", "config.TRAINER.MAX_STEPS=2", "config.DATA.NUM_DATALOADER_WORKERS=0")


class _Walk(Hook):
    """Records which functions of the package run between the ends of steps 1 and 2, by file."""

    def __init__(self) -> None:
        self.entered: dict[str, list[str]] = {}

    def on_step(self, run: Run, step: Step) -> None:
        sys.setprofile(self._enter if step.step == 1 else None)

    def _enter(self, frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            names = self.entered.setdefault(str(path.relative_to(PACKAGE)), [])
            if frame.f_code.co_name not in names:
                names.append(frame.f_code.co_name)


def _walk(plan: ResolvedRun) -> dict[str, list[str]]:
    run, schedules, frozen = build_run(plan, torch.device("cpu"))
    walk = _Walk()
    train(run, schedules, frozen, [walk])
    run.sharded.close()
    return walk.entered


@pytest.mark.slow
def test_a_batch_walks_through_few_files(tmp_path: Path) -> None:
    plan = resolve(compose(RECIPE, OVERRIDES).run, tmp_path, recipe=RECIPE, host=Host(num_cores=1))
    entered = run_on_ranks(2, _walk, plan)[0]
    print(*(f"{path}: {', '.join(names)}" for path, names in entered.items()), sep="\n")
    page = (PACKAGE.parent / "docs" / "walks.md").read_text()
    text = page.split("## A batch, from file to update")[1].split("\n## ")[0]
    carry, serve = (re.findall(r"`([\w/]+\.py)`", table) for table in text.split("| --- | --- |")[1:])
    assert sorted(entered) == sorted(carry + serve)
    assert len(carry) <= 20 and len(serve) <= 11
