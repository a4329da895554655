"""Published runs that nobody here measured, of the half on which the model was built; the benchmark has the other."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from bigsci_launch.plan.shape.tflops import model_flops


@pytest.fixture(scope="module")
def external(root: Path) -> Iterator[ModuleType]:
    """The benchmark, which reads the rows and knows the halves."""
    sys.path.insert(0, str(root / "benchmarks"))
    yield importlib.import_module("plan_external")
    sys.path.pop(0)


def test_runs_of_others_are_predicted_without_measurements(external: ModuleType) -> None:
    rows = [row for row in external.read_published()[0] if not row.is_held_out]
    assert len(rows) > 250
    assert len({row.gpu.name for row in rows}) >= 7
    figures = external.uncalibrated(rows)
    assert figures.mean < 15
    assert 85 < figures.inside < 97


def test_one_wait_of_a_message_explains_pipelines_of_the_playbooks_first_program(external: ModuleType) -> None:
    rows = [row for row in external.read_playbook()[0] if not row.is_held_out and row.setup.technique.hop_wait]
    assert len(rows) > 70
    assert external.uncalibrated(rows).median < 7  # 62 without the wait


def test_model_flops_are_what_others_print(external: ModuleType) -> None:
    """llm-foundry counts 6 per parameter and token, and 12 L h s for attention; its tied table counts once."""
    checked = 0
    for row in external.read_published()[0]:
        printed = row.row.number("tflops_reported")
        if row.source == "llmfoundry" and printed and row.setup.shape.hidden_size >= 2048:
            found = model_flops(row.setup) / row.seconds / row.setup.topology.world_size / 1e12
            assert found == pytest.approx(printed, rel=0.04), row.row.name
            checked += 1
    assert checked > 80
