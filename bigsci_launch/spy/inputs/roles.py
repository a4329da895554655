"""Who is a rank, among the processes whose stacks other tools have stored.

Some are certainly none: their program or their main thread shows a launcher or a helper (`node_roles`, which the
node agent asks of living processes). Of the others, those are ranks that communicate, and those like them: with the
same program or the same outermost call. Where none communicates, all are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from bigsci_launch.spy.evidence.known_code import is_idle_call, is_server, may_communicate, operation_of
from bigsci_launch.spy.evidence.numbering import OtherProcess
from bigsci_launch.spy.inputs.node_roles import own_calls, program_words, role_of_calls, role_of_program
from bigsci_launch.spy.inputs.reading import Found, Reading

LOCAL_RANK = re.compile(r"--local[_-]rank[= ](\d{1,7})")
MAIN = "MainThread"
IDLE_WORKER = ("main_loop", "ray/_private/worker.py")
Threads = Sequence[Mapping[str, Any]]
CallPath = list[tuple[str, str]]


def definite_role(command: str, threads: Threads) -> tuple[str, str] | None:
    """Return role and reason of a process that is certainly no rank, or None."""
    return _role(command, tuple(main_calls(threads)))


@lru_cache(maxsize=1 << 12)
def _role(command: str, calls: tuple[tuple[str, str], ...]) -> tuple[str, str] | None:
    return role_of_program(program_words(words_of(command))) or role_of_calls(own_calls(calls))


def words_of(command: str) -> list[str]:
    """Return the arguments of a command line that was written with blanks: code after `-c` is one."""
    before, option, code = command.partition(" -c ")
    return [*before.split(), *(("-c", code) if option else ())]


def local_rank_of(command: str) -> int | None:
    """Return the number of a rank on its node that its command line gives, or None."""
    found = LOCAL_RANK.search(command)
    return int(found[1]) if found else None


def main_calls(threads: Threads) -> CallPath:
    """Return the calls of the main thread, innermost first; of the first thread if none is called so."""
    main = next((thread for thread in threads if thread.get("name") == MAIN), threads[0] if threads else None)
    return calls_of(main) if main else []


def calls_of(thread: Mapping[str, Any]) -> CallPath:
    return [(str(frame["function"]), str(frame["file"])) for frame in thread["frames"]]


def without_helpers(readings: Iterable[Reading]) -> Found:
    """Return the processes of a file, those apart that are certainly no ranks."""
    ranks: list[Reading] = []
    others: list[OtherProcess] = []
    for each in readings:
        role = definite_role(each.command, each.threads or ())
        if role is None:
            ranks.append(each)
        else:
            others.append(as_other(each, *role))
    return Found(tuple(ranks), others=tuple(others))


def as_other(reading: Reading, role: str, why: str) -> OtherProcess:
    words = program_words(words_of(reading.command))
    program = words[-1].rpartition("/")[2] if words and words[0] != "-c" else "python"
    return OtherProcess(reading.node, reading.pid or 0, program, role, why)


def tell_apart(readings: Sequence[Reading]) -> tuple[list[Reading], list[OtherProcess]]:
    """Return the ranks among processes of all files, and those that are none for all that is seen of the others.

    Those whose files name their rank are never left out for being unlike others.
    """
    stacks = [each for each in readings if each.threads]
    peers = [each for each in stacks if communicates(each)]
    pids = {each.pid for each in readings if each.pid is not None}
    ranks: list[Reading] = []
    others: list[OtherProcess] = []
    for each in readings:
        why = _why_not(each, peers, pids) if each.threads else None
        if why is None:
            ranks.append(each)
        else:
            others.append(as_other(each, *why))
    return ranks, others


def _why_not(each: Reading, peers: Sequence[Reading], pids: set[int]) -> tuple[str, str] | None:
    if communicates(each) or (peers and is_like(each, peers)):
        return None
    if is_idle_worker(each):
        return "helper", "it is an idle worker of Ray"
    if not peers or each.rank is not None:
        return None
    if is_forked(each) or each.parent in pids:
        return "helper", "it is a child of another process, and communicates with no rank"
    if not each.command:
        return None
    return "unknown", "neither its program nor its calls are those of the processes that communicate"


def communicates(reading: Reading) -> bool:
    """Whether a call of any thread communicates, or the innermost one may."""
    threads = [calls_of(thread) for thread in reading.threads or ()]
    return any(
        any(operation_of(*call) for call in own_calls(calls)) or (calls != [] and may_communicate(*calls[0]))
        for calls in threads
    )


def is_like(each: Reading, peers: Iterable[Reading]) -> bool:
    """Whether a process has the program or the outermost call of one that communicates, and is forked as that is."""
    mine = (is_forked(each), program_of(each), outermost(each))
    for peer in peers:
        theirs = (is_forked(peer), program_of(peer), outermost(peer))
        if mine[0] == theirs[0] and ((mine[1] and mine[1] == theirs[1]) or (mine[2] and mine[2] == theirs[2])):
            return True
    return False


def is_forked(reading: Reading) -> bool:
    calls = main_calls(reading.threads or ())
    return len(own_calls(calls)) < len(calls)


def program_of(reading: Reading) -> tuple[str, ...]:
    return tuple(program_words(words_of(reading.command)))


def outermost(reading: Reading) -> tuple[str, str] | None:
    calls = own_calls(main_calls(reading.threads or ()))
    return calls[-1] if calls and not calls[-1][1].startswith("<") else None


def is_idle_worker(reading: Reading) -> bool:
    """Whether the main thread waits for a task of Ray, and no other thread does anything."""
    main = main_calls(reading.threads or ())
    if not main or main[0][0] != IDLE_WORKER[0] or not main[0][1].endswith(IDLE_WORKER[1]):
        return False
    rest = [calls for thread in reading.threads or () if (calls := calls_of(thread)) and calls != main]
    return all(waits(*calls[0]) or own_thread(calls) for calls in rest)


def waits(function: str, file: str) -> bool:
    return is_idle_call(function, file) or is_server(function, file)


def own_thread(calls: CallPath) -> bool:
    """Whether a thread is in code of Python or of Ray only."""
    return all(file.endswith("threading.py") or "ray/" in file or "asyncio/" in file for _, file in calls)
