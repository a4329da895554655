"""Reads dumps of torch's flight recorder, as pickle or JSON: one file per rank, with the rank in the file name.

Layout in torch 2.13 (`torch/distributed/flight_recorder/components/loader.py`, and the result of `_dump_fr_trace` in
`torch._C._distributed_c10d`): {version, pg_config, pg_status, entries: [{record_id, process_group: (name,
description), collective_seq_id, p2p_seq_id, profiling_name, input_sizes, input_dtypes, state, retired, is_p2p,
thread_name, thread_id, frames: [{name, filename, line}]}]}. Only pickles contain frames. `pg_config` lists the members
of each group on NCCL; on gloo it is empty.

Reading a pickle runs no code from it: only plain containers, numbers and text are built.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bigsci_launch.safe_files import parse_json
from bigsci_launch.safe_pickle import ForbiddenPickle, SafeUnpickler
from bigsci_launch.spy.evidence.numbering import NumberedBy
from bigsci_launch.spy.inputs.looks import named_rank
from bigsci_launch.spy.inputs.reading import Damaged, Found, NotThis, Reading

SOURCE = "flight recorder"
RANK_LAST = re.compile(r"(\d+)(?=\D*$)")
NO_NUMBER = 1 << 31


def read_recorder_pickle(path: Path, data: bytes) -> Found:
    """Read the dump of one rank from a pickle.

    Raises:
        NotThis: it is not a pickle of protocol 2 or newer. Damaged: it is a pickle, but not a flight-recorder dump.
    """
    if data[:1] != b"\x80" or data[1:2] > b"\x05":
        raise NotThis
    try:
        document = SafeUnpickler(io.BytesIO(data)).load()
    except ForbiddenPickle as error:
        raise Damaged(str(error)) from error
    except Exception as error:
        raise Damaged(f"it starts like a pickle, but cannot be read ({type(error).__name__}: {error})") from error
    if not is_recorder(document):
        raise Damaged("it is a pickle, but not a dump of torch's flight recorder (it has no entries)")
    return read_recorder(path, document)


def read_recorder_json(path: Path, document: object) -> Found:
    """Read the dump of one rank from a JSON document.

    Raises:
        NotThis: it is something else. Damaged: its entries cannot be read.
    """
    if not is_recorder(document):
        raise NotThis
    assert isinstance(document, dict)
    return read_recorder(path, document)


def is_recorder(document: object) -> bool:
    """Whether `document` has the keys of a dump."""
    return isinstance(document, dict) and isinstance(document.get("entries"), list) and "version" in document


def read_recorder(path: Path, document: Mapping[str, Any]) -> Found:
    """Return one reading, with the stack that started the newest unfinished collective of each thread."""
    rank = rank_of(path)
    if rank is None:
        raise Damaged("the file name has no rank in it (such as nccl_trace_rank_3)")
    try:
        entries = sorted(document["entries"], key=lambda entry: int(entry["record_id"]))
        recorder = {**compact(entries), "members": members_of(document.get("pg_config") or {})}
        threads = threads_of(entries)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise Damaged(f"it is a dump of torch's flight recorder, but damaged ({error!r})") from error
    numbered_by = NumberedBy.FILE_NUMBER if named_rank(path) is None else NumberedBy.FILES
    return Found((Reading(SOURCE, rank=rank, recorder=recorder, threads=threads, numbered_by=numbered_by),))


def rank_of(path: Path) -> int | None:
    """Return the number after `rank` in the file name, else its last number: a host name may come before the rank."""
    stem = path.name.removesuffix(".pkl").removesuffix(".pickle").removesuffix(".json")
    found = RANK_LAST.search(stem)
    named = named_rank(path)
    return named if named is not None or not found else int(found[1])


def compact(entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the recorded collectives as the node agent stores them.

    Point-to-point calls are left out: they are numbered separately.
    """
    collectives = [entry for entry in entries if not entry.get("is_p2p")]
    tokens: dict[tuple[str, ...], int] = {}
    last: dict[str, int] = {}
    stream, unfinished = [], []
    for position, entry in enumerate(collectives):
        group, description = entry["process_group"]
        sizes, types = str(entry["input_sizes"]), str(entry["input_dtypes"])
        token = as_token(group, description, entry["profiling_name"], sizes, types)
        stream.append(tokens.setdefault(token, len(tokens)))
        last[group] = entry["collective_seq_id"]
        if is_open(entry):
            unfinished.append(position)
    return {
        "first_record": int(collectives[0]["record_id"]) if collectives else 0,
        "tokens": [list(token) for token in tokens],
        "stream": stream,
        "last_sequence": {str(group): int(number) for group, number in last.items()},
        "open": unfinished,
    }


def as_token(group: object, description: object, profiling_name: object, sizes: str, types: str) -> tuple[str, ...]:
    """Return a recorded call as a bundle stores it; `gloo:all_reduce` becomes the operation `all_reduce`."""
    return str(group), str(description), str(profiling_name).rpartition(":")[2], sizes, types


def is_open(entry: Mapping[str, Any]) -> bool:
    """Whether a recorded call has not finished. On gloo the state is always `scheduled`; only `retired` shows it."""
    return not entry.get("retired") and entry.get("state") != "completed"


def members_of(config: Mapping[str, Any]) -> dict[str, list[int]]:
    """Return the global ranks of each group that lists them; torch writes the list as text, `[0, 1]`."""
    members = {}
    for name, group in config.items():
        ranks = group.get("ranks") or "[]"
        found = [int(rank) for rank in (parse_json(ranks) if isinstance(ranks, str) else ranks)]
        if found:
            members[str(name)] = found
    return members


def threads_of(entries: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]] | None:
    """Return the stack of the newest unfinished call of each thread, or None if no stacks are recorded."""
    newest = {entry.get("thread_id"): entry for entry in entries if entry.get("frames") and is_open(entry)}
    threads = [as_thread(entry) for entry in newest.values()]
    return threads or None


def as_thread(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the frames of one entry as a thread, innermost first."""
    frames = [
        {"function": str(frame["name"]), "file": str(frame["filename"]), "line": int(frame["line"])}
        for frame in entry["frames"]
    ]
    number = int(str(entry.get("thread_id") or 0), 0) % NO_NUMBER
    return {"tid": number, "name": entry.get("thread_name"), "active": False, "owns_gil": False, "frames": frames}
