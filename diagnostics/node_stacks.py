"""Reads Python stacks of ranks and children with py-spy, for node_agent.py. Standard library, Python 3.8 or newer."""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress

from node_processes import parse_stat, read_text, run_program
from safe_files import parse_json

TYPE_CHECKING = False  # typing costs start-up time, and annotations are never evaluated
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    Facts = dict[str, Any]

CHILD_TIMEOUT_S = 1.0
MAX_CHILD_STACKS = 2
MAX_WORKER_STACKS = 8
DATA_LOADER = "torch/utils/data/dataloader.py"
MAX_TRIES = 3
# Numbers in torch's calls that tell who sends to whom, and who broadcasts.
NUMBERS = ("src", "dst", "group_src", "group_dst", "tag")
LOGGER = "torch/distributed/c10d_logger.py"  # it wraps each call of a user, and holds its arguments
MAX_MAPS = 1 << 22
NATIVE_TIMEOUT_S = 15.0


def read_rank_stacks(rank: Facts, request: Facts, _known: Facts) -> Iterator[tuple[str, Any]]:
    """Yield the Python stacks of all threads."""
    yield dump_stacks(request["py_spy"], rank["pid"], request["py_spy_timeout_s"])
    yield "dumped", time.monotonic()


def read_child_stacks(rank: Facts, request: Facts, _known: Facts) -> Iterator[tuple[str, Any]]:
    """Yield the stacks of the most telling children: {pid: py-spy's JSON}."""
    dumps: dict[str, str] = {}
    for child in choose_children(rank["samples"][-1]):
        kind, text = dump_stacks(request["py_spy"], child["pid"], CHILD_TIMEOUT_S)
        if kind == "dump":
            dumps[str(child["pid"])] = text
            yield "child_dumps", dumps


def may_dump_native(rank: Facts, request: Facts) -> bool:
    """Whether to read native stacks of a rank: they are requested, and no thread would block the reader forever."""
    states = [sample["state"] for sample in rank["samples"]] + thread_states(rank["pid"])
    return bool(request.get("native")) and not {"D", "T", "t"} & set(states)


def thread_states(pid: int) -> list[str]:
    """Return the kernel's state letters of the threads of a process."""
    try:
        names = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []
    texts = [read_text(f"/proc/{pid}/task/{name}/stat") for name in names]
    return [parse_stat(text)["state"] for text in texts if text]


def read_rank_native(rank: Facts, request: Facts, _known: Facts) -> Iterator[tuple[str, Any]]:
    """Yield the stacks of all threads with native frames. This pauses the process while it is read."""
    options = ("--native",)
    kind, text = dump_stacks(request["py_spy"], rank["pid"], NATIVE_TIMEOUT_S, options)
    yield ("native_dump" if kind == "dump" else "native_why"), text


def choose_children(sample: Facts) -> list[Facts]:
    """Return Python children (torch renames its processes): those that cannot run first, then those that ran most.

    A rank that waits for its data loader waits for one of its workers: all of them are read, up to a limit, and those
    first that sleep where few others do.
    """
    names = ("python", "pt_", sample.get("comm") or "python")
    pythons = [child for child in sample.get("children") or [] if (child["comm"] or "").startswith(names)]
    pythons = [child for child in pythons if child["state"] not in ("Z", "gone")]
    in_loader = DATA_LOADER in sample.get("dump", "")
    waits = [child.get("wchan") for child in pythons] if in_loader else []

    def order(child: Facts) -> tuple[Any, ...]:
        return child["state"] not in ("D", "T", "t"), waits.count(child.get("wchan")), -child["cpu_ticks"], child["pid"]

    return sorted(pythons, key=order)[: MAX_WORKER_STACKS if in_loader else MAX_CHILD_STACKS]


def find_py_spy(request: Facts) -> str | None:
    """Return the path of py-spy: as requested, next to this Python, or in PATH; or None."""
    places = [os.path.dirname(sys.executable or ""), *os.environ.get("PATH", "").split(":")]
    candidates = [request["py_spy"]] if request.get("py_spy") else [place + "/py-spy" for place in places if place]
    return next((path for path in candidates if os.access(path, os.X_OK)), None)


def dump_stacks(
    py_spy: str | None, pid: int, timeout_s: float, options: tuple[str, ...] = ("--nonblocking",)
) -> tuple[str, str]:
    """Return ("dump", py-spy's JSON) or ("why", reason). Tries again if the process moved while it was read."""
    if py_spy is None:
        return "why", "py-spy is not installed on this node"
    why = ""
    for turn in range(MAX_TRIES):
        # Variables show who sends to whom, and over which group; a process that runs may change them just then.
        variables = ("--locals",) if turn == 0 and "--nonblocking" in options else ()
        argv = [py_spy, "dump", "--json", *options, *variables, "--pid", str(pid)]
        status, output, errors = run_program(argv, timeout_s, {"RUST_BACKTRACE": "0"})
        if status == 0:
            return "dump", with_node_numbers(pid, without_values(output) if variables else output)
        if status is None:
            return "why", f"py-spy gave no answer in {timeout_s:g} s"
        why = explain_py_spy(errors)
        if any(words in why for words in ("ermission", "python version", "No such")):
            return "why", why + deleted_python(pid)
    return "why", why


def without_values(dump: str) -> str:
    """Return a dump with only those variables that tell communications apart: what else a process holds stays there."""
    import json

    try:
        threads = parse_json(dump)
        for thread in threads:
            frames = thread["frames"]
            for frame, caller in zip(frames, [*frames[1:], {}]):
                frame["locals"] = [*numbers_in(frame), *own_group(caller)] or None
        return json.dumps(threads)
    except (ValueError, TypeError, KeyError, AttributeError):
        return dump  # it is refused where it is read


def numbers_in(frame: Facts) -> list[Facts]:
    return [
        {"name": each["name"], "repr": each["repr"]}
        for each in frame.get("locals") or ()
        if each["name"] in NUMBERS and str(each.get("repr") or "").isdigit()
    ]


def own_group(caller: Facts) -> list[Facts]:
    """Return whether a call of torch was given a group, 1, or is over the world, 0, as a variable of it; nothing if
    that is not known. `caller` is the wrapper that holds its arguments."""
    if not str(caller.get("filename")).endswith(LOGGER):
        return []
    given = [str(each.get("repr")) for each in caller.get("locals") or () if each["name"] in ("args", "kwargs")]
    if len(given) < 2:
        return []
    if any("ProcessGroup" in text for text in given):
        return [{"name": "own_group", "repr": "1"}]
    if any('"group": None' in text for text in given):
        return [{"name": "own_group", "repr": "0"}]
    return [] if any("..." in text or '"group": <' in text for text in given) else [{"name": "own_group", "repr": "0"}]


def with_node_numbers(pid: int, dump: str) -> str:
    """Return a dump whose threads have their numbers on the node: py-spy reads those of their container."""
    numbers = node_numbers(pid)
    if not numbers:
        return dump
    import json  # takes 8 ms: only where it is needed

    try:
        threads = parse_json(dump)
        for thread in threads:
            thread["os_thread_id"] = numbers.get(thread["os_thread_id"], thread["os_thread_id"])
    except (ValueError, TypeError, KeyError):
        return dump
    return json.dumps(threads)


def node_numbers(pid: int) -> dict[int, int]:
    """Return {number in its PID namespace: number here} of the threads of a process; empty in this namespace."""
    numbers: dict[int, int] = {}
    if own_number(pid, str(pid)) == str(pid):
        return numbers
    with suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/task"):
            own = own_number(pid, name)
            if own.isdigit():
                numbers[int(own)] = int(name)
    return numbers


def own_number(pid: int, tid: str) -> str:
    """Return the number of a thread in its own PID namespace."""
    lines = (read_text(f"/proc/{pid}/task/{tid}/status") or "").splitlines()
    return next((line.split()[-1] for line in lines if line.startswith("NSpid:")), tid)


def deleted_python(pid: int) -> str:
    """Name the deleted library that a process runs its Python from, for the sentence that says why it was not read."""
    lines = (read_text(f"/proc/{pid}/maps", MAX_MAPS) or "").splitlines()
    found = (line.split(None, 5)[-1] for line in lines if "/libpython" in line and line.endswith(" (deleted)"))
    return next((f"; it runs {path}" for path in found), "")


def explain_py_spy(text: str) -> str:
    """Return py-spy's error and its causes on one line, without its advice, which is meant for an interactive shell."""
    lines = [line.partition(": Try running again")[0].strip() for line in text.splitlines() if line.strip()]
    start = next((index for index, line in enumerate(lines) if line.startswith("Error:")), 0)
    return "py-spy: " + "; ".join(lines[start : start + 4])[:300] if lines else "py-spy printed nothing"
