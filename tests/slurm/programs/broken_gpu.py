"""A rank that dies of its GPU: python broken_gpu.py RANK LINE. That rank prints LINE and leaves with 3 after a second,
in attempt 0001 only; the others wait for two more seconds and leave with 0."""

import os
import sys
import time

rank, line = sys.argv[1:]
print("up", flush=True)
time.sleep(1)
if os.environ["BSL_ATTEMPT"] == "0001":
    if os.environ["RANK"] == rank:
        print(line, flush=True)
        sys.exit(3)
    time.sleep(60)
