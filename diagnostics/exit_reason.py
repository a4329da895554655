"""Reports why an attempt ended, from what its ranks left behind. Stand-alone, together with the other exit_*.py files
and safe_files.py: standard library only, Python 3.8 or newer.

    python -I -S exit_reason.py --attempt-dir DIR --world-size 8 --started 1795226527 --exit-code 137

Prints the exit code of the training on stdout and the reason on stderr, and then writes `exit.json` to DIR: the disk
may be full. The code is that of the first rank that failed; srun's own is the highest of all ranks, including those
that it killed itself. Without `--exit-code` the attempt has not ended yet: the record is provisional, in case the batch
script is killed before.

The operator needs the first failure, which 383 later messages bury: when a rank dies, the others fail with "connection
closed", and the launcher ends the rest with TERM. So ranks that were told to end do not count as failures, and errors
about other ranks (lost connections, collectives that timed out) count only if there is no other error. The earliest of
the remaining failures is the first. If every error is about other ranks, the cause is a rank that has none: one that
left with 0 before the others (`left_early`), or one that did not come to a collective (`hang`). Where somebody ended
the ranks from outside, `ended.json` says who and why, and that is the reason if the ranks do not show another one.
With `survive`, only the last generation of ranks counts.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if "__file__" in globals():
    sys.path.insert(0, str(Path(__file__).resolve().parent))  # -I leaves it out
sys.dont_write_bytecode = True  # nothing is left in the attempt's tools

import safe_files
from exit_blame import (
    Finding,
    blame_accused,
    find_early,
    find_failed_check,
    find_hang,
    find_own_error,
    find_stragglers,
    may_be_lost,
)
from exit_failures import failure_text, find_failures, find_lost, find_silent, ordered, without_marks
from exit_generations import archived, given_up, overcome, present, read_generations, sentence
from exit_outside import failed_before, find_outside, read_ended_by
from exit_records import compare_clocks, corrected, read_output, read_ranks
from exit_words import launch_cause, ranks_text, was_step_cancelled

if TYPE_CHECKING:
    from typing import Any

    from exit_records import Clock, Ranks
    from exit_words import JobOutput

    Record = dict[str, Any]

SCHEMA_VERSION = 1
PREEMPTION_LAG_S = 5.0
"""How much the clocks of slurmctld and of the batch host may differ."""
MAX_CLOCKS = 4
"""How many clocks that differ are named in words."""


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    output = read_output(options.attempt_dir)
    document = describe(options, read_ranks(options.attempt_dir, output.unwritten), output)
    if options.print_only:
        print(json.dumps(document))
        return 0
    if document["exit_code"] is not None:
        say(1, str(document["exit_code"]))
    for line in summary(document):
        say(2, line)
    try:
        write_record(options.attempt_dir / "exit.json", document)
    except OSError as error:
        say(2, f"exit_reason: cannot write {options.attempt_dir / 'exit.json'}: {error}")
        say(2, f"exit_reason: record exit {json.dumps(document)}")
        return 1
    return 0


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Say why an attempt ended.")
    parser.add_argument("--attempt-dir", type=Path, required=True)
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument("--started", type=float, required=True, help="seconds since the epoch")
    parser.add_argument("--exit-code", type=int, help="of srun or the launcher; if left out, not known yet")
    parser.add_argument("--job-id")
    parser.add_argument("--restart-count", type=int, default=0)
    parser.add_argument("--terminated", type=float, help="when the script itself got TERM, seconds since the epoch")
    parser.add_argument("--stop-requested", action="store_true", help="ranks were told to save and stop")
    parser.add_argument(
        "--told-before-s", type=float, help="how long before TERM that was, by a clock that never jumps"
    )
    parser.add_argument("--slurm-reason", default="", help="squeue's reason when TERM came")
    parser.add_argument("--preempted", default="", help="squeue's PreemptTime; N/A or nothing if it is not known")
    parser.add_argument("--lost-nodes", default="", help="nodes that were down when TERM came, separated by blanks")
    parser.add_argument("--slurm-restarts", type=int, default=0, help="squeue's restart count when TERM came")
    parser.set_defaults(is_judged=False)
    parser.add_argument("--print-only", action="store_true", help="print the record on stdout, and write nothing")
    return parser.parse_args(arguments)


def describe(options: argparse.Namespace, ranks: Ranks, output: JobOutput) -> Record:
    """Return the contents of `exit.json`."""
    generations = read_generations(options.attempt_dir)
    if generations is not None:
        size = generations.world_size or options.world_size
        options = argparse.Namespace(**{**vars(options), "world_size": size, "is_judged": generations.is_judged})
        ranks = overcome(generations, archived(options.attempt_dir, generations, present(generations, ranks)))
    # Ranks of several generations started at several times, which says nothing of clocks.
    clocks = compare_clocks(ranks, options.started) if generations is None or generations.number < 2 else {}
    certain = {node: clock for node, clock in clocks.items() if clock.is_certain}
    finding = find_blamed(options, corrected(ranks, certain), output)
    ended = read_ended_by(options.attempt_dir)
    if generations is not None and options.exit_code:
        finding = blame_accused(given_up(generations, finding, ranks), ranks)
    told = sentence(generations) if generations is not None else None
    notes = [*([told] if told else []), *limit_notes(options, finding.reason, ranks), *clock_notes(clocks)]
    if ended is not None and ended.sentence not in finding.evidence and finding.reason != "finished":
        notes.append(ended.intent)
    if clocks != certain and rank_of(find_blamed(options, corrected(ranks, clocks), output)) != rank_of(finding):
        notes.append("the order of the failures depends on it: the first failure is not certain")
    return {
        "schema_version": SCHEMA_VERSION,
        "reason": finding.reason,
        "exit_code": exit_code_of(options, finding),
        "first_failure": without_marks(finding.first),
        "failed_ranks": finding.failed,
        "suspects": finding.suspects,
        "collectives": finding.collectives,
        "evidence": [*finding.evidence, *notes],
        "cause": launch_cause(output.lines) if finding.reason == "launch_failed" else finding.cause or output.no_room,
        "clocks": [
            {"node": node, "ahead_s": round(clock.seconds, 1), "corrected": clock.is_certain}
            for node, clock in sorted(clocks.items())
        ],
        "spy_bundle": (ended.bundle if ended else None) or bundle_of(options, finding),
        "world_size": options.world_size,
        "num_started": sum(1 for rank in ranks.values() if rank["pid"]),
        "slurm_reason": options.slurm_reason if options.slurm_reason not in ("", "None") else None,
        "attempt": options.attempt_dir.name,
        "job_id": options.job_id,
        "restart_count": options.restart_count,
        "started": options.started,
        "ended": time.time(),
    }


def find_blamed(options: argparse.Namespace, ranks: Ranks, output: JobOutput) -> Finding:
    """Return why the attempt ended; what a guard has found decides who is responsible."""
    return blame_accused(find_reason(options, ranks, output), ranks)


def find_reason(options: argparse.Namespace, ranks: Ranks, output: JobOutput) -> Finding:
    """Return why the attempt ended, and who is responsible for it."""
    has_failed = bool(options.exit_code)
    ended, seen = read_ended_by(options.attempt_dir), find_failures(ranks)
    if ended is not None:
        seen = [failure for failure in seen if failed_before(options.attempt_dir, failure, ended)]
    # Ranks that somebody killed leave no record either, nor those that met a full disk.
    is_telling = has_failed and ended is None and output.no_room is None and not options.is_judged
    silent = find_silent(ranks) if is_telling and may_be_lost(ranks, output, seen) else None
    lost = find_lost(ranks, [*options.lost_nodes.split(), *(output.lost_nodes if has_failed else ())])
    lost = lost or (silent.lost if silent else [])
    failures = ordered(seen + (silent.killed if silent else []))
    failed = sorted(failure["rank"] for failure in failures)
    if options.exit_code and not ranks and (check := find_failed_check(options.attempt_dir)) is not None:
        return check
    if lost or options.slurm_reason == "NodeDown":
        return with_first("node_failure", [*lost, *failures], failed)
    if options.exit_code != 0 and any(not failure["is_about_others"] for failure in failures):
        return with_first("crashed", failures, failed)
    outside = find_outside(ended, options.exit_code, options.world_size, ranks) if ended is not None else None
    if options.terminated is not None:
        reason = "preempted" if was_preempted(options, output) else reason_of_termination(options)
        return outside if outside is not None and reason == "cancelled" else Finding(reason, None, failed)
    if options.exit_code == 0 and end_reasons(ranks) == {"finished"}:
        return Finding("finished", None, failed)
    if was_preempted(options, output) and any(rank["exit"].get("terminated") for rank in ranks.values()):
        return Finding("preempted", None, failed)
    if outside is not None:
        return outside
    if options.exit_code == 0:
        return Finding("stopped" if was_stopped(options, ranks) else "finished", None, failed)
    blamed = (
        find_stragglers(ranks, output) or find_early(ranks, failures) or find_hang(options.world_size, ranks, failures)
    )
    if blamed is not None:
        return blamed
    if silent and silent.unknown:
        return Finding("unknown", None, failed, evidence=[silent.unknown])
    if ranks and not failures and was_step_cancelled(output):
        return Finding("cancelled", None, failed, evidence=["somebody cancelled the step that ran the ranks"])
    if ranks and not failures:
        said = f"no rank failed before it was told to end: what started them ended with {options.exit_code}"
        return Finding("crashed", None, failed, evidence=[] if options.is_judged else [said])
    if failures and all(failure["signal"] != "SIGTERM" for failure in failures):
        return find_own_error(ranks, failures)
    return with_first("crashed" if ranks else "launch_failed", failures, failed)


def with_first(reason: str, failures: list[Record], failed: list[int]) -> Finding:
    """Return a finding whose first failure is the first of `failures`, if there is one."""
    first = next(iter(failures), None)
    return Finding(reason, first, failed, status_of=first)


def reason_of_termination(options: argparse.Namespace) -> str:
    """Return why the whole job got TERM."""
    if options.slurm_reason == "TimeLimit":
        return "time_limit"
    if options.slurm_restarts > options.restart_count:
        return "requeued"
    return "cancelled"


def limit_notes(options: argparse.Namespace, reason: str, ranks: Ranks) -> list[str]:
    """Return whether the ranks were told before the time limit ended them, and which did not stop."""
    if reason != "time_limit":
        return []
    if options.told_before_s is None:
        return ["nothing says that the ranks were told to save and stop before the time limit"]
    running = [number for number, rank in ranks.items() if rank["exit"].get("code") != 0]
    who = ranks_text(running) if 0 < len(running) < options.world_size else "the ranks"
    return [f"{who} did not stop, although told to {options.told_before_s:.0f} s before the time limit"]


def was_preempted(options: argparse.Namespace, output: JobOutput) -> bool:
    """Whether Slurm took the nodes for another job. With grace time, only the ranks get TERM, and may end well."""
    if any("DUE TO PREEMPTION" in line for line in output.lines):
        return True
    try:
        moment = time.mktime(time.strptime(options.preempted, "%Y-%m-%dT%H:%M:%S"))
    except ValueError:
        return False
    return moment >= float(options.started) - PREEMPTION_LAG_S  # that of an earlier start of the job stays in squeue


def was_stopped(options: argparse.Namespace, ranks: Ranks) -> bool:
    """Whether training ended before its last step because it was told to. Without events: whether it was told to."""
    ends = end_reasons(ranks)
    return bool(ends - {"finished"}) if ends else bool(options.stop_requested)


def end_reasons(ranks: Ranks) -> set[str | None]:
    """Return why training ended, as each rank recorded it."""
    return {rank["event"].get("reason") for rank in ranks.values() if rank["event"].get("kind") == "end"}


def exit_code_of(options: argparse.Namespace, finding: Finding) -> int | None:
    """Return the exit code of the rank that failed first: 128 + signal if a signal ended it, 1 if it was lost.

    Where no rank failed, it is that of srun or the launcher.
    """
    failure = finding.status_of
    if not options.exit_code or failure is None:
        return options.exit_code  # type: ignore[no-any-return]
    if failure["signal"] is not None:
        return 128 + getattr(signal, failure["signal"], 0)
    return int(failure["code"] or 1)


def rank_of(finding: Finding) -> int | None:
    return finding.first["rank"] if finding.first else None


def clock_notes(clocks: dict[str, Clock]) -> list[str]:
    """Return what is said of clocks that differ, in one sentence for those that are certain and one for the others."""
    notes = []
    for is_certain, text in (
        (True, "clocks differ from the other nodes': {}; the times of failures are corrected"),
        (
            False,
            "ranks started or ended at other times, or clocks differ: {}; the times of failures are not corrected",
        ),
    ):
        chosen = {node: clock for node, clock in sorted(clocks.items()) if clock.is_certain is is_certain}
        found = [f"{node} {clock.seconds:+.1f} s" for node, clock in chosen.items()]
        more = f" and {len(found) - MAX_CLOCKS} more" if len(found) > MAX_CLOCKS else ""
        notes += [text.format(", ".join(found[:MAX_CLOCKS]) + more)] if found else []
    return notes


def bundle_of(options: argparse.Namespace, finding: Finding) -> str | None:
    return newest_bundle(options.attempt_dir, options.started) if finding.reason == "hang" else None


def newest_bundle(attempt: Path, started: float) -> str | None:
    """Return the newest evidence that `bsl spy` stored during the attempt."""
    try:
        bundles = [(path.stat().st_mtime, str(path)) for path in (attempt.parent.parent / "spy").iterdir()]
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
    elif document["cause"]:
        text += f": {document['cause']}"
    stacks = "stacks of the hang" if document["reason"] == "hang" else "stacks"
    bundle = [f"{stacks}: {document['spy_bundle']}"] if document["spy_bundle"] else []
    return [text, *(f"bsl: {sentence}" for sentence in [*document["evidence"], *bundle])]


def say(descriptor: int, text: str) -> None:
    """Write a line at once. Output may be on the disk that is full, which must change neither code nor record."""
    try:
        os.write(descriptor, f"{' '.join(text.splitlines())}\n".encode())
    except OSError:
        return


def write_record(path: Path, record: Record) -> None:
    """Replace the file at `path` by `record`."""
    safe_files.write_file(path, json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
