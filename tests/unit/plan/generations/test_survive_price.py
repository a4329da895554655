"""What `survive` costs in host memory, and what a spare node is worth: by hand, by chance, and as people read it."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from math import exp
from pathlib import Path

import pytest
from click.testing import CliRunner

from bigsci_launch.cli.main import bsl
from bigsci_launch.plan.shape.parameters import count_stage_parameters
from bigsci_launch.plan.shape.setup import Setup
from bigsci_launch.plan.survive.host_memory import copies_gib
from bigsci_launch.plan.survive.spares import Endurance, hours_per_day
from bigsci_launch.topology import Topology
from tests.support.texts import has_parts

BLOOM = str(Path(__file__).parents[4] / "configs" / "bloom-176b.yaml")


def test_the_copies_of_a_node_are_those_of_its_ranks(bloom: Setup) -> None:
    """A node of 8 ranks holds two replicas of a stage (tp 4); the first stage has the embeddings too."""
    stages = count_stage_parameters(bloom.shape, 4, bloom.layers_per_stage)
    fullest = max(stages)
    assert copies_gib(bloom) == pytest.approx(8 * 4 * (12 * fullest / 8 + 65536) / 2**30)
    alone = replace(bloom, topology=Topology(tp=4, pp=12, dp=1))
    smaller = sum(sorted(stages, reverse=True)[:2])
    assert copies_gib(alone) <= 4 * 4 * (12 * smaller + 2 * 65536) / 2**30
    assert copies_gib(alone) > 3.9 * copies_gib(bloom), "a single replica shares with nobody"


def test_a_job_that_ends_with_its_first_loss_trains_as_long_as_all_nodes_live() -> None:
    job = Endurance(4, (0, 0, 0, 0, 4), 0.0, 24.0)
    rate = 4 / 100.0
    assert hours_per_day(job, 0, 100.0) == pytest.approx((1 - exp(-rate * 24)) / rate)


def test_spares_are_worth_what_simulated_days_say() -> None:
    """Nodes that fail at random for a day, of four that hold two replicas in pairs, and one or no spare."""
    job, mtbf = Endurance(4, (0, 0, 1, 1, 2), 0.0, 24.0), 40.0
    chance = random.Random(7)
    for spares in (0, 1):
        hours = 0.0
        for _ in range(20000):
            deaths = sorted(chance.expovariate(1 / mtbf) for _ in range(4 + spares))
            before = 0.0
            for left, death in zip(range(4 + spares, 0, -1), deaths, strict=True):
                hours += (min(death, 24.0) - before) * job.replicas[min(left, 4)] / 2
                before = min(death, 24.0)
        assert hours_per_day(job, spares, mtbf) == pytest.approx(hours / 20000, rel=0.02)


def test_a_pause_is_paid_for_each_loss() -> None:
    job = Endurance(4, (0, 0, 0, 0, 4), 3600.0, 24.0)
    free = replace(job, pause_s=0.0)
    assert 0 < hours_per_day(free, 2, 500.0) - hours_per_day(job, 2, 500.0) < 24 * 6 * 24 / 500


def plan(*words: str) -> str:
    return CliRunner().invoke(bsl, ["plan", *words]).output


def test_the_price_is_told_where_a_run_survives_and_nowhere_else() -> None:
    assert "survive" not in plan("check", BLOOM)
    text = plan("check", BLOOM, "--set", "survive=true")
    assert has_parts(text, "optimizer state take 179 GiB", "1 spare node", "23.96 h", "23.18 h")
    document = json.loads(plan(BLOOM, "--json", "--top", "1", "--set", "survive=true"))["survive"]
    assert document["copies_gib"] == pytest.approx(179, abs=0.5)
    assert json.loads(plan(BLOOM, "--json", "--top", "1"))["survive"] is None
    assert "survive: copies" in plan(BLOOM, "--top", "2", "--explain", "--set", "survive=true")


@pytest.mark.parametrize(("gib", "severity"), [(1000, "note"), (200, "warning"), (100, "error")])
def test_copies_that_do_not_fit_the_node_are_a_finding(gib: int, severity: str, tmp_path: Path) -> None:
    site = tmp_path / "site.yaml"
    text = (Path(BLOOM).parents[1] / "slurm" / "sites" / "jean-zay-a100-2022.yaml").read_text()
    kept = [line for line in text.splitlines() if not line.startswith(("calibration:", "reserve_nodes:"))]
    site.write_text("\n".join([*kept, f"node_memory_gib: {gib}\n"]))
    words = [f"slurm.site={site}", "survive=true", "slurm.spare_nodes=2"]
    found = plan("check", BLOOM, "--json", *(word for each in words for word in ("--set", each)))
    findings = {each["rule"]: each for each in json.loads(found)["findings"]}
    assert findings["survive memory"]["severity"] == severity
    assert has_parts(findings["spare nodes"]["text"], "2 spare nodes", "24.00 h")
