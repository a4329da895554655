"""Carries a run on from one start to the next. Stand-alone, together with the other chain_*.py files: standard library
only, Python 3.8 or newer.

    python -I -S chain.py gate --attempt-dir DIR --job-id 12 --restart-count 0
    python -I -S chain.py end  --attempt-dir DIR --job-id 12 --restart-count 0

The job script calls it twice. `gate`, at the beginning of a start: exits with 10 if the run is finished, with 11 if a
bound of the chain is reached, else with 0; in a chain by queue it also submits attempts until `links` of them wait.
`end`, when exit.json is written: asks Slurm to start the run again if it continues. The decision goes to `next.json` in
DIR, and to stderr.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if "__file__" in globals():
    sys.path.insert(0, str(Path(__file__).resolve().parent))  # -I leaves it out
sys.dont_write_bytecode = True  # nothing is left in the attempt's tools

from bad_nodes import leave_out_remembered
from chain_decision import Decision, decide
from chain_records import (
    base_of,
    mark_before,
    newest_checkpoint,
    note_start,
    read_chain,
    read_json,
    read_starts,
    starts_before,
    write_record,
)
from chain_slurm import HELD, Answer, Link, cancel_links, live_links, note_job, queue_next, requeue

if TYPE_CHECKING:
    from typing import Any

    from chain_decision import Chain

SCHEMA_VERSION = 1
GO, FINISHED, STOP = 0, 10, 11
CODES = {"continue": GO, "finished": FINISHED, "stop": STOP}
NOTHING_QUEUED = "no job is queued behind it"


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    # Slurm ends the batch step when it requeues the job, and the answer must still be written.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return gate(options) if options.moment == "gate" else end(options)


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Decide whether a run continues, and ask Slurm for it.")
    parser.add_argument("moment", choices=("gate", "end"))
    parser.add_argument("--attempt-dir", type=Path, required=True)
    parser.add_argument("--job-id", required=True)
    parser.add_argument("--restart-count", type=int, default=0)
    return parser.parse_args(arguments)


def gate(options: argparse.Namespace) -> int:
    """Return the exit code at the beginning of a start: 0 if the ranks may start."""
    attempt, chain = options.attempt_dir, read_chain(options.attempt_dir)
    newest = newest_checkpoint(attempt.parent.parent)
    earlier = starts_before(attempt, including=False)
    decision = None
    if earlier and not chain.only_preempted:
        starts = read_starts(earlier, chain, newest)
        decision = decide(chain, starts, time.time(), mark_before(earlier[0]))
    if decision is not None and decision.action != "continue":
        return refuse(options, chain, decision, len(earlier))
    note_start(attempt, newest, len(earlier) + 1)
    if chain.by == "queue":
        note_job(base_of(attempt), options.job_id)
        # The first start of a chain: `bsl submit` queues those behind it itself.
        keep_queued(options, chain, len(earlier) + 1, may_submit=bool(earlier))
    return GO


def refuse(options: argparse.Namespace, chain: Chain, decision: Decision, num_starts: int) -> int:
    """End a start before anything of it has begun, and whatever waits behind it."""
    is_finished = decision.action == "finished"
    say(f"nothing is started: {decision.sentence}")
    write_next(options, chain, decision, num_starts, withdraw(options, chain))
    now = time.time()
    record = {
        "schema_version": SCHEMA_VERSION,
        "reason": "finished" if is_finished else "not_started",
        "exit_code": 0 if is_finished else 1,
        "first_failure": None,
        "failed_ranks": [],
        "suspects": [],
        "collectives": [],
        "evidence": [f"nothing was started: {decision.sentence}"],
        "cause": None,
        "clocks": [],
        "spy_bundle": None,
        "world_size": None,
        "num_started": 0,
        "slurm_reason": None,
        "attempt": options.attempt_dir.name,
        "job_id": options.job_id,
        "restart_count": options.restart_count,
        "started": now,
        "ended": now,
    }
    write_record(options.attempt_dir / "exit.json", record)
    return CODES[decision.action]


def end(options: argparse.Namespace) -> int:
    """Decide after a start has ended, and ask Slurm for the next one."""
    attempt, chain = options.attempt_dir, read_chain(options.attempt_dir)
    if chain.only_preempted and read_json(attempt / "exit.json").get("reason") != "preempted":
        return 0
    paths = starts_before(attempt, including=True)
    starts = read_starts(paths, chain, newest_checkpoint(attempt.parent.parent))
    decision = decide(chain, starts, time.time(), mark_before(paths[0]))
    say(f"{decision.action}: {decision.sentence}")
    if decision.action != "continue":
        write_next(options, chain, decision, len(starts), withdraw(options, chain))
    elif chain.by == "queue":
        keep_queued(options, chain, len(starts), may_submit=True, decision=decision)
    else:
        come_back(options, chain, decision, starts[-1].reason, len(starts))
    return 0


def come_back(options: argparse.Namespace, chain: Chain, decision: Decision, reason: str | None, number: int) -> None:
    """Have Slurm start this job again. The decision is written first: a requeue ends this program."""
    following = f"{options.attempt_dir.name.partition('.')[0]}.r{options.restart_count + 1}"
    write_next(options, chain, decision, number, Answer(True, ""), following, options.job_id, is_asked=None)
    answer = requeue(options.job_id, options.restart_count, reason)
    if answer.is_done:
        # Slurm refuses to change what a job leaves out while it runs.
        leave_out_remembered(options.attempt_dir, options.job_id)
    else:
        say(f"the job could not be requeued: {answer.words}")
    write_next(options, chain, decision, number, answer, following, options.job_id)


def keep_queued(
    options: argparse.Namespace, chain: Chain, number: int, *, may_submit: bool, decision: Decision | None = None
) -> None:
    """Have `links` attempts queued behind this one, but no more than the chain may still start."""
    decision = decision or Decision("continue", "it has just started", "unknown", None)
    links, wanted = live_links(options.attempt_dir.parent.parent), min(chain.links, chain.max_starts - number)
    refusal = top_up(options, links, wanted) if may_submit else ""
    if links:
        say(f"{links_text(links)} queued behind this one{refused_text(len(links), wanted, refusal)}")
    elif number >= chain.max_starts:
        refusal = f"this is start {number}, and slurm.chain.max_starts is {chain.max_starts}"
        say(f"no job is queued behind this one: {refusal}")
    elif may_submit:
        say(f"no job is queued behind this one: {refusal}; `bsl submit` queues one")
    for link in links:
        if link.reason in HELD:
            say(f"job {link.job_id} is held ({link.reason}): it starts when somebody releases it")
        if link.job_id is not None:
            leave_out_remembered(options.attempt_dir, link.job_id)
    answer = Answer(bool(links), refusal or ("" if links else NOTHING_QUEUED))
    following, job_id = (links[0].attempt, links[0].job_id) if links else (None, None)
    write_next(options, chain, decision, number, answer, following, job_id)


def top_up(options: argparse.Namespace, links: list[Link], wanted: int) -> str:
    """Add to `links` until as many are queued as wanted; return why that was not possible, or nothing."""
    while len(links) < wanted:
        unknown = [link.attempt for link in links if link.job_id is None]
        if unknown:
            return f"attempt {unknown[0]} is being submitted right now"
        link, answer = queue_next(options.attempt_dir, [options.job_id, *(str(each.job_id) for each in links)])
        if not answer.is_done:
            return answer.words
        links.append(link)
    return ""


def links_text(links: list[Link]) -> str:
    """`jobs 13, 14 (attempts 0002, 0003) are`."""
    jobs = ", ".join(link.job_id or "?" for link in links)
    names = ", ".join(link.attempt for link in links)
    return f"jobs {jobs} (attempts {names}) are" if len(links) > 1 else f"job {jobs} (attempt {names}) is"


def refused_text(number: int, wanted: int, refusal: str) -> str:
    return f", {number} of {wanted}: {refusal}" if refusal else ""


def withdraw(options: argparse.Namespace, chain: Chain) -> Answer:
    """End what waits behind this start, because the run does not continue."""
    answer = cancel_links(options.attempt_dir.parent.parent) if chain.by == "queue" else None
    if answer is not None and not answer.is_done:
        say(f"what is queued behind this one could not be ended: {answer.words}; it will end by itself")
    return answer or Answer(True, "")


def write_next(
    options: argparse.Namespace,
    chain: Chain,
    decision: Decision,
    num_starts: int,
    answer: Answer,
    following: str | None = None,
    job_id: str | None = None,
    is_asked: bool | None = True,
) -> None:
    """Write next.json. `asked` is false if Slurm refused, and null while it is being asked."""
    record: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "attempt": options.attempt_dir.name,
        **decision.as_dict(),
        "by": chain.by,
        "num_starts": num_starts,
        "max_starts": chain.max_starts,
        "next_attempt": following,
        "next_job_id": job_id,
        "asked": answer.is_done if is_asked else None,
        "words": answer.words or None,
        "decided": time.time(),
    }
    write_record(options.attempt_dir / "next.json", record)


def say(text: str) -> None:
    """Write a line for job.out, which may be on a full disk."""
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    try:
        os.write(2, f"{stamp} bsl: {' '.join(text.splitlines())}\n".encode())
    except OSError:
        return


if __name__ == "__main__":
    sys.exit(main())
