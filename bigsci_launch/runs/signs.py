"""Signs of life of ranks: their records, when their logs were last written, and the lines that they print for a step.

Only records say what a rank does. `bsl train` writes them; other programs have their logs alone, and many ranks of a
healthy program print nothing. So the silence of one log means nothing; that of all logs does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from bigsci_launch.errors import RunDirError
from bigsci_launch.runs.events import read_last_events, read_tail
from bigsci_launch.runs.generations.read import read_generations
from bigsci_launch.runs.generations.records import Generations
from bigsci_launch.runs.layout import AttemptDir, rank_files, read_json
from bigsci_launch.runs.log_reader import STAMPED
from bigsci_launch.runs.step_forms import forms_of, printed_text
from bigsci_launch.scheduler.job import NodeInfo
from bigsci_launch.step_lines import StepLine, StepReader
from bigsci_launch.topology import Coordinate
from bigsci_launch.units import CLOCK_SLACK_S, age_s

TAIL_BYTES = 16384
MAX_LOGS_READ = 16
"""Logs that are searched for a step, the newest first: one rank of a program prints it."""
FRESH_S = 120.0
"""A rank with heartbeats whose newest sign is older than this is lost, if its node does not answer Slurm either."""
LATE_S = 600.0
"""A record that is older than its file by this was not kept waiting by the file system: its clock is wrong."""
ALIVE_S = 10.0
"""Slurm finds that a node does not answer after about this long: an older sign of life may be from before."""

Events = dict[int, list[dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class RankSign:
    """The newest sign of life of a rank: when (seconds since the epoch), in which phase, at which step.

    `phase` is None for a rank that has written no heartbeat; `time` is then its newest record, or its start. `printed`
    is when its log was last written; None if it has none. `clock_differs`: the rank's clock is not that of the file
    system, so `time` is when its record was written there.
    """

    rank: int
    node: str
    coordinate: str
    time: float
    phase: str | None
    step: int | None
    has_ended: bool
    printed: float | None = None
    clock_differs: bool = False

    @property
    def newest(self) -> float:
        """The time of the newest sign of any kind."""
        return max(self.time, self.printed or 0.0)


@dataclass(frozen=True, slots=True)
class LastOutput:
    """When anything was last printed, in seconds since the epoch; `sign` is the rank's, None for the batch script's."""

    time: float
    sign: RankSign | None


@dataclass(frozen=True, slots=True)
class StepRecord:
    """The newest optimizer step that was reported. Times in seconds.

    `source` is `record`, or `log` for a line that a program printed. `every_s` is the time between two such lines; None
    if it is not known.
    """

    step: int
    time: float
    seconds: float | None
    tflops: float | None
    loss: float | None
    consumed_samples: int | None
    source: Literal["record", "log"] = "record"
    total_steps: int | None = None
    every_s: float | None = None
    clock_differs: bool = False
    """Whether `time` is by a clock that is known to be wrong."""
    stride: int | None = None
    """Steps between two lines that were printed; None for records, and if there is only one."""
    planned_s: float | None = None
    """How long the step was planned to take; None if it was not planned."""


@dataclass(frozen=True, slots=True)
class UnreachableNode:
    """A node of a running job that does not answer Slurm, and what its ranks say about it.

    `fate` is `lost`, `alive` if only its slurmd does not answer, or `unknown` if its ranks show neither.
    `sign_age_s` is the age of their newest sign; None if they left none.
    """

    node: NodeInfo
    fate: Literal["lost", "alive", "unknown"]
    sign_age_s: float | None


def read_rank_events(attempt: AttemptDir) -> Events:
    """Return the newest records of every rank that has written any, oldest first."""
    files = rank_files(attempt.events, ".jsonl")
    return {rank: read_last_events(path, TAIL_BYTES) for rank, path in files.items()}


def read_signs(attempt: AttemptDir, events: Events) -> list[RankSign]:
    """Return the newest sign of life of every started rank; its start, if it has left nothing else.

    With `survive`, ranks that only earlier generations had are left out.
    """
    signs, logs, ended = [], rank_files(attempt.logs, ".log"), _ended_ranks(attempt)
    generations = read_generations(attempt)
    for rank, path in rank_files(attempt.pids, ".json").items():
        if generations is not None and not generations.has(rank):
            continue
        try:
            printed = written(logs[rank]) if rank in logs else None
            recorded = written(attempt.event_file(rank)) if events.get(rank) else None
            signs.append(_sign(read_json(path), events.get(rank, []), printed, recorded, rank in ended))
        except (RunDirError, KeyError, TypeError, ValueError):
            continue  # it is being written right now
    return signs


def _sign(
    identity: dict[str, Any],
    events: Sequence[dict[str, Any]],
    printed: float | None,
    recorded: float | None,
    has_ended: bool,
) -> RankSign:
    at = identity["coordinate"]
    last = events[-1] if events else {}
    time = last.get("time") or identity["started"]
    differs = clock_differs(time, recorded)
    phases = [event["phase"] for event in events if event.get("kind") == "heartbeat" and "phase" in event]
    return RankSign(
        rank=identity["rank"],
        node=identity["node"],
        coordinate=str(Coordinate.at(**at)),
        time=recorded if differs and recorded is not None else time,
        phase=phases[-1] if phases else None,
        step=last.get("step"),
        has_ended=has_ended or last.get("kind") == "end",
        printed=printed,
        clock_differs=differs,
    )


def clock_differs(time: float, recorded: float | None) -> bool:
    """Whether a record of `time` and its file, last written at `recorded`, are of clocks that differ by minutes.

    A file system may hang before it takes a record, but it takes none before its time.
    """
    return recorded is not None and not -LATE_S < time - recorded < CLOCK_SLACK_S


def _ended_ranks(attempt: AttemptDir) -> set[int]:
    """Return the ranks whose exit record says how they ended. One that is only being ended has neither."""
    ended = set()
    for rank, path in rank_files(attempt.exits, ".json").items():
        with suppress(RunDirError):
            document = read_json(path)
            if isinstance(document, dict) and (document.get("code") is not None or document.get("signal")):
                ended.add(rank)
    return ended


def written(path: Path) -> float | None:
    """Return when the file was last written, in seconds since the epoch; None if it does not exist or is empty."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime if found.st_size else None


def find_slowest(signs: Iterable[RankSign]) -> RankSign | None:
    """Return the rank whose newest record is the oldest, among those that have not ended; None if all have.

    If no rank has written a heartbeat, the program writes none, and no rank is the slowest.
    """
    known = list(signs)
    running = [sign for sign in known if not sign.has_ended]
    if not any(sign.phase for sign in known):
        return None
    return min(running, key=lambda sign: (sign.time, sign.rank), default=None)


def find_last_output(attempt: AttemptDir, signs: Iterable[RankSign]) -> LastOutput | None:
    """Return what was printed last by any rank, or by the batch script; None if nothing was."""
    found = [LastOutput(sign.printed, sign) for sign in signs if sign.printed is not None]
    if (batch := written(attempt.job_output)) is not None:
        found.append(LastOutput(batch, None))
    return max(found, key=lambda output: output.time, default=None)


def find_last_step(attempt: AttemptDir, events: Events) -> StepRecord | None:
    """Return the newest step of any rank: from its records, else from the lines that the program has printed."""
    wrong = {rank for rank in events if _is_wrong(attempt, rank, events)}
    recorded = _recorded_step(events, read_generations(attempt), wrong)
    return recorded or (None if any(events.values()) else _printed_step(attempt))


def _is_wrong(attempt: AttemptDir, rank: int, events: Events) -> bool:
    last = events[rank][-1:]
    return bool(last) and clock_differs(last[0].get("time", 0.0), written(attempt.event_file(rank)))


def _recorded_step(events: Events, generations: Generations | None, wrong: set[int]) -> StepRecord | None:
    """Return the newest step in the records; where steps are done again, it is not the one with the highest number.

    `wrong` are ranks whose clock is.
    """
    steps = {rank: [{**each, "rank": rank} for each in tail if each.get("kind") == "step" and each.get("step")]
             for rank, tail in events.items()}  # fmt: skip
    if generations is not None and len(generations.all) > 1:
        newest = [found[-1] for rank, found in steps.items() if found and generations.has(rank)]
        last = max(newest, key=lambda event: event["time"], default=None)
    else:
        records = [each for found in steps.values() for each in found]
        last = max(records, key=lambda event: (event["step"], event["time"]), default=None)
    if last is None:
        return None
    return StepRecord(
        step=last["step"],
        time=last["time"],
        seconds=last.get("seconds"),
        tflops=last.get("tflops"),
        loss=last.get("loss"),
        consumed_samples=last.get("consumed_samples"),
        clock_differs=last["rank"] in wrong,
        planned_s=last.get("planned_s"),
    )


def _printed_step(attempt: AttemptDir) -> StepRecord | None:
    """Return the newest step in the logs that were written last: a log from before a restart may have a later one."""
    paths = [*rank_files(attempt.logs, ".log").values(), attempt.job_output]
    newest = sorted(((written(path) or 0.0, path) for path in paths), reverse=True)[:MAX_LOGS_READ]
    for moment, path in newest:
        if moment and (printed := _steps_at_the_end(attempt, path, moment)):
            step, line, when = printed[-1]
            before = next((each for each, _, _ in reversed(printed) if each != step), step)
            stride = step - before
            return StepRecord(
                step=step,
                time=when,
                seconds=line.seconds,
                tflops=None,
                loss=line.loss,
                consumed_samples=None,
                source="log",
                total_steps=line.total_steps,
                every_s=stride * line.seconds or None if line.seconds is not None else None,
                stride=stride or None,
            )
    return None


def _steps_at_the_end(attempt: AttemptDir, path: Path, moment: float) -> list[tuple[int, StepLine, float]]:
    """Return the steps at the end of a log, oldest first, each with its time; without a stamp, that is `moment`."""
    found, reader = [], StepReader(forms_of(attempt))
    for line in printed_text(attempt, path, read_tail(path, TAIL_BYTES, follow=True)).splitlines():
        seen = reader.read(line)
        if seen is not None and seen.step is not None and not seen.is_evaluation:
            stamped = STAMPED.fullmatch(line)
            found.append((seen.step, seen, stamp_time(stamped["stamp"]) if stamped else moment))
    return found


def stamp_time(stamp: str) -> float:
    """Return the time in front of a line of a log (UTC) in seconds since the epoch."""
    return datetime.fromisoformat(f"{stamp}+00:00").timestamp()


def judge_node(node: NodeInfo, signs: Iterable[RankSign], asked: float) -> UnreachableNode:
    """Say whether a node that does not answer Slurm is lost. `asked` is when Slurm was asked (seconds since the epoch).

    A slurmd that is restarted does not answer either, and the ranks run on. A sign that is some seconds old may be from
    before the loss. Old logs are no sign of a loss, because the ranks of a node may print nothing.
    """
    here = [sign for sign in signs if sign.node == node.name and not sign.has_ended]
    age = age_s(max(sign.newest for sign in here), asked) if here else None
    if node.is_given_up:
        return UnreachableNode(node, "lost", age)
    if age is not None and age <= ALIVE_S:
        return UnreachableNode(node, "alive", age)
    is_silent = age is not None and age > FRESH_S and any(sign.phase for sign in here)
    return UnreachableNode(node, "lost" if is_silent else "unknown", age)
