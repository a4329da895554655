"""How processes ended, as their launchers saw it: which of them did not end like a victim. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from signal import Signals

from bigsci_launch.endings.statements import Statement

VIOLENT = ("SIGKILL", "SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE")
"""Signals by which no process ends because it lost a peer."""
BY_WORDS = {
    "killed": "SIGKILL",
    "segmentation fault": "SIGSEGV",
    "bus error": "SIGBUS",
    "illegal instruction": "SIGILL",
    "floating point exception": "SIGFPE",
    "aborted": "SIGABRT",
    "terminated": "SIGTERM",
}
PLAIN_EXIT = 2
"""How odd it is to end with 1 or by SIGABRT: victims do."""
PASSED_ON = 256
PASSED = range(2, 16)
"""`sys.exit(-6)` leaves with 250. With 255, for -1, so much else leaves that it says nothing."""
TORCHRUN = "torchrun: "
ROOT = f"{TORCHRUN}root cause"
LISTED = f"{TORCHRUN}member"
"""One of those that ended after the first, as far as torchrun knows."""
CLOSING = f"{TORCHRUN}closing"
STEP_ENDED = "slurm: step cancelled"


def first_exit(told: Sequence[Statement]) -> Statement | None:
    """Return the process that a launcher saw end first; of several launchers, the earliest."""
    return next(iter(exits_of(told)), None)


def exits_of(told: Sequence[Statement]) -> list[Statement]:
    """Return the processes that launchers saw end, without those that were ended with the others: what proves most
    first, then the earliest. A launcher looks from time to time, so a signal that no peer sends proves more than the
    order."""
    found = [each for each in told if each.word.speaker == "witness" and each.kind == "crashed"]
    unsent = unsent_in(told)
    found = [each for each in found if signal_of(each) != "SIGTERM" or (each.file, each.line) in unsent] or found
    found = _without_swept_up(found, told) or found
    naming = {each.file for each in found if each.named_ranks}
    found = [each for each in found if each.named_ranks or each.file not in naming]  # a table says it better
    found = [each for each in found if each.named] or found
    odd = oddities_in(told)
    in_time = all(each.moment is not None for each in found)
    return sorted(
        found, key=lambda each: (odd[each.file, each.line], (each.moment or 0.0) * in_time, each.word.name == LISTED)
    )


def _without_swept_up(found: Sequence[Statement], told: Sequence[Statement]) -> list[Statement]:
    """Return those that did not end by the signals that Slurm sends once it ends the whole step."""
    ended: dict[str, int] = {}
    for each in told:
        if each.word.name == STEP_ENDED:
            ended.setdefault(each.file, each.line)
    signals = ("SIGKILL", "SIGTERM")
    return [
        each
        for each in found
        if not (each.tasks and ended.get(each.file, each.line) < each.line and signal_of(each) in signals)
    ]


def has_swept_up(told: Sequence[Statement]) -> bool:
    """Whether Slurm ended tasks that still ran, after another one had failed."""
    found = [each for each in told if each.word.speaker == "witness" and each.kind == "crashed"]
    return 0 < len(_without_swept_up(found, told)) < len(found)


def closed_in(told: Sequence[Statement]) -> set[str]:
    """Return the PIDs of the processes that torchrun ended."""
    return {each.named["pid"] for each in told if each.word.name == CLOSING and "pid" in each.named}


def unsent_in(told: Sequence[Statement]) -> set[tuple[str, int]]:
    """Return the processes that ended by a SIGTERM which their launcher did not send: it lists whom it ended,
    and ends nothing where the others of its node had ended themselves."""
    closed = closed_in(told)
    ended = [each for each in told if each.word.name in (ROOT, LISTED)]
    others = {(each.file, each.node) for each in ended if each.word.name == LISTED and signal_of(each) != "SIGTERM"}
    return {
        (each.file, each.line)
        for each in ended
        if signal_of(each) == "SIGTERM" and each.named.get("pid", "") not in ("", *closed)
        if closed or (each.word.name == ROOT and (each.file, each.node) in others)
    }


def oddities_in(told: Sequence[Statement]) -> dict[tuple[str, int], int]:
    """Return how little the end of each process looks like that of a victim, the least first: Python leaves with 1, and
    where several leave with the same code, their program does so for any failure."""
    seen = [each for each in told if each.word.speaker == "witness" and each.kind == "crashed"]
    codes = Counter((each.word.name, each.code) for each in seen for _ in each.tasks or (0,))
    unsent = unsent_in(told)
    found = {}
    for each in seen:
        signal, key = signal_of(each), (each.file, each.line)
        is_violent = signal in VIOLENT or (signal == "SIGTERM" and key in unsent)
        is_own = signal is None and each.code not in (None, 0, 1) and codes[each.word.name, each.code] == 1
        found[key] = 0 if is_violent else 1 if is_own else PLAIN_EXIT
    return found


def signal_of(each: Statement) -> str | None:
    """Return the signal that ended the process which a statement names: `exitcode: -6`, 134, `Aborted`; or 250, with
    which a launcher in Python leaves whose process had ended so."""
    words = each.named.get("what", "").lower().partition(" (")[0]
    if words.upper() in Signals.__members__:
        return words.upper()
    if words in BY_WORDS:
        return BY_WORDS[words]
    code, signal = each.code, each.named.get("signal", "")
    if signal.isdigit() and len(signal) < 3:
        return Signals(int(signal)).name if int(signal) in list(Signals) else None
    if code is None:
        return None
    number = -code if code < 0 else PASSED_ON - code if PASSED_ON - code in PASSED else code - 128
    return Signals(number).name if number in list(Signals) else None


def complained_in(told: Iterable[Statement]) -> set[int]:
    """Return the ranks that are victims, as they say themselves."""
    return {each.by for each in told if each.word.speaker == "victim" and each.by is not None}
