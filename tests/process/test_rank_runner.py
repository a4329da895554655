"""The runner of one rank, started as srun and the local launcher do: a bare interpreter running a real program."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import bigsci_launch
from tests.support.waiting import wait_until

RUNNER = Path(bigsci_launch.__file__).parent / "assets" / "diagnostics" / "rank_runner.py"
TOPOLOGY = "tp=2,pp=2,dp=2"
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_NTASKS": "8",
    "SLURMD_NODENAME": "n3",
    "SLURM_JOB_ID": "42",
    "SLURM_STEP_ID": "0",
}
STAMPED = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z (.*)")


class Runner:
    def __init__(self, attempt: Path) -> None:
        self.attempt = attempt
        self.process: subprocess.Popen[str] | None = None

    def start(self, program: str, *options: str, slurm: bool = True) -> subprocess.Popen[str]:
        argv = [sys.executable, "-I", "-S", str(RUNNER), "--attempt-dir", str(self.attempt), "--topology", TOPOLOGY]
        argv += ["--ranks-per-node", "2", *options, "--", sys.executable, "-c", program]
        environment = {**os.environ, **(SLURM if slurm else {}), "PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen(argv, env=environment, stderr=subprocess.PIPE, text=True)
        return self.process

    def run(self, program: str, *options: str, slurm: bool = True) -> int:
        return self.start(program, *options, slurm=slurm).wait(180)

    def record(self, folder: str, rank: int = 5) -> dict[str, Any]:
        return json.loads((self.attempt / folder / f"rank-{rank:04d}.json").read_text())

    def said(self, rank: int = 5) -> list[str]:
        path = self.attempt / "logs" / f"rank-{rank:04d}.log"
        lines = path.read_bytes().decode().split("\n") if path.exists() else []
        matches = [STAMPED.fullmatch(line) for line in lines if line]
        assert all(matches), lines
        return [match[1] for match in matches if match]

    def wait_for(self, word: str, rank: int = 5) -> None:
        wait_until(lambda: word in self.said(rank))


@pytest.fixture
def runner(tmp_path: Path) -> Iterator[Runner]:
    runner = Runner(tmp_path / "run" / "attempts" / "0001")
    runner.attempt.mkdir(parents=True)
    yield runner
    if runner.process and runner.process.poll() is None:
        runner.process.kill()
        runner.process.wait()
    if runner.process and runner.process.stderr:
        runner.process.stderr.close()


def test_slurms_variables_become_those_of_torch(runner: Runner) -> None:
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "BSL_RUN_DIR", "BSL_ATTEMPT"]
    assert runner.run(f"import os; print([os.environ[name] for name in {names}])") == 0
    run_directory = str(runner.attempt.parent.parent)
    assert runner.said() == [str(["5", "1", "8", "2", "2", run_directory, "0001"])]


def test_records_say_who_runs_the_rank_and_how_it_ended(runner: Runner) -> None:
    assert runner.run("import os; print(os.getpid(), os.getpgid(0) == os.getpgid(os.getppid()))") == 0
    pid_record, exit_record = runner.record("pids"), runner.record("exits")
    assert runner.said() == [f"{pid_record['pid']} True"]
    assert runner.process is not None and pid_record["runner_pid"] == runner.process.pid
    assert pid_record["coordinate"] == {"pp": 1, "tp": 1, "dp": 0}
    assert (pid_record["node"], pid_record["job_id"], pid_record["local_rank"]) == ("n3", "42", 1)
    assert isinstance(pid_record["start_ticks"], int)
    assert (exit_record["code"], exit_record["signal"], exit_record["node"]) == (0, None, "n3")
    assert exit_record["time"] >= pid_record["started"]


def test_start_ticks_are_those_of_the_program(runner: Runner) -> None:
    runner.start("import time; print('up'); time.sleep(600)")
    runner.wait_for("up")
    record = runner.record("pids")
    stat = Path(f"/proc/{record['pid']}/stat").read_text()
    assert record["start_ticks"] == int(stat.rpartition(")")[2].split()[19])


def test_the_exit_code_is_the_programs(runner: Runner) -> None:
    assert runner.run("raise SystemExit(7)") == 7
    assert runner.record("exits")["code"] == 7


def test_a_killed_program_is_128_plus_signal(runner: Runner) -> None:
    assert runner.run("import os; os.kill(os.getpid(), 9)") == 137
    record = runner.record("exits")
    assert (record["code"], record["signal"]) == (None, "SIGKILL")


def test_abort_after_the_end_of_training_is_no_failure(runner: Runner) -> None:
    (runner.attempt / "events").mkdir()
    event = '{"kind": "end", "time": 1.0, "reason": "finished"}\\n'
    path = str(runner.attempt / "events" / "rank-0005.jsonl")
    assert runner.run(f"import os; open({path!r}, 'w').write('{event}'); os.abort()") == 0
    assert runner.record("exits")["clean_end"] is True


def test_abort_in_the_middle_of_training_is_one(runner: Runner) -> None:
    (runner.attempt / "events").mkdir()
    (runner.attempt / "events" / "rank-0005.jsonl").write_text('{"kind": "heartbeat", "phase": "step"}\n')
    assert runner.run("import os; os.abort()") == 128 + signal.SIGABRT
    assert runner.record("exits")["signal"] == "SIGABRT"


def test_every_line_has_its_time_and_nothing_is_lost(runner: Runner) -> None:
    program = "import sys; print('one'); sys.stderr.write('two\\n\\n50%\\r100%\\n'); sys.stdout.write('no newline')"
    assert runner.run(program) == 0
    assert runner.said() == ["one", "two", "", "50%\r100%", "no newline"]
    assert (runner.attempt / "logs" / "rank-0005.log").read_bytes().endswith(b"no newline\n")


def test_part_of_a_line_shows_before_the_hang_that_follows_it(runner: Runner) -> None:
    runner.start("import sys, time; sys.stdout.write('saving'); sys.stdout.flush(); time.sleep(600)")
    runner.wait_for("saving")


def test_bytes_that_are_no_text_are_kept(runner: Runner) -> None:
    assert runner.run("import sys; sys.stdout.buffer.write(b'\\xff\\x00\\xfe\\n')") == 0
    assert (runner.attempt / "logs" / "rank-0005.log").read_bytes().endswith(b"Z \xff\x00\xfe\n")


LISTENER = """
import signal, sys, time
signal.signal(signal.SIGUSR2, lambda *_: (print("asked to stop"), sys.exit(0)))
sys.stdout.write("up\\n")  # in one piece: the signal may come right after the first word
time.sleep(600)
"""


def test_the_warning_of_the_job_script_reaches_the_program_as_usr2(runner: Runner) -> None:
    runner.start(LISTENER)
    runner.wait_for("up")
    assert runner.process is not None
    runner.process.send_signal(signal.SIGURG)
    assert runner.process.wait(180) == 0
    assert runner.said() == ["up", "asked to stop"]


@pytest.mark.parametrize("name", ["TERM", pytest.param("INT", marks=pytest.mark.long), "USR1"])
@pytest.mark.parametrize("slurm", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_program_may_want_another_signal(runner: Runner, name: str, slurm: bool) -> None:
    rank = ["--rank", "5"] if not slurm else []
    runner.start(LISTENER.replace("SIGUSR2", f"SIG{name}"), *rank, "--stop-signal", name, slurm=slurm)
    runner.wait_for("up")
    assert runner.process is not None
    runner.process.send_signal(signal.SIGURG if slurm else signal.SIGUSR2)
    assert runner.process.wait(180) == 0
    assert runner.said() == ["up", "asked to stop"]
    assert runner.record("exits")["terminated"] is None, "nobody ended it"


def test_a_program_that_knows_no_usr1_survives_it(runner: Runner) -> None:
    runner.start("import time; print('up'); time.sleep(0.3); print('done')", "--stop-signal", "USR1")
    runner.wait_for("up")
    assert runner.process is not None
    runner.process.send_signal(signal.SIGURG)
    assert runner.process.wait(180) == 0
    assert runner.said() == ["up", "done"]


def test_a_program_that_knows_no_usr2_survives_it(runner: Runner) -> None:
    runner.start("import time; print('up'); time.sleep(0.3); print('done')")
    runner.wait_for("up")
    assert runner.process is not None
    runner.process.send_signal(signal.SIGURG)
    assert runner.process.wait(180) == 0
    assert runner.said() == ["up", "done"]


def test_termination_is_on_record_before_the_program_ends(runner: Runner) -> None:
    runner.start("import time; print('up'); time.sleep(600)", "--rank", "3", slurm=False)
    runner.wait_for("up", rank=3)
    assert runner.process is not None
    pid = runner.record("pids", 3)["pid"]
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: ") T " in Path(f"/proc/{pid}/stat").read_text())
    try:
        runner.process.terminate()
        wait_until(lambda: (runner.attempt / "exits" / "rank-0003.json").exists())
        record = runner.record("exits", 3)
        assert record["terminated"] is not None and record["code"] is None and record["signal"] is None
    finally:
        os.kill(pid, signal.SIGCONT)
    assert runner.process.wait(180) == 128 + signal.SIGTERM
    assert runner.record("exits", 3)["signal"] == "SIGTERM"


def test_local_ranks_are_given_and_slurms_variables_ignored(runner: Runner) -> None:
    program = "import os; print([os.environ[n] for n in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'NODE_RANK')])"
    assert runner.run(program, "--rank", "3") == 0
    assert runner.said(3) == [str(["3", "3", "8", "0"])]
    assert runner.record("pids", 3)["node"] == runner.record("pids", 3)["host"]


def test_a_local_rank_does_not_outlive_its_launcher(runner: Runner, tmp_path: Path) -> None:
    launcher = "import subprocess, sys, time; subprocess.Popen(sys.argv[1:]); time.sleep(600)"  # dies by SIGKILL below
    argv = [sys.executable, "-c", launcher, sys.executable, "-I", "-S", str(RUNNER), "--attempt-dir"]
    argv += [str(runner.attempt), "--topology", TOPOLOGY, "--ranks-per-node", "8", "--rank", "3", "--"]
    argv += [sys.executable, "-uc", "import time; print('up'); time.sleep(600)"]
    with subprocess.Popen(argv) as process:
        runner.wait_for("up", rank=3)
        process.kill()
    wait_until(lambda: (runner.attempt / "exits" / "rank-0003.json").exists())
    wait_until(lambda: runner.record("exits", 3)["signal"] == "SIGTERM")
    assert not Path(f"/proc/{runner.record('pids', 3)['pid']}").exists()


def test_a_program_that_cannot_be_started_is_said(runner: Runner) -> None:
    argv = [sys.executable, "-I", "-S", str(RUNNER), "--attempt-dir", str(runner.attempt), "--topology", TOPOLOGY]
    ended = subprocess.run([*argv, "--ranks-per-node", "2", "--", "/no/such/program"], env=SLURM, timeout=300)
    assert ended.returncode == 127
    assert "cannot start /no/such/program" in runner.said()[0]
    assert "No such file" in runner.record("exits")["error"]


def test_a_process_left_behind_does_not_hold_the_rank(runner: Runner) -> None:
    program = "import subprocess; print(subprocess.Popen(['sleep', '600']).pid)"
    assert runner.run(program) == 0
    [left_behind] = runner.said()
    os.kill(int(left_behind), signal.SIGKILL)


def test_records_that_cannot_be_written_do_not_end_the_program(runner: Runner) -> None:
    for folder in ("pids", "logs", "exits"):
        (runner.attempt / folder).write_text("a file where a directory should be")
    process = runner.start("print('x' * 100000)")
    assert process.wait(180) == 0
    assert process.stderr is not None
    assert process.stderr.read().count("cannot write") == 3


LIMITED = ("--log-limit-mib", "1")
MANY_LINES = "for number in range({}): print(f'{{number:06d}}', 'x' * 90)\n"


def log_of(runner: Runner) -> Path:
    return runner.attempt / "logs" / "rank-0005.log"


def test_a_log_keeps_its_beginning_and_its_last_words(runner: Runner) -> None:
    assert runner.run(MANY_LINES.format(50000) + "raise SystemExit('last words')", *LIMITED) == 1
    said = runner.said()
    assert log_of(runner).stat().st_size < 2**20 + 2**16 + 512
    assert (said[0][:6], said[-1]) == ("000000", "last words")
    [at] = [at for at, text in enumerate(said) if "run.log_limit_mib" in text]
    assert said[at - 1][:6] == f"{at - 1:06d}", "the beginning is whole"
    dropped = re.fullmatch(r"rank_runner: (\d+) bytes .*", said[at + 1])
    kept = [int(text[:6]) for text in said[at + 2 : -1]]
    assert dropped is not None and kept == list(range(kept[0], 50000)), "the end is whole"
    assert int(dropped[1]) == (kept[0] - at) * len(f"2026-11-21T01:02:03.123456Z 000000 {'x' * 90}\n")


def test_the_last_words_before_a_hang_are_in_a_log_that_is_full(runner: Runner) -> None:
    runner.start(MANY_LINES.format(20000) + "print('now it hangs', flush=True); import time; time.sleep(600)", *LIMITED)
    runner.wait_for("now it hangs")
    assert runner.process is not None
    runner.process.kill()
    runner.process.wait()
    assert runner.said()[-1] == "now it hangs"


def test_a_log_that_is_full_still_shows_that_the_rank_prints(runner: Runner) -> None:
    slow = "import time\nfor number in range(600): print('slow', number, flush=True); time.sleep(0.1)"
    runner.start(MANY_LINES.format(20000) + slow, *LIMITED)
    runner.wait_for("slow 0")
    before = log_of(runner).stat()
    wait_until(lambda: log_of(runner).stat().st_mtime > before.st_mtime)
    assert log_of(runner).stat().st_size == before.st_size, "who reads on from its end sees no line twice"


def test_a_log_without_line_breaks_is_limited_too(runner: Runner) -> None:
    assert runner.run("import sys; sys.stdout.write('x' * 3_000_000)", *LIMITED) == 0
    assert 2**20 <= log_of(runner).stat().st_size < 2**20 + 2**16 + 512


def test_a_log_without_a_limit_has_everything(runner: Runner) -> None:
    assert runner.run(MANY_LINES.format(20000)) == 0
    assert len(runner.said()) == 20000
