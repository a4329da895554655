"""Why a job ended, from all that was said about it. Pure, and without a guess: what was not said is unknown.

A victim is never named as the culprit, nor the first that a launcher saw end if it says itself that it is a victim.
A rank that was killed after it complained was killed because it complained.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from bigsci_launch.endings.exits import PLAIN_EXIT, TORCHRUN, exits_of, first_exit, oddities_in, signal_of
from bigsci_launch.endings.lines import UNKNOWN
from bigsci_launch.endings.statements import Statement, listed_by
from bigsci_launch.topology.naming import agree, name_ranks
from bigsci_launch.topology.ranks import compress_ranks

SLURM = ("preempted", "node_failure", "requeued", "time_limit", "unkillable", "cancelled")
"""What the cluster decides, in the order in which it counts: a preempted node is lost too, and a lost one requeues."""
MAY_FOLLOW = ("time_limit", "cancelled")
"""Ends of a job that often hung, or had failed, long before: then that is the reason."""
PROOFS = tuple(("witness", kind) for kind in ("out_of_memory", "hardware", "disk", "launch_failed"))
"""What a witness, such as the kernel, proves as well as the process itself."""
VICTIMS = ("hang", "mismatch", "rendezvous", "network", "aborted")
"""What victims say, in the order in which it explains the rest."""
SURVIVED = 50
"""A process that prints so many more lines has survived what it said."""
CONTINUED = 3
"""One that prints so many more lines such as it had printed before has survived it too."""
HOOKED = "[rank"
"""How torch's hook begins the lines of an exception that ends a rank."""
LOGGED = 10
NEAR = 10
RESTARTED = 10
"""Lines between a failure and the report that the program has finished: then it was started again."""
APART_S = 1.0
"""Clocks and prints are not better: two failures closer than this have no order."""
LEAD_S = 60.0
TOLD_TO_END = ("slurm: step cancelled", "elastic: told to end", "python: interrupted")
"""Echoes of an end from outside: the reason where nothing else was said."""
FATAL = ("python: fatal", "python: assertion")
"""Words of a process that a signal ends."""
MAJORITY = 3
"""Of fewer ranks, none is the odd one."""
MOST_EVIDENCE = 8


@dataclass(frozen=True, slots=True)
class Culprit:
    """The first failing ranks, tasks or node, as far as they are known."""

    ranks: tuple[int, ...] = ()
    tasks: tuple[int, ...] = ()
    local_rank: int | None = None
    node: str | None = None

    def __bool__(self) -> bool:
        return bool(self.ranks or self.tasks) or self.local_rank is not None or self.node is not None

    def __str__(self) -> str:
        where = f" on {self.node}" if self.node else ""
        local = f"local rank {self.local_rank}" if self.local_rank is not None else ""
        if self.ranks:
            return name_ranks(self.ranks) + (f" ({local})" if local else "") + where
        if self.tasks:
            return f"task{'s' if len(self.tasks) > 1 else ''} {compress_ranks(self.tasks)}{where}"
        if local:
            return local + where
        return f"node {self.node}" if self.node else "not known"


@dataclass(frozen=True, slots=True)
class JobEnding:
    """Why a job ended. `kind` is `unknown` if nothing says it."""

    kind: str
    sentence: str
    culprit: Culprit = Culprit()
    why_not_known: str = ""
    """Why no culprit is named."""
    is_certain: bool = True
    evidence: tuple[Statement, ...] = ()
    next: str = ""


def conclude(statements: Sequence[Statement], ranks: Collection[int] = (), size: int | None = None) -> JobEnding:
    """Return why the job ended. `ranks` are those whose output was read, `size` how many there are."""
    if (finished := _finish_of(statements)) is not None:
        return _ending(finished, [finished], Culprit())
    told = [each for each in statements if each.word.speaker != "echo"]
    named = {rank for each in statements if each.word.name.startswith(TORCHRUN) for rank in each.named_ranks}
    ranks = {*ranks, *named}
    slurm = _of_slurm(told)
    found = _own_failure(told) or _named_by_witness(told) or _victims(told, ranks, size) or _ended(told, statements)
    if slurm is not None and not (found and _came_before(found, slurm)):
        return _by_slurm(slurm, told, found.evidence if found else ())
    return replace(found, culprit=_placed(found.culprit, told)) if found else _nothing(statements)


def _finish_of(statements: Sequence[Statement]) -> Statement | None:
    """Return what reports that the program has finished, if that was printed long after each failure: it was started
    again after them."""
    last = next((each for each in reversed(statements) if each.kind == "finished" and each.word.is_sure), None)
    others = [each for each in statements if each.kind != "finished" and each.word.speaker != "register"]
    if last is None or not others:
        return None
    return last if all(each.file == last.file and each.line + RESTARTED < last.line for each in others) else None


def _placed(culprit: Culprit, told: Sequence[Statement]) -> Culprit:
    """Return the culprit with its node, if a launcher gives the node of that rank in another line."""
    if culprit.node is not None or len(culprit.ranks) != 1:
        return culprit
    has_launchers = any(each.word.name.startswith(TORCHRUN) for each in told)  # then tasks are launchers
    nodes: set[str | None] = set()
    for each in told:
        ranks = each.named_ranks or (() if has_launchers else each.tasks)
        nodes |= {each.named.get("node")} if each.word.speaker == "witness" and culprit.ranks[0] in ranks else set()
        listed = listed_by(each.named) if each.word.speaker == "register" else ()
        nodes |= {member.node for member in listed if member.rank == culprit.ranks[0]}
    nodes.discard(None)
    return replace(culprit, node=nodes.pop()) if len(nodes) == 1 else culprit


def _of_slurm(told: Iterable[Statement]) -> Statement | None:
    found = [each for each in told if each.word.speaker == "witness" and each.kind in SLURM]
    return min(found, key=lambda each: (SLURM.index(each.kind), "node" not in each.named), default=None)


def _by_slurm(slurm: Statement, told: Sequence[Statement], more: Sequence[Statement]) -> JobEnding:
    others = [each for each in told if each.kind == slurm.kind and each is not slurm]
    culprit, why = named_by(slurm, others), ""
    if slurm.kind == "node_failure":
        culprit = culprit or _node_before(slurm, told)
    elif slurm.kind != "unkillable":
        why = "no rank failed first: the job was ended from outside"
    return _ending(slurm, [slurm, *others, *more], culprit, why)


def _node_before(lost: Statement, told: Iterable[Statement]) -> Culprit:
    """Return the node of the process that was seen to end in the lines just above: it ended with its node."""
    near = [each for each in told if each.file == lost.file and 0 < lost.line - each.line <= NEAR and each.node]
    return Culprit(node=near[-1].node) if near and near[-1].word.speaker == "witness" else Culprit()


def _came_before(found: JobEnding, slurm: Statement) -> bool:
    """Whether a failure explains an end that Slurm reports, because it came first and was not survived."""
    first = found.evidence[0]
    if slurm.kind not in MAY_FOLLOW or found.kind in ("network", "aborted", "unknown"):
        return False
    if first.file == slurm.file and first.line < slurm.line:
        return first.moment is None or slurm.moment is None or first.moment <= slurm.moment
    return first.moment is not None and slurm.moment is not None and first.moment < slurm.moment - LEAD_S


def _own_failure(told: Sequence[Statement]) -> JobEnding | None:
    """Return the first failure that a process reports of itself, or that a witness proves."""
    failures = _failures(told)
    if not failures:
        return None
    origins: dict[object, Statement] = {}
    for each in failures:
        speaker = _speaker_of(each)
        origins[speaker] = min(origins.get(speaker, each), each, key=_strength)
    if any(each.is_reported for each in failures):  # others were handled, or came later
        reported = {_speaker_of(each) for each in failures if each.is_reported}
        origins = {speaker: each for speaker, each in origins.items() if speaker in reported}
    first = _first_of(list(origins.values()))
    peers = [each for each in origins.values() if each is not first and _is_tied(each, first)]
    named = named_by(first, [each for each in failures if each.kind == first.kind])
    rest = [each for each in failures if each is not first]
    if peers and not first.named_ranks and not first.tasks:
        who = name_ranks(sorted({each.by for each in (first, *peers) if each.by is not None}))
        why = f"{who} each report a failure of their own, and nothing says which was first"
        return _ending(first, [first, *peers, *rest], Culprit(), why)
    seen = _exit_of(first, told) if not named and first.kind != "launch_failed" else None
    if seen is not None:
        return _ending(first, [first, seen, *rest], named_by(seen))
    return _ending(first, [first, *rest], named)


def _speaker_of(each: Statement) -> object:
    return each.by if each.by is not None else (each.speaker, each.file)


def _exit_of(first: Statement, told: Sequence[Statement]) -> Statement | None:
    """Return how a launcher saw the process end that reports a failure without saying who it is; None if it may be
    more than one: victims that do not say who they are end like it."""
    complained = _complained(told)
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


def _failures(told: Sequence[Statement]) -> list[Statement]:
    """Return what processes report of themselves, or a witness proves, and what was not survived.

    An exception that follows the loss of another rank is a consequence: only words that prove more count then.
    """
    live = [each for each in told if not _was_survived(each)]
    lost: dict[object, int] = {}
    for each in live:
        if each.word.speaker == "victim":
            lost.setdefault((each.file, each.speaker), each.line)
    own = [each for each in live if each.word.speaker == "cause" or (each.word.speaker, each.kind) in PROOFS]
    hooked = {each.file for each in told if each.said.startswith(HOOKED)}
    return [
        each
        for each in own
        if not (each.word.is_generic and lost.get((each.file, each.speaker), each.line) < each.line)
        and not (each.word.is_generic and each.file in hooked and _was_logged(each))
    ]


def _was_logged(each: Statement) -> bool:
    """Whether an exception is one that the program logged, in the file of ranks whose last exception torch labels."""
    return each.speaker == UNKNOWN and each.printed_after > LOGGED


def _was_survived(each: Statement) -> bool:
    """Whether the process that says it has worked on: where lines have no labels, others may have printed them."""
    return each.printed_after > SURVIVED or (each.speaker != UNKNOWN and each.continued_for >= CONTINUED)


def _strength(each: Statement) -> tuple[int, bool]:
    """What explains more comes first: a full disk explains an exception, and a word that names explains more."""
    level = 2 if each.kind == "crashed" else 0 if each.word.is_sure else 1
    is_generic = each.word.is_generic
    return level + is_generic, not (each.named_ranks or each.tasks or "node" in each.named)


def reason_of(statements: Sequence[Statement]) -> Statement | None:
    """Return what explains the end of one process, of all that it said: its own failure, what it witnessed of another
    one, or the one that it lost; None if it said nothing of the kind."""
    own = _failures(statements)
    seen = [each for each in (first_exit(statements), *statements) if each and each.word.speaker == "witness"]
    lost = [each for each in statements if each.word.speaker == "victim" and each.kind in VICTIMS]
    lost = [each for each in lost if not _was_survived(each)]
    lost.sort(key=lambda each: VICTIMS.index(each.kind))
    return min(own, key=_strength) if own else next(iter([*seen, *lost]), None)


def _first_of(origins: list[Statement]) -> Statement:
    """Return the earliest, if all have a time; else the one that explains most."""
    if all(each.moment is not None for each in origins):
        return min(origins, key=lambda each: (each.moment or 0.0, _strength(each)))
    return min(origins, key=_strength)


def _is_tied(each: Statement, first: Statement) -> bool:
    if each.by is None or first.by is None or each.by == first.by:
        return False
    if each.moment is not None and first.moment is not None:
        return abs(each.moment - first.moment) <= APART_S
    return _strength(each)[0] == _strength(first)[0]


def _named_by_witness(told: Iterable[Statement]) -> JobEnding | None:
    """Return the rank that a witness of a hang names: one that did not reach a barrier, or stopped its heartbeats."""
    found = [each for each in told if each.word.speaker == "witness" and (each.kind == "hang" or each.named_ranks)]
    found = [each for each in found if each.code is None]
    if not found:
        return None
    ranks = tuple(sorted({rank for each in found for rank in each.named_ranks}))
    return _ending(found[0], found, Culprit(ranks=ranks, node=found[0].named.get("node")))


def _victims(told: Sequence[Statement], ranks: Collection[int], size: int | None) -> JobEnding | None:
    """Return what victims say: why they ended, and who is missing if that leaves one place."""
    victims = [each for each in told if each.word.speaker == "victim" and each.kind in VICTIMS]
    if not victims:
        return None
    first = min(victims, key=lambda each: VICTIMS.index(each.kind))
    said = [each for each in victims if each.kind == first.kind]
    complained = _complained(victims)
    witness = _explanation(told, victims, complained)
    if witness is not None:
        culprit = named_by(witness) or _missing(first, complained, ranks, size)[0] or _place_of(witness, told)
        return _ending(witness, [witness, *said], culprit)
    kind = "network" if first.kind == "aborted" else first.kind
    odd = _odd_one(said)
    has_count = any("came" in each.named for each in said)  # then who waits for a rank may wait for one that waits too
    awaited = {rank for each in said for rank in each.named_ranks if not has_count} - complained
    if odd is not None or len(awaited) == 1:
        culprit, why = Culprit((odd,) if odd is not None else tuple(awaited)), ""
    else:
        culprit, why = _missing(first, complained, ranks, size)
    ending = _ending(first, _one_of_each(said) + exits_of(told)[:1], culprit, why)
    return JobEnding(kind, ending.sentence, culprit, why, first.word.is_sure, ending.evidence, ending.next)


def _odd_one(said: Iterable[Statement]) -> int | None:
    """Return the rank whose collective differs from that of all others, who agree; None if they do not, or are few."""
    calls: dict[str, str] = {}
    for each in said:
        for rank, call in (("by", "own"), ("other", "others")):
            if rank in each.named and call in each.named:
                calls[each.named[rank]] = each.named[call]
    held = Counter(calls.values())
    if len(calls) < MAJORITY or len(held) != 2 or min(held.values()) != 1:
        return None
    return int(next(rank for rank, call in calls.items() if held[call] == 1))


def _complained(told: Iterable[Statement]) -> set[int]:
    """Return the ranks that are victims, as they say themselves."""
    return {each.by for each in told if each.word.speaker == "victim" and each.by is not None}


def _explanation(told: Sequence[Statement], victims: Sequence[Statement], complained: set[int]) -> Statement | None:
    """Return the process that a launcher saw end and that is no victim itself: it ended in another way, or before the
    first of them complained, or all of them say who they are and it is none of them."""
    odd, files = oddities_in(told), {each.file for each in victims}
    before = min(each.line for each in victims) if len(files) == 1 else 0
    all_known = bool(complained) and all(each.by is not None for each in victims)
    for each in exits_of(told):
        is_odd = odd[each.file, each.line] < PLAIN_EXIT
        if signal_of(each) == "SIGTERM" and not is_odd:
            continue
        numbers = {*each.named_ranks, *each.tasks}
        if each.named_ranks and numbers <= complained:
            continue
        is_other = all_known and bool(numbers) and not numbers & complained
        if is_odd or is_other or (each.file in files and each.line < before):
            return each
    return None


def _missing(first: Statement, complained: set[int], ranks: Collection[int], size: int | None) -> tuple[Culprit, str]:
    """Return who did not take part: the ranks that did not complain, if they leave one place to look at."""
    who = name_ranks(sorted(complained)) if complained else "a rank"
    quiet = _only_quiet(complained, {*ranks, *range(size or 0)})
    if first.kind == "mismatch":
        return Culprit(), "the ranks disagree, and nothing says which is wrong"
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
    if complained and complained >= {*ranks, *range(size or 0)}:
        return Culprit(), f"{who} {agree('reports', sorted(complained))} it, and nothing says which rank hung"
    return Culprit(), "nothing says which rank hung"


def _only_quiet(complained: set[int], ranks: set[int]) -> tuple[int, ...]:
    """Return the rank that alone did not complain; none where a rank may be missing from what was read."""
    quiet = ranks - complained
    is_whole = (ranks | complained) == set(range(max(ranks | complained, default=-1) + 1))
    return tuple(quiet) if is_whole and len(quiet) == 1 and len(complained) > 1 else ()


def _ended(told: Sequence[Statement], statements: Sequence[Statement]) -> JobEnding | None:
    """Return the first process that a launcher saw end, where nothing else was said."""
    witness = first_exit(told)
    cancelled = [each for each in statements if each.word.name in TOLD_TO_END]
    if witness is None:
        return _ending(cancelled[0], [cancelled[0]], Culprit()) if cancelled else None
    before = [each for each in cancelled if each.file == witness.file and each.line < witness.line]
    if before and signal_of(witness) in ("SIGKILL", "SIGTERM"):
        return _ending(before[0], [before[0], witness], Culprit(), "all were ended with the step")
    alike = [each for each in exits_of(told) if each is not witness and each.code == witness.code]
    culprit = Culprit() if len(witness.tasks) > 1 and alike else named_by(witness, ())
    others = [each for each in told if each is not witness and each.word.speaker != "register"]
    return _ending(witness, [witness, *others], culprit, "several tasks ended alike, and nothing says which was first")


def _place_of(witness: Statement, told: Iterable[Statement]) -> Culprit:
    """Return the node of a process that its launcher does not name, if one launcher alone left with its exit code."""
    code = witness.code
    left = [each for each in told if each.tasks and each.code is not None and each.code == (code or 0) & 0xFF]
    nodes = {each.named.get("node") for each in left}
    return Culprit(node=nodes.pop()) if code is not None and len(nodes) == 1 else Culprit()


def named_by(first: Statement, others: Sequence[Statement] = ()) -> Culprit:
    """Return who a statement names, else who says it: the first of the same kind that names a rank or a node.

    What another process reports is not where it was reported: those that name come first then.
    """
    naming = [each for each in others if each.named_ranks or each.tasks or "node" in each.named]
    for each in (*naming, first, *others) if first.is_reported else (first, *others):
        if each.word.speaker == "witness":
            culprit = Culprit(each.named_ranks, each.tasks, _local(each), each.named.get("node") or each.speaker.node)
        elif each.word.speaker == "cause":
            by = (each.by,) if each.by is not None else ()
            culprit = Culprit(each.named_ranks or by, (), each.speaker.local_rank, each.speaker.node)
        else:
            culprit = Culprit()
        if culprit:
            return culprit
    return Culprit()


def _local(each: Statement) -> int | None:
    text = each.named.get("local_rank", "")
    return int(text) if text.isdigit() and len(text) < 6 else None


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


def _ending(first: Statement, evidence: Sequence[Statement], culprit: Culprit, why: str = "") -> JobEnding:
    return JobEnding(
        kind=first.kind,
        sentence=sentence_of(first, culprit),
        culprit=culprit,
        why_not_known="" if culprit else why or "nothing says which rank or node was first",
        is_certain=first.word.is_sure,
        evidence=tuple({(each.place, each.said): each for each in evidence}.values())[:MOST_EVIDENCE],
        next=first.word.next,
    )


def sentence_of(each: Statement, culprit: Culprit) -> str:
    """Return what a statement says, with the names that it holds."""
    signal = signal_of(each)
    how = signal or (f"with exit code {each.code}" if each.code is not None else "")
    names = {"who": str(culprit) if culprit else "a process", "how": how, "came": "some", "size": "all"}
    for name in ("node", "server", "what"):
        names[name] = each.named.get(name, "unknown")
    return each.word.says.format_map(_Named({**names, **each.named})).rstrip(", ")


class _Named(dict[str, str]):
    def __missing__(self, name: str) -> str:
        return "unknown"


def _nothing(statements: Sequence[Statement]) -> JobEnding:
    finished = [each for each in statements if each.kind == "finished"]
    if finished:
        return _ending(finished[0], finished, Culprit())
    said = "nothing that was read says why it ended"
    return JobEnding(
        "unknown",
        said,
        evidence=tuple(each for each in statements if each.word.speaker != "register")[-MOST_EVIDENCE:],
        why_not_known=said,
    )
