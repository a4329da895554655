"""The simplest launcher: starts one process per argument list after `--`, with RANK set, and waits for all.

python start_ranks.py [--no-rank] PROGRAM -- ARGS OF RANK 0 -- ARGS OF RANK 1 ...
"""

import os
import signal
import subprocess
import sys

words = sys.argv[1:]
numbered = words[0] != "--no-rank"
program, *groups = " ".join(words if numbered else words[1:]).split(" -- ")
running = []
for rank, group in enumerate(groups):
    variables = {"RANK": str(rank), "WORLD_SIZE": str(len(groups)), "LOCAL_RANK": str(rank)} if numbered else {}
    running.append(
        subprocess.Popen([sys.executable, *program.split(), *group.split()], env={**os.environ, **variables})
    )


def end(*_: object) -> None:
    for process in running:
        process.kill()
    os._exit(0)


signal.signal(signal.SIGTERM, end)
signal.signal(signal.SIGALRM, end)
signal.alarm(900)
while True:
    signal.pause()
