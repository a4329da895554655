"""Which process is which rank: claims, what settles them, and who is none. All of it pure."""

from __future__ import annotations

import os
from types import ModuleType
from typing import Any

import pytest

Process = dict[str, Any]
SPAWNED = ["python", "-c", "from multiprocessing.spawn import spawn_main; spawn_main()", "--multiprocessing-fork"]
TRACKER = ["python", "-c", "from multiprocessing.resource_tracker import main;main(5)"]
TORCHRUN = ["/usr/bin/python3", "/usr/bin/torchrun", "--nproc-per-node", "2", "train.py"]


def process(ppid: int, *argv: str, start: int = 1, comm: str = "python", state: str = "S", **env: str) -> Process:
    argv = argv or ("python", "train.py")
    exe = "/usr/bin/python3.11" if comm.startswith(("python", "ray")) else f"/usr/bin/{comm}"
    return {
        "ppid": ppid, "start_ticks": start, "exe": exe, "comm": comm, "state": state, "argv": list(argv), "env": env,
    }  # fmt: skip


def ranks(
    agent: ModuleType, known: dict[int, Process], peeks: dict[int, Any] | None = None, tasks: Any = None
) -> dict[int, int]:
    numbers = agent.node_numbers
    claims = numbers.claims_of(known, tasks or {}, peeks or {})
    return {rank: pid for (_, rank), pid in numbers.choose(known, tasks or {}, claims).items()}


def is_settled(agent: ModuleType, known: dict[int, Process]) -> bool:
    numbers = agent.node_numbers
    claims = numbers.claims_of(known, {}, {})
    return bool(numbers.is_settled(known, claims, set(numbers.choose(known, {}, claims).values())))


@pytest.mark.parametrize(
    ("argv", "comm", "role"),
    [
        (TRACKER, "python", "helper"),
        (TORCHRUN, "python", "launcher"),
        (["python", "-u", "-m", "torch.distributed.run", "train.py"], "python", "launcher"),
        (["python", "-m", "deepspeed.launcher.launch", "train.py"], "pt_main_thread", "launcher"),
        (["ray::IDLE"], "ray::IDLE", "helper"),
        (["orted"], "orted", "launcher"),
        (["bash", "train.sh"], "bash", "launcher"),
        (["python", "train.py", "torch.distributed.run"], "python", None),
        (["python", "/home/torchrun/train.py"], "python", None),
        (["python", "-X", "dev", "train.py"], "python", None),
        (SPAWNED, "python", None),
        (["ray::RayTrainWorker"], "ray::RayTrainWo", None),
    ],
)
def test_what_a_program_is(agent: ModuleType, argv: list[str], comm: str, role: str | None) -> None:
    found = agent.node_identity.role_of(process(1, *argv, comm=comm))
    assert (found[0] if found else None) == role


def test_ranks_of_spawn_have_the_index_of_torch_and_not_the_shells_rank(agent: ModuleType) -> None:
    known = {
        10: process(1, RANK="0", WORLD_SIZE="1"),
        11: process(10, *TRACKER, RANK="0"),
        13: process(10, *SPAWNED, start=3, RANK="0"),
        12: process(10, *SPAWNED, start=4, RANK="0"),
        14: process(13, *SPAWNED, start=5, RANK="0"),
    }
    assert not is_settled(agent, known)
    frames = {"named": []}
    peeks = {
        10: {"frames": {**frames, "role": ("launcher", "it waits for ranks")}},
        13: {"frames": {**frames, "spawned": 1}},
        12: {"frames": {**frames, "spawned": 0}},
        14: {"frames": {**frames, "role": ("helper", "it is a worker of a data loader")}},
    }
    assert ranks(agent, known, peeks) == {0: 12, 1: 13}


def test_lightnings_main_process_is_rank_0(agent: ModuleType) -> None:
    """It has set LOCAL_RANK for itself; its children began with theirs, and with a rank of MPI that is not theirs."""
    mpi = {"OMPI_COMM_WORLD_RANK": "0"}
    known = {
        10: process(1),
        11: process(10, LOCAL_RANK="1", WORLD_SIZE="3", **mpi),
        12: process(10, LOCAL_RANK="2", WORLD_SIZE="3", **mpi),
        13: process(11, LOCAL_RANK="1", WORLD_SIZE="3", **mpi),
    }
    assert not is_settled(agent, known)
    assert ranks(agent, known, {10: {"env": {"LOCAL_RANK": "0", **mpi}}}) == {0: 10, 1: 11, 2: 12}


def test_local_ranks_of_the_second_node_are_behind_those_of_the_first(agent: ModuleType) -> None:
    known = {pid: process(1, LOCAL_RANK=str(pid - 10), NODE_RANK="1") for pid in (10, 11)}
    assert ranks(agent, known) == {2: 10, 3: 11}


def test_arguments_count_only_if_they_tell_all_processes_apart(agent: ModuleType) -> None:
    known = {10 + at: process(1, "python", "t.py", "--rank", str(2 - at)) for at in range(3)}
    assert ranks(agent, known) == {2: 10, 1: 11, 0: 12}
    assert not is_settled(agent, known), "the stacks are asked first"
    adapters = {10 + at: process(1, "python", "t.py", "--rank=16") for at in range(3)}
    assert ranks(agent, adapters) == {}
    some = {**known, 13: process(1, "python", "t.py")}
    assert ranks(agent, some) == {}
    local = {10 + at: process(1, "python", "t.py", f"--local_rank={at + 4}") for at in range(2)}
    assert ranks(agent, local) == {}


def named(rank: int, size: int, is_argument: bool = True) -> dict[str, Any]:
    return {"frames": {"named": [["/src/train.py", "main", "rank", rank, size, is_argument]]}}


def test_arguments_of_a_function_number_ranks(agent: ModuleType) -> None:
    known = {pid: process(1) for pid in (10, 11, 12)}
    assert ranks(agent, known, {10: named(2, 3), 11: named(0, 3), 12: named(1, 3)}) == {2: 10, 0: 11, 1: 12}
    assert ranks(agent, known, {10: named(1, 3), 11: named(1, 3), 12: named(0, 3)}) == {}, "twice the same"
    assert ranks(agent, known, {10: named(2, 3), 11: named(0, 3)}) == {}, "one of them does not say"


def test_a_variable_may_be_the_counter_of_a_loop(agent: ModuleType) -> None:
    known = {pid: process(1) for pid in (10, 11)}
    peeks = {10: named(1, 2, is_argument=False), 11: named(0, 2, is_argument=False)}
    assert ranks(agent, known, peeks) == {}
    connect(peeks, server=10, pids=(10, 11))
    assert ranks(agent, known, peeks) == {}, "the one with 0 does not serve the store"
    for each in peeks.values():
        each.pop("connections")
    connect(peeks, server=11, pids=(10, 11))
    assert ranks(agent, known, peeks) == {1: 10, 0: 11}


def connect(peeks: dict[int, Any], server: int, pids: tuple[int, ...]) -> None:
    """Give each process a connection to a port that `server` serves."""
    for pid in pids:
        local = f"127.0.0.1:{40000 + pid}"
        peeks[pid]["connections"] = {"serves": {}, "ends": {f"{pid}": [local, "127.0.0.1:29500"]}}
        peeks[server].setdefault("connections", {"serves": {}, "ends": {}})
    peeks[server]["connections"]["serves"] = {"99": 29500}
    for pid in pids:
        peeks[server]["connections"]["ends"][f"9{pid}"] = ["127.0.0.1:29500", f"127.0.0.1:{40000 + pid}"]


def test_where_nothing_numbers_processes_only_the_server_of_the_store_is_known(agent: ModuleType) -> None:
    known = {10: process(1), 11: process(1, start=2), 12: process(1, "python", "monitor.py", start=3)}
    peeks: dict[int, Any] = {pid: {} for pid in known}
    connect(peeks, server=11, pids=(10, 11))
    found = agent.node_ranks.count_ranks(1, known, peeks)
    assert [(rank["rank"], rank["pid"], rank["source"]) for rank in found] == [
        (0, 11, "store"), (1, 10, "order of start"),
    ]  # fmt: skip


def test_one_task_of_slurm_is_the_shell_that_all_were_started_in(agent: ModuleType) -> None:
    known = {pid: process(1, SLURM_PROCID="0") for pid in (10, 11)}
    assert ranks(agent, known) == {}
    known[11]["env"]["SLURM_PROCID"] = "1"
    assert ranks(agent, known) == {0: 10, 1: 11}


def test_torchrun_that_has_started_nothing_is_no_rank(agent: ModuleType) -> None:
    known = {10: process(1, *TORCHRUN)}
    assert ranks(agent, known) == {}
    assert agent.node_ranks.count_ranks(10, known) == []
    (other,) = agent.node_numbers.tell_others(known, {}, {})
    assert (other["pid"], other["role"]) == (10, "launcher")


def test_a_size_that_is_too_small_speaks_of_something_else(agent: ModuleType) -> None:
    """The variables of a batch step, or a number of nodes."""
    known = {pid: process(1, RANK=str(pid - 10), SLURM_STEP_NUM_TASKS="1") for pid in (10, 11)}
    assert [rank["world_size"] for rank in agent.node_ranks.assign_ranks(known, {})] == [None, None]


def test_who_is_no_rank_is_explained(agent: ModuleType) -> None:
    known = {
        9: process(1),
        10: process(9, RANK="0"),
        11: process(10, RANK="0"),
        12: process(9, "python", "other.py"),
        13: process(9, comm="python", state="Z"),
        14: process(10, comm="cat"),
    }
    others = agent.node_numbers.tell_others(known, {10: "rank 0"}, {})
    roles = {other["pid"]: other["role"] for other in others}
    assert roles == {9: "launcher", 11: "helper", 12: "unknown", 13: "ended", 14: "helper"}
    assert all("rank 0" in other["why"] for other in others if other["role"] == "helper")


def frame(name: str, file: str, arguments: dict[str, Any]) -> dict[str, Any]:
    values = [{"name": key, "arg": True, "repr": str(value)} for key, value in arguments.items()]
    return {"name": name, "filename": file, "locals": values}


def test_a_forked_worker_has_the_stack_of_its_rank_below_its_own(agent: ModuleType) -> None:
    torch = "/site/torch/multiprocessing/spawn.py"
    rank = [
        frame("main", "/src/train.py", {"rank": 1, "world_size": 2}),
        frame("_wrap", torch, {"i": 1}),
        frame("BaseProcess._bootstrap", "/lib/multiprocessing/process.py", {}),
        frame("main", "/src/launch.py", {"rank": 0, "world_size": 9}),
    ]
    found = agent.node_peek.arguments_of([{"os_thread_id": 7, "frames": rank}], 7)
    assert (found["spawned"], found["named"]) == (1, [["/src/train.py", "main", "rank", 1, 2, True]])
    loop = frame("_worker_loop", "/site/torch/utils/data/_utils/worker.py", {"worker_id": 0, "num_workers": 2})
    worker = [loop, frame("_bootstrap", "/lib/multiprocessing/process.py", {}), *rank]
    found = agent.node_peek.arguments_of([{"os_thread_id": 7, "frames": worker}], 7)
    assert found["named"] == [] and found["role"][0] == "helper"


def test_functions_of_a_group_number_no_rank_but_those_that_join_the_world_do(agent: ModuleType) -> None:
    torch = "/site/torch/distributed/distributed_c10d.py"
    group = frame("gather", torch, {"rank": 1, "size": 2})
    joining = frame("init_process_group", torch, {"rank": 5, "world_size": 8})
    defaults = frame("init_process_group", torch, {"rank": -1, "world_size": -1})
    read = agent.node_peek.arguments_of
    assert read([{"os_thread_id": 7, "frames": [group]}], 7) == {"named": []}
    assert read([{"os_thread_id": 7, "frames": [joining]}], 7) == {"named": [], "joined": [5, 8]}
    assert read([{"os_thread_id": 7, "frames": [defaults]}], 7) == {"named": []}


def test_the_environment_that_this_process_has_now(agent: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "17")
    monkeypatch.setenv("WORLD_SIZE", "")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    read = agent.node_environment.environment_now
    assert read(os.getpid(), ("RANK", "WORLD_SIZE", "LOCAL_RANK"), {}) == {"RANK": "17", "WORLD_SIZE": ""}
    assert read(2**22 + 1, ("RANK",), {}) is None


def test_names_that_end_alike_share_their_text(agent: ModuleType) -> None:
    assert agent.node_environment.name_offsets(b"\0__environ\0other_environ\0environ\0") == {1, 2, 3, 16, 17, 25}
