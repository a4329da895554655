"""`bsl submit --local`: real processes on this machine, without Slurm."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

import bigsci_launch
from bigsci_launch.demo.folder import end_run
from bigsci_launch.runs.layout import RunDir
from bigsci_launch.scheduler import local as local_launcher
from bigsci_launch.scheduler.local import is_free, reserved_port, split_command
from tests.support.command import run_bsl
from tests.support.texts import has_parts
from tests.support.waiting import wait_until

from ..unit.other_users import AS_ROOT, MALLORY, PROJECT, acting_as

MODEL = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "sequence_length": 8, "vocab_size": 64}
PRELUDE = "import json, os, signal, sys, time\nRANK = int(os.environ['RANK'])\n"
WAIT = "print('up', flush=True)\ntime.sleep(600)\n"


class Local:
    """A run of 4 local ranks, started as by a user."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.directory = folder / "runs" / "run"
        self.attempt = self.directory / "attempts" / "0001"
        self.process: subprocess.Popen[str] | None = None

    def write(self, program: str, *, ranks: int = 4, **more: Any) -> None:
        config = {
            "run": {"name": "run", "command": [sys.executable, "-c", PRELUDE + program]},
            "slurm": {"site": "local"},
            "parallelism": {"tensor_parallel_size": 2, "data_parallel_size": ranks // 2},
            "model": MODEL,
            "training": {"steps": 10, "micro_batch_size": 1, "global_batch_size": ranks},
            "data": {"prefix": "none"},
            **more,
        }
        (self.folder / "run.yaml").write_text(json.dumps(config))

    def argv(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "bigsci_launch", *words]

    def bsl(self, *words: str, rc: int = 0) -> subprocess.CompletedProcess[str]:
        return run_bsl(self.folder, *words, rc=rc)

    def submit(self, *words: str, rc: int = 0) -> subprocess.CompletedProcess[str]:
        return self.bsl("submit", "run.yaml", *words, rc=rc)

    def start(self, *words: str) -> subprocess.Popen[str]:
        """Submit in the foreground and return while it runs."""
        self.process = subprocess.Popen(
            self.argv("submit", "run.yaml", *words),
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        return self.process

    def log(self, rank: int) -> str:
        path = self.attempt / "logs" / f"rank-{rank:04d}.log"
        return path.read_text() if path.exists() else ""

    def exit(self) -> dict[str, Any]:
        return json.loads((self.attempt / "exit.json").read_text())

    def pids(self) -> list[int]:
        return [json.loads(path.read_text())["pid"] for path in sorted((self.attempt / "pids").glob("*.json"))]

    def launcher(self) -> int:
        return json.loads((self.attempt / "job.json").read_text())["launcher"]["pid"]

    def wait_for_ranks(self, num: int = 4) -> None:
        wait_until(lambda: all("up\n" in self.log(rank) for rank in range(num)))

    def wait_for_silence(self) -> None:
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in self.pids()))


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Local]:
    with local_in(tmp_path) as local:
        yield local


@pytest.fixture(scope="module", autouse=True)
def deaf(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Local]:
    """A run whose ranks ignore TERM, after one of them has died. Its grace passes while other tests run."""
    ignore = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nif RANK == 1: time.sleep(0.5); os.kill(os.getpid(), 9)\n"
    with local_in(tmp_path_factory.mktemp("deaf")) as local:
        local.write(ignore + WAIT)
        local.submit("--detach")
        yield local


@contextlib.contextmanager
def local_in(folder: Path) -> Iterator[Local]:
    local = Local(folder)
    yield local
    if local.process is not None:
        local.process.kill()
        local.process.communicate()
    for pid in [local.launcher()] if (local.attempt / "job.json").exists() else []:
        if b"scheduler.local" in (Path(f"/proc/{pid}/cmdline").read_bytes() if Path(f"/proc/{pid}").exists() else b""):
            os.kill(pid, signal.SIGTERM)
            wait_until(lambda pid=pid: not Path(f"/proc/{pid}").exists())


def test_ranks_find_each_other_and_the_answer_is_the_pid_alone(local: Local) -> None:
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR"]
    local.write(f"print(*(os.environ[n] for n in {names}), os.environ['GREETING'], flush=True)", env=GREETING)
    done = local.submit()
    assert done.stdout == f"{local.launcher()}\n"
    for rank in range(4):
        assert local.log(rank).rstrip("\n").endswith(f" {rank} {rank} 4 4 0 127.0.0.1 it's $HOME")
    assert "2 2 4 4 0 127.0.0.1" not in done.stderr, "only the rank that reports steps is shown"
    assert "0 0 4 4 0 127.0.0.1 it's $HOME" in done.stderr
    assert (local.exit()["reason"], local.exit()["exit_code"], local.exit()["num_started"]) == ("finished", 0, 4)
    assert json.loads(local.bsl("status", "--json").stdout)["job"]["state"] == "COMPLETED"
    assert "(tp=2,pp=1,dp=2)" in local.bsl("status", "run").stdout


GREETING = {"GREETING": {"value": "it's $HOME", "reason": "a test"}}


@AS_ROOT
def test_nothing_of_a_colleague_runs_at_the_end_of_an_attempt_whose_run_they_exchange() -> None:
    """The root of the runs is loosened while the ranks run: before that, nobody can rename anything in it."""
    with TemporaryDirectory(prefix="bsl-test-", dir="/tmp") as folder:
        local, root, mark = Local(Path(folder)), Path(folder) / "runs", Path(folder) / "mark"
        local.folder.chmod(0o711)
        root.mkdir()
        os.chown(root, 0, PROJECT)
        local.write(WAIT, ranks=2)
        root.chmod(0o2775)
        assert f"`chmod +t {root}`" in local.submit("--detach", rc=2).stderr
        root.chmod(0o3775)
        local.submit("--detach")
        local.wait_for_ranks(2)
        launcher, away = local.launcher(), root / "away"
        root.chmod(0o2775)
        with acting_as(MALLORY):
            local.directory.rename(away)
            (local.attempt / "tools").mkdir(parents=True)
            (local.attempt / "tools" / "bsl-job.pyz").write_text(f"open({str(mark)!r}, 'w')")
        os.kill(launcher, signal.SIGTERM)
        wait_until(lambda: not Path(f"/proc/{launcher}").exists())
        output = (away / "attempts" / "0001" / "job.out").read_text()
        assert not mark.exists(), "it ran as the owner of the run"
        assert has_parts(output, "exit.json", local.directory)


def test_everything_is_frozen_in_the_attempt(local: Local) -> None:
    local.write("pass")
    local.submit("--set", "training.steps=7")
    names = {path.name for path in local.attempt.iterdir()}
    assert names >= {"config.yaml", "origins.json", "provenance.json", "script.sh", "job.json", "job.out", "exit.json"}
    assert json.loads((local.attempt / "origins.json").read_text())["training.steps"] == "--set"
    assert (local.attempt / "tools" / "rank_runner.py").is_file()
    provenance = json.loads((local.attempt / "provenance.json").read_text())
    assert stat.S_IMODE((local.attempt / "provenance.json").stat().st_mode) == 0o640, "it is not for everybody"
    assert provenance["command"][1:] == ["submit", "run.yaml", "--set", "training.steps=7"]
    assert provenance["packages"]["click"]
    assert json.loads((local.directory / "run.json").read_text())["topology"] == {"tp": 2, "pp": 1, "dp": 2}


def test_what_is_installed_runs_whatever_the_current_directory_has(local: Local) -> None:
    (local.folder / "random.py").write_text("raise SystemExit('not the random')")
    (local.folder / "bigsci_launch").mkdir()
    (local.folder / "bigsci_launch" / "__init__.py").write_text("raise SystemExit('not the one that is installed')")
    local.write("", ranks=2)
    config = json.loads((local.folder / "run.yaml").read_text())
    del config["run"]["command"]
    for suffix in (".bin", ".idx"):
        (local.folder / f"none{suffix}").write_text("not a dataset")
    (local.folder / "run.yaml").write_text(json.dumps(config))
    bsl = [str(Path(sys.executable).with_name("bsl")), "submit", "run.yaml"]
    done = subprocess.run(bsl, cwd=local.folder, capture_output=True, text=True, timeout=300, check=False)
    assert "none.idx: " in local.exit()["first_failure"]["error"], done.stderr
    assert "not the" not in local.log(0) + local.log(1) + done.stderr
    provenance = json.loads((local.attempt / "provenance.json").read_text())
    start = json.loads((local.attempt / "events" / "rank-0001.jsonl").read_text().splitlines()[0])
    assert provenance["bigsci_launch_file"] == start["bigsci_launch_file"] == bigsci_launch.__file__

    (local.folder / "mine.py").write_text("import random")
    config["run"] |= {"name": "own", "command": [sys.executable, "-m", "mine"]}
    (local.folder / "run.yaml").write_text(json.dumps(config))
    subprocess.run(bsl, cwd=local.folder, capture_output=True, timeout=300, check=False)
    output = (local.folder / "runs" / "own" / "attempts" / "0001" / "logs" / "rank-0000.log").read_text()
    assert "not the random" in output, "a program of one's own is found where Python looks for it"


def test_a_rank_that_leaves_before_the_others_is_named(local: Local) -> None:
    local.write(f"if RANK == 2: sys.exit(0)\n{WAIT}")
    done = local.submit("--set", "slurm.wait_s=2", rc=1)
    failure = local.exit()["first_failure"]
    assert (local.exit()["reason"], failure["rank"], failure["code"]) == ("left_early", 2, 0)
    assert has_parts(done.stderr, "left_early", "rank 2 (dp1 pp0 tp0)")
    local.wait_for_silence()


@pytest.mark.long
@pytest.mark.torch
def test_a_rank_that_does_not_come_to_a_collective_of_gloo_is_named(local: Local) -> None:
    local.write(
        "import datetime, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo', timeout=datetime.timedelta(seconds=8))\n"
        "dist.all_reduce(torch.ones(1))\n"
        "if RANK == 2: time.sleep(600)\n"
        "dist.all_reduce(torch.ones(1))\n"
    )
    local.submit(rc=1)
    found = local.exit()
    assert (found["reason"], [suspect["rank"] for suspect in found["suspects"]]) == ("hang", [2]), local.log(0)
    assert {each["backend"] for each in found["collectives"]} == {"gloo"}


def test_the_exit_code_is_that_of_the_first_rank_that_failed(local: Local) -> None:
    local.write(f"if RANK == 2: time.sleep(0.5); print('KeyError: 7'); sys.exit(41)\n{WAIT}")
    done = local.submit(rc=41)
    failure = local.exit()["first_failure"]
    assert (failure["rank"], failure["code"], failure["error"]) == (2, 41, "KeyError: 7")
    assert "first failure: rank 2 (dp1 pp0 tp0)" in done.stderr
    local.wait_for_silence()


@pytest.mark.parametrize(
    "number",
    [signal.SIGINT, *(pytest.param(number, marks=pytest.mark.long) for number in (signal.SIGTERM, signal.SIGHUP))],
)
def test_ctrl_c_ends_everything_cleanly(local: Local, number: signal.Signals) -> None:
    local.write("signal.signal(signal.SIGTERM, lambda *_: (print('saving'), sys.exit(0)))\n" + WAIT)
    process = local.start()
    local.wait_for_ranks()
    process.send_signal(number)
    assert process.wait(180) == 130
    assert local.exit()["reason"] == "cancelled"
    assert all("saving" in local.log(rank) for rank in range(4))
    local.wait_for_silence()


def test_a_second_ctrl_c_kills(local: Local) -> None:
    local.write("signal.signal(signal.SIGTERM, lambda *_: print('never', flush=True))\n" + WAIT)
    process = local.start()
    local.wait_for_ranks()
    process.send_signal(signal.SIGINT)
    wait_until(lambda: all("never" in local.log(rank) for rank in range(4)))
    process.send_signal(signal.SIGINT)
    assert process.wait(180) == 130
    local.wait_for_silence()


def test_a_detached_run_is_seen_refused_twice_and_cancelled(local: Local) -> None:
    local.write(WAIT)
    pid = int(local.submit("--detach").stdout)
    local.wait_for_ranks()
    status = json.loads(local.bsl("status", "--json").stdout)
    assert (status["job"]["state"], status["pid"], status["num_ranks_started"]) == ("RUNNING", pid, 4)
    refused = local.submit("--detach", rc=2)
    assert "attempt 0001" in refused.stderr and "is RUNNING" in refused.stderr
    local.bsl("cancel", "run")
    wait_until(lambda: (local.attempt / "exit.json").exists())
    wait_until(lambda: json.loads(local.bsl("status", "--json").stdout)["job"]["state"] == "CANCELLED")
    assert local.exit()["exit_code"] == 143
    said = local.bsl("spy", "run", "--json").stdout
    assert json.loads(said)["kind"] == "cancelled" and said == local.bsl("why", "run", "--json").stdout
    assert local.bsl("spy", "run").stdout == local.bsl("why", "run").stdout
    assert "--html" in local.bsl("spy", "run", "--html", "page.html", rc=2).stderr
    local.wait_for_silence()


def test_ranks_end_with_a_launcher_that_was_killed(local: Local) -> None:
    local.write(WAIT)
    local.submit("--detach")
    local.wait_for_ranks()
    os.kill(local.launcher(), signal.SIGKILL)
    local.wait_for_silence()
    job = json.loads(local.bsl("status", "--json").stdout)["job"]
    assert job["state"] == "UNKNOWN" and "killed" in job["reason"]
    assert "\nnext: bsl submit" in local.bsl("status").stdout


def test_usr2_to_the_launcher_asks_ranks_to_stop(local: Local) -> None:
    local.write("signal.signal(signal.SIGUSR2, lambda *_: sys.exit(0))\n" + WAIT)
    local.submit("--detach")
    local.wait_for_ranks()
    os.kill(local.launcher(), signal.SIGUSR2)
    wait_until(lambda: (local.attempt / "exit.json").exists())
    assert (local.exit()["reason"], local.exit()["exit_code"]) == ("stopped", 0)


def test_a_second_attempt_of_the_same_run_and_another_layout(local: Local) -> None:
    local.write("pass")
    local.submit()
    local.submit("--set", "training.steps=20")
    assert sorted(path.name for path in (local.directory / "attempts").iterdir()) == ["0001", "0002"]
    refused = local.submit("--set", "parallelism.data_parallel_size=1", rc=2)
    assert "topology.dp: 2 -> 1" in refused.stderr and "another run.name" in refused.stderr


def test_logs_follow_until_the_end(local: Local) -> None:
    local.write("for i in range(5): print('iteration', i, flush=True); time.sleep(0.2)")
    local.submit("--detach")
    lines = local.bsl("logs", "run", "-f", "--grep", "iteration").stdout.splitlines()
    assert len(lines) == 20
    assert lines == sorted(lines, key=lambda line: line[:18])


def test_json_waits_and_answers_once(local: Local) -> None:
    local.write("sys.exit(3 if RANK == 0 else 0)")
    document = json.loads(local.submit("--json", rc=3).stdout)
    assert (document["scheduler"], document["job_id"], document["exit"]["exit_code"]) == ("local", None, 3)


def test_ports_are_below_the_ephemeral_range_and_never_shared() -> None:
    with reserved_port() as first, reserved_port() as second:
        assert first != second
        assert all(10000 <= port < 30000 and is_free(port) for port in (first, second))
        with socket.socket() as server:
            # As servers do, so that a connection of an earlier server that is still closing does not block the port.
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(("127.0.0.1", first))
            server.listen()
            assert not is_free(first)


def test_names_that_a_stranger_holds_keep_nobody_from_a_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """Abstract sockets have no owner: anybody may hold all the names that launchers use."""
    monkeypatch.setattr(local_launcher, "NUM_PORTS", 20)
    with contextlib.ExitStack() as held:
        for port in range(local_launcher.FIRST_PORT, local_launcher.FIRST_PORT + 20):
            name = held.enter_context(socket.socket(socket.AF_UNIX))
            with contextlib.suppress(OSError):
                name.bind(f"\0bsl-port-{port}")
        with reserved_port() as port:
            assert is_free(port)


def test_the_runner_gets_its_rank_before_the_program() -> None:
    assert split_command(["python", "runner.py", "--", "prog", "--", "x"]) == (
        ["python", "runner.py"],
        ["--", "prog", "--", "x"],
    )


def test_a_cancelled_run_leaves_no_process_of_its_programs(local: Local) -> None:
    """TERM ends a shell at once, but not the command that it runs, nor what has left its session."""
    local.write("")
    config = json.loads((local.folder / "run.yaml").read_text())
    script = "setsid sleep 271828 & bash -c 'trap \"\" TERM; sleep 314159' & echo up; sleep 161803; true"
    config["run"]["command"] = ["bash", "-c", script]
    (local.folder / "run.yaml").write_text(json.dumps(config))
    local.submit("--detach")
    local.wait_for_ranks()
    begun = {pid for number in ("271828", "314159", "161803") for pid in processes_with(number)}
    assert len(begun) >= 12
    local.bsl("cancel", str(local.directory))
    wait_until(lambda: (local.attempt / "exit.json").exists())
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in begun), timeout_s=3)
    assert local.exit()["reason"] == "cancelled"


def processes_with(word: str) -> list[int]:
    """Return the processes that have a word of their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if word in path.read_text():
                found.append(int(path.parent.name))
    return found


def test_the_next_demonstration_ends_what_a_killed_one_has_left(local: Local) -> None:
    local.write("signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + WAIT)
    local.submit("--detach")
    local.wait_for_ranks()
    assert local.pids()
    end_run(RunDir(local.directory))
    local.wait_for_silence()
    assert local.exit()["reason"] == "cancelled"
    end_run(RunDir(local.directory))


def test_ranks_that_ignore_term_are_killed_after_a_grace(deaf: Local) -> None:
    wait_until(lambda: (deaf.attempt / "exit.json").exists() and deaf.exit()["exit_code"] is not None)
    found = deaf.exit()
    assert (found["reason"], found["first_failure"]["signal"], found["exit_code"]) == ("crashed", "SIGKILL", 137)
    deaf.wait_for_silence()
