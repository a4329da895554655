"""Attacks that need a Slurm: each has a mini cluster of its own, whose nodes have their own PIDs and addresses."""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from recovering.attack import SLOW, Attack, CannotRun, Expected
from recovering.attacked_run import StartedRun

EQUAL = Expected(equal=True)
SLOWER = {**SLOW, "seconds": 0.5}
HOLD = "import socket, time; s = socket.create_server(('0.0.0.0', {})); time.sleep(300)"
MOST_PORTS = 12


def _cluster(run: StartedRun, nodes: int) -> None:
    """Start a cluster, and let the run and its commands use it; its end is the end of the attack.

    Raises:
        CannotRun: it does not start here.
    """
    folder = tempfile.mkdtemp(prefix="bsl-", dir="/tmp")  # short: it holds sockets
    run.variables |= {"BSL_CLUSTER_DIR": folder, "SLURM_CONF": f"{folder}/slurm.conf"}
    run.at_end(lambda: run.bsl("cluster", "down"))
    done = run.bsl("cluster", "up", "--nodes", str(nodes), "--isolated", limit_s=200)
    if done.returncode:
        raise CannotRun(f"no Slurm here: {done.stderr[-200:]}")


def _job(run: StartedRun) -> str:
    return str(json.loads(run.attempt.job.read_text())["job_id"])


def _slurm(run: StartedRun, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=run.environment(), capture_output=True, text=True, check=False, timeout=60)


def _suspended(run: StartedRun) -> None:
    _cluster(run, 2)
    run.start(local=False)
    run.until(12)
    job = _job(run)
    run.claim("it is suspended", _slurm(run, "scontrol", "suspend", job).returncode == 0)
    time.sleep(40)
    before = run.step()
    run.claim("it is resumed", _slurm(run, "scontrol", "resume", job).returncode == 0)
    run.note(f"suspended after step {before}")
    run.wait()
    run.claim("no node is left out", not (run.run.path.parent / "nodes.json").exists())


def _node_and_limit(run: StartedRun) -> None:
    _cluster(run, 3)
    run.start(local=False)
    run.until(12)
    victim = _nodes(run)[3]
    run.claim("it is killed", run.bsl("cluster", "kill-node", victim).returncode == 0)
    time.sleep(1.2)
    _slurm(run, "scancel", "--signal=USR2", "--batch", _job(run))
    run.wait()
    run.note(f"node {victim} was lost, the attempt stopped after step {run.step()}")
    run.claim(f"the reason is stopped, not {run.reason()}", run.reason() == "stopped")
    run.claim("the lost node is named", ("lost_node", victim) in _lost(run))
    run.start("--set", "slurm.spare_nodes=0", local=False)


def _nodes(run: StartedRun) -> dict[int, str]:
    began = next(each for each in run.generations() if each["event"] == "began")
    return {member["rank"]: member["node"] for member in began["members"]}


def _lost(run: StartedRun) -> list[tuple[Any, Any]]:
    return [(each.get("kind"), each.get("node")) for each in run.generations() if each["event"] == "failed"]


def _port(run: StartedRun) -> None:
    _cluster(run, 2)
    inside = ["nsenter", "-t", str(_slurmd(run, "n0")), "-n", "python3", "-c"]
    for port in range(10000, 10000 + MOST_PORTS):
        run.at_end(subprocess.Popen([*inside, HOLD.format(port)]).kill)
    time.sleep(2)
    run.start(local=False)
    run.wait()
    said = run.attempt.job_output.read_text()
    line = next((each for each in said.splitlines() if "instead of" in each), "")
    run.note(line.strip() or "it says nothing of a port")
    run.claim("the taken port is named", "already in use" in line)


def _slurmd(run: StartedRun, node: str) -> int:
    """Return the slurmd of a node of this cluster: in its network, the node listens."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (folder / "cmdline").read_bytes().split(b"\0")
            if words[0].endswith(b"slurmd") and node.encode() in words and _is_of(folder, run):
                return int(folder.name)
    raise CannotRun(f"the slurmd of {node} was not found")


def _is_of(process: Path, run: StartedRun) -> bool:
    directory = run.variables["BSL_CLUSTER_DIR"].encode()
    return directory in (process / "cmdline").read_bytes() or directory in (process / "environ").read_bytes()


def _settings(steps: int, **slurm: int) -> dict[str, Any]:
    return {
        "slurm": {"site": "minicluster", "nodes": 2, "time_limit": "00:20:00", **slurm},
        "training": {"steps": steps},
        "env": {"RES_OPTIONS": {"value": "attempts:1 timeout:1", "reason": "no name server answers in a node"}},
        "monitor": {"step_time_s": 1, "save_time_s": 2},
        "faults": [SLOWER],
    }


ATTACKS = (
    Attack(
        "node-usr2",
        "slurm",
        "14. Slurm: a node is killed, USR2 1.2 s later, and submitted again",
        _node_and_limit,
        EQUAL,
        settings=_settings(40, spare_nodes=1),
        starts=False,
        limit_s=500,
    ),
    Attack(
        "suspend",
        "slurm",
        "18. Slurm: suspend, and resume after 40 s",
        _suspended,
        Expected(equal=True, recovered=()),
        settings=_settings(60),
        starts=False,
        limit_s=500,
    ),
    Attack(
        "port",
        "slurm",
        "32. Slurm: the port of the rendezvous is taken",
        _port,
        EQUAL,
        settings=_settings(30),
        starts=False,
        limit_s=400,
    ),
)
