"""Logistic regression on few images: ``python tools/low_shot_test.py config=<recipe> [config.A.B=value ...]``."""

import sys

from vissl_zero.cli import main

if __name__ == "__main__":
    sys.exit(main(["low_shot_test", *sys.argv[1:]]))
