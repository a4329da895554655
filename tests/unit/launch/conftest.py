"""A run for a Slurm site that need not exist."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

MODEL = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "sequence_length": 8, "vocab_size": 64}


@pytest.fixture
def run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """`run_file(site=..., **sections)` writes a run of 4 ranks into the current folder, which is otherwise empty."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)

    def write(site: str = "minicluster", **sections: Any) -> Path:
        config = {
            "run": {"name": "trial", "command": ["true"]},
            "slurm": {"site": site, "nodes": 2, "time_limit": "01:00:00"},
            "parallelism": {"tensor_parallel_size": 2},
            "model": {**MODEL, "vocab_size_multiple": 32},
            "training": {"steps": 10, "micro_batch_size": 1, "global_batch_size": 2},
            "data": {"prefix": "/on-the-nodes/tokens"},
            "monitor": {"step_time_s": 1, "save_time_s": 1},
            **sections,
        }
        path = folder / "trial.yaml"
        path.write_text(json.dumps(config))
        return path

    return write
