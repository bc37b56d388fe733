"""Runs submitted to SLURM: ``python tools/jobs.py list | logs <job> [--follow] | cancel <job>``."""

import sys

from vissl_zero.cli import main

if __name__ == "__main__":
    sys.exit(main(["jobs", *sys.argv[1:]]))
