"""Train a recipe, as ``vissl-zero`` does: ``python tools/run_distributed.py config=<recipe> [config.A.B=value ...]``."""

import sys

from vissl_zero.cli import main

if __name__ == "__main__":
    sys.exit(main())
