"""Random states. Only dropout draws random numbers during training; weights and data order have their own seeds.

Ranks that differ only in tp hold the same activations where dropout is applied, so they share one seed.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from bigsci_launch.topology import Coordinate
from bigsci_launch.train.device.gpu import computes_on_gpu


def derive_seed(seed: int, name: str) -> int:
    """Derive a 63-bit seed for the thing called `name` from the seed of the run."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


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
    if computes_on_gpu():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def split_states(state: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    """Return the states of the host's generators and that of the GPU's, which is None without a GPU."""
    return {name: value for name, value in state.items() if name != "cuda"}, state.get("cuda")


def restore_generators(state: Mapping[str, Any]) -> str | None:
    """Restore the states that `capture_generators` returned.

    Dropout draws on the device. A checkpoint that was saved on the other kind of device has no state for it: the
    generator keeps its present state, and the result says so in a sentence.
    """
    torch.set_rng_state(state["torch"])
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state(("MT19937", np.array(keys, np.uint32), position, has_gauss, cached))
    if computes_on_gpu() and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
        return None
    if computes_on_gpu():
        return "the checkpoint was saved on a CPU and has no random state of a GPU: dropout draws other numbers"
    if "cuda" in state:
        return "the checkpoint was saved on a GPU, and this rank has none: dropout draws other numbers"
    return None
