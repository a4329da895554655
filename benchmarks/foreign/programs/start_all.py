"""A launcher as groups write it for themselves: starts the ranks of one machine and waits for all of them."""

import argparse
import os
import subprocess
import sys
import time

parser = argparse.ArgumentParser()
parser.add_argument("--procs", type=int, default=4)
parser.add_argument("--port", required=True)
parser.add_argument("--as-arguments", action="store_true", help="give --rank instead of RANK; the last rank first")
parser.add_argument("--omit", type=int, default=-1, help="a rank that is not started")
parser.add_argument("--misdirect", type=int, default=-1, help="a rank that gets another port")
parser.add_argument("rest", nargs=argparse.REMAINDER)
options = parser.parse_args()

children = []
for number in sorted(range(options.procs), reverse=options.as_arguments):
    if number == options.omit:
        with open(os.environ["FOREIGN_LOG"], "a") as diary:
            diary.write(f"{time.time():.3f} struck without a process\n")
        continue
    port = options.port
    environment = dict(os.environ)
    arguments = list(options.rest)
    if number == options.misdirect:
        port = str(int(port) + 1)
    if options.as_arguments:
        arguments += ["--rank", str(number), "--world-size", str(options.procs), "--url", f"tcp://127.0.0.1:{port}"]
    else:
        environment.update(RANK=str(number), LOCAL_RANK=str(number), WORLD_SIZE=str(options.procs))
        environment.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    children.append(subprocess.Popen([sys.executable, *arguments], env=environment))
for child in children:
    child.wait()
