"""What a program writes down while it runs, so that its true state is known: one line per event in $FOREIGN_LOG."""

import os
import time


def note(words, rank):
    """Append `TIME WORDS rank RANK pid PID`."""
    line = f"{time.time():.3f} {words} rank {rank} pid {os.getpid()}\n"
    page = os.open(os.environ.get("FOREIGN_LOG", "/dev/null"), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(page, line.encode())
    os.close(page)
