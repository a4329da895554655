"""A rank without torch that behaves as a test wants: python rank.py [steps=N] [die=RANK] [ignore-term] [helper] ...

Prints `up {RANK, ...}`, then `iteration N` every 0.2 s.
  steps=N      ends after N iterations (default: never)
  die=RANK     that rank kills itself with SIGKILL at iteration 3; die=RANK:CODE: raises SystemExit(CODE)
  leave=RANK   that rank ends with 0 at iteration 3
  linger=RANK  that rank does not end after its last iteration
  only=N       iterations are printed, and the rank dies, only in attempt N (such as 0001)
  ignore-term  continues after SIGTERM
  stop-on-usr2 prints `asked to stop` and exits with 0
  helper       has a child that SIGUSR2 would kill, and reports if it died
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

options = dict(word.partition("=")[::2] for word in sys.argv[1:])
names = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "NODE_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "BSL_ATTEMPT",
)
here = {name: os.environ[name] for name in names}


def stop(*_: object) -> None:
    print("asked to stop", "helper died" if helper and helper.poll() is not None else "", flush=True)
    if helper:
        helper.kill()
    sys.exit(0)


helper = subprocess.Popen(["sleep", "300"]) if "helper" in options else None
if "ignore-term" in options:
    signal.signal(signal.SIGTERM, lambda *_: print("TERM", flush=True))
if "stop-on-usr2" in options:
    signal.signal(signal.SIGUSR2, stop)
print("up", json.dumps({**here, "host": os.uname().nodename, "cwd": str(Path.cwd())}), flush=True)
step = 0
while step < int(options.get("steps", 10**9)):
    step += 1
    time.sleep(0.2)
    print("iteration", step, flush=True)
    if options.get("leave") == here["RANK"] and step == 3:
        sys.exit(0)
    victim, _, code = options.get("die", "").partition(":")
    if victim == here["RANK"] and step == 3 and options.get("only", here["BSL_ATTEMPT"]) == here["BSL_ATTEMPT"]:
        if code:
            print("ValueError: something is wrong here", flush=True)
            sys.exit(int(code))
        os.kill(os.getpid(), signal.SIGKILL)
if options.get("linger") == here["RANK"]:
    time.sleep(300)
