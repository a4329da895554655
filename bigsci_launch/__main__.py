"""`python -m bigsci_launch` is `bsl`."""

from bigsci_launch.cli.main import main

if __name__ == "__main__":
    main()
