"""The smallest evidence on which rules match that no recording shows: `test: NAME` in a table is the case NAME here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from bigsci_launch.spy.evidence.bundle import Bundle
from bigsci_launch.spy.evidence.ranks import Evidence

from ..conftest import Document, ended, rank_of

WORLD = "all_reduce@c10d:10 < step@/src/train.py:5"
TENSOR = "all_reduce@c10d:1 < all_reduce@tensor:33 < step@/src/loop.py:5"
HANDLE = "optimizer_step@/src/loop.py:7 < step@/src/loop.py:4"
SPIN = "tokenise@/src/data.py:7 < get_batch@/src/data.py:3 < train@/src/train.py:9"
PEERS = "wait_for_peers@/src/p.py:4 < main@/src/p.py:9"
LOADER = "next@/src/data.py:3 < step@/src/loop.py:4"
SERVER = "serve_forever@/usr/lib/python3.11/socketserver.py:9 < main@/src/p.py:3"
INIT = "init_process_group@c10d:1899 < main@/src/train.py:2"
JOINING = f"_new_process_group_helper@c10d:2169 < {INIT}"
AT_STORE = f"_create_c10d_store@/venv/torch/distributed/rendezvous.py:199 < {INIT}"
LOST = "[pair.cc:553] Connection closed by peer [10.0.0.3]:23436. This is typically caused by a remote worker crashing."
BUSY: Document = {"state": "R", "wchan": "0", "cpu_ticks": (0, 95), "owns_gil": True}
SLEEPING: Document = {"wchan": "hrtimer_nanosleep"}
POLLING: Document = {"wchan": "poll_schedule_timeout"}


def job(ranks: Sequence[Document], topology: str | None = None, **collection: Any) -> Evidence:
    node = {"node": "n0", "clock_ticks_per_s": 100, "ranks": list(ranks)}
    return Bundle({"topology": topology, **collection}, (node,) if ranks else ()).evidence()


def writing(rank: Document, num_bytes: int = 3_000_000) -> Document:
    for index, sample in enumerate(rank["samples"]):
        sample["io"] = {"wchar": 1 + index * num_bytes, "rchar": 1}
        sample["thread_times"] = {str(rank["pid"]): 5 + index}
    return rank


def flowing(rank: Document, num_bytes: int = 60_000) -> Document:
    """Data of a rank's connections: more than the store exchanges, less than what counts as work."""
    for index, sample in enumerate(rank["samples"]):
        sample["socket_bytes"] = {"sent": 1 + index * num_bytes, "received": 1}
    return rank


def woken(rank: Document, times: int = 1000) -> Document:
    for index, sample in enumerate(rank["samples"]):
        sample["voluntary"] = 5 + index * times
    return rank


def moving(stack: str) -> list[str]:
    return [f"forward@/src/m.py:3 < {stack}", stack]


def ring_of(*calls: Sequence[Any], keys: Sequence[str] = (), step: int = 0) -> Document:
    """A ring, read at second 900: calls are (entered, left, operation, group, detail, number, step)."""
    told = [
        [entered, left, operation, group, "/src/train.py:9 main", detail, None, None, number, at, False]
        for entered, left, operation, group, detail, number, at in calls
    ]
    recorder = {"first_record": 0, "tokens": [], "stream": [], "last_sequence": {}, "open": [], "members": {}}
    threads = [{"tid": 7, "last": told, "open": [call for call in told if call[1] is None]}]
    known = {"step": step, "phase": "", "heartbeat": 899.0, "read": 900.0, "lost_names": 0, "lost_threads": 0}
    recorder["last_sequence"] = {call[3].partition(":")[0]: call[8] for call in told if call[3]}
    steps = {call[3]: [[each[8], each[9], 0, 0, 1] for each in told if each[3] == call[3]] for call in told if call[3]}
    return {
        **{**known, "threads": threads, "set_keys": [f"key {key}" for key in keys]},
        **{"steps": steps, "recorder": recorder},
    }


def with_ring(rank: Document, *calls: Sequence[Any], keys: Sequence[str] = ()) -> Document:
    rank["samples"][-1]["ring"] = ring_of(*calls, keys=keys)
    return rank


def a_key_of_a_known_rank(keys: Sequence[str] = ("round/0", "round/1")) -> Evidence:
    barrier = (9.0, None, "barrier", "0: 0,1,2", None, 4, 0)
    waiting = rank_of(1, "next_round@/src/train.py:7 < main@/src/train.py:3", **POLLING)
    return job(
        [
            with_ring(rank_of(0, WORLD), barrier, keys=keys),
            with_ring(waiting, (9.0, None, "store.get", None, "key round/2", 0, 0)),
            with_ring(rank_of(2, WORLD), barrier),
        ]
    )


def all_told_to_end_with_rings() -> Evidence:
    exits = [ended(rank, signal="SIGTERM", terminated=0.5) for rank in (0, 1)]
    call = (9.0, None, "barrier", "0: 0,1", None, 4, 0)
    rings = [{"rank": rank, "ring": ring_of(call)} for rank in (0, 1)]
    return job([], world_size=2, exits=exits, rings=rings, is_over=True)


def all_told_and_lost_a_peer() -> Evidence:
    exits = [ended(rank, 1, terminated=0.5) for rank in (0, 1)]
    errors = [{"rank": rank, "node": "n0", "type": "RuntimeError", "message": LOST, "time": 0.9} for rank in (0, 1)]
    return job([], world_size=2, exits=exits, errors=errors, is_over=True)


def _in_one_place(last: str, step: int | None) -> Evidence:
    printed = [{"rank": 0, "lines": 3, "last": last, "step": step}]
    return job([rank_of(rank, "train@/src/p.py:5", **SLEEPING) for rank in range(2)], printed=printed)


def prints_a_step_in_one_place() -> Evidence:
    return _in_one_place("iteration 7/ 9 | lm loss: 1.0 |", 7)


def prints_something_in_one_place() -> Evidence:
    return _in_one_place("still waiting (30 s)", None)


def _steps(lag: int) -> list[tuple[Any, ...]]:
    """All-reduces number 1 to 6 of all ranks, in steps that are `lag` behind from the third one on."""
    return [(at, at + 0.1, "all_reduce", "0: 0,1,2", None, at, at - (lag if at > 2 else 0)) for at in range(1, 7)]


def one_is_a_step_behind() -> Evidence:
    return job([with_ring(flowing(rank_of(rank, HANDLE)), *_steps(int(rank == 1))) for rank in range(3)])


def one_is_a_step_behind_in_the_next_phase() -> Evidence:
    return job([with_ring(rank_of(rank, [LOADER, WORLD]), *_steps(int(rank == 1))) for rank in range(3)])


def one_names_another_root(
    past: Sequence[int] = (2, 2, 2), newest: int = 1, others: Sequence[int] = (2, 2, 2), group: str = "0: 0,1,2"
) -> Evidence:
    """Broadcast number 4: rank 1 names `newest` as its root and has named `past`, the others name rank 2 after
    `others`."""
    broadcast = "broadcast@c10d:10 < step@/src/train.py:5"
    ranks = [rank_of(rank, broadcast) for rank in range(3)]
    for at, rank in enumerate(ranks):
        roots = (*past, newest) if at == 1 else (*others, 2)
        runs = [[root, 1, number] for number, root in enumerate(roots, 5 - len(roots))]
        ring = ring_of((9.0, None, "broadcast", "0: 0,1,2", None, 4, 0))
        token = ["0", "", "broadcast", "[[4]]", "[float32]"]
        stream = {"tokens": [token], "stream": [0] * 4, "last_sequence": {"0": 4}, "open": [3]}
        ring["recorder"] |= {**stream, "members": {"0": [0, 1, 2]}}
        ring["roots"] = [[group if at == 1 else "0: 0,1,2", "broadcast", "/src/train.py:5 step", runs]]
        rank["samples"][-1]["ring"] = ring
    return job(ranks)


def sleeps_alone(frame: str = "stall@/src/train.py:7", without: Sequence[int] = (), **ring: Any) -> Evidence:
    """Rank 1 sleeps on a futex below `frame`, the others wait for it in collective 2, and `without` lack a ring."""
    members = {"0": [0, 1, 2]}
    ranks = [rank_of(rank, f"{frame} < main@/src/train.py:3" if rank == 1 else WORLD) for rank in range(3)]
    for at, rank in enumerate(ranks):
        calls = [(at, at + 0.1, "all_reduce", "0: 0,1,2", None, at, 0) for at in range(1, 2 if at == 1 else 3)]
        found = {**ring_of(*calls), "are_blocking": True, **(ring if at == 1 else {})}
        token = ["0", "", "all_reduce", "[[4]]", "[float32]"]
        stream = {"tokens": [token], "stream": [0] * len(calls), "open": [] if at == 1 else [1], "members": members}
        if at not in without:
            rank["samples"][-1]["ring"] = {**found, "recorder": {**found["recorder"], **stream}}
    return job(ranks)


def one_aborted(last: Sequence[str] = ("all_reduce [[8]]",), **ring: Any) -> Evidence:
    """All ranks have aborted, rank 0 first. They reduced and broadcast in turn, and rank 1 made `last` in the end."""
    exits = [ended(rank, signal="SIGABRT", time=1.0 + rank) for rank in range(3)]
    rings = []
    for rank in range(3):
        calls = ["all_reduce [[4]]", "broadcast [[1]]"] * 4 + list(last if rank == 1 else ("all_reduce [[4]]",))
        found, tokens = ring_of(), list(dict.fromkeys(calls))
        found["recorder"] |= {
            "tokens": [["0", "", *token.split(" ", 1), "[float32]"] for token in tokens],
            "stream": [tokens.index(call) for call in calls],
            "last_sequence": {"0": len(calls)},
            "members": {"0": [0, 1, 2]},
        }
        rings.append({"rank": rank, "ring": {**found, **ring}})
    return job([], world_size=3, exits=exits, rings=rings, is_over=True)


def nothing_there() -> Evidence:
    return job([], world_size=4)


def all_lost_a_peer() -> Evidence:
    exits = [ended(rank, 1) for rank in (0, 1)]
    errors = [{"rank": rank, "node": "n0", "type": "RuntimeError", "message": LOST, "time": 0.0} for rank in (0, 1)]
    return job([], world_size=2, exits=exits, errors=errors)


def one_died_and_one_may_wait() -> Evidence:
    exits = [ended(3, signal="SIGKILL")]
    ranks = [rank_of(0, TENSOR), rank_of(1, HANDLE), rank_of(2, HANDLE)]
    return job(ranks, "tp=2,dp=2", world_size=4, exits=exits)


def one_died_and_the_rest_stand_apart() -> Evidence:
    exits = [ended(3, signal="SIGKILL")]
    return job([rank_of(rank, f"work@/src/p.py:{rank}", **SLEEPING) for rank in range(3)], world_size=4, exits=exits)


def one_joined_between_the_looks() -> Evidence:
    stacks = [AT_STORE, JOINING, JOINING, [AT_STORE, JOINING]]
    return job([rank_of(rank, stack) for rank, stack in enumerate(stacks)])


def looks_for_the_others_elsewhere() -> Evidence:
    return job([rank_of(rank, AT_STORE if rank == 0 else JOINING, **POLLING) for rank in range(4)])


def nobody_reaches_the_store() -> Evidence:
    return job([rank_of(rank, AT_STORE, **POLLING) for rank in range(4)])


def an_answer_over_a_dead_link() -> Evidence:
    lost = {"tx": 48_720, "timer": "retransmit", "retransmits": 5}
    ends = {
        0: {"local": "10.0.0.1:50", "remote": "10.0.0.1:51"},
        1: {"local": "10.0.0.1:52", "remote": "10.0.0.2:60", **lost},
        2: {"local": "10.0.0.2:60", "remote": "10.0.0.1:52"},
        3: {"local": "10.0.0.2:61", "remote": "10.0.0.2:62"},
    }
    sockets = {rank: {"count": 1, "list": [{**end, "state": "ESTABLISHED", "fd": 9}]} for rank, end in ends.items()}
    ranks = [rank_of(rank, WORLD, sample={"sockets": held}) for rank, held in sockets.items() if rank < 3]
    asks = rank_of(3, "recv_into@/usr/lib/python3.11/socket.py:7 < get_tag@/src/x.py:1", **POLLING,
                   sample={"sockets": sockets[3]})  # fmt: skip
    return job([*ranks, asks])


def two_write_unread() -> Evidence:
    """Without a stack, with recorders that list nothing open, and with bytes that grow."""
    members = {"w": range(4)}
    inside = [rank_of(rank, WORLD, calls="w w!", members=members) for rank in (0, 1)]
    hidden = [flowing(writing(rank_of(rank, None, calls="w", members=members)), 0) for rank in (2, 3)]
    return job([*inside, *hidden])


def two_compute_alike() -> Evidence:
    """Endless loops hardly happen on two ranks; without the interpreter's lock they may wait for their devices."""
    native = {**BUSY, "owns_gil": False}
    return job([rank_of(0, WORLD), rank_of(1, WORLD), rank_of(2, SPIN, **native), rank_of(3, SPIN, **native)])


def a_circle_and_a_sleeper() -> Evidence:
    members = {"t": [0, 1], "d": [0, 1], "x": [2, 3]}
    calls = ["t!", "d!", "x!"]
    inside = [rank_of(rank, WORLD, calls=call, members=members) for rank, call in enumerate(calls)]
    return job([*inside, rank_of(3, LOADER, **SLEEPING)])


def one_writes_and_one_is_not_read() -> Evidence:
    barrier = "barrier@c10d:10 < save_checkpoint@/src/save.py:5"
    saving = writing(rank_of(1, "write@/src/save.py:1 < save_checkpoint@/src/save.py:2", state="D", wchan=""))
    return job([rank_of(0, barrier), saving, rank_of(2, None), rank_of(3, barrier)])


def one_elsewhere_writes() -> Evidence:
    peers = [rank_of(rank, PEERS, **SLEEPING) for rank in range(4)]
    return job([*peers, writing(rank_of(4, LOADER, **SLEEPING))])


def in_two_places() -> Evidence:
    return job([rank_of(rank, f"work@/src/p.py:{rank % 2}", **SLEEPING) for rank in range(8)])


def data_flows_to_one_that_writes() -> Evidence:
    barrier = "barrier@c10d:10 < save_checkpoint@/src/save.py:5"
    saving = flowing(writing(rank_of(3, "write@/src/save.py:1 < save_checkpoint@/src/save.py:2")), 0)
    return job([*(flowing(rank_of(rank, barrier)) for rank in range(3)), saving])


def data_flows_past_one_that_writes() -> Evidence:
    peers = [flowing(rank_of(rank, PEERS, **SLEEPING)) for rank in range(4)]
    return job([*peers, writing(rank_of(4, LOADER, **SLEEPING))])


def data_flows_while_all_compute() -> Evidence:
    return job([flowing(rank_of(rank, SPIN, **BUSY)) for rank in range(4)])


def data_flows_in_one_place() -> Evidence:
    return job([flowing(rank_of(rank, HANDLE)) for rank in range(4)])


def data_flows_in_two_places() -> Evidence:
    return job([flowing(rank_of(rank, f"work@/src/p.py:{rank % 2}")) for rank in range(4)])


def all_moved_and_compute() -> Evidence:
    return job([rank_of(rank, moving(SPIN), **BUSY) for rank in range(4)])


def all_moved_to_one_place() -> Evidence:
    return job([rank_of(rank, moving(HANDLE)) for rank in range(4)])


def all_moved_to_two_places() -> Evidence:
    return job([rank_of(rank, moving(f"work@/src/p.py:{rank % 2}")) for rank in range(4)])


def a_server_sleeps() -> Evidence:
    return job([rank_of(0, WORLD), rank_of(1, SERVER, **SLEEPING)])


def a_server_is_woken() -> Evidence:
    return job([rank_of(0, WORLD), woken(rank_of(1, SERVER))])


def a_server_asks() -> Evidence:
    asks = rank_of(1, f"get_tag@/src/x.py:1 < {SERVER}", **POLLING, sample={"system_call": {"number": 7}})
    return job([rank_of(0, WORLD), asks])


def in_the_kernel_with_the_interpreters_lock() -> Evidence:
    return job([rank_of(0, WORLD), rank_of(1, LOADER, state="D", wchan="folio_wait_bit", owns_gil=True)])


def a_rank_holds_a_lock(held_by: int = 102) -> Evidence:
    """Rank 1 waits for a lock; all others wait for it in a collective, the holder of the lock too."""
    lock = {"holder": held_by, "waiters": [101], "holder_comm": "python", "holder_state": "S", "path": "/data/index"}
    ranks = [rank_of(rank, WORLD) for rank in (0, 2, 3)]
    ranks.insert(1, rank_of(1, "take_lock@/src/index.py:5 < step@/src/loop.py:4", wchan="fcntl_setlk"))
    node = {"node": "n0", "clock_ticks_per_s": 100, "ranks": ranks, "locks": [lock]}
    return Bundle({"topology": None}, (node,)).evidence()


def one_does_not_return(sizes: str = "[[8]]") -> Evidence:
    """Rank 0 is still in a collective that rank 1 has finished; all have begun the next one of a larger group."""
    calls = ["t t! e!", "t t e!", "u u e!", "u u e!"]
    members = {"t": (0, 1), "u": (2, 3), "e": range(4)}
    ranks = [rank_of(rank, None, state="?", calls=each, members=members) for rank, each in enumerate(calls)]
    for rank in ranks:
        rank["samples"][-1]["recorder"]["open_messages"] = 0
        rank["samples"][-1]["recorder"]["tokens"][1][3] = sizes if rank["rank"] > 1 else "[[8]]"
    return job(ranks)


def one_does_not_return_and_sizes_differ() -> Evidence:
    return one_does_not_return("[[7]]")


def one_has_launched_less(fewest: int = 4) -> Evidence:
    """What NCCL's RAS counts: no list of calls, and no stack."""
    ranks = [rank_of(rank, None, state="?", calls="w", members={"w": range(3)}) for rank in range(3)]
    for rank in ranks:
        of_rank = {"0xa": {"all_reduce": fewest if rank["rank"] == 1 else 5, "broadcast": 1}}
        rank["samples"][-1]["recorder"]["counts"] = {"verb": "launched", "of_rank": of_rank}
    return job(ranks)


def all_have_launched_as_much() -> Evidence:
    return one_has_launched_less(5)


def one_prepares_data(inner: str = "_map_single", looks: int = 1) -> Evidence:
    """As stored stacks show it: nothing is known of what the rank does between two looks."""
    data = "/venv/datasets/arrow_dataset.py"
    work = f"{inner}@{data}:7 < map@{data}:3 < main@/src/train.py:3"
    barrier = "barrier@c10d:10 < main_process_first@/venv/transformers/training_args.py:5 < main@/src/train.py:2"
    return job([rank_of(0, [work] * looks), rank_of(1, [barrier] * looks)])


def one_prepares_data_and_sleeps() -> Evidence:
    return one_prepares_data(looks=2)


def one_prepares_data_in_workers() -> Evidence:
    return one_prepares_data("_recv@/venv/multiprocess/connection.py:4 < _map_single")


CASES: dict[str, Callable[[], Evidence]] = {
    case.__name__.replace("_", "-"): case
    for case in (
        nothing_there, all_lost_a_peer, one_died_and_one_may_wait, one_joined_between_the_looks,
        looks_for_the_others_elsewhere, nobody_reaches_the_store, an_answer_over_a_dead_link, two_write_unread,
        two_compute_alike, a_circle_and_a_sleeper, one_writes_and_one_is_not_read,
        one_elsewhere_writes, in_two_places,
        data_flows_to_one_that_writes, data_flows_past_one_that_writes, data_flows_while_all_compute,
        data_flows_in_one_place, data_flows_in_two_places, all_moved_and_compute, all_moved_to_one_place,
        all_moved_to_two_places, a_server_sleeps, a_server_is_woken, a_server_asks, a_rank_holds_a_lock,
        one_died_and_the_rest_stand_apart, in_the_kernel_with_the_interpreters_lock,
        a_key_of_a_known_rank, all_told_to_end_with_rings, all_told_and_lost_a_peer,
        prints_a_step_in_one_place, prints_something_in_one_place,
        one_is_a_step_behind, one_is_a_step_behind_in_the_next_phase, one_does_not_return,
        one_does_not_return_and_sizes_differ, one_has_launched_less, all_have_launched_as_much, one_prepares_data,
        one_prepares_data_and_sleeps, one_prepares_data_in_workers,
    )
}  # fmt: skip
