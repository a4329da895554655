"""Answers why a run, a job that `bsl` did not submit, or whatever printed some logs ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from bigsci_launch.endings.conclude import conclude
from bigsci_launch.endings.ending import Culprit, named_by, sentence_of
from bigsci_launch.endings.lines import Speaker
from bigsci_launch.endings.statements import LAUNCHERS, Statement, read_statements
from bigsci_launch.endings.words import read_words
from bigsci_launch.errors import EvidenceError, SlurmError
from bigsci_launch.runs.ending.failures import failure_text
from bigsci_launch.runs.layout import AttemptDir
from bigsci_launch.scheduler.job import JobInfo
from bigsci_launch.scheduler.slurm import query_outputs
from bigsci_launch.why.answer import Why, why_of
from bigsci_launch.why.sources import Material, files_of, read_material

SLURM = "Slurm"
ABOUT_FIRST = 4


def why_logs(paths: Sequence[Path]) -> Why:
    """Return why the job ended that printed these logs.

    Raises:
        EvidenceError: a path has none.
    """
    material = read_material(paths)
    ending = conclude(material.statements, material.ranks)
    return why_of(ending, ", ".join(map(str, paths)), material.files, material.notes)


def why_job(job: JobInfo) -> Why:
    """Return why a job ended that `bsl` did not submit: what Slurm knows of it, and what it printed. One that has not
    ended may have printed a failure too."""
    about = f"job {job.job_id}"
    material, notes = _output_of(job)
    if job.state.is_active:
        return _why_not_over(job, about, material)
    of_slurm = read_statements(f"Slurm: state={job.raw_state.split(' ')[0]}", SLURM, Speaker(), read_words())
    ending = conclude((*material.statements, *of_slurm.statements), material.ranks)
    return why_of(ending, about, (SLURM, *material.files), (*notes, *material.notes))


def _why_not_over(job: JobInfo, about: str, material: Material) -> Why:
    said, read = f"it has not ended: {job.state.value}", (SLURM, *material.files)
    ending, look = conclude(material.statements, material.ranks), f"while it hangs: `bsl spy --jobid {job.job_id}`"
    if ending.kind in ("unknown", "finished"):
        return Why(about, "running", said, "none", next=look, read=read)
    found = why_of(ending, about, read, material.notes)
    return replace(found, kind="running", sentence=f"{said}; its output: {ending.sentence}", next=look)


def _output_of(job: JobInfo) -> tuple[Material, tuple[str, ...]]:
    """Return what the job printed, and why that could not be read: Slurm forgets to where, minutes after the end."""
    paths, usual = [], Path(f"slurm-{job.job_id}.out")
    with suppress(SlurmError):
        paths = query_outputs(job.number)
    if not paths and not usual.is_file():
        return Material(), ("Slurm no longer says to where the job printed: `bsl why` takes the file itself",)
    try:
        return read_material([path for path in paths if path.exists()] or paths or [usual]), ()
    except EvidenceError as error:
        return Material(), (error.message,)


def why_run(
    name: str, attempt: AttemptDir, ended: dict[str, Any], advice: str | None, shown: Sequence[str] = ()
) -> Why:
    """Return why an attempt of a run ended: what `exit.json` says, and the lines of its logs that show it.

    `shown` is what the rings of its ranks show.
    """
    failure = ended.get("first_failure") or {}
    material = _logs_of(attempt)
    culprit = _meant(failure, material.statements)
    first = failure_text(failure) if failure else "none" if ended["reason"] in ("finished", "stopped") else "not known"
    rank = culprit.ranks[0] if culprit.ranks else None
    if rank != failure.get("rank"):
        first = f"{culprit}: {failure.get('error')}"
    sentence = ended.get("cause") or (failure_text(failure) if failure else "")
    said = [str(each) for each in ended.get("evidence") or []]
    return Why(
        about=f"run {name}",
        kind=kind_of(ended),
        sentence=str(sentence or next(iter(said), "") or ended["reason"]),
        first=first,
        culprit=culprit,
        evidence=tuple(_about(material.statements, rank)),
        notes=(*said, *shown, *material.notes),
        next=advice or "",
        read=material.files,
    )


def _meant(failure: Mapping[str, Any], statements: Sequence[Statement]) -> Culprit:
    """Return the rank of a failure: if that is the task of a launcher, the rank that the launcher names."""
    rank, node = failure.get("rank"), failure.get("node")
    own = Culprit((rank,) if isinstance(rank, int) else (), node=node if isinstance(node, str) else None)
    for each in statements:
        if each.word.speaker == "witness" and each.named_ranks and each.word.name.startswith(LAUNCHERS):
            culprit = named_by(each)
            if sentence_of(each, culprit) == failure.get("error"):
                return replace(culprit, node=culprit.node or own.node)
    return own


def kind_of(ended: dict[str, Any]) -> str:
    """Return why an attempt ended; of one that crashed, what the words of its first failure say."""
    reason, failure = str(ended["reason"]), ended.get("first_failure") or {}
    said = str(failure.get("error") or failure.get("last_words") or "")
    found = read_words().find(said) if reason == "crashed" else None
    return found.word.kind if found is not None and found.word.speaker == "cause" else reason


def _logs_of(attempt: AttemptDir) -> Material:
    material = Material()
    for path in (attempt.logs, attempt.job_output):
        with suppress(EvidenceError):
            files_of(path)
            material += read_material([path])
    return material


def _about(statements: Sequence[Statement], rank: int | None) -> list[Statement]:
    """Return the lines about a rank: its own, and those that name it; of no rank, those of the job's output."""
    told = [each for each in statements if each.word.speaker not in ("echo", "register")]
    own = [each for each in told if rank is not None and (each.by == rank or rank in (*each.named_ranks, *each.tasks))]
    return (own or [each for each in told if each.by is None] or told)[:ABOUT_FIRST]
