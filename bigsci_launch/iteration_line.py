"""Labels in the line that `bsl train` prints for each step, in the format of Megatron-LM.

    iteration 805/ 115311 | elapsed time per iteration (s): 13.19 | global batch size:   192 | lm loss: 4.531E+00 |

Megatron-LM and deepspeedai's Megatron-DeepSpeed give milliseconds, bigscience's Megatron-DeepSpeed seconds, and
`bsl train` both. `diagnostics/step_lines` says how such lines are read.
"""

from __future__ import annotations

SECONDS = "elapsed time per iteration (s)"
MILLISECONDS = "elapsed time per iteration (ms)"
BATCH_SIZE = "global batch size"
LOSS = "lm loss"
