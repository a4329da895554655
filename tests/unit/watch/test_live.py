"""The live screen shows what the run's files say, in as much room as there is, and leaves a terminal as it was."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from bigsci_launch.runs.layout import RunDir, write_json
from bigsci_launch.runs.watching.heartbeat import Health, own_heartbeat, write_heartbeat
from bigsci_launch.runs.watching.ledger import Act, RunFinding, clear_finding, raise_finding, record_act
from bigsci_launch.styled_lines import StyledLine
from bigsci_launch.watch.show.live import live_lines, plain_line, read_live_view, sparkline
from tests.support.texts import has_parts

from .conftest import heartbeat, lose_a_node

pytestmark = pytest.mark.slow

FINDING = RunFinding("hang", "h", "no step for 7 min; rank 77 (dp3 pp2 tp1) on n19 left the schedule", 1.0)


def texts(lines: list[StyledLine]) -> list[str]:
    return ["".join(text for text, _ in line) for line in lines]


def test_384_ranks_fit_on_a_small_terminal(bloom: RunDir) -> None:
    attempt = bloom.attempt("0002")
    heartbeat(attempt, 77, "eval", 1)
    heartbeat(attempt, 78, "step", 3600)
    heartbeat(attempt, 79, "eval", 3600)
    write_json(attempt.exit_file(80), {"code": 1})
    raise_finding(bloom, FINDING)
    lines = live_lines(read_live_view(bloom), 80, 24)
    shown = texts(lines)
    assert len(shown) <= 24 and max(map(len, shown)) <= 80
    rows = [line for line in shown if re.match(r"pp\d", line)]
    assert rows[2] == "pp2   .... .... .... .eTE x... .... .... ...."
    assert len(rows) == 12 and sum(row.count(".") for row in rows) == 380
    assert [style for text, style in lines[shown.index(rows[2])] if text == "TE"] == [{"fg": "red", "bold": True}]
    assert any(has_parts(line, "e eval", "x ended", "(T: step)", "7 min 02 s") for line in shown)
    assert any(line.startswith("hang: ") for line in shown)


def test_more_stages_than_lines_share_a_row_that_shows_the_odd_rank(bloom: RunDir) -> None:
    heartbeat(bloom.attempt("0002"), 77, "step", 3600)
    shown = texts(live_lines(read_live_view(bloom), 60, 12))
    assert len(shown) <= 12 and "T" in next(line for line in shown if line.startswith("pp0-"))


@pytest.mark.parametrize(("width", "height"), [(1, 1), (10, 3), (20, 5), (200, 60)])
def test_no_size_is_too_small(bloom: RunDir, width: int, height: int) -> None:
    raise_finding(bloom, replace(FINDING, sentence="x" * 500))
    shown = texts(live_lines(read_live_view(bloom), width, height))
    assert len(shown) <= height and max(map(len, shown)) <= width


def test_steps_come_from_the_rank_that_reports_them(bloom: RunDir) -> None:
    shown = texts(live_lines(read_live_view(bloom), 120, 40))
    assert has_parts(shown[2], "step 100/200", "loss 4.91", "105 s per step", "150 TFLOP/s")
    assert re.search(r" [▁█]{50} 105 to 106$", shown[4])


def test_a_recovery_is_a_line_while_it_lasts_and_when_it_is_over(bloom: RunDir) -> None:
    records = lose_a_node(bloom)
    shown = texts(live_lines(read_live_view(bloom), 120, 40))
    assert has_parts(shown[3], "generation 1 ", "node n5 ", "step 73 ", "1 min 35 s")
    records.clock = time.time() - 4
    records.fails("died", 77, "n19", signal="SIGKILL")
    line = texts(live_lines(read_live_view(bloom), 140, 40))[3]
    assert re.match(r"recovering for \d\.\d s", line) and has_parts(line, "rank 77 (dp3 pp2 tp1) on n19", "SIGKILL")


def test_steps_of_a_foreign_program_come_from_its_log(bloom: RunDir) -> None:
    attempt = bloom.attempt("0003")
    attempt.make()
    line = " iteration {}/ 200 | elapsed time per iteration (ms): 2000.0 | lm loss: {}E+00 | grad norm: 0.5 |\n"
    attempt.log_file(3).write_text("".join(line.format(step, 5 - step) for step in (1, 2, 3)))
    view = read_live_view(bloom)
    assert [(point.step, point.loss, point.grad_norm) for point in view.points] == [
        (1, 4, 0.5),
        (2, 3, 0.5),
        (3, 2, 0.5),
    ]
    assert "loss 2 " in texts(live_lines(view, 100, 30))[2]


def test_nobody_watching_and_a_dead_watcher_are_not_healthy(bloom: RunDir) -> None:
    assert texts(live_lines(read_live_view(bloom), 100, 30))[1] == "not watched"
    fields = {"every_s": 30.0, "sentence": "steps as usual", "attempt": "0002", "may_act": False}
    here = own_heartbeat("agent", health=Health.HEALTHY, **fields)
    write_heartbeat(bloom, here)
    assert texts(live_lines(read_live_view(bloom), 100, 30))[1].startswith(f"healthy: {here.sentence}  (agent, ")
    for gone in (replace(here, start_ticks=1), replace(here, ended=True)):
        write_heartbeat(bloom, gone)
        assert texts(live_lines(read_live_view(bloom), 100, 30))[1].startswith("unknown: watcher agent ")


def test_acts_are_shown_once_and_cleared_findings_not(bloom: RunDir) -> None:
    raise_finding(bloom, FINDING)
    clear_finding(bloom, "h", "steps again")
    for state in ("begun", "done"):
        record_act(bloom, Act("k", "end_ranks", "agent", "hang", state))
    shown = "\n".join(texts(live_lines(read_live_view(bloom), 100, 40)))
    assert "left the schedule" not in shown and shown.count("end ranks") == 1 and "ago, done: hang" in shown


def test_the_plain_line_is_the_same_while_nothing_happens(bloom: RunDir) -> None:
    view = read_live_view(bloom)
    line = plain_line(view)
    assert has_parts(line, "bloom UNKNOWN", "step 100/200", "not watched")
    assert plain_line(replace(view, asked=view.asked + 500)) == line


def test_text_of_the_job_cannot_command_the_terminal(bloom: RunDir) -> None:
    raise_finding(bloom, replace(FINDING, sentence="loss\x1b[2J\r\nis 5"))
    shown = "".join(texts(live_lines(read_live_view(bloom), 100, 40)))
    assert not re.search(r"[\x00-\x1f]", shown)


def test_a_sparkline_spans_the_values_and_marks_what_is_no_number() -> None:
    assert sparkline([1, 2, 3, float("nan"), 8]) == "▁▂▃!█"
    assert sparkline([2, 2]) == "▁▁" and sparkline([float("inf")]) == "!"


PROGRAM = """
import contextlib, time
from bigsci_launch.cli import console
with contextlib.suppress(KeyboardInterrupt), console.live() as show:
    for number in range(1000):
        show(lambda width, height: [[(f"frame {number} on {width}x{height}", {"fg": "red"})]], f"plain {number // 2}")
        time.sleep(0.05)
        if number == LAST:
            break
print("after")
"""


def test_a_terminal_is_redrawn_and_left_as_it_was_on_interrupt() -> None:
    master, slave = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "70", "LINES": "20"}
    environment.pop("NO_COLOR", None)
    words = [sys.executable, "-c", PROGRAM.replace("LAST", "-1")]
    process = subprocess.Popen(words, stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True)
    os.close(slave)
    said, deadline = "", time.monotonic() + 180
    while "frame 3 " not in said and time.monotonic() < deadline:
        said += os.read(master, 65536).decode()
    process.send_signal(signal.SIGINT)
    while True:
        try:
            said += os.read(master, 65536).decode()
        except OSError:  # the program has closed the terminal
            break
    assert process.wait(180) == 0 and "Traceback" not in said
    left = said.rpartition("\x1b[?1049l")[2]
    assert "\x1b[?1049h" in said and "on 70x20" in left and "after" in left and "\x1b[?25h" in said
    os.close(master)


def test_a_pipe_gets_a_line_for_each_change() -> None:
    words = [sys.executable, "-c", PROGRAM.replace("LAST", "5")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=True)
    lines = done.stdout.splitlines()
    assert [line[9:] for line in lines[:-1]] == ["plain 0", "plain 1", "plain 2"] and lines[-1] == "after"
