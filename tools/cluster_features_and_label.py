"""Images labeled by clusters: ``python tools/cluster_features_and_label.py config=<recipe> [config.A.B=value]``."""

import sys

from vissl_zero.cli import main

if __name__ == "__main__":
    sys.exit(main(["cluster_features_and_label", *sys.argv[1:]]))
