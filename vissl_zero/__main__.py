"""``python -m vissl_zero``: the command ``vissl-zero``, also where its script is not on the PATH."""

from vissl_zero.cli import main

raise SystemExit(main())
