"""Lines for the output of a job. It may be on a disk that is full, which must change neither what is done nor how."""

from __future__ import annotations

import os
import time
from contextlib import suppress


def write_line(descriptor: int, text: str) -> None:
    """Write one line at once, whatever `text` contains."""
    with suppress(OSError):
        os.write(descriptor, f"{' '.join(text.splitlines())}\n".encode())


def say(text: str) -> None:
    """Write a line of the job script itself, with the time, on stderr."""
    write_line(2, f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} bsl: {text}")
