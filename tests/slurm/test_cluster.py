"""Runs submitted to a real cluster: they train what a local run trains, whatever happens to the job."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.slurm.conftest import jobs_of
from tests.small_trunk import SMALL_TRUNK

pytestmark = pytest.mark.outside
ROOT = Path(__file__).parents[2]
NUM_STEPS = 40
PACE = '''
import os, time
from pathlib import Path
from vissl_zero.engine.hook import Hook
from vissl_zero.registry import HOOKS

@HOOKS.register("pace")
class Pace(Hook):
    """Makes steps last as long as a file says, so that something can happen to the job."""

    def on_step(self, run, record):
        time.sleep(float(Path(os.environ["PACE_FILE"]).read_text()))
'''
# Seconds a step lasts until the job is interrupted: NUM_STEPS of them outlast the slowest start of its neighbors.
HELD_S = 1.5
SMALL = [
    "config=quickstart/swav_digits",
    *SMALL_TRUNK,
    "config.TRAINER.THREADS_PER_RANK=1",
    "config.TRAINER.DTYPE=float64",
    # Steps that take much less than the pause between them, 22 to an epoch.
    "config.DATA.TRAIN.BATCHSIZE_PER_REPLICA=8",
    "config.DATA.TRAIN.DATA_LIMIT=352",
    "config.NEAREST_NEIGHBOR.USE_KNN=false",
    "config.HOOKS.TENSORBOARD_SETUP.USE_TENSORBOARD=false",
    "config.IMPORTS=[pace_of_tests]",
    "config.HOOKS.EXTRA=[pace]",
    "config.DISTRIBUTED.TIMEOUT_S=60",
]
SUBMIT = [
    "config.SLURM.USE_SLURM=true",
    "config.SLURM.MEM_GB=4",
    "config.SLURM.NUM_CPU_PER_PROC=1",
    "config.SLURM.TIME_HOURS=0",
    "config.SLURM.TIME_MINUTES=10",
]
TWO_BY_ONE = ["config.DISTRIBUTED.NUM_NODES=2", "config.DISTRIBUTED.NUM_PROC_PER_NODE=1"]


def set_pace(folder: Path, pace_s: float) -> None:
    """Let every step of the folder's jobs last so many seconds from now on."""
    (folder / "pace.new").write_text(str(pace_s))
    (folder / "pace.new").replace(folder / "pace")


def start(folder: Path, *words: str, pace_s: float = 0.0) -> subprocess.Popen[str]:
    (folder / "pace_of_tests.py").write_text(PACE)
    set_pace(folder, pace_s)
    paths = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.Popen(
        [sys.executable, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": paths, "PACE_FILE": str(folder / "pace"), "HOME": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def command(folder: Path, *words: str, pace_s: float = 0.0) -> subprocess.CompletedProcess[str]:
    process = start(folder, *words, pace_s=pace_s)
    out, err = process.communicate(timeout=600)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def submit(folder: Path, *overrides: str, pace_s: float = 0.0) -> str:
    """Submit into ``folder/run``; the job's id."""
    words = ["-m", "vissl_zero.cli", *SMALL, *SUBMIT, f"config.CHECKPOINT.DIR={folder}/run", *overrides]
    done = command(folder, *words, pace_s=pace_s)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"run folder  {folder}/run" in done.stdout
    return done.stdout.split()[1]


def facts(job: str) -> dict[str, str]:
    done = subprocess.run(["scontrol", "show", "job", "-o", job], capture_output=True, text=True, check=False)
    return dict(word.partition("=")[::2] for word in done.stdout.split())


def logs(folder: Path) -> str:
    return "\n".join(path.read_text() for path in sorted((folder / "run/slurm").glob("*/*_log.*")))


def wait_for(job: str, folder: Path, *states: str, within_s: float = 240.0) -> dict[str, str]:
    """Until the job is in one of the states."""
    deadline = time.monotonic() + within_s
    while (found := facts(job)).get("JobState") not in states:
        final = found.get("JobState") in ("FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "COMPLETED")
        assert not final and time.monotonic() < deadline, f"{found}\n{logs(folder)}"
        time.sleep(0.3)
    return found


def lines(path: Path) -> int:
    return path.read_text().count("\n") if path.exists() else 0


def wait_for_steps(job: str, folder: Path, count: int) -> None:
    deadline = time.monotonic() + 120
    while lines(folder / "run/metrics.jsonl") < count:
        assert time.monotonic() < deadline and facts(job)["JobState"] in ("PENDING", "RUNNING"), logs(folder)
        time.sleep(0.2)


def largest_difference(a: Path, b: Path) -> float:
    left, right = load_file(a / "weights.safetensors"), load_file(b / "weights.safetensors")
    assert left.keys() == right.keys()
    return max((left[name].double() - right[name].double()).abs().max().item() for name in left)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    """The run folder of a local run of 2 processes that nothing happens to."""
    folder = tmp_path_factory.mktemp("undisturbed")
    words = ["-m", "vissl_zero.cli", *SMALL, f"config.TRAINER.MAX_STEPS={NUM_STEPS}"]
    done = command(folder, *words, f"config.CHECKPOINT.DIR={folder}/run")
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "run"


def wait_for_restarts(folder: Path, jobs: list[str]) -> None:
    """Until one of the jobs has been requeued. Steps need not last from then on."""
    deadline = time.monotonic() + 200
    while not sum(int(facts(job)["Restarts"]) for job in jobs):
        assert time.monotonic() < deadline, f"{[facts(job) for job in jobs]}\n{logs(folder)}"
        time.sleep(0.3)
    set_pace(folder, 0.0)


def ends_as_undisturbed(job: str, folder: Path, undisturbed: Path, restarts: int = 1) -> None:
    if restarts:
        wait_for_restarts(folder, [job])
    found = wait_for(job, folder, "COMPLETED", within_s=300)
    assert int(found["Restarts"]) >= restarts, found
    recorded = [json.loads(line)["step"] for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    assert recorded == list(range(1, NUM_STEPS + 1))
    difference = largest_difference(folder / "run", undisturbed)
    print(f"job {job}: {found['Restarts']} restarts, largest difference from an undisturbed run {difference:.1e}")
    assert difference < 1e-10


THREE_STEPS = ["config.TRAINER.MAX_STEPS=3", "config.DATA.TRAIN.BATCHSIZE_PER_REPLICA=8", "config.ZERO.LEVEL=3"]


@pytest.fixture(scope="module")
def four_on_one_machine(tmp_path_factory) -> Path:
    """The run folder of three steps of 4 local processes."""
    folder = tmp_path_factory.mktemp("four")
    local = ["config.DISTRIBUTED.NUM_PROC_PER_NODE=4", f"config.CHECKPOINT.DIR={folder}/run"]
    done = command(folder, "-m", "vissl_zero.cli", *SMALL, *THREE_STEPS, *local)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "run"


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "task_per", [pytest.param("node", marks=pytest.mark.slow), pytest.param("process", marks=pytest.mark.soak)]
)
def test_two_nodes_of_two_tasks_train_what_one_machine_does(task_per, four_on_one_machine, tmp_path):
    cluster = ["config.DISTRIBUTED.NUM_NODES=2", "config.DISTRIBUTED.NUM_PROC_PER_NODE=2"]
    own_code = ["config.SLURM.SNAPSHOT_CODE=true"] if task_per == "node" else []
    job = submit(tmp_path, *THREE_STEPS, *cluster, *own_code, f"config.SLURM.TASK_PER={task_per}")
    found = wait_for(job, tmp_path, "COMPLETED")
    assert found["NumNodes"] == "2" and found["NumTasks"] == ("2" if task_per == "node" else "4")
    assert largest_difference(tmp_path / "run", four_on_one_machine) < 1e-10
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["world_size"] == 4 and summary["level"] == 3
    assert len(list(tmp_path.glob("run/slurm/code_*/pace_of_tests.py"))) == len(own_code)
    assert (tmp_path / "run/slurm").stat().st_mode & 0o777 == 0o700
    said = command(tmp_path, str(ROOT / "tools/jobs.py"), "logs", job, "--follow").stdout
    assert "3 steps of 32 images" in said and "report" in said


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_cancelled_job_ends_and_does_not_come_back(tmp_path):
    job = submit(tmp_path, *TWO_BY_ONE, "config.TRAINER.MAX_STEPS=10000", pace_s=0.2)
    wait_for_steps(job, tmp_path, 2)
    listed = command(tmp_path, str(ROOT / "tools/jobs.py"), "list").stdout
    assert job in listed and "RUNNING" in listed
    assert command(tmp_path, str(ROOT / "tools/jobs.py"), "cancel", job).returncode == 0
    deadline = time.monotonic() + 60
    while subprocess.run(["squeue", "-h", "-j", job], capture_output=True, text=True, check=False).stdout:
        assert time.monotonic() < deadline
        time.sleep(0.3)
    assert facts(job)["JobState"] == "CANCELLED" and facts(job)["Restarts"] == "0"
    assert not _processes_of(tmp_path)


def _processes_of(folder: Path) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = path.read_text().replace("\0", " ")
        except OSError:
            continue
        if str(folder) in text and int(path.parent.name) != os.getpid():
            found.append(text)
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_time_limit_saves_requeues_and_resumes(undisturbed, tmp_path):
    limit = ["config.SLURM.TIME_MINUTES=2", "config.SLURM.SIGNAL_DELAY_S=80", "config.SLURM.MAX_REQUEUES=9"]
    job = submit(tmp_path, *TWO_BY_ONE, *limit, f"config.TRAINER.MAX_STEPS={NUM_STEPS}", pace_s=HELD_S)
    ends_as_undisturbed(job, tmp_path, undisturbed)
    assert "requeued (1 of at most 9 times)" in logs(tmp_path)


@pytest.mark.soak  # the slow tests have the evicted sweep, and the time limit, which saves in the same way
@pytest.mark.timeout(600)
def test_an_eviction_saves_requeues_and_resumes(undisturbed, tmp_path):
    all_of_it = ["config.SLURM.NUM_CPU_PER_PROC=4"]
    job = submit(tmp_path, *TWO_BY_ONE, *all_of_it, f"config.TRAINER.MAX_STEPS={NUM_STEPS}", pace_s=HELD_S)
    wait_for_steps(job, tmp_path, 4)
    urgent = ["sbatch", "-p", "urgent", "-N", "2", "-c", "4", "-o", "/dev/null", "--wrap", "sleep 2"]
    subprocess.run(urgent, check=True, capture_output=True, cwd=tmp_path)
    ends_as_undisturbed(job, tmp_path, undisturbed)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_requeue_from_outside_goes_on_from_the_last_checkpoint(undisturbed, tmp_path):
    often = ["config.CHECKPOINT.CHECKPOINT_ITER_FREQUENCY=5"]
    job = submit(tmp_path, *TWO_BY_ONE, *often, f"config.TRAINER.MAX_STEPS={NUM_STEPS}", pace_s=0.5)
    wait_for_steps(job, tmp_path, 12)
    subprocess.run(["scontrol", "requeue", job], check=True)
    ends_as_undisturbed(job, tmp_path, undisturbed)
    assert "resumed after step" in logs(tmp_path)


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_node_daemon_that_is_killed_does_not_change_the_result(undisturbed, tmp_path):
    job = submit(tmp_path, *TWO_BY_ONE, f"config.TRAINER.MAX_STEPS={NUM_STEPS}", pace_s=0.3)
    wait_for_steps(job, tmp_path, 4)
    daemon = int(Path("/var/tmp/vissl_zero_slurm/run/slurmd.node2.pid").read_text())
    assert Path(f"/proc/{daemon}/comm").read_text().strip() == "slurmd"
    os.kill(daemon, signal.SIGKILL)
    time.sleep(3.0)
    subprocess.run([str(Path(__file__).parent / "cluster.sh"), "up"], check=True, timeout=60, capture_output=True)
    ends_as_undisturbed(job, tmp_path, undisturbed, restarts=0)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_array_sweep_survives_an_eviction_and_a_job_that_fails(undisturbed, tmp_path):
    """Four jobs on two nodes: those of node1 are evicted (the failing one has ended by then)."""
    launcher = [
        "hydra/launcher=submitit_slurm",
        "hydra.launcher.timeout_min=10",
        "hydra.launcher.cpus_per_task=2",
        "hydra.launcher.mem_gb=3",
        "hydra.sweep.dir=sweep",
    ]
    grid = ["config.ZERO.LEVEL=0,3,9,2", f"config.TRAINER.MAX_STEPS={NUM_STEPS}"]
    sweep = start(tmp_path, "-m", "vissl_zero.cli", "-m", *SMALL, *grid, *launcher, pace_s=HELD_S)
    folders = {level: tmp_path / f"sweep/{index}" for index, level in enumerate("0392")}
    trained = {level: folder for level, folder in folders.items() if level != "9"}
    deadline = time.monotonic() + 120
    while not all(lines(folder / "metrics.jsonl") >= 4 for folder in trained.values()):
        assert time.monotonic() < deadline and sweep.poll() is None, sweep.communicate()
        time.sleep(0.2)
    array = min(jobs_of(tmp_path), key=int)
    urgent = ["sbatch", "-p", "urgent", "-w", "node1", "-c", "4", "-o", "/dev/null", "--wrap", "sleep 1"]
    subprocess.run(urgent, check=True, capture_output=True, cwd=tmp_path)
    wait_for_restarts(tmp_path, [f"{array}_{index}" for index in range(4)])
    out, err = sweep.communicate(timeout=300)
    assert sweep.returncode == 2, out + err
    restarts = [int(facts(f"{array}_{index}")["Restarts"]) for index in range(4)]
    assert 1 <= sum(restarts) <= 2, restarts

    with (tmp_path / "sweep/sweep.csv").open() as file:
        rows = {row["config.ZERO.LEVEL"]: row for row in csv.DictReader(file)}
    states = {level: row["state"] for level, row in rows.items()}
    assert states == {"0": "done", "3": "done", "9": "failed (2)", "2": "done"}
    for level, folder in trained.items():
        recorded = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert [record["step"] for record in recorded] == list(range(1, NUM_STEPS + 1))
        assert float(rows[level]["loss_last"]) == recorded[-1]["loss"]
    worst = max(largest_difference(folder, undisturbed) for folder in trained.values())
    print(f"array {array}: restarts {restarts}, largest difference from an undisturbed run {worst:.1e}")
    assert worst < 1e-10
    assert (tmp_path / "sweep/.submitit").stat().st_mode & 0o777 == 0o700
    assert out.startswith(f"sweep folder  {tmp_path}/sweep\nlogs          {tmp_path}/sweep/.submitit\n")
    assert "1 of 4 jobs are not done" in out and "Traceback" not in out + err


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("config.SLURM.PARTITION=nope", "invalid partition specified: nope"),
        ("config.SLURM.MEM_GB=900", "Partitions: main: 2 nodes of 4 cores and 7.81 GiB"),
        ("config.DISTRIBUTED.NUM_NODES=3", "nodes 3"),
        ("config.SLURM.NUM_CPU_PER_PROC=64", "cpus-per-task 128"),
    ],
)
def test_what_the_cluster_cannot_do_is_refused_and_nothing_is_left(override, message, tmp_path):
    words = ["-m", "vissl_zero.cli", *SMALL, *SUBMIT, f"config.CHECKPOINT.DIR={tmp_path}/run", override]
    done = command(tmp_path, *words)
    assert done.returncode == 2 and message in done.stderr and "Nothing was submitted." in done.stderr
    assert "Traceback" not in done.stderr and not list((tmp_path / "run").glob("*"))
    assert not jobs_of(tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_sweep_that_the_cluster_refuses_is_one_sentence(tmp_path):
    launcher = ["hydra/launcher=submitit_slurm", "hydra.launcher.partition=nope", "hydra.sweep.dir=sweep"]
    done = command(tmp_path, "-m", "vissl_zero.cli", "-m", *SMALL, "config.ZERO.LEVEL=0,3", *launcher)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "hydra/launcher: SLURM takes no job of the sweep (sbatch: error: invalid partition" in done.stderr
    assert not jobs_of(tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_quotes_arrive_as_text(tmp_path):
    name, comment = """it's "a" name""", f"x $(touch {tmp_path}/pwned) `touch {tmp_path}/pwned`"
    quoted = name.replace("'", "\\'")
    job = submit(
        tmp_path,
        f"config.SLURM.NAME='{quoted}'",
        f"config.SLURM.COMMENT='{comment}'",
        "+config.SLURM.ADDITIONAL_PARAMETERS.hold=true",
        "config.DISTRIBUTED.NUM_PROC_PER_NODE=1",
    )
    text = subprocess.run(["scontrol", "show", "job", job], capture_output=True, text=True, check=True).stdout
    subprocess.run(["scancel", job], check=True)
    assert f"JobName={name}\n" in text and f"Comment={comment}" in text and not (tmp_path / "pwned").exists()
    deadline = time.monotonic() + 20
    while facts(job)["JobState"] != "CANCELLED" and time.monotonic() < deadline:
        time.sleep(0.2)
