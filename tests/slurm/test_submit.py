"""A run on a real Slurm with four nodes: submitted, watched, stopped, crashed, cancelled, restarted."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bigsci_launch.scheduler.hostlist import expand_hostlist
from tests.support.command import run_bsl
from tests.support.texts import has_parts
from tests.support.waiting import wait_until

from ..unit.other_users import MALLORY, PROJECT, acting_as

pytestmark = pytest.mark.slurm
PROGRAM = Path(__file__).parent / "programs" / "rank.py"
MODEL = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "sequence_length": 8, "vocab_size": 64}


@dataclass
class Run:
    """A run file whose ranks execute programs/rank.py, and what `bsl` reports about the run."""

    cluster: Any
    folder: Path
    config: Path
    directory: Path

    def bsl(self, *argv: str, rc: int = 0, timeout_s: float = 300) -> str:
        done = run_bsl(self.folder, *argv, rc=rc, environment=self.cluster.environment(), timeout_s=timeout_s)
        self.stderr = done.stderr
        return done.stdout

    def submit(self, *argv: str, rc: int = 0) -> str:
        return self.bsl("submit", str(self.config), *argv, rc=rc).strip()

    def status(self) -> dict[str, Any]:
        return json.loads(self.bsl("status", str(self.directory), "--json"))

    def exit(self, attempt: str = "0001") -> dict[str, Any]:
        return json.loads((self.directory / "attempts" / attempt / "exit.json").read_text())

    def nodes(self) -> list[str]:
        """Return the nodes that Slurm gave to it, in the order of its ranks."""
        given = self.cluster.run("scontrol", "show", "job", self.exit()["job_id"]).stdout
        return expand_hostlist(re.search(r"\bNodeList=(\S+)", given)[1])  # type: ignore[index]

    def output(self) -> str:
        return (self.directory / "attempts" / "0001" / "job.out").read_text()

    def log(self, rank: int, attempt: str = "0001") -> str:
        path = self.directory / "attempts" / attempt / "logs" / f"rank-{rank:04d}.log"
        return path.read_text() if path.exists() else ""

    def wait_for(self, is_so: Callable[[], bool], timeout_s: float = 300) -> None:
        wait_until(is_so, timeout_s, evidence=lambda: (self.bsl("status", str(self.directory)), self.output()))

    def wait_for_state(self, *states: str, timeout_s: float = 300) -> dict[str, Any]:
        """Wait for a state of the newest attempt with squeue, which is quick; return all that `bsl status` knows."""
        newest = max((self.directory / "attempts").glob("*/job.json"))
        job_id = json.loads(newest.read_text())["job_id"]
        argv = ["squeue", "-h", "-t", "all", "-j", job_id, "-o", "%T"]
        self.wait_for(lambda: self.cluster.run(*argv).stdout.strip() in states, timeout_s)
        status = self.status()
        assert status["job"]["state"] in states
        return status

    def wait_for_ranks(self, attempt: str = "0001", num: int = 4) -> None:
        self.wait_for(lambda: all("iteration 1\n" in self.log(rank, attempt) for rank in range(num)))


def write_run(cluster: Any, folder: Path, *words: str, name: str, nodes: int = 2, root: str = "runs") -> Run:
    """Write a run of `nodes` x 2 ranks in `folder`; each rank executes programs/rank.py with `words`."""
    config = {
        "run": {"name": name, "root": root, "command": [sys.executable, str(PROGRAM), *words]},
        "slurm": {"site": "minicluster", "nodes": nodes, "time_limit": "00:10:00"},
        "parallelism": {"tensor_parallel_size": 2},
        "model": MODEL,
        "training": {"steps": 10, "micro_batch_size": 1, "global_batch_size": nodes},
        "monitor": {"step_time_s": 1, "save_time_s": 1},
        "data": {"prefix": "none"},
    }
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps(config))
    return Run(cluster, folder, path, (folder / root / name).resolve())


@pytest.fixture
def make_run(isolated_cluster: Any, tmp_path: Path) -> Callable[..., Run]:
    def make(*words: str, nodes: int = 2, root: str = "runs", cluster: Any = None) -> Run:
        return write_run(cluster or isolated_cluster, tmp_path, *words, name="run", nodes=nodes, root=root)

    return make


MakeRun = Callable[..., Run]


def first_failure(document: dict[str, Any]) -> tuple[Any, ...]:
    failure = document["first_failure"]
    return failure["rank"], failure["node"], failure["signal"], failure["code"]


def test_a_run_from_submission_to_its_end(make_run: MakeRun) -> None:
    run = make_run("steps=5", nodes=4)
    job_id = run.submit()
    assert job_id.isdigit()
    status = run.wait_for_state("COMPLETED")
    assert (status["job"]["source"], status["job"]["hostlist"]) == ("squeue", "n[0-3]")
    assert (run.exit()["reason"], run.exit()["exit_code"], run.exit()["job_id"]) == ("finished", 0, job_id)
    places = [json.loads(run.log(rank).split("up ", 1)[1].splitlines()[0]) for rank in range(8)]
    assert [(p["RANK"], p["LOCAL_RANK"], p["NODE_RANK"], p["host"]) for p in places] == [
        (str(rank), str(rank % 2), str(rank // 2), f"n{rank // 2}") for rank in range(8)
    ]
    assert {(p["WORLD_SIZE"], p["LOCAL_WORLD_SIZE"], p["MASTER_ADDR"]) for p in places} == {("8", "2", "n0")}
    assert {p["MASTER_PORT"] for p in places} == {str(10000 + int(job_id))}
    assert {p["cwd"] for p in places} == {str(run.folder)}
    output = run.output()
    assert f"bsl: rendezvous at n0:{10000 + int(job_id)}" in output and "instead of" not in output
    assert has_parts(output, f" job={job_id} restart=0 nodes=n[0-3]", f" job={job_id} restart=0 exit_code=0")

    assert json.loads(run.bsl("status", "--jobid", job_id, "--json"))["run"]["directory"] == str(run.directory)
    logs = run.bsl("logs", str(run.directory), "--rank", "0,5", "--grep", "iteration [45]$").splitlines()
    assert sorted(line.split(" ", 2)[2] for line in logs) == [
        "[n0 rank 0 dp0 pp0 tp0] iteration 4",
        "[n0 rank 0 dp0 pp0 tp0] iteration 5",
        "[n2 rank 5 dp2 pp0 tp1] iteration 4",
        "[n2 rank 5 dp2 pp0 tp1] iteration 5",
    ]
    assert {
        line.split("[")[1].split()[0] for line in run.bsl("logs", str(run.directory), "--node", "n3").splitlines()
    } == {"n3"}
    [listed] = json.loads(run.bsl("list", "--json"))["runs"]
    assert (listed["name"], listed["state"], listed["job"]) == ("run", "COMPLETED", f"job {job_id}")


@pytest.mark.usefixtures("warned")
def test_a_killed_rank_makes_the_job_fail_and_is_named(make_run: MakeRun) -> None:
    run = make_run("die=2")
    job_id = run.submit()
    status = run.wait_for_state("FAILED")
    assert (status["job"]["state"], status["job"]["source"]) == ("FAILED", "squeue")
    assert (run.exit()["reason"], run.exit()["exit_code"], run.exit()["failed_ranks"]) == ("crashed", 137, [2])
    node = run.nodes()[1]
    assert first_failure(run.exit()) == (2, node, "SIGKILL", None)
    text = run.bsl("status", "--jobid", job_id)
    assert has_parts(text, f"rank 2 (dp1 pp0 tp0) on {node}: SIGKILL", "bsl logs run --rank 2")


def test_an_exit_code_and_the_last_words_are_kept(make_run: MakeRun) -> None:
    run = make_run("die=3:41", "ignore-term")
    run.submit()
    run.wait_for_state("FAILED")
    assert run.cluster.run("scontrol", "show", "job", run.exit()["job_id"]).stdout.count("ExitCode=41:0") == 1
    assert first_failure(run.exit()) == (3, run.nodes()[1], None, 41)
    assert run.exit()["first_failure"]["error"].startswith("ValueError: ")


@pytest.fixture(scope="module")
def warned(isolated_cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that waits for Slurm's own clock, next to other tests."""
    run = write_run(
        isolated_cluster, tmp_path_factory.mktemp("warned"), "stop-on-usr2", "helper", name="warned", nodes=1
    )
    run.submit("--set", "slurm.time_limit=00:02:00", "--set", "monitor.exit_margin_s=112")
    return run


def test_cancel_and_submit_again(make_run: MakeRun) -> None:
    run = make_run()
    job_id = run.submit()
    run.wait_for_ranks()
    run.submit(rc=2)
    assert f"attempt 0001 (job {job_id}) is RUNNING" in run.stderr and "bsl cancel" in run.stderr
    assert f"job {job_id}: cancel requested" in run.bsl("cancel", str(run.directory))
    run.wait_for_state("CANCELLED")
    assert (run.exit()["reason"], run.exit()["first_failure"]) == ("cancelled", None)
    assert run.exit()["exit_code"] not in (0, None)
    run.bsl("cancel", str(run.directory), rc=2)
    second = run.submit()
    assert int(second) > int(job_id)
    assert run.status()["attempt"]["name"] == "0002"
    run.bsl("cancel", str(run.directory))
    run.wait_for_state("CANCELLED")


def test_ranks_that_do_not_end_are_killed_and_the_reason_is_known_already(make_run: MakeRun) -> None:
    run = make_run("ignore-term")
    run.submit()
    run.wait_for_ranks()
    run.bsl("cancel", str(run.directory))
    run.wait_for_state("CANCELLED")
    assert run.exit()["reason"] == "cancelled"
    assert "TERM" in run.log(3)


def test_a_hostile_run_directory(make_run: MakeRun) -> None:
    run = make_run("steps=1", nodes=1, root='we ird\'s "q" $HOME `id` #x 100%j;%% ünï&|')
    job_id = run.submit()
    run.wait_for_state("COMPLETED")
    assert run.exit()["reason"] == "finished"
    assert json.loads(run.bsl("status", "--jobid", job_id, "--json"))["run"]["directory"] == str(run.directory)
    assert "bsl: end" in run.output()


def test_nothing_of_a_colleague_runs_at_the_end_of_a_job_whose_run_they_exchange(
    isolated_cluster: Any, short_tmp_path: Path
) -> None:
    short_tmp_path.chmod(0o711)
    run = write_run(isolated_cluster, short_tmp_path, name="shared", nodes=1)
    root, away, mark = run.directory.parent, run.directory.with_name("away"), short_tmp_path / "mark"
    root.mkdir()
    os.chown(root, 0, PROJECT)
    root.chmod(0o3775)
    job_id = run.submit()
    run.wait_for_ranks(num=2)
    root.chmod(0o2775)
    with acting_as(MALLORY):
        run.directory.rename(away)
        (run.directory / "attempts" / "0001" / "tools").mkdir(parents=True)
        (run.directory / "attempts" / "0001" / "tools" / "bsl-job.pyz").write_text(f"open({str(mark)!r}, 'w')")
    isolated_cluster.run("scancel", job_id)
    output = away / "attempts" / "0001" / "job.out"
    run.wait_for(lambda: "bsl: end attempt=0001" in output.read_text())
    assert not mark.exists(), "it ran as the owner of the run"
    assert any(has_parts(line, "exit.json", run.directory) for line in output.read_text().splitlines())


def test_a_refused_submission_leaves_nothing(make_run: MakeRun) -> None:
    run = make_run()
    run.submit("--set", "slurm.constraint=no-such-feature", rc=3)
    assert has_parts(run.stderr, "error: sbatch: ", "feature")
    assert not run.directory.exists()


def test_a_submission_from_inside_a_job(make_run: MakeRun, isolated_cluster: Any) -> None:
    run = make_run("steps=1")
    argv = ["srun", "-N1", "-n1", "--job-name=outer", "--chdir", str(run.folder), sys.executable, "-m", "bigsci_launch"]
    inner = isolated_cluster.run(*argv, "submit", str(run.config))
    assert inner.returncode == 0, inner.stderr
    run.wait_for_state("COMPLETED")
    assert (run.exit()["job_id"], run.exit()["world_size"], run.exit()["num_started"]) == (inner.stdout.strip(), 4, 4)


def test_a_job_that_bsl_did_not_submit(isolated_cluster: Any) -> None:
    job_id = isolated_cluster.run("sbatch", "--parsable", "-N1", "-o", "/dev/null", "--wrap", "sleep 60").stdout.strip()
    try:
        document = json.loads(isolated_cluster.bsl("status", "--jobid", job_id, "--json").stdout)
        assert document["run"] is None and document["job"]["job_id"] == job_id
        assert job_id in isolated_cluster.bsl("status", "--jobid", job_id).stdout
        unknown = isolated_cluster.bsl("status", "--jobid", "999999")
        assert unknown.returncode == 3 and "job 999999" in unknown.stderr
    finally:
        isolated_cluster.run("scancel", job_id)


def test_a_program_that_does_not_exist(make_run: MakeRun) -> None:
    run = make_run()
    run.submit("--set", "run.command=[/no/such/program]", "--wait", rc=127)
    shown = [line for line in run.stderr.splitlines() if line.startswith(("ended: ", "first failure: ", "next: "))]
    assert has_parts(shown[0], "crashed", 127) and "bsl logs run --rank " in shown[2]
    assert shown[1].startswith("first failure: rank ") and "cannot start /no/such/program" in shown[1]
    assert "cannot start /no/such/program" in run.exit()["first_failure"]["error"]


def test_ranks_are_told_before_the_time_limit_and_their_helpers_live(warned: Run) -> None:
    status = warned.wait_for_state("COMPLETED")
    assert (warned.exit()["reason"], warned.exit()["exit_code"]) == ("stopped", 0)
    assert "time limit" in warned.output()
    assert [warned.log(rank).splitlines()[-1].split("Z ")[1].strip() for rank in range(2)] == ["asked to stop"] * 2
    assert status["exit"]["first_failure"] is None


@pytest.mark.long
def test_the_time_limit_itself(make_run: MakeRun) -> None:
    run = make_run(nodes=1)
    job_id = run.submit("--set", "slurm.time_limit=00:02:00", "--set", "monitor.exit_margin_s=118")
    run.wait_for_ranks(num=2)
    run.wait_for(lambda: "time limit" in run.output())
    done = run.cluster.run("scontrol", "update", f"JobId={job_id}", "EndTime=now+5")
    assert done.returncode == 0, done.stderr
    run.wait_for_state("TIMEOUT")
    assert (run.exit()["reason"], run.exit()["slurm_reason"]) == ("time_limit", "TimeLimit")
    assert run.exit()["exit_code"] not in (0, None)
    [told] = run.exit()["evidence"]
    seconds = re.search(r"(\d+) s ", told)
    assert seconds is not None and int(seconds[1]) <= 90, told


# tests/slurm/test_nodes.py waits for the end of such runs.
@pytest.mark.long
def test_a_killed_node_is_noticed(make_run: MakeRun, make_cluster: Callable[..., Any]) -> None:
    cluster = make_cluster(nodes=2)
    run = make_run("ignore-term", cluster=cluster)
    run.submit()
    run.wait_for_ranks()
    killed = cluster.bsl("cluster", "kill-node", "n1")
    assert killed.returncode == 0, killed.stderr
    run.wait_for(lambda: [node["name"] for node in run.status()["unreachable_nodes"]] == ["n1"])
    assert "n1 does not respond" in run.bsl("status", str(run.directory))
