"""Reads the output of `ncclras -f json`: how many collectives each rank has started, and which ranks do not answer.

Schema of NCCL 2.28 to 2.30: {nccl_version, communicators: [{hash, secondary_hash, size, ranks: [{rank, host, pid,
cuda_dev, status, collective_counts: {AllReduce: 4, ..}}], missing_ranks: [{rank, host, pid, cuda_dev, status:
{unresponsive, considered_dead}}]}]}. `rank` is the rank within the communicator. NCCL 2.28.9 omits a comma in
`missing_ranks`.

RAS reports neither the order of collectives nor stacks. A rank that is behind the others in a communicator has not
started the collective that they are in: where a stack shows that a rank ahead is in a collective, it is the newest one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bigsci_launch.safe_files import parse_json
from bigsci_launch.spy.evidence.numbering import NumberedBy
from bigsci_launch.spy.inputs.reading import Damaged, Found, NotThis, Reading

Document = Mapping[str, Any]
RasProcess = tuple[str, int, int]
"""Host, pid, CUDA device: the identity of a rank across its communicators."""

SOURCE = "NCCL RAS"
NO_STACKS = "NCCL's RAS reports no stacks"
SILENT = "it does not answer NCCL's RAS"
DEAD = "NCCL's RAS considers it dead, after a minute without an answer"
LARGEST_DUMP = 1 << 30
"""Bytes of what torch recorded, with the stacks of thousands of calls."""
FORGOTTEN_COMMA = re.compile(r'([\d"el}\]])(\s*\n\s*)("[^"\n]*"\s*:)')


def repair(text: str) -> object:
    """Parse JSON in which a comma may be missing at the end of a line.

    Raises:
        ValueError: it is not JSON either way.
    """
    try:
        return parse_json(text, LARGEST_DUMP)
    except ValueError:
        return parse_json(FORGOTTEN_COMMA.sub(r"\1,\2\3", text), LARGEST_DUMP)


def read_ras(document: object) -> Found:
    """Read the ranks of a report.

    Raises:
        NotThis: it is something else. Damaged: a communicator is not in NCCL's format.
    """
    if not isinstance(document, dict) or not isinstance(document.get("communicators"), list):
        raise NotThis
    try:
        communicators = document["communicators"]
        rank_of, numbered_by = global_ranks(communicators)
        readings = [
            replace(read_process(process, rank, communicators, rank_of), numbered_by=numbered_by)
            for process, rank in rank_of.items()
        ]
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise Damaged(f"it is a report of NCCL's RAS, but damaged ({error!r})") from error
    return Found(tuple(sorted(readings, key=lambda reading: reading.rank or 0)))


def process_of(record: Document) -> RasProcess:
    return (str(record.get("host") or ""), int(record.get("pid") or 0), int(record.get("cuda_dev") or 0))


def members_of(communicator: Document) -> list[Document]:
    """Return all ranks of a communicator, present and missing."""
    return [*communicator["ranks"], *(communicator.get("missing_ranks") or [])]


def global_ranks(communicators: list[Document]) -> tuple[dict[RasProcess, int], NumberedBy]:
    """Return the global rank of each process: its rank in the communicator of all processes, else by order of hosts.
    And which of the two it is."""
    processes = {process_of(record) for communicator in communicators for record in members_of(communicator)}
    largest = max(communicators, key=lambda communicator: int(communicator["size"]), default=None)
    if largest is not None and {process_of(record) for record in members_of(largest)} == processes:
        return {process_of(record): int(record["rank"]) for record in members_of(largest)}, NumberedBy.FILES
    return {process: rank for rank, process in enumerate(sorted(processes))}, NumberedBy.FILE_ORDER


def read_process(
    process: RasProcess, rank: int, communicators: list[Document], rank_of: Mapping[RasProcess, int]
) -> Reading:  # fmt: skip
    """Return the reading of one process, over all its communicators."""
    tokens: list[list[str]] = []
    counts: dict[str, dict[str, int]] = {}
    last: dict[str, int] = {}
    unfinished: list[int] = []
    members: dict[str, list[int]] = {}
    why = None
    for communicator in communicators:
        name = str(communicator["hash"])
        mine = next((each for each in communicator["ranks"] if process_of(each) == process), None)
        missing = next((each for each in communicator.get("missing_ranks") or [] if process_of(each) == process), None)
        if missing is not None:
            why = DEAD if missing["status"].get("considered_dead") or why == DEAD else SILENT
        if mine is None:
            continue
        counts[name] = {as_operation(each): int(number) for each, number in mine["collective_counts"].items()}
        members[name] = sorted(rank_of[process_of(each)] for each in members_of(communicator))
        if not sum(counts[name].values()):
            continue
        behind = furthest_behind(communicator)
        if is_ahead(mine, behind):
            unfinished.append(len(tokens))
        tokens.append([name, "", newest_operation(mine, behind), "[]", "[]"])
        last[name] = sum(counts[name].values())
    recorder = {
        "first_record": 0, "tokens": tokens, "stream": list(range(len(tokens))), "last_sequence": last,
        "open": unfinished, "members": members, "counts": {"verb": "launched", "of_rank": counts},
    }  # fmt: skip
    return Reading(
        SOURCE, process[0], rank, pid=process[1] or None, recorder=recorder if counts else None, why=why or NO_STACKS
    )


def furthest_behind(communicator: Document) -> Document:
    """Return the counts of the rank that has started the fewest collectives."""
    counts: list[Document] = [record["collective_counts"] for record in communicator["ranks"]]
    return min(counts, key=lambda count: sum(count.values()))


def is_ahead(record: Document, behind: Document) -> bool:
    return bool(sum(record["collective_counts"].values()) > sum(behind.values()))


def newest_operation(record: Document, behind: Document) -> str:
    """Return what the rank has started and the rank behind has not, in torch's names; else all that it has started."""
    counts = record["collective_counts"]
    begun = [name for name in counts if counts[name] > behind.get(name, 0)] or [name for name in counts if counts[name]]
    return " or ".join(map(as_operation, begun))


def as_operation(name: str) -> str:
    """Return torch's name for an operation of NCCL: `all_reduce` for `AllReduce`."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
