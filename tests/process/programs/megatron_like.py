"""A program that trains nothing, but prints, saves, resumes and stops as Megatron-LM does.

python megatron_like.py [MODE]     each mode is one way to be unfit for a real run

ignores-stop: does not handle the signal before the time limit    starts-over: resumes one step before its last save
other-losses: its losses depend on the moment    leaves-child: a process of its own session outlives each rank
fills-disk: its checkpoint needs more space than there is
infinite-loss: the loss is not finite    no-lines: prints nothing    ends: ends with an error at the second step
"""

import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

MODE = sys.argv[1] if len(sys.argv) > 1 else ""
RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
LATEST = Path(os.environ["BSL_RUN_DIR"], "checkpoints", "latest_checkpointed_iteration.txt")
TELLS = RANK == WORLD_SIZE - 1
stopping = []


def say(text):
    if TELLS and MODE != "no-lines":
        print(text, flush=True)


def save(step):
    if TELLS:
        LATEST.parent.mkdir(exist_ok=True)
        if MODE == "fills-disk":
            with (LATEST.parent / "weights").open("wb", buffering=0) as stream:
                while stream.write(b"x" * 4096):
                    pass
        LATEST.write_text(str(step))
        say(f"  successfully saved checkpoint at iteration {step:7} to {LATEST.parent}")


def loss_of(step):
    if MODE == "infinite-loss":
        return math.nan
    return 10.0 / step + (time.time() % 7 if MODE == "other-losses" else 0.0)


if MODE != "ignores-stop":
    signal.signal(signal.SIGUSR2, lambda *_: stopping.append(True))
if MODE == "leaves-child":
    subprocess.Popen(["sleep", "60"], start_new_session=True, stdout=subprocess.DEVNULL)
step = int(LATEST.read_text()) if LATEST.exists() else 0
if step:
    say(f"  successfully loaded checkpoint from {LATEST.parent} [ t 0 ] at iteration {step}")
    step -= MODE == "starts-over"
while True:
    step += 1
    time.sleep(0.15)
    if MODE == "ends" and step == 2:
        sys.exit("OutOfMemoryError: CUDA out of memory")
    say(f" iteration {step:8}/ 1000000 | elapsed time per iteration (ms): 150.0 | lm loss: {loss_of(step):.6E} |")
    if stopping:
        save(step)
        sys.exit(0)
    if step == 2:
        save(step)
    if step == 3:
        say(f" validation loss at iteration {step} | lm loss value: {loss_of(step):.6E} |")
