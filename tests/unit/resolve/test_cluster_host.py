"""The machine that a run is planned for: this one, or what SLURM's sinfo says of a partition's nodes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.unit.config.example_config import changed
from vissl_zero.config.compose import load
from vissl_zero.resolve.host import cluster_host
from vissl_zero.resolve.resolve import _host

NODES = "debug gpu:1\nlarge* gpu:a100:8(S:0-1),gpu:t4:2\nlarge* (null)\nsmall (null)\n"


def _sinfo(folder: Path, answer: str, code: int = 0) -> None:
    """Put a program of this name first on the path; it shows the lines of the partition it is asked for."""
    script, lines = folder / "sinfo", folder / "lines"
    lines.write_text(answer)
    script.write_text(f'#!/bin/sh\n[ "$1 $2 $3" = "-h -o %P %G" ] && grep -e "^${{5:-.}}" {lines}\nexit {code}\n')
    script.chmod(0o755)


@pytest.mark.parametrize(("partition", "num_gpus"), [("", 8), ("large", 8), ("debug", 1), ("small", 0)])
def test_gpus_are_those_that_a_partition_says_it_has(
    partition: str, num_gpus: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _sinfo(tmp_path, NODES)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    host = cluster_host(4, 16, "auto", partition)
    assert (host.num_gpus, host.num_cores, host.assumed) == (num_gpus, 16, "")
    assert host.why_no_gpu == "the partition's nodes have none"


@pytest.mark.parametrize(("device", "num_gpus"), [("gpu", 4), ("cuda", 4), ("cpu", 0)])
def test_a_device_that_is_named_is_not_asked_for(
    device: str, num_gpus: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _sinfo(tmp_path, "any* gpu:2\n")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert cluster_host(4, 16, device, "").num_gpus == num_gpus


def test_where_sinfo_fails_nodes_without_gpus_are_assumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _sinfo(tmp_path, NODES, code=1)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    host = cluster_host(4, 16, "auto", "")
    assert host.num_gpus == 0 and "sinfo does not answer" in host.assumed


@pytest.mark.parametrize(
    ("threads", "asked_for", "is_measured"), [(None, None, True), (2, None, False), (None, 2, False)]
)
def test_idle_cores_are_counted_where_nobody_has_said_how_many_threads(
    threads: int | None, asked_for: int | None, is_measured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if asked_for is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", str(asked_for))
    host = _host(changed(load("digits/simclr"), {"TRAINER.THREADS_PER_RANK": threads}))
    assert (host.num_idle_cores is not None) == is_measured
