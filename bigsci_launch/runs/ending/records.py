"""Reads what the ranks of an attempt left, and compares the clocks of their nodes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from bigsci_launch.endings.conclude import reason_of
from bigsci_launch.endings.ending import Culprit, named_by, sentence_of
from bigsci_launch.endings.lines import Speaker
from bigsci_launch.endings.statements import Statement, read_statements
from bigsci_launch.endings.words import read_words
from bigsci_launch.file_names import launcher_of_name
from bigsci_launch.lost_peer import is_loss, says_lost_peer
from bigsci_launch.runs.ending.output import JobOutput, parse_output
from bigsci_launch.runs.events import read_last_events, read_tail
from bigsci_launch.runs.layout import AttemptDir, rank_files, read_record

Record = dict[str, Any]
Ranks = dict[int, Record]

LOG_TAIL_BYTES = 32768
"""NCCL's watchdog prints stacks of several kilobytes after its first line."""
EVENT_TAIL_BYTES = 8192
OUTPUT_BYTES = 2**22
WORDS_LENGTH = 500
STAMP = re.compile(rb"^(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(\.\d+)?Z ")
CLOCK_TOLERANCE_S = 2.0
"""Clocks that differ by less count as equal: starting ranks, and telling them to end, takes about as long."""
START_ROUNDING_S = 1.0
"""The job script notes its start in whole seconds."""


def read_output(attempt: AttemptDir) -> JobOutput:
    """Return what job.out shows about the attempt, which may be a requeue that appended to it."""
    text = b"\n".join(tail(attempt.job_output, OUTPUT_BYTES)).decode(errors="replace")
    return parse_output(text, attempt.name, read_launched(attempt))


def read_launched(attempt: AttemptDir) -> dict[int, tuple[int, ...]]:
    """Return the ranks that each launcher has started; none if `bsl` started the ranks themselves."""
    launched: dict[int, list[int]] = {number: [] for number in rank_files(attempt.pids, ".json", launcher_of_name)}
    for rank, path in rank_files(attempt.pids, ".json").items() if launched else ():
        launched.setdefault(read_record(path).get("launcher", -1), []).append(rank)
    return {number: tuple(ranks) for number, ranks in launched.items()}


def read_ranks(attempt: AttemptDir, unwritten: Mapping[tuple[str, int], Record] = MappingProxyType({})) -> Ranks:
    """Return what each rank left: its `pid`, `exit` and `error` records (empty if missing), its last event, its words.

    `unwritten` are records that ranks could not write, from job.out.
    """
    numbers = {rank for folder in (attempt.pids, attempt.exits, attempt.errors) for rank in rank_files(folder, ".json")}
    return {rank: read_rank(attempt, rank, unwritten) for rank in sorted(numbers | {rank for _, rank in unwritten})}


def read_rank(attempt: AttemptDir, rank: int, unwritten: Mapping[tuple[str, int], Record]) -> Record:
    def newest(path: Path) -> Record:
        records = (read_record(path), unwritten.get((path.parent.name, rank)))
        found = (record for record in records if record)
        return max(found, key=lambda record: record.get("time") or record.get("started") or 0.0, default={})

    end, error = newest(attempt.exit_file(rank)), read_record(attempt.error_file(rank))
    lines = tail(attempt.log_file(rank), LOG_TAIL_BYTES)
    told = statements_of(lines, rank)
    own = [each for each in told if not is_after(stamp_of(lines[each.line - 1]), end.get("terminated"))]
    about_others = [plain(lines[each.line - 1]) for each in own if is_loss(each.word)]
    if error and says_lost_peer(error_text(error)) and not is_after(error.get("time"), end.get("terminated")):
        about_others.append(error_text(error))
    return {
        "pid": newest(attempt.pid_file(rank)),
        "exit": end,
        "error": error,
        "event": next(reversed(read_last_events(attempt.event_file(rank), EVENT_TAIL_BYTES)), {}),
        "said": said_of(told, lines),
        "fatal": fatal_line(told, lines) if end.get("signal") else "",
        "about_others": about_others,
        "failed_itself": (reason := reason_of(own)) is not None and reason.word.speaker == "cause",
        "accuses": sorted({rank for each in own if each.kind == "hang" for rank in each.named_ranks}),
        "raised": raised_line(own, lines, end.get("terminated")),
        "was_told": any(each.word.speaker == "echo" and each.kind == "hang" for each in told),
    }


def statements_of(lines: list[bytes], rank: int) -> tuple[Statement, ...]:
    """Return what the last lines of a rank say about its end, by the table of words."""
    text = "\n".join(STAMP.sub(b"", line).decode(errors="replace") for line in lines)
    return read_statements(text, "", Speaker(rank), read_words()).statements


def said_of(told: Sequence[Statement], lines: list[bytes]) -> str:
    """Return what explains the end of a rank, of all its last lines; else its last line."""
    reason = reason_of(told)
    if reason is None:
        return last_line(lines)
    if reason.word.speaker == "witness":
        return sentence_of(reason, named_by(reason))
    said = plain(lines[reason.line - 1])
    return said if reason.word.is_sure else f"{said} ({sentence_of(reason, Culprit())})"


def is_after(moment: float | None, terminated: float | None) -> bool:
    return moment is not None and terminated is not None and moment > terminated


def error_text(error: Record) -> str:
    """`RuntimeError: Connection closed by peer`, from an `error` record."""
    return f"{error.get('type')}: {error.get('message')}"


def has_ended(rank: Record) -> bool:
    """Whether the training of the rank was over: its last event says so."""
    return bool(rank["event"].get("kind") == "end")


def node_of(rank: Record) -> str | None:
    known = rank["pid"] or rank["exit"] or rank["error"]
    node: str | None = known.get("node")
    return node


class NodeClock(NamedTuple):
    """How many seconds the clock of a node is ahead of those of the others; negative: behind."""

    seconds: float
    is_certain: bool
    """Whether it is the clock. Otherwise its ranks may just have started later than the others."""


def compare_clocks(ranks: Ranks, started: float) -> dict[str, NodeClock]:
    """Return the nodes whose clocks differ from those of the others by more than the tolerance.

    srun starts all ranks at about the same time, and tells all of them to end at once. Where both moments are recorded,
    both must show the difference, because a delay shows in one of them only. Ranks that started before the script that
    starts them also show it.
    """
    starts, ends = earliest(ranks, "pid", "started"), earliest(ranks, "exit", "terminated")
    plausible = [node for node, start in starts.items() if start >= started - START_ROUNDING_S] or list(starts)
    candidates = sorted((node for node in plausible if node in ends), key=starts.__getitem__)
    candidates = candidates or sorted(plausible, key=starts.__getitem__)
    if len(starts) < 2:
        return {}
    reference = candidates[(len(candidates) - 1) // 2]
    jumped = {node_of(rank) for rank in ranks.values() if has_jumped(rank)}
    clocks = {}
    for node, start in starts.items():
        apart = start - starts[reference]
        if node in ends and reference in ends:
            clock = compare_both(apart, ends[node] - ends[reference], node in jumped)
        else:
            clock = NodeClock(apart, is_certain=start < started - START_ROUNDING_S)
        if abs(clock.seconds) > CLOCK_TOLERANCE_S:
            clocks[node] = clock
    return clocks


def compare_both(start_s: float, end_s: float, has_jumped: bool) -> NodeClock:
    """Return the clock of a node that is `start_s` ahead at the start and `end_s` at the end.

    If only the end shows it, the clock was set in between, or the node heard of the end later than the others.
    """
    agreed = shown_by_both(start_s, end_s)
    if abs(agreed) > CLOCK_TOLERANCE_S:
        return NodeClock(agreed, is_certain=True)
    return NodeClock(end_s, is_certain=has_jumped)


def has_jumped(rank: Record) -> bool:
    """Whether a rank ended before it started, by the clock of its node."""
    start, end = rank["pid"].get("started"), rank["exit"].get("time")
    return start is not None and end is not None and end < start - START_ROUNDING_S


def earliest(ranks: Ranks, kind: str, field: str) -> dict[str, float]:
    """Return the earliest time that the ranks of each node recorded in a field."""
    times: dict[str, float] = {}
    for rank in ranks.values():
        node, moment = node_of(rank), rank[kind].get(field)
        if node is not None and moment is not None:
            times[node] = min(moment, times.get(node, moment))
    return times


def shown_by_both(one: float, other: float) -> float:
    """Return the smaller of two differences; 0 if they do not even have the same sign."""
    return min(one, other, key=abs) if one * other > 0 else 0.0


def corrected(ranks: Ranks, clocks: dict[str, NodeClock]) -> Ranks:
    """Return the records with the times that correct clocks would have shown."""
    return {number: correct_rank(rank, clocks) for number, rank in ranks.items()}


def correct_rank(rank: Record, clocks: dict[str, NodeClock]) -> Record:
    clock = clocks.get(node_of(rank) or "")
    if clock is None:
        return rank

    def shifted(record: Record) -> Record:
        fields = (name for name in ("time", "started", "terminated") if record.get(name) is not None)
        return {**record, **{name: record[name] - clock.seconds for name in fields}}

    return {**rank, **{kind: shifted(rank[kind]) for kind in ("pid", "exit", "error", "event")}}


def last_line(lines: list[bytes]) -> str:
    """Return the last line with a word or a number, without its time: rules and brackets say nothing."""
    return next((text for line in reversed(lines) if any(map(str.isalnum, text := plain(line)))), "")


def fatal_line(told: Sequence[Statement], lines: list[bytes]) -> str:
    """Return the line in which C++ or Python says why it ends the process; it comes before long stacks."""
    what = (text for line in lines if (text := plain(line)).startswith("what():"))
    thrown = (each for each in told if each.word.speaker == "cause" or each.word.name == "python: thrown")
    return next(what, None) or next((plain(lines[each.line - 1]) for each in thrown), "")


def raised_line(own: Sequence[Statement], lines: list[bytes], terminated: float | None) -> tuple[str, float | None]:
    """Return the error that is the last that the rank printed before it was told to end, and its time.

    Empty if there is none: a rank that printed on has survived its exception.
    """
    before = [
        number for number, line in enumerate(lines, 1) if plain(line) and not is_after(stamp_of(line), terminated)
    ]
    if not own or own[-1].word.speaker != "cause" or own[-1].line != before[-1]:
        return "", None
    return plain(lines[own[-1].line - 1]), stamp_of(lines[own[-1].line - 1])


def plain(line: bytes) -> str:
    """Return a line of a log without its time."""
    text = STAMP.sub(b"", line).strip().decode(errors="replace")[:WORDS_LENGTH]
    return "".join(letter if letter.isprintable() or letter == "\t" else "?" for letter in text)


def stamp_of(line: bytes) -> float | None:
    """Return the time of a line of a log, in seconds since the epoch."""
    match = STAMP.match(line)
    if match is None:
        return None
    whole = datetime(*map(int, re.split(rb"\D", match[1])), tzinfo=timezone.utc)  # type: ignore[arg-type,misc]
    return whole.timestamp() + float(match[2] or 0)


def tail(path: Path, size: int) -> list[bytes]:
    return read_tail(path, size, follow=True).splitlines()
