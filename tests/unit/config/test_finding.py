"""A finding as a line, as JSON, and as a problem of a file."""

from __future__ import annotations

from bigsci_launch.config.finding import Finding, finding_document, finding_line, worst_first

NODES = Finding("nodes", "error", ("slurm.nodes", "site.reserve_nodes"), "60 nodes asked for")
DISK = Finding("disk", "note", ("checkpoint.save_interval",), "2 TB every 10 steps", "20 TB a day")


def test_a_line_names_every_key_and_the_price_where_there_is_one() -> None:
    assert finding_line(NODES) == f"error: slurm.nodes and site.reserve_nodes: {NODES.text}"
    assert finding_line(DISK) == f"note: checkpoint.save_interval: {DISK.text}: {DISK.price}"


def test_a_document_has_two_keys_and_the_second_may_be_empty() -> None:
    assert list(finding_document(NODES).values()) == [
        *("nodes", "error", "slurm.nodes", "site.reserve_nodes", "60 nodes asked for")
    ]
    assert finding_document(DISK)["other_key"] == ""


def test_a_problem_is_at_the_key_to_change_first() -> None:
    assert str(NODES.at("run.yaml:3:1")) == "run.yaml:3:1: slurm.nodes: 60 nodes asked for"
    assert str(DISK.at("--set")) == f"--set: checkpoint.save_interval: {DISK.text}: {DISK.price}"


def test_the_worst_come_first_and_equals_in_their_order() -> None:
    warnings = [Finding(rule, "warning", ("slurm.nodes",), "") for rule in ("z", "a")]
    assert worst_first([DISK, *warnings, NODES]) == [NODES, *warnings, DISK]
