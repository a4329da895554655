"""`bsl spy`, `slow` and `status` at real hung ranks of pipelines: they know where each rank is."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bigsci_launch.runs.generations.read import read_layouts
from bigsci_launch.runs.layout import RunDir, read_json
from bigsci_launch.topology import Topology
from tests.support.texts import has_parts
from tests.support.waiting import wait_until

from .uneven_settings import OFF, UNEVEN

pytestmark = pytest.mark.torch

HANGS = 16
MODEL = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 300, "sequence_length": 32}


class HungRun:
    """A run of `bsl submit --local` with a rank that hangs before step `HANGS`."""

    def __init__(self, folder: Path, dataset: Path, ranks: int, hangs: int, *faults: dict[str, Any]) -> None:
        self._folder, self.run = folder, RunDir(folder / "runs" / "hung")
        (folder / "sites").mkdir()
        site = f"description: here\nscheduler: local\nranks_per_node: {ranks}\n"
        (folder / "sites" / "here.yaml").write_text(site)
        document = {
            "run": {"name": "hung", "root": str(folder / "runs")},
            "slurm": {"site": "here"},
            "parallelism": UNEVEN,
            "training": {"steps": 40, "micro_batch_size": 2, "global_batch_size": 16, "device": "cpu"},
            "data": {"prefix": str(dataset)},
            "faults": [{"kind": "hang", "rank": hangs, "step": HANGS}, *faults],
            **OFF,
            "model": {**MODEL, **OFF["model"]},
        }
        document["training"]["precision"] = "fp32"
        (folder / "hung.yaml").write_text(json.dumps(document))
        with (folder / "output").open("wb") as output:
            command = [sys.executable, "-m", "bigsci_launch", "submit", str(folder / "hung.yaml"), "--local"]
            self.process = subprocess.Popen(command, cwd=folder, stdout=output, stderr=subprocess.STDOUT)
        wait_until(self._hangs, 300, evidence=(folder / "output").read_text)

    def _hangs(self) -> bool:
        assert self.process.poll() is None, (self._folder / "output").read_text()
        attempt = self.run.latest_attempt()
        files = attempt.events.glob("*.jsonl") if attempt else ()
        return any(f'"step": {HANGS},' in line for path in files for line in path.read_text().splitlines()[-3:])

    def bsl(self, *words: str) -> Any:
        command = [sys.executable, "-m", "bigsci_launch", *words, str(self.run.path), "--json"]
        done = subprocess.run(command, cwd=self._folder, capture_output=True, text=True, timeout=300, check=False)
        return json.loads(done.stdout)

    def end(self) -> None:
        """Ask until it has ended: ranks that hang are killed when it is asked again, and not after half a minute."""
        wait_until(lambda: self.process.poll() is not None or self.process.terminate())


@pytest.fixture(scope="module")
def five(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HungRun]:
    """Pipelines of 2 and 3 stages; the middle one of the three hangs."""
    run = HungRun(tmp_path_factory.mktemp("five"), dataset, 5, 3)
    yield run
    run.end()


@pytest.fixture(scope="module")
def four(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HungRun]:
    """Two pipelines of 2 stages: rank 2 is slower than rank 0, which does the same work; rank 1 hangs."""
    slow = {"kind": "slow", "rank": 2, "step": 1, "seconds": 0.5}
    run = HungRun(tmp_path_factory.mktemp("four"), dataset, 4, 1, slow)
    yield run
    run.end()


def test_spy_knows_where_ranks_are(five: HungRun) -> None:
    verdict = five.bsl("spy")["verdict"]
    assert [each["rank"] for each in verdict["look_first"][:1]] == [3]
    has_parts(verdict["claim"], "rank 3", "dp1 pp1 tp0", "hang_for_ever")


def test_slow_compares_no_rank_with_one_that_does_other_work(five: HungRun) -> None:
    found = five.bsl("slow")
    assert not found["stragglers"] and not found["imbalances"]
    assert "ranks 0-4" in found["undecided"]


def test_slow_compares_ranks_that_do_the_same_work(four: HungRun) -> None:
    assert [each["ranks"] for each in four.bsl("slow")["stragglers"]] == [[2]]


def test_records_have_the_stage_of_each_rank_from_the_submission_on(five: HungRun) -> None:
    attempt = five.run.latest_attempt()
    assert attempt is not None
    submitted, formed = read_layouts(attempt)
    assert submitted["time"] < formed["time"] and submitted["topology"] == formed["topology"]
    topology = Topology.parse(submitted["topology"])
    places = [read_json(attempt.pid_file(rank))["coordinate"] for rank in range(5)]
    assert places == [topology.coordinate(rank).as_dict() for rank in range(5)]


def test_status_shows_the_pipelines(five: HungRun) -> None:
    found = five.bsl("status")
    assert found["world_size"] == 5
