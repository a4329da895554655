"""`bsl spy`: what every rank of a job is doing, and which of them the others wait for."""

from __future__ import annotations

import gc
import sys
import time
from dataclasses import replace
from importlib import import_module
from itertools import groupby
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

import click

from bigsci_launch.cli import completion, console
from bigsci_launch.errors import BslError, CollectError, ConfigError
from bigsci_launch.topology import Topology
from bigsci_launch.topology.naming import name_ranks

if TYPE_CHECKING:
    from bigsci_launch.spy.answer import SpyAnswer
    from bigsci_launch.spy.evidence.bundle import Bundle
    from bigsci_launch.spy.evidence.ranks import Evidence
    from bigsci_launch.spy.judge.conclusion import Conclusion
    from bigsci_launch.spy.judge.verdict import Judgment
    from bigsci_launch.spy.look.target import Target

EXIT_FOUND, EXIT_INCOMPLETE = 1, 4
OF_LOOKS = ("settle", "native", "flight_recorder", "output", "html", "why")
"""Options that need ranks to look at."""
NO_FAILURE = ("finished", "stopped", "cancelled", "preempted", "requeued", "time_limit", "unknown", "running")
"""Why a run ended, where none of its ranks hung or crashed."""
LOOKS_AT_PROCESSES = "--settle, --native, --step and --flight-recorder look at processes, --bundle at files"
STYLES: dict[str, dict[str, Any]] = {
    "bad": {"fg": "red"},
    "good": {"fg": "green"},
    "head": {"bold": True},
    "muted": {"dim": True},
}
# The largest class is dim, so that the odd ranks catch the eye.
MARK_STYLES: dict[str, dict[str, Any]] = {
    "A": {"dim": True},
    "B": {"fg": "blue"},
    "C": {"fg": "yellow"},
    "D": {"fg": "green"},
    "E": {"fg": "magenta"},
    "F": {"fg": "cyan"},
    "!": {"fg": "red", "bold": True, "reverse": True},
    "?": {"fg": "red"},
    "x": {"fg": "red", "dim": True},
}


@click.command(
    short_help="Find the rank that a hung job waits for.",
    epilog="Example: bsl spy --jobid 1234 --topology tp=4,pp=12,dp=8",
)
@click.argument("words", nargs=-1, metavar="[RUN]", shell_complete=completion.runs)
@click.option(
    "--jobid",
    metavar="ID",
    shell_complete=completion.jobs,
    help="Look at this Slurm job; bsl need not have submitted it.",
)
@click.option(
    "--step", metavar="STEP", help="Step of the job to look at, as `squeue --steps` prints it; default: the training's."
)
@click.option("--local", is_flag=True, help="Look at this machine: the local run, or the launcher of --pid.")
@click.option("--pid", type=click.IntRange(min=1), help="Launcher whose descendants are the ranks, such as torchrun.")
@click.option(
    "--bundle",
    type=click.Path(path_type=Path),
    metavar="PATH...",
    help="Analyse evidence on disk: a bundle, stacks of py-spy and others, flight recorder dumps, output of ncclras.",
)
@click.option(
    "--topology",
    metavar="tp=2,pp=2,dp=2",
    help="Sizes of the axes (tp, cp, ep, pp, dp), for a job that bsl did not submit.",
)
@click.option(
    "--settle",
    type=click.FloatRange(0, 600),
    metavar="SECONDS",
    help="Look for this long before calling anything a hang.",
)
@click.option("--native", is_flag=True, help="Read native stacks too; this pauses each process for a moment.")
@click.option(
    "--flight-recorder",
    type=click.Choice(["fork"]),
    help="Get torch's flight recorder from ranks that do not offer it: each forks once. 64-bit Linux on x86_64 only.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    help="Folder for the evidence; default: a new one in RUN, or in ~/.local/state/bsl/spy.",
)
@click.option("--html", type=click.Path(path_type=Path), metavar="FILE", help="Write an interactive HTML page.")
@click.option("--json", "as_json", is_flag=True, help="Print the answer as one JSON document.")
@click.option("--why", is_flag=True, help="Print how every rule of the verdict was weighed.")
@click.option("--exit-code", is_flag=True, help="Exit with 1 if a hang or a crash is found.")
def spy(
    words: tuple[str, ...],
    jobid: str | None,
    step: str | None,
    local: bool,
    pid: int | None,
    bundle: Path | None,
    topology: str | None,
    settle: float | None,
    native: bool,
    flight_recorder: str | None,
    output: Path | None,
    html: Path | None,
    as_json: bool,
    why: bool,
    exit_code: bool,
) -> None:
    """Read the stacks of all ranks of RUN (a name or a directory; default: the run submitted last) and report which
    ranks wait for which.

    Nothing needs to be prepared, and nothing is paused unless you ask for it. The evidence is stored, and --bundle
    analyses it again offline. If RUN has ended, the answer is that of `bsl why RUN`.
    """
    from bigsci_launch.spy.look.target import LookOptions

    _require_one_place(words, jobid, local or pid is not None, bundle)
    axes, stored, unstored = parse_topology(topology), bundle, None
    if bundle is not None:
        if native or flight_recorder or settle is not None or step is not None:
            raise click.UsageError(LOOKS_AT_PROCESSES)
        answer = _judge_files([bundle, *map(Path, words)], axes)
    else:
        target = _find_target(words[0] if words else None, jobid, local, pid, step)
        if target.is_over:
            sys.exit(_say_why_it_ended(target, as_json, exit_code))
        look = LookOptions(native, flight_recorder, settle or 0.0, step)
        answer, stored, unstored = _look(target.with_options(look, axes), axes, output)
    _show_all(answer, bundle, as_json, why, stored, html)
    if bundle is None and not as_json:
        _say_what_was_printed(target, answer.evidence)
    if unstored is not None:
        raise unstored
    sys.exit(_exit_code(answer, exit_code))


def _judge_files(places: list[Path], axes: str | None) -> SpyAnswer:
    from bigsci_launch.spy.evidence.bundle import damage_named
    from bigsci_launch.spy.inputs.gather import open_evidence

    with damage_named(places[0]):
        return _judge(open_evidence(places), axes)


def _show_all(
    answer: SpyAnswer, bundle: Path | None, as_json: bool, why: bool, stored: Path | None, html: Path | None
) -> None:
    from bigsci_launch.spy.evidence.bundle import damage_named

    with damage_named(bundle):
        _show(answer.evidence, answer.judgment, as_json, why)
        if html is not None:
            _write_page(answer.evidence, answer.conclusion, stored, html)


def _say_why_it_ended(target: Target, as_json: bool, reports_failures: bool) -> int:
    """Answer for a run that has ended as `bsl why` does; return the exit code."""
    from bigsci_launch.cli.why import show, why_of_run

    assert target.run is not None and target.attempt is not None
    given = click.get_current_context().params
    if options := [f"--{name.replace('_', '-')}" for name in OF_LOOKS if given[name]]:
        raise click.UsageError(f"run {target.run.name} has ended: {', '.join(options)} cannot be used with it")
    found = why_of_run(target.run, target.attempt.name)
    show(found, as_json)
    return EXIT_FOUND if reports_failures and found.kind not in NO_FAILURE else 0


def _exit_code(answer: SpyAnswer, reports_failures: bool) -> int:
    if reports_failures and answer.conclusion.state.is_failure:
        return EXIT_FOUND
    return EXIT_INCOMPLETE if answer.evidence.nodes_silent else 0


def _require_one_place(words: tuple[str, ...], jobid: str | None, here: bool, bundle: Path | None) -> None:
    if bundle is None and len(words) > 1:
        raise click.UsageError(f"one RUN at a time: {' '.join(words)}")
    if sum((bool(words) and bundle is None, jobid is not None, here, bundle is not None)) > 1:
        raise click.UsageError("give only one of RUN, --jobid, --local/--pid and --bundle")


def parse_topology(text: str | None) -> str | None:
    try:
        return str(Topology.parse(text)) if text is not None else None
    except ValueError as error:
        raise ConfigError(f"--topology: {error}", hint="for example --topology tp=4,pp=12,dp=8") from error


def _judge(found: Bundle, axes: str | None) -> SpyAnswer:
    from bigsci_launch.spy.answer import answer_from

    answer = answer_from(found, axes)
    for problem in answer.problems:
        console.talk(f"warning: {problem}")
    return answer


def _find_target(run: str | None, jobid: str | None, local: bool, pid: int | None, step: str | None) -> Target:
    from bigsci_launch.spy.look.target import find_local_target, find_target, target_of_process

    named = target_of_process(pid) if pid is not None else None
    target = named or (find_local_target() if local else find_target(run, jobid))
    if step is not None and not target.job_id:
        raise click.UsageError("--step selects a step of a running Slurm job")
    return target


def _look(target: Target, axes: str | None, output: Path | None) -> tuple[SpyAnswer, Path | None, BslError | None]:
    """Look at the ranks, judge what they show, and store it. Return the answer, and where it is stored or why not."""
    # Most of the time is the node agent's: what judges is loaded while it looks.
    loading = Thread(target=import_module, args=("bigsci_launch.spy.answer",))
    gc.disable()  # what is loaded stays: to search it for garbage is a tenth of the CPU time of a look
    loading.start()
    try:
        found = _collect(target)
    finally:
        loading.join()
        gc.enable()
    if target.request["flight_recorder"]:
        _warn_of_missing_recorders(found)
    answer = _judge(found, axes)
    _mention_dumps(answer.evidence, target)
    return answer, *_store(_with_topology(found, axes), answer, target, output)


def _collect(target: Target) -> Bundle:
    from bigsci_launch.spy.look.collect import collect

    if settle_s := target.request["settle_s"]:
        with console.seconds_progress("spy: looking", settle_s):
            return collect(target)
    if not target.job_id:
        return collect(target)
    with console.progress("spy: nodes", len(target.nodes)) as report_progress:
        return collect(target, report_progress)


def _warn_of_missing_recorders(found: Bundle) -> None:
    from bigsci_launch.spy.look.collect import missing_recorders

    for why, ranks in missing_recorders(found).items():
        console.talk(f"warning: flight recorder of {name_ranks(ranks)}: {why}")


def _mention_dumps(evidence: Evidence, target: Target) -> None:
    """Say where dumps of torch's recorder are: its watchdog ends a rank once it has written one."""
    prefix = target.attempt.recorder_dumps if target.attempt else None
    if (
        prefix is not None
        and any(seen.is_gone for seen in evidence.ranks)
        and any(prefix.parent.glob(f"{prefix.name}*"))
    ):
        console.talk(f"ranks have dumped torch's flight recorder: bsl spy --bundle {prefix}*")


def _say_what_was_printed(target: Target, evidence: Evidence) -> None:
    """Say what a Slurm job that `bsl` did not submit has printed about ranks that are gone: nothing else records it."""
    from bigsci_launch.scheduler.slurm import query_job
    from bigsci_launch.why.find import why_job

    if (
        target.run is not None
        or not target.job_id
        or not any(seen.is_gone or not seen.samples for seen in evidence.ranks)
    ):
        return
    found = why_job(query_job(target.job_id))
    files = f" ({', '.join(found.read[1:])})" if found.read[1:] else ""
    silent = "; its output says nothing about how a rank ended" if files else "; where it prints is not known"
    console.answer_wrapped([f"{found.about}: {found.sentence}{silent if found.first == 'none' else ''}{files}"])
    console.answer(f"next: bsl why {target.job_id}")


def _with_topology(found: Bundle, axes: str | None) -> Bundle:
    return replace(found, collection={**found.collection, "topology": axes}) if axes else found


def _store(
    found: Bundle, answer: SpyAnswer, target: Target, output: Path | None
) -> tuple[Path | None, BslError | None]:
    """Store the evidence, and return where. Return the error if `output` cannot be written; if a default folder cannot,
    only warn."""
    from bigsci_launch.spy.answer import store_evidence

    try:
        folder = output or target.evidence_folder(time.time())
        store_evidence(folder, found, answer)
    except CollectError as error:
        if output is not None:
            return None, error
        console.talk(f"warning: {error.message}; {error.hint}")
        return None, None
    console.talk(f"evidence: {folder}")
    return folder, None


def _write_page(evidence: Evidence, conclusion: Conclusion, stored: Path | None, path: Path) -> None:
    from bigsci_launch.pages import write_page
    from bigsci_launch.spy.show.page import render_page

    write_page(path, render_page(evidence, conclusion, stored))
    console.talk(f"page: {path}")


def _show(evidence: Evidence, judgment: Judgment, as_json: bool, why: bool) -> None:
    from bigsci_launch.spy.show.document import rules_document, to_document
    from bigsci_launch.spy.show.report import to_lines
    from bigsci_launch.spy.show.why import to_why_lines

    conclusion = judgment.conclusion
    if as_json:
        console.answer_json(to_document(evidence, conclusion) | ({"rules": rules_document(judgment)} if why else {}))
        return
    for line in to_lines(evidence, conclusion, console.terminal_width()):
        if line.role == "grid":
            console.answer_spans(_colour_marks(line.text))
        else:
            console.answer_styled(line.text, STYLES.get(line.role, {}))
    for text in to_why_lines(judgment) if why else ():
        console.answer_styled(text, {})


def _colour_marks(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Split a row of the grid into spans: its name dim, each letter in the colour of its meaning."""
    name, gap, marks = text.partition(text.split()[0] + " ")
    parts = (("".join(equal), MARK_STYLES.get(mark, {})) for mark, equal in groupby(marks))
    return [(name + gap, {"dim": True}), *parts]
