"""Fixtures that every room shares."""

from __future__ import annotations

import os

import pytest

FOREIGN = ("SLURM_", "SBATCH_", "BSL_", "TORCHELASTIC_")
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def clean_environ(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees the variables of a job or of bsl that the caller's shell happens to hold."""
    for name in list(os.environ):
        if (name.startswith(FOREIGN) and name != "SLURM_CONF") or name in RANK_VARIABLES:
            monkeypatch.delenv(name)
