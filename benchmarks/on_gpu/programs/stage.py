"""What the programs of this folder share: `python PROGRAM.py DEVICE FOLDER MODE ...`, started as a rank.

A rank creates FOLDER/ready-RANK just before it hangs.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

DEVICE, MODE = sys.argv[1], sys.argv[3]
RANK = int(os.environ["RANK"])
LONG_S = 3600


def say_ready() -> None:
    (Path(sys.argv[2]) / f"ready-{RANK}").touch()


def start_endless_kernel() -> None:
    """Have the current stream compute for half an hour."""
    import torch

    torch.cuda._sleep(4_000_000_000_000)
