"""What was submitted, noted in the run folder and in the user's home, so that it can be listed, followed, cancelled."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from vissl_zero.atomic import read_object, replacing


@dataclass(frozen=True)
class Submitted:
    """A submitted run.

    Attributes:
        job_id: SLURM's.
        name, recipe: for people.
        run_dir: the run folder.
        stdout, stderr: logs of the first task.
        submitted: Unix time.
    """

    job_id: str
    name: str
    recipe: str
    run_dir: str
    stdout: str
    stderr: str
    submitted: float


def jobs_folder() -> Path:
    """Where this user's submitted runs are noted."""
    return Path("~/.vissl_zero/jobs").expanduser()


def note(job: Submitted) -> None:
    """Write it to ``slurm.json`` in the run folder and into ``jobs_folder``; says so if that cannot be written."""
    text = json.dumps(asdict(job), indent=2) + "\n"
    with replacing(Path(job.run_dir) / "slurm.json") as temporary:
        temporary.write_text(text)
    try:
        jobs_folder().mkdir(mode=0o700, parents=True, exist_ok=True)
        (jobs_folder() / f"{job.job_id}.json").write_text(text)
    except OSError as error:
        print(f"vissl-zero jobs will not list this job: cannot write to {jobs_folder()} ({error.strerror}).")


def noted() -> list[Submitted]:
    """All that were noted, oldest first; files that cannot be read are left out."""
    found = []
    for path in jobs_folder().glob("*.json"):
        try:
            found.append(Submitted(**read_object(path)))
        except (OSError, ValueError, TypeError):
            continue
    return sorted(found, key=lambda job: job.submitted)
