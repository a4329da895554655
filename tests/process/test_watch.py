"""A watcher on real processes: what it notices, keeps and does, and what it must never do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import bigsci_launch
from bigsci_launch.runs.generations.read import read_generations
from bigsci_launch.runs.layout import RunDir, read_json
from bigsci_launch.runs.watching.heartbeat import Health, agent_of, read_heartbeats
from bigsci_launch.runs.watching.ledger import RunFinding, read_acts, read_findings
from bigsci_launch.watch.facts import stalls
from bigsci_launch.watch.judge import durations, pulse
from bigsci_launch.watch.rounds import one_attempt
from bigsci_launch.watch.rounds.loop import Watcher, WatchStatus
from bigsci_launch.watch.rounds.until_over import look_once
from bigsci_launch.watch.watched import watched_run
from tests.support.command import run_bsl
from tests.support.texts import has_parts
from tests.support.waiting import wait_until

DIAGNOSTICS = Path(bigsci_launch.__file__).parent / "assets" / "diagnostics"
PROGRAM = """
import os, sys, time
rank, folder = int(os.environ["RANK"]), os.environ["STEPS"]
def done(who):
    try:
        return int(open(f"{folder}/{who}").read() or 0)
    except (OSError, ValueError):
        return 0
for step in range(1, 100000):
    time.sleep(0.1)
    with open(f"{folder}/new{rank}", "w") as stream:
        stream.write(str(step))
    os.replace(f"{folder}/new{rank}", f"{folder}/{rank}")
    while done(1 - rank) < step:
        time.sleep(0.02)
    if rank == 0 and not os.path.exists(f"{folder}/silent"):
        print(f" iteration {step}/ 100000 | elapsed time per iteration (ms): 100.0 | lm loss: 2.0E+00 |", flush=True)
"""
MODEL = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "sequence_length": 8, "vocab_size": 64}


class Training:
    """Two ranks that wait for each other at each step; rank 0 prints the steps."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run = folder, RunDir(folder / "runs" / "run")
        self.steps = folder / "steps"
        self.steps.mkdir()
        self.said: list[str] = []
        self.told: list[RunFinding] = []

    def start(self, watch: str = "off", **more: Any) -> None:
        config = {
            "run": {"name": "run", "command": [sys.executable, "-c", PROGRAM]},
            "slurm": {"site": "local"},
            "parallelism": {"data_parallel_size": 2},
            "model": MODEL,
            "training": {"steps": 10, "micro_batch_size": 1, "global_batch_size": 2},
            "data": {"prefix": "none"},
            "env": {"STEPS": {"value": str(self.steps), "reason": "test"}},
            "monitor": {"watch": watch},
            **more,
        }
        (self.folder / "run.yaml").write_text(json.dumps(config))
        done = self.bsl("submit", "run.yaml", "--local", "--detach")
        assert done.returncode == 0, done.stderr
        wait_until(lambda: len(list(self.attempt.pids.glob("*.json"))) == 2)
        wait_until(lambda: "iteration" in self.attempt.log_file(0).read_text())

    @property
    def attempt(self) -> Any:
        found = self.run.latest_attempt()
        assert found is not None
        return found

    def bsl(self, *words: str) -> subprocess.CompletedProcess[str]:
        return run_bsl(self.folder, *words, rc=None)

    def pid(self, rank: int) -> int:
        return int(read_json(self.attempt.pid_file(rank))["pid"])

    def signal(self, rank: int, number: int) -> None:
        os.kill(self.pid(rank), number)

    def watcher(self, name: str = "test", *, may_act: bool = False) -> Watcher:
        return Watcher(watched_run(self.run), name=name, may_act=may_act, say=self.said.append, tell=self.told.append)

    def end(self) -> None:
        for rank in (0, 1):
            with_process(self.pid(rank), lambda pid: os.kill(pid, signal.SIGCONT))
        self.bsl("cancel", "run")


def with_process(pid: int, act: Callable[[int], None]) -> None:
    try:
        act(pid)
    except ProcessLookupError:
        return


def tick_until(watcher: Watcher, holds: Callable[[WatchStatus], object]) -> WatchStatus:
    status = watcher.tick()

    def look() -> bool:
        nonlocal status
        status = watcher.tick()
        return bool(holds(status))

    wait_until(look, evidence=lambda: status)
    return status


@pytest.fixture
def training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Training]:
    """Steps take 0.1 s here, so that a silence of two seconds is long."""
    monkeypatch.setattr(pulse, "LEAST_LOOK_S", 1.5)
    monkeypatch.setattr(durations, "LEAST_LONG_S", 1.5)
    monkeypatch.setattr(durations, "LEAST_TOO_LONG_S", 4.0)
    monkeypatch.setattr(stalls, "LEAST_SETTLE_S", 0.5)
    monkeypatch.setattr(one_attempt, "LOCAL_GAP_S", 1.0)
    started = Training(tmp_path)
    yield started
    started.end()


def test_a_hang_is_noticed_explained_and_kept_and_its_end_too(training: Training) -> None:
    training.start()
    watcher = training.watcher()
    assert tick_until(watcher, lambda status: (status.seen.silence.step or 0) > 20).health is Health.HEALTHY
    training.signal(1, signal.SIGSTOP)
    status = tick_until(watcher, lambda status: status.findings)
    (finding,) = status.findings
    assert finding.kind == "hang", finding
    assert "rank 1" in finding.sentence
    assert "is stopped" in finding.sentence
    assert finding.bundle is not None
    assert (Path(finding.bundle) / "collection.json").exists() or list(Path(finding.bundle).iterdir())
    assert [told.key for told in training.told] == [finding.key]
    known = training.bsl("status", "run").stdout
    assert "hang" in known
    assert finding.bundle in known
    assert not read_acts(training.run), "nobody allowed it to act"

    # One look in between, as of a cron job, takes nothing back that it has not seen, and does nothing.
    asked = training.run.control / "dump"
    asked.write_text("is it slow?")
    cron = training.watcher("cron")
    once = look_once(cron)
    cron.close(once)
    assert (once.health, once.findings[0].key) == (Health.FINDING, finding.key)
    assert [found.cleared for found in read_findings(training.run)] == [None]
    assert len(training.told) == 1
    asked.unlink()
    assert not training.run.watcher_file("cron").exists()

    training.signal(1, signal.SIGCONT)
    assert not tick_until(watcher, lambda status: status.health is Health.HEALTHY).findings
    assert [found.cleared is not None for found in read_findings(training.run)] == [True]

    training.signal(1, signal.SIGSTOP)
    (again,) = tick_until(watcher, lambda status: status.findings).findings
    assert again.signature == finding.signature
    assert any("attempt 0001" in text for text in again.details), again


def test_a_hang_of_a_program_whose_lines_are_no_steps_is_noticed_by_looks_alone(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pulse, "UNKNOWN_LOOK_S", 3.0)
    training.start(monitor={"watch": "off", "step_line": "none (?P<step>\\d+)", "ring": "none"})
    watcher = training.watcher()
    assert watcher.tick().health is Health.BLIND, "nothing was seen yet"
    healthy = tick_until(watcher, lambda status: status.health is Health.HEALTHY)
    assert (healthy.seen.silence.step, healthy.findings) == (None, ())
    training.signal(1, signal.SIGSTOP)
    (finding,) = tick_until(watcher, lambda status: status.findings).findings
    assert finding.kind == "hang" and finding.sentence.startswith("rank 1 "), finding


def test_a_watcher_that_may_act_ends_a_hang_once_and_says_why(training: Training) -> None:
    training.start()
    watcher, other = training.watcher("one", may_act=True), training.watcher("two", may_act=True)
    tick_until(watcher, lambda status: other.tick() and (status.seen.silence.step or 0) > 20)
    training.signal(1, signal.SIGSTOP)
    tick_until(watcher, lambda status: status.seen.view.is_over or not other.tick())
    ended = read_json(training.attempt.exit)
    assert ended["reason"] == "hang"
    assert ended["spy_bundle"]
    assert any("is stopped" in text for text in ended["evidence"]), ended
    told = [finding.key for finding in training.told]
    assert len(set(told)) == len(told), "people are told once of each"
    begun, done = (
        [act for act in read_acts(training.run) if act.what == "end_ranks" and act.state == state]
        for state in ("begun", "done")
    )
    assert len(begun) == 1, "two watchers, one act"
    assert len([words for words in training.said if done[0].words in words]) == 1
    assert not [act for act in read_acts(training.run) if act.what == "leave_out"], "there is no other node here"


PROGRESS = 10
"""Steps further than an earlier generation, which ends a job that makes none. The look at a step is older than it."""


@pytest.mark.parametrize("num_hangs", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_hang_of_a_run_that_survives_is_fenced_and_the_job_continues(training: Training, num_hangs: int) -> None:
    training.start(survive=True)
    watcher, other = training.watcher("one", may_act=True), training.watcher("two", may_act=True)
    step = 20
    for number in range(1, num_hangs + 1):
        status = tick_until(watcher, lambda status, step=step: other.tick() and (status.seen.silence.step or 0) > step)
        step = (status.seen.silence.step or 0) + PROGRESS
        hung = training.pid(1)
        training.signal(1, signal.SIGSTOP)
        tick_until(watcher, lambda _, number=number: other.tick() and generation(training) == number)
        wait_until(lambda hung=hung: training.pid(1) != hung)
        assert not Path(f"/proc/{hung}").exists()
    tick_until(watcher, lambda status: other.tick() and (status.seen.silence.step or 0) > step and not status.findings)
    found = read_generations(training.attempt)
    assert found is not None
    causes = [(each.cause.kind, each.cause.rank, each.cause.signal) for each in found.all[:num_hangs] if each.cause]
    assert causes == [("stopped", 1, "SIGKILL")] * num_hangs
    acts = [(act.key, act.state) for act in read_acts(training.run)]
    done = [(f"fence:0001:{number}", state) for number in range(num_hangs) for state in ("begun", "done")]
    assert acts == done, "two watchers, one fence in each generation"
    assert not training.attempt.ended_by.exists() and not training.attempt.exit.exists()
    told = [finding.sentence for finding in training.told if finding.kind == "recovered"]
    assert len(told) == num_hangs and has_parts(told[0], "generation 1", "rank 1 (dp1 pp0 tp0)"), told
    assert has_parts(training.bsl("status", "run").stdout, "rank 1 (dp1 pp0 tp0)", "fenced")
    training.signal(0, signal.SIGKILL)
    status = tick_until(watcher, lambda status: other.tick() and generation(training) == num_hangs + 1)
    assert not status.findings, "a death that is overcome is no finding"
    assert len(read_acts(training.run)) == 2 * num_hangs, "and nothing is done about it"


def generation(training: Training) -> int:
    found = read_generations(training.attempt)
    return found.newest.number if found else -1


def test_what_cannot_be_written_down_is_not_done(training: Training) -> None:
    training.start()
    watcher = training.watcher(may_act=True)
    tick_until(watcher, lambda status: (status.seen.silence.step or 0) > 20)
    (training.run.path / "away").mkdir()
    training.run.watch.rename(training.run.path / "away" / "watch")
    training.run.watch.write_text("not a folder\n")
    training.signal(1, signal.SIGSTOP)
    status = tick_until(watcher, lambda status: any("nothing was done" in words for words in training.said))
    assert [finding.kind for finding in status.findings] == ["hang"]
    assert training.told, "people are told all the same"
    assert any(str(training.run.watch) in text for text in status.remarks)
    assert not training.attempt.ended_by.exists()
    assert not training.attempt.exit.exists()


def test_a_silent_log_is_no_hang_if_the_ranks_record_steps(training: Training) -> None:
    training.start()
    watcher = training.watcher(may_act=True)
    tick_until(watcher, lambda status: (status.seen.silence.step or 0) > 20)
    (training.steps / "silent").touch()
    beats = subprocess.Popen([sys.executable, "-c", BEATS, str(training.attempt.event_file(0)), str(training.steps)])
    try:
        wait_until(training.attempt.event_file(0).exists)
        deadline = time.monotonic() + 8
        while time.monotonic() < deadline:
            status = watcher.tick()
            assert not status.findings, status.findings
            time.sleep(0.2)
    finally:
        beats.kill()
        beats.wait()
    assert not training.told
    assert not training.attempt.ended_by.exists()


BEATS = """
import json, sys, time
while True:
    step = int(open(f"{sys.argv[2]}/0").read() or 0)
    with open(sys.argv[1], "a") as stream:
        stream.write(json.dumps({"kind": "heartbeat", "time": time.time(), "step": step, "phase": "step"}) + "\\n")
    time.sleep(0.2)
"""


def test_once_waits_for_what_moves_and_calls_what_it_does_not_see_unknown(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    training.start()
    assert look_once(training.watcher()).health is Health.HEALTHY
    training.signal(1, signal.SIGSTOP)
    wait_until(lambda: look_once(training.watcher()).health is Health.FINDING)
    training.signal(1, signal.SIGCONT)
    moving = look_once(training.watcher())
    assert moving.health is Health.HEALTHY, "a run that moves has no hang, whoever found it"
    (training.steps / "silent").touch()
    monkeypatch.setattr("bigsci_launch.watch.rounds.until_over.LEAST_S", 2.0)
    # How long a silence is unusual depends on how long steps took: others may use the cores.
    wait_until(lambda: look_once(training.watcher()).health is Health.BLIND)


def test_the_agent_is_started_again_when_it_is_killed_and_leaves_when_the_attempt_is_over(training: Training) -> None:
    training.start(watch="observe")
    wait_until(lambda: [beat.name for beat in read_heartbeats(training.run)] == [agent_of("0001")])
    first = read_heartbeats(training.run)[0]
    os.kill(first.pid, signal.SIGKILL)
    wait_until(lambda: "is dead" in training.bsl("status", "run").stdout)
    wait_until(lambda: read_heartbeats(training.run)[0].pid != first.pid)
    again = read_heartbeats(training.run)[0]
    training.bsl("cancel", "run")
    wait_until(lambda: read_heartbeats(training.run)[0].ended)
    wait_until(lambda: not Path(f"/proc/{again.pid}").exists())


def test_the_agent_of_a_run_that_was_removed_leaves_and_does_not_make_its_folder_again(training: Training) -> None:
    training.start(watch="observe")
    wait_until(lambda: read_heartbeats(training.run))
    pid = read_heartbeats(training.run)[0].pid
    ranks = [training.pid(rank) for rank in (0, 1)]
    training.run.path.rename(training.folder / "removed")
    try:
        wait_until(lambda: not Path(f"/proc/{pid}").exists())
        assert not training.run.path.exists()
    finally:
        for rank in ranks:
            os.kill(rank, signal.SIGKILL)
        (training.folder / "removed").rename(training.run.path)


def test_ranks_that_move_at_the_last_moment_are_not_ended(training: Training) -> None:
    training.start()
    watcher = training.watcher(may_act=True)
    tick_until(watcher, lambda status: (status.seen.silence.step or 0) > 20)
    training.signal(1, signal.SIGSTOP)
    take = watcher._now.stalls._take_look
    looks = []

    def look_and_continue(settle_s: float, keeps_doubt: bool) -> Any:
        looks.append(take(settle_s, keeps_doubt))
        if len(looks) == 2:
            training.signal(1, signal.SIGCONT)
            time.sleep(0.5)
        return looks[-1]

    watcher._now.stalls._take_look = look_and_continue
    tick_until(watcher, lambda status: len(looks) >= 2)
    assert all(look.is_failure for look in looks)
    assert tick_until(watcher, lambda status: not status.findings)
    assert not read_acts(training.run)
    assert not training.attempt.ended_by.exists()


@pytest.mark.parametrize("how", ["stderr", pytest.param("sleeps", marks=pytest.mark.long)])
def test_a_silent_controller_is_no_reason_to_act_or_to_call_a_run_healthy_or_lost(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bigsci_launch.runs.attempts import JobRecord, write_job
    from bigsci_launch.watch.facts import job

    programs = tmp_path / "bin"
    programs.mkdir()
    answer = "sleep 600" if how == "sleeps" else "echo 'slurm_load_jobs error: Socket timed out' >&2; exit 1"
    for name in ("squeue", "sinfo", "scontrol", "sacct"):
        (programs / name).write_text(f"#!/bin/sh\n{answer}\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setattr(job, "FIRST_ANSWER_S", 1.0)
    run = RunDir(tmp_path / "runs" / "run")
    attempt = run.attempt("0001")
    attempt.make()
    run.record.write_text("{}")
    write_job(attempt, JobRecord("slurm", time.time(), job_id="4711"))
    said: list[str] = []
    watcher = Watcher(watched_run(run), name="test", may_act=True, say=said.append, tell=lambda finding: None)
    status = watcher.tick()
    assert status.health is Health.BLIND
    assert not status.findings
    assert not read_acts(run)
    watcher.close(status)


@pytest.mark.long
def test_being_told_at_any_moment_of_a_wait_ends_it() -> None:
    program = (
        "import signal, time\nfrom bigsci_launch.watch.rounds.until_over import EndSignals\nsignals = EndSignals()\n"
        "print('ready', flush=True)\nuntil = time.monotonic() + 4\nwhile time.monotonic() < until:\n"
        "    signals.wait(0.0002)\n    signals.have_come = False\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print('over', flush=True)\ntime.sleep(0.5)\nimport os; os._exit(0)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    until = time.monotonic() + 10
    while process.poll() is None:
        assert time.monotonic() < until, "it hangs"
        process.send_signal(signal.SIGTERM)
    process.stdout.close()
    assert process.returncode == 0


DEAF = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
NOT_UP_YET = """
import sys, time
from pathlib import Path
began = Path("began")
if began.exists():
    print("the end is reported", flush=True)
    sys.exit(0)
began.touch()
print("up", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("program", "last"), [(DEAF, "up"), (NOT_UP_YET, "the end is reported")], ids=["deaf", "early"]
)
def test_a_watcher_that_does_not_leave_is_killed_and_one_that_was_not_up_reports_the_end(
    tmp_path: Path, program: str, last: str
) -> None:
    keeper = (
        "import sys; from pathlib import Path; from bigsci_launch.launch.job import keep_watch\n"
        "keep_watch.LAST_WORDS_S, log = float(sys.argv[3]), Path(sys.argv[1])\n"
        "sys.exit(keep_watch.Keeper(log, [sys.executable, '-c', sys.argv[2]], log.parent).run())"
    )
    log = tmp_path / "watch.log"
    limit_s = "1.0" if program == DEAF else "60.0"
    process = subprocess.Popen([sys.executable, "-c", keeper, str(log), program, limit_s], cwd=tmp_path)
    wait_until(lambda: log.exists() and "up" in log.read_text())
    process.send_signal(signal.SIGTERM)
    assert process.wait(180) == 0
    assert log.read_text().splitlines()[-1] == last
