"""Runs submitted to SLURM: ``python tools/jobs.py list | logs <job> [--follow] | cancel <job>``."""

import sys

from vissl_zero.commands.jobs import jobs
from vissl_zero.errors import VisslZeroError

if __name__ == "__main__":
    try:
        sys.exit(jobs(sys.argv[1:]))
    except VisslZeroError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
