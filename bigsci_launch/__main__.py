"""`python -m bigsci_launch` is `bsl`."""

import sys

from bigsci_launch.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
