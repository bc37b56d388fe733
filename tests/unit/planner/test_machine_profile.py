"""Machines that plans are timed for: profiles that ship, files of the user's, and this one as it is measured."""

from __future__ import annotations

import os

import pytest

from vissl_zero import cli
from vissl_zero.config.compose import compose
from vissl_zero.errors import ConfigError
from vissl_zero.planner.machine_profile import profile_names, read_profile
from vissl_zero.planner.planning import plan_run

RECIPE = "digits/supervised"


@pytest.mark.parametrize("name", profile_names())
def test_profiles_that_ship_can_be_read_and_name_their_source(name):
    machine = read_profile(name)
    assert machine.source and machine.half_flops >= machine.flops and machine.near_link >= machine.far_link


def test_a_file_says_everything_that_is_wrong_at_once(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("name: mine\nflops: 1e12\nmemory: -1\nnear_link: 1\nfar_link: 1\nhost: 1\ndisk: 1\nspeed: 3\n")
    with pytest.raises(ConfigError) as error:
        read_profile(str(file))
    said = str(error.value)
    assert all(key in said for key in ("half_flops", "memory", "operation_s", "'speed'", "1.0e+9"))
    with pytest.raises(ConfigError, match="Did you mean 'h200x8'"):
        read_profile("h200x")


@pytest.mark.timeout(20)
def test_what_is_no_file_of_text_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "deep.yaml").write_text("[" * 5000)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    for profile in ("a\0b", str(tmp_path / "pipe"), str(tmp_path / "bytes"), str(tmp_path / "deep.yaml")):
        with pytest.raises(ConfigError, match="must be"):
            read_profile(profile)


RATES = (
    "name: mine\nflops: 1.0e+12\nhalf_flops: 1.0e+12\nmemory: 1.0e+10\nfar_link: 1.0e+9\nhost: 1.0e+10\n"
    "disk: 1.0e+9\noperation_s: 1.0e-6\nmemory_gb: 2\n"
)


def test_a_slow_disk_and_a_fast_link_change_what_is_cheapest(tmp_path, capsys):
    """The profile is read by a plan: times change with it, memory does not."""
    found = {}
    for link in ("1.0e+4", "1.0e+12"):
        file = tmp_path / f"{link}.yaml"
        file.write_text(f"{RATES}near_link: {link}\n")
        words = ["config.DRY_RUN=true", "config.DISTRIBUTED.NUM_PROC_PER_NODE=2", f"config.ZERO.MACHINE_PROFILE={file}"]
        planned = plan_run(compose(RECIPE, words).run, RECIPE)
        assert planned.machine.name == "mine"
        found[link] = {str(c): (c.relative_time, c.forecast.step.peak_bytes) for c in planned.candidates}
    slow, fast = found["1.0e+4"]["level 3"], found["1.0e+12"]["level 3"]
    assert slow[0] > 1.2 > fast[0] and slow[1] == fast[1]
    assert cli.main(["plan", RECIPE, "--machine", "h300"]) == 2
    assert "config.ZERO.MACHINE_PROFILE" in capsys.readouterr().err


@pytest.mark.slow
def test_messages_transfers_and_fresh_blocks_are_charged_whatever_their_bytes(tmp_path):
    def seconds(rates: str) -> dict[str, float]:
        (tmp_path / "mine.yaml").write_text(f"{RATES}near_link: 1.0e+9\n{rates}")
        words = [
            "config.DRY_RUN=true",
            "config.DISTRIBUTED.NUM_PROC_PER_NODE=2",
            "config.DATA.TRAIN.BATCHSIZE_PER_REPLICA=640",  # activations of 4 MiB and more
            f"config.ZERO.MACHINE_PROFILE={tmp_path / 'mine.yaml'}",
        ]
        return {str(c): c.forecast.seconds for c in plan_run(compose(RECIPE, words).run, RECIPE).candidates}

    free = seconds("")
    transfers, messages, blocks = (
        seconds(rate) for rate in ("transfer_s: 1", "message_s: 1", "fresh: 1.0e+30\nblock_s: 1")
    )
    num_transfers = transfers["level 3"] - free["level 3"]
    assert num_transfers == pytest.approx(3 * round(num_transfers / 3)) and num_transfers > 3  # two passes, gradients
    assert transfers["level 1"] == free["level 1"] and transfers["level 3, recomputed"] > transfers["level 1"]
    kept, again = (messages[plan] - free[plan] for plan in ("level 1", "level 1, recomputed"))
    assert again > kept > 1 and kept == pytest.approx(round(kept))  # batch norm runs once more
    assert blocks["level 0"] - free["level 0"] > 1


def test_a_profile_says_what_memory_its_gpus_have():
    words = ["config.DRY_RUN=true", "config.MACHINE.DEVICE=gpu", "config.ZERO.MACHINE_PROFILE=h200x8"]
    budget = plan_run(compose(RECIPE, words).run, RECIPE).budget
    assert budget.memory == 131 * 2**30 - 2**29 and "H200" in budget.source


def test_the_two_sizes_of_a_card_are_two_profiles():
    large, small = read_profile("a100x8"), read_profile("a100_40gbx8")
    assert "80GB" in large.name and "40GB" in small.name
    assert large.memory_gb > 2 * 38 and 38 < small.memory_gb <= 40 and large.memory > small.memory
    assert large.capability == small.capability == 8.0
