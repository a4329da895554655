"""What an attempt's end adds to the memory of bad nodes, and what it does not."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bigsci_launch.nodes.memory import BadNode, add_nodes, forgive_nodes, read_nodes
from bigsci_launch.runs.layout import node_memory, write_json
from bigsci_launch.runs.watching.ended import EndedBy, write_ended_by
from tests.support.texts import has_parts

from .attempt_records import Attempt, run_here

ECC = "RuntimeError: CUDA error: uncorrectable ECC error encountered"
RESET = "Read error [10.0.0.1]: Connection reset by peer"
WATCHDOG = "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=178, OpType=ALLREDUCE, Timeout(ms)=600000)"


class Ended(Attempt):
    """An attempt whose end is evaluated."""

    @property
    def memory(self) -> Path:
        return node_memory(self.dir.path.parents[2])

    def evaluate(self, *options: str, rc: int = 0) -> list[BadNode]:
        done = run_here("bad-nodes", "--attempt-dir", str(self.dir.path), *options)
        self.said = done.stderr
        assert (done.returncode, done.stdout) == (rc, ""), done.stderr
        return read_nodes(self.memory) if rc == 0 else []

    @property
    def mark(self) -> dict[str, Any]:
        return json.loads(self.dir.bad_nodes.read_text())


@pytest.fixture
def attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ended:
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "jean")
    return Ended(tmp_path / "runs" / "demo" / "attempts" / "0001")


def found(entries: list[BadNode]) -> list[tuple[str, str, int | None]]:
    return [(entry.node, entry.reason, entry.rank) for entry in entries]


def test_the_node_of_a_rank_that_dies_of_its_gpu_is_remembered(attempt: Ended) -> None:
    attempt.logs(5, text=f"step 7\nTraceback\n{ECC}\nterminate called")
    attempt.exits(5, signal="SIGABRT", code=None)
    attempt.logs(0, 1, text=f"RuntimeError: {RESET}")
    attempt.exits(0, 1, code=1, time=101.0)
    attempt.describe(code=134)
    before = time.time()
    [entry] = attempt.evaluate()
    assert (entry.node, entry.reason, entry.evidence, entry.rank) == ("n3", "ecc", ECC, 5)
    assert (entry.cluster, entry.run, entry.attempt) == ("jean", "demo", "0001")
    assert entry.expires == pytest.approx(before + 7 * 86400, abs=60)
    assert has_parts(attempt.said, "bsl: n3 ", " 20", ECC)
    assert attempt.mark["is_final"]


@pytest.mark.parametrize(
    "text", [RESET, WATCHDOG, "NVRM: Xid (PCI:0000:c6:00): 31, MMU Fault", "CUDA error: unspecified launch failure"]
)
def test_others_and_programs_blame_no_node(attempt: Ended, text: str) -> None:
    attempt.logs(*range(8), text=text)
    attempt.exits(*range(8), signal="SIGABRT", code=None)
    attempt.describe(code=134)
    assert attempt.evaluate() == [] and not attempt.memory.exists()


def test_a_rank_that_ended_well_or_was_told_to_end_blames_nobody(attempt: Ended) -> None:
    attempt.logs(2, 4, text=ECC)
    attempt.exits(2)
    attempt.exits(4, signal="SIGTERM", code=None, terminated=95.0, time=96.0)
    attempt.describe(code=143)
    assert attempt.evaluate() == []


def test_words_after_the_rank_was_told_to_end_do_not_count(attempt: Ended) -> None:
    attempt.logs(4, text=ECC, time=99.0)
    attempt.exits(4, code=1, terminated=97.0, time=96.5)
    attempt.describe(code=1)
    assert attempt.evaluate() == []


def test_a_node_that_slurm_lost(attempt: Ended) -> None:
    attempt.exits(0, 1, 4, 5, 6, 7, signal="SIGTERM", code=None, terminated=99.0)
    said = "srun: error: Node failure on n2"
    attempt.output(said)
    attempt.describe(code=1)
    [entry] = attempt.evaluate()
    assert (entry.node, entry.reason, entry.rank, entry.evidence) == ("n2", "lost", 2, said)


@pytest.fixture
def silent(attempt: Ended) -> Ended:
    """No rank of n2 left an exit record: it was lost, or all were killed at once."""
    attempt.exits(0, 1, 4, 5, 6, 7, signal="SIGTERM", code=None, terminated=99.0)
    attempt.describe(code=1)
    return attempt


@pytest.mark.parametrize(
    ("answer", "shown"),
    [
        ("n2|down*|Not responding", "down* (Not responding)"),
        ("n2|mixed*|none", "mixed*"),
        ("n2|down|Node unexpectedly rebooted", "down (Node unexpectedly rebooted)"),
    ],
)
def test_slurm_decides_about_a_silent_node(
    silent: Ended, fake_slurm: Callable[..., Any], answer: str, shown: str
) -> None:
    fake_slurm("sinfo").answer("sinfo", f"{answer}\n")
    [entry] = silent.evaluate()
    assert (entry.node, entry.reason) == ("n2", "lost") and entry.evidence.endswith(f"Slurm: {shown}")


def test_what_slurm_does_not_say_is_not_known_and_is_asked_again(silent: Ended, fake_slurm: Callable[..., Any]) -> None:
    slurm = fake_slurm("sinfo")
    slurm.answer("sinfo", "n2|mixed|none\n")
    assert silent.evaluate() == []
    assert has_parts(silent.said, "n2: ", "2 ranks")
    assert not silent.mark["is_final"]
    slurm.answer("sinfo", "", rc=1)
    assert silent.evaluate() == [] and not silent.mark["is_final"]
    slurm.answer("sinfo", "n2|down*|Not responding\n")
    assert found(silent.evaluate()) == [("n2", "lost", 2)] and silent.mark["is_final"]


def test_a_node_that_slurm_still_calls_healthy_long_after_the_end_was_not_lost(
    silent: Ended, fake_slurm: Callable[..., Any]
) -> None:
    fake_slurm("sinfo").answer("sinfo", "n2|idle|none\n")
    document = json.loads(silent.dir.exit.read_text())
    write_json(silent.dir.exit, {**document, "ended": time.time() - 1000})
    assert silent.evaluate() == [] and silent.mark["is_final"]


def test_a_node_that_is_forgiven_is_not_remembered_again_for_the_same_end(attempt: Ended) -> None:
    attempt.logs(5, text=ECC)
    attempt.exits(5, code=1)
    attempt.describe(code=None)
    assert found(attempt.evaluate()) == [("n3", "ecc", 5)]
    assert not attempt.mark["is_final"], "the end may still become another one"
    forgive_nodes(attempt.memory, ["n3"], cluster=None)
    attempt.describe(code=1)
    assert attempt.evaluate() == [] and attempt.mark["is_final"]
    assert [each["node"] for each in attempt.mark["found"]] == ["n3"]


def test_an_end_of_long_ago_is_not_remembered(attempt: Ended) -> None:
    attempt.logs(5, text=ECC)
    attempt.exits(5, code=1)
    document = attempt.describe(code=1)
    write_json(attempt.dir.exit, {**document, "ended": time.time() - 8 * 86400})
    assert attempt.evaluate() == [] and attempt.mark["is_final"]


def test_a_failed_check(attempt: Ended) -> None:
    for folder in (attempt.dir.pids, attempt.dir.exits):
        for path in folder.iterdir():
            path.unlink()
    verdicts = {"n1": "ok", "n2": "failed", "n3": "slow", "n4": "not_known"}
    nodes = [{"node": node, "verdict": verdict, "why": "gpu 3 memory: wrong"} for node, verdict in verdicts.items()]
    write_json(attempt.dir.path / "check" / "result.json", {"nodes": nodes})
    ended = attempt.describe(code=1)
    assert (ended["reason"], ended["first_failure"]["node"], ended["failed_ranks"]) == ("node_check", "n2", [])
    assert has_parts(attempt.line, "node n2: ", "gpu 3 ")
    assert found(attempt.evaluate()) == [("n2", "failed_check", None)]


@pytest.mark.parametrize("text", ["{", '{"schema_version": 2, "nodes": []}'])
def test_a_memory_that_cannot_be_read_is_said_and_kept(attempt: Ended, text: str) -> None:
    attempt.logs(5, text=ECC)
    attempt.exits(5, code=1)
    attempt.describe(code=1)
    attempt.memory.write_text(text)
    attempt.evaluate(rc=1)
    assert has_parts(attempt.said, attempt.memory)
    assert attempt.memory.read_text() == text
    assert not attempt.dir.bad_nodes.exists(), "the next `bsl submit` tries again"


def test_a_requeued_job_and_those_that_wait_leave_the_node_out(attempt: Ended, fake_slurm: Callable[..., Any]) -> None:
    slurm = fake_slurm("squeue", "scontrol")
    slurm.answer("squeue", "bsl:/runs/demo\n")
    slurm.answer("scontrol", "JobId=6 ReqNodeList=(null) ExcNodeList=n9 Features=(null)\n")
    attempt.logs(5, text=ECC)
    attempt.exits(5, code=1)
    attempt.describe(code=1)
    other = BadNode("jean", "n4", "by_hand", "hot", 0.0, None)
    elsewhere = BadNode("lumi", "n5", "by_hand", "hot", 0.0, None)
    add_nodes(attempt.memory, [other, elsewhere])
    attempt.evaluate("--job-id", "6", "--restart-count", "0", "--slurm-restarts", "1", "--terminated", "17")
    updates = [call["argv"] for call in slurm.calls("scontrol") if call["argv"][1] == "update"]
    [update] = updates
    assert update[2:] == ["JobId=6", "ExcNodeList=n3,n4,n9"]


def test_a_job_that_is_not_restarted_is_not_changed(attempt: Ended, fake_slurm: Callable[..., Any]) -> None:
    slurm = fake_slurm("squeue", "scontrol")
    attempt.logs(5, text=ECC)
    attempt.exits(5, code=1)
    attempt.describe(code=1)
    attempt.evaluate("--job-id", "6", "--restart-count", "1", "--slurm-restarts", "1")
    assert slurm.calls("scontrol") == []


def test_the_node_that_a_watcher_accuses_of_a_hang_is_left_out_for_a_day(attempt: Ended) -> None:
    write_ended_by(attempt.dir, EndedBy("end_ranks", "agent", "a lock", True, nodes=("n3",)))
    attempt.exits(0, 1, 2, 3, 6, 7, code=None, signal="SIGTERM", terminated=91.0)
    # The ranks of n3 were killed: that does not show that the node was lost.
    assert attempt.describe(code=137)["reason"] == "hang"
    before = time.time()
    [entry] = attempt.evaluate()
    assert (entry.node, entry.reason, entry.evidence, entry.rank) == ("n3", "hang", "a lock", 4)
    assert entry.expires == pytest.approx(before + 86400, abs=60) and attempt.mark["is_final"]


def test_a_hang_that_turned_out_to_be_none_blames_no_node(attempt: Ended) -> None:
    write_ended_by(attempt.dir, EndedBy("end_ranks", "agent", "a lock", True, nodes=("n3",)))
    attempt.exits(*range(8))
    assert attempt.describe(code=0)["reason"] == "finished"
    assert attempt.evaluate() == []
