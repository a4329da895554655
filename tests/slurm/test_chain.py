"""A run that carries itself, on a real Slurm: it stops without progress, leaves nothing behind, and can be ended."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bigsci_launch.minicluster.settings import parse_version
from bigsci_launch.scheduler.hostlist import expand_hostlist
from tests.support.texts import has_parts

from .conftest import MakeCluster, SlurmCluster
from .test_submit import PROGRAM, Run, write_run

pytestmark = pytest.mark.slurm
STUCK = Path(__file__).parent / "programs" / "stuck.py"
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
QUEUE = ("--set", "slurm.chain.by=queue")


def submit(run: Run, *words: str, program: Path = STUCK, options: tuple[str, ...] = QUEUE) -> str:
    """Submit a run of two ranks that execute `program`, in the partition for jobs that may be preempted."""
    command = json.dumps([sys.executable, str(program), *words])
    return run.submit("--set", f"run.command={command}", "--set", "slurm.partition=preemptible", *options)


@pytest.fixture
def make_run(isolated_cluster: SlurmCluster, tmp_path: Path) -> Callable[..., Run]:
    def make(name: str, nodes: int = 1) -> Run:
        return write_run(isolated_cluster, tmp_path, name=name, nodes=nodes)

    return make


def decision(run: Run, attempt: str) -> dict[str, Any]:
    path = run.directory / "attempts" / attempt / "next.json"
    return json.loads(path.read_text()) if path.exists() else {}


def attempts(run: Run) -> list[str]:
    return sorted(path.name for path in (run.directory / "attempts").iterdir())


def next_start(run: Run) -> str:
    """What `bsl status` says about the next start."""
    lines = run.bsl("status", str(run.directory)).splitlines()
    return next((line.removeprefix("next start").strip() for line in lines if line.startswith("next start")), "")


def jobs(run: Run) -> list[str]:
    """The jobs of the run that wait or run."""
    done = run.cluster.run("squeue", "-h", "-o", "%i %k")
    return [line.split()[0] for line in done.stdout.splitlines() if line.endswith(str(run.directory))]


def test_a_chain_by_queue_stops_where_no_step_is_made(make_run: Callable[..., Run]) -> None:
    run = make_run("stuck")
    job_id = submit(run, "3")
    assert f"job {int(job_id) + 1} " in run.stderr
    run.wait_for(lambda: decision(run, "0002").get("action") == "stop")
    run.wait_for(lambda: not jobs(run))
    assert decision(run, "0001")["action"] == "continue"
    assert has_parts(decision(run, "0002")["sentence"], "step 3", "start 0002", "crashed")
    assert attempts(run) == ["0001", "0002"], "nothing waits, and nothing is left of what waited"
    assert "step 3" in next_start(run) and run.status()["next"]["progress"] == "none"


def test_two_links_wait_survive_a_hand_in_the_middle_and_are_withdrawn_at_the_end(make_run: Callable[..., Run]) -> None:
    run = make_run("linked")
    seen = run.folder / "seen"
    first = int(submit(run, "3", "finish-in=0003", str(seen), options=("--set", "slurm.chain=2")))
    second, third = str(first + 1), str(first + 2)
    assert f"jobs {second}, {third} " in run.stderr
    run.wait_for(lambda: "iteration" in run.log(0))
    assert has_parts(next_start(run), f"job {second}, attempt 0002, ", "1 more")
    # The last one must not start when the one before it is gone. Its own submission was killed before it was recorded.
    record = run.directory / "attempts" / "0003" / "job.json"
    record.unlink()
    run.cluster.run("scancel", second)
    run.wait_for(lambda: jobs(run) == [third, str(first)])
    seen.touch()
    run.wait_for(lambda: bool(decision(run, "0003")))
    assert json.loads(record.read_text())["job_id"] == third
    began = json.loads(record.with_name("chain.json").read_text())["started"]
    assert began >= run.exit()["ended"], "it waited for the first one too"
    found = decision(run, "0001")
    assert (found["next_attempt"], found["next_job_id"], found["words"]) == ("0003", third, None)
    run.wait_for(lambda: decision(run, "0003").get("action") == "finished")
    output = (run.directory / "attempts" / "0003" / "job.out").read_text()
    assert "(attempts 0004, 0005)" in output
    run.wait_for(lambda: not jobs(run))
    assert attempts(run) == ["0001", "0003"]
    status = run.status()
    assert (status["exit"]["reason"], status["step"]["step"]) == ("finished", 9)
    assert "next:" not in run.bsl("status", str(run.directory))


def test_cancel_ends_what_runs_and_what_waits(make_run: Callable[..., Run]) -> None:
    run = make_run("cancelled")
    first = submit(run, program=PROGRAM)
    run.wait_for_ranks(num=2)
    second = str(int(first) + 1)
    assert run.status()["next"]["job_id"] == second and run.status()["attempt"]["name"] == "0001"
    assert next_start(run).startswith(f"job {second}, attempt 0002, ")
    run.submit(*QUEUE, rc=2)
    assert f"attempt 0002 (job {second}) is queued already" in run.stderr
    said = run.bsl("cancel", str(run.directory))
    assert has_parts(said, f"job {second}: ", "attempt 0002", f"job {first}: ")
    run.wait_for_state("CANCELLED")
    run.wait_for(lambda: not jobs(run))
    assert attempts(run) == ["0001"]
    assert "next:" not in run.bsl("status", str(run.directory))


def test_an_attempt_is_queued_from_outside_behind_one_without_a_chain(make_run: Callable[..., Run]) -> None:
    run = make_run("late")
    submit(run, program=PROGRAM, options=())
    run.wait_for_ranks(num=2)
    assert submit(run, "9", "finish-in=0002").isdigit()
    assert "waits behind attempt 0001" in run.stderr
    assert (run.directory / "attempts" / "0002" / "queued").exists()
    run.cluster.run("scancel", run.status()["job"]["job_id"])
    run.wait_for(lambda: decision(run, "0002").get("action") == "finished")
    run.wait_for(lambda: not jobs(run))


@contextmanager
def preempted(cluster: SlurmCluster) -> Iterator[None]:
    """Another job takes all nodes, and keeps them, so that no requeued run starts in between."""
    argv = ("--parsable", "--exclusive", "--nodes=4", "--partition=debug", "--output=/dev/null", "--wrap=sleep 600")
    done = cluster.run("sbatch", *argv)
    assert done.returncode == 0, done.stderr
    try:
        yield
    finally:
        cluster.run("scancel", done.stdout.strip())


def test_a_preempted_run_saves_and_is_started_again(
    make_run: Callable[..., Run], isolated_cluster: SlurmCluster
) -> None:
    """With grace time, ranks end with 0, and Slurm would call the job completed."""
    run, alone = make_run("requeued"), make_run("alone")
    for each, options in ((run, ("--set", "slurm.requeue=true")), (alone, ())):
        submit(each, program=PROGRAM, options=options)
        each.wait_for_ranks(num=2)
    with preempted(isolated_cluster):
        alone.wait_for(lambda: alone.status()["exit"] is not None)
        assert alone.exit()["reason"] == "preempted"
        assert "next: bsl submit" in alone.bsl("status", str(alone.directory))
        run.wait_for(lambda: bool(decision(run, "0001")))
        assert (run.exit()["reason"], decision(run, "0001")["next_attempt"]) == ("preempted", "0001.r1")
        assert has_parts(next_start(run), "0001.r1", "start 0001", "preempted")
        run.bsl("cancel", str(run.directory))
        run.wait_for(lambda: not jobs(run))
    assert attempts(run) == ["0001"]


EXPEDITE = ("--set", "slurm.requeue=expedite")


def slurm_version() -> tuple[int, int]:
    program = shutil.which("slurmctld", path=f"{os.environ['PATH']}:/usr/sbin")
    return parse_version(subprocess.run([str(program), "-V"], capture_output=True, text=True, check=True).stdout)


def test_an_expedited_requeue_that_slurm_refuses_says_what_it_needs(make_run: Callable[..., Run]) -> None:
    if slurm_version() >= (25, 11):
        pytest.skip("this Slurm grants it")
    run = make_run("refused")
    run.submit(*EXPEDITE, rc=3)
    assert has_parts(run.stderr, "--requeue", "slurm.requeue", "25.11")


@pytest.mark.timeout(600)
def test_an_expedited_run_starts_again_at_once_and_a_failed_one_is_not_held(
    make_run: Callable[..., Run], make_cluster: MakeCluster, tmp_path: Path
) -> None:
    """A plain requeue may start only when the credential has expired: 15 s later here, two minutes elsewhere."""
    if slurm_version() < (25, 11):
        pytest.skip("expedited requeues need Slurm 25.11 or newer")
    failing, run = make_run("failing"), make_run("chained")
    submit(failing, "3", options=EXPEDITE)
    failing.wait_for_state("FAILED")
    job_id = submit(run, "3", "finish-in=0001.r1", options=(*EXPEDITE, "--set", "slurm.chain.by=requeue"))
    run.wait_for_state("COMPLETED")
    shown = run.cluster.run("scontrol", "show", "job", "-o", job_id).stdout
    times = dict(word.split("=", 1) for word in shown.split() if word.startswith(("SubmitTime=", "EligibleTime=")))
    assert "Restarts=1 " in shown and times["EligibleTime"] == times["SubmitTime"]
    cluster = make_cluster(nodes=4)
    lost = write_run(cluster, tmp_path, "ignore-term", name="lost")
    lost.submit(*EXPEDITE)
    for attempt in ("0001", "0001.r1"):
        lost.wait_for(lambda attempt=attempt: "iteration 1\n" in lost.log(3, attempt))
        victim = expand_hostlist(lost.status()["job"]["hostlist"])[-1]
        assert cluster.bsl("cluster", "kill-node", victim).returncode == 0
    lost.wait_for(lambda: "iteration 1\n" in lost.log(3, "0001.r2"))


@pytest.mark.long
@pytest.mark.torch
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("by", ["requeue", "queue"])
def test_a_run_of_60_steps_is_finished_without_a_hand(
    by: str, make_cluster: MakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under a time limit of about 20 steps, with a preemption, a killed node and a killed rank."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    import carried_run  # type: ignore[import-not-found]

    cluster = make_cluster(nodes=4)
    site = carried_run.Site(tmp_path, cluster.directory)
    carried_run.prepare_corpus(site)
    found = carried_run.carry(site, by, lambda line: None)
    rows = {row[3].partition(" ")[0]: row[4] for row in carried_run.rows(found)}
    assert (rows["preempted"], rows["node"], rows["rank"]) == ("preempted", "node_failure", "crashed"), rows
    assert carried_run.steps_made(found) == list(range(1, carried_run.STEPS + 1))
    assert carried_run.rows(found)[-1][4] == "finished"
    assert cluster.run("squeue", "-h").stdout == ""
