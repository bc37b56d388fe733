"""Images found by their features: ``python tools/instance_retrieval_test.py config=<recipe> [config.A.B=value]``."""

import sys

from vissl_zero.cli import main

if __name__ == "__main__":
    sys.exit(main(["instance_retrieval_test", *sys.argv[1:]]))
