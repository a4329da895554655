"""Reads dumps of torch's flight recorder, as pickle or JSON: one file per rank, with the rank in the file name.

Layout in torch 2.13 (`torch/distributed/flight_recorder/components/loader.py`, and the result of `_dump_fr_trace` in
`torch._C._distributed_c10d`): {version, pg_config, pg_status, entries: [{record_id, process_group: (name,
description), collective_seq_id, p2p_seq_id, profiling_name, input_sizes, input_dtypes, state, retired, is_p2p,
thread_name, thread_id, frames: [{name, filename, line}]}]}. Only pickles contain frames. `pg_config` lists the members
of each group on NCCL; on gloo it is empty. torch 2.2 pickles the entries alone, with `seq_id` and `pg_id`. Versions 1.1
to 1.4 (torch 2.3) have such entries too, and `pg_config: {pg_id: [ranks]}`.

The hook of torchcomms writes the same keys, but numbers the calls of all groups of a rank together, lists the members
of a group by their place in it (`0,1`, without brackets), and does not mark messages between two ranks.

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
MESSAGES = ("send", "recv")
"""Names of messages between two ranks, where dumps do not mark them."""


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
    if is_list_of_entries(document):
        document = {"version": "1.0", "entries": document}
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
    """Whether `document` has the keys of a dump. Without any call, torchcomms leaves out the entries."""
    if not isinstance(document, dict) or "version" not in document:
        return False
    config = document.get("pg_config")
    may_be_empty = isinstance(config, dict) and is_of_torchcomms(config)
    return isinstance(document.get("entries", [] if may_be_empty else None), list)


def is_list_of_entries(document: object) -> bool:
    """Whether `document` is what torch 2.2 wrote: the entries, and nothing around them."""
    first = document[0] if isinstance(document, list) and document else None
    return isinstance(first, dict) and "profiling_name" in first


def read_recorder(path: Path, document: Mapping[str, Any]) -> Found:
    """Return one reading, with the stack that started the newest unfinished collective of each thread."""
    rank = rank_of(path)
    if rank is None:
        raise Damaged("the file name has no rank in it (such as nccl_trace_rank_3)")
    try:
        config = document.get("pg_config") or {}
        entries = entries_of(document, is_of_torchcomms(config))
        recorder = {**compact(entries), "members": members_of(config)}
        threads = threads_of(entries)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise Damaged(f"it is a dump of torch's flight recorder, but damaged ({error!r})") from error
    numbered_by = NumberedBy.FILE_NUMBER if named_rank(path) is None else NumberedBy.FILES
    return Found((Reading(SOURCE, rank=rank, recorder=recorder, threads=threads, numbered_by=numbered_by),))


def rank_of(path: Path) -> int | None:
    """Return the number after `rank` in the file name, else its last number: a host name may come before the rank."""
    stem = path.name.removesuffix(".pkl").removesuffix(".pickle").removesuffix(".json")
    found = RANK_LAST.search(stem)
    named = named_rank(path)
    return named if named is not None or not found else int(found[1])


def with_later_keys(entries: Sequence[Any]) -> list[Any]:
    """Return the entries of torch 2.2 or 2.3 with what newer versions add."""
    return [
        {
            "record_id": position,
            "process_group": (str(entry.get("pg_id", 0)), ""),
            "collective_seq_id": entry.get("seq_id"),
            "input_dtypes": [],
            "is_p2p": str(entry.get("profiling_name")).rpartition(":")[2].startswith(MESSAGES),
            **entry,
        }
        if isinstance(entry, dict)
        else entry
        for position, entry in enumerate(entries)
    ]


def entries_of(document: Mapping[str, Any], of_torchcomms: bool) -> list[Mapping[str, Any]]:
    """Return the entries, oldest first, as torch has them."""
    entries = document.get("entries", ())
    if entries and "process_group" not in entries[0]:
        entries = with_later_keys(entries)
    entries = sorted(entries, key=lambda entry: int(entry["record_id"]))
    return numbered_by_group(entries) if of_torchcomms else entries


def numbered_by_group(entries: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the entries of torchcomms as torch has them: messages are marked, and calls are numbered in their group.

    Raises:
        Damaged: the first calls are lost, so that numbers in a group are not known.
    """
    marked = [{**entry, "is_p2p": operation_of(entry) in MESSAGES} for entry in entries]
    if len({str(entry["process_group"][0]) for entry in marked}) < 2:
        return list(marked)
    if [int(entry["record_id"]) for entry in marked] != list(range(len(marked))):
        raise Damaged(
            "torchcomms numbers the calls of all groups together, and the first calls are lost: calls of one group "
            "cannot be compared between ranks. Record more of them (max_entries of FlightRecorderHook)"
        )
    counts: dict[str, int] = {}
    for entry in marked:
        group = str(entry["process_group"][0])
        counts[group] = counts.get(group, 0) + (not entry["is_p2p"])
        entry["collective_seq_id"] = counts[group]
    return list(marked)


def compact(entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the recorded collectives as the node agent stores them.

    Messages between two ranks are numbered separately: they are left out, and only NCCL records them, so that there the
    number of those that have not ended is known.
    """
    collectives = [entry for entry in entries if not entry.get("is_p2p")]
    tokens: dict[tuple[str, ...], int] = {}
    last: dict[str, int] = {}
    stream, unfinished = [], []
    for position, entry in enumerate(collectives):
        group, description = entry["process_group"]
        sizes, types = str(entry["input_sizes"]), str(entry["input_dtypes"])
        token = (str(group), str(description), operation_of(entry), sizes, types)
        stream.append(tokens.setdefault(token, len(tokens)))
        last[group] = entry["collective_seq_id"]
        if is_open(entry):
            unfinished.append(position)
    has_messages = any(str(entry["profiling_name"]).startswith("nccl:") for entry in entries)
    open_messages = sum(is_open(entry) for entry in entries if entry.get("is_p2p"))
    return {
        "first_record": int(collectives[0]["record_id"]) if collectives else 0,
        "tokens": [list(token) for token in tokens],
        "stream": stream,
        "last_sequence": {str(group): int(number) for group, number in last.items()},
        "open": unfinished,
        **({"open_messages": open_messages} if has_messages else {}),
    }


def operation_of(entry: Mapping[str, Any]) -> str:
    """Return the operation of a recorded call: `all_reduce` of `gloo:all_reduce`."""
    return str(entry["profiling_name"]).rpartition(":")[2]


def is_open(entry: Mapping[str, Any]) -> bool:
    """Whether a recorded call has not finished. On gloo the state is always `scheduled`; only `retired` shows it."""
    return not entry.get("retired") and entry.get("state") != "completed"


def members_of(config: Mapping[str, Any]) -> dict[str, list[int]]:
    """Return the global ranks of each group that lists them; torch writes the list as text, `[0, 1]`, from 2.4 on.

    torchcomms lists places in the group: these are ranks only in the largest group, if that is the world.
    """
    listed = {name: group if isinstance(group, list) else group.get("ranks") or "[]" for name, group in config.items()}
    found = {str(name): ranks_of(ranks) for name, ranks in listed.items()}
    largest = max(map(len, found.values()), default=0)
    is_known = {name: len(ranks) == largest or not is_of_torchcomms(config) for name, ranks in found.items()}
    return {name: ranks for name, ranks in found.items() if ranks and is_known[name]}


def ranks_of(listed: str | Sequence[Any]) -> list[int]:
    """Return ranks that are a list, its text `[0, 1]`, or the text `0,1`."""
    if not isinstance(listed, str):
        return [int(rank) for rank in listed]
    return [int(rank) for rank in (parse_json(listed) if listed.startswith("[") else listed.split(","))]


def is_of_torchcomms(config: Mapping[str, Any]) -> bool:
    """Whether the hook of torchcomms wrote the dump: it lists the members of a group without brackets."""
    listed = (group.get("ranks") for group in config.values() if isinstance(group, dict))
    return any(isinstance(ranks, str) and ranks[:1].isdigit() for ranks in listed)


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
