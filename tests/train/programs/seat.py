"""Runs a rank that an agent leads: `seat.py SOCKET` connects to the agent there and becomes `bigsci_launch.train`."""

from __future__ import annotations

import os
import runpy
import socket
import sys


def main() -> None:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(sys.argv[1])
    os.environ["BSL_SEAT_FD"] = str(connection.detach())
    sys.argv = ["bigsci_launch.train"]
    runpy.run_module("bigsci_launch.train", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
