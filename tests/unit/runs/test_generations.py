"""What is told of the generations of an attempt with `survive`, from records as its controller writes them."""

from __future__ import annotations

import json
import os
import pwd
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import CliRunner

from bigsci_launch.checkpoints.restart import find_restart, read_losses
from bigsci_launch.cli.main import bsl
from bigsci_launch.runs.generations.read import read_generations
from bigsci_launch.runs.generations.records import recoveries
from bigsci_launch.runs.layout import write_json
from bigsci_launch.topology import Topology
from tests.support.generation_records import GenerationRecords
from tests.support.texts import CheckText, has_parts, without_ages

pytestmark = pytest.mark.slow

WHOLE = Topology(tp=2, pp=2, dp=2)
HALF = Topology(tp=2, pp=2, dp=1)
NODES = [f"n{rank // 2}" for rank in range(8)]
USER = pwd.getpwuid(os.getuid()).pw_name
JOB_LINE = f"12|RUNNING|{USER}|debug|5|n[0-4]|None|2026-11-21T01:02:03|N/A|1:00|N/A|trial|(null)\n"


def invoke(*words: str) -> str:
    return CliRunner().invoke(bsl, list(words)).stdout


def recovery() -> dict[str, Any]:
    """How the second generation began, the only one after the first."""
    (found,) = [each["recovery"] for each in json.loads(invoke("status", "--json"))["generations"]["all"][1:]]
    return dict(found)


@pytest.fixture
def slurm(fake_slurm: Callable[..., Any]) -> Any:
    """A running job of five nodes."""
    fake = fake_slurm("squeue", "sinfo")
    fake.answer("squeue", JOB_LINE)
    fake.answer("sinfo", "".join(f"n{node}|allocated|none\n" for node in range(5)))
    return fake


@pytest.fixture
def records(trial: Any, slurm: Any) -> GenerationRecords:
    return first_generation(trial)


def first_generation(trial: Any) -> GenerationRecords:
    """The first generation of the newest attempt: 8 ranks, which make steps."""
    found = GenerationRecords(trial.attempt, trial.now - 1000)
    found.begins(WHOLE, NODES, ["n4", "n4"])
    found.comes_back(0, "start", joined=3.0, restored=4.0, first=6.0)
    return found


def report(trial: Any, rank: int, step: int, age_s: float, *, consumed: int | None = None) -> None:
    fields = {"loss": 5.0 - step / 100, "consumed_samples": step * 16 if consumed is None else consumed}
    trial.event(rank, "step", age_s, step=step, global_batch_size=16, **fields)


def kill_rank_5(trial: Any, records: GenerationRecords) -> None:
    """Rank 5 dies after step 12; the others had finished it, and the state after step 11 is restored."""
    for step in range(8, 13):
        report(trial, 4, step, 600 - step)
    records.clock = trial.now - 300
    records.fails("died", 5, "n2", signal="SIGKILL")
    records.fails("lost_peer", 4, "n2", words="Connection closed by peer")
    records.ends(12, 0.4, [6])
    records.clock += 0.2
    records.begins(WHOLE, NODES, ["n4"])
    records.comes_back(11, "buddies", joined=0.5, restored=0.8, first=1.4)
    report(trial, 4, 12, 297)
    report(trial, 4, 13, 296)


def test_one_generation_that_nothing_disturbed_is_one_short_line(trial: Any, records: GenerationRecords) -> None:
    lines = [line for line in invoke("status").splitlines() if line.startswith(("generation", "recovery", "left out"))]
    assert len(lines) == 1
    assert has_parts(lines[0], "8 ranks", "(tp=2,pp=2,dp=2)", "16 min")
    assert json.loads(invoke("status", "--json"))["generations"]["all"][0]["recovery"] is None


def test_an_attempt_without_survive_says_nothing_of_generations(trial: Any) -> None:
    assert "generation" not in invoke("status")
    assert json.loads(invoke("status", "--json"))["generations"] is None


def test_a_recovery_is_told_with_its_cause_its_phases_and_what_was_done_again(
    trial: Any, records: GenerationRecords, check_text: CheckText
) -> None:
    kill_rank_5(trial, records)
    check_text(without_ages(invoke("status")))
    back = recovery()
    assert (back["steps_replayed"], back["samples_lost"], back["source"]) == (1, 0, "buddies")
    assert back["seconds"]["total"] == pytest.approx(2.1)


def test_samples_that_the_next_step_does_not_consume_are_lost(trial: Any, records: GenerationRecords) -> None:
    kill_rank_5(trial, records)
    report(trial, 4, 12, 296.5, consumed=13 * 16)
    assert recovery()["samples_lost"] == 16
    report(trial, 4, 12, 296.4, consumed=11 * 16)
    assert recovery()["samples_lost"] == -16


def test_a_rank_that_is_lost_in_the_last_save_costs_no_sample(
    trial: Any, records: GenerationRecords, check_text: CheckText
) -> None:
    records.clock = trial.now - 300
    records.fails("died", 5, "n2", signal="SIGKILL")
    records.ends(20, 0.4)
    records.begins(WHOLE, NODES)
    records.write("phase", phase="joined", seconds=0.5)
    records.write("phase", phase="restored", seconds=0.8, step=20, source="buddies", why=None)
    records.write("finished", exit_code=0)
    back = recovery()
    assert (back["samples_lost"], back["seconds"]["first_step"]) == (0, None)
    check_text(without_ages(invoke("status")))


def test_a_step_that_the_controller_has_missed_is_seen_in_the_records_to_be_done_again(
    trial: Any, records: GenerationRecords
) -> None:
    """Ranks tell the controller their steps once a second."""
    for step in range(8, 13):
        report(trial, 4, step, 600 - step)
    records.clock = trial.now - 300
    records.fails("hung", 5, "n2", signal="SIGKILL", words="it sleeps")
    records.ends(11, 0.4)
    records.begins(WHOLE, NODES)
    records.comes_back(11, "buddies", joined=0.5, restored=0.8, first=1.4)
    assert recovery()["samples_lost"] is None
    report(trial, 4, 12, 298.3)
    assert (recovery()["steps_replayed"], recovery()["samples_lost"]) == (1, 0)


def test_the_present_step_is_the_newest_and_not_the_highest(trial: Any, records: GenerationRecords) -> None:
    kill_rank_5(trial, records)
    report(trial, 4, 3, 100)
    assert json.loads(invoke("status", "--json"))["step"]["step"] == 3


def test_what_was_not_recorded_is_said_to_be_unknown(
    trial: Any, records: GenerationRecords, check_text: CheckText
) -> None:
    records.fails("lost_node", 5, "n2", noticed_s=None)
    records.ends(None, 1.0)
    records.begins(WHOLE, NODES)
    records.write("phase", phase="joined", seconds=0.5)
    records.write(
        "phase", phase="restored", seconds=0.7, step=10, source="checkpoint", why="the buddies of n2 are lost"
    )
    records.write("phase", phase="first_step", seconds=0.9, step=11)
    check_text(without_ages(invoke("status")))
    assert (recovery()["source"], recovery()["steps_replayed"], recovery()["samples_lost"]) == (
        "checkpoint",
        None,
        None,
    )


def test_clocks_that_differ_make_the_notice_unknown(trial: Any, records: GenerationRecords) -> None:
    records.fails("died", 5, "n2", noticed_s=-3.0, code=1)
    records.ends(12, 0.4)
    records.begins(WHOLE, NODES)
    found = read_generations(trial.attempt)
    assert found is not None
    assert recoveries(found)[0].noticed_s is None


@pytest.mark.parametrize("age_s", [5.0, 95.0])
def test_a_recovery_in_progress_is_a_phase_of_its_own(
    trial: Any, records: GenerationRecords, age_s: float, check_text: CheckText
) -> None:
    for rank in range(8):
        trial.event(rank, "heartbeat", 400, phase="step", step=12)
    records.clock = trial.now - age_s
    records.fails("died", 5, "n2", code=3, words="ValueError: no")
    texts = [invoke("status")]
    records.ends(12, 0.4, [6])
    texts.append(invoke("status"))
    records.begins(WHOLE, NODES)
    texts.append(invoke("status"))
    records.comes_back(12, "memory", joined=0.1, restored=0.2, first=0.3)
    check_text(*(without_ages(text) for text in (*texts, invoke("status"))))


def test_torn_and_unknown_records_are_tolerated_and_shown(trial: Any, records: GenerationRecords) -> None:
    records.write("merged", into=7)
    records.fails("melted", 3, "n1")
    with trial.attempt.generations.open("a") as stream:
        stream.write('{"time": 1, "event": "gave_')
    assert has_parts(invoke("status"), "rank 3 (dp1 pp0 tp1) on n1", "'melted'", "merged (1)")


def shrink(trial: Any, records: GenerationRecords) -> None:
    """Nodes n2 and n3 are lost, no spare is left, and ranks 0-3 continue alone from the checkpoint of step 10."""
    for step in range(1, 13):
        report(trial, 7, step, 600 - step)
    records.clock = trial.now - 300
    records.fails("lost_node", 4, "n2", noticed_s=None)
    records.ends(12, 0.4, [5, 6, 7])
    records.write("left_out", node="n2", reason="it was lost", until=records.clock + 86400)
    records.begins(HALF, NODES[:4])
    records.comes_back(10, "checkpoint", joined=0.5, restored=0.8, first=1.4)
    for step in (11, 12):
        report(trial, 3, step, 300 - step)
    for rank in range(4):
        trial.event(rank, "heartbeat", 2, phase="step", step=13)


def test_ranks_and_nodes_that_only_earlier_generations_had_are_not_missed(
    trial: Any, records: GenerationRecords, slurm: Any, check_text: CheckText
) -> None:
    shrink(trial, records)
    slurm.answer("sinfo", "n2|down*|Not responding\n")
    check_text(without_ages(invoke("status")))
    document = json.loads(invoke("status", "--json"))
    assert (document["world_size"], document["slowest_rank"]["rank"], document["step"]["step"]) == (4, 0, 12)
    assert document["unreachable_nodes"] == []
    assert document["generations"]["all"][1]["recovery"]["steps_replayed"] == 2


def test_a_node_of_the_present_generation_is_missed(records: GenerationRecords, slurm: Any) -> None:
    slurm.answer("sinfo", "n2|down*|Not responding\n")
    assert "lost node" in invoke("status")


def test_steps_that_are_done_again_are_no_restart(trial: Any) -> None:
    """Another rank reports the steps of the smaller generation, and they begin at 11: the attempt began at 1."""
    before = trial.attempt
    for step in range(1, 9):
        report(trial, 7, step, 2000 - step)
    write_json(before.exit, {"reason": "stopped", "exit_code": 0, "first_failure": None})
    trial.add_attempt("0002")
    shrink(trial, first_generation(trial))
    losses = read_losses(trial.attempt, "begin")
    assert losses is not None
    assert sorted(losses.by_step) == list(range(1, 13))
    assert losses.records[12]["time"] == pytest.approx(trial.now - 288)
    assert find_restart(trial.run, trial.attempt) is None
