from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigsci_launch.scheduler.job import (
    JobInfo,
    JobState,
    NodeInfo,
    format_comment,
    parse_comment,
    parse_job_line,
    parse_node_line,
    parse_state,
    parse_time,
)

# Recorded from squeue 22.05.8 with SQUEUE_FORMAT.
RUNNING = (
    "12|RUNNING|root|debug|4|n[1-4]|None|2026-11-21T01:02:03|2026-11-21T02:02:03|1-02:03:04|2026-11-21T01:00:00|demo"
    "|bsl:/runs/my%20run"
)
PENDING = "13 13|PENDING|alice|debug|2||Resources|N/A|N/A|0:00|2026-11-21T01:00:00|demo|(null)"


@pytest.mark.parametrize("state", list(JobState))
def test_every_state_reads_back(state: JobState) -> None:
    assert parse_state(state.value) is state


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("CANCELLED by 1000", JobState.CANCELLED),
        ("OUT_OF_ME+", JobState.OUT_OF_MEMORY),
        ("CANCELLED+", JobState.CANCELLED),
        ("RE+", JobState.UNKNOWN),
        ("HIBERNATING", JobState.UNKNOWN),
        ("", JobState.UNKNOWN),
    ],
)
def test_reads_slurms_variations(text: str, state: JobState) -> None:
    assert parse_state(text) is state


def test_a_state_is_queued_on_nodes_over_or_unknown() -> None:
    for state in JobState:
        assert state.is_active + state.is_over + (state is JobState.UNKNOWN) == 1
    assert JobState.COMPLETING.is_active and not JobState.COMPLETING.is_queued
    assert JobState.TIMEOUT.is_over


def test_reads_a_line_of_squeue() -> None:
    job = parse_job_line(RUNNING, "squeue")
    assert job is not None
    assert (job.job_id, job.state, job.num_nodes, job.hostlist) == ("12", JobState.RUNNING, 4, "n[1-4]")
    assert job.elapsed_s == 93784
    assert job.started is not None and job.ends == job.started + 3600
    assert job.run_directory == "/runs/my run"
    assert job.reason == ""


def test_reads_a_pending_line() -> None:
    job = parse_job_line(PENDING, "squeue")
    assert job == JobInfo(
        job_id="13", state=JobState.PENDING, raw_state="PENDING", source="squeue", name="demo", user="alice",
        partition="debug", num_nodes=2, reason="Resources", elapsed_s=0, submitted=parse_time("2026-11-21T01:00:00"),
        number="13",
    )  # fmt: skip


def test_a_separator_in_the_job_name_moves_no_other_field() -> None:
    job = parse_job_line(RUNNING.replace("demo", "de|mo"), "squeue")
    assert job is not None and job.hostlist == "n[1-4]" and job.run_directory is None


@pytest.mark.parametrize("nodes", ["\u00b2", "9" * 5000, "", "-1"])
def test_a_number_of_nodes_that_is_none_is_not_known(nodes: str) -> None:
    fields = RUNNING.split("|")
    fields[fields.index("4")] = nodes
    job = parse_job_line("|".join(fields), "squeue")
    assert job is not None and job.num_nodes is None


def test_another_line_is_no_job() -> None:
    assert parse_job_line("slurm_load_jobs error", "squeue") is None


@given(st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\0")))
def test_any_path_survives_the_comment(path: str) -> None:
    comment = format_comment("/" + path)
    assert parse_comment(comment) == "/" + path
    assert not set(comment) & set('|\n \t"\\')


def test_a_foreign_comment_names_no_run() -> None:
    assert parse_comment("bsl is great") is None
    assert parse_comment("") is None


@pytest.mark.parametrize(
    ("line", "responds"),
    [
        ("n3|mixed*|none", False),
        ("n3|allocated|none", True),
        ("n3|down*|Not responding", False),
        ("n3|down|x", False),
        ("n3|failing|ecc", True),
        ("n3|fail|ecc", True),
        ("n3|failing*|ecc", False),
        ("n3|draining|ecc", True),
    ],
)
def test_a_star_means_no_answer(line: str, responds: bool) -> None:
    node = parse_node_line(line)
    assert isinstance(node, NodeInfo) and node.is_responding is responds


@pytest.mark.parametrize(
    ("state", "source", "reason"),
    [("COMPLETED", "sacct", ""), ("PENDING", "sacct", "BeginTime"), ("FAILED", "squeue", "BeginTime")],
)
def test_a_reason_to_wait_is_not_one_of_the_end(state: str, source: str, reason: str) -> None:
    """sacct keeps the last one for which a requeued job has waited."""
    job = parse_job_line(f"7|{state}|root|debug|1|n1|BeginTime|Unknown|Unknown|1:00|Unknown|a|", source)
    assert job is not None and job.reason == reason
