"""Train a recipe: ``python tools/run_distributed.py config=<recipe> [config.A.B=value ...]``."""

import sys

from vissl_zero.cli import main

if __name__ == "__main__":
    sys.exit(main())
