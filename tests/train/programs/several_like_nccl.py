"""Like `several.py`, over the backend of `tests/support/nccl_like`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "support" / "nccl_like"))

import nccl_like
import several

if __name__ == "__main__":
    several.main(nccl_like.use_in_trainer)
