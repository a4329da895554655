"""The ring of a rank's last calls: real ranks write it, and it is read while they live, and after SIGKILL."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bigsci_launch.cli.main import bsl
from bigsci_launch.runs.layout import AttemptDir
from bigsci_launch.spy.evidence.ranks import read_evidence
from bigsci_launch.spy.judge.waits import build_graph
from bigsci_launch.spy.look.collect import collect
from bigsci_launch.spy.look.target import Target
from bigsci_launch.trace.read import NO_COPY, read_copies
from tests.support.texts import has_parts
from tests.support.waiting import wait_until

from .recorded_ranks import DIAGNOSTICS, HOOK, Ranks, Reply, hooked, read

TAGS = """
import sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
half = dist.new_group([0, 1])
for _ in range(3):
    dist.all_reduce(torch.ones(4, 8), group=half, async_op=True).wait()
dist.all_reduce(torch.ones(2), group=half, async_op=True)  # nobody waits for it
print("ready", flush=True)
if dist.get_rank() == 0:
    dist.recv(torch.zeros(3), 1, tag=8)
else:
    dist.send(torch.zeros(3), 0, tag=7)
"""
IN_GROUP = """
import time, torch, torch.distributed as dist
dist.init_process_group("cpu:gloo")
dist.all_reduce(torch.ones(1))
pair = dist.new_group([1, 2])
if dist.get_rank() == 1:
    dist.send(torch.zeros(3), group=pair, tag=5, group_dst=1)
elif dist.get_rank() == 2:
    dist.recv(torch.zeros(3), group=pair, tag=5, group_src=0)
print("ready", flush=True)
time.sleep(60)
"""
CALLS = """
import os, torch, torch.distributed as dist
def begin(): dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
def wrong():
    try: dist.all_reduce("no tensor")
    except TypeError: pass
begin()
for size in (1, 2, 1): dist.all_reduce(torch.ones(size))
dist.all_reduce(torch.ones(1))
for call, more in ((dist.all_reduce, dist.ReduceOp.SUM), (dist.broadcast, 0)): call(torch.ones(3), more)
dist.all_reduce(tensor=torch.ones(4), async_op=True).wait()
dist.all_gather([torch.ones(5)], torch.ones(5))
wrong()
ids = []
for _ in range(8):
    groups = [dist.new_group([0]) for _ in range(8)]
    ids += map(id, groups)
    for group in groups: dist.broadcast(torch.ones(6), 0, group)
    for group in groups: dist.destroy_process_group(group)
    del group, groups
print("an id was used again:", len(set(ids)) < len(ids))
world = dist.group.WORLD
dist.destroy_process_group()
begin()
dist.broadcast(torch.ones(7), 0)
dist.broadcast_object_list([8], 0)
dist.broadcast_object_list([8], 0)
child = os.fork()
wrong()
if child == 0: os._exit(0)
os.waitpid(child, 0)
"""


def open_calls(ring: Reply) -> list[tuple[Any, ...]]:
    """Return (operation, peer, tag) of the calls that the rank has not left."""
    return [(call[2], call[6], call[7]) for call in ring["open"]]


def assert_nested_and_joined(events: list[Reply]) -> None:
    """Perfetto drops slices of a thread that overlap without being nested. Each collective has come on both ranks."""
    for process in (0, 1):
        slices = [event for event in events if event["ph"] == "X" and event["pid"] == process]
        assert {"all_reduce begins", "new_group", "init_process_group"} <= {event["name"] for event in slices}
        inside: list[float] = []
        for event in sorted(slices, key=lambda event: (event["tid"], event["ts"], -event["dur"])):
            end = event["ts"] + event["dur"]
            inside = [each for each in inside if each > event["ts"]]
            assert all(end <= each + 0.01 for each in inside), event
            inside.append(end)
    assert {event["args"]["name"] for event in events if event["name"] == "thread_name"} == {"MainThread"}
    arrows = [(event["ph"], event["name"].rpartition(" ")[2]) for event in events if event["ph"] in "stf"]
    assert arrows == [(kind, number) for number in "1234" for kind in "sf"]


@pytest.mark.torch
def test_two_ranks_whose_tags_differ_are_named_and_their_calls_outlive_them(ranks: Ranks, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    ranks.start([sys.executable, "-c", TAGS], 2)
    wait_until(lambda: all("ready" in ranks.log(rank) for rank in (0, 1)))
    wait_until(lambda: all(open_calls(ring) for ring in read(ranks.live(0), ranks.live(1))))
    first, second = read(ranks.live(0), ranks.live(1))
    assert (first["rank"], first["world_size"], second["rank"]) == (0, 2, 1)
    assert ("recv", 1, 8) in open_calls(first)
    assert ("send", 0, 7) in open_calls(second)
    assert first["recorder"]["last_sequence"] == {"1": 4} and first["recorder"]["members"] == {"1": [0, 1]}
    assert first["recorder"]["open"] == [] and first["are_blocking"]
    assert any(call[2] == "recv" and call[4].endswith("<string>:10 <module>") for call in first["open"])
    os.kill(ranks.record(1)["pid"], signal.SIGSTOP)
    assert ("send", 0, 7) in open_calls(read(ranks.live(1))[0]), "a rank that is stopped has a ring too"
    os.kill(ranks.record(1)["pid"], signal.SIGCONT)

    target = Target(label="tags", request={"pid_files": str(ranks.attempt / "pids")})
    evidence = read_evidence({"job": "tags"}, collect(target).nodes)
    waits = build_graph(evidence).waits
    found = [(waits[rank].operation, waits[rank].partner, waits[rank].tag) for rank in (0, 1)]
    assert found == [("recv", 1, 8), ("send", 0, 7)]

    for rank in (0, 1):
        os.kill(ranks.record(rank)["pid"], signal.SIGKILL)
    assert ranks.wait() == [137, 137]
    assert ("recv", 1, 8) in open_calls(read(ranks.kept(0))[0])
    assert ("send", 0, 7) in open_calls(read(ranks.kept(1))[0])

    file = tmp_path / "trace.json"
    done = CliRunner().invoke(bsl, ["trace", "export", str(ranks.attempt / "rings"), "--perfetto", str(file)])
    assert done.exit_code == 0, done.output
    assert_nested_and_joined(json.loads(file.read_text())["traceEvents"])
    said = CliRunner().invoke(bsl, ["trace", "last", str(ranks.attempt.parent.parent.parent / "none")])
    assert said.exit_code != 0
    said = CliRunner().invoke(bsl, ["trace", "last", str(ranks.kept(0).parent), "-n", "1"])
    assert has_parts(said.stdout, "tag 8, float32 [3]", "<string>:10 <module>", "tag 7", "not ended"), said.output
    ranks.kept(0).rename(ranks.kept(0).with_name("hidden"))
    left = {each.name: each.why for each in read_copies(AttemptDir(ranks.attempt))}
    assert left == {"rank 1": None, "rank 0": NO_COPY}
    ranks.kept(0).with_name("hidden").rename(ranks.kept(0))
    document = json.loads(CliRunner().invoke(bsl, ["trace", "last", str(ranks.kept(0).parent), "--json"]).stdout)
    assert [rank["rank"] for rank in document["ranks"]] == [0, 1] and len(document["groups"]) == 2
    assert not any(folder.exists() for folder in (ranks.live(0).parent, ranks.live(1).parent))


@pytest.mark.torch
def test_a_peer_that_is_given_by_its_rank_in_the_group_is_a_global_rank(ranks: Ranks) -> None:
    pytest.importorskip("torch")
    ranks.start([sys.executable, "-c", IN_GROUP], 3)
    wait_until(lambda: all("ready" in ranks.log(rank) for rank in range(3)))
    rings = read(*(ranks.live(rank) for rank in (1, 2)))
    sent, received = (
        {(call[6], call[7]) for call in ring["threads"][0]["last"] if call[2] == operation}
        for ring, operation in zip(rings, ("send", "recv"), strict=True)
    )
    assert (sent, received) == ({(2, 5)}, {(1, 5)})
    assert not any(ring["are_blocking"] for ring in rings)  # a group that may have several backends
    assert not any("not recorded" in ranks.log(rank) for rank in range(3))


@pytest.mark.torch
def test_what_is_known_of_earlier_calls_is_not_taken_for_another_call(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    given = {
        "BSL_RING_DIR": str(tmp_path),
        "PYTHONPATH": str(DIAGNOSTICS / "ring_site"),
        "RANK": "0",
        "WORLD_SIZE": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", CALLS], env={**os.environ, **given}, cwd=tmp_path, capture_output=True, text=True,
        timeout=300, check=True,
    )  # fmt: skip
    assert done.stdout.endswith(": True\n") and "not recorded" not in done.stderr
    rings = read(*tmp_path.glob("*.ring"), num_last=1000)
    found = [[(*call[2:6], call[8]) for call in ring["threads"][0]["last"] if call[8]] for ring in rings]
    child, parent = sorted(found, key=len)
    at, tried = "<string>:{} <module>".format, "<string>:5 wrong"
    assert child == [("all_reduce", "0: 0", tried, None, 1)]
    assert [call for call in parent if call[3] not in ("float32 [6]", "uint8 [5]")] == [
        ("all_reduce", "0: 0", at(8), "float32 [1]", 1),
        ("all_reduce", "0: 0", at(8), "float32 [2]", 2),
        ("all_reduce", "0: 0", at(8), "float32 [1]", 3),
        ("all_reduce", "0: 0", at(9), "float32 [1]", 4),
        ("all_reduce", "0: 0", at(10), "float32 [3]", 5),
        ("broadcast", "0: 0", at(10), "float32 [3]", 6),
        ("all_reduce", "0: 0", at(11), "float32 [4]", 7),
        ("all_reduce", "0: 0", at(11), "float32 [4]", 7),
        ("all_gather", "0: 0", at(12), "float32 [5]", 8),
        ("all_reduce", "0: 0", tried, None, 9),
        ("broadcast", "0: 0", at(25), "float32 [7]", 1),
        ("broadcast", "0: 0", at(26), "int64 [1]", 2),
        ("broadcast", "0: 0", at(27), "int64 [1]", 4),
        ("all_reduce", "0: 0", tried, None, 6),
    ]
    small = [call for call in parent if call[3] == "float32 [6]"]
    assert [ring["open"] for ring in rings] == [[], []]
    assert len({call[1] for call in small}) == 64 and {call[4] for call in small} == {1}


def test_a_rank_that_ends_well_leaves_nothing(ranks: Ranks) -> None:
    ranks.start([sys.executable, "-c", "print('done')"], 1)
    assert ranks.wait() == [0]
    assert not ranks.live(0).parent.exists() and not ranks.kept(0).exists()
    assert list(ranks.rings.glob("bsl-rings-*/*")) == []


RINGS = """
import json, pathlib, time
from ring_file import NONE, Ring
folder, other, attempt = (pathlib.Path(name) for name in ("task", "other", "run/attempts/0001"))
def ring(place, pid, rank, world, operation):
    made = Ring(str(place / f"{pid}.ring"), rank=rank, world_size=world)
    lane = made.lane()
    lane.enter(FACTS.pack(made.name(operation), 0, 0, 0, NONE, NONE))
    made.mark(pid, "")
    time.sleep(0.001)
for place in (folder, other): place.mkdir()
ring(folder, 11, 0, 4, "init_process_group")  # four workers, of which three are started again in a smaller world
ring(folder, 12, 1, 4, "init_process_group")
ring(folder, 13, 3, 4, "init_process_group")
ring(folder, 21, 0, 3, "init_process_group")
ring(other, 22, 1, 3, "init_process_group")  # rank 1 has moved to another node, and back
ring(folder, 23, 1, 3, "init_process_group")
ring(folder, 24, 2, 3, "init_process_group")
ring(folder, 25, 2, 3, "init_process_group")
ring(folder, 10, 7, 2, "store.get")  # the launcher, which has the number of the task
ring(other, 20, 7, 2, "store.get")
(folder / "99.ring").write_bytes(b"torn")
import rank_rings
for place in (folder, other):
    rings = rank_rings.Rings("none", attempt, "rank-0007")
    rings.folder = rings._inside = place
    assert rings.keep() is None
"""


def test_of_each_worker_the_newest_ring_is_kept(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", HOOK + RINGS], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    kept = sorted((tmp_path / "run" / "attempts" / "0001" / "rings").iterdir())
    assert {path.name: ring["step"] for path, ring in zip(kept, read(*kept), strict=True)} == {
        "rank-0000.ring": 21,
        "rank-0001.ring": 23,
        "rank-0002.ring": 25,
    }


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to a group that it is not in")
def test_the_group_of_the_run_reads_the_rings(ranks: Ranks) -> None:
    run = ranks.attempt.parent.parent
    run.mkdir(parents=True)
    os.chown(run, -1, 4711)
    program = HOOK + "import time; ring_hook.mark(7, 'step'); print('ready', flush=True); time.sleep(60)"
    ranks.start([sys.executable, "-c", program], 1)
    wait_until(lambda: "ready" in ranks.log(0))
    ring = ranks.live(0)
    wait_until(lambda: ring.with_suffix(".stacks").exists())
    modes = {path: (path.stat().st_mode & 0o777, path.stat().st_gid) for path in (ring.parent, *ring.parent.iterdir())}
    assert modes == {ring.parent: (0o750, 4711), ring: (0o640, 4711), ring.with_suffix(".stacks"): (0o640, 4711)}
    assert ring.parent.parent.stat().st_mode & 0o777 == 0o711
    os.kill(ranks.record(0)["pid"], signal.SIGKILL)
    assert ranks.wait() == [137]
    others = ranks.attempt / "logs" / "rank-0000.log"
    assert ranks.kept(0).stat().st_mode & 0o777 == others.stat().st_mode & 0o777 == 0o644


def test_a_forked_child_writes_a_ring_of_its_own(tmp_path: Path) -> None:
    program = """
import time
ring_hook.mark(7, "step")
time.sleep(0.1)
child = os.fork()
if child == 0:
    ring_hook.mark(8, "save")
    time.sleep(0.1)
    os._exit(0)
os.waitpid(child, 0)
time.sleep(0.1)
"""
    hooked(tmp_path, program)
    rings = read(*tmp_path.glob("*.ring"))
    assert sorted((ring["rank"], ring["step"], ring["phase"]) for ring in rings) == [(3, 7, "step"), (3, 8, "save")]
    assert len(list(tmp_path.glob("*.stacks"))) == 2


def test_a_thousand_threads_and_too_many_names(tmp_path: Path) -> None:
    program = """
import threading
gate = threading.Barrier(1001)
def work():
    lane = ring_hook.lane()
    if lane is not None:
        lane.leave(lane.enter(FACTS.pack(ring_hook.ring().name("work"), 0, 0, 0, NONE, NONE)))
    gate.wait()
for _ in range(1000):
    threading.Thread(target=work).start()
gate.wait()
numbers = [ring_hook.ring().name("x" * 300 + str(n)) for n in range(1000)]
print(min(numbers), max(numbers))
"""
    done = hooked(tmp_path, program)
    ring = read(*tmp_path.glob("*.ring"))[0]
    assert len(ring["threads"]) == 16 and ring["lost_threads"] == 1000 - 16
    assert done.stdout.startswith("0 ") and ring["lost_names"] > 0
    assert [thread["last"][0][2] for thread in ring["threads"]] == ["work"] * 16
    said = CliRunner().invoke(bsl, ["trace", "last", str(tmp_path), "-n", "1"])
    assert f" {ring['lost_names']} names and 984 threads " in said.stdout, said.output


@pytest.mark.parametrize("follow", ["time.sleep(60)", "1 / 0"], ids=["hangs", "fails"])
def test_the_heartbeat_does_not_depend_on_call_traces(tmp_path: Path, follow: str) -> None:
    program = f"""
import time, types
os.environ["BSL_TRACE"] = "trace.json"
sys.modules["calls_trace"] = types.SimpleNamespace(follow=lambda: {follow}, renew=lambda: None, forget=lambda: None)
ring_hook.HEARTBEAT_S = 0.02
ring_hook.lane()
time.sleep(0.3)
began = time.time()
time.sleep(0.3)
from ring_file import read_ring
with open(ring_hook.ring().path, "rb") as stream:
    assert read_ring(stream.read())["heartbeat"] > began
"""
    assert hooked(tmp_path, program).stderr.count("ZeroDivisionError") == (follow == "1 / 0")


def test_rings_that_are_torn_cut_or_of_another_version(tmp_path: Path) -> None:
    program = """
lane = ring_hook.lane()
for number in range(20000):
    ring_hook.mark(number, "")
    lane.leave(lane.enter(FACTS.pack(ring_hook.ring().name("work"), 0, 0, 0, NONE, NONE)))
lane.enter(FACTS.pack(ring_hook.ring().name("stuck"), 0, 0, 0, NONE, NONE))
"""
    hooked(tmp_path, program)
    path = next(tmp_path.glob("*.ring"))
    whole = path.read_bytes()
    assert len(whole) == 1 << 20
    assert [call[2] for call in read(path)[0]["open"]] == ["stuck"]

    newest = 135168 + 20000 % 9514 * 48
    changes = {
        "torn": whole[: newest + 44] + b"\xff\xff\xff\xff" + whole[newest + 48 :],
        "cut": whole[:200_000],
        "version": whole[:8] + b"\x63" + whole[9:],
        "garbage": b"\0" * 4096,
        "empty": b"",
    }
    for name, data in changes.items():
        (tmp_path / name).write_bytes(data)
    torn, cut, version, garbage, empty = read(*(tmp_path / name for name in changes))
    assert torn["open"] == [] and torn["threads"][0]["last"][-1][9] == 19999
    assert cut["is_whole"] is False and cut["threads"][0]["count"] == 20001
    assert "99" in version["why"] and garbage["why"] == empty["why"] != version["why"]
    assert read(tmp_path / "missing")[0]["why"] == os.strerror(errno.ENOENT)
