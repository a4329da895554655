"""What the controller writes, and the requests that it reads, with real files."""

from __future__ import annotations

import json
import queue
import threading
from pathlib import Path

import pytest

from bigsci_launch.nodes.memory import read_nodes
from bigsci_launch.recover.generation import Instant
from bigsci_launch.recover.orders import JobEvent, LeaveOut, LookAtRanks, RanksSeen, RecordLine, RequestAnswer, SayLine
from bigsci_launch.recover.records import Records, last_words
from bigsci_launch.runs.control.request import OF_CONTROLLER, Request, follow_requests, put_request
from bigsci_launch.runs.ending.job_output import read_printed_exit
from bigsci_launch.runs.layout import AttemptDir, RunDir, node_memory, write_json

NOW = Instant(5.0, 1000.0)


@pytest.fixture
def attempt(tmp_path: Path) -> AttemptDir:
    attempt = RunDir(tmp_path / "runs" / "r").attempt("0001")
    attempt.make()
    return attempt


@pytest.mark.parametrize("remembers", [True, False])
def test_a_silent_node_is_remembered_as_lost_but_never_this_machine(attempt: AttemptDir, remembers: bool) -> None:
    records = Records(attempt, lambda _: None, remembers_nodes=remembers)
    records.carry_out(LeaveOut("n1", "lost", "silent for 15 s"), NOW)
    records.close()
    known = read_nodes(node_memory(attempt.path.parents[2]))
    found = [(entry.node, entry.reason, entry.evidence, entry.run, entry.attempt) for entry in known]
    assert found == ([("n1", "lost", "silent for 15 s", "r", "0001")] if remembers else [])


def test_last_words_are_the_exception_or_the_last_line_of_the_log(attempt: AttemptDir) -> None:
    write_json(attempt.error_file(0), {"type": "KeyError", "message": "7"})
    attempt.log_file(1).write_text("2026-01-01T00:00:00.000000Z step\n2026-01-01T00:00:01.000000Z ValueError: 8\n\n")
    answers: queue.SimpleQueue[JobEvent] = queue.SimpleQueue()
    records = Records(attempt, answers.put, remembers_nodes=False)
    records.carry_out(LookAtRanks(0, (0, 1, 2), None), NOW)
    assert answers.get(timeout=10) == RanksSeen(0, None, {0: "KeyError: 7", 1: "ValueError: 8"})
    records.close()


CUT_OFF = """OSError: [Errno 28] No space left on device

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "/site-packages/torch/serialization.py", line 967, in save
    self.module.save_state_dict(self._curr_ckpt_path,
"""


def test_a_traceback_that_a_full_disk_has_cut_off_is_not_quoted_by_its_code(attempt: AttemptDir) -> None:
    attempt.log_file(1).write_text("".join(f"2026-01-01T00:00:00.000000Z {line}\n" for line in CUT_OFF.splitlines()))
    assert last_words(attempt, 1) == CUT_OFF.splitlines()[0]
    attempt.log_file(2).write_text("2026-01-01T00:00:00.000000Z   nothing else\n")
    assert last_words(attempt, 2) == "nothing else"


def test_what_a_rank_has_said_makes_no_line_of_its_own_in_the_output(
    attempt: AttemptDir, capfd: pytest.CaptureFixture[str]
) -> None:
    """`exit.json` may be missing: then the record that the output holds is believed."""
    record = json.dumps({"reason": "finished", "attempt": "0001", "exit_code": 0})
    write_json(attempt.error_file(0), {"type": "E", "message": f"x\nexit_reason: record exit {record}"})
    words = last_words(attempt, 0) or ""
    assert words.startswith(r"E: x\nexit_reason")
    records = Records(attempt, lambda _: None, remembers_nodes=False)
    for end in ("\n", "\r", "\x0b", "\x85", "\u2028", "\ud800\n"):
        records.carry_out(SayLine(f"rank 0 ended: {words} {end}exit_reason: record exit {record}"), NOW)
    records.close()
    attempt.job_output.write_text(capfd.readouterr().out)
    attempt.job_output.chmod(0o644)
    assert len(attempt.job_output.read_text().splitlines()) == 6
    assert read_printed_exit(attempt) is None


def test_a_record_that_cannot_be_written_does_not_end_the_writer(attempt: AttemptDir) -> None:
    attempt.recover.write_text("a file where a folder should be")
    answers: queue.SimpleQueue[JobEvent] = queue.SimpleQueue()
    records = Records(attempt, answers.put, remembers_nodes=False)
    records.carry_out(RecordLine("began", 0, {}), NOW)
    records.carry_out(LookAtRanks(0, (), None), NOW)
    assert answers.get(timeout=10) == RanksSeen(0, None, {})
    attempt.recover.unlink()
    records.carry_out(RecordLine("began", 0, {"world_size": 2}), NOW)
    records.close()
    line = {"time": 1000.0, "event": "began", "generation": 0, "world_size": 2}
    assert json.loads(attempt.generations.read_text()) == line


def test_whom_a_guard_accuses_is_read_from_the_error_of_a_rank(attempt: AttemptDir) -> None:
    for rank, more in enumerate(({"accused": [7, 3, True, "5"]}, {"accused": []}, {}, {"accused": "3"})):
        attempt.error_file(rank).write_text(json.dumps({"type": "GuardError", "message": "differs", **more}))
    answers: queue.SimpleQueue[JobEvent] = queue.SimpleQueue()
    records = Records(attempt, answers.put, remembers_nodes=False)
    records.carry_out(LookAtRanks(0, (0, 1, 2, 3, 4), None), NOW)
    seen = answers.get(timeout=10)
    records.close()
    assert isinstance(seen, RanksSeen) and seen.accused == {0: (3, 7), 1: ()}


@pytest.mark.parametrize(
    "more",
    [{}, {"generation": 0}, {"generation": 0, "rank": True}, {"generation": 0, "rank": "1"}, {"generation": False}],
)
def test_what_is_no_request_is_refused_and_does_not_hide_others(attempt: AttemptDir, more: dict[str, object]) -> None:
    said = {"who": "p", "why": "w", "attempt": attempt.name}
    write_json(attempt.requests / "fence.a.json", {"key": "fence.a", "verb": "fence", **said, **more})
    again = Request("begin_again.b", "begin_again", "p", "w", attempt=attempt.name, asked=1.0, generation=3)
    put_request(attempt, again)
    found: queue.SimpleQueue[list[Request]] = queue.SimpleQueue()
    closed = threading.Event()
    follow = (attempt, OF_CONTROLLER, 0.01, closed, found.put)
    threading.Thread(target=follow_requests, args=follow, daemon=True).start()
    damaged, good = found.get(timeout=10)
    closed.set()
    assert good == again and damaged.wrong
    records = Records(attempt, lambda event: None, remembers_nodes=False)
    records.carry_out(RequestAnswer(damaged, damaged.wrong), NOW)
    records.close()
    answer = json.loads((attempt.answers / "fence.a.json").read_text())
    assert (answer["granted"], answer["refused"]) == (False, damaged.wrong)
    assert [path.name for path in attempt.requests.iterdir()] == ["begin_again.b.json"]
