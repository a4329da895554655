"""What processes report of themselves, or a witness proves, and which of that came first. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bigsci_launch.endings.cluster import APART_S
from bigsci_launch.endings.ending import Culprit, JobEnding, ending_of, named_by
from bigsci_launch.endings.exits import PLAIN_EXIT, complained_in, exits_of, has_swept_up, oddities_in, signal_of
from bigsci_launch.endings.lines import UNKNOWN
from bigsci_launch.endings.statements import Statement
from bigsci_launch.topology.naming import name_ranks

PROOFS = tuple(("witness", kind) for kind in ("out_of_memory", "hardware", "disk", "launch_failed"))
"""What a witness, such as the kernel, proves as well as the process itself."""
SURVIVED = 50
"""A process that prints so many more lines has survived what it said."""
CONTINUED = 3
"""One that prints so many more lines such as it had printed before has survived it too."""
HOOKED = "[rank"
"""How torch's hook begins the lines of an exception that ends a rank."""
LOGGED = 10
ANNOUNCED = 40
"""In so many lines below an exception whose message only announces it, as `Graph execution error:`, is its reason."""
FATAL = ("python: fatal", "python: assertion", "cuda: page fault")
"""Words of a process that a signal ends."""
LOADER = "dataloader: "
SHELL = "python: command"
STARTED = 10
"""After so many lines, the command that the shell did not find was not the one that trains."""


def own_failure_of(told: Sequence[Statement]) -> JobEnding | None:
    """Return the first failure that a process reports of itself, or that a witness proves."""
    failures = failures_in(told)
    if not failures:
        return None
    origins: dict[object, Statement] = {}
    for each in failures:
        speaker = _speaker_of(each)
        origins[speaker] = min(origins.get(speaker, each), each, key=strength_of)
    if any(each.is_reported for each in failures):  # others were handled, or came later
        reported = {_speaker_of(each) for each in failures if each.is_reported}
        origins = {speaker: each for speaker, each in origins.items() if speaker in reported}
    first = _first_of(list(origins.values()))
    peers = [each for each in origins.values() if each is not first and _is_tied(each, first)]
    named = named_by(first, [each for each in failures if each.kind == first.kind or _is_of_loader(each, first)])
    rest = [each for each in failures if each is not first]
    if peers and not first.named_ranks and not first.tasks:
        ranks = sorted({each.by for each in (first, *peers) if each.by is not None})
        who = name_ranks(ranks) if ranks else ", ".join(sorted({each.node for each in (first, *peers) if each.node}))
        why = f"{who} each report a failure of their own, and nothing says which was first"
        return ending_of(first, [first, *peers, *rest], Culprit(), why)
    seen = _exit_of(first, told) if not named and (first.kind != "launch_failed" or has_swept_up(told)) else None
    if seen is not None:
        culprit = named_by(seen)
        failed = {each.by for each in failures if each.by is not None}
        is_launcher = bool(culprit.tasks and failed) and not failed & {*culprit.tasks}
        return ending_of(first, [first, seen, *rest], Culprit(node=culprit.node) if is_launcher else culprit)
    if first.kind == "launch_failed" and len({each.named["node"] for each in failures if "node" in each.named}) > 1:
        return ending_of(first, [first, *rest], Culprit(), "several nodes report it, and nothing says which was first")
    ending = ending_of(first, [first, *rest], named)
    several = len(named.tasks) > 1  # they ended at once: none of them was first
    return replace(ending, culprit=Culprit(node=named.node)) if several and named.node else ending


def _is_of_loader(each: Statement, first: Statement) -> bool:
    """Whether one is what a worker of a DataLoader printed, and the other what its rank says of it."""
    return each.word.name.startswith(LOADER) and first.word.name.startswith(LOADER)


def _speaker_of(each: Statement) -> object:
    return each.by if each.by is not None else (each.speaker, each.file)


def _exit_of(first: Statement, told: Sequence[Statement]) -> Statement | None:
    """Return how a launcher saw the process end that reports a failure without saying who it is; None if it may be
    more than one: victims that do not say who they are end like it."""
    complained = complained_in(told)
    found = [each for each in exits_of(told) if not {*each.named_ranks, *each.tasks} & complained]
    if first.word.name in FATAL:
        found = [each for each in found if signal_of(each) is not None]
        odd = oddities_in(told)
        found = [each for each in found if odd[each.file, each.line] < PLAIN_EXIT] or found
    else:
        found = [each for each in found if signal_of(each) is None]
    numbers = {number for each in found for number in (*each.named_ranks, *each.tasks)}
    is_alone = len(numbers) == 1 or (len(found) == 1 and not numbers)
    has_victims = any(each.word.speaker == "victim" and each.by is None for each in told)
    return found[0] if found and named_by(found[0]) and (is_alone or not has_victims) else None


def failures_in(told: Sequence[Statement]) -> list[Statement]:
    """Return what processes report of themselves, or a witness proves, and what was not survived.

    An exception that follows the loss of another rank is a consequence: only words that prove more count then.
    """
    live = [each for each in told if not was_survived(each)]
    lost: dict[object, int] = {}
    for each in live:
        if each.word.speaker == "victim":
            lost.setdefault((each.file, each.speaker), each.line)
    own = [each for each in live if each.word.speaker == "cause" or (each.word.speaker, each.kind) in PROOFS]
    own = [each for each in own if each.word.name != SHELL or not _has_failed_later(each, own)]
    hooked = {each.file for each in told if each.said.startswith(HOOKED)}
    return [
        each
        for each in own
        if not each.word.is_generic
        or not (
            lost.get((each.file, each.speaker), each.line) < each.line
            or (each.file in hooked and _was_logged(each))
            or _is_announcement(each, live)
        )
    ]


def _has_failed_later(start: Statement, own: Sequence[Statement]) -> bool:
    """Whether the program failed after its script could not start another one: so it had been started."""
    return any(
        each.kind != "launch_failed" and each.word.speaker == "cause" and each.line > start.line
        for each in own
        if each.file == start.file
    )


def _is_announcement(exception: Statement, told: Sequence[Statement]) -> bool:
    """Whether the message of an exception continues, and the lines below it hold what it announces."""
    if not exception.said.endswith(":"):
        return False
    return any(
        each.line > exception.line
        and exception.printed_after - each.printed_after <= ANNOUNCED
        and not each.word.is_generic
        and each.word.speaker in ("cause", "victim")
        for each in told
        if (each.file, each.speaker) == (exception.file, exception.speaker)
    )


def _was_logged(each: Statement) -> bool:
    """Whether an exception is one that the program logged, in the file of ranks whose last exception torch labels."""
    return each.speaker == UNKNOWN and each.printed_after > LOGGED


def was_survived(each: Statement) -> bool:
    """Whether the process that says it has worked on: where lines have no labels, others may have printed them."""
    most = STARTED if each.word.name == SHELL else SURVIVED
    return each.printed_after > most or (each.speaker != UNKNOWN and each.continued_for >= CONTINUED)


def strength_of(each: Statement) -> tuple[int, bool]:
    """What explains more comes first: a full disk explains an exception, and a word that names explains more."""
    level = 2 if each.kind == "crashed" else 0 if each.word.is_sure else 1
    is_generic = each.word.is_generic
    return level + is_generic, not (each.named_ranks or each.tasks or "node" in each.named)


def _first_of(origins: list[Statement]) -> Statement:
    """Return the earliest, if all have a time; else the one that explains most."""
    if all(each.moment is not None for each in origins):
        return min(origins, key=lambda each: (each.moment or 0.0, strength_of(each)))
    return min(origins, key=strength_of)


def _is_tied(each: Statement, first: Statement) -> bool:
    if each.by is None and first.by is None:
        if not each.node or not first.node or each.node == first.node:
            return False
    elif each.by is None or first.by is None or each.by == first.by:
        return False
    if each.moment is not None and first.moment is not None:
        return abs(each.moment - first.moment) <= APART_S
    return strength_of(each)[0] == strength_of(first)[0]
