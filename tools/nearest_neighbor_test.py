"""kNN on features: ``python tools/nearest_neighbor_test.py config=<recipe> [config.A.B=value ...]``."""

import sys

from vissl_zero.cli import main

if __name__ == "__main__":
    sys.exit(main(["nearest_neighbor_test", *sys.argv[1:]]))
