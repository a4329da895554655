"""`bsl notify`: try the ways by which watchers tell people."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import click

from bigsci_launch.cli import console
from bigsci_launch.cli.options import JSON, RUN_REQUIRED
from bigsci_launch.errors import ConfigError, RunDirError

if TYPE_CHECKING:
    from bigsci_launch.runs.layout import RunDir
    from bigsci_launch.watch.notify.deliver import Delivery


@click.command(short_help="Send a test message by the ways of monitor.notify.", epilog="Example: bsl notify demo")
@RUN_REQUIRED
@click.option("--why", metavar="TEXT", default="a test of monitor.notify", help="Text of the message.")
@JSON
@click.pass_context
def notify(ctx: click.Context, run: str, why: str, as_json: bool) -> None:
    """Send a message by every way of `monitor.notify` in RUN's newest attempt, from this machine, and report the
    results.

    Exit code 1: one of them failed.
    """
    from bigsci_launch.procfs import user_name
    from bigsci_launch.runs.find import find_attempt, find_run
    from bigsci_launch.runs.ownership import owner_of
    from bigsci_launch.watch.notify.deliver import send_now
    from bigsci_launch.watch.notify.ways import read_ways

    found = find_run(run)
    attempt = find_attempt(found)
    if (owner := owner_of(found)) != os.geteuid():
        raise RunDirError(f"{found.path} belongs to {user_name(owner)}, and only {user_name(owner)} sends its messages")
    ways = read_ways(attempt)
    if not ways:
        raise ConfigError(
            f"run {found.name}: monitor.notify is not set for attempt {attempt.name}",
            hint="set monitor.notify in the run file, and submit it again",
        )
    deliveries = send_now(_test_notice(found, attempt.name, why), ways)
    if as_json:
        console.answer_json(_document(found, attempt.name, deliveries))
    else:
        for each in deliveries:
            came = "delivered" if each.ok else "not delivered"
            console.answer(f"{each.way:<8} {came}, after {each.seconds:.1f} s: {each.words}")
    ctx.exit(0 if all(each.ok for each in deliveries) else 1)


def _test_notice(run: RunDir, attempt: str, why: str) -> Any:
    import getpass
    import time

    from bigsci_launch.runs.find import run_argument
    from bigsci_launch.runs.watching.outbox import Notice

    now = time.time()
    return Notice(
        key=f"test {now}",
        what="test",
        sentence=why,
        run=str(run.path),
        who=getpass.getuser(),
        time=now,
        attempt=attempt,
        next=f"bsl status {run_argument(run)}",
    )


def _document(run: RunDir, attempt: str, deliveries: list[Delivery]) -> dict[str, Any]:
    return {
        "schema_version": 1,
        "run": {"name": run.name, "directory": str(run.path)},
        "attempt": attempt,
        "deliveries": [
            {"way": each.way, "ok": bool(each.ok), "words": each.words, "seconds": each.seconds} for each in deliveries
        ],
    }
