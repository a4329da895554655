"""Why an attempt ended, from what its ranks left behind: the contents of `exit.json`.

The operator needs the first failure, which 383 later messages bury: when a rank dies, the others fail with "connection
closed", and the launcher ends the rest with TERM. So ranks that were told to end do not count as failures, and errors
about other ranks (lost connections, collectives that timed out) count only if there is no other error. The earliest of
the remaining failures is the first. If every error is about other ranks, the cause is a rank that has none: one that
left with 0 before the others (`left_early`), or one that did not come to a collective (`hang`). Where the ranks
were ended from outside, `ended.json` names who and why, and that is the reason if the ranks do not show another one.
With `survive`, only the last generation of ranks counts.
"""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

from bigsci_launch.endings.ending import named_by, sentence_of
from bigsci_launch.file_names import launcher_of_name
from bigsci_launch.runs.ending.blame import (
    EndFinding,
    blame_accused,
    find_early,
    find_failed_check,
    find_hang,
    find_own_error,
    find_said_by_slurm,
    find_stragglers,
    may_be_lost,
)
from bigsci_launch.runs.ending.failures import (
    failure_text,
    find_failures,
    find_lost,
    find_silent,
    ordered,
    without_marks,
)
from bigsci_launch.runs.ending.output import JobOutput, launch_cause, was_step_cancelled
from bigsci_launch.runs.ending.outside import failed_before, find_outside
from bigsci_launch.runs.ending.records import (
    NodeClock,
    Ranks,
    Record,
    compare_clocks,
    corrected,
    read_output,
    read_ranks,
)
from bigsci_launch.runs.layout import AttemptDir, rank_files
from bigsci_launch.runs.watching.ended import read_ended_by
from bigsci_launch.topology.naming import name_ranks

if TYPE_CHECKING:
    from bigsci_launch.runs.ending.generations import Survived

SCHEMA_VERSION = 1
PREEMPTION_LAG_S = 5.0
"""How much the clocks of slurmctld and of the batch host may differ."""
MAX_CLOCKS = 4
CORRECTED = "the clocks of some nodes differ: {}; the times of failures are corrected"
UNCERTAIN = "the first failure is uncertain: clocks, or the starts and ends of ranks, differ by {}"
"""Of clocks that only a start or an end shows; it matters where another order of the failures is possible."""
"""How many clocks that differ are named in words."""


@dataclass(frozen=True, slots=True)
class SeenEnd:
    """What the job script, or Slurm, has seen of the end of an attempt. Times are seconds since the epoch."""

    attempt: AttemptDir
    world_size: int
    started: float
    exit_code: int | None = None
    """Of srun or the launcher; None: the attempt has not ended yet, and the record is provisional."""
    terminated: float | None = None
    """When the script itself got TERM."""
    stop_requested: bool = False
    """Whether ranks were told to save and stop."""
    warned_before_s: float | None = None
    """How long before TERM that was, by a clock that never jumps."""
    slurm_reason: str = ""
    """squeue's reason when TERM came."""
    preempted: str = ""
    """squeue's PreemptTime; N/A or nothing if it is not known."""
    lost_nodes: tuple[str, ...] = ()
    """Nodes that were down when TERM came."""
    is_requeued: bool = False
    """Whether squeue had counted another restart when TERM came."""
    is_judged: bool = False
    """Whether the controller of `survive` has recorded what ended the last generation."""


def describe(end: SeenEnd) -> Record:
    """Return the contents of `exit.json`, without those of the job itself."""
    output = read_output(end.attempt)
    ranks = read_ranks(end.attempt, output.unwritten)
    survived = read_survived(end.attempt)
    told = survived.sentence if survived else None
    if survived is not None:
        size = (survived.newest.world_size if survived.newest else None) or end.world_size
        end = replace(end, world_size=size, is_judged=survived.is_judged)
        ranks = survived.last_ranks(ranks)
    # Ranks of several generations started at several times, which is no measure of clocks.
    clocks = {} if told else compare_clocks(ranks, end.started)
    certain = {node: clock for node, clock in clocks.items() if clock.is_certain}
    finding = find_blamed(end, corrected(ranks, certain), output)
    ended = read_ended_by(end.attempt)
    if survived is not None and end.exit_code:
        finding = blame_accused(survived.given_up(finding, ranks), ranks)
    hanging = [sentence_of(each, named_by(each)) for each in output.told if each.kind == "unkillable"]
    notes = [*([told] if told else []), *(hanging if finding.reason != "node_failure" else [])]
    notes += [*limit_notes(end, finding.reason, ranks), *clock_notes(certain, CORRECTED)]
    if clocks != certain and rank_of(find_blamed(end, corrected(ranks, clocks), output)) != rank_of(finding):
        notes += clock_notes({node: clock for node, clock in clocks.items() if node not in certain}, UNCERTAIN)
    if ended is not None and ended.sentence not in finding.evidence and finding.reason != "finished":
        notes.append(ended.intent)
    return end_record(
        end.attempt,
        reason=finding.reason,
        exit_code=exit_code_of(end, finding),
        first_failure=without_marks(finding.first),
        failed_ranks=finding.failed,
        suspects=finding.suspects,
        collectives=finding.collectives,
        evidence=[*finding.evidence, *notes],
        cause=finding.cause or (launch_cause(output.lines) if finding.reason == "launch_failed" else output.no_room),
        clocks=[
            {"node": node, "ahead_s": round(clock.seconds, 1), "corrected": clock.is_certain}
            for node, clock in sorted(clocks.items())
        ],
        spy_bundle=(ended.bundle if ended else None) or bundle_of(end, finding),
        world_size=end.world_size,
        num_started=sum(1 for rank in ranks.values() if rank["pid"]),
        slurm_reason=end.slurm_reason if end.slurm_reason not in ("", "None") else None,
        started=end.started,
    )


def read_survived(attempt: AttemptDir) -> Survived | None:
    """Return the generations of an attempt; None without `survive`, of which nothing is loaded then."""
    if not attempt.generations.exists():
        return None
    from bigsci_launch.runs.ending import generations

    return generations.read_survived(attempt)


def end_record(attempt: AttemptDir, **known: Any) -> Record:
    """Return the contents of `exit.json`: what is known, and nothing for the rest."""
    lists = dict.fromkeys(("failed_ranks", "suspects", "collectives", "evidence", "clocks"), ())
    nothing = dict.fromkeys(("cause", "spy_bundle", "world_size", "slurm_reason", "job_id"))
    counts = {"num_started": 0, "restart_count": 0}
    mine = {"schema_version": SCHEMA_VERSION, "attempt": attempt.name, "ended": time.time()}
    return {**mine, "first_failure": None, **lists, **nothing, **counts, **known}


def find_blamed(end: SeenEnd, ranks: Ranks, output: JobOutput) -> EndFinding:
    """Return why the attempt ended; what a guard has found decides who is responsible."""
    finding = blame_accused(find_reason(end, ranks, output), ranks)
    if finding.first is not None or not rank_files(end.attempt.exits, ".json", launcher_of_name):
        return finding
    from bigsci_launch.runs.ending import launchers

    return launchers.blame_launcher(end.attempt, finding)


def find_reason(end: SeenEnd, ranks: Ranks, output: JobOutput) -> EndFinding:
    """Return why the attempt ended, and who is responsible for it."""
    has_failed = bool(end.exit_code)
    ended, seen = read_ended_by(end.attempt), find_failures(ranks)
    if ended is not None:
        seen = [failure for failure in seen if failed_before(end.attempt, failure, ended)]
    # Ranks that were killed from outside leave no record either, nor those that met a full disk.
    is_telling = has_failed and ended is None and output.no_room is None and not end.is_judged
    silent = find_silent(ranks) if is_telling and may_be_lost(ranks, output, seen) else None
    lost = find_lost(ranks, [*end.lost_nodes, *(output.lost_nodes if has_failed else ())])
    lost = lost or (silent.lost if silent else [])
    failures = ordered(seen + (silent.killed if silent else []))
    failed = sorted(failure["rank"] for failure in failures)
    if end.exit_code and not ranks and (check := find_failed_check(end.attempt)) is not None:
        return check
    if lost or end.slurm_reason == "NodeDown":
        return with_first("node_failure", [*lost, *failures], failed)
    by_slurm = find_said_by_slurm(output, ranks, failures) if has_failed and ended is None else None
    if by_slurm is not None:
        return by_slurm
    if end.exit_code != 0 and any(not failure["is_about_others"] for failure in failures):
        return with_first("crashed", failures, failed)
    outside = find_outside(ended, end.exit_code, end.world_size, ranks) if ended is not None else None
    if end.terminated is not None:
        reason = "preempted" if was_preempted(end, output) else reason_of_termination(end, output)
        return outside if outside is not None and reason == "cancelled" else EndFinding(reason, None, failed)
    if end.exit_code == 0 and end_reasons(ranks) == {"finished"}:
        return EndFinding("finished", None, failed)
    if was_preempted(end, output) and any(rank["exit"].get("terminated") for rank in ranks.values()):
        return EndFinding("preempted", None, failed)
    if outside is not None:
        return outside
    if end.exit_code == 0:
        return EndFinding("stopped" if was_stopped(end, ranks) else "finished", None, failed)
    blamed = find_stragglers(ranks, output) or find_early(ranks, failures) or find_hang(end.world_size, ranks, failures)
    if blamed is not None:
        return blamed
    if silent and silent.unknown:
        return EndFinding("unknown", None, failed, evidence=[silent.unknown])
    if ranks and not failures and was_step_cancelled(output):
        return EndFinding("cancelled", None, failed, evidence=["the job step that ran the ranks was cancelled"])
    if ranks and not failures:
        said = f"no rank failed before it was asked to end: their launcher ended with {end.exit_code}"
        return EndFinding("crashed", None, failed, evidence=[] if end.is_judged else [said])
    if failures and all(failure["signal"] != "SIGTERM" for failure in failures):
        return find_own_error(ranks, failures)
    return with_first("crashed" if ranks else "launch_failed", failures, failed)


def with_first(reason: str, failures: list[Record], failed: list[int]) -> EndFinding:
    """Return a finding whose first failure is the first of `failures`, if there is one."""
    first = next(iter(failures), None)
    return EndFinding(reason, first, failed, status_of=first)


def reason_of_termination(end: SeenEnd, output: JobOutput) -> str:
    """Return why the whole job got TERM."""
    if end.slurm_reason == "TimeLimit" or says(output, "time_limit"):
        return "time_limit"
    return "requeued" if end.is_requeued or says(output, "requeued") else "cancelled"


def says(output: JobOutput, kind: str) -> bool:
    """Whether Slurm gives this reason in the output of the job."""
    return any(each.kind == kind and each.word.speaker == "witness" for each in output.told)


def limit_notes(end: SeenEnd, reason: str, ranks: Ranks) -> list[str]:
    """Return whether the ranks were warned before the time limit ended them, and which did not stop."""
    if reason != "time_limit":
        return []
    if end.warned_before_s is None:
        return ["no record shows that the ranks were asked to save and stop before the time limit"]
    running = [number for number, rank in ranks.items() if rank["exit"].get("code") != 0]
    who = name_ranks(running) if 0 < len(running) < end.world_size else "the ranks"
    return [f"{who} did not stop, although asked to {end.warned_before_s:.0f} s before the time limit"]


def was_preempted(end: SeenEnd, output: JobOutput) -> bool:
    """Whether Slurm took the nodes for another job. With grace time, only the ranks get TERM, and may end well."""
    if says(output, "preempted"):
        return True
    try:
        moment = datetime.fromisoformat(end.preempted).timestamp()
    except ValueError:
        return False
    return moment >= end.started - PREEMPTION_LAG_S  # that of an earlier start of the job stays in squeue


def was_stopped(end: SeenEnd, ranks: Ranks) -> bool:
    """Whether training ended before its last step because it was told to. Without events: whether it was told to."""
    ends = end_reasons(ranks)
    return bool(ends - {"finished"}) if ends else end.stop_requested


def end_reasons(ranks: Ranks) -> set[str | None]:
    """Return why training ended, as each rank recorded it."""
    return {rank["event"].get("reason") for rank in ranks.values() if rank["event"].get("kind") == "end"}


def exit_code_of(end: SeenEnd, finding: EndFinding) -> int | None:
    """Return the exit code of the rank that failed first: 128 + signal if a signal ended it, 1 if it was lost.

    Where no rank failed, it is that of srun or the launcher.
    """
    failure = finding.status_of
    if not end.exit_code or failure is None:
        return end.exit_code
    if failure["signal"] is not None:
        return 128 + getattr(signal, failure["signal"], 0)
    return int(failure["code"] or 1)


def rank_of(finding: EndFinding) -> int | None:
    return finding.first["rank"] if finding.first else None


def clock_notes(clocks: dict[str, NodeClock], text: str) -> list[str]:
    """Return the sentence `text` about clocks that differ; none if there are none."""
    found = [f"{node} {clock.seconds:+.1f} s" for node, clock in sorted(clocks.items())]
    more = f" and {len(found) - MAX_CLOCKS} more" if len(found) > MAX_CLOCKS else ""
    return [text.format(", ".join(found[:MAX_CLOCKS]) + more)] if found else []


def bundle_of(end: SeenEnd, finding: EndFinding) -> str | None:
    return newest_bundle(end.attempt, end.started) if finding.reason == "hang" else None


def newest_bundle(attempt: AttemptDir, started: float) -> str | None:
    """Return the newest evidence that `bsl spy` stored during the attempt."""
    try:
        bundles = [(path.stat().st_mtime, str(path)) for path in attempt.run.bundles.iterdir()]
    except OSError:
        return None
    return max((bundle for bundle in bundles if bundle[0] >= started), default=(0.0, None))[1]


def summary(document: Record) -> list[str]:
    """Return the lines for the job's output: the reason with the first failure or the cause, and the evidence."""
    code = document["exit_code"]
    text = f"bsl: attempt {document['attempt']} ended: {document['reason']}"
    text += f" (exit code {code})" if code is not None else " (provisional: it has not ended yet)"
    if document["first_failure"] is not None:
        text += f"; first failure: {failure_text(document['first_failure'])}"
        last_words = document["first_failure"]["last_words"]
        text += f" (last words: {last_words})" if last_words else ""
    elif document["cause"]:
        text += f": {document['cause']}"
    stacks = "stacks of the hang" if document["reason"] == "hang" else "stacks"
    bundle = [f"{stacks}: {document['spy_bundle']}"] if document["spy_bundle"] else []
    return [text, *(f"bsl: {sentence}" for sentence in [*document["evidence"], *bundle])]
