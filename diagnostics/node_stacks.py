"""Python stacks of ranks and children through py-spy, for node_agent.py. Standard library only, Python 3.8 or newer."""

from __future__ import annotations

import os
import sys
import time

from node_processes import parse_stat, read_text, run_program

TYPE_CHECKING = False  # typing costs start-up time, and annotations are never evaluated
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    Facts = dict[str, Any]

CHILD_TIMEOUT_S = 1.0
MAX_CHILD_STACKS = 2
MAX_TRIES = 3
NATIVE_TIMEOUT_S = 5.0
NUMBERS_TIMEOUT_S = 1.0
WITH_PARTNER = (
    "send", "recv", "isend", "irecv", "broadcast", "broadcast_object_list", "reduce", "gather", "gather_object",
    "scatter", "scatter_object_list",
)  # fmt: skip


def read_rank_stacks(rank: Facts, request: Facts, _known: Facts) -> Iterator[tuple[str, Any]]:
    """The Python stacks of all threads."""
    yield dump_stacks(request["py_spy"], rank["pid"], request["py_spy_timeout_s"])
    yield "dumped", time.monotonic()


def read_child_stacks(rank: Facts, request: Facts, _known: Facts) -> Iterator[tuple[str, Any]]:
    """Stacks of the children that tell most: {pid: py-spy's JSON}."""
    dumps: dict[str, str] = {}
    for child in choose_children(rank["samples"][-1]):
        kind, text = dump_stacks(request["py_spy"], child["pid"], CHILD_TIMEOUT_S)
        if kind == "dump":
            dumps[str(child["pid"])] = text
            yield "child_dumps", dumps


def may_dump_native(rank: Facts, request: Facts) -> bool:
    """Whether native stacks of a rank are to be read: asked for, and no thread of it would hold the reader for ever."""
    states = [sample["state"] for sample in rank["samples"]] + thread_states(rank["pid"])
    return bool(request.get("native")) and not {"D", "T", "t"} & set(states)


def thread_states(pid: int) -> list[str]:
    """The kernel's letters for the threads of a process."""
    try:
        names = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []
    texts = [read_text(f"/proc/{pid}/task/{name}/stat") for name in names]
    return [parse_stat(text)["state"] for text in texts if text]


def read_rank_native(rank: Facts, request: Facts, _known: Facts) -> Iterator[tuple[str, Any]]:
    """The stacks of all threads with native frames. This pauses the process while it is read."""
    options = ("--native",)
    kind, text = dump_stacks(request["py_spy"], rank["pid"], NATIVE_TIMEOUT_S, options)
    yield ("native_dump" if kind == "dump" else "native_why"), text


def choose_children(sample: Facts) -> list[Facts]:
    """Python children (torch renames its processes), those first that cannot run, then those that worked most."""
    names = ("python", "pt_", sample.get("comm") or "python")
    pythons = [child for child in sample.get("children") or [] if (child["comm"] or "").startswith(names)]
    pythons = [child for child in pythons if child["state"] not in ("Z", "gone")]
    pythons.sort(key=lambda child: (child["state"] not in ("D", "T", "t"), -child["cpu_ticks"], child["pid"]))
    return pythons[:MAX_CHILD_STACKS]


def find_py_spy(request: Facts) -> str | None:
    """Path of py-spy: as asked, beside this Python, in PATH; or None."""
    places = [os.path.dirname(sys.executable or ""), *os.environ.get("PATH", "").split(":")]
    candidates = [request["py_spy"]] if request.get("py_spy") else [place + "/py-spy" for place in places if place]
    return next((path for path in candidates if os.access(path, os.X_OK)), None)


def dump_stacks(
    py_spy: str | None, pid: int, timeout_s: float, options: tuple[str, ...] = ("--nonblocking",)
) -> tuple[str, str]:
    """("dump", py-spy's JSON) or ("why", reason). Tries again when the process moved under the reader."""
    if py_spy is None:
        return "why", "py-spy is not installed on this node"
    argv = [py_spy, "dump", "--json", *options, "--pid", str(pid)]
    why = ""
    for _ in range(MAX_TRIES):
        status, output, errors = run_program(argv, timeout_s, {"RUST_BACKTRACE": "0"})
        if status == 0:
            return "dump", add_numbers(argv, output) if has_partner(output) else output
        if status is None:
            return "why", f"py-spy gave no answer in {timeout_s:g} s"
        why = explain_py_spy(errors)
        if any(words in why for words in ("ermission", "python version", "No such")):
            break
    return "why", why


def has_partner(dump: str) -> bool:
    """Whether a thread stands in a communication of which the stack does not say with whom."""
    return any(f'"name": "{name}"' in dump for name in WITH_PARTNER)


def add_numbers(argv: list[str], dump: str) -> str:
    """The dump once more with local variables: who sends to whom, who broadcasts. As it was where that fails."""
    status, output, _ = run_program([*argv, "--locals"], NUMBERS_TIMEOUT_S, {"RUST_BACKTRACE": "0"})
    return output if status == 0 else dump


def explain_py_spy(text: str) -> str:
    """py-spy's error and its causes on one line, without its advice: it is not the user's shell that may not read."""
    lines = [line.partition(": Try running again")[0].strip() for line in text.splitlines() if line.strip()]
    start = next((index for index, line in enumerate(lines) if line.startswith("Error:")), 0)
    return "py-spy: " + "; ".join(lines[start : start + 4])[:300] if lines else "py-spy said nothing"
