"""Reads what `py-spy dump --json` prints: the threads of a process, and of several if they were written one after the
other or if py-spy was asked for subprocesses."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bigsci_launch.safe_files import parse_json
from bigsci_launch.spy.inputs.looks import named_rank, node_of
from bigsci_launch.spy.inputs.reading import Damaged, Found, NotThis, Reading
from bigsci_launch.spy.inputs.roles import local_rank_of, without_helpers
from bigsci_launch.spy.inputs.stack_text import SOURCE, with_rank_of_file

NEXT_DUMP = re.compile(rb"\]\s*\n\s*\[")
"""Between two dumps; within one, a comma is between brackets."""


def read_pyspy_json(path: Path, data: bytes) -> Found:
    """Read the processes of a file.

    Raises:
        NotThis: it is something else. Damaged: it is from py-spy, but broken.
    """
    if b'"thread_id"' not in data or b'"frames"' not in data:
        raise NotThis
    try:
        dumps = parse_json(b"[" + NEXT_DUMP.sub(b"],[", data.strip()) + b"]", limit=len(data) * 2 + 2)
        readings = [reading for dump in dumps for reading in _readings(path, dump)]
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise Damaged(f"it is JSON of py-spy, but damaged ({error!r})") from error
    return without_helpers(with_rank_of_file(named_rank(path), readings))


def _readings(path: Path, dump: list[Mapping[str, Any]]) -> Iterator[Reading]:
    processes: dict[int | None, list[Mapping[str, Any]]] = {}
    for thread in dump:
        processes.setdefault(None if thread.get("pid") is None else int(thread["pid"]), []).append(thread)
    for pid, threads in processes.items():
        about: Mapping[str, Any] = next(
            (thread["process_info"] for thread in threads if thread.get("process_info")), {}
        )
        command, parent = str(about.get("command_line") or ""), _parent(about)
        documents = [_thread(thread) for thread in threads]
        yield Reading(
            SOURCE, node_of(path), None, local_rank_of(command), pid, documents, command=command, parent=parent
        )


def _parent(about: Mapping[str, Any]) -> int | None:
    parent = about.get("parent")
    return int(parent["pid"]) if isinstance(parent, dict) and parent.get("pid") is not None else None


def _thread(thread: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "tid": int(thread.get("os_thread_id") or thread.get("thread_id") or 0),
        "name": None if thread.get("thread_name") is None else str(thread["thread_name"]),
        "active": bool(thread.get("active")),
        "owns_gil": bool(thread.get("owns_gil")),
        "frames": [
            {"function": str(frame["name"]), "file": str(frame["filename"]), "line": int(frame.get("line") or 0)}
            for frame in thread["frames"]
        ],
    }
