"""Makes a bundle from files: recognises each, merges what several show about a rank, numbers ranks without a number."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from bigsci_launch.errors import EvidenceError
from bigsci_launch.spy.evidence.bundle import LONGEST_REASON, Bundle, read_bundle
from bigsci_launch.spy.evidence.numbering import RANKS_NOT_NAMED, NumberedBy, OtherProcess, list_processes
from bigsci_launch.spy.evidence.ranks import FILES
from bigsci_launch.spy.inputs.flight_recorder import SOURCE as RECORDER
from bigsci_launch.spy.inputs.flight_recorder import read_recorder_json, read_recorder_pickle
from bigsci_launch.spy.inputs.layout import unpack
from bigsci_launch.spy.inputs.looks import moment_of, natural, order_looks, says_look
from bigsci_launch.spy.inputs.nccl_inspector import read_inspector_lines
from bigsci_launch.spy.inputs.nccl_ras import read_ras, repair
from bigsci_launch.spy.inputs.nccl_ras_text import read_ras_text
from bigsci_launch.spy.inputs.pyspy_json import read_pyspy_json
from bigsci_launch.spy.inputs.reading import Damaged, Found, NotThis, Reading
from bigsci_launch.spy.inputs.roles import tell_apart
from bigsci_launch.spy.inputs.stack_text import read_stack_text
from bigsci_launch.spy.inputs.unread import LOOKED_AT, Unread, describe
from bigsci_launch.typed_path import open_typed

MAX_FILE_BYTES = 1 << 28
MOST_REASONS = 3
MOST_LOOKS = 64
MOST_UNPACKED = 1 << 27
"""Bytes of a file that gzip has compressed. It compresses at most by a thousand."""
MOST_DESCRIBED = 32
PARALLEL_BYTES = 1 << 25
"""One process reads this much in half a second."""
READABLE = (
    "a bundle of `bsl spy`, stacks (of py-spy, faulthandler, gdb, pystack or `ray stack`), dumps of torch's flight "
    "recorder, output of ncclras, or lines of NCCL's Inspector"
)
HINT = f"--bundle reads {READABLE}: files, or a folder of them"
OF_LOGS = "these look like logs: `bsl why {path}` reads them, and says why the job ended; "


def open_evidence(paths: Sequence[Path]) -> Bundle:
    """Open a stored bundle, or make one from files of other tools.

    Raises:
        EvidenceError: a path is none of these, is damaged, or cannot be read.
    """
    try:
        return _open(paths)
    except OSError as error:
        raise EvidenceError(f"{paths[0]}: cannot be read ({error.strerror})", hint=HINT) from error


def _open(paths: Sequence[Path]) -> Bundle:
    bundles = [path for path in paths if (path / "collection.json").is_file()]
    if bundles and len(paths) > 1:
        raise EvidenceError(
            f"{bundles[0]}: a bundle cannot be analysed together with other paths", hint="pass the bundle alone"
        )
    if bundles:
        return read_bundle(bundles[0])
    found = [each for path in dict.fromkeys(paths) for each in read_path(path)]
    readings, strangers = tell_apart([reading for each in found for reading in each.readings])
    others = [*(other for each in found for other in each.others), *strangers]
    if not readings:
        raise _no_rank(paths[0], others)
    problems = [problem for each in found for problem in each.problems]
    return make_bundle(str(paths[0]), readings, problems, others)


def _no_rank(path: Path, others: Sequence[OtherProcess]) -> EvidenceError:
    """Return the error for files without ranks. It says what their processes are: `torch's launcher (process 4711)`."""
    reasons: dict[str, list[int]] = {}
    for other in others:
        reasons.setdefault(other.why.removeprefix("it is "), []).append(other.pid)
    kinds = [
        f"{why} ({'process' if len(pids) == 1 else 'processes'} {list_processes(pids)})"
        for why, pids in reasons.items()
    ]
    if not kinds:
        return EvidenceError(f"{path}: it contains no rank", hint=HINT)
    words = ", ".join(kinds[:MOST_REASONS])
    return EvidenceError(
        f"{path}: it contains no rank, only {words}", hint="dump the stacks of the processes that train"
    )


def read_path(path: Path) -> list[Found]:
    """Read a file that must be evidence, or a folder in which at least one file is."""
    if not path.exists():
        raise EvidenceError(f"{path}: not a bundle of `bsl spy`, and not a file", hint=HINT)
    if not path.is_dir():
        found = read_file(path) if path.is_file() and path.stat().st_size <= MAX_FILE_BYTES else None
        if found is None:
            raise _unread(path, [path], "not evidence that `bsl spy` can read")
        return [found]
    looks = [folder for folder in path.iterdir() if folder.is_dir() and says_look(folder.name)]
    inside = sorted(file for folder in (path, *looks) for file in folder.iterdir())
    files = [file for file in inside if file.is_file() and file.stat().st_size <= MAX_FILE_BYTES]
    all_found = [found for found in read_files(files) if found is not None]
    if not all_found:
        raise _unread(path, files, "not a bundle of `bsl spy`, and no file in it is evidence")
    return all_found


def _unread(path: Path, files: Sequence[Path], words: str) -> EvidenceError:
    """Return the error for a path without evidence: it says what one of its files is, a log if there is one."""
    found = [(file, describe(_beginning(file))) for file in files[:MOST_DESCRIBED] if file.is_file()]
    file, shown = next((each for each in found if each[1].is_log), found[0] if found else (path, Unread("")))
    about = f"{'it' if file == path else file.name} {shown.words}" if shown.words else ""
    hint = OF_LOGS.format(path=path) + HINT if shown.is_log else HINT
    return EvidenceError(f"{path}: {words}{': ' if about else ''}{about}", hint=hint)


def _beginning(file: Path) -> bytes:
    with open_typed(file) as stream:
        return unpack(stream.read(LOOKED_AT), LOOKED_AT)


def read_files(files: Sequence[Path]) -> list[Found | None]:
    """Read each file, on all cores if there is much to read."""
    if sum(file.stat().st_size for file in files) < PARALLEL_BYTES:
        return [read_file(file) for file in files]
    # Nothing in a decoded dump is garbage, and searching it for garbage takes a third of the time.
    with ProcessPoolExecutor(initializer=gc.disable) as readers:
        return list(readers.map(read_file, files, chunksize=4))


def read_file(path: Path) -> Found | None:
    """Read a file; None if it is not evidence.

    Raises:
        EvidenceError: it is evidence that cannot be used.
    """
    with open_typed(path) as stream:
        data = unpack(stream.read(), MOST_UNPACKED)
    for read in (read_recorder_pickle, read_json, read_inspector_lines, read_ras_text, read_stack_text):
        try:
            found, moment = read(path, data), moment_of(path)
            return replace(found, readings=tuple(replace(reading, moment=moment) for reading in found.readings))
        except NotThis:
            continue
        except Damaged as error:
            raise EvidenceError(f"{path}: {str(error)[:LONGEST_REASON]}", hint=HINT) from error
    return None


def read_json(path: Path, data: bytes) -> Found:
    """Read a JSON document of py-spy, of the flight recorder or of RAS.

    Raises:
        NotThis: it is none of them. Damaged: it is one of them, but broken.
    """
    if data.lstrip()[:1] == b"[":
        return read_pyspy_json(path, data)
    if data.lstrip()[:1] != b"{":
        raise NotThis
    try:
        document = repair(data.decode("utf-8", "replace"))
    except ValueError as error:
        if not any(key in data for key in (b'"entries"', b'"communicators"')):
            raise NotThis from error  # such as lines of JSON
        raise Damaged(f"it starts like JSON, but is broken ({error})") from error
    try:
        return read_recorder_json(path, document)
    except NotThis:
        return read_ras(document)


def make_bundle(
    label: str, readings: Iterable[Reading], problems: Sequence[str], others: Sequence[OtherProcess] = ()
) -> Bundle:
    """Return a bundle of the documents that the node agent would have written."""
    merged: dict[int, list[Reading]] = {}
    looks = looks_of(readings)
    numbered, assumed = number([each[0] for each in looks])
    for first, each in zip(numbered, looks, strict=True):
        assert first.rank is not None
        merged.setdefault(first.rank, []).extend(
            replace(reading, rank=first.rank, numbered_by=first.numbered_by) for reading in each
        )
    nodes: dict[str, list[dict[str, Any]]] = {}
    for rank, several in sorted(merged.items()):
        nodes.setdefault(next((each.node for each in several if each.node), ""), []).append(as_rank(rank, several))
    if assumed:
        problems = [*problems, RANKS_NOT_NAMED]
    for other in others:
        nodes.setdefault(other.node, [])
    documents = [as_node(node, ranks, [each for each in others if each.node == node]) for node, ranks in nodes.items()]
    documents[0]["problems"] = list(problems)
    world_size = max([max(merged) + 1, *(size for each in numbered for size in group_sizes(each))])
    collection = {"job": label, "topology": None, "world_size": world_size, "may_lack_ranks": not assumed}
    return Bundle(collection, tuple(documents))


def group_sizes(reading: Reading) -> list[int]:
    """Return the highest rank of each group plus one, which counts ranks that have no file of their own."""
    members: Mapping[str, Sequence[int]] = (reading.recorder or {}).get("members") or {}
    return [max(ranks) + 1 for ranks in members.values()]


def as_node(node: str, ranks: list[dict[str, Any]], others: Sequence[OtherProcess]) -> dict[str, Any]:
    document = {"node": node, "clock_ticks_per_s": 100, "found_by": FILES, "problems": [], "ranks": ranks}
    listed = [{"pid": each.pid, "comm": each.comm, "role": each.role, "why": each.why} for each in others]
    return {**document, "others": listed} if listed else document


def as_rank(rank: int, several: Sequence[Reading]) -> dict[str, Any]:
    """Return the document of one rank. Stacks that a tool read are preferred to those of recorded calls."""
    looks, times = align(several)
    pid = next((each.pid for each in several if each.pid), None)
    guessed = (each.numbered_by for each in several if not each.numbered_by.is_known)
    numbered_by = next(guessed, several[0].numbered_by)
    samples = [as_sample(look, None if times is None else times[at]) for at, look in enumerate(looks)]
    return {"rank": rank, "pid": pid, "source": numbered_by.value, "step": None, "samples": samples}


def align(several: Sequence[Reading]) -> tuple[list[list[Reading]], list[float] | None]:
    """Return the looks at one rank, each with what the tools read of it, and the seconds of each since the first.

    A tool that looked less often than another is taken to have looked last. Seconds are None if they are not known.
    A process that a loop has dumped for a day has some thousand looks: these are thinned out.
    """
    of_tool: dict[str, list[Reading]] = {}
    for reading in several:
        of_tool.setdefault(reading.source, []).append(reading)
    times_of = {}
    for tool, readings in of_tool.items():
        order, times = order_looks([reading.moment for reading in readings])
        order, times_of[tool] = thinned(order), None if times is None else thinned(times)
        of_tool[tool] = newest_process([readings[index] for index in order])
    most = max(of_tool, key=lambda tool: len(of_tool[tool]))
    num_looks = len(of_tool[most])
    times = (times_of[most] or [])[-num_looks:] or None
    looks: list[list[Reading]] = [[] for _ in range(num_looks)]
    for readings in of_tool.values():
        for look, reading in zip(reversed(looks), reversed(readings), strict=False):
            look.append(reading)
    return looks, [0.0] if num_looks == 1 else times


def thinned(looks: list[Any]) -> list[Any]:
    """Return at most `MOST_LOOKS` of looks in the order of time: the first, the last, and others evenly between."""
    if len(looks) <= MOST_LOOKS:
        return looks
    return [looks[at * (len(looks) - 1) // (MOST_LOOKS - 1)] for at in range(MOST_LOOKS)]


def newest_process(readings: list[Reading]) -> list[Reading]:
    """Return the looks at the process that was seen last. Two dumps of a recorder in one folder are one look."""
    last = readings[-1]
    same = [each for each in readings if each.pid == last.pid]
    folders = {Path(each.moment.path).parent for each in same}
    return same if last.source != RECORDER or len(folders) == len(same) else [last]


def as_sample(look: Sequence[Reading], mono: float | None) -> dict[str, Any]:
    """Return one look at a rank as a sample; `mono` is its time in seconds, or None if it is not known."""
    in_order = sorted(look, key=lambda reading: reading.source == RECORDER)
    sample: dict[str, Any] = {"mono": mono, "state": "gone" if any(each.is_gone for each in look) else "?"}
    threads = next((each.threads for each in in_order if each.threads), None)
    if threads:
        sample["stack"] = {"threads": list(threads)}
    else:
        sample["why"] = next((each.why for each in in_order if each.why), "the files contain no stack of it")
    recorder = next((each.recorder for each in in_order if each.recorder), None)
    if recorder:
        sample["recorder"] = recorder
    return sample


def looks_of(readings: Iterable[Reading]) -> list[list[Reading]]:
    """Return the readings of each process by each tool, in the order of their time or of the files."""
    found: dict[object, list[Reading]] = {}
    for reading in readings:
        found.setdefault((reading.source, reading.process), []).append(reading)
    return list(found.values())


def number(readings: list[Reading]) -> tuple[list[Reading], bool]:
    """Return the readings with a rank each, in the same order, and whether ranks had to be assumed.

    Readings without a rank are numbered node by node in natural order, by `local_rank` where the command line gave it,
    else in the order of the file. Every node is taken to have as many ranks as the fullest one.
    """
    nodes: dict[str, list[Reading]] = {}
    for reading in readings:
        if reading.rank is None:
            nodes.setdefault(reading.node, []).append(reading)
    if not nodes:
        return readings, False
    placed = {node: local_ranks(held) for node, held in nodes.items()}
    per_node = max(local for locals_ in placed.values() for local in locals_) + 1
    first = {node: at * per_node for at, node in enumerate(sorted(nodes, key=natural))}
    place = {
        id(reading): first[node] + local
        for node, held in nodes.items()
        for reading, local in zip(held, placed[node], strict=True)
    }
    numbered = [
        replace(reading, rank=place[id(reading)], numbered_by=NumberedBy.FILE_ORDER)
        if id(reading) in place
        else reading
        for reading in readings
    ]
    return numbered, True


def local_ranks(held: Sequence[Reading]) -> list[int]:
    """Return the local rank of each reading on its node."""
    said = [reading.local_rank for reading in held]
    if None not in said and len(set(said)) == len(said):
        return [local for local in said if local is not None]
    return list(range(len(held)))
