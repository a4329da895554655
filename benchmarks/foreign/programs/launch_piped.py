"""An own launcher: starts the ranks of a program with RANK and WORLD_SIZE, and takes the output of one rank by a pipe.

python launch_piped.py READ RANK_WITH_PIPE WORLD_SIZE PORT PROGRAM ARGUMENT...

READ `reads` shows the last line of that output every few seconds; `keeps` leaves it for later, and reads nothing.
"""

import os
import subprocess
import sys
import threading
import time


def show(pipe):
    shown = time.time()
    for line in iter(lambda: pipe.read1(4096), b""):
        if time.time() - shown > 5:
            shown = time.time()
            print(line[-60:], flush=True)


def main():
    read, piped, world_size, port = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    ranks = []
    for rank in range(world_size):
        environment = {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size),
                       "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}  # fmt: skip
        pipe = subprocess.PIPE if rank == piped else None
        ranks.append(subprocess.Popen([sys.executable, *sys.argv[5:]], env=environment, stdout=pipe))
    if read == "reads":
        threading.Thread(target=show, args=(ranks[piped].stdout,), daemon=True).start()
    for each in ranks:
        each.wait()


if __name__ == "__main__":
    main()
