"""``vissl-zero jobs logs --follow``: the output of a job, as it is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from vissl_zero.commands import jobs
from vissl_zero.launch.slurm import Submitted


def test_a_job_that_has_ended_is_not_cancelled_in_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "scancel").write_text("#!/bin/sh\n")
    (tmp_path / "scancel").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(jobs, "state_of", lambda job: {"7": "TIMEOUT", "8": "RUNNING", "9": "ended"}[job.job_id])
    known = [Submitted(name, "name", "recipe", str(tmp_path), "out", "err", 0.0) for name in "789"]
    monkeypatch.setattr(jobs, "noted", lambda: known)
    assert jobs.jobs(["cancel", "7", "8", "9"]) == 0
    assert capsys.readouterr().out == (
        "Job 7 had ended before (TIMEOUT); there was nothing to cancel.\n"
        "Job 9 had ended before; there was nothing to cancel.\n"
    )


def test_followed_output_has_whole_characters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "0_log.out"
    parts = ["Größe ".encode()[:3], "Größe ".encode()[3:], b"256 \xe2\x82"]  # the last ends within a character
    states = iter(["RUNNING", "RUNNING", "COMPLETED"])

    def write_more(*_: object) -> str:
        with out.open("ab") as file:
            file.write(parts.pop(0))
        return next(states)

    monkeypatch.setattr(jobs, "state_of", write_more)
    monkeypatch.setattr(jobs.time, "sleep", lambda _: None)
    job = Submitted("1", "name", "recipe", str(tmp_path), str(out), str(tmp_path / "0_log.err"), 0.0)
    assert jobs._logs(job, follow=True) == 0
    assert capsys.readouterr().out == "Größe 256 \ufffd"
