"""What is asked about losses: forms of options, names of nodes, traces, and strategies that cannot run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from bigsci_launch.config.load import resolve_run
from bigsci_launch.config.schema.run import RunConfig
from bigsci_launch.config.site import Site
from bigsci_launch.errors import ConfigError, DataError, SlurmUnavailable
from bigsci_launch.plan.price.calibration import calibration_of
from bigsci_launch.plan.show.survival import expected_lines, head_lines, replay_cells, strategy_cells, trace_lines
from bigsci_launch.plan.survive import answer as answering
from bigsci_launch.plan.survive.answer import (
    REBUILD_S,
    SurvivalAnswer,
    answer_survival,
    compare_strategies,
    name_nodes,
    parse_failures,
    read_trace,
    strategies_of,
)
from bigsci_launch.plan.survive.loss import plan_loss
from bigsci_launch.plan.survive.replica import Replica
from bigsci_launch.plan.survive.survival import Survival, plan_survival
from bigsci_launch.plan.survive.trace import regular
from tests.support.texts import has_parts

UNDONE_S = 5000.0
"""Seconds of work since the last checkpoint."""


@pytest.fixture(scope="module")
def toy(toy_replica: Callable[..., Replica]) -> Survival:
    return plan_survival(toy_replica(1), 12)


def answer_of(survival: Survival, mtbf: float | None, **more: object) -> SurvivalAnswer:
    compared = compare_strategies(survival, mtbf, 24.0, None, UNDONE_S)
    return SurvivalAnswer("run", "site", survival, mtbf, 24.0, UNDONE_S, compared, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(("text", "failures"), [(None, 1), ("1", 1), ("f=2", 2), (" f=0 ", 0), ("f=12", 12)])
def test_f(text: str | None, failures: int) -> None:
    assert parse_failures(text) == failures


@pytest.mark.parametrize("text", ["f=x", "f=-1", "", "f=", "f=1.5", "g=1", "f=1,2", "f=99999"])
def test_what_is_no_f(text: str) -> None:
    with pytest.raises(ConfigError, match="not f=N"):
        parse_failures(text)


@pytest.mark.parametrize("lose", ["node[1-", "node[x]", "node 3", "", ","])
def test_what_is_no_list_of_nodes(bloom_run: tuple[RunConfig, Site], lose: str) -> None:
    with pytest.raises(ConfigError, match="--lose") as caught:
        answer_survival(*bloom_run, calibration_of(bloom_run[1]), nodes=None, survive=None, lose=lose, trace=None)
    assert "node[3-7]" in str(caught.value.hint)


def test_nodes_are_named_as_slurm_names_them(
    bloom_run: tuple[RunConfig, Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = [f"a{index:02d}" for index in range(6)]
    asked: list[str | None] = []

    def nodes_of(partition: str | None) -> list[str]:
        asked.append(partition)
        return known

    monkeypatch.setattr(answering, "partition_nodes", nodes_of)
    assert name_nodes(*bloom_run, 4, []) == ["a00", "a01", "a02", "a03"]
    assert asked == ["gpu_p5"]
    # A lost node is one of the run's, in Slurm's order.
    assert name_nodes(*bloom_run, 4, ["a05", "a01"]) == ["a00", "a01", "a02", "a05"]
    assert name_nodes(*bloom_run, 7, []) == [f"node{index}" for index in range(1, 8)]
    assert name_nodes(*bloom_run, 4, ["b1"]) == ["a00", "a01", "a02", "a03"]


def test_without_slurm_nodes_have_numbers(bloom_run: tuple[RunConfig, Site], monkeypatch: pytest.MonkeyPatch) -> None:
    def unavailable(partition: str | None) -> list[str]:
        raise SlurmUnavailable("no sinfo")

    monkeypatch.setattr(answering, "partition_nodes", unavailable)
    assert name_nodes(*bloom_run, 3, ["node2"]) == ["node1", "node2", "node3"]


def test_a_site_without_a_gpu_is_refused(root: Path) -> None:
    for name in ("demo", "minicluster"):
        config, site, _ = resolve_run(root / f"configs/{name}.yaml")
        with pytest.raises(ConfigError, match="no GPU"):
            answer_survival(config, site, calibration_of(site), nodes=None, survive="1", lose=None, trace=None)


def test_layouts_are_refused_as_plan_refuses_them(bloom_run: tuple[RunConfig, Site]) -> None:
    config, site = bloom_run
    for axes, text in (
        ({"pipeline_parallel_size": 5}, "site"),
        ({"tensor_parallel_size": 16, "pipeline_parallel_size": 3}, "tp 16 .*8 ranks"),
        ({"pipeline_parallel_size": 96, "data_parallel_size": 1}, "no layer"),
    ):
        wrong = config.model_copy(update={"parallelism": config.parallelism.model_copy(update=axes)})
        with pytest.raises(ConfigError, match=text):
            answer_survival(wrong, site, calibration_of(site), nodes=None, survive="1", lose=None, trace=None)


def test_an_unknown_rate_of_failures_is_said_and_not_guessed(toy: Survival) -> None:
    answer = answer_of(toy, None)
    assert ["site.node_mtbf_h" in line for line in expected_lines(answer)] == [True]
    assert strategy_cells(answer) == []
    assert all(compared.expected is None for compared in answer.strategies)


def test_unknown_host_memory_is_said(toy: Survival) -> None:
    assert any("site.node_memory_gib" in line for line in head_lines(answer_of(toy, None)))
    known = plan_survival(replace(toy.replica, node_memory_gib=1000.0), 12)
    assert not any("site.node_memory_gib" in line for line in head_lines(answer_of(known, None)))


def test_whole_replicas_that_do_not_fit_at_full_size_have_no_row(
    toy: Survival, toy_replica: Callable[..., Replica]
) -> None:
    replica = toy_replica(1)
    assert replica.whole_seconds(6) is None, "2 nodes do not hold a replica even of 6"
    answer = answer_of(toy, 1000.0)
    assert [row[0] for row in strategy_cells(answer)] == ["templates"]
    assert any(has_parts(line, "whole replicas", "12 nodes") for line in expected_lines(answer))
    compared = compare_strategies(toy, 1000.0, 24.0, regular(12, 3, 3600.0), UNDONE_S)
    assert [each.strategy for each in compared if each.replayed] == ["templates"]


def test_a_pause_is_communicators_transfer_and_half_a_step(toy: Survival) -> None:
    strategy, _ = strategies_of(toy, UNDONE_S)
    nodes = [f"n{index:06d}" for index in range(12)]
    loss = plan_loss(toy, nodes, nodes[:1])
    half = toy.by_nodes[11].seconds / 2
    assert strategy.pause_s(12, 11) == pytest.approx(REBUILD_S + loss.transfer_seconds + half)
    # Nodes beyond those planned for are spares: nothing moves.
    full = REBUILD_S + toy.by_nodes[12].seconds / 2
    assert strategy.pause_s(15, 14) == pytest.approx(full)
    assert strategy.pause_s(14, 11) == pytest.approx(strategy.pause_s(12, 11))


def test_a_loss_of_state_costs_the_work_since_the_checkpoint(
    toy: Survival, toy_replica: Callable[..., Replica]
) -> None:
    without_copies = plan_survival(toy_replica(0), 12)
    nodes = [f"n{index:06d}" for index in range(12)]
    loss = plan_loss(without_copies, nodes, nodes[:1])
    assert loss.transfer.lost and not plan_loss(toy, nodes, nodes[:1]).transfer.lost
    for strategy in strategies_of(without_copies, UNDONE_S):
        assert strategy.pause_s(12, 11) >= REBUILD_S + UNDONE_S
    assert strategies_of(toy, UNDONE_S)[0].pause_s(12, 11) < UNDONE_S
    answer = answer_of(without_copies, 1000.0)
    assert any(has_parts(line, "checkpoint", "1 h 23 min") for line in expected_lines(answer))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no events"),
        ("seconds,event,node\n", "nothing to replay"),
        ("seconds,event,node\n0,add,a\n0,add,b\n", "nothing to replay"),
        ("seconds,event,node\n0,add,a\n5,explode,a\n", ":3: 'explode'"),
        ("\ufffd,1", "2 cells, not 3"),
    ],
)
def test_what_is_no_trace(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(DataError, match=message) as caught:
        read_trace(path, 12)
    assert str(path) in caught.value.message
    assert caught.value.hint


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "none.csv", tmp_path, tmp_path / "binary"):
        with pytest.raises(DataError, match=str(path)):
            read_trace(path, 12)


def test_a_trace_below_n0_stops_the_run_and_is_said(toy: Survival) -> None:
    trace = regular(2, 1, 3600.0)
    answer = replace(answer_of(toy, None), strategies=compare_strategies(toy, None, 24.0, trace, UNDONE_S), trace=trace)
    assert replay_cells(answer) == []
    assert any(has_parts(line, "templates", "2 nodes") for line in trace_lines(answer))
    some = compare_strategies(toy, None, 24.0, regular(12, 12, 3600.0), UNDONE_S)
    assert some[0].replayed is not None
    assert some[0].replayed.stopped_s > 0
