from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import pytest
from rich.console import Console

from tests.unit.reporting.example_run import make_record, make_run, play
from vissl_zero.engine.hook import Run, StepRecord
from vissl_zero.reporting.display import Display, LiveDisplay, can_redraw
from vissl_zero.reporting.hooks import Opening
from vissl_zero.resolve.resolved import OffloadPlan, Precision, ShardingPlan


class Terminal(io.StringIO):
    """A stream that says it is a terminal, as a pseudo-terminal does."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def terminal(width: int = 100, height: int = 30) -> Console:
    """A console on such a stream."""
    return Console(file=Terminal(), force_terminal=True, width=width, height=height, _environ={"TERM": "xterm"})


def text_of(console: Console) -> str:
    """What was written, without control sequences."""
    assert isinstance(console.file, io.StringIO)
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", console.file.getvalue())


def test_a_pipe_gets_plain_lines(run: Run, records: list[StepRecord]) -> None:
    console = Console(file=io.StringIO(), width=80)
    play(run, Display(console), records)
    written = text_of(console).splitlines()
    steps = [int(match[1]) for text in written if (match := re.search(r"step +(\d+)/20", text))]
    assert steps == [1, 4, 8, 12, 16, 20]  # the first, every LOG_FREQUENCY-th, the last
    assert [text.split(",")[0] for text in written if "done in" in text] == [
        "epoch 1/2 done in 0:00",
        "epoch 2/2 done in 0:00",
    ]
    assert f"loss  {records[3].loss:.4f}" in written[1]
    assert "memory 17.0 MiB" in written[1] and "0:01 left" in written[1]
    assert all(text.isascii() and len(text) < 110 for text in written)
    assert "\x1b" not in console.file.getvalue()


def test_the_mean_loss_of_an_epoch_is_that_of_its_images(run: Run) -> None:
    """The last step of an epoch may have fewer images than the others."""
    stream = io.StringIO()
    steps = [(1.0, 32), (None, 32), (4.0, 16)]
    run.steps_per_epoch = 3
    records = [make_record(i + 1, loss=loss, num_samples=count) for i, (loss, count) in enumerate(steps)]
    play(run, Display(Console(file=stream)), records)
    assert "mean loss 2.0000\n" in stream.getvalue()


def test_a_skipped_step_says_so(run: Run) -> None:
    console = Console(file=io.StringIO())
    play(run, Display(console), [make_record(1, loss=None, grad_norm=None, skipped=True)])
    assert "loss skipped" in text_of(console)


def test_other_ranks_are_silent(tmp_path: Path, records: list[StepRecord]) -> None:
    console = Console(file=io.StringIO())
    play(make_run(tmp_path, rank=1), Display(console), records)
    assert text_of(console) == ""


def test_the_live_display_shows_the_run(run: Run, records: list[StepRecord], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    console = terminal()
    play(run, Display(console), records)
    last = text_of(console).rsplit("epoch ", 1)[1]
    assert last.startswith("2/2  step 20/20")
    for part in ("0:00 left", "loss 2.48", "first 3.28", "lr 0.0429", "images/s   data wait 0 %", "gradient norm 1.25"):
        assert part in last
    for part in ("parameters      3.00 MiB", "gradients       2.00 MiB", "optimizer state 4.00 MiB"):
        assert part in last
    assert "effective rank 6" in last and "peak 700 MiB resident" in last


@pytest.mark.parametrize("width", [1, 12, 40])
def test_a_narrow_terminal_crops_lines(run: Run, records: list[StepRecord], width: int) -> None:
    console = terminal(width, height=5)
    play(run, LiveDisplay(console), records)
    assert max(len(text) for text in text_of(console).splitlines()) <= width


def test_what_others_print_stands_above_the_frame(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    console = terminal()
    hook = LiveDisplay(console)
    before = sys.stderr
    hook.on_start(run)
    hook.on_record(run, make_record(1))
    print("a warning from elsewhere", file=sys.stderr)
    hook.on_record(run, make_record(20))
    hook.close(run)
    written = text_of(console)
    assert written.index("a warning from elsewhere") < written.rindex("epoch 2/2")
    assert sys.stderr is before


def test_close_gives_the_terminal_back_and_may_be_called_again(run: Run) -> None:
    console = terminal()
    before = sys.stdout
    hook = LiveDisplay(console)
    hook.on_start(run)
    hook.on_record(run, make_record(1))
    hook.close(run)
    hook.close(run)
    assert sys.stdout is before
    written = console.file.getvalue()  # type: ignore[attr-defined]
    assert written.rindex("\x1b[?25h") > written.rindex("\x1b[?25l")  # the cursor is visible


def test_no_color_is_respected(run: Run, records: list[StepRecord]) -> None:
    console = Console(file=Terminal(), force_terminal=True, width=90, _environ={"TERM": "xterm", "NO_COLOR": "1"})
    play(run, LiveDisplay(console), records)
    assert not re.search(r"\x1b\[[0-9;]*\b(3[0-8]|9[0-7])m", console.file.getvalue())  # type: ignore[attr-defined]


def test_loss_scale_is_shown_where_it_is_used(tmp_path: Path) -> None:
    sharding = ShardingPlan(level=1, precision=Precision(autocast="float16", use_loss_scale=True))
    run, console = make_run(tmp_path, sharding=sharding), terminal()
    skipped = make_record(1, loss=None, grad_norm=None, skipped=True, loss_scale=65536.0)
    play(run, LiveDisplay(console), [skipped, make_record(20, loss_scale=32768.0)])
    assert "loss scale 32768 (1 skipped)" in text_of(console)


@pytest.mark.parametrize(("term", "expected"), [("xterm-256color", True), ("dumb", False), ("", False)])
def test_redrawing_needs_a_capable_terminal(term: str, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", term)
    assert can_redraw(terminal()) is expected
    assert can_redraw(Console(file=io.StringIO(), force_terminal=True)) is False  # FORCE_COLOR with a file


def test_the_opening_says_what_is_stored_where(tmp_path: Path) -> None:
    disk, host = OffloadPlan(device="nvme", nvme_path="/scratch"), OffloadPlan(device="cpu")
    sharding = ShardingPlan(level=3, offload_optimizer=disk, offload_params=host)
    console = Console(file=io.StringIO(), width=80)
    Opening(console).on_start(make_run(tmp_path, sharding=sharding))
    assert "stored optimizer state on the disk" in text_of(console)


def test_the_opening_says_notes_once_and_the_wrap_plan_when_asked(tmp_path: Path) -> None:
    class Described:
        def describe(self) -> str:
            return "trunk.stem: 1 unit"

    console = Console(file=io.StringIO(), width=80)
    run = make_run(tmp_path, sharding=ShardingPlan(level=3, verbose=True), notes=("larc_config has no effect.",))
    run.sharded = Described()  # type: ignore[assignment]
    Opening(console).on_start(run)
    written = text_of(console)
    assert "ZeRO level 3 (torch engine)" in written
    assert f"20 steps of 32 images, 10 steps per epoch; run folder {tmp_path}" in written
    assert written.count("note: larc_config has no effect.") == 1
    assert "wrap plan:\ntrunk.stem: 1 unit" in written
    run.num_steps = 0
    Opening(console).on_start(run)
    assert f"\nnothing is trained; run folder {tmp_path}" in text_of(console)
