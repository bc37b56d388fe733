"""``vissl-zero jobs logs --follow``: the output of a job, as it is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from vissl_zero.commands import jobs
from vissl_zero.launch.slurm import Submitted


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
