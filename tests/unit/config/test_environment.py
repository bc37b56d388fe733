"""Values of environment variables, which may be secrets, are in no error text and in nothing that is printed."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from vissl_zero import errors
from vissl_zero.cli import main
from vissl_zero.config.compose import compose
from vissl_zero.errors import DataError, keep_secret, masked
from vissl_zero.reporting.lossy_output import LossyStream
from vissl_zero.resolve.resolve import resolve, save_resolved
from vissl_zero.resolve.saved import load_resolved

SECRET = "hunter2SECRETvalue"


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "_secrets", {})
    monkeypatch.setenv("MY_TOKEN", SECRET)


@pytest.mark.parametrize(
    "word",
    [
        "config.MODEL.WEIGHTS_INIT.PARAMS_FILE=/nonexistent/${oc.env:MY_TOKEN}/w.pt",
        "config.DATA.TRAIN.DATA_PATHS=['${oc.env:MY_TOKEN}']",
        "config.DISTRIBUTED.SECRET_FILE=${oc.env:MY_TOKEN}",
        "config.OPTIMIZER.lr=${oc.env:MY_TOKEN}",
        "config.LOSS.name=${oc.env:MY_TOKEN}",
        "config.DATA.TRAIN.DATA_SOURCES=['${oc.env:MY_TOKEN}']",
    ],
)
def test_no_refusal_has_the_value(word: str, capfd: pytest.CaptureFixture[str]) -> None:
    code = main(["config=supervised/folder", "--dry-run", "config.DATA.TEST.DATA_PATHS=[]", word])
    said = "".join(capfd.readouterr())
    assert code == 2 and SECRET not in said and said.strip()


def test_a_rank_masks_what_its_plan_took_from_the_environment(tmp_path: Path) -> None:
    composed = compose("digits/supervised", ["config.CHECKPOINT.DIR=/tmp/run-${oc.env:MY_TOKEN}"])
    save_resolved(resolve(composed.run, tmp_path, written=composed.written), tmp_path / "config.resolved.yaml")
    errors._secrets.clear()  # a rank is another process
    plan = load_resolved(tmp_path / "config.resolved.yaml")
    assert plan.run_dir == f"/tmp/run-{SECRET}"
    assert str(DataError(f"{plan.run_dir}/x is missing.")) == "/tmp/run-${oc.env:MY_TOKEN}/x is missing."


def test_printed_text_is_masked_and_keeps_what_is_no_word_of_its_own() -> None:
    keep_secret("alpha", "${oc.env:A}")
    keep_secret("alpha-beta", r"${oc.env:B}\1")
    keep_secret("2", "${oc.env:C}")  # everything would be unreadable
    assert masked("alpha alphabet /alpha/x alpha-beta 2") == r"${oc.env:A} alphabet /${oc.env:A}/x ${oc.env:B}\1 2"
    stream = io.StringIO()
    LossyStream(stream).write("Traceback of alpha")
    assert stream.getvalue() == "Traceback of ${oc.env:A}"


def test_a_stream_without_a_letter_gets_an_escape() -> None:
    """A run folder may be called "é" where the terminal's encoding is ASCII."""
    raw = io.BytesIO()
    stream = LossyStream(io.TextIOWrapper(raw, encoding="ascii"))
    assert stream.write("run é\n") == 6
    stream.flush()
    assert raw.getvalue() == rb"run \xe9" + b"\n"
