"""The program that a job script starts. Each attempt has it as one file, as it was at submission: `tools/bsl-job.pyz`.

    python -I -S bsl-job.pyz exit-reason --attempt-dir DIR --world-size 8 --started 1795226527 --exit-code 137

`exit-reason` prints the exit code of the training on stdout and the reason on stderr, and then writes `exit.json`: the
disk may be full. The code is that of the first rank that failed; srun's own is the highest of all ranks, including
those that it killed itself. Without `--exit-code` the attempt has not ended yet: the record is provisional, in case the
batch script is killed before. `bad-nodes` follows it: it remembers the nodes that the end has shown to be bad, and
leaves them out of the jobs of this run that wait, and of this one, if Slurm restarts it.

Each command imports what it needs and nothing else: they start while a job begins or ends. All of it is in the package,
and needs the standard library only.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from bigsci_launch.launch.job.say import write_line


def main(arguments: Sequence[str]) -> int:
    name, *rest = arguments or ("",)
    if name not in COMMANDS:
        write_line(2, f"usage: bsl-job.pyz {'|'.join(COMMANDS)} ...")
        return 2
    return COMMANDS[name](rest)


def exit_reason(arguments: Sequence[str]) -> int:
    from bigsci_launch.runs.ending.reason import SeenEnd, describe, summary
    from bigsci_launch.runs.layout import AttemptDir, write_json

    options = parse_end(arguments)
    attempt = AttemptDir(options.attempt_dir)
    end = SeenEnd(
        attempt=attempt,
        world_size=options.world_size,
        started=options.started,
        exit_code=options.exit_code,
        terminated=options.terminated,
        stop_requested=options.stop_requested,
        warned_before_s=options.warned_before_s,
        slurm_reason=options.slurm_reason,
        preempted=options.preempted,
        lost_nodes=tuple(options.lost_nodes.split()),
        is_requeued=options.slurm_restarts > options.restart_count,
    )
    document = {**describe(end), "job_id": options.job_id, "restart_count": options.restart_count}
    if document["exit_code"] is not None:
        write_line(1, str(document["exit_code"]))
    for line in summary(document):
        write_line(2, line)
    try:
        write_json(attempt.exit, document)
    except OSError as error:
        from bigsci_launch.runs.ending.job_output import RECORD

        write_line(2, f"exit_reason: cannot write {attempt.exit}: {error}")
        write_line(2, RECORD + json.dumps(document))
        return 1
    return 0


def bad_nodes(arguments: Sequence[str]) -> int:
    from bigsci_launch.errors import RunDirError
    from bigsci_launch.nodes.examine import examine, leave_out, leave_out_remembered, waiting_jobs
    from bigsci_launch.runs.layout import AttemptDir

    options = parse_end(arguments)
    attempt, cluster = AttemptDir(options.attempt_dir.absolute()), os.environ.get("SLURM_CLUSTER_NAME") or None
    try:
        new, lines = examine(attempt, cluster=cluster, down=options.lost_nodes.split())
        for job_id in waiting_jobs(options.job_id) if new and options.job_id else ():
            lines += leave_out(job_id, {entry.node for entry in new})
        if options.job_id and options.slurm_restarts > options.restart_count:
            lines += leave_out_remembered(attempt, options.job_id, cluster)
    except (OSError, ValueError, RunDirError) as error:
        write_line(2, f"bsl: bad nodes could not be recorded: {error}")
        return 1
    for line in lines:
        write_line(2, f"bsl: {line}")
    return 0


def parse_end(arguments: Sequence[str]) -> argparse.Namespace:
    """Return what the job script says of the end of an attempt."""
    formatter = partial(argparse.HelpFormatter, width=120)  # which would ask for the width at each start
    description = "Record why an attempt ended, and which nodes it has shown to be bad."
    parser = argparse.ArgumentParser(description=description, formatter_class=formatter)
    parser.add_argument("--attempt-dir", type=Path, required=True)
    parser.add_argument("--world-size", type=int, default=0)
    parser.add_argument("--started", type=float, default=0.0, help="seconds since the epoch")
    parser.add_argument("--exit-code", type=int, help="exit status of srun or the launcher; default: not known yet")
    parser.add_argument("--job-id")
    parser.add_argument("--restart-count", type=int, default=0)
    parser.add_argument("--terminated", type=float, help="when the script itself got TERM, seconds since the epoch")
    parser.add_argument("--stop-requested", action="store_true", help="ranks were asked to save and stop")
    parser.add_argument("--warned-before-s", type=float, help="how long before TERM, by a clock that never jumps")
    parser.add_argument("--slurm-reason", default="", help="squeue's reason when TERM came")
    parser.add_argument("--preempted", default="", help="squeue's PreemptTime; N/A or nothing if it is not known")
    parser.add_argument("--lost-nodes", default="", help="nodes that were down when TERM came, separated by blanks")
    parser.add_argument("--slurm-restarts", type=int, default=0, help="squeue's restart count when TERM came")
    return parser.parse_args(arguments)


def gate(arguments: Sequence[str]) -> int:
    from bigsci_launch.launch.job import chain

    return chain.main("gate", arguments)


def end(arguments: Sequence[str]) -> int:
    from bigsci_launch.launch.job import chain

    return chain.main("end", arguments)


def free_port(arguments: Sequence[str]) -> int:
    """Print the port that is asked for, or a free one, and on stderr why it is another one."""
    from bigsci_launch.launch.job.free_port import EPHEMERAL, candidates, port_range, reason, why_taken

    wanted = int(arguments[0])
    taken: list[tuple[int, str]] = []
    for port in candidates(wanted, port_range(EPHEMERAL)):
        why = why_taken(port)
        if why is None:
            if port != wanted:
                write_line(2, reason(wanted, port, taken))
            write_line(1, str(port))
            return 0
        taken.append((port, why))
    write_line(2, f"no port is free: {reason(wanted, wanted, taken)}")
    return 1


def check_verdict(arguments: Sequence[str]) -> int:
    from bigsci_launch.nodes import verdict

    return verdict.main(arguments)


def keep_watch(arguments: Sequence[str]) -> int:
    from bigsci_launch.launch.job import keep_watch

    return keep_watch.main(Path(sys.argv[0]).absolute().parent, arguments)


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "exit-reason": exit_reason,
    "bad-nodes": bad_nodes,
    "gate": gate,
    "end": end,
    "free-port": free_port,
    "check-verdict": check_verdict,
    "keep-watch": keep_watch,
}
