"""All logs and records of an attempt as they grow."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import bigsci_launch
from bigsci_launch.runs.events import EventWriter
from bigsci_launch.runs.layout import AttemptDir, write_json
from bigsci_launch.watch.judge.log_event import IN_BACKGROUND
from bigsci_launch.watch.read import sources
from bigsci_launch.watch.read.ring_heads import LANES_AT, NAMES_AT
from bigsci_launch.watch.read.sources import AttemptTail, LogTail
from bigsci_launch.watch.read.tail import MOST_BYTES


@pytest.fixture
def attempt(tmp_path: Path) -> AttemptDir:
    found = AttemptDir(tmp_path / "run" / "attempts" / "0001")
    found.make()
    return found


def iteration(step: int) -> str:
    return (
        f" iteration {step:8d}/    1000 | elapsed time per iteration (s): 2.00 | lm loss: 2.5E+00 | grad norm: 0.2 |\n"
    )


def append(path: Path, text: str) -> None:
    with path.open("a") as stream:
        stream.write(text)


def record(attempt: AttemptDir, rank: int, **fields: Any) -> None:
    append(attempt.event_file(rank), json.dumps({"time": 1000.0, "mono": 5.0, "step": None, **fields}) + "\n")


def kinds(found: list[sources.LogEvent]) -> list[tuple[int | None, str, int | None]]:
    return [(log_event.rank, log_event.kind, log_event.step) for log_event in found]


def test_records_of_the_trainer_are_seen(attempt: AttemptDir) -> None:
    writer = EventWriter(attempt.event_file(3))
    writer.write("start", step=0, world_size=4)
    writer.write("load", step=20, path="x", checkpoint_step=20)
    writer.write("heartbeat", step=21, phase="step")
    writer.write("step", step=21, loss=2.5, grad_norm=0.3, seconds=1.5, global_batch_size=8, num_skipped=0)
    writer.write("save", step=21, path="x", seconds=0.5)
    writer.write("save", step=20, path="x", seconds=9.5, stalled_s=0.1)
    writer.write("evaluation", step=21, loss=2.4, seconds=0.7)
    writer.write("guards", step=21, interval=10)
    writer.write("end", step=21, reason="finished")
    writer.close()
    tail = AttemptTail(attempt)
    found = tail.read()
    assert [log_event.kind for log_event in found] == [
        *("start", "phase", "phase", "step", "saved", "saved", "evaluated", "output", "end")
    ]
    step = found[3]
    assert (step.rank, step.loss, step.grad_norm, step.seconds, step.batch_size) == (3, 2.5, 0.3, 1.5, 8)
    assert [(each.step, each.seconds, each.text) for each in found[4:6]] == [(21, 0.5, ""), (20, 9.5, IN_BACKGROUND)]
    assert all(log_event.time for log_event in found)
    assert tail.read() == []
    assert tail.troubles == ()


def test_what_is_printed_about_recorded_steps_is_mere_output(attempt: AttemptDir) -> None:
    append(attempt.log_file(1), iteration(1))
    tail = AttemptTail(attempt)
    assert kinds(tail.read()) == [(1, "step", 1)]
    record(attempt, 1, kind="step", step=2, loss=2.5)
    append(attempt.log_file(1), iteration(2))
    assert kinds(tail.read()) == [(1, "step", 2), (1, "output", 2)]


def test_files_that_appear_later_are_found(attempt: AttemptDir) -> None:
    tail = AttemptTail(attempt)
    assert tail.read() == []
    append(attempt.log_file(7), iteration(3))
    append(attempt.job_output, "srun: error: node n1: task 3: Exited with exit code 1\n")
    assert kinds(tail.read()) == [(7, "step", 3), (None, "failed", None)]


def test_a_torn_record_waits_for_its_end(attempt: AttemptDir) -> None:
    tail = AttemptTail(attempt)
    append(attempt.event_file(0), '{"kind": "heartbeat", "phase": "st')
    assert tail.read() == []
    append(attempt.event_file(0), 'ep", "step": 4, "time": 1.0}\nnot a record\n[1]\n')
    assert kinds(tail.read()) == [(0, "phase", 4)]


def test_history_is_read_from_the_logs_that_have_steps(attempt: AttemptDir) -> None:
    chatter = "some chatter of a rank that prints no steps\n" * 4000
    assert len(chatter) > sources.PEEK_BYTES
    for rank in range(6):
        append(attempt.log_file(rank), "  eval_interval ........ 50\n" * (rank == 0) + chatter)
    append(attempt.log_file(5), "".join(iteration(step) for step in range(1, 1001)))
    tail = AttemptTail(attempt)
    found = tail.read()
    steps = [log_event.step for log_event in found if log_event.kind == "step"]
    assert steps == list(range(1, 1001)), "more than a peek of the log with steps"
    assert [log_event.text for log_event in found if log_event.kind == "settings"] == ["eval_interval=50"]
    append(attempt.log_file(5), iteration(1001))
    assert kinds(tail.read()) == [(5, "step", 1001)]


@pytest.mark.slow
def test_a_flood_between_two_looks_is_not_read_as_history(attempt: AttemptDir) -> None:
    append(attempt.log_file(0), iteration(1))
    tail = AttemptTail(attempt)
    tail.read()
    append(attempt.log_file(0), "\r bar" * (MOST_BYTES // 4) + "\n" + iteration(2))
    assert kinds(tail.read())[0] == (0, "step", 2)
    assert tail.num_skipped > 0
    assert tail.read() == []


def test_what_cannot_be_read_is_said_to_be_so(attempt: AttemptDir) -> None:
    append(attempt.log_file(0), iteration(1))
    tail = AttemptTail(attempt)
    tail.read()
    attempt.log_file(0).unlink()
    assert tail.read() == []
    (trouble,) = tail.troubles
    assert "rank-0000.log" in trouble and "No such file" in trouble
    assert tail.blind == tail.troubles, "its steps were in that log"


def test_a_log_without_steps_hides_nothing(attempt: AttemptDir) -> None:
    append(attempt.log_file(0), iteration(1))
    append(attempt.log_file(1), "chatter\n")
    tail = AttemptTail(attempt)
    tail.read()
    attempt.log_file(1).unlink()
    tail.read()
    assert (len(tail.troubles), tail.blind) == (1, ())


def test_a_missing_log_is_no_silence(tmp_path: Path) -> None:
    tail = LogTail(tmp_path / "job.out")
    assert tail.read() == []
    assert tail.trouble is not None and "No such file" in tail.trouble
    (tmp_path / "job.out").write_text("building GPT model ...\n")
    assert kinds(tail.read()) == [(None, "output", None)]
    assert tail.trouble is None


def test_the_beginning_of_a_line_is_a_sign_of_life(tmp_path: Path) -> None:
    log = tmp_path / "job.out"
    append(log, "begun")
    tail = LogTail(log)
    assert kinds(tail.read()) == [(None, "output", None)]
    append(log, " 10%")
    assert kinds(tail.read()) == [(None, "output", None)]
    assert tail.read() == []


RING = """
import sys
sys.path.insert(0, sys.argv[1])
import ring_file
ring = ring_file.Ring(sys.argv[2], rank=0, world_size=1)
print(ring_file.LANES_AT, ring_file.NAMES_AT, flush=True)
for word in sys.stdin:
    ring.beat() if word == "beat\\n" else ring.lane().enter(bytes(16))
    print(flush=True)
"""


@pytest.mark.parametrize("host", [None, "elsewhere"])
def test_calls_that_a_ring_of_this_machine_counts_are_seen_and_its_heartbeat_is_none(
    attempt: AttemptDir, tmp_path: Path, host: str | None
) -> None:
    diagnostics = Path(bigsci_launch.__file__).parent / "assets" / "diagnostics"
    argv = [sys.executable, "-c", RING, str(diagnostics), str(tmp_path / "77.ring")]
    tail = AttemptTail(attempt)
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as rank:
        assert rank.stdin is not None and rank.stdout is not None
        assert rank.stdout.readline() == f"{LANES_AT} {NAMES_AT}\n"
        write_json(attempt.pid_file(0), {"host": host or socket.gethostname(), "rings": str(tmp_path)})
        seen = [kinds(tail.read())]
        for word in ("beat", "enter", "beat"):
            print(word, file=rank.stdin, flush=True)
            rank.stdout.readline()
            seen.append(kinds(tail.read()))
        rank.stdin.close()
    call = [(None, "call", None)] if host is None else []
    assert seen == [call, [], call, []]
