"""Reads the collectives that torch recorded in a rank, for node_agent.py. Standard library, Python 3.8 or newer."""

from __future__ import annotations

import os
import time

from node_motion import exec_start, last_cpu, visit
from node_processes import LARGEST_RECORD, owner_of, peer_of
from safe_files import others_may_write, parse_json, read_file_of

TYPE_CHECKING = False  # typing costs start-up time, and annotations are never evaluated
if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator
    from typing import Any

    Facts = dict[str, Any]

RECORDER_TIMEOUT_S = 1.0
LARGEST_DUMP = 1 << 30
"""Bytes of what torch recorded, with the stacks of thousands of calls."""
RECORDER_REQUEST = (
    b"POST /handler/fr_trace_json HTTP/1.1\r\nHost: rank\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
)


def recorder_folder(rank: Facts, request: Facts) -> str | None:
    """Return where the job serves what torch recorded, or None."""
    folder = request.get("recorder_folder") or (rank.get("attempt") and rank["attempt"] + "/recorder")
    return str(folder) if folder else None


def has_recorder(rank: Facts, request: Facts) -> bool:
    """Whether to ask the rank: the job serves its collectives by number, and it has not failed to answer before."""
    is_numbered = rank.get("source") != "order of start"
    return is_numbered and bool(recorder_folder(rank, request)) and "recorder_why" not in rank["samples"][0]


def read_rank_recorder(rank: Facts, request: Facts, _known: Facts) -> Iterator[tuple[str, Any]]:
    """Yield the collectives that torch recorded, or why they could not be read."""
    try:
        yield "recorder", ask_recorder(recorder_folder(rank, request) or "", rank["rank"], owner_of(rank["pid"]))
    except (OSError, ValueError, KeyError) as error:
        yield "recorder_why", str(error) or type(error).__name__


def ask_recorder(folder: str, rank: int, owner: int) -> Facts:
    """Ask a rank's worker server for the collectives that torch recorded; works while the GIL is held.

    Raises:
        OSError: there is no answer, or it is from another user than `owner`, the user of the rank.
    """
    import socket

    os.chdir(folder)  # the path of a socket is limited to 107 bytes, that of a run directory is not
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(RECORDER_TIMEOUT_S)
        connection.connect(f"rank-{rank:04d}.sock")
        if (peer := peer_of(connection)) != owner:
            raise OSError(f"user {peer} answers there, not user {owner}, whose rank it is")
        connection.sendall(RECORDER_REQUEST)
        answer = read_answer(connection, time.monotonic() + RECORDER_TIMEOUT_S)
    head, _, body = answer.partition(b"\r\n\r\n")
    if b" 200 " not in head[:20]:
        raise OSError(f"answer {head[:40]!r}")
    records = compact_records(parse_json(body, LARGEST_DUMP)["entries"])
    return dict(records, members=read_members(f"rank-{rank:04d}.json", owner))


def read_answer(connection: socket.socket, deadline: float) -> bytes:
    """Return what comes until the connection is closed.

    Raises:
        OSError: it is not closed in time, however often something comes, or more than LARGEST_DUMP has come.
    """
    answer = bytearray()
    while True:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("timed out")
        connection.settimeout(left_s)
        part = connection.recv(1 << 18)
        if not part:
            return bytes(answer)
        answer += part
        if len(answer) > LARGEST_DUMP:
            raise OSError(f"the answer is larger than {LARGEST_DUMP} bytes")


def read_members(path: str, owner: int) -> Facts:
    """Return which ranks belong to which group; nothing if `owner` has not written it."""
    try:
        content, found = read_file_of(path, LARGEST_RECORD)
    except OSError:
        return {}
    is_own = found.st_uid == owner and not others_may_write(found)
    return dict(parse_json(content).get("members", {})) if is_own else {}


def compact_records(entries: list[Facts]) -> Facts:
    """Return recorded collectives without repetition.

    {first_record, tokens: [[group, group description, operation, sizes, types]], stream: [token index, oldest first],
    last_sequence: {group: number of its newest entry}, open: [positions in `stream` of entries not yet retired],
    open_messages: how many messages between two ranks have not ended; NCCL alone records them}.
    """
    has_messages = any(entry["profiling_name"].startswith("nccl:") for entry in entries)
    open_messages = sum(1 for entry in entries if entry.get("is_p2p") and is_open(entry))
    entries = sorted((entry for entry in entries if not entry.get("is_p2p")), key=lambda entry: entry["record_id"])
    tokens: dict[tuple[str, ...], int] = {}
    last: dict[str, int] = {}
    stream, unfinished = [], []
    for position, entry in enumerate(entries):
        group, description = entry["process_group"]
        operation = entry["profiling_name"].rpartition(":")[2]
        token = (group, description, operation, str(entry["input_sizes"]), str(entry["input_dtypes"]))
        stream.append(tokens.setdefault(token, len(tokens)))
        last[group] = entry["collective_seq_id"]
        if is_open(entry):
            unfinished.append(position)
    first = entries[0]["record_id"] if entries else 0
    found = {"first_record": first, "tokens": list(tokens), "stream": stream, "last_sequence": last, "open": unfinished}
    return dict(found, open_messages=open_messages) if has_messages else found


def is_open(entry: Facts) -> bool:
    """Whether a recorded call has not ended."""
    return not entry["retired"] and entry["state"] != "completed"


def has_recorder_file(rank: Facts, _request: Facts) -> bool:
    """Whether the job set where torch writes dumps, and the recorder was not read in another way."""
    return bool(rank.get("recorder_files")) and not any("recorder" in sample for sample in rank["samples"])


def read_rank_file(rank: Facts, _request: Facts, _known: Facts) -> Iterator[tuple[str, Any]]:
    """Yield the collectives in a dump that torch wrote, if it is current: the main thread has not run since."""
    ran = last_run(rank["pid"])
    for path in rank["recorder_files"]:
        try:
            written = os.stat(f"/proc/{rank['pid']}/root{path}").st_mtime
            if ran is None:
                yield "recorder_why", f"{path}: the kernel does not show whether the main thread has run since"
                continue
            if written < ran:
                yield "recorder_why", f"{path} was written before the main thread last ran"
                continue
            yield "recorder", read_dump(f"/proc/{rank['pid']}/root{path}", owner_of(rank["pid"]))
            yield "recorder_file", path
            return
        except FileNotFoundError:
            continue  # nothing was dumped
        except Exception as error:  # a damaged pickle can raise anything
            yield "recorder_why", f"{path}: {str(error) or type(error).__name__}"


def last_run(pid: int) -> float | None:
    """Return the wall clock time when the main thread of a process was last on a CPU; None if it cannot be known.

    This thread reads the clock of the CPU of the other one, where it must be allowed to run (see node_motion.py).
    """
    allowed = os.sched_getaffinity(0)
    cpu, ran = last_cpu(f"/proc/{pid}/stat"), exec_start(f"/proc/{pid}/sched")
    try:
        offset = None if cpu is None else visit(cpu)
    finally:
        os.sched_setaffinity(0, allowed)
    if not ran or offset is None:
        return None
    if last_cpu(f"/proc/{pid}/stat") != cpu:
        return time.time()  # it has just run elsewhere
    return time.time() - (time.monotonic() + offset - ran)


def read_dump(path: str, owner: int) -> Facts:
    """Return the collectives in a dump of torch, pickle or JSON. Only plain data is read from a pickle, no code run.

    Raises:
        OSError: it cannot be read, is larger than LARGEST_DUMP, or `owner` has not written it.
        ValueError, and whatever a damaged pickle raises: it is no dump.
    """
    import io
    import pickle

    class PlainUnpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> None:
            raise ValueError(f"it is a pickle that would run {module}.{name}")

    content, found = read_file_of(path, LARGEST_DUMP, follow=True)
    if found.st_uid != owner:
        raise OSError(f"it is a file of user {found.st_uid}, not of user {owner}, whose rank it is")
    is_json = content[:1] == b"{"
    document = parse_json(content, LARGEST_DUMP) if is_json else PlainUnpickler(io.BytesIO(content)).load()
    groups = {name: parse_json(group.get("ranks") or "[]") for name, group in document["pg_config"].items()}
    members = {name: ranks for name, ranks in groups.items() if ranks}
    return dict(compact_records(document["entries"]), members=members)
