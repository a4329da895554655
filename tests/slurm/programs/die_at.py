"""die_at.py K ARGV: run `bsl ARGV`, and die by SIGKILL just before its Kth side effect.

A side effect is a program started, a signal sent, a folder made or removed, or a file deleted or opened for writing.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from bigsci_launch.cli.main import main

left = int(sys.argv[1])


def is_side_effect(event: str, arguments: tuple[Any, ...]) -> bool:
    if event == "open":
        return isinstance(arguments[2], int) and bool(arguments[2] & (os.O_CREAT | os.O_APPEND))
    return event in ("subprocess.Popen", "os.kill", "os.mkdir", "os.rmdir", "os.remove")


def count_down(event: str, arguments: tuple[Any, ...]) -> None:
    global left
    if is_side_effect(event, arguments):
        left -= 1
        if left < 0:
            signal.raise_signal(signal.SIGKILL)


sys.argv[:2] = ["bsl"]
sys.addaudithook(count_down)
main()
