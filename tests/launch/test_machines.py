"""Two machines: two network namespaces joined by a cable, one rank each. The cable is cut, the peer is killed."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.command_line import COMMAND, run_command
from tests.launch.test_local_launch import SABOTEUR
from tests.small_trunk import SMALL_TRUNK

pytestmark = [
    pytest.mark.outside,
    pytest.mark.skipif(
        os.getuid() != 0 or shutil.which("ip") is None, reason="needs root and iproute2, for network namespaces"
    ),
]
ROOT = Path(__file__).parents[2]
TIMEOUT_S = 16
SMALL = [
    "config=quickstart/swav_digits",
    *SMALL_TRUNK,
    "config.TRAINER.THREADS_PER_RANK=1",
    "config.TRAINER.DTYPE=float64",
    "config.NEAREST_NEIGHBOR.USE_KNN=false",
    "config.HOOKS.TENSORBOARD_SETUP.USE_TENSORBOARD=false",
    f"config.DISTRIBUTED.TIMEOUT_S={TIMEOUT_S}",
]


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, timeout=20, capture_output=True)


@pytest.fixture
def machines() -> Iterator[list[str]]:
    """Names of two namespaces, 10.77.0.1 and 10.77.0.2, each with its loopback and its end of one cable."""
    names = [f"vz{os.getpid()}a", f"vz{os.getpid()}b"]
    try:
        for name in names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("link", "add", "cable", "netns", names[0], "type", "veth", "peer", "name", "cable", "netns", names[1])
        for index, name in enumerate(names):
            ip("-n", name, "addr", "add", f"10.77.0.{index + 1}/24", "dev", "cable")
            ip("-n", name, "link", "set", "cable", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def start(namespace: str, node_id: int, folder: Path, *overrides: str, **variables: str) -> subprocess.Popen[str]:
    """One machine's command, as the README has it."""
    command = ["ip", "netns", "exec", namespace, *COMMAND, *SMALL]
    command += ["config.DISTRIBUTED.NUM_NODES=2", "config.DISTRIBUTED.NUM_PROC_PER_NODE=1", f"node_id={node_id}"]
    command += ["config.DISTRIBUTED.RUN_ID=10.77.0.1:29600", f"config.CHECKPOINT.DIR={folder}/run", *overrides]
    (folder / "saboteur_of_tests.py").write_text(SABOTEUR)
    paths = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        env={**os.environ, "HOME": str(folder), "PYTHONPATH": paths, **variables},
        start_new_session=True,
    )


def both(machines: list[str], folder: Path, *overrides: str, **variables: str) -> list[subprocess.Popen[str]]:
    return [start(name, index, folder, *overrides, **variables) for index, name in enumerate(machines)]


def wait_for_steps(folder: Path, count: int, processes: list[subprocess.Popen[str]]) -> None:
    metrics, deadline = folder / "run/metrics.jsonl", time.monotonic() + 120
    while not (metrics.exists() and metrics.read_text().count("\n") >= count):
        assert time.monotonic() < deadline and all(p.poll() is None for p in processes), [
            p.communicate()[0] for p in processes if p.poll() is not None
        ]
        time.sleep(0.2)


def ends(processes: list[subprocess.Popen[str]], within_s: float) -> list[tuple[int, str]]:
    """Exit code and output of each."""
    deadline, found = time.monotonic() + within_s, []
    for process in processes:
        try:
            out, _ = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, _ = process.communicate()
            pytest.fail(f"still running after {within_s} s:\n{out}")
        found.append((process.returncode, out))
    return found


@pytest.fixture(scope="module")
def one_machine(tmp_path_factory) -> Callable[[int], Path]:
    """The weights that one machine of two ranks has trained after so many steps."""

    @cache
    def weights(num_steps: int) -> Path:
        folder = tmp_path_factory.mktemp("one")
        words = [*SMALL, f"config.TRAINER.MAX_STEPS={num_steps}", f"config.CHECKPOINT.DIR={folder}/run"]
        run_command(*words, timeout_s=200, cwd=folder)
        return folder / "run/weights.safetensors"

    return weights


def largest_difference(folder: Path, weights: Path) -> float:
    """Largest difference of the weights in ``folder/run`` from others."""
    alone, together = load_file(weights), load_file(folder / "run/weights.safetensors")
    assert alone.keys() == together.keys()
    return max((alone[name].double() - together[name].double()).abs().max().item() for name in alone)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_two_machines_train_what_one_does(machines, one_machine, tmp_path):
    for code, out in ends(both(machines, tmp_path, "config.TRAINER.MAX_STEPS=3"), 150):
        assert code == 0, out
    worst = largest_difference(tmp_path, one_machine(3))
    print(f"largest difference between two machines and one: {worst:.1e}")
    assert worst < 1e-10
    assert (tmp_path / ".vissl_zero/secret").stat().st_mode & 0o777 == 0o600


@pytest.mark.soak
@pytest.mark.timeout(240)
def test_so_do_two_machines_under_torchrun(machines, one_machine, tmp_path):
    """Both machines have one hostname here, which resolves to a loopback address: the interface must be found."""
    words = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "10.77.0.1"]
    words += ["--master-port", "29600"]
    rest = [str(ROOT / "tools/run_distributed.py"), *SMALL, "config.TRAINER.MAX_STEPS=3"]
    rest.append(f"config.CHECKPOINT.DIR={tmp_path}/run")
    processes = [
        subprocess.Popen(
            ["ip", "netns", "exec", name, sys.executable, *words, "--node-rank", str(index), *rest],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=tmp_path,
            start_new_session=True,
        )
        for index, name in enumerate(machines)
    ]
    for code, out in ends(processes, 150):
        assert code == 0, out
    assert largest_difference(tmp_path, one_machine(3)) < 1e-10


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_cut_link_ends_both_and_each_names_the_other(machines, one_machine, tmp_path):
    length = ["config.TRAINER.MAX_STEPS=60", "config.CHECKPOINT.CHECKPOINT_ITER_FREQUENCY=2"]
    processes = both(machines, tmp_path, *length)
    wait_for_steps(tmp_path, 5, processes)
    ip("-n", machines[0], "link", "set", "cable", "down")
    cut = time.monotonic()
    (code0, out0), (code1, out1) = ends(processes, TIMEOUT_S + 5)
    print(f"link cut: both ended within {time.monotonic() - cut:.1f} s (timeout {TIMEOUT_S} s)")
    assert code0 == code1 == 1, out0 + out1
    assert re.search(r"Lost machine 1 \(.*\): no heartbeat for \d+ s", out0), out0
    assert re.search(r"Lost machine 0 \(.*\), 10\.77\.0\.1:29600: no heartbeat for \d+ s", out1), out1
    assert "Traceback" not in out0 + out1
    before = (tmp_path / "run/metrics.jsonl").read_text().count("\n")
    assert before < 60

    ip("-n", machines[0], "link", "set", "cable", "up")
    (code0, out0), (code1, out1) = ends(both(machines, tmp_path, *length), 150)
    assert code0 == code1 == 0, out0 + out1
    assert "resumed after step" in out0
    worst = largest_difference(tmp_path, one_machine(60))
    print(f"resumed: largest difference from an undisturbed run on one machine {worst:.1e}")
    assert worst < 1e-10


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_killed_machine_is_named_by_the_other(machines, tmp_path):
    processes = both(machines, tmp_path, "config.TRAINER.MAX_STEPS=100000")
    wait_for_steps(tmp_path, 2, processes)
    kill(machines[1])
    code, out = ends([processes[0]], TIMEOUT_S + 15)[0]
    assert code == 1 and "Lost machine 1 (" in out and "Traceback" not in out, out


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_killed_rank_and_a_lost_machine_are_survived(machines, one_machine, tmp_path):
    """Machine 0 is the harder one to lose: the others meet at its address. Its command is given again by hand."""
    length = ["config.TRAINER.MAX_STEPS=30", "config.CHECKPOINT.CHECKPOINT_ITER_FREQUENCY=2"]
    overrides = [*length, "config.DISTRIBUTED.MAX_RESTARTS=2"]
    processes = both(machines, tmp_path, *overrides)
    wait_for_steps(tmp_path, 4, processes)
    assert kill(machines[1], only="rank_group") == 1
    wait_for_steps(tmp_path, 10, processes)
    kill(machines[0])
    lost_out, _ = processes[0].communicate(timeout=10)
    assert "rank 1 was ended by SIGKILL" in lost_out and "Restarting (restart 1 of at most 2)" in lost_out, lost_out
    (code0, out0), (code1, out1) = ends([start(machines[0], 0, tmp_path, *overrides), processes[1]], 200)
    assert code0 == code1 == 0, out0 + out1
    assert "resumed after step" in out0 and "Lost machine 0 (" in out1, out0 + out1
    assert "(restart 1 of at most 2)" in out1 and "(restart 2 of at most 2). Waiting 300 s" in out1, out1
    worst = largest_difference(tmp_path, one_machine(30))
    print(f"restarted twice: largest difference from an undisturbed run on one machine {worst:.1e}")
    assert worst < 1e-10


def kill(namespace: str, only: str = "") -> int:
    """Kill what runs on a machine, launcher and ranks, at once, or what has a word in its command; how many."""
    number = 0
    for process in Path("/proc").glob("[0-9]*"):
        if _namespace(process) == _namespace_file(namespace) and only in (process / "cmdline").read_text():
            os.kill(int(process.name), signal.SIGKILL)
            number += 1
    return number


def _namespace(process: Path) -> int:
    try:
        return (process / "ns/net").stat().st_ino
    except OSError:
        return 0


def _namespace_file(name: str) -> int:
    return Path(f"/run/netns/{name}").stat().st_ino


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_failure_on_one_machine_is_shown_on_both(machines, tmp_path):
    plugin = ["config.IMPORTS=[saboteur_of_tests]", "config.HOOKS.EXTRA=[saboteur]", "config.TRAINER.MAX_STEPS=1000"]
    processes = both(machines, tmp_path, *plugin, SABOTAGE="raise")
    (code0, out0), (code1, out1) = ends(processes, 120)
    assert code0 == code1 == 1
    assert "rank 1 on machine 1 (" in out0 and "the cat sat on the keyboard" in out0, out0
    assert "the cat sat on the keyboard" in out1 and "rank 1 failed first" in out1, out1
