"""Reads what `ncclras` prints as text, the only form before NCCL 2.28: which ranks have launched fewer collectives than
the others of their communicator, and which processes do not answer.

Form of NCCL 2.24 to 2.31: a job summary (nodes, processes, GPUs), a table of the communicators in groups of one kind,
then sections under `#GROUP-NUMBER (HASH) KIND` or a lone KIND: INCOMPLETE, DEAD, MISMATCH, ERROR, TIMEOUT. Of a
communicator with different counts, the text has how many ranks have launched up to which operation. It names ranks only
if they are few, with `-v` if they are less than half.

The ranks of a communicator of all GPUs are those of the job. A rank of a smaller one is a process whose number in the
job the text does not show.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bigsci_launch.spy.evidence.numbering import NumberedBy
from bigsci_launch.spy.inputs.layout import passages_of
from bigsci_launch.spy.inputs.nccl_ras import DEAD, NO_STACKS, SILENT, SOURCE, as_operation
from bigsci_launch.spy.inputs.reading import Found, NotThis, Reading

MARKS = (b"Job summary", b"per comm", b"launched up to operation", b"Missing communicator data")
"""A report has two of these, of which a part may be left out; or the third, which is nowhere else."""
LARGEST_REPORT = 1 << 24
MOST_RANKS = 1 << 17
MOST_SECTIONS = 1 << 12
MOST_MISSING = 1 << 12
MAX_REPORTED = 8
ROW = re.compile(r"(\d{1,9}) +(\d{1,9}) +\d{1,9} +[\d-]{1,19} +(\d{1,9}) +\d{1,9} +[A-Z]+ +[A-Z]+$")
GPUS = re.compile(r"\d{1,9} +[\d-]{1,19} +[\d-]{1,19} +\d{1,9} +(\d{1,9})$")
SECTION = re.compile(r"#(\d{1,9})-\d{1,9} \(([0-9a-fx]{1,32})\) ([A-Z]+)$")
KIND = re.compile(r"(INCOMPLETE|DEAD|TIMEOUT)$")
OPERATION = re.compile(r"Communicator ranks have different (\w+) operation counts$")
UP_TO = r"ha(?:s|ve) (?:launched up to operation (\d{1,18})|not launched any operations)"
MANY = re.compile(rf"(\d{{1,9}}) ranks {UP_TO}$")
RANK = re.compile(rf"Rank (\d{{1,9}})(?: {UP_TO})?(?: --.*)?$")
PROCESS = re.compile(r"managed by process (\d{1,9}) on node (\S+)$")
MISSING_RANKS = re.compile(r"The missing ranks?: ([\d, -]{1,4000})$")
MISSING_PROCESS = re.compile(r"Process (\d{1,9}) on node (\S+)(?: managing GPUs? .*)?$")
REPORTED = re.compile(r"Rank \d{1,9} reported .*$")


@dataclass(frozen=True, slots=True)
class RasProcessLine:
    """A process that the text names; None where it does not."""

    pid: int | None = None
    node: str = ""


@dataclass(slots=True)
class RasSection:
    """What the text has about one communicator. `launched` are ranks by operation: {operation: {rank: number}}, `tally`
    {operation: {number: how many ranks}}."""

    name: str
    size: int
    launched: dict[str, dict[int, int]] = field(default_factory=dict)
    tally: dict[str, dict[int, int]] = field(default_factory=dict)
    processes: dict[int, RasProcessLine] = field(default_factory=dict)
    missing: list[int] = field(default_factory=list)

    def unnamed(self) -> dict[str, dict[str, int]]:
        """Return how many ranks that the text does not name have launched how much, by operation."""
        named = {operation: Counter(launched.values()) for operation, launched in self.launched.items()}
        return {
            operation: {
                str(number): rest
                for number, many in tally.items()
                if (rest := many - named.get(operation, Counter())[number]) > 0
            }
            for operation, tally in self.tally.items()
        }


@dataclass(slots=True)
class RasText:
    """What the text has about the job. `sizes` are the ranks of a communicator in each group of the table."""

    num_gpus: int = 0
    sizes: dict[int, int] = field(default_factory=dict)
    sections: list[RasSection] = field(default_factory=list)
    silent: dict[RasProcessLine, bool] = field(default_factory=dict)
    """{process that does not answer: whether it is considered dead}"""
    reported: list[str] = field(default_factory=list)


def read_ras_text(_path: Path, data: bytes) -> Found:
    """Read the ranks that a report names.

    Raises:
        NotThis: it is something else.
    """
    if len(data) > LARGEST_REPORT or (MARKS[2] not in data and sum(mark in data for mark in MARKS) < 2):
        raise NotThis
    report = parse_report(line for passage in passages_of(data) for line in passage.lines)
    readings = tuple(ranks_of_job(report) or processes_of(report))
    if not readings:
        raise NotThis
    return Found(readings, tuple(report.reported[:MAX_REPORTED]))


def parse_report(lines: Iterable[str]) -> RasText:
    """Return what a report says. Lines that are not known are left out: each version of NCCL adds some."""
    report, section, kind, operation, number = RasText(), None, "", "", 0
    for line in map(str.strip, lines):
        if found := ROW.match(line):
            report.sizes[int(found[1])] = int(found[3])
        elif found := GPUS.match(line):
            report.num_gpus = int(found[1])
        elif found := SECTION.match(line):
            section, kind = _section_of(report, found[2], report.sizes.get(int(found[1]), 0)), found[3]
            operation = ""
        elif found := KIND.match(line):
            section, kind, operation = None, found[1], ""
        elif found := OPERATION.match(line):
            operation = as_operation(found[1])
        elif line.startswith("Communicator ranks have different"):
            operation = ""
        elif REPORTED.match(line):
            report.reported.append(f"NCCL's RAS: communicator {section.name if section else '?'}: {line}"[:200])
        elif (found := MISSING_PROCESS.match(line)) and kind in ("INCOMPLETE", "DEAD"):
            report.silent[RasProcessLine(int(found[1]), found[2])] = kind == "DEAD"
        elif section is not None and (found := MISSING_RANKS.match(line)):
            section.missing = section.missing or _ranks_in(found[1])
        elif section is not None and operation and (found := MANY.match(line)):
            number = int(found[2] or 0)
            section.tally.setdefault(operation, {})[number] = int(found[1])
        elif section is not None and (found := RANK.match(line)):
            number = _add_rank(section, kind, operation, number, line, found)
    return report


def _section_of(report: RasText, name: str, size: int) -> RasSection:
    found = next((each for each in report.sections if each.name == name), None)
    if found is None:
        found = RasSection(name, size)
        report.sections += [found] if len(report.sections) < MOST_SECTIONS else []
    return found


def _add_rank(
    section: RasSection, kind: str, operation: str, number: int, line: str, found: re.Match[str]
) -> int:  # fmt: skip
    """Add a rank that the text names, and return the number of operations that the next line is about."""
    rank, process = int(found[1]), PROCESS.search(line)
    if rank >= MOST_RANKS:
        return number
    if process:
        section.processes[rank] = RasProcessLine(int(process[1]), process[2])
    if kind == "INCOMPLETE":
        section.missing.append(rank)
    elif kind == "MISMATCH" and operation:
        if "launched" in line:  # the only rank with its number, which has no line of its own
            number = int(found[2] or 0)
            section.tally.setdefault(operation, {})[number] = 1
        section.launched.setdefault(operation, {})[rank] = number
    return number


def _ranks_in(text: str) -> list[int]:
    """`3,5-7` -> 3, 5, 6, 7."""
    found: list[int] = []
    for part in text.replace(" ", "").split(","):
        first, _, last = part.partition("-")
        if first.isdigit() and (last or first).isdigit():
            found += range(int(first), min(int(last or first) + 1, int(first) + MOST_MISSING))
    return found[:MOST_MISSING]


def ranks_of_job(report: RasText) -> list[Reading]:
    """Return every rank of the job; none if the text shows processes whose ranks in the job are not known."""
    size = report.num_gpus or max(report.sizes.values(), default=0)
    are_of_world = all(section.size == size for section in report.sections)
    is_any_named = report.silent or any(section.processes for section in report.sections)
    if not 0 < size <= MOST_RANKS or not (are_of_world or not is_any_named):
        return []
    sections = report.sections
    missing = {rank for section in sections for rank in section.missing if rank < size}
    processes = {rank: process for section in sections for rank, process in section.processes.items()}
    if len(missing) == len(report.silent) == 1:
        processes.setdefault(min(missing), next(iter(report.silent)))
    members = list(range(size)) if are_of_world else []
    unnamed = {section.name: section.unnamed() for section in sections}
    readings = []
    for rank in range(size):
        process = processes.get(rank, RasProcessLine())
        place = Reading(SOURCE, process.node, rank, pid=process.pid, why=NO_STACKS)
        if rank in missing:
            readings.append(replace(place, why=DEAD if report.silent.get(process) else SILENT))
        else:
            places = dict.fromkeys(unnamed, rank) if are_of_world else {}
            readings.append(replace(place, recorder=as_recorder(sections, places, unnamed, members)))
    return readings


def processes_of(report: RasText) -> Iterator[Reading]:
    """Yield the processes that the text names."""
    ranks: dict[RasProcessLine, dict[str, int]] = {}
    for section in report.sections:
        for rank, process in section.processes.items():
            if rank not in section.missing:
                ranks.setdefault(process, {})[section.name] = rank
    unnamed = {section.name: section.unnamed() for section in report.sections}
    for process, places in ranks.items():
        sections = [section for section in report.sections if section.name in places]
        recorder = as_recorder(sections, places, unnamed, [])
        yield Reading(
            SOURCE, process.node, pid=process.pid, recorder=recorder, why=NO_STACKS, numbered_by=NumberedBy.FILE_ORDER
        )
    for process, is_dead in report.silent.items():
        why = DEAD if is_dead else SILENT
        yield Reading(SOURCE, process.node, pid=process.pid, why=why, numbered_by=NumberedBy.FILE_ORDER)


def as_recorder(
    sections: Iterable[RasSection],
    places: Mapping[str, int],
    unnamed: Mapping[str, Mapping[str, Mapping[str, int]]],
    members: Sequence[int],
) -> dict[str, Any]:
    """Return what is known of a rank, in the bundle's format: the numbers that it has launched, and those of others.

    `places` are its ranks in the communicators, and `unnamed` what ranks have launched that the text does not name.
    """
    found = list(sections)
    of_rank = {
        section.name: {
            operation: launched[places[section.name]]
            for operation, launched in section.launched.items()
            if places.get(section.name) in launched
        }
        for section in found
    }
    of_others = {section.name: unnamed[section.name] for section in found}
    return {
        "first_record": 0, "tokens": [], "stream": [], "last_sequence": {}, "open": [],
        "members": {section.name: members for section in found} if members else {},
        "counts": {"verb": "launched", "of_rank": of_rank, "of_others": of_others},
    }  # fmt: skip
