"""Why an attempt with `survive` ended: what was overcome is no failure of it, and only its last generation counts."""

from __future__ import annotations

import pytest

from bigsci_launch.topology import Topology
from tests.support.generation_records import GenerationRecords
from tests.support.texts import has_parts

from .attempt_records import NODES, TOPOLOGY, Attempt

NODE_OF = [NODES[rank // 2] for rank in range(8)]
HALF = Topology(tp=2, pp=2, dp=1)


@pytest.fixture
def records(attempt: Attempt) -> GenerationRecords:
    """Rank 5 was killed in generation 0. Its process was started again much later than the others."""
    found = GenerationRecords(attempt.dir, 1000.0)
    found.begins(TOPOLOGY, NODE_OF)
    found.fails("died", 5, "n3", signal="SIGKILL", step=12)
    found.fails("lost_peer", 4, "n3", words="Connection closed by peer")
    archive(attempt, found.number, 5)
    found.ends(12, 0.4)
    found.begins(TOPOLOGY, NODE_OF)
    attempt.starts(4, 5, time=1001.0)
    return found


def archive(attempt: Attempt, number: int, rank: int) -> None:
    """Leave the end of a rank where the controller moves those of a generation."""
    attempt.exits(rank, code=None, signal="SIGKILL", time=999.0)
    folder = attempt.dir.generation(number) / "exits"
    folder.mkdir(parents=True)
    attempt.dir.exit_file(rank).rename(folder / attempt.dir.exit_file(rank).name)


def test_what_was_overcome_is_no_failure_but_it_is_told(attempt: Attempt, records: GenerationRecords) -> None:
    attempt.exits(*range(8))
    attempt.event(*range(8), kind="end", reason="finished")
    records.write("finished", exit_code=0)
    found = attempt.describe(code=0)
    assert (found["reason"], found["exit_code"], found["first_failure"]) == ("finished", 0, None)
    assert has_parts(*found["evidence"], "2 generations", "rank 5 (dp0 pp1 tp1) on n3", "SIGKILL", "generation 0")
    assert found["clocks"] == []


def test_a_rank_that_was_killed_after_it_had_finished_has_not_failed(
    attempt: Attempt, records: GenerationRecords
) -> None:
    attempt.exits(*range(7))
    attempt.exits(7, code=None, signal="SIGKILL", clean_end=True)
    attempt.event(*range(8), kind="end", reason="finished")
    records.write("finished", exit_code=0)
    found = attempt.describe(code=0)
    assert (found["reason"], found["exit_code"], found["failed_ranks"]) == ("finished", 0, [])


def test_a_smaller_generation_is_complete_without_the_ranks_of_earlier_ones(
    attempt: Attempt, records: GenerationRecords
) -> None:
    records.fails("lost_node", 6, "n4", noticed_s=None)
    records.ends(12, 0.4)
    records.begins(HALF, NODE_OF[:4])
    attempt.exits(*range(4))
    attempt.exits(2, code=None, signal="SIGSEGV", time=2000.0)
    records.fails("died", 2, "n2", signal="SIGSEGV")
    records.ends(13, 0.1)
    records.write("gave_up", exit_code=139, why="rank 0 had ended")
    found = attempt.describe(code=139)
    assert (found["reason"], found["first_failure"]["rank"], found["world_size"]) == ("crashed", 2, 4)
    assert (found["num_started"], found["failed_ranks"], found["exit_code"]) == (4, [2], 139)
    assert found["evidence"][0].endswith(": rank 0 had ended")
    assert has_parts(found["evidence"][1], "node n4", "generation 1", "rank 2 (dp0 pp1 tp0) on n2", "SIGSEGV")


def test_a_controller_that_finds_no_slots_has_moved_the_last_records_away(
    attempt: Attempt, records: GenerationRecords
) -> None:
    records.fails("died", 3, "n2", signal="SIGKILL", step=14)
    archive(attempt, 1, 3)
    records.ends(14, 0.4)
    records.write("gave_up", exit_code=137, why="7 of 8 slots", rank=3)
    found = attempt.describe(code=137)
    assert (found["reason"], found["first_failure"]["rank"], found["first_failure"]["signal"]) == (
        "crashed", 3, "SIGKILL",
    )  # fmt: skip
    assert found["evidence"][0].endswith(": 7 of 8 slots")


def test_a_job_that_is_told_to_end_while_it_recovers_did_not_crash(
    attempt: Attempt, records: GenerationRecords
) -> None:
    """The records of the generation before have not been moved away yet."""
    attempt.exits(3, code=None, signal="SIGKILL", time=2000.0)
    records.fails("died", 3, "n2", signal="SIGKILL", step=14)
    records.write("gave_up", exit_code=143, why="the job was told to end", rank=None)
    found = attempt.describe("--terminated", "2001", code=143)
    assert (found["reason"], found["first_failure"], found["failed_ranks"]) == ("cancelled", None, [])


def test_a_rank_that_left_is_named_and_not_one_that_was_ended_with_the_job(
    attempt: Attempt, records: GenerationRecords
) -> None:
    """Rank 2 left with 0. The others waited for the next generation, of which nothing is on record."""
    attempt.exits(2)
    records.fails("left_early", 2, "n2", code=0, step=14)
    records.ends(14, 0.4)
    records.write("gave_up", exit_code=1, why="3 generations in a row got no further than step 14", rank=2)
    found = attempt.describe(code=1)
    assert (found["reason"], found["first_failure"]["rank"], found["first_failure"]["node"]) == ("left_early", 2, "n2")
    assert (found["failed_ranks"], found["exit_code"]) == ([2], 1)


def test_ranks_without_an_exit_record_are_not_blamed_where_the_controller_names_none(
    attempt: Attempt, records: GenerationRecords
) -> None:
    attempt.exits(*(rank for rank in range(8) if rank != 3))
    records.fails("lost_peer", None, "n2", words="rank 1: Connection closed by peer")
    records.ends(14, 0.4)
    records.write("gave_up", exit_code=1, why="rank 2 had already ended with exit code 0", rank=None)
    assert attempt.describe(code=1)["first_failure"] is None


def test_a_rank_that_lost_its_runner_is_no_lost_node(attempt: Attempt, records: GenerationRecords) -> None:
    attempt.exits(*range(3), code=None, signal="SIGTERM")
    records.fails("lost_runner", 3, "n2", words="the connection to its runner was closed")
    records.ends(14, 0.4)
    records.write("gave_up", exit_code=1, why="8 ranks need 8 slots, but only 7 are left", rank=3)
    found = attempt.describe(code=1)
    assert (found["reason"], found["first_failure"]["rank"], found["exit_code"]) == ("crashed", 3, 1)
    assert has_parts(found["evidence"][1], "rank 3 (dp1 pp0 tp1) on n2", "runner", "generation 1")


def test_a_rank_that_was_fenced_had_hung_however_it_was_killed(attempt: Attempt, records: GenerationRecords) -> None:
    records.fails("hung", 3, "n2", signal="SIGKILL", words="rank 3 sleeps (watcher agent)")
    attempt.exits(3, code=None, signal="SIGKILL", time=1010.0)
    records.ends(12, 0.4)
    records.write("gave_up", exit_code=137, why="3 generations in a row ended at step 12", rank=3)
    found = attempt.describe(code=137)
    assert (found["reason"], found["first_failure"]["rank"]) == ("hang", 3)
    assert has_parts(found["first_failure"]["error"], "rank 3 sleeps", "agent")


def test_a_job_that_was_told_to_end_is_cancelled_whatever_its_controller_says(
    attempt: Attempt, records: GenerationRecords
) -> None:
    attempt.exits(*range(8), code=None, signal="SIGTERM", terminated=1020.0)
    records.write("gave_up", exit_code=143, why="the job was told to end", rank=None)
    found = attempt.describe("--terminated", "1020", code=143)
    assert found["reason"] == "cancelled"
    assert not any("gave up" in text for text in found["evidence"])
    attempt.exits(3, code=1, time=1010.0)
    found = attempt.describe(code=1)
    assert (found["reason"], found["first_failure"]["rank"]) == ("crashed", 3)
    assert not any("gave up" in text for text in found["evidence"])


def test_ranks_that_run_on_are_read_from_the_line_of_the_controller(attempt: Attempt) -> None:
    records = GenerationRecords(attempt.dir, 1000.0)
    records.begins(TOPOLOGY, NODE_OF)
    attempt.exits(*range(7))
    attempt.event(*range(8), kind="end", reason="finished")
    attempt.exits(7, code=None, signal="SIGTERM", terminated=1100.0)
    attempt.output("2026-11-23T01:00:00Z bsl: giving up: ranks 7 still run 60 s after the first rank ended")
    records.write("gave_up", exit_code=1, why="ranks 7 still run 60 s after the first rank ended", rank=None)
    found = attempt.describe(code=1)
    assert (found["reason"], found["first_failure"]["rank"]) == ("hung_at_exit", 7)
