"""``vissl-zero plan`` and ``ZERO.LEVEL: fit``: every plan of a recipe, and the cheapest that fits."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial

import pytest

from vissl_zero import cli
from vissl_zero.config.compose import compose
from vissl_zero.engine.forecast_log import OUT_OF_MEMORY, STARTED, Outcome, note_running, outcomes
from vissl_zero.errors import ConfigError, LaunchError, Problem
from vissl_zero.lifetime import run_in_subprocess
from vissl_zero.planner.candidates import Budget, recomputed_in_part
from vissl_zero.planner.dry_run import dry_run, set_stage
from vissl_zero.planner.fit_plans import FitOption, FitPlans, FitRun, shortfall, with_settings
from vissl_zero.planner.planning import fit_plans, fitted, plan_run, remedies
from vissl_zero.reporting.dry_run_lines import verdict
from vissl_zero.reporting.past_plans import history
from vissl_zero.resolve.resolve import resolve, save_resolved

RECIPE = "digits/supervised"
DRY = "config.DRY_RUN=true"


def planned(*overrides: str):
    return plan_run(compose(RECIPE, [DRY, *overrides]).run, RECIPE)


@pytest.mark.slow
def test_json_has_every_level_with_its_peak_and_marks_the_cheapest_that_fits(capsys):
    assert cli.main(["plan", f"config={RECIPE}", "--ranks", "2", "--memory-gb", "1", "--json"]) == 0
    candidates = json.loads(capsys.readouterr().out)["candidates"]
    assert {candidate["level"] for candidate in candidates} == {0, 1, 2, 3}
    assert all(candidate["peak_bytes"] == sum(candidate["by_kind"].values()) for candidate in candidates)
    assert all(candidate["resident_bytes"] > candidate["peak_bytes"] for candidate in candidates)
    assert [candidate["chosen"] for candidate in candidates] == [True] + [False] * (len(candidates) - 1)
    times = [candidate["relative_time"] for candidate in candidates]
    assert times == pytest.approx(sorted(times), abs=1e-3)
    peaks = {(c["level"], bool(c["recomputed"])): c["peak_bytes"] for c in candidates}
    assert all(peaks[level, True] < peaks[level, False] for level in range(4))


@pytest.mark.slow
def test_more_ranks_take_less_of_what_is_sharded(capsys):
    held = []
    for ranks in ("8", "16"):
        words = ["plan", RECIPE, "--ranks", ranks, "--gpus", "--memory-gb", "1", "--json", "--images", "100000"]
        assert cli.main(words) == 0
        candidates = json.loads(capsys.readouterr().out)["candidates"]
        held.append({c["plan"]: c["by_kind"] for c in candidates})
    assert held[1]["level 1"]["optimizer"] < 0.6 * held[0]["level 1"]["optimizer"]
    assert held[1]["level 0"]["optimizer"] == held[0]["level 0"]["optimizer"]


@pytest.mark.slow
def test_machines_joined_by_a_network_may_keep_a_copy_of_the_state_each(capsys):
    words = ["plan", RECIPE, "--ranks", "16", "--gpus", "--memory-gb", "1", "--json"]
    assert cli.main(words) == 0
    every = {c["plan"]: c for c in json.loads(capsys.readouterr().out)["candidates"]}
    grouped, shared = every["level 3, groups of 8"], every["level 3"]
    assert (grouped["shard_group_size"], shared["shard_group_size"]) == (8, 16)
    assert grouped["relative_time"] < shared["relative_time"]
    assert grouped["by_kind"]["optimizer"] > 1.5 * shared["by_kind"]["optimizer"]
    assert "config.ZERO.SHARD_GROUP_SIZE=8" in grouped["overrides"]
    assert "config.ZERO.SHARD_GROUP_SIZE=-1" in shared["overrides"]
    # Asked for, they stay; the same bits ask for one order of sums.
    for override, sizes in (("config.ZERO.SHARD_GROUP_SIZE=4", {1, 4}), ("config.TRAINER.DETERMINISTIC=true", {1, 16})):
        assert cli.main([*words, override]) == 0
        candidates = json.loads(capsys.readouterr().out)["candidates"]
        assert {c["shard_group_size"] for c in candidates} == sizes


@pytest.mark.slow
def test_what_fit_chooses_is_what_the_overrides_of_plan_give():
    every = planned("config.ZERO.MEMORY_GB=1").candidates
    budget = sorted(c.forecast.step.resident_bytes for c in every)[1] / 2**30
    words = ["config.ZERO.LEVEL=fit", f"config.ZERO.MEMORY_GB={budget}"]
    chosen_by_fit = fitted(compose(RECIPE, words))
    chosen = planned(*words[1:]).chosen
    assert chosen.excess == 0 and chosen.forecast.step.resident_bytes <= budget * 2**30
    again = resolve(compose(RECIPE, chosen.overrides()).run, "/nowhere", recipe=RECIPE)
    written, notes = chosen_by_fit.written, chosen_by_fit.notes
    fit = resolve(chosen_by_fit.run, "/nowhere", recipe=RECIPE, written=written, notes=notes)
    assert fit.sharding == again.sharding == chosen.sharding
    assert fit.global_batch == again.global_batch
    assert any(note.startswith("config.ZERO.LEVEL=fit took level") for note in fit.notes)


@pytest.mark.slow
def test_no_more_blocks_are_recomputed_than_the_budget_asks_for(capsys):
    words = ["plan", f"config={RECIPE}", "--ranks", "4", "--gpus", "--json", "--memory-gb"]
    assert cli.main([*words, "1"]) == 0
    every = json.loads(capsys.readouterr().out)["candidates"]
    kept = min(c["resident_bytes"] for c in every if not c["recomputed"])
    assert cli.main([*words, str((kept - 1024) / 2**30)]) == 0
    found = json.loads(capsys.readouterr().out)["candidates"]
    chosen = next(c for c in found if c["chosen"])
    all_blocks = [c for c in found if c["fits"] and len(c["recomputed"]) == 4]
    assert 0 < len(chosen["recomputed"]) < 4 and f"{len(chosen['recomputed'])} block" in chosen["plan"]
    assert all_blocks and chosen["relative_time"] < min(c["relative_time"] for c in all_blocks)
    words = [*(word for word in chosen["overrides"] if "BATCHSIZE" not in word), DRY]
    run = resolve(compose(RECIPE, words).run, "/nowhere", recipe=RECIPE)
    assert list(run.sharding.checkpoint_blocks) == chosen["recomputed"]


def test_some_blocks_are_recomputed_at_the_cheapest_level_and_in_the_smallest_number():
    """The search agrees with every number of blocks at every level."""
    vit = "IMAGE_SIZE: 16, PATCH_SIZE: 8, NUM_LAYERS: 6, NUM_HEADS: 4, HIDDEN_DIM: 32, MLP_DIM: 128"
    words = [
        DRY,
        f"config.MODEL.TRUNK={{NAME: vision_transformer, VISION_TRANSFORMERS: {{{vit}}}}}",
        "config.MODEL.HEAD.PARAMS=[[mlp, {dims: [-1, 10]}]]",
        "config.DATA.TRAIN.BATCHSIZE_PER_REPLICA=64",
        "config.DISTRIBUTED.NUM_PROC_PER_NODE=4",
        "config.MACHINE.DEVICE=gpu",
    ]
    stage = set_stage(resolve(compose(RECIPE, words).run, "/nowhere", recipe=RECIPE))
    found = stage.forecasts()
    kept = [row for row in found if not row[0].is_recomputed]
    with stage.mode:
        names = [block.name for block in stage.forecaster.recomputable(kept[0][0])]
        every = [
            (number, stage.forecaster.forecast(replace(plan, checkpoint_blocks=tuple(names[:number]))))
            for number in range(1, len(names))
            for plan, *_ in kept
        ]
    for needed in sorted({forecast.step.resident_bytes for _, forecast in every})[1::4]:
        budget = Budget(needed)
        own = found + stage.apply(partial(recomputed_in_part, found, budget))
        fitting = [row[3].seconds for row in own if budget.excess(row[3]) == 0]
        others = [forecast.seconds for _, forecast in every if budget.excess(forecast) == 0]
        assert min(fitting) <= min(others) * 1.001


@pytest.mark.slow
def test_a_disk_is_used_only_where_it_is_named_and_there_is_room(tmp_path):
    folder = f"config.ZERO.offload_optimizer_config.nvme_path={tmp_path}"
    assert all(c.forecast.step.disk_bytes == 0 for c in planned().candidates)
    on_disk = [c for c in planned(folder).candidates if c.sharding.offload_optimizer.device == "nvme"]
    assert {c.sharding.level for c in on_disk} == {1, 2, 3}
    assert all(c.fits and c.forecast.step.disk_bytes for c in on_disk)
    tight = planned(folder, "config.ZERO.DISK_GB=1e-9").candidates
    assert not any(c.fits for c in tight if c.sharding.offload_optimizer.device == "nvme")


@pytest.mark.slow
def test_no_more_parameters_lie_on_a_disk_than_the_budget_asks_for(tmp_path):
    vit = "IMAGE_SIZE: 16, PATCH_SIZE: 8, NUM_LAYERS: 4, NUM_HEADS: 4, HIDDEN_DIM: 512, MLP_DIM: 2048"
    words = [
        f"config.MODEL.TRUNK={{NAME: vision_transformer, VISION_TRANSFORMERS: {{{vit}}}}}",
        "config.MODEL.HEAD.PARAMS=[[mlp, {dims: [-1, 10]}]]",
        "config.DATA.TRAIN.BATCHSIZE_PER_REPLICA=8",
        "config.DISTRIBUTED.NUM_PROC_PER_NODE=2",
        f"config.ZERO.offload_optimizer_config.nvme_path={tmp_path}",
    ]
    name = "level 3, optimizer on nvme, parameters on nvme"
    none = next(c for c in planned(*words).candidates if str(c) == name)
    memory = none.forecast.step.resident_bytes + 2**23
    chosen = planned(*words, f"config.ZERO.MEMORY_GB={memory / 2**30}").chosen
    kept = chosen.sharding.offload_params.max_in_cpu
    assert str(chosen) == f"{name} ({kept:,} elements in memory)"
    assert none.forecast.step.resident_bytes + 2**22 < chosen.forecast.step.resident_bytes <= memory
    assert chosen.forecast.step.disk_bytes < none.forecast.step.disk_bytes - 2**22
    assert chosen.relative_time < none.relative_time
    run = resolve(with_settings(compose(RECIPE, [DRY, *words]).run, chosen.settings()), "/nowhere", recipe=RECIPE)
    assert run.sharding.offload_params.max_in_cpu == kept


@pytest.mark.slow
def test_nothing_fits_names_the_smallest_memory_that_would_do(capsys):
    with pytest.raises(ConfigError, match=r"is too little for every plan .* the smallest takes 0\.0\d+ GiB") as error:
        fitted(compose(RECIPE, ["config.ZERO.LEVEL=fit", "config.ZERO.MEMORY_GB=0.0001"]))
    enough = str(error.value).rsplit("config.ZERO.MEMORY_GB=", 1)[1].split()[0]
    fitted(compose(RECIPE, ["config.ZERO.LEVEL=fit", f"config.ZERO.MEMORY_GB={enough}"]))
    assert cli.main(["plan", RECIPE, "--memory-gb", "0.0001"]) == 1
    out = capsys.readouterr().out
    assert "too much" in out and "no plan is known to fit" in out
    assert "speed: at most" in out
    assert "Plans that use a disk join in" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([RECIPE, "--ranks", "12"], "--ranks: must be 1 to 8, or a multiple of 8 (got '12')"),
        ([RECIPE, "--jsn"], "--jsn is not a flag. Did you mean '--json'"),
        (["--json"], "must name a recipe"),
        ([RECIPE, "--memory-gb"], "--memory-gb needs a value"),
        ([RECIPE, "--memory-gb", "40GB"], "config.ZERO.MEMORY_GB: must be a number (got '40GB'). Write 40 (GiB, no"),
        ([RECIPE, "--memory-gb", "40GB"], "For a card of 40 GB write 38."),
        ([RECIPE, "--memory-gb", "38000"], "Write GiB, not MB."),
        ([RECIPE, "DATA.TRAIN.BATCHSIZE_PER_REPLICA=32"], "Write config.DATA.TRAIN.BATCHSIZE_PER_REPLICA=32."),
        (
            ["digits/dino", "--machine", "a100x8", "config.MODEL.FLOAT8.USE_FLOAT8=true"],
            "needs a GPU of compute capability 8.9 or above",
        ),
    ],
)
def test_wrong_words_are_refused_with_a_sentence(words, said, capsys):
    assert cli.main(["plan", *words]) == 2
    assert said in capsys.readouterr().err


def test_what_is_printed_runs_and_says_what_the_plan_left_out(capsys):
    words = ["--ranks", "16", "--machine", "a100x8", "--memory-gb", "2", "config.ZERO.LEVEL=2"]
    assert cli.main(["plan", RECIPE, *words]) == 0
    out = capsys.readouterr().out
    assert ", cuda; " in out  # the profile has GPUs
    assert "; 128 -> 1,024 images a step, " in out
    assert "config.DISTRIBUTED.RUN_ID=<address of machine 0>:<port> node_id=<0 to 1>" in out
    assert "config.ZERO.MEMORY_GB=2" in out.split("write:")[1]
    assert "chosen: level 2" in out or "config.ZERO.LEVEL=2 is not taken: level 2" in out
    table = out.split("budget:")[0]
    left_out = re.search(r"not in the table: (\d+) plans of level 2", table)
    planned_rows = planned("config.MACHINE.DEVICE=gpu", *_words_of(words)).candidates
    rows = [line for line in table.splitlines() if re.match(r"(=>)?\s+level \d", line)]
    assert len(rows) + (int(left_out[1]) if left_out else 0) == len(planned_rows)


def _words_of(words):
    return [
        "config.DISTRIBUTED.NUM_PROC_PER_NODE=8",
        "config.DISTRIBUTED.NUM_NODES=2",
        "config.ZERO.MEMORY_GB=2",
        words[-1],
    ]


def test_a_dry_run_judges_against_the_budget_of_the_plan(capsys):
    run = dry_run(resolve(compose(RECIPE, [DRY, "config.ZERO.MEMORY_GB=0.75"]).run, "/nowhere", recipe=RECIPE))
    assert "of 768 MiB (config.ZERO.MEMORY_GB)" in verdict(run)[1][0]


def test_a_module_of_the_working_directory_is_imported_as_in_training(tmp_path, monkeypatch, capsys):
    """A console script has no working directory in its path."""
    (tmp_path / "own_planned.py").write_text("raise ValueError('found')\n")
    monkeypatch.chdir(tmp_path)
    elsewhere = [path for path in sys.path if path not in ("", str(tmp_path))]
    monkeypatch.setattr(sys, "path", elsewhere)
    assert cli.main(["plan", RECIPE, "config.IMPORTS=[own_planned]"]) == 2
    assert "It ends with ValueError: found" in capsys.readouterr().err


def test_changes_that_keep_the_batch_say_so_and_come_before_a_smaller_one():
    words = ["config.ZERO.MEMORY_GB=0.06", "config.DATA.TRAIN.BATCHSIZE_PER_REPLICA=512"]
    planned = plan_run(compose("digits/ibot", [DRY, *words]).run)
    passes, exact, fewer = map(str, remedies(planned))
    assert planned.chosen is None
    assert passes.startswith("To keep 1,024 images a step: config.TRAINER.CROP_PASSES=")
    assert exact.startswith("To keep 1,024 images a step: config.TRAINER.EXACT_ACCUMULATION=true ")
    assert re.match(r"For \d+ images a step: config\.DATA\.TRAIN\.BATCHSIZE_PER_REPLICA=\d+ ", fewer)


@pytest.mark.slow
def test_where_nothing_fits_passes_exact_accumulation_or_a_smaller_batch_is_named():
    words = ["config.MACHINE.DEVICE=gpu", "config.DISTRIBUTED.NUM_PROC_PER_NODE=8", "config.ZERO.MEMORY_GB=4"]
    planned = plan_run(compose("pretrain/dino/vit_small", [DRY, *words]).run)
    passes, same, fewer = remedies(planned)
    assert str(passes).startswith("To keep 1,024 images a step: config.TRAINER.CROP_PASSES=4 (forecast ")
    assert passes.candidate.fits and passes.candidate.micro_batches == planned.plan.accumulation_steps
    assert planned.chosen is None and same.candidate.fits and fewer.candidate.fits
    assert (
        same.candidate.micro_batches > planned.plan.accumulation_steps and same.num_images == planned.plan.global_batch
    )
    assert str(same).startswith(f"To keep {same.num_images:,} images a step: config.TRAINER.EXACT_ACCUMULATION=true")
    assert fewer.num_images < same.num_images and "BATCHSIZE_PER_REPLICA=" in str(fewer)


@pytest.mark.slow
def test_two_recipes_are_planned_and_drawn_side_by_side(tmp_path, capsys):
    assert cli.main(["plan", RECIPE, "digits/dino", "--png", str(tmp_path / "plan.png")]) == 0
    printed = capsys.readouterr().out
    assert printed.count("chosen: level") == 2 and "digits/dino: 2 ranks" in printed
    assert "level 1 " in printed and "level 2 " not in printed, "level 2 is shown where it differs"
    assert "images/s" in printed and max(map(len, printed.split("write:")[1].splitlines()[1:3])) < 100
    assert (tmp_path / "plan.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.slow
def test_files_are_planned_side_by_side(tmp_path, capsys):
    """One anywhere, as a run writes it, and one in a tree of recipes."""
    user = compose(RECIPE, ["config.DATA.TRAIN.BATCHSIZE_PER_REPLICA=4"]).user_yaml()
    (tmp_path / "config.user.yaml").write_text(user)
    tree = tmp_path / "config" / "mine"
    tree.mkdir(parents=True)
    (tree / "larger.yaml").write_text(user.replace("BATCHSIZE_PER_REPLICA: 4", "BATCHSIZE_PER_REPLICA: 8"))
    files = [str(tmp_path / "config.user.yaml"), str(tree / "larger.yaml")]
    assert cli.main(["plan", *files, "--ranks", "2", "--memory-gb", "1", "--json"]) == 0
    plans = json.loads(capsys.readouterr().out)["plans"]
    assert [plan["recipe"] for plan in plans] == files
    assert [plan["candidates"][0]["batch_per_rank"] for plan in plans] == [4, 8]
    assert cli.main(["plan", str(tmp_path / "missing.yaml")]) == 2
    assert "must be a file that exists" in capsys.readouterr().err


def write_metrics(folder, peaks):
    lines = [json.dumps({"step": step, "bytes": {"peak": peak}}) for step, peak in peaks.items()]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")


@pytest.mark.slow
def test_a_plan_that_ran_out_of_memory_is_not_taken_again_in_its_folder(tmp_path, capsys):
    """A new start of the run and the history know of it, and of what it took beyond its forecast."""
    words = ["config.ZERO.LEVEL=fit", "config.ZERO.MEMORY_GB=1", f"config.CHECKPOINT.DIR={tmp_path}"]
    composed = compose(RECIPE, words)

    def resolved(option, why):
        return resolve(with_settings(composed.run, option.settings), tmp_path, recipe=RECIPE, notes=[why])

    fit = FitRun(fit_plans(composed), resolved)
    first = fit.choice
    fit.started()
    note_running(tmp_path, 0, 1000)
    write_metrics(tmp_path, {1: 2000, 2: first.forecast_bytes + 6000})
    fit.ran_out()
    assert outcomes(tmp_path)[-1].measured_bytes == first.forecast_bytes + 5000
    said = fit.go_on(2**40)
    second = fit.choice
    assert said.startswith(f"Going on with {second.plan}, forecast to take ") and f"and {first.plan}, forecast" in said
    assert second.forecast_bytes <= 0.9 * first.forecast_bytes and second.run.sharding != first.run.sharding
    assert second.budget_bytes == 2**30 and any("fit went on with" in note for note in second.run.notes)
    again = fit_plans(compose(RECIPE, words))
    assert again.first().plan == second.plan and "where a larger plan ran out of memory" in again.why
    assert again.budget_bytes == int(0.9 * first.forecast_bytes)

    fit.started()
    save_resolved(second.run, tmp_path / "config.resolved.yaml")
    note_running(tmp_path, 1, 1000)
    write_metrics(tmp_path, {1: 2000, 2: 3000, 3: 1000 + second.forecast_bytes * 2})
    assert [past.outcome for past in history(tmp_path)] == [OUT_OF_MEMORY, "not done"]
    (tmp_path / "summary.json").write_text("{}")
    assert cli.main(["plan", "--history", str(tmp_path)]) == 0
    rows = [line.split("  ") for line in capsys.readouterr().out.splitlines()]
    figures = [[word.strip() for word in row if word.strip()][1:] for row in rows]
    assert figures[0] == ["plan", "steps", "forecast", "measured", "held", "error", "outcome"]
    assert [row[0] for row in figures[1:]] == [first.plan, second.plan]
    assert [row[1] for row in figures[1:]] == ["2", "2"] and [row[-1] for row in figures[1:]] == [OUT_OF_MEMORY, "done"]
    assert figures[2][-2] == "-50.0%"
    assert cli.main(["plan", "--history", str(tmp_path / "nowhere")]) == 2


def failed(forecast: int, measured: int | None = None) -> Outcome:
    peak = None if measured is None else measured + 7
    return Outcome("a", forecast, 0, OUT_OF_MEMORY, held_bytes=7, peak_bytes=peak)


@pytest.mark.parametrize(
    ("rows", "given", "free", "plan"),
    [
        ([failed(100)], None, 1000, "b"),  # the cheapest of at most 90 %
        ([failed(100)], None, 70, "c"),  # and of what is free
        ([failed(100)], 70, 1000, "c"),  # and of what the user gives
        ([failed(100, 110)], None, 90, "c"),  # what one took beyond its forecast, the next may too
        ([failed(100, 90)], None, 90, "b"),
        ([failed(100)], None, 10, "d"),  # nothing fits: the smallest
        ([failed(100), failed(90), failed(61)], None, 1000, "d"),
        ([failed(60)], None, 1000, None),  # nothing is smaller
    ],
)
def test_the_next_plan_fits_what_is_free_and_stays_below_what_failed(rows, given, free, plan):
    forecasts = {"a": 100, "b": 90, "e": 95, "c": 62, "d": 60}
    plans = FitPlans([FitOption(name, size, {}) for name, size in forecasts.items()], 100, given, "")
    assert plans.first().plan == "a"
    found = plans.next(rows, free)
    assert (found and found.plan) == plan


def test_a_shortfall_is_what_a_plan_that_failed_took_beyond_its_forecast():
    assert shortfall([failed(100, 130), failed(80, 85), failed(50), failed(60, 10)]) == 30
    assert shortfall([]) == shortfall([failed(10)]) == 0
    assert shortfall([Outcome("a", 10, 0, STARTED, held_bytes=0, peak_bytes=100)]) == 0


@pytest.mark.slow
def test_fit_plans_in_a_process_of_its_own_and_leaves_the_launcher_small(tmp_path):
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from vissl_zero.commands.train import _fit\n"
        "from vissl_zero.config.compose import compose\n"
        f"fit = _fit(compose('{RECIPE}', ['config.ZERO.LEVEL=fit', 'config.ZERO.MEMORY_GB=1']), Path(sys.argv[1]))\n"
        "held = next(line for line in open('/proc/self/status') if line.startswith('VmHWM'))\n"
        "print(fit.choice.plan, '|', 'torch' in sys.modules, '|', int(held.split()[1]) // 1024)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    plan, has_torch, mib = done.stdout.strip().split(" | ")
    assert plan.startswith("level") and has_torch == "False" and int(mib) < 100


def refuse() -> None:
    raise ConfigError([Problem("config.A", "2", "must be 1", "Write 1.")])


def test_a_planner_that_is_killed_or_refuses_is_a_sentence(monkeypatch):
    """Of a process that torch has not been imported into."""
    monkeypatch.setattr(sys, "modules", {name: module for name, module in sys.modules.items() if name != "torch"})
    assert run_in_subprocess(os.getppid) == os.getpid()
    with pytest.raises(LaunchError, match=r"was killed \(often by the kernel, out of memory: .* Give the run more"):
        run_in_subprocess(signal.raise_signal, signal.SIGKILL)
    with pytest.raises(ConfigError, match=r"^config.A: must be 1 \(got 2\)\. Write 1\.$"):
        run_in_subprocess(refuse)


@pytest.mark.slow
def test_a_teacher_on_a_disk_rests_there_and_has_buffers_of_its_own(tmp_path):
    tier = f"{{device: nvme, nvme_path: {tmp_path}}}"
    words = [f"config.ZERO.offload_{what}_config={tier}" for what in ("optimizer", "param")]

    def kinds(recipe, *overrides):
        run = compose(recipe, [DRY, "config.ZERO.LEVEL=3", *overrides]).run
        return dry_run(resolve(run, str(tmp_path), recipe=recipe)).forecast.step.by_kind

    taught, alone, kept = kinds("digits/dino", *words), kinds("digits/swav", *words), kinds("digits/dino")
    assert taught["offload_buffers"] > alone["offload_buffers"] + 2**22
    assert taught["teacher"] < kept["teacher"]
