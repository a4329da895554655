"""Random states. Only dropout draws random numbers during training; weights and data order have their own seeds.

Ranks that differ only in tp hold the same activations where dropout is applied, so they share one seed.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from bigsci_launch.topology import Coordinate
from bigsci_launch.train.initial_weights import derive_seed


def seed_generators(seed: int, coordinate: Coordinate, step: int = 0) -> None:
    """Seed all generators of this process for its coordinate; a start after another `step` gets other streams."""
    after = f"/step{step}" if step else ""
    derived = derive_seed(seed, f"dropout/pp{coordinate.pp_rank}/dp{coordinate.dp_rank}{after}")
    random.seed(derived)
    np.random.seed(derived % 2**32)
    torch.manual_seed(derived)


def capture_generators() -> dict[str, Any]:
    """Return the states of all generators of this process, as plain values that load without running code."""
    version, words, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": (version, list(words), gauss),
        "numpy": ([int(key) for key in keys], int(position), int(has_gauss), float(cached)),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_generators(state: dict[str, Any]) -> None:
    """Restore the states that `capture_generators` returned."""
    torch.set_rng_state(state["torch"])
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state(("MT19937", np.array(keys, np.uint32), position, has_gauss, cached))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
