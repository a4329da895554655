"""A node that is slow in many runs is remembered, and one run alone accuses none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from bigsci_launch.cli.main import bsl
from bigsci_launch.nodes.speeds import DAY_S, LASTS_S, MOST_RUNS, NodeSpeed, add_speeds, often_slow, read_speeds

NOW = 1000 * DAY_S


def speed(
    run: str, times_longer: float = 1.2, *, node: str = "n1", age_s: float = 0.0, cluster: str | None = "c"
) -> NodeSpeed:
    return NodeSpeed(cluster, node, run, "0001", times_longer, NOW - age_s)


def slow_nodes(speeds: list[NodeSpeed], cluster: str | None = "c") -> list[tuple[str, int, int]]:
    return [(each.node, each.slow_runs, each.runs) for each in often_slow(speeds, cluster=cluster, now=NOW)]


@pytest.mark.parametrize(
    ("speeds", "found"),
    [
        ([speed("a")], []),
        ([speed("a"), speed("b")], [("n1", 2, 2)]),
        ([speed("a"), speed("b", 1.0), speed("c")], [("n1", 2, 3)]),
        ([speed("a"), speed("b"), *(speed(name, 1.0) for name in "cde")], []),
        ([speed("a"), speed("b", age_s=LASTS_S + 1)], []),
        ([speed("a"), speed("b", cluster="other")], []),
        ([speed("a"), speed("b", cluster=None)], []),
    ],
    ids=["one run", "two", "two of three", "repaired", "long ago", "another cluster", "cluster not known"],
)
def test_a_node_is_often_slow_if_it_was_in_two_runs_and_in_half(speeds: list[NodeSpeed], found: object) -> None:
    assert slow_nodes(speeds) == found


def test_a_run_counts_once_and_the_oldest_are_forgotten(tmp_path: Path) -> None:
    memory = tmp_path / "node_speeds.json"
    add_speeds(memory, [speed("a", 1.0), speed("a", 1.3, node="n2")])
    add_speeds(memory, [speed("a", 1.4)])
    assert [(each.node, each.times_longer) for each in read_speeds(memory)] == [("n2", 1.3), ("n1", 1.4)]
    for number in range(MOST_RUNS + 3):
        add_speeds(memory, [speed(f"r{number}", age_s=-number)])
    kept = [each.run for each in read_speeds(memory) if each.node == "n1"]
    assert len(kept) == MOST_RUNS and kept[-1] == f"r{MOST_RUNS + 2}"


@pytest.mark.parametrize("text", ["", "[]", '{"speeds": 1}', '{"speeds": [{"node": "-x"}, 7]}', "\x00"])
def test_a_damaged_memory_of_speeds_only_loses_its_advice(tmp_path: Path, text: str) -> None:
    (tmp_path / "node_speeds.json").write_text(text)
    assert read_speeds(tmp_path / "node_speeds.json") == []


def test_nodes_that_are_often_slow_are_listed_and_not_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BSL_RUNS", str(tmp_path))
    monkeypatch.setattr("time.time", lambda: NOW)
    add_speeds(tmp_path / "node_speeds.json", [speed("a", cluster=None), speed("b", 1.4, cluster=None)])
    monkeypatch.setattr("bigsci_launch.scheduler.slurm.cluster_name", lambda: None)
    document = json.loads(CliRunner().invoke(bsl, ["nodes", "list", "--json"]).stdout)
    assert document["nodes"] == []
    (found,) = document["often_slow"]
    assert (found["node"], found["slow_runs"], found["newest_run"]) == ("n1", 2, "b")
    assert found["times_longer"] == pytest.approx(1.3)
