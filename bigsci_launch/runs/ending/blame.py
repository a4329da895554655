"""Who is responsible where no rank failed on its own: a rank that left early, or did not come.

Unknowns are not guessed: where the ranks that complain do not leave a single place to look at, no rank is named.
"""

from __future__ import annotations

import math
from datetime import datetime
from typing import Any, NamedTuple

from bigsci_launch.endings.ending import Culprit, named_by, sentence_of
from bigsci_launch.lost_peer import TIMED_OUT, loss_in
from bigsci_launch.runs.ending.failures import failure_of, identity, make_failure
from bigsci_launch.runs.ending.output import JobOutput, collective_of, collective_text
from bigsci_launch.runs.ending.records import Ranks, Record, error_text, has_ended
from bigsci_launch.runs.layout import AttemptDir, read_record
from bigsci_launch.topology.naming import agree, name_ranks

NOTHING: Record = {"pid": {}, "exit": {}, "error": {}, "event": {}, "about_others": [], "accuses": []}
"""What is known of a rank that left nothing."""
SLURM_LOST = "Slurm lost the node {}"
OUT_OF_MEMORY = "was killed for lack of memory, according to Slurm"
EXIT_LAG_S = 5.0
"""A rank that leaves closes its connections first and ends some seconds later; the others may fail in between."""


class EndFinding(NamedTuple):
    """Why an attempt ended."""

    reason: str
    first: Record | None
    failed: list[int]
    suspects: list[Record] = []  # noqa: RUF012  never changed
    collectives: list[Record] = []  # noqa: RUF012
    evidence: list[str] = []  # noqa: RUF012
    status_of: Record | None = None
    """The failure whose exit status is that of the training; without one, it is that of srun or the launcher."""
    cause: str | None = None
    """What happened, where no rank is to blame for it."""


def blame_accused(finding: EndFinding, ranks: Ranks) -> EndFinding:
    """Return the finding with the rank that a guard accuses as the first failure, if a guard ended the training.

    All ranks raise what the guard has found, and which of them is the first to end proves nothing. Where the guard
    accuses none of its suspects, such as of two copies that differ, none failed first.
    """
    error = ranks.get(finding.first["rank"], NOTHING)["error"] if finding.first is not None else {}
    if finding.reason != "crashed" or finding.first is None or not isinstance(error.get("accused"), list):
        return finding
    accused, others = numbers_of(error, "accused"), numbers_of(error, "suspects")
    who = [identity(number, ranks.get(number, NOTHING)) for number in accused or others]
    if not accused:
        said = f"a guard found a defect on {name_ranks(others)}, but accuses none of them"
        said = said if others else "a guard found a defect, but accuses no rank"
        found = finding._replace(first=None, suspects=who, cause=error_text(error))
    else:
        said = f"a guard accuses {name_ranks(accused)} equally" if len(accused) > 1 else ""
        first = accused_failure(min(accused), ranks, finding.first)
        found = finding._replace(first=first, suspects=who if len(accused) > 1 else [])
    return found._replace(evidence=[*filter(None, dict.fromkeys([said, *finding.evidence]))])


def accused_failure(number: int, ranks: Ranks, raised: Record) -> Record:
    """Return the failure of a rank that a guard accuses; it may have been killed before it recorded what it raised."""
    rank = ranks.get(number, NOTHING)
    own = failure_of(number, rank) if rank["error"] else None
    return own or {**make_failure(number, rank, raised["error"], raised["time"]), "step": raised["step"]}


def numbers_of(error: Record, field: str) -> list[int]:
    """Return the ranks in a field of an error record."""
    return sorted(each for each in error.get(field) or [] if isinstance(each, int))


def find_failed_check(attempt: AttemptDir) -> EndFinding | None:
    """Return the first node that failed the check before the ranks started; None if none did, or there was no check."""
    nodes = read_record(attempt.check_result).get("nodes", [])
    failed = [node for node in nodes if node.get("verdict") == "failed"]
    if not failed:
        return None
    failures = [{**make_failure(-1, NOTHING, node["why"], None), "rank": None, "node": node["node"]} for node in failed]
    evidence = [f"{node['node']}: {node['why']}" for node in failed[1:]]
    return EndFinding("node_check", failures[0], [], evidence=evidence)


def find_said_by_slurm(output: JobOutput, ranks: Ranks, failures: list[Record]) -> EndFinding | None:
    """Return the end that Slurm's own words in the output of the job prove; None if it says nothing of the kind.

    Out of memory explains ranks that were killed; an error that another rank had raised before is the first failure.
    """
    failed = sorted(failure["rank"] for failure in failures)
    kinds = {each.kind for each in output.told if each.word.speaker == "witness" and each.word.is_sure}
    if "node_failure" in kinds:
        lost = [{**make_failure(-1, NOTHING, SLURM_LOST.format(node), None), "rank": None, "node": node}
                for node in output.lost_nodes]  # fmt: skip
        return EndFinding("node_failure", next(iter(lost), None), failed, cause=None if lost else "Slurm lost a node")
    taken = [kind for kind in ("preempted", "requeued") if kind in kinds]
    if taken:
        return EndFinding(taken[0], None, failed)
    memory = [each for each in output.told if each.kind == "out_of_memory"]
    own = next((failure for failure in failures if not failure["is_about_others"]), None)
    limit = next((each for each in output.told if each.kind == "time_limit"), None)
    if limit is not None and (own is None or (own["time"] or 0.0) > _local_time(limit.named.get("time", ""))):
        return EndFinding("time_limit", None, failed)
    hanging = next((each for each in output.told if each.kind == "unkillable"), None)
    if hanging is not None and own is None:
        why = make_failure(-1, NOTHING, sentence_of(hanging, Culprit()), None)
        return EndFinding("node_failure", {**why, "rank": None, "node": hanging.named.get("node")}, failed)
    if not memory or (own is not None and own["signal"] != "SIGKILL"):
        return None
    best = next((each for each in memory if each.tasks), memory[0])
    killed = [number for number in output.ranks_of(best.tasks) if number in ranks]
    if own is not None and own["rank"] in killed and len(best.tasks) == 1:
        killed = [own["rank"]]
    first = make_failure(killed[0], ranks[killed[0]], OUT_OF_MEMORY, None) if len(killed) == 1 else None
    evidence = [f"{name_ranks(killed)} were killed at once: none of them was the first"] if len(killed) > 1 else []
    cause = sentence_of(best, named_by(best, memory))
    return EndFinding("out_of_memory", first, failed, evidence=evidence, status_of=own, cause=cause)


def _local_time(text: str) -> float:
    """Return a time as Slurm prints it, in seconds since the epoch; infinity if it is none."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError, OSError):
        return math.inf


def find_stragglers(ranks: Ranks, output: JobOutput) -> EndFinding | None:
    """Return who left early or hung at the exit, if the launcher ended ranks that ran long after the first had ended.

    If those that were ended had finished training, they hung at their exit. Otherwise the others left early, unless
    these had finished. Without events it is unknown who had finished; then the majority is taken to be right. If no
    rank ended with 0, the first failed, and those that were ended only ignored TERM: then it is not about them.
    """
    running, left = sorted(output.running), left_with_0(ranks, output)
    if not running or not left:
        return None
    finished = {number for number in [*running, *left] if has_ended(ranks.get(number, NOTHING))}
    early = [number for number in left if number not in finished]
    if any(rank["event"] for rank in ranks.values()):
        hung = finished.issuperset(running) or not early
    else:
        hung = len(running) < len(left)
    if hung:
        return hung_at_exit(ranks, running, finished, output.waited_s)
    why = f"while {name_ranks(running)} still ran and {agree('was ended', running)} {output.waited_s:g} s later"
    return left_early(ranks, early, why)


def left_with_0(ranks: Ranks, output: JobOutput) -> list[int]:
    return sorted(output.left) or [number for number, rank in ranks.items() if rank["exit"].get("code") == 0]


def may_be_lost(ranks: Ranks, output: JobOutput, failures: list[Record]) -> bool:
    """Whether ranks without an exit record may be lost, rather than ended by the launcher because they still ran.

    To the launcher, the ranks of a lost node still run when the others have lost their connections to them and failed.
    """
    is_follow_up = all(failure["is_about_others"] for failure in failures)
    return not output.running or (is_follow_up and not left_with_0(ranks, output))


def hung_at_exit(ranks: Ranks, running: list[int], finished: set[int], waited_s: float) -> EndFinding:
    first = running[0]
    why = f"still ran {waited_s:g} s after the first rank had ended with 0, and was ended"
    why += ", after its training had ended" if first in finished else "; no record shows that its training had ended"
    failure = make_failure(first, ranks.get(first, NOTHING), why, None)
    evidence = [f"{name_ranks(running)} still ran when all others had ended with 0"] if len(running) > 1 else []
    return EndFinding("hung_at_exit", failure, running, evidence=evidence)


def left_early(ranks: Ranks, early: list[int], why: str) -> EndFinding:
    """Return the finding that `early` left with 0 before the others had ended."""
    ends = {number: ranks.get(number, NOTHING)["exit"].get("time") for number in early}
    first = min(early, key=lambda number: (ends[number] is None, ends[number] or 0.0))
    failure = make_failure(first, ranks.get(first, NOTHING), f"left with exit code 0 {why}", ends[first])
    evidence = [f"{name_ranks(early)} left with exit code 0 before the others"] if len(early) > 1 else []
    return EndFinding("left_early", {**failure, "code": 0}, sorted(early), evidence=evidence)


def find_early(ranks: Ranks, failures: list[Record]) -> EndFinding | None:
    """Return who left with 0 before the others failed, each of them because of another rank; None if no rank did."""
    times = [failure["time"] for failure in failures if failure["time"] is not None]
    if not times:
        return None
    early = [number for number, rank in ranks.items() if is_early(rank, min(times) + EXIT_LAG_S)]
    victims = sorted(failure["rank"] for failure in failures)
    if not early:
        return None
    found = left_early(ranks, early, f"before {name_ranks(victims)} lost the connection to another rank")
    return found._replace(failed=sorted({*early, *victims}), status_of=failures[0])


def is_early(rank: Record, before: float) -> bool:
    """Whether a rank ended with 0 on its own, before its training had ended and before a moment."""
    end = rank["exit"]
    is_clean = end.get("code") == 0 and end.get("terminated") is None and not rank["about_others"]
    return is_clean and not has_ended(rank) and end.get("time", before) < before


def find_own_error(ranks: Ranks, failures: list[Record]) -> EndFinding:
    """Return who is to blame if all that failed only lost another rank: one that still ran, and had printed an error.

    A rank may take long to die of its own error, as in its exit handlers. The others notice, and end sooner. Without
    such a rank, none is named.
    """
    victims = {failure["rank"] for failure in failures}
    failed, who = sorted(victims), name_ranks(sorted(victims))
    noticed = min((failure["time"] for failure in failures if failure["time"] is not None), default=0.0)
    raised = [(number, *rank["raised"]) for number, rank in ranks.items() if number not in victims]
    own = sorted(
        (moment, number) for number, text, moment in raised if text and moment is not None and moment < noticed
    )
    if not own:
        said = f"cannot determine which rank failed first: {who} lost the connection to another rank"
        return EndFinding("crashed", None, failed, evidence=[said], status_of=failures[0])
    moment, number = own[0]
    first = make_failure(number, ranks[number], ranks[number]["raised"][0], moment)
    said = f"rank {number} still ran when it was asked to end; its error came before {who} lost the connection"
    return EndFinding("crashed", first, sorted({number, *failed}), evidence=[said], status_of=failures[0])


def find_hang(world_size: int, ranks: Ranks, failures: list[Record]) -> EndFinding | None:
    """Return the hang that ranks complain about: a collective took too long. None if none does.

    The suspects are the ranks that did not complain. They are named only if most did, and if the others are on one
    node: the first complaint ends the job, and some ranks have no time for theirs.
    """
    timed_out = {
        number: texts
        for number, rank in ranks.items()
        if (texts := [text for text in rank["about_others"] if loss_in(text) in TIMED_OUT])
    }
    accused = sorted({number for rank in ranks.values() for number in rank["accuses"] if number < world_size})
    if accused:
        return find_accused(accused, ranks, failures)
    if not timed_out:
        return None
    complained = {number for number, rank in ranks.items() if rank["about_others"]}
    quiet = [n for n in range(world_size) if n not in complained and ranks.get(n, NOTHING)["exit"].get("code") != 0]
    collectives = group_collectives(timed_out)
    evidence = [f"timed out: {collective_text(each)}, according to {name_ranks(each['ranks'])}" for each in collectives]
    suspects = [identity(number, ranks.get(number, NOTHING)) for number in quiet]
    failed, status_of = sorted(failure["rank"] for failure in failures), next(iter(failures), None)
    are_known = 0 < len(quiet) < len(complained) and len({suspect["node"] for suspect in suspects}) == 1
    if not are_known:
        evidence.append(unknown_text(quiet, complained))
        return EndFinding("hang", None, failed, [], collectives, evidence, status_of)
    is_store = all(each["backend"] == "store" for each in collectives)
    what = "did not come to the rendezvous" if is_store else "did not take part in a collective"
    why = f"{what}: {name_ranks(sorted(complained))} waited for it"
    first = make_failure(quiet[0], ranks.get(quiet[0], NOTHING), why, None)
    if len(quiet) > 1:
        evidence.append(f"{name_ranks(quiet)}, all on {first['node']}, reported no timeout")
    return EndFinding("hang", first, failed, suspects, collectives, evidence, status_of)


def find_accused(accused: list[int], ranks: Ranks, failures: list[Record]) -> EndFinding:
    """Return the hang whose witness, a monitored barrier, names the ranks that did not come."""
    by = [number for number, rank in ranks.items() if rank["accuses"]]
    why = f"did not reach the monitored barrier in which {name_ranks(by)} waited"
    first = make_failure(accused[0], ranks.get(accused[0], NOTHING), why, None)
    suspects = [identity(number, ranks.get(number, NOTHING)) for number in accused]
    evidence = [f"{name_ranks(accused)} did not reach it"] if len(accused) > 1 else []
    failed, status_of = sorted(failure["rank"] for failure in failures), next(iter(failures), None)
    return EndFinding("hang", first, failed, suspects, [], evidence, status_of)


def unknown_text(quiet: list[int], complained: set[int]) -> str:
    if not quiet:
        return "cannot determine which rank hung: all ranks reported a timeout"
    return (
        f"cannot determine which rank hung: {name_ranks(quiet)} reported no timeout, but some may have had no time to "
        f"({len(complained)} did)"
    )


def group_collectives(timed_out: dict[int, list[str]]) -> list[Record]:
    """Return the collectives that timed out, each with the ranks that say so, the most frequent first."""
    groups: dict[tuple[Any, ...], Record] = {}
    for number, texts in timed_out.items():
        collective = collective_of(texts[0])
        groups.setdefault(tuple(collective.values()), {**collective, "ranks": []})["ranks"].append(number)
    return sorted(groups.values(), key=lambda group: -len(group["ranks"]))
