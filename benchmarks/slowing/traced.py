"""The foreign program with `traceml-ai` in its loop, as its manual says: `traced.py STYLE LAST_STEP`."""

from __future__ import annotations

import foreign
import torch.distributed as dist
import traceml_ai as traceml

if __name__ == "__main__":
    traceml.init()
    foreign.main(traceml.trace_step)
    dist.destroy_process_group()
