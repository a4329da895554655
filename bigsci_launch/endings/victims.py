"""What victims say: why they ended, and who is missing if that leaves one place. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from bigsci_launch.endings.calls import alone_against, clash_of, odd_one
from bigsci_launch.endings.ending import Culprit, JobEnding, ending_of, named_by
from bigsci_launch.endings.exits import PLAIN_EXIT, closed_in, complained_in, exits_of, oddities_in, signal_of
from bigsci_launch.endings.statements import Statement
from bigsci_launch.topology.naming import agree, name_ranks

VICTIMS = ("hang", "mismatch", "rendezvous", "network", "aborted")
"""What victims say, in the order in which it explains the rest."""


def victims_of(told: Sequence[Statement], ranks: Collection[int]) -> JobEnding | None:
    """Return what victims say: why they ended, and who is missing if that leaves one place."""
    victims = [each for each in told if each.word.speaker == "victim" and each.kind in VICTIMS]
    if not victims:
        return None
    first = min(victims, key=lambda each: VICTIMS.index(each.kind))
    said = [each for each in victims if each.kind == first.kind]
    complained = complained_in(victims)
    witness = _explanation(told, victims, complained) if first.kind != "mismatch" else None
    if witness is not None:
        culprit = named_by(witness) or _missing(first, complained, ranks)[0] or _place_of(witness, told)
        return ending_of(witness, [witness, *said], culprit)
    kind = "network" if first.kind == "aborted" else first.kind
    known = max(len({*ranks, *complained}), 1 + len(closed_in(told)))
    odd = odd_one(said)
    odd = alone_against(said, known) if odd is None else odd
    clash = clash_of(said, told, ranks) if kind == "hang" else ""
    kind = "mismatch" if clash else kind
    has_count = any("came" in each.named for each in said)  # then who waits for a rank may wait for one that waits too
    awaited = {rank for each in said for rank in each.named_ranks if not has_count} - complained
    if odd is not None or len(awaited) == 1:
        culprit, why = Culprit((odd,) if odd is not None else tuple(awaited)), ""
    elif kind == "mismatch":
        culprit, why = Culprit(), "the ranks disagree, and nothing says which is wrong"
    else:
        culprit, why = _missing(first, complained, ranks)
    ending = ending_of(first, _one_of_each(said) + exits_of(told)[:1], culprit, why)
    sentence = f"ranks wait in different collectives: {clash}" if clash else ending.sentence
    return JobEnding(kind, sentence, culprit, why, first.word.is_sure, ending.evidence, ending.next)


def _explanation(told: Sequence[Statement], victims: Sequence[Statement], complained: set[int]) -> Statement | None:
    """Return the process that a launcher saw end and that is no victim itself: it ended in another way, or before the
    first of them complained, or all that complained before its end say who they are and it is none of them."""
    odd, files = oddities_in(told), {each.file for each in victims}
    before = min(each.line for each in victims) if len(files) == 1 else 0
    unknown = [each for each in victims if each.by is None]
    exits = exits_of(told)
    # Tasks are ranks if those of all ranks that complain were seen to end; otherwise they are launchers.
    are_ranks = complained <= {number for each in exits for number in (*each.named_ranks, *each.tasks)}
    for each in exits:
        is_odd = odd[each.file, each.line] < PLAIN_EXIT
        if signal_of(each) == "SIGTERM" and not is_odd:
            continue
        numbers = {*each.named_ranks, *each.tasks}
        if each.named_ranks and numbers <= complained:
            continue
        all_known = bool(complained) and all(one.file == each.file and one.line > each.line for one in unknown)
        is_other = all_known and bool(numbers) and not numbers & complained and (are_ranks or not each.tasks)
        if is_odd or is_other or (each.file in files and each.line < before):
            return each
    return None


def _place_of(witness: Statement, told: Iterable[Statement]) -> Culprit:
    """Return the node of a process that its launcher does not name, if one launcher alone left with its exit code."""
    code = witness.code
    left = [each for each in told if each.tasks and each.code is not None and each.code == (code or 0) & 0xFF]
    nodes = {each.named.get("node") for each in left}
    return Culprit(node=nodes.pop()) if code is not None and len(nodes) == 1 else Culprit()


def _missing(first: Statement, complained: set[int], ranks: Collection[int]) -> tuple[Culprit, str]:
    """Return who did not take part: the ranks that did not complain, if they leave one place to look at."""
    who = name_ranks(sorted(complained)) if complained else "a rank"
    quiet = _only_quiet(complained, set(ranks))
    if first.kind not in ("hang", "rendezvous"):
        if quiet:
            return Culprit(ranks=quiet), ""
        return Culprit(), f"{who} lost the connection to another rank, and nothing says which ended first"
    came, due = first.named.get("came", ""), first.named.get("size", "")
    if came.isdigit() and due.isdigit() and len(came) <= 6 and len(due) <= 6:
        absent = sorted(set(range(int(due))) - complained)
        if len(absent) == int(due) - int(came):
            return Culprit(ranks=tuple(absent)), ""
        if int(came) >= int(due):
            return Culprit(), f"{came} came where {due} were due: others use the same store, or an earlier start did"
        return Culprit(), f"{came} of {due} ranks came, and nothing says which did not"
    if quiet:
        return Culprit(ranks=quiet), ""
    if complained and complained >= set(ranks):
        return Culprit(), f"{who} {agree('reports', sorted(complained))} it, and nothing says which rank hung"
    return Culprit(), "nothing says which rank hung"


def _only_quiet(complained: set[int], ranks: set[int]) -> tuple[int, ...]:
    """Return the rank that alone did not complain; none where a rank may be missing from what was read."""
    quiet = ranks - complained
    is_whole = (ranks | complained) == set(range(max(ranks | complained, default=-1) + 1))
    return tuple(quiet) if is_whole and len(quiet) == 1 and len(complained) > 1 else ()


def _one_of_each(said: Sequence[Statement]) -> list[Statement]:
    """Return one statement for each rank, and all whose rank is unknown."""
    seen: set[int] = set()
    kept = []
    for each in said:
        if each.by is None or each.by not in seen:
            kept.append(each)
        if each.by is not None:
            seen.add(each.by)
    return kept
