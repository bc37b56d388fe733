"""Look into checkpoints: ``python tools/checkpoint.py inspect|verify|diff|export|import ...``."""

import sys

from vissl_zero.cli import main

if __name__ == "__main__":
    sys.exit(main(["checkpoint", *sys.argv[1:]]))
