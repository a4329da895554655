"""Asks PyTorch's own tools about a reproduced hang: torchfrtrace, and TORCH_DISTRIBUTED_DEBUG=DETAIL."""

from __future__ import annotations

import http.client
import json
import pickle
import re
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bigsci_launch.errors import LabError
from bigsci_launch.hang_lab.catalogue import RankSet
from bigsci_launch.hang_lab.nursery import Nursery
from bigsci_launch.hang_lab.runner import Standing, Trial, begin

ASK_TIMEOUT_S = 3.0
ANALYSE_TIMEOUT_S = 60.0
START_S = 4.0
GIVE_UP_S = 5.0
"""Timeout of the collectives in the DETAIL run; DETAIL reports only after a timeout."""


@dataclass(frozen=True, slots=True)
class Opinion:
    """The answer of a peer: the ranks it names, as one side or as two that contradict each other."""

    says: str
    named: RankSet = frozenset()
    is_two_sided: bool = False

    def document(self) -> dict[str, Any]:
        return {"says": self.says, "named": sorted(self.named), "is_two_sided": self.is_two_sided}


def ask_torchfrtrace(standing: Standing) -> Opinion:
    """Return torchfrtrace's first finding on the recorded collectives of all ranks that still answer."""
    dumps = {rank: dump for rank in standing.pids if (dump := read_dump(standing, rank))}
    if not dumps:
        return Opinion("no dump could be had")
    with tempfile.TemporaryDirectory() as folder:
        for rank, dump in dumps.items():
            (Path(folder) / f"rank_{rank}").write_bytes(pickle.dumps(dump))
        argv = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", folder, "--prefix", "rank_",
                "--allow-incomplete-ranks"]  # fmt: skip
        try:
            done = subprocess.run(argv, capture_output=True, text=True, timeout=ANALYSE_TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired:
            return Opinion("no answer")
    return read_findings(done.stdout + done.stderr)


def read_dump(standing: Standing, rank: int) -> dict[str, Any] | None:
    """Return the recorder of `rank` as an NCCL dump would have it, with the table of groups that gloo leaves out."""
    try:
        dump = ask_recorder(standing.job.attempt.recorder_socket(rank))
        members = json.loads(standing.job.attempt.recorder_groups(rank).read_text())["members"]
    except (OSError, ValueError):
        return None
    descriptions = {str(entry["process_group"][0]): entry["process_group"][1] for entry in dump["entries"]}
    dump["pg_config"] = {
        name: {"name": name, "desc": descriptions.get(name, ""), "ranks": str(ranks)} for name, ranks in members.items()
    }
    for entry in dump["entries"]:
        entry.setdefault("frames", [])
    return dump


def ask_recorder(path: Path) -> dict[str, Any]:
    with socket.socket(socket.AF_UNIX) as channel:
        channel.settimeout(ASK_TIMEOUT_S)
        channel.connect(str(path))
        connection = http.client.HTTPConnection("rank")
        connection.sock = channel
        connection.request("POST", "/handler/fr_trace_json")
        return json.loads(connection.getresponse().read())  # type: ignore[no-any-return]


def read_findings(text: str) -> Opinion:
    """Return the first finding in torchfrtrace's output."""
    match = re.search(r"missing ranks: \{([\d, ]+)\}|error msg: (Culprit rank .*)", text)
    if match and match[1]:
        return Opinion("missing ranks", frozenset(int(rank) for rank in match[1].split(",")))
    if match:
        return Opinion("mismatch", frozenset(int(rank) for rank in re.findall(r"Culprit rank (\d+)", match[2])))
    crash = re.search(r"^(\w+(?:Error|Exception)): .*$", text, re.MULTILINE)
    return Opinion(f"crashes: {crash[1]}" if crash else "nothing")


def ask_detail(trial: Trial, nursery: Nursery) -> Opinion:
    """Run the same trial with DETAIL and return what the ranks' logs say once their collectives have timed out."""
    environment = {**trial.environment, "TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
    arguments = (*trial.arguments, "--timeout", str(GIVE_UP_S))
    try:
        with begin(replace(trial, environment=environment, arguments=arguments), nursery=nursery) as standing:
            return read_logs(standing)
    except LabError as error:
        return Opinion(f"failed: {error}")


def read_logs(standing: Standing) -> Opinion:
    """Return the ranks that any log names, or nothing if all ranks ended or it takes too long."""
    end = time.monotonic() + START_S + 2 * GIVE_UP_S
    while True:
        have_ended = len(standing.job.ended()) == standing.job.world_size
        logs = [log.read_text(errors="replace") for log in standing.job.attempt.logs.glob("*.log")]
        opinion = named_in("\n".join(logs))
        if opinion.named or have_ended or time.monotonic() > end:
            return opinion
        time.sleep(0.5)


def named_in(text: str) -> Opinion:
    """Return the ranks that DETAIL's messages name."""
    failed = re.findall(r"Ranks? ([\d, ]+) failed to pass monitoredBarrier", text)
    if failed:
        return Opinion("barrier", frozenset(int(rank) for found in failed for rank in found.split(",")))
    running = r"Rank (\d+) is running collective"
    sides = re.findall(running + ".{1,600}?but " + running, text, re.DOTALL)
    if sides:
        return Opinion("mismatch", frozenset(int(rank) for pair in sides for rank in pair), is_two_sided=True)
    return Opinion("nothing")
