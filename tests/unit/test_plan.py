"""``vissl-zero plan`` and ``ZERO.LEVEL: fit``: every plan of a recipe, and the cheapest that fits."""

from __future__ import annotations

import json

import pytest

from vissl_zero import cli
from vissl_zero.config.compose import compose
from vissl_zero.config.fit_log import OUT_OF_MEMORY, note
from vissl_zero.config.resolve import resolve, save_resolved
from vissl_zero.engine.planning import all_fitted, fitted, overrides_of, plan_run
from vissl_zero.errors import ConfigError

RECIPE = "digits/supervised"
DRY = "config.DRY_RUN=true"


def planned(*overrides: str):
    return plan_run(compose(RECIPE, [DRY, *overrides]).run, RECIPE)


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


def test_more_ranks_take_less_of_what_is_sharded(capsys):
    held = []
    for ranks in ("8", "16"):
        words = ["plan", RECIPE, "--ranks", ranks, "--gpus", "--memory-gb", "1", "--json", "--images", "100000"]
        assert cli.main(words) == 0
        candidates = json.loads(capsys.readouterr().out)["candidates"]
        held.append({c["plan"]: c["by_kind"] for c in candidates})
    assert held[1]["level 1"]["optimizer"] < 0.6 * held[0]["level 1"]["optimizer"]
    assert held[1]["level 0"]["optimizer"] == held[0]["level 0"]["optimizer"]


def test_what_fit_chooses_is_what_the_overrides_of_plan_give():
    every = planned("config.ZERO.MEMORY_GB=1").candidates
    budget = sorted(c.forecast.step.resident_bytes for c in every)[1] / 2**30
    words = ["config.ZERO.LEVEL=fit", f"config.ZERO.MEMORY_GB={budget}"]
    cfg, notes, written = fitted(compose(RECIPE, words))
    chosen = planned(*words[1:]).chosen
    assert chosen.excess == 0 and chosen.forecast.step.resident_bytes <= budget * 2**30
    again = resolve(compose(RECIPE, overrides_of(chosen)).run, "/nowhere", recipe=RECIPE)
    fit = resolve(cfg, "/nowhere", recipe=RECIPE, written=written, notes=notes)
    assert fit.sharding == again.sharding == chosen.sharding
    assert fit.global_batch == again.global_batch
    assert any(note.startswith("config.ZERO.LEVEL=fit took level") for note in fit.notes)


def test_a_disk_is_used_only_where_it_is_named_and_there_is_room(tmp_path):
    folder = f"config.ZERO.offload_optimizer_config.nvme_path={tmp_path}"
    assert all(c.forecast.step.disk_bytes == 0 for c in planned().candidates)
    on_disk = [c for c in planned(folder).candidates if c.sharding.offload_optimizer.device == "nvme"]
    assert {c.sharding.level for c in on_disk} == {1, 2, 3}
    assert all(c.fits and c.forecast.step.disk_bytes for c in on_disk)
    tight = planned(folder, "config.ZERO.DISK_GB=1e-9").candidates
    assert not any(c.fits for c in tight if c.sharding.offload_optimizer.device == "nvme")


def test_nothing_fits_names_the_smallest_memory_that_would_do(capsys):
    with pytest.raises(ConfigError, match=r"is too little for every plan .* the smallest takes 0\.0\d+ GiB") as error:
        fitted(compose(RECIPE, ["config.ZERO.LEVEL=fit", "config.ZERO.MEMORY_GB=0.0001"]))
    enough = str(error.value).rsplit("config.ZERO.MEMORY_GB=", 1)[1].split()[0]
    fitted(compose(RECIPE, ["config.ZERO.LEVEL=fit", f"config.ZERO.MEMORY_GB={enough}"]))
    assert cli.main(["plan", RECIPE, "--memory-gb", "0.0001", "--png", "none"]) == 1
    out = capsys.readouterr().out
    assert "too much" in out and "no plan is known to fit. The smallest takes " in out
    assert "Plans that use a disk join in if config.ZERO.offload_optimizer_config.nvme_path=<folder>" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([RECIPE, "--ranks", "12"], "--ranks: must be 1 to 8, or a multiple of 8 (got '12')"),
        ([RECIPE, "--jsn"], "--jsn is not a flag. Did you mean '--json'"),
        (["--json"], "must name a recipe"),
        ([RECIPE, "--memory-gb"], "--memory-gb needs a value"),
    ],
)
def test_wrong_words_are_refused_with_a_sentence(words, said, capsys):
    assert cli.main(["plan", *words]) == 2
    assert said in capsys.readouterr().err


def test_two_recipes_are_planned_and_drawn_side_by_side(tmp_path, capsys):
    assert cli.main(["plan", RECIPE, "digits/dino", "--png", str(tmp_path / "plan.png")]) == 0
    printed = capsys.readouterr().out
    assert printed.count("chosen: level") == 2 and "digits/dino: 2 ranks" in printed
    assert (tmp_path / "plan.png").read_bytes()[:4] == b"\x89PNG"


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


def test_a_plan_that_ran_out_of_memory_is_not_taken_again_in_its_folder(tmp_path, capsys):
    """What stands ready for it is smaller step by step; a new start of the run and the history know of it."""
    words = ["config.ZERO.LEVEL=fit", "config.ZERO.MEMORY_GB=1", f"config.CHECKPOINT.DIR={tmp_path}"]
    ready = all_fitted(compose(RECIPE, words))
    first, second = (one.choice(resolve(one.cfg, tmp_path, recipe=RECIPE)) for one in ready[:2])
    assert second.forecast_bytes <= 0.9 * first.forecast_bytes and second.run.sharding != first.run.sharding
    note(tmp_path, first, OUT_OF_MEMORY)
    again = all_fitted(compose(RECIPE, words))[0]
    assert str(again.candidate) == second.plan and "where a larger plan ran out of memory" in again.notes[-1]
    note(tmp_path, second, "started")
    save_resolved(second.run, tmp_path / "config.resolved.yaml")
    (tmp_path / "summary.json").write_text('{"memory_before_bytes": 1000}')
    (tmp_path / "metrics.jsonl").write_text(f'{{"bytes": {{"peak": {1000 + second.forecast_bytes * 2}}}}}\n')
    assert cli.main(["plan", "--history", str(tmp_path)]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert len(rows) == 3 and first.plan in rows[1] and "out of memory" in rows[1]
    assert second.plan in rows[2] and "-50.0%" in rows[2]
    assert cli.main(["plan", "--history", str(tmp_path / "nowhere")]) == 2
