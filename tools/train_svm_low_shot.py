"""SVMs on few images: ``python tools/train_svm_low_shot.py config=<recipe> [config.A.B=value ...]``."""

import sys

from vissl_zero.cli import main

if __name__ == "__main__":
    sys.exit(main(["train_svm_low_shot", *sys.argv[1:]]))
