"""A small valid run file and a site with partitions, in which tests spoil one key at a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from bigsci_launch.config.load import LoadedRun, load_run

RUN = """\
run:
  name: small
slurm:
  site: lake
  nodes: 4
  time_limit: 20:00:00
parallelism:
  tensor_parallel_size: 2
  pipeline_parallel_size: 2
model:
  num_layers: 4
  hidden_size: 64
  num_attention_heads: 4
  sequence_length: 64
  vocab_size: 512
training:
  steps: 20
  micro_batch_size: 2
  global_batch_size: 16
data:
  prefix: corpus/text
"""

SITE = """\
description: a cluster by the lake
scheduler: slurm
ranks_per_node: 2
cpus_per_rank: 4
gres: gpu:2
gpu:
  name: A100
  memory_gib: 79.15
  peak_tflops: 312
partitions:
  short:
    nodes: 10
    max_time: 01:00:00
  long:
    nodes: 6
    max_time: 2-00:00:00
default_partition: long
default_time_limit: 10:00:00
reserve_nodes: 1
account: six@a100
environment:
  CUDA_LAUNCH_BLOCKING:
    value: "1"
    reason: it hangs without
"""


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    """A valid run file with its site next to it."""
    (tmp_path / "sites").mkdir()
    (tmp_path / "sites" / "lake.yaml").write_text(SITE)
    path = tmp_path / "run.yaml"
    path.write_text(RUN)
    return path


@pytest.fixture
def load(run_file: Path) -> Callable[..., LoadedRun]:
    """Loads the run file with overrides: `load("training.steps=3")`."""
    return lambda *overrides: load_run(run_file, overrides)


@pytest.fixture
def spoil(run_file: Path) -> Callable[..., Path]:
    """Replaces a text of the run file, which must be in it: `spoil("nodes: 4", "nodes: four")`."""

    def replace(old: str, new: str) -> Path:
        text = run_file.read_text()
        assert text.count(old) == 1
        run_file.write_text(text.replace(old, new))
        return run_file

    return replace
