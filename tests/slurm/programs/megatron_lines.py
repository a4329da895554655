"""A rank that prints as Megatron-LM does: the last rank a line for each step, the others one word at the start.

python megatron_lines.py [silent-after=N]     after N steps, nobody prints
"""

import os
import sys
import time

last = int(sys.argv[1].partition("=")[2]) if len(sys.argv) > 1 else 10**9
is_last = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
print("up", flush=True)
for step in range(1, 10**6):
    time.sleep(0.2)
    if is_last and step <= last:
        words = [
            f" iteration {step:8}/     100 ",
            " elapsed time per iteration (ms): 200.0 ",
            " lm loss: 4.531072E+00 ",
            "",
        ]
        print("|".join(words), flush=True)
