"""A rank without torch that reports what its site prepared, as one line of JSON: python site_probe.py [FILE ...]

Reports its environment's part of a site, its limits, and the first bytes of each FILE, in which `%j` is the job's ID.
With `wait` instead of FILE it then waits for the signal to stop, reports it, and ends with 0.
"""

import json
import os
import resource
import signal
import sys
import time
from pathlib import Path

NAMES = ("RANK", "MASTER_ADDR", "SLURM_CPU_BIND_TYPE", "SLURM_CPU_BIND_LIST", "GREETING", "IN_CONTAINER")


def stop(number: int, _frame: object) -> None:
    print("asked by", signal.Signals(number).name, flush=True)
    sys.exit(0)


files = [word.replace("%j", os.environ["SLURM_JOB_ID"]) for word in sys.argv[1:] if word != "wait"]
report = {
    "environment": {name: os.environ.get(name) for name in NAMES},
    "node": os.environ.get("SLURMD_NODENAME"),
    "cwd": str(Path.cwd()),
    "root": sorted(path.name for path in Path("/").iterdir()),
    "limits": {
        "core": resource.getrlimit(resource.RLIMIT_CORE)[0],
        "nofile": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    },
    "files": {path: Path(path).read_text()[:20] for path in files},
}
for each in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
    if "wait" in sys.argv[1:]:
        signal.signal(each, stop)
print("report", json.dumps(report), flush=True)
while "wait" in sys.argv[1:]:
    time.sleep(0.1)
