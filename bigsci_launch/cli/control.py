"""`bsl control`: ask a run to save, stop, restart, dump its stacks or end, also one that another user started."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from bigsci_launch.cli import console
from bigsci_launch.cli.options import JSON, RUN_REQUIRED

if TYPE_CHECKING:
    from bigsci_launch.runs.layout import RunDir

VERBS = ("save", "exit", "restart", "dump", "kill")


@click.command(
    short_help="Have a run save, stop, restart, dump its stacks or end.",
    epilog="Example: bsl control demo exit --why 'the loss is NaN'",
)
@RUN_REQUIRED
@click.argument("verb", required=False, type=click.Choice(VERBS))
@click.option("--why", metavar="TEXT", help="Reason, shown to the whole group.")
@click.option("--after-step", type=click.IntRange(1), metavar="N", help="For save, exit and restart: after this step.")
@JSON
def control(run: str, verb: str | None, why: str | None, after_step: int | None, as_json: bool) -> None:
    """Send a request to RUN, as any member of its group may. Without a verb: list the requests and their results.

    \b
    save     all ranks save at the end of a step
    exit     save and stop; the run does not continue automatically
    restart  save and stop; the chain continues with its next start
    dump     collect the stacks of all ranks
    kill     end the ranks at once: TERM, and KILL soon after

    The watcher of the run carries it out, also if the ranks hang: those that do not stop are examined and ended.
    """
    from bigsci_launch.runs.find import find_run

    found = find_run(run)
    if verb is None:
        if why is not None or after_step is not None:
            raise click.UsageError(f"give a verb: {', '.join(VERBS)}")
        _show(found, as_json)
        return
    if not why or not why.strip():
        raise click.UsageError(f"give the reason, for the others in the group: bsl control {run} {verb} --why TEXT")
    if after_step is not None and verb in ("dump", "kill"):
        raise click.UsageError(f"{verb} is done at once: leave out --after-step")
    _ask(found, verb, why.strip(), after_step, as_json)


def _show(run: RunDir, as_json: bool) -> None:
    from bigsci_launch.status.control import COLUMNS, control_document, read_all, rows

    known = read_all(run)
    if as_json:
        console.answer_json(control_document(run, known, time.time()))
    elif known:
        console.answer_table(COLUMNS, rows(known))
    else:
        console.talk(f"no requests to {run.name}")


def _ask(run: RunDir, verb: str, why: str, after_step: int | None, as_json: bool) -> None:
    from bigsci_launch.runs.control.ask import ask_run
    from bigsci_launch.status.control import control_document, just_asked, next_lines

    attempt = ask_run(run, verb, why, after_step)
    now = time.time()
    lines = next_lines(run, attempt, verb, after_step, now)
    if as_json:
        request = just_asked(attempt, verb, why, after_step, now)
        console.answer_json(control_document(run, [request], now, lines))
        return
    step = f" after step {after_step}" if after_step is not None else ""
    console.answer(f"requested of {run.name}, attempt {attempt.name}: {verb}{step}")
    for line in lines:
        console.talk(line)
