"""The stand-alone programs of diagnostics/ have their own copies of facts, which agree with the package.

They run on compute nodes without the package, so they keep their copies; these laws hold both sides equal.
"""

from __future__ import annotations

import ast
import contextlib
import itertools
import json
import os
import pickle
import random
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigsci_launch import procfs
from bigsci_launch.file_names import launcher_name, launcher_of_name, rank_name
from bigsci_launch.runs.layout import AttemptDir, rank_files, write_json
from bigsci_launch.scheduler.command import is_scrubbed
from bigsci_launch.spy.evidence.calls.written_stacks import OF_THE_RING
from bigsci_launch.spy.inputs.flight_recorder import read_recorder_json, read_recorder_pickle
from bigsci_launch.topology import AXIS_NAMES, Topology, UnevenTopology

from .conftest import DIAGNOSTICS, Parsed, Program, nodes, standalone

HOSTILE_NAMES = (
    b"python3",
    b" ",
    b"(",
    b")",
    b"a) S 1 (b",
    b") Z 0 0 (",
    b"x\ny",
    b"a\rb",
    b"\xff)\xfe(",
    b"1 (2) R 3",
)

# ------------------------------------------------------------------------------------------- /proc/PID/stat


@pytest.fixture(params=HOSTILE_NAMES, ids=repr)
def named(request: pytest.FixtureRequest) -> Iterator[bytes]:
    """Give this process that name in the kernel."""
    with called(Path("/proc/self/comm"), request.param):
        yield request.param


@contextlib.contextmanager
def called(comm: Path, name: bytes) -> Iterator[None]:
    before = comm.read_bytes().removesuffix(b"\n")
    comm.write_bytes(name)
    try:
        yield
    finally:
        comm.write_bytes(before)


def test_the_kernels_text_is_read_alike(program: Program, named: bytes) -> None:
    text = Path("/proc/self/stat").read_bytes().decode("utf-8", "replace")
    ours, theirs = procfs.parse_stat(text), program("node_processes").parse_stat(text)
    assert theirs["comm"] == ours.command == named.decode("utf-8", "replace")
    assert (theirs["state"], theirs["ppid"], theirs["cpu_ticks"], theirs["start_ticks"]) == (
        ours.state,
        ours.parent_pid,
        ours.cpu_ticks,
        ours.start_ticks,
    )


def test_start_and_state_of_a_process_are_read_alike(program: Program, named: bytes) -> None:
    ours = procfs.read_process(os.getpid())
    assert ours is not None
    assert program("rank_process").start_ticks(os.getpid()) == ours.start_ticks
    assert program("loss").state_of(os.getpid()) == ours.state == "R"
    assert program("node_processes").read_safe(os.getpid())["start_ticks"] == ours.start_ticks
    assert "R" in program("node_stacks").thread_states(os.getpid())


@pytest.mark.timeout(30)
@pytest.mark.parametrize("name", HOSTILE_NAMES, ids=repr)
def test_the_state_of_a_thread_is_found(program: Program, name: bytes) -> None:
    end = threading.Event()
    thread = threading.Thread(target=end.wait, daemon=True)
    thread.start()
    try:
        with called(Path(f"/proc/self/task/{thread.native_id}/comm"), name):
            program("kernel").wait_for_another_thread_in("S")  # for ever, if it does not find the thread
    finally:
        end.set()
        thread.join()


def test_a_process_that_is_gone_is_nobodys(program: Program) -> None:
    gone = 2**22 + 1
    assert procfs.read_process(gone) is program("rank_process").start_ticks(gone) is None
    assert program("node_processes").read_safe(gone)["state"] == "gone"


@pytest.mark.slow
def test_one_module_of_the_package_parses_it(modules: Parsed) -> None:
    """The last parenthesis is where every parser begins."""
    assert [path for path, tree in modules.items() if cuts_at_parenthesis(tree)] == ["procfs.py"]


def cuts_at_parenthesis(tree: ast.Module) -> bool:
    calls = [node for node in nodes(tree) if isinstance(node, ast.Call)]
    return any(
        isinstance(call.func, ast.Attribute)
        and call.func.attr in ("rpartition", "rsplit", "rindex", "rfind")
        and [argument.value for argument in call.args[:1] if isinstance(argument, ast.Constant)] == [")"]
        for call in calls
    )


# ------------------------------------------------------------------------------------------- numbering of ranks

sizes = st.integers(1, 4)
topologies = st.builds(Topology, tp=sizes, pp=sizes, dp=sizes, cp=st.integers(1, 3), ep=st.integers(1, 3))


@given(topology=topologies)
def test_the_runner_of_a_rank_numbers_ranks_alike(program: Program, topology: Topology) -> None:
    process = program("rank_process")
    parsed = process.parse_topology(str(topology))
    for rank in range(topology.world_size):
        recorded = process.coordinate(rank, parsed)
        assert list(recorded.items()) == list(topology.coordinate(rank).as_dict().items())


@given(topology=topologies)
def test_the_laboratory_numbers_ranks_alike(program: Program, topology: Topology) -> None:
    loop = program("step_loop")
    for rank in range(topology.world_size):
        place = loop.Place(rank, loop.parse_topology(str(topology)))
        assert place.world_size == topology.world_size and place.rank_at(place.index) == rank
        assert place.coordinate == topology.coordinate(rank).as_dict()
    assert [tuple(place.group_of(rank, axis)) for axis in AXIS_NAMES] == [
        topology.group(axis, rank) for axis in AXIS_NAMES
    ]


@pytest.mark.parametrize("text", ["tp=2,sp=2", "tp", "tp=x"])
def test_what_is_no_topology_is_refused(program: Program, text: str) -> None:
    with pytest.raises(ValueError):
        program("rank_process").parse_topology(text)


# ------------------------------------------------------------------------------------------- torch's recorder

ENTRY = st.fixed_dictionaries(
    {
        "process_group": st.sampled_from([("0", "default_pg"), ("1", "")]),
        "profiling_name": st.sampled_from(["gloo:all_reduce", "nccl:all_reduce", "barrier"]),
        "collective_seq_id": st.integers(1, 9),
        "input_sizes": st.sampled_from([[[8]], [[8], [2, 3]]]),
        "input_dtypes": st.just(["Float"]),
        "state": st.sampled_from(["scheduled", "started", "completed"]),
        "retired": st.booleans(),
        "is_p2p": st.booleans(),
    }
)
GROUPS = st.dictionaries(
    st.sampled_from(["0", "1", "2"]), st.sampled_from([{"ranks": "[0, 3]"}, {"ranks": "[]"}, {"desc": "tp"}])
)


@pytest.mark.slow
@given(st.lists(ENTRY, max_size=12), GROUPS, st.booleans(), st.randoms())
def test_recorded_collectives_are_stored_alike(
    entries: list[dict[str, Any]], groups: dict[str, Any], is_pickle: bool, chance: random.Random
) -> None:
    """Both read it: the agent on the rank's node, and the package, which is given the file."""
    entries = [{"record_id": 5 + number, **entry} for number, entry in enumerate(entries)]
    chance.shuffle(entries)
    document = {"version": "2.10", "pg_config": groups, "entries": entries}
    data = pickle.dumps(document, protocol=2) if is_pickle else json.dumps(document).encode()
    with tempfile.TemporaryDirectory() as folder, standalone() as program:
        path = Path(folder) / "nccl_trace_rank_3"
        path.write_bytes(data)
        theirs = program("node_recorder").read_dump(str(path), os.getuid())
    read = read_recorder_pickle(path, data) if is_pickle else read_recorder_json(path, json.loads(data))
    assert read.readings[0].recorder == json.loads(json.dumps(theirs))


# ------------------------------------------------------------------------------------------- files of a run

RANKS = (0, 3, 12345)


def test_files_of_ranks_are_named_alike() -> None:
    """Every f-string of a stand-alone program that names such a file: `rank-{rank:04d}`."""
    formats = [(path.name, found) for path in DIAGNOSTICS.rglob("*.py") for found in rank_formats(path)]
    assert {"node_ranks.py", "node_recorder.py", "rank_process.py", "step_loop.py"} <= {name for name, _ in formats}
    for name, found in formats:
        assert [f"rank-{format(rank, found)}" for rank in RANKS] == [rank_name(rank) for rank in RANKS], name


def test_files_of_launchers_are_named_alike(program: Program) -> None:
    names = [program("rank_launcher").Launcher.name_of(number) for number in RANKS]
    assert names == [launcher_name(number) for number in RANKS]
    assert [launcher_of_name(name) for name in names] == list(RANKS)


def rank_formats(path: Path) -> Iterator[str]:
    """The format of each number that follows `rank-` in the f-strings of a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        parts = node.values if isinstance(node, ast.JoinedStr) else []
        for before, value in itertools.pairwise(parts):
            if isinstance(before, ast.Constant) and str(before.value).endswith("rank-"):
                assert isinstance(value, ast.FormattedValue)
                spec = value.format_spec.values if isinstance(value.format_spec, ast.JoinedStr) else []
                yield "".join(str(part.value) for part in spec if isinstance(part, ast.Constant))


def test_what_ranks_leave_is_found_where_the_package_puts_it(program: Program, tmp_path: Path) -> None:
    attempt = AttemptDir(tmp_path / "0001")
    attempt.make()
    for rank in RANKS:
        write_json(attempt.pid_file(rank), {"rank": rank, "node": "n0", "host": "n0", "pid": 100 + rank})
        write_json(attempt.exit_file(rank), {"rank": rank, "code": 1})
        write_json(attempt.error_file(rank), {"rank": rank, "type": "ValueError"})
        attempt.event_file(rank).write_text('{"kind": "start"}\n')
        attempt.log_file(rank).write_text("last words\n")
    ((_, documents),) = program("node_ranks").read_pid_files(str(attempt.pids), "n0", None)
    assert sorted(document["rank"] for document in documents) == list(RANKS)
    assert sorted(rank_files(attempt.pids, ".json")) == list(RANKS)


# ------------------------------------------------------------------------------------------- Slurm


def test_a_runner_hides_the_same_variables_from_slurm(program: Program) -> None:
    theirs = program("rank_orphan")
    for name in ("SLURM_JOB_ID", "SBATCH_ACCOUNT", "SLURM_CONF", "SLURM_JWT", "PATH", "PMIX_RANK"):
        assert is_scrubbed(name) == (theirs.SCRUBBED.fullmatch(name) is not None and name not in theirs.KEPT)


# ------------------------------------------------------------------------------------------- rings


def ring_of(*calls: tuple[str | None, int, int | None]) -> dict[str, Any]:
    """Return a ring as `read_ring` gives it, with calls of an operation, a number in its group and a peer."""
    told = [[0.0, None, name, None, None, None, peer, None, number, 0, False] for name, number, peer in calls]
    return {"lanes": [{"calls": told}]}


def test_what_the_runner_of_a_rank_knows_of_rings_is_known_alike(program: Program) -> None:
    kept, found = program("rank_rings"), program("node_workers")
    for ring in (
        ring_of(),
        ring_of(("store.get", 0, None), (None, 0, None)),
        ring_of(("init_process_group", 0, None)),
        ring_of(("store.get", 0, None), ("barrier", 3, None)),
        ring_of(("send", 0, 0)),
    ):
        assert kept.takes_part(ring) == found.takes_part(ring)
    assert not kept.takes_part(ring_of(("store.get", 0, None))) and kept.takes_part(ring_of(("send", 0, 0)))
    asks, asked = program("rank_stacks"), program("ring_hook")
    assert (asks.STACKS_SIGNAL, asks.HEARTBEAT_THREAD) == (asked.STACKS_SIGNAL, asked.HEARTBEAT_THREAD)
    assert asks.LOOK_S * asks.NUM_LOOKS >= 3 * asked.HEARTBEAT_S
    assert all(hasattr(asked, name) for name in OF_THE_RING)
    assert program("rank_recorder").DUMP_VARIABLES == program("node_identity").DUMP_VARIABLES


@pytest.mark.parametrize("text", ["pipelines=0-1x4/2,4-5x3/3,6x4", "pipelines=tp=2,0-3x4/4-7,10-11x3/8-9,12-13x1"])
def test_runners_find_ranks_in_the_pipelines_of_an_uneven_run(program: Program, text: str, tmp_path: Path) -> None:
    topology, place = UnevenTopology.parse_pipelines(text), program("rank_process").place_in_pipelines
    ranks = range(topology.world_size)
    assert place(tmp_path, 0) is None
    (tmp_path / "layouts.jsonl").write_text(f'{{"topology": "pipelines=0x1"}}\n{{"topology": "{text}"}}\n')
    assert [place(tmp_path, rank) for rank in ranks] == [topology.coordinate(rank).as_dict() for rank in ranks]
    assert place(tmp_path, topology.world_size) is None
