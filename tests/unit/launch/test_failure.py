"""What a launcher learns from ranks that have ended, on full disks and by odd signals too."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from vissl_zero.errors import ConfigError, OutOfMemoryError, ProcessLostError
from vissl_zero.launch import failure
from vissl_zero.launch.failure import first_failure, write_failure


def test_a_rank_ended_by_a_real_time_signal_is_named(tmp_path: Path) -> None:
    found = first_failure(tmp_path, {1: -40})
    assert found.text == "rank 1 was ended by signal 40." and not found.is_user_error


@pytest.mark.parametrize("text", ["", '{"rank": 0, "ti', "[]", '{"rank": 0}'])
def test_a_damaged_report_is_passed_over(tmp_path: Path, text: str) -> None:
    (tmp_path / "rank0.json").write_text(text)
    (tmp_path / "rank1.json").write_text(json.dumps({"rank": 1, "time_ns": 5, "is_user_error": False, "text": "why"}))
    assert first_failure(tmp_path, {0: 1, 1: 1}).text == "why"


@pytest.mark.parametrize("launcher", ["ours", "torchrun"])
def test_a_full_disk_leaves_no_half_report_and_the_text_goes_to_stderr(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], launcher: str
) -> None:
    def full(*arguments: object, **keywords: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if launcher == "ours":
        monkeypatch.setenv(failure.FAILURE_FOLDER_VARIABLE, str(tmp_path))
    else:
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.setattr(Path, "write_text", full)
    write_failure(ConfigError("config.A: must be 1 (got 2). Write 1."), 3)
    assert "[rank 3] config.A: must be 1" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    found = first_failure(tmp_path, {3: 2})
    assert found.is_user_error, "the user's error must not be tried again"


def test_a_lost_worker_is_a_sentence_and_a_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(failure.FAILURE_FOLDER_VARIABLE, str(tmp_path))
    write_failure(ProcessLostError("worker 1 is gone."), 0)
    found = first_failure(tmp_path, {0: 1})
    assert found.text == "worker 1 is gone." and not found.is_user_error


def test_memory_that_ran_out_is_told_from_other_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An allocation that failed says so itself; of a rank that was killed the kernel's counter does."""
    monkeypatch.setenv(failure.FAILURE_FOLDER_VARIABLE, str(tmp_path))
    assert first_failure(tmp_path, {0: -9}, is_short_of_memory=True).is_out_of_memory
    assert "by the kernel, out of memory" in first_failure(tmp_path, {0: -9}, is_short_of_memory=True).text
    assert not first_failure(tmp_path, {0: -9}).is_out_of_memory
    assert not first_failure(tmp_path, {0: -11}, is_short_of_memory=True).is_out_of_memory
    write_failure(OutOfMemoryError("an allocation of 1 GiB failed."), 0)
    assert first_failure(tmp_path, {0: 2}).is_out_of_memory


def test_a_loader_worker_that_the_kernel_killed_is_memory_that_ran_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(failure.FAILURE_FOLDER_VARIABLE, str(tmp_path))
    write_failure(ProcessLostError("worker 1 was ended by SIGKILL.", was_killed=True), 0)
    assert first_failure(tmp_path, {0: 1}, is_short_of_memory=True).is_out_of_memory
    assert not first_failure(tmp_path, {0: 1}).is_out_of_memory
    write_failure(ProcessLostError("worker 1 does not answer."), 0)
    assert not first_failure(tmp_path, {0: 1}, is_short_of_memory=True).is_out_of_memory


def test_torchrun_reads_what_it_looks_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    try:
        raise RuntimeError("the cat sat on the keyboard")
    except RuntimeError as error:
        said = write_failure(error, 1)
    found = ProcessFailure(local_rank=1, pid=1, exitcode=1, error_file=str(path))
    assert found.timestamp == said.time_ns // 10**9
    assert found.message["message"] == "RuntimeError: the cat sat on the keyboard"
    assert "test_torchrun_reads_what_it_looks_for" in found.message["extraInfo"]["py_callstack"]
