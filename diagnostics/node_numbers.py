"""Decides which process is which rank, for node_agent.py. Pure; standard library only, Python 3.8 or newer.

A claim is what numbers a process: arguments of functions on its stack, its environment, its task, its command line, in
this order of trust. Two processes that claim the same number are not two ranks: the better claim wins, then the process
nearer to the launcher; the other one is a launcher or a helper. Processes without any claim are ranks only if none
has one; they are counted, and their source shows that the numbers mean nothing.
"""

from __future__ import annotations

from node_identity import (
    LOCAL_SIZE_VARIABLES,
    NUM_NODES_VARIABLES,
    RANK_VARIABLES,
    SIZE_VARIABLES,
    TASK_VARIABLES,
    ancestors,
    first_number,
    is_python,
    is_spawned,
    role_of,
)
from node_roles import program_words

TYPE_CHECKING = False  # typing costs start-up time, and annotations are never evaluated
if TYPE_CHECKING:
    from typing import Any

    Facts = dict[str, Any]
    Known = dict[int, Facts]
    Tasks = dict[int, tuple[str, "int | None"]]
    # (how far down in the order of trust, number, source, size of the world or None)
    Claim = tuple[int, int, str, "int | None"]
    Claims = dict[int, Claim]

FRAMES, ENVIRONMENT, TASK, ARGUMENTS = range(4)
SOURCES = ("frames", "environment", "task id", "arguments")
NOW = "environment now"
STORE = "store"
GUESS = "order of start"
RANK_OPTIONS = (
    "--rank", "--global_rank", "--global-rank", "--world_rank", "--process_id", "--process-id", "--process_index",
    "--process-index", "--proc_id",
)  # fmt: skip
LOCAL_OPTIONS = ("--local_rank", "--local-rank", "--node_rank", "--node-rank")
SIZE_OPTIONS = ("--world_size", "--world-size", "--nprocs", "--num_processes", "--num-processes", "--nproc")
MAX_OTHERS = 48


def claims_of(known: Known, tasks: Tasks, peeks: dict[int, Facts]) -> Claims:
    """Return the best claim of each process that may be a rank."""
    free = [pid for pid in known if not role_in(pid, known, peeks)]
    claims = {**claims_of_arguments(free, known), **claims_of_tasks(free, known, tasks)}
    claims.update(claims_of_environment(free, known, peeks))
    claims.update(claims_of_frames(free, known, peeks))
    return claims


def role_in(pid: int, known: Known, peeks: dict[int, Facts]) -> tuple[str, str] | None:
    """Return what a process is if it is no rank: by its program, or by what it does."""
    role: tuple[str, str] | None = peeks.get(pid, {}).get("frames", {}).get("role")
    return role or role_of(known[pid])


def environment_of(pid: int, known: Known, peeks: dict[int, Facts]) -> dict[str, str]:
    """Return the variables of a process: those that it has now, if they could be read."""
    now: dict[str, str] | None = peeks.get(pid, {}).get("env")
    return now if now is not None else known[pid]["env"]


def claims_of_environment(free: list[int], known: Known, peeks: dict[int, Facts]) -> Claims:
    """Return the claims of variables. LOCAL_RANK counts where nothing else does: Lightning sets only that."""
    claims: Claims = {}
    local: dict[int, tuple[int, int]] = {}
    for pid in free:
        env = environment_of(pid, known, peeks)
        rank, place = first_number(env, RANK_VARIABLES), first_number(env, ("LOCAL_RANK",))
        source = SOURCES[ENVIRONMENT] if first_number(known[pid]["env"], RANK_VARIABLES) == rank else NOW
        if rank is not None and (place is None or not is_only_inherited(pid, free, known, peeks)):
            claims[pid] = (ENVIRONMENT, rank, source, first_number(env, SIZE_VARIABLES))
        elif place is not None:
            local[pid] = (place, first_number(env, ("NODE_RANK", "GROUP_RANK")) or 0)
    per_node = max((place for place, _ in local.values()), default=0) + 1
    for pid, (place, node) in local.items():
        env = environment_of(pid, known, peeks)
        source = SOURCES[ENVIRONMENT] if first_number(known[pid]["env"], ("LOCAL_RANK",)) == place else NOW
        number = node * (first_number(env, LOCAL_SIZE_VARIABLES) or per_node) + place
        claims.setdefault(pid, (ENVIRONMENT, number, source, first_number(env, SIZE_VARIABLES)))
    return claims


def is_only_inherited(pid: int, free: list[int], known: Known, peeks: dict[int, Facts]) -> bool:
    """Whether a process has the rank of one above it, but another LOCAL_RANK: its launcher has set only that."""
    above = next((each for each in ancestors(pid, known) if each in free), None)
    if above is None:
        return False
    mine, theirs = environment_of(pid, known, peeks), environment_of(above, known, peeks)
    is_same = first_number(mine, RANK_VARIABLES) == first_number(theirs, RANK_VARIABLES)
    return is_same and first_number(mine, ("LOCAL_RANK",)) != first_number(theirs, ("LOCAL_RANK",))


def claims_of_tasks(free: list[int], known: Known, tasks: Tasks) -> Claims:
    """Return the claims of tasks: as a scheduler numbers them, else as its variable does, if that numbers them."""
    found = {pid: task for pid in free for _, task in [tasks.get(pid, (None, None))] if task is not None}
    if not tasks:
        said = {pid: first_number(known[pid]["env"], TASK_VARIABLES) for pid in free}
        found = {pid: task for pid, task in said.items() if task is not None}
        if len(set(found.values())) < 2:  # one task, which may be the shell in which everything was started
            return {}
    return {
        pid: (TASK, task, SOURCES[TASK], first_number(known[pid]["env"], SIZE_VARIABLES)) for pid, task in found.items()
    }


def claims_of_arguments(free: list[int], known: Known) -> Claims:
    """Return the claims of command lines, if they tell all processes with the same program apart: `--rank 3`."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for pid in free:
        if is_python(known[pid]):
            groups.setdefault(tuple(words_of(known[pid])), []).append(pid)
    claims: Claims = {}
    for pids in groups.values():
        tops = [pid for pid in pids if not set(ancestors(pid, known)).intersection(pids)]
        for options, is_whole in ((RANK_OPTIONS, False), (LOCAL_OPTIONS, True)):
            numbers = {pid: option(known[pid], options) for pid in tops}
            sizes = {option(known[pid], SIZE_OPTIONS) for pid in tops}
            size = sizes.pop() if len(sizes) == 1 else None
            if len(tops) > 1 and tell_apart(list(numbers.values()), is_whole):
                for pid, number in numbers.items():
                    claims.setdefault(pid, (ARGUMENTS, number or 0, SOURCES[ARGUMENTS], size))
    return claims


def tell_apart(numbers: list[int | None], is_whole: bool) -> bool:
    """Whether each number is there once; `is_whole`: and they are 0, 1, 2, .."""
    if None in numbers or len(set(numbers)) < len(numbers):
        return False
    return not is_whole or set(numbers) == set(range(len(numbers)))


def option(process: Facts, names: tuple[str, ...]) -> int | None:
    """Return the number that a command line gives with one of the options `names`, or None."""
    words = process.get("argv") or []
    for word, value in zip(words, [*words[1:], ""]):
        name, equals, joined = word.partition("=")
        text = joined if equals else value
        if name in names and text.isdigit():
            return int(text)
    return None


def claims_of_frames(free: list[int], known: Known, peeks: dict[int, Facts]) -> Claims:
    """Return the claims of the stacks: torch's spawn, functions that join the world, and other functions."""
    frames = {pid: peeks[pid]["frames"] for pid in free if peeks.get(pid, {}).get("frames")}
    claims = claims_of_named(free, frames, known, peeks)
    for pid, facts in frames.items():
        if "spawned" in facts and pid not in claims and is_whole_node(pid, known, peeks):
            node = first_number(environment_of(pid, known, peeks), ("NODE_RANK",)) or 0
            siblings = [each for each in frames if known[each]["ppid"] == known[pid]["ppid"]]
            num_local = sum("spawned" in frames[each] for each in siblings)
            claims[pid] = (FRAMES, node * num_local + facts["spawned"], SOURCES[FRAMES], None)
        if "joined" in facts:
            claims[pid] = (FRAMES, facts["joined"][0], SOURCES[FRAMES], facts["joined"][1])
    return claims


def is_whole_node(pid: int, known: Known, peeks: dict[int, Facts]) -> bool:
    """Whether an index on this node is a rank: there is one node, or the variables show which node this is."""
    env = environment_of(pid, known, peeks)
    return "NODE_RANK" in env or (first_number(env, NUM_NODES_VARIABLES) or 1) == 1


def claims_of_named(free: list[int], frames: dict[int, Facts], known: Known, peeks: dict[int, Facts]) -> Claims:
    """Return the claims of functions such as `main(rank, world_size)`, if one tells all processes apart.

    Variables that are no arguments count only if they number the whole world, and 0 is the process that serves the
    store: they may be the counter of a loop.
    """
    keys = dict.fromkeys(tuple(fact[:3]) for facts in frames.values() for fact in facts["named"])
    for key in keys:
        facts = {pid: fact for pid, each in frames.items() for fact in each["named"][::-1] if tuple(fact[:3]) == key}
        tops = {pid for pid in facts if not set(ancestors(pid, known)).intersection(facts)}
        below = {pid for pid in free if set(ancestors(pid, known)).intersection(tops)}
        above = {each for pid in tops for each in ancestors(pid, known)}
        others = {pid for pid in free if is_python(known[pid])} - tops - below - above
        sizes = {facts[pid][4] for pid in tops}
        if len(tops) < 2 or others or len(sizes) > 1 or not tell_apart([facts[pid][3] for pid in tops], False):
            continue
        first = next((pid for pid in tops if facts[pid][3] == 0), None)
        server = store_server(sorted(tops), peeks)
        is_argument = all(facts[pid][5] for pid in tops)
        if is_argument or (sizes == {len(tops)} and first is not None and first == server):
            return {pid: (FRAMES, facts[pid][3], SOURCES[FRAMES], facts[pid][4]) for pid in tops}
    return {}


def store_server(pids: list[int], peeks: dict[int, Facts]) -> int | None:
    """Return the process that serves the store to all of `pids`, itself among them: rank 0. None if none does."""
    found = [pid for pid in pids for port in served_ports(pid, peeks) if serves_all(port, pids, peeks)]
    return found[0] if len(set(found)) == 1 else None


def served_ports(pid: int, peeks: dict[int, Facts]) -> set[int]:
    return set(peeks.get(pid, {}).get("connections", {}).get("serves", {}).values())


def serves_all(port: int, pids: list[int], peeks: dict[int, Facts]) -> bool:
    """Whether each of `pids` has a connection that leads to `port`."""
    return all(
        any(int(remote.rpartition(":")[2]) == port for _, remote in ends_of(pid, peeks).values()) for pid in pids
    )


def ends_of(pid: int, peeks: dict[int, Facts]) -> dict[str, list[str]]:
    """Return the connections of a process: {inode: [local address, remote address]}."""
    ends: dict[str, list[str]] = peeks.get(pid, {}).get("connections", {}).get("ends", {})
    return ends


def choose(known: Known, tasks: Tasks, claims: Claims) -> dict[tuple[Any, int], int]:
    """Return which process is which rank: {(step, number): pid}."""
    popular = count([tuple(words_of(known[pid])) for pid in claims])

    def order(pid: int) -> tuple[Any, ...]:
        more = popular[tuple(words_of(known[pid]))]
        above = [each for each in ancestors(pid, known) if each in claims]
        process = known[pid]
        return claims[pid][0], not is_python(process), len(above), -more, process["start_ticks"], pid

    chosen: dict[tuple[Any, int], int] = {}
    for pid in sorted(claims, key=order):
        key = (tasks.get(pid, (None, None))[0], claims[pid][1])
        if key not in chosen and may_be_rank(pid, known, tasks, claims, set(chosen.values())):
            chosen[key] = pid
    return chosen


def may_be_rank(pid: int, known: Known, tasks: Tasks, claims: Claims, ranks: set[int]) -> bool:
    """Whether a process can be a rank, too: `ranks` have better claims, or are nearer to the launcher."""
    level = claims[pid][0]
    if any(pid in ancestors(rank, known) and claims[rank][0] < level for rank in ranks):
        return False  # it started them
    if level == TASK and any(tasks.get(rank) == tasks.get(pid) for rank in ranks if tasks):
        return False  # its task holds ranks with better claims
    if level == ENVIRONMENT:
        return True  # it was given a number of its own
    return not ranks.intersection(ancestors(pid, known))


def is_settled(known: Known, claims: Claims, ranks: set[int]) -> bool:
    """Whether nothing is left to find out: all ranks that the world has here were found, each once."""
    if not ranks or any(claims[pid][0] == ARGUMENTS for pid in ranks):
        return not any(is_python(process) for process in known.values())
    strangers = [pid for pid in known if is_python(known[pid]) and pid not in ranks and not role_of(known[pid])]
    apart = [pid for pid in strangers if not ranks.intersection(ancestors(pid, known))]
    if any(pid in claims for pid in apart):
        return False  # two processes have the same number
    sizes = {size for pid in ranks for size in [expected_here(known[pid]["env"])] if size is not None}
    if len(ranks) == 1 and len(apart) < len(strangers):
        return False  # it may have started them
    return sizes == {len(ranks)} or not apart


def expected_here(env: dict[str, str]) -> int | None:
    """Return the number of ranks of this node, according to the environment of one."""
    return first_number(env, LOCAL_SIZE_VARIABLES) or first_number(env, SIZE_VARIABLES)


def candidates(known: Known, launcher_pid: int | None, peeks: dict[int, Facts]) -> list[int]:
    """Return the processes that may be ranks if none has a number: those that look alike, in order of their start."""
    free = {pid for pid, process in known.items() if is_python(process) and not role_in(pid, known, peeks)}
    has_children = any(launcher_pid in ancestors(pid, known) for pid in free)
    if launcher_pid in free and has_children and not is_peer(launcher_pid, free, peeks):
        free.discard(launcher_pid)
    tops = [pid for pid in free if not free.intersection(ancestors(pid, known))]
    for top in tops:
        below = [pid for pid in free if top in ancestors(pid, known)]
        free -= {top} if has_started(top, below, known, peeks) else set(below)
    program = {pid: alike(known[pid]) for pid in free}
    counts = count(list(program.values()))
    most = max(counts.values(), default=0)
    return sorted(
        (pid for pid in free if counts[program[pid]] == most), key=lambda pid: (known[pid]["start_ticks"], pid)
    )


def words_of(process: Facts) -> list[str]:
    """Return what a process runs, without its options."""
    return program_words(process.get("argv", ()))


def count(values: list[Any]) -> dict[Any, int]:
    """Return how often each value occurs. (The collections module would cost start-up time.)"""
    return {value: values.count(value) for value in set(values)}


def alike(process: Facts) -> tuple[str, ...]:
    """Return what processes that look alike have in common."""
    title = process["comm"] if process["comm"].startswith("ray::") else ""
    return (title or process["exe"], *words_of(process))


def has_started(top: int, below: list[int], known: Known, peeks: dict[int, Facts]) -> bool:
    """Whether a process is the launcher of those below it, and not a rank with helpers."""
    frames = peeks.get(top, {}).get("frames", {})
    if not below or is_peer(top, set(below), peeks):
        return False
    if any(is_peer(pid, set(below), peeks) for pid in below):
        return True
    return bool(frames.get("waits")) and len(below) > 1 and not all(is_spawned(known[pid]) for pid in below)


def is_peer(pid: int, others: set[int], peeks: dict[int, Facts]) -> bool:
    """Whether a process has connections of its own, not inherited by a fork, to one of `others`."""
    mine = ends_of(pid, peeks)
    for other in others - {pid}:
        theirs = ends_of(other, peeks)
        inherited = set(mine).intersection(theirs)
        remote = {address for inode, (_, address) in theirs.items() if inode not in inherited}
        if any(local in remote for inode, (local, _) in mine.items() if inode not in inherited):
            return True
    return False


def tell_others(known: Known, ranks: dict[int, Any], peeks: dict[int, Facts]) -> list[Facts]:
    """Return who is no rank: [{pid, comm, role, why}]. `ranks` gives the name of each rank."""
    found = []
    for pid, process in sorted(known.items()):
        if pid not in ranks:
            role, why = explain_other(pid, known, ranks, peeks)
            if role:
                found.append({"pid": pid, "comm": process["comm"], "role": role, "why": why})
    found.sort(key=lambda each: ("unknown", "launcher", "ended", "helper").index(each["role"]))
    return found[:MAX_OTHERS]


def explain_other(pid: int, known: Known, ranks: dict[int, Any], peeks: dict[int, Facts]) -> tuple[str, str]:
    """Return what a process is that is no rank, and why; an empty role for one that need not be mentioned."""
    above = next((each for each in ancestors(pid, known) if each in ranks), None)
    role = role_in(pid, known, peeks)
    if above is not None:
        return "helper", role[1] if role and role[0] == "helper" else f"it belongs to {ranks[above]}"
    if role:
        return role
    if any(pid in ancestors(rank, known) for rank in ranks):
        return "launcher", "the ranks are below it"
    return ("unknown", "it could not be identified") if is_python(known[pid]) else ("", "")
