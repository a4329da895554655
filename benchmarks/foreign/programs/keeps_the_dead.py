"""A launcher of one's own that does not reap its ranks: keeps_the_dead.py RANKS PORT COMMAND...

With KEEP=away it is killed after a minute, so that the ranks become orphans.
"""

import os
import signal
import subprocess
import sys
import time

size, port, *command = sys.argv[1:]
children = []
for rank in range(int(size)):
    environment = dict(os.environ, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=size)
    environment.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    children.append(subprocess.Popen(command, env=environment))
if os.environ.get("KEEP") == "away":
    time.sleep(60)
    with open(os.environ["FOREIGN_LOG"], "a") as diary:
        diary.write(f"{time.time():.3f} struck its launcher\n")
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(100000)
