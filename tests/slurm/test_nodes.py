"""Bad nodes on a real Slurm: remembered, left out, forgiven; checked before the ranks, on demand, and by halves."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bigsci_launch.scheduler.hostlist import expand_hostlist
from tests.docs.test_documents import check as check_document
from tests.support.texts import has_parts

from .test_submit import Run, write_run

pytestmark = pytest.mark.slurm
BROKEN_GPU = Path(__file__).parent / "programs" / "broken_gpu.py"
XID = "NVRM: Xid (PCI:0000:c6:00): 79, pid=4711, name=python, GPU has fallen off the bus."
CHECK = ("--set", "slurm.node_check=true")


def remembered(run: Run) -> list[tuple[str, str]]:
    document = json.loads(run.bsl("nodes", "list", "--json"))
    assert document["memory"].endswith("nodes.json")
    return [(each["node"], each["reason"]) for each in document["nodes"]]


def nodes_of(status: dict[str, Any]) -> list[str]:
    return expand_hostlist(status["job"]["hostlist"])


def test_a_rank_that_dies_of_its_gpu_costs_its_node_the_next_attempt(isolated_cluster: Any, tmp_path: Path) -> None:
    run = write_run(isolated_cluster, tmp_path, name="gpu")
    overrides = ("--set", f"run.command={json.dumps([sys.executable, str(BROKEN_GPU), '2', XID])}")
    run.submit(*overrides)
    first = nodes_of(run.wait_for_state("FAILED"))
    bad = first[1]
    run.wait_for(lambda: "bsl: end attempt=0001" in run.output())
    assert remembered(run) == [(bad, "gpu")], run.output()
    [entry] = json.loads(run.bsl("nodes", "list", "--json"))["nodes"]
    assert (entry["evidence"], entry["rank"], entry["run"], entry["cluster"]) == (XID, 2, "gpu", "bsl")
    assert any(has_parts(line, f"bsl: {bad} ", XID) for line in run.output().splitlines())

    run.submit(*overrides)
    assert f"left out: {bad} until" in run.stderr and "Xid" in run.stderr
    assert bad not in nodes_of(run.wait_for_state("COMPLETED"))
    script = (run.directory / "attempts" / "0002" / "script.sh").read_text()
    assert f"#SBATCH --exclude={bad}\n" in script and "# remembered as bad: " in script

    assert f"forgiven: {bad} (GPU: {XID})" in run.bsl("nodes", "forgive", bad)
    assert remembered(run) == []
    run.bsl("status", str(run.directory))
    assert remembered(run) == [], "an attempt is evaluated once"
    assert "exclude" not in run.bsl("submit", str(run.config), "--dry-run")


# A requeued job that leaves out a node is below.
@pytest.mark.parametrize("by", [pytest.param("requeue", marks=pytest.mark.long), "queue"])
def test_a_run_that_carries_itself_leaves_its_broken_node_behind(
    isolated_cluster: Any, tmp_path: Path, by: str
) -> None:
    run = write_run(isolated_cluster, tmp_path, name=f"carried-{by}")
    command = json.dumps([sys.executable, str(BROKEN_GPU), "2", XID])
    run.submit("--set", f"run.command={command}", "--set", f"slurm.chain={{by: {by}}}")
    first = run.directory / "attempts" / "0001"
    run.wait_for(lambda: (first / "next.json").exists() and (first / "bad_nodes.json").exists())
    run.wait_for(lambda: remembered(run) != [])
    [(bad, reason)] = remembered(run)
    assert reason == "gpu"
    following = {"requeue": "0001.r1", "queue": "0002"}[by]
    run.wait_for(lambda: (run.directory / "attempts" / following / "exit.json").exists())
    ended = json.loads((run.directory / "attempts" / following / "exit.json").read_text())
    assert ended["reason"] == "finished"
    pids = [json.loads(path.read_text()) for path in (run.directory / "attempts" / following / "pids").glob("rank-*")]
    assert pids and bad not in {each["node"] for each in pids}
    run.bsl("nodes", "forgive", bad)


def test_a_killed_node_is_named_and_left_out_and_so_is_a_lost_batch_host(make_cluster: Any, tmp_path: Path) -> None:
    """Two runs lose a node each: one its second, whose script sees it; one its first, with the script itself."""
    cluster = make_cluster(nodes=6)
    runs = [write_run(cluster, tmp_path, "ignore-term", name=name) for name in ("second", "first")]
    for run in runs:
        run.submit()
    victims = []
    for run, place in zip(runs, (1, 0), strict=True):
        run.wait_for_ranks()
        victims.append(nodes_of(run.status())[place])
    for victim in victims:
        killed = cluster.bsl("cluster", "kill-node", victim)
        assert killed.returncode == 0, killed.stderr
    for run in runs:
        run.wait_for_state("NODE_FAIL")
    second, first = runs
    assert second.exit()["reason"] == "node_failure"
    assert second.exit()["first_failure"]["node"] == victims[0]
    check_headless(first, victims[1])
    assert sorted(remembered(second)) == sorted((victim, "lost") for victim in victims)
    second.submit("--set", "slurm.nodes=4", "--set", "training.global_batch_size=4", "--set", "run.name=third")
    assert all(f"left out: {victim} until" in second.stderr for victim in victims)
    third = Run(cluster, tmp_path, second.config, second.directory.with_name("third"))
    third.wait_for_ranks(num=8)
    assert set(nodes_of(third.status())) == set(cluster.nodes) - set(victims)
    third.bsl("cancel", str(third.directory))


def check_headless(run: Run, victim: str) -> None:
    """Nothing wrote exit.json, and `bsl status` works out which node it was."""
    run.wait_for(lambda: (run.status()["exit"] or {}).get("first_failure") is not None)
    found = run.status()["exit"]
    assert (found["reason"], found["exit_code"]) == ("node_failure", None), found
    assert (found["first_failure"]["rank"], found["first_failure"]["node"]) == (0, victim)
    assert found["first_failure"]["coordinate"] == {"pp": 0, "tp": 0, "dp": 0}
    text = run.bsl("status", str(run.directory))
    assert has_parts(text, f"rank 0 (dp0 pp0 tp0) on {victim}: ", "exit.json")
    assert not list((run.directory / "attempts").glob("*/exit.json"))


def test_a_requeued_job_is_an_attempt_of_its_own_and_leaves_out_the_node_that_it_lost(
    isolated_cluster: Any, tmp_path: Path
) -> None:
    """The job is sent back by its operator; its node was given up by hand before, and Slurm does not know that."""
    run = write_run(isolated_cluster, tmp_path, "stop-on-usr2", name="back", nodes=1)
    job_id = run.submit("--set", "slurm.requeue=true", "--set", "monitor.trace.include=[none]")
    run.wait_for_ranks(num=2)
    [bad] = nodes_of(run.status())
    run.bsl("nodes", "add", bad, "--reason", "its fan is broken")
    assert run.cluster.run("scontrol", "requeue", job_id).returncode == 0
    run.wait_for_ranks("0001.r1", num=2)
    assert f"bsl: job {job_id} leaves out {bad}" in run.output()
    status = run.status()
    assert bad not in nodes_of(status)
    assert (status["attempt"]["name"], status["job"]["state"]) == ("0001.r1", "RUNNING")
    assert '"BSL_ATTEMPT": "0001.r1"' in run.log(0, "0001.r1")
    assert (run.directory / "attempts" / "0001.r1" / "requests" / "trace.json").is_file(), "it is traced as before"
    assert run.output().count("bsl: start attempt=") == 2
    run.cluster.run("scancel", "--signal=URG", job_id)
    run.wait_for_state("COMPLETED")
    assert (run.exit("0001.r1")["restart_count"], run.exit("0001.r1")["reason"]) == (1, "finished")
    assert run.exit("0001")["reason"] == "requeued"


@pytest.fixture
def full_memory(isolated_cluster: Any) -> Iterator[str]:
    """Node n1 has no shared memory left: in its own mount namespace, /dev/shm is of 64 KiB."""
    run = isolated_cluster.run
    done = run("srun", "-w", "n1", "mount", "-t", "tmpfs", "-o", "size=64k", "none", "/dev/shm")
    assert done.returncode == 0, done.stderr
    yield "n1"
    assert run("srun", "-w", "n1", "umount", "/dev/shm").returncode == 0


def test_a_node_that_fails_its_check_is_named_before_the_ranks_start(
    isolated_cluster: Any, tmp_path: Path, full_memory: str
) -> None:
    run = write_run(isolated_cluster, tmp_path, "steps=2", name="checked", nodes=4)
    run.submit(*CHECK)
    run.wait_for_state("FAILED")
    found = run.exit()
    assert (found["reason"], found["exit_code"], found["num_started"]) == ("node_check", 1, 0), run.output()
    assert (found["first_failure"]["node"], found["first_failure"]["rank"]) == (full_memory, None)
    assert has_parts(found["first_failure"]["error"], "64 MiB", "/dev/shm: No space left")
    assert run.log(0) == "", "no rank has started"
    assert has_parts(run.output(), "4 nodes: gpu: ")
    status = run.bsl("status", str(run.directory))
    assert f"first failure  node {full_memory}: shared memory" in status and "submit it again" in status
    assert remembered(run) == [(full_memory, "failed_check")]
    run.submit(*CHECK, "--set", "slurm.nodes=3", "--set", "run.name=again", "--set", "training.global_batch_size=3")
    again = Run(run.cluster, run.folder, run.config, run.directory.with_name("again"))
    status = again.wait_for_state("COMPLETED")
    assert full_memory not in nodes_of(status)
    assert (again.directory / "attempts" / "0001" / "check" / "result.json").exists()


def test_a_check_on_demand(isolated_cluster: Any, tmp_path: Path, full_memory: str) -> None:
    run = write_run(isolated_cluster, tmp_path, name="none")
    printed = run.bsl("nodes", "check", "--nodelist", "n[0-2]", "--json", rc=1)
    check_document("bsl nodes check --json", printed)
    document = json.loads(printed)
    verdicts = {node["node"]: node["verdict"] for node in document["nodes"]}
    assert verdicts.pop(full_memory) == "failed" and set(verdicts) == {"n0", "n2"}
    assert "failed" not in verdicts.values()
    assert remembered(run) == [(full_memory, "failed_check")]
    run.bsl("nodes", "check", "--nodelist", "n99", rc=3)
    assert has_parts(run.stderr, "bsl-nodes-check", "Invalid node name")


def test_a_check_that_cannot_run_ends_nothing(isolated_cluster: Any, tmp_path: Path) -> None:
    """The ranks' Python cannot run the check: the nodes are not known, and the ranks start."""
    refuse = 'case "$*" in *check_node.py*) exit 1;; esac'
    site = tmp_path / "site.yaml"
    script = tmp_path / "bin" / "python3"
    script.parent.mkdir()
    script.write_text(f'#!/bin/bash\n{refuse}\nexec {sys.executable} "$@"\n')
    script.chmod(0o755)
    site.write_text(
        f"description: test\nscheduler: slurm\nranks_per_node: 2\nactivation: ['export PATH={script.parent}:$PATH']\n"
    )
    run = write_run(isolated_cluster, tmp_path, "steps=2", name="odd")
    run.submit(*CHECK, "--set", f"slurm.site={site}")
    run.wait_for_state("COMPLETED")
    assert "node check: 2 not" in run.output()
    assert remembered(run) == []


def test_the_slow_node_is_found_by_halves(isolated_cluster: Any, tmp_path: Path) -> None:
    run = write_run(isolated_cluster, tmp_path, name="none")
    program = tmp_path / "work.sh"
    program.write_text('sleep 1; if [ "$SLURMD_NODENAME" = n2 ]; then sleep 3; fi\n')
    words = ("nodes", "bisect", "--nodes", "4", "--smallest", "2", "--json", "bash", str(program))
    printed = run.bsl(*words, rc=1)
    check_document("bsl nodes bisect --json", printed)
    found = json.loads(printed)
    assert "round 1: n[0-1]: " in run.stderr
    assert [each["node"] for each in found["slow"]] == ["n2"] and sorted(found["good"]) == ["n0", "n1", "n3"]
    assert remembered(run) == [("n2", "slow")]
    assert run.cluster.run("squeue", "-h", "-t", "RUNNING,PENDING").stdout == "", "the nodes are given back"
