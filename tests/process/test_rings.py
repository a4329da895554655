"""The ring of a rank's last calls: real ranks write it, and it is read while they live, and after SIGKILL."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bigsci_launch.cli.main import bsl
from bigsci_launch.runs.layout import AttemptDir
from bigsci_launch.spy.evidence.ranks import read_evidence
from bigsci_launch.spy.judge.waits import build_graph
from bigsci_launch.spy.look.collect import collect_here
from bigsci_launch.spy.look.target import Target
from bigsci_launch.trace.read import NO_COPY, read_copies

from .recorded_ranks import DIAGNOSTICS, Ranks, Reply, read, until
from .test_spy_dumps import dump

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
    until(lambda: all("ready" in ranks.log(rank) for rank in (0, 1)))
    until(lambda: all(open_calls(ring) for ring in read(ranks.live(0), ranks.live(1))))
    first, second = read(ranks.live(0), ranks.live(1))
    assert (first["rank"], first["world_size"], second["rank"]) == (0, 2, 1)
    assert ("recv", 1, 8) in open_calls(first)
    assert ("send", 0, 7) in open_calls(second)
    assert first["recorder"]["last_sequence"] == {"1": 4} and first["recorder"]["members"] == {"1": [0, 1]}
    assert first["recorder"]["open"] == [] and first["are_blocking"]
    assert any(call[2] == "recv" and call[4].endswith("<string>:10 <module>") for call in first["open"])

    target = Target(label="tags", request={"pid_files": str(ranks.attempt / "pids")})
    evidence = read_evidence({"job": "tags"}, collect_here(target))
    waits = build_graph(evidence).waits
    assert str(waits[0]) == "recv from rank 1 with tag 8" and str(waits[1]) == "send to rank 0 with tag 7"

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
    assert "recv from rank 1 with tag 8, float32 [3], at <string>:10 <module>" in said.stdout, said.output
    assert "send to rank 0 with tag 7" in said.stdout and "not ended" in said.stdout
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
    until(lambda: all("ready" in ranks.log(rank) for rank in range(3)))
    rings = read(*(ranks.live(rank) for rank in (1, 2)))
    sent, received = (
        {(call[6], call[7]) for call in ring["threads"][0]["last"] if call[2] == operation}
        for ring, operation in zip(rings, ("send", "recv"), strict=True)
    )
    assert (sent, received) == ({(2, 5)}, {(1, 5)})
    assert not any(ring["are_blocking"] for ring in rings)  # a group that may have several backends
    assert not any("not recorded" in ranks.log(rank) for rank in range(3))


@pytest.mark.torch
def test_a_stopped_rank_has_a_ring(ranks: Ranks) -> None:
    pytest.importorskip("torch")
    ranks.start([sys.executable, "-c", TAGS], 2)
    until(lambda: all("ready" in ranks.log(rank) for rank in (0, 1)))
    until(lambda: bool(open_calls(read(ranks.live(1))[0])))
    pid = ranks.record(1)["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        assert ("send", 0, 7) in open_calls(read(ranks.live(1))[0])
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_rank_that_ends_well_leaves_nothing(ranks: Ranks) -> None:
    ranks.start([sys.executable, "-c", "print('done')"], 1)
    assert ranks.wait() == [0]
    assert not ranks.live(0).parent.exists() and not ranks.kept(0).exists()
    assert list(ranks.rings.glob("bsl-rings-*/*")) == []


def test_a_folder_that_cannot_be_made_is_said_and_the_program_runs(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ranks.start([sys.executable, "-c", "import os; print('ring', 'BSL_RING_DIR' in os.environ)"], 1, f"{tmp_path}/file")
    assert ranks.wait() == [0]
    assert "ring False" in ranks.log(0)
    assert ranks.record(0)["rings"] is None and "Not a directory" in ranks.record(0)["why_no_rings"]
    assert ranks.log(0).count("rank_runner: the last calls are not kept: [Errno 20] Not a directory") == 1


def test_the_program_keeps_its_own_sitecustomize_and_its_path(ranks: Ranks, tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("print('my own sitecustomize')\n")
    program = "import sitecustomize, sys; print(sitecustomize.__file__); print('torch' in sys.modules)"
    ranks.start([sys.executable, "-c", program], 1, PYTHONPATH=str(own))
    assert ranks.wait() == [0]
    assert "my own sitecustomize" in ranks.log(0) and f"{own}/sitecustomize.py" in ranks.log(0)
    assert "False" in ranks.log(0)


HOOK = f"import sys; sys.path.insert(0, {str(DIAGNOSTICS)!r}); import ring_hook, os\n"


def hooked(folder: Path, program: str, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
    given = {**os.environ, "BSL_RING_DIR": str(folder), "RANK": "3", "WORLD_SIZE": "4"}
    return subprocess.run(
        [python, "-c", HOOK + program], env=given, capture_output=True, text=True, timeout=60, check=True
    )


def find_python(version: str) -> str:
    installed = sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python"))
    found = str(installed[-1]) if installed else shutil.which(f"python{version}")
    return found or pytest.skip(f"there is no Python {version} here")


def test_the_disk_is_full_and_the_program_runs_on(tmp_path: Path) -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
    done = hooked(tmp_path, limit + "print(ring_hook.lane(), ring_hook.lane(), ring_hook.ring())")
    assert done.stdout == "None None None\n"
    assert done.stderr.count("no ring of the last calls is kept") == 1
    assert list(tmp_path.iterdir()) == []


def test_the_disk_of_the_node_is_full_and_the_program_runs_on(ranks: Ranks, small_disk: Path) -> None:
    ranks.start([sys.executable, "-c", HOOK + "print(ring_hook.lane(), ring_hook.ring())"], 1, str(small_disk))
    assert ranks.wait() == [0]
    assert "None None" in ranks.log(0)
    assert ranks.log(0).count("no ring of the last calls is kept") == ranks.log(0).count("No space left on device") == 1


def test_the_hook_runs_on_python_38_and_is_in_no_ones_way(ranks: Ranks, tmp_path: Path) -> None:
    python = find_python("3.8")
    program = "import sys; print(sys.version_info[:2], 'torch' in sys.modules, 'ring_hook' in sys.modules)"
    ranks.start([python, "-c", program], 1)
    assert ranks.wait() == [0]
    assert len(ranks.log(0).splitlines()) == 1 and ranks.log(0).endswith(" (3, 8) False False\n")
    hooked(tmp_path, "ring_hook.mark(7, 'step')", python)
    assert read(*tmp_path.glob("*.ring"))[0]["step"] == 7


def test_a_program_keeps_its_timer_of_faulthandler_and_its_children_end(tmp_path: Path) -> None:
    program = """
import faulthandler, signal, sys, time
ring_hook.BEAT_S = 0.001
ring_hook.mark(7, "step")
for _ in range(200):
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # it ends as programs do, and not by os._exit
        sys.exit()
    assert os.waitpid(child, 0)[1] == 0
faulthandler.dump_traceback_later(0.5, file=sys.stderr)
time.sleep(1)
print("ended")
"""
    done = hooked(tmp_path, program)
    assert done.stdout == "ended\n" and done.stderr.count("Timeout (0:00:00.5") == 1
    assert [path.read_text() for path in tmp_path.glob("*.stacks")] == [""]


def test_a_handler_of_the_program_is_left_alone(tmp_path: Path) -> None:
    program = """
import signal, time
said = []
signal.signal(ring_hook.STACKS_SIGNAL, lambda *_: said.append("mine"))
ring_hook.mark(7, "step")
time.sleep(0.2)
os.kill(os.getpid(), ring_hook.STACKS_SIGNAL)
print(said)
"""
    assert hooked(tmp_path, program).stdout == "['mine']\n"
    assert not list(tmp_path.glob("*.stacks"))


RINGS = """
import json, pathlib, time
from ring_file import NONE, Ring
folder, other, attempt = (pathlib.Path(name) for name in ("task", "other", "run/attempts/0001"))
def ring(place, pid, rank, world, operation):
    made = Ring(str(place / f"{pid}.ring"), rank=rank, world_size=world)
    lane = made.lane()
    lane.enter(made.name(operation), 0, 0, 0, NONE, NONE, 0, 0)
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
    rings.folder = place
    assert rings.keep() is None
"""


def test_of_each_worker_the_newest_ring_is_kept(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", HOOK + RINGS], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
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
    until(lambda: "ready" in ranks.log(0))
    ring = ranks.live(0)
    until(lambda: ring.with_suffix(".stacks").exists())
    modes = {path: (path.stat().st_mode & 0o777, path.stat().st_gid) for path in (ring.parent, *ring.parent.iterdir())}
    assert modes == {ring.parent: (0o750, 4711), ring: (0o640, 4711), ring.with_suffix(".stacks"): (0o640, 4711)}
    assert ring.parent.parent.stat().st_mode & 0o777 == 0o711
    os.kill(ranks.record(0)["pid"], signal.SIGKILL)
    assert ranks.wait() == [137]
    others = ranks.attempt / "logs" / "rank-0000.log"
    assert ranks.kept(0).stat().st_mode & 0o777 == others.stat().st_mode & 0o777 == 0o644


SHOW = """
import json, os
print(json.dumps({name: os.environ[name] for name in os.environ if name.startswith(("TORCH_FR", "TORCH_NCCL"))}))
"""
THEIRS = {"TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/their/dump_", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}


@pytest.mark.parametrize("theirs", [{}, THEIRS])
def test_dumps_of_torch_go_to_the_attempt_unless_the_user_says_where(ranks: Ranks, theirs: dict[str, str]) -> None:
    ranks.start([sys.executable, "-c", SHOW], 1, **theirs)
    assert ranks.wait() == [0]
    prefix = str(AttemptDir(ranks.attempt).recorder_dumps)
    ours = dict.fromkeys(("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"), prefix)
    assert json.loads(ranks.log(0).split(" ", 1)[1]) == (theirs or {**ours, "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"})
    files = ["/their/dump_0"] if theirs else [f"{prefix}0"]
    assert ranks.record(0)["recorder_files"] == files and (ranks.attempt / "recorder").is_dir() == (not theirs)


@pytest.mark.parametrize(("version", "kept"), [("2.4.1+cu121", "2000"), ("2.13.0+cpu", None), ("weird", None)])
def test_an_old_torch_is_told_to_record(tmp_path: Path, version: str, kept: str | None) -> None:
    program = f"import sys, types; sys.modules['torch'] = types.SimpleNamespace(__version__={version!r})\n" + HOOK
    program += "print(os.environ.get('TORCH_NCCL_TRACE_BUFFER_SIZE'))"
    given = {name: value for name, value in os.environ.items() if name != "TORCH_NCCL_TRACE_BUFFER_SIZE"}
    argv = [sys.executable, "-c", program]
    done = subprocess.run(argv, env=given, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == f"{kept}\n"


def test_a_dump_in_the_attempt_is_found(ranks: Ranks) -> None:
    ranks.start([sys.executable, "-c", "import time; print('ready', flush=True); time.sleep(60)"], 1)
    until(lambda: "ready" in ranks.log(0))
    time.sleep(0.5)
    Path(ranks.record(0)["recorder_files"][0]).write_bytes(dump())
    target = Target(label="dumps", request={"pid_files": str(ranks.attempt / "pids")})
    sample = collect_here(target)[0]["ranks"][0]["samples"][-1]
    assert sample["recorder"]["last_sequence"] == {"0": 8}, sample
    assert sample["recorder_file"] == str(AttemptDir(ranks.attempt).recorder_dumps) + "0"


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
        lane.leave(lane.enter(ring_hook.ring().name("work"), 0, 0, 0, -1, -1, 0, 0))
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
    assert f"incomplete: {ring['lost_names']} names and 984 threads did not fit" in said.stdout, said.output


def test_rings_that_are_torn_cut_or_of_another_version(tmp_path: Path) -> None:
    program = """
lane = ring_hook.lane()
for number in range(20000):
    lane.leave(lane.enter(ring_hook.ring().name("work"), 0, 0, 0, -1, -1, 0, number))
lane.enter(ring_hook.ring().name("stuck"), 0, 0, 0, -1, -1, 0, 20000)
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
    assert version["why"] == "it has version 99; this bsl reads version 1"
    assert garbage["why"] == empty["why"] == "it is no ring"
    assert read(tmp_path / "missing")[0]["why"] == "No such file or directory"


@pytest.mark.torch
def test_torch_is_imported_late(ranks: Ranks) -> None:
    pytest.importorskip("torch")
    late = "import sys; assert 'torch' not in sys.modules; import torch.distributed as d; print(d.all_reduce.__name__, "
    late += "hasattr(d.all_reduce, '_bsl_original'), hasattr(d.distributed_c10d.all_reduce, '_bsl_original'))"
    ranks.start([sys.executable, "-c", late], 1)
    assert ranks.wait() == [0]
    assert "all_reduce True True" in ranks.log(0)


@pytest.mark.torch
def test_an_isolated_python_runs_without_a_ring(ranks: Ranks) -> None:
    pytest.importorskip("torch")
    program = "import torch.distributed as d; print(hasattr(d.all_reduce, '_bsl_original'))"
    ranks.start([sys.executable, "-I", "-c", program], 1)
    assert ranks.wait() == [0]
    assert "False" in ranks.log(0)
