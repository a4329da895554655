"""Runs an installed module as a program. Stand-alone: standard library only, Python 3.8 or newer.

    python run_module.py [--path FOLDERS] MODULE ARGUMENTS

`python -m` looks in the current directory first: a `random.py` of the user, or a clone that is another version, would
run instead of what is installed. Python's own option against that, -P, does not exist before 3.11. --path is what the
variable PYTHONPATH had, for a Python that is started with -E because the variable may be another Python's by now.
"""

import os
import runpy
import sys
from pathlib import Path


def main() -> None:
    own = Path(__file__).resolve().parent
    found = [folder for folder in sys.path if Path(folder).resolve() != own]
    arguments = sys.argv[1:]
    if arguments[0] == "--path":
        found = [str(Path(folder).absolute()) for folder in arguments[1].split(os.pathsep) if folder] + found
        arguments = arguments[2:]
    sys.path[:] = found
    sys.argv[:] = arguments
    runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
