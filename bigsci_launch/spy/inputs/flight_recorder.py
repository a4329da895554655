"""Dumps of torch's flight recorder, as pickle or JSON: one file per rank, the rank in the file's name.

Layout of torch 2.13 (`torch/distributed/flight_recorder/components/loader.py`, and what `_dump_fr_trace` of
`torch._C._distributed_c10d` gives): {version, pg_config, pg_status, entries: [{record_id, process_group: (name,
description), collective_seq_id, p2p_seq_id, profiling_name, input_sizes, input_dtypes, state, retired, is_p2p,
thread_name, thread_id, frames: [{name, filename, line}]}]}. Frames are in pickles only. `pg_config` names the members
of groups on NCCL; on gloo it is empty.

Of a pickle nothing is run: only plain containers, numbers and text are built from it.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bigsci_launch.safe_pickle import ForbiddenPickle, SafeUnpickler
from bigsci_launch.spy.inputs.reading import Damaged, Found, NotThis, Reading

RANK_NAMED = re.compile(r"rank[-_]?(\d+)", re.IGNORECASE)
RANK_LAST = re.compile(r"(\d+)(?=\D*$)")
NO_NUMBER = 1 << 31


def read_recorder_pickle(path: Path, data: bytes) -> Found:
    """The rank whose recorder a pickle holds.

    Raises:
        NotThis: it is no pickle of protocol 2 or newer. Damaged: it is none of a flight recorder.
    """
    if data[:1] != b"\x80" or data[1:2] > b"\x05":
        raise NotThis
    try:
        document = SafeUnpickler(io.BytesIO(data)).load()
    except ForbiddenPickle as error:
        raise Damaged(str(error)) from error
    except Exception as error:
        raise Damaged(f"it begins like a pickle, but cannot be read ({type(error).__name__}: {error})") from error
    if not is_recorder(document):
        raise Damaged("it is a pickle, but not of torch's flight recorder (it has no entries)")
    return read_recorder(path, document)


def read_recorder_json(path: Path, document: object) -> Found:
    """The rank whose recorder a JSON document holds.

    Raises:
        NotThis: it is something else. Damaged: its entries are.
    """
    if not is_recorder(document):
        raise NotThis
    assert isinstance(document, dict)
    return read_recorder(path, document)


def is_recorder(document: object) -> bool:
    """Whether it has the keys of a dump."""
    return isinstance(document, dict) and isinstance(document.get("entries"), list) and "version" in document


def read_recorder(path: Path, document: Mapping[str, Any]) -> Found:
    """One reading, with the stack at which the newest unfinished collective was begun."""
    rank = rank_of(path)
    if rank is None:
        raise Damaged("the file's name holds no rank, as in nccl_trace_rank_3")
    try:
        entries = sorted(document["entries"], key=lambda entry: int(entry["record_id"]))
        recorder = {**compact(entries), "members": members_of(document.get("pg_config") or {})}
        threads = threads_of(entries)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise Damaged(f"it is a dump of torch's flight recorder, but damaged ({error!r})") from error
    return Found((Reading("flight recorder", rank=rank, recorder=recorder, threads=threads),))


def rank_of(path: Path) -> int | None:
    """The number after `rank` in the name, else its last number; names of hosts may stand before it."""
    stem = path.name.removesuffix(".pkl").removesuffix(".pickle").removesuffix(".json")
    found = RANK_NAMED.findall(stem) or RANK_LAST.findall(stem)
    return int(found[-1]) if found else None


def compact(entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Recorded collectives as the node agent stores them; point-to-point calls have numbers of their own."""
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
    """What a bundle holds of a recorded call; `gloo:all_reduce` is the operation `all_reduce`."""
    return str(group), str(description), str(profiling_name).rpartition(":")[2], sizes, types


def is_open(entry: Mapping[str, Any]) -> bool:
    """Whether a recorded call has not ended. On gloo the state is always `scheduled`, and only `retired` tells."""
    return not entry.get("retired") and entry.get("state") != "completed"


def members_of(config: Mapping[str, Any]) -> dict[str, list[int]]:
    """{group: its global ranks} of groups that list them; the list is text, `[0, 1]`."""
    members = {}
    for name, group in config.items():
        ranks = group.get("ranks") or "[]"
        found = [int(rank) for rank in (json.loads(ranks) if isinstance(ranks, str) else ranks)]
        if found:
            members[str(name)] = found
    return members


def threads_of(entries: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]] | None:
    """The stacks at which unfinished calls were begun, newest call of each thread; None where none are recorded."""
    newest = {entry.get("thread_id"): entry for entry in entries if entry.get("frames") and is_open(entry)}
    threads = [as_thread(entry) for entry in newest.values()]
    return threads or None


def as_thread(entry: Mapping[str, Any]) -> dict[str, Any]:
    """The frames of one entry, innermost first, as a thread."""
    frames = [
        {"function": str(frame["name"]), "file": str(frame["filename"]), "line": int(frame["line"])}
        for frame in entry["frames"]
    ]
    number = int(str(entry.get("thread_id") or 0), 0) % NO_NUMBER
    return {"tid": number, "name": entry.get("thread_name"), "active": False, "owns_gil": False, "frames": frames}
