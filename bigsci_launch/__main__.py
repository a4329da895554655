"""`python -m bigsci_launch` is `bsl`."""

import sys


def main() -> None:
    """Entry point of the `bsl` program. Its parts are loaded here, because Ctrl-C may come while they are."""
    try:
        from bigsci_launch.cli.main import main as run

        run()
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(130)


if __name__ == "__main__":
    main()
