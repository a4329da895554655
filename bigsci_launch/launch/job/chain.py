"""Carries a run on from one start to the next.

The job script calls it twice. `gate`, at the beginning of a start: exits with 10 if the run is finished, with 11 if a
bound of the chain is reached, else with 0; in a chain by queue it also submits attempts until `links` of them wait.
`end`, when exit.json is written: asks Slurm to start the run again if it continues. The decision goes to `next.json` in
DIR, and to stderr.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from bigsci_launch.errors import RunDirError
from bigsci_launch.launch.job.say import say
from bigsci_launch.runs.chain.decision import OUTSIDE, ChainDecision, decide
from bigsci_launch.runs.chain.links import (
    HELD,
    NOTHING_QUEUED,
    Link,
    cancel_links,
    let_end,
    live_links,
    note_job,
    queue_next,
    requeue,
)
from bigsci_launch.runs.chain.records import ChainRecord, NextRecord, read_chain, write_next
from bigsci_launch.runs.chain.starts import mark_before, newest_checkpoint, note_start, read_starts, starts_before
from bigsci_launch.runs.layout import AttemptDir, read_record, write_json
from bigsci_launch.scheduler.command import CommandAnswer

GO, FINISHED, STOP = 0, 10, 11
CODES = {"continue": GO, "finished": FINISHED, "stop": STOP}


def main(moment: str, arguments: Sequence[str]) -> int:
    """Carry out `gate` or `end`, and return the exit code."""
    parser = argparse.ArgumentParser(description="Decide whether a run continues, and ask Slurm for it.")
    parser.add_argument("--attempt-dir", type=Path, required=True)
    parser.add_argument("--job-id", required=True)
    parser.add_argument("--restart-count", type=int, default=0)
    options = parser.parse_args(arguments)
    options.attempt = AttemptDir(options.attempt_dir)
    # Slurm ends the batch step when it requeues the job, and the answer must still be written.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    chain = read_chain(options.attempt)
    if chain is None:
        say(f"{options.attempt.chain} cannot be read")
        return 1
    return gate(options, chain) if moment == "gate" else end(options, chain)


def gate(options: argparse.Namespace, chain: ChainRecord) -> int:
    """Return the exit code at the beginning of a start: 0 if the ranks may start."""
    attempt: AttemptDir = options.attempt
    newest = newest_checkpoint(attempt.run)
    earlier = starts_before(attempt, chain, including=False)
    decision = None
    if earlier and not chain.only_preempted:
        starts = read_starts(earlier, chain, newest)
        decision = decide(chain, starts, time.time(), mark_before(earlier[0]))
    if decision is not None and decision.action != "continue":
        return refuse(options, chain, decision, len(earlier))
    note_start(attempt, newest, len(earlier) + 1)
    if chain.by == "queue":
        note_job(attempt.base, options.job_id)
        # The first start of a chain: `bsl submit` queues those behind it itself.
        keep_queued(options, chain, len(earlier) + 1, may_submit=bool(earlier))
    return GO


def refuse(options: argparse.Namespace, chain: ChainRecord, decision: ChainDecision, num_starts: int) -> int:
    """End a start before anything of it has begun, and whatever waits behind it."""
    from bigsci_launch.runs.ending.reason import end_record

    is_finished = decision.action == "finished"
    say(f"nothing is started: {decision.sentence}")
    write(options, chain, decision, num_starts, withdraw(options, chain))
    if chain.is_expedited and not is_finished:
        end_for_good(options)
    now = time.time()
    record = end_record(
        options.attempt,
        reason="finished" if is_finished else "not_started",
        exit_code=0 if is_finished else 1,
        evidence=[f"nothing was started: {decision.sentence}"],
        job_id=options.job_id,
        restart_count=options.restart_count,
        started=now,
        ended=now,
    )
    write_json(options.attempt.exit, record)
    return CODES[decision.action]


def end(options: argparse.Namespace, chain: ChainRecord) -> int:
    """Decide after a start has ended, and ask Slurm for the next one."""
    reason = read_record(options.attempt.exit).get("reason")
    comes_back = (not chain.only_preempted or reason == "preempted") and carry_on(options, chain)
    # What ended it from outside, Slurm knows better: it may be starting the job again already.
    if chain.is_expedited and not comes_back and reason not in OUTSIDE:
        end_for_good(options)
    return 0


def end_for_good(options: argparse.Namespace) -> None:
    """Have a job that fails end as failed. Slurm would hold it in the queue, because it may be started again."""
    answer = let_end(options.job_id)
    if not answer.is_done:
        say(f"Slurm may hold this job in the queue, if it fails: {answer.words}; `scancel {options.job_id}` ends it")


def carry_on(options: argparse.Namespace, chain: ChainRecord) -> bool:
    """Decide whether the run continues, and ask Slurm for it; return whether it starts this job again."""
    attempt: AttemptDir = options.attempt
    attempts = starts_before(attempt, chain, including=True)
    starts = read_starts(attempts, chain, newest_checkpoint(attempt.run))
    decision = decide(chain, starts, time.time(), mark_before(attempts[0]))
    say(f"{decision.action}: {decision.sentence}")
    if decision.action != "continue":
        write(options, chain, decision, len(starts), withdraw(options, chain))
    elif chain.by == "queue":
        keep_queued(options, chain, len(starts), may_submit=True, decision=decision)
    else:
        return come_back(options, chain, decision, starts[-1].reason, len(starts))
    return False


def come_back(
    options: argparse.Namespace, chain: ChainRecord, decision: ChainDecision, reason: str | None, number: int
) -> bool:
    """Have Slurm start this job again. The decision is written first: a requeue ends this program."""
    following = f"{options.attempt.base_name}.r{options.restart_count + 1}"
    write(options, chain, decision, number, CommandAnswer(True, ""), following, options.job_id, is_asked=False)
    answer = requeue(options.job_id, options.restart_count, reason)
    if answer.is_done:
        # Slurm refuses to change what a job leaves out while it runs.
        leave_out(options, options.job_id)
    else:
        say(f"the job could not be requeued: {answer.words}")
    write(options, chain, decision, number, answer, following, options.job_id)
    return answer.is_done


def keep_queued(
    options: argparse.Namespace,
    chain: ChainRecord,
    number: int,
    *,
    may_submit: bool,
    decision: ChainDecision | None = None,
) -> None:
    """Have `links` attempts queued behind this one, but no more than the chain may still start."""
    decision = decision or ChainDecision("continue", "it has just started", "unknown", None)
    links, wanted = live_links(options.attempt.run), min(chain.links, chain.max_starts - number)
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
            say(f"job {link.job_id} is held ({link.reason}): it starts when it is released")
        if link.job_id is not None:
            leave_out(options, link.job_id)
    answer = CommandAnswer(bool(links), refusal or ("" if links else NOTHING_QUEUED))
    following, job_id = (links[0].attempt, links[0].job_id) if links else (None, None)
    write(options, chain, decision, number, answer, following, job_id)


def top_up(options: argparse.Namespace, links: list[Link], wanted: int) -> str:
    """Add to `links` until as many are queued as wanted; return why that was not possible, or nothing."""
    while len(links) < wanted:
        unknown = [link.attempt for link in links if link.job_id is None]
        if unknown:
            return f"attempt {unknown[0]} is being submitted right now"
        link, answer = queue_next(options.attempt, [options.job_id, *(str(each.job_id) for each in links)])
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


def withdraw(options: argparse.Namespace, chain: ChainRecord) -> CommandAnswer:
    """End what waits behind this start, because the run does not continue."""
    answer = cancel_links(options.attempt.run) if chain.by == "queue" else None
    if answer is not None and not answer.is_done:
        say(f"the jobs queued behind this one could not be cancelled: {answer.words}; they will end by themselves")
    return answer or CommandAnswer(True, "")


def write(
    options: argparse.Namespace,
    chain: ChainRecord,
    decision: ChainDecision,
    num_starts: int,
    answer: CommandAnswer,
    following: str | None = None,
    job_id: str | None = None,
    is_asked: bool = True,
) -> None:
    """Write next.json. `asked` is False if Slurm refused, and None while it is being asked."""
    attempt: AttemptDir = options.attempt
    found = NextRecord(
        attempt=attempt.name,
        **decision._asdict(),
        by=chain.by,
        num_starts=num_starts,
        max_starts=chain.max_starts,
        next_attempt=following,
        next_job_id=job_id,
        asked=answer.is_done if is_asked else None,
        words=answer.words or None,
        decided=time.time(),
    )
    write_next(attempt, found)


def leave_out(options: argparse.Namespace, job_id: str) -> None:
    """Leave bad nodes out of a job that waits. A memory that cannot be read stops no chain."""
    from bigsci_launch.nodes.examine import leave_out_remembered

    try:
        for line in leave_out_remembered(options.attempt, job_id, os.environ.get("SLURM_CLUSTER_NAME")):
            say(line)
    except RunDirError as error:
        say(f"bad nodes cannot be left out: {error}")
