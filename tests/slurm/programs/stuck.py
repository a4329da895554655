"""A rank that prints as Megatron-LM does, and always fails at the same step, because it saves nothing.

python stuck.py STEP [finish-in=NAME [FILE]]     all ranks exit with 7 after STEP, and not before FILE exists;
                                                 in attempt NAME they reach the last step, 9
"""

import os
import sys
import time
from pathlib import Path

last, name = int(sys.argv[1]), sys.argv[2].partition("=")[2] if len(sys.argv) > 2 else ""
finishes = os.environ["BSL_ATTEMPT"] == name
for step in range(1, 10 if finishes else last + 1):
    time.sleep(0.2)
    print(
        f" iteration {step:8}/       9 | elapsed time per iteration (ms): 200.0 | lm loss: 4.531072E+00 |", flush=True
    )
while not finishes and len(sys.argv) > 3 and not Path(sys.argv[3]).exists():
    time.sleep(0.1)
sys.exit(0 if finishes else 7)
