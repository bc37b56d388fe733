"""``vissl-zero jobs list | logs <job> [--follow] | cancel <job>``: the runs this user has submitted to SLURM."""

from __future__ import annotations

import codecs
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vissl_zero.atomic import as_object, open_regular
from vissl_zero.errors import LaunchError, did_you_mean
from vissl_zero.launch.slurm import Submitted, noted

USAGE = """\
vissl-zero jobs list                   submitted runs: state, progress, run folder
vissl-zero jobs logs <job> [--follow]  a job's output, then the errors of all its tasks
vissl-zero jobs cancel <job> ...       cancel jobs; a running one saves first, if the cluster gives it time
"""
_WORDS = ("list", "logs", "cancel")
# The last is ours (``state_of``): SLURM forgets a job some minutes after its end.
_FINAL = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE", "ended")


def jobs(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code.

    Raises:
        LaunchError: an unknown subcommand or job.
    """
    word, rest = (arguments[0], list(arguments[1:])) if arguments else ("", [])
    if word in ("", "-h", "--help"):
        print(USAGE, end="")
        return 0 if word else 2
    if word not in _WORDS:
        raise LaunchError(f"vissl-zero jobs {word}: must be list, logs or cancel.{did_you_mean(word, _WORDS)}")
    if word == "list":
        if rest:
            raise LaunchError(f"vissl-zero jobs list: takes no {rest[0]!r}. Leave it out.")
        return _list()
    follow = "--follow" in rest or "-f" in rest
    names = [name for name in rest if name not in ("--follow", "-f")]
    if not names:
        raise LaunchError(f"vissl-zero jobs {word}: must name a job. vissl-zero jobs list shows them.")
    known = {job.job_id: job for job in noted()}
    for name in names:
        if name not in known:
            listed = f"Known: {', '.join(list(known)[-8:])}." if known else "None was submitted from this account."
            raise LaunchError(f"vissl-zero jobs {word}: {name} is not a vissl-zero job. {listed}")
    if word == "cancel":
        return _cancel([known[name] for name in names])
    if len(names) > 1:
        raise LaunchError(f"vissl-zero jobs logs: must name one job (got {' '.join(names)}). Leave the others out.")
    return _logs(known[names[0]], follow)


def _cancel(jobs: Sequence[Submitted]) -> int:
    """Cancel jobs, and name those that had ended: ``scancel`` says nothing of them."""
    ended = {job.job_id: state for job in jobs if (state := state_of(job)) in _FINAL}
    try:
        code = subprocess.run(["scancel", *(job.job_id for job in jobs)], check=False).returncode
    except OSError as error:
        fix = "Run the command where the job was submitted."
        raise LaunchError(f"vissl-zero jobs cancel: SLURM's scancel cannot be run ({error.strerror}). {fix}") from error
    for name, state in ended.items():
        print(f"Job {name} had ended before{'' if state == 'ended' else f' ({state})'}; there was nothing to cancel.")
    return code


def _list() -> int:
    table = Table(box=None, pad_edge=False)
    for column in ("job", "name", "state", "steps", "submitted", "run folder"):
        table.add_column(column, no_wrap=True)
    jobs = noted()
    for job in jobs:
        when = time.strftime("%m-%d %H:%M", time.localtime(job.submitted))
        row = (job.job_id, job.name, state_of(job), _steps(job), when, job.run_dir)
        table.add_row(*map(Text, row))
    if jobs:
        # A cropped path would be useless, so lines wrap on a narrow terminal.
        Console(width=max(len(job.run_dir) + len(job.name) for job in jobs) + 60, soft_wrap=True).print(table)
    else:
        print("No run was submitted from this account.")
    return 0


def state_of(job: Submitted) -> str:
    """Return the job's state by SLURM, or by the run folder if SLURM no longer knows the job."""
    try:
        command = ["scontrol", "show", "job", "-o", job.job_id]
        answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60).stdout
    except (OSError, subprocess.TimeoutExpired):
        answer = ""
    states = [word.partition("=")[2] for word in answer.split() if word.startswith("JobState=")]
    # The path of its log identifies a job, because numbers restart if a cluster is set up again.
    if states and str(Path(job.stdout).parent) in answer:
        return states[0]
    return "COMPLETED" if (Path(job.run_dir) / "summary.json").exists() else "ended"


def _steps(job: Submitted) -> str:
    """Read the optimizer steps so far from the last line of the run's metrics."""
    try:
        with os.fdopen(open_regular(Path(job.run_dir) / "metrics.jsonl"), "rb") as file:
            # A line is far shorter than this, and the file of a long run is not.
            file.seek(max(0, os.fstat(file.fileno()).st_size - 65536))
            lines = file.read().splitlines()
        return str(as_object(lines[-1])["step"])
    except (OSError, IndexError, KeyError, ValueError):
        return "-"


def _logs(job: Submitted, follow: bool) -> int:
    """Print the first task's output, as it is written if ``follow``, then every task's errors."""
    out, folder = Path(job.stdout), Path(job.stdout).parent
    position = 0
    decoder = codecs.getincrementaldecoder("utf-8")("replace")  # what is read may end within a character
    while True:
        is_over = not follow or state_of(job) in _FINAL  # checked before reading, so that the last output is read too
        if out.exists():
            with out.open("rb") as file:
                file.seek(position)
                text = file.read()
            position += len(text)
            sys.stdout.write(decoder.decode(text, final=is_over))
            sys.stdout.flush()
        if is_over:
            break
        time.sleep(1.0)
    if position == 0:
        print(f"Nothing yet in {out}; the job is {state_of(job)}.")
    for path in sorted(folder.glob("*_log.err")):
        if text := path.read_bytes():
            print(f"\n--- {path.name} ---\n{text.decode(errors='replace')}", end="")
    return 0
