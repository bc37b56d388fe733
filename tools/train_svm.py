"""VISSL's SVM benchmark: ``python tools/train_svm.py config=<recipe> [config.A.B=value ...]``."""

import sys

from vissl_zero.cli import main

if __name__ == "__main__":
    sys.exit(main(["train_svm", *sys.argv[1:]]))
