"""What stands against a run now: dead ranks in a running job, lost nodes, a full disk, a limit that comes first.

Each function returns findings that hold now; one that is no longer returned is over. None judges by what is missing.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from bigsci_launch.checkpoints.folder import list_files, read_record
from bigsci_launch.checkpoints.refused_saves import read_refused_saves
from bigsci_launch.config.schema.run import RunConfig
from bigsci_launch.errors import BslError
from bigsci_launch.runs.chain.outlook import chain_outlook
from bigsci_launch.runs.generations.read import read_generations
from bigsci_launch.runs.layout import AttemptDir, RunDir, rank_files, read_json
from bigsci_launch.runs.signs import judge_node, read_rank_events, read_signs
from bigsci_launch.runs.watching.heartbeat import LEAST_SILENCE_S, MISSED, WatcherHeartbeat, agent_of, read_heartbeats
from bigsci_launch.runs.watching.ledger import RunFinding
from bigsci_launch.safe_files import read_file
from bigsci_launch.status.read import find_last_checkpoint
from bigsci_launch.topology.naming import agree, name_ranks
from bigsci_launch.units import format_age, format_bytes
from bigsci_launch.watch.facts.job import JobView
from bigsci_launch.watch.watched import WatchedRun

FACTS_EVERY_S = 30.0
DEAD_S = 120.0
"""Slurm and the local launcher end the other ranks within half a minute after one has failed."""
LEAST_FREE_BYTES = 1 << 30
"""What must be free where the size of a checkpoint is not known."""
MAINTENANCE_S = 3600.0
"""How long before a maintenance it is a finding, if it is not known when the next save comes."""
LONG_EPOCH_S, SOON_S = 86400.0, 3600.0
"""The end of an epoch is news if it takes a day, and one hour before."""
_SIGNAL = re.compile(r"^#SBATCH --signal=\S*@(\d+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Tempo:
    """How fast a run is, as learned: medians in seconds, None if not known. `step` is the last finished one."""

    step: int | None = None
    step_s: float | None = None
    save_s: float | None = None
    save_interval: int | None = None

    @property
    def next_save_s(self) -> float | None:
        """Seconds until the next save is done; None if it is not known."""
        if self.step is None or self.step_s is None or self.save_interval is None:
            return None
        return (self.save_interval - self.step % self.save_interval) * self.step_s + (self.save_s or 0.0)


class StandingFacts:
    """What stands against a run, read again every 30 s."""

    def __init__(self, watched: WatchedRun) -> None:
        self._watched = watched
        self._due = 0.0
        self._known: tuple[tuple[RunFinding, ...], tuple[str, ...]] = ((), ())

    def read(self, now: float, view: JobView, tempo: Tempo) -> tuple[tuple[RunFinding, ...], tuple[str, ...]]:
        """Return the findings, and what could not be seen. `now` is the watcher's monotonic clock."""
        if now >= self._due:
            self._due = now + FACTS_EVERY_S
            try:
                self._known = self._read(view, tempo)
            except BslError as error:
                self._known = (self._known[0], (error.message,))
        return self._known

    def _read(self, view: JobView, tempo: Tempo) -> tuple[tuple[RunFinding, ...], tuple[str, ...]]:
        run, attempt, config = self._watched.run, self._watched.attempt, self._watched.config
        lost, unknown = lost_nodes(attempt, view)
        found = [*lost, *near_limits(attempt, view, tempo)]
        if run is not None and attempt is not None:
            found += [*dead_ranks(attempt, view), *full_disk(run), *refused_saves(attempt, view)]
            found += epoch_end(run, config, tempo) if config and config.run.starts_trainer else []
            found += chain_warnings(run, attempt) if not view.is_over else []
        return tuple(found), tuple(unknown)


class OtherWatchers:
    """The other watchers of a run: a dead one is itself a finding, because people rely on it.

    Signs of life are kept as this watcher has seen them change: clocks of two machines may be minutes apart.
    """

    def __init__(self, run: RunDir, own_name: str) -> None:
        self._run = run
        self._own_name = own_name
        self._seen: dict[str, tuple[float, float]] = {}

    def findings(self, attempt: str, now: float) -> Iterator[RunFinding]:
        """Yield a finding for the agent of this attempt if it is dead. `now` is the watcher's monotonic clock."""
        for heartbeat in read_heartbeats(self._run):
            if heartbeat.name == self._own_name or heartbeat.name != agent_of(attempt) or heartbeat.ended:
                continue
            if (silent_s := self._dead_for(heartbeat, now)) is not None:
                watcher = f"the watcher {heartbeat.name} on {heartbeat.host}"
                sentence = f"{watcher} is dead: no heartbeat for {format_age(silent_s)}"
                yield RunFinding("watcher_dead", f"watcher_dead:{attempt}", sentence, time.time(), attempt)

    def _dead_for(self, heartbeat: WatcherHeartbeat, now: float) -> float | None:
        """Return for how long a watcher has been dead; None if it lives, or if that is not known yet."""
        moment, since = self._seen.get(heartbeat.name, (None, now))
        if moment != heartbeat.time:
            self._seen[heartbeat.name] = (heartbeat.time, now)
            since = now
        if heartbeat.is_here:
            return max(0.0, time.time() - heartbeat.time) if heartbeat.is_dead(time.time()) else None
        silent_s = now - since
        return silent_s if silent_s > max(LEAST_SILENCE_S, MISSED * heartbeat.every_s) else None


def dead_ranks(attempt: AttemptDir, view: JobView) -> Iterator[RunFinding]:
    """Yield a finding if ranks have ended, and the job runs all the same."""
    if not view.is_running:
        return
    ends = {}
    for rank, path in rank_files(attempt.exits, ".json").items():
        with suppress(BslError, TypeError, KeyError, ValueError):
            record = read_json(path)
            if record.get("code") is not None or record.get("signal"):
                ends[rank] = (float(record["time"]), record)
    failed = {rank: end for rank, end in ends.items() if end[1].get("signal") or end[1].get("code")}
    if not ends or time.time() - max(end[0] for end in ends.values()) < DEAD_S:
        return
    first_at, first = min((failed or ends).values(), key=lambda end: end[0])
    how = first.get("signal") or f"code {first.get('code')}"
    who = f"rank {first.get('rank')} on {first.get('node')} ended with {how}"
    ranks = sorted(ends)
    sentence = f"the job still runs, but {name_ranks(ranks)} {agree('has ended', ranks)}; first: {who}"
    yield RunFinding("dead", f"dead:{attempt.name}", sentence, time.time(), attempt.name, since=first_at)


def lost_nodes(attempt: AttemptDir | None, view: JobView) -> tuple[list[RunFinding], list[str]]:
    """Return the nodes that are lost as findings; in words, those that do not answer Slurm and may be alive."""
    if attempt is None or not view.silent_nodes or not view.is_running:
        return [], []
    generations = read_generations(attempt)
    silent = [each for each in view.silent_nodes if generations is None or generations.needs(each.name)]
    signs, now = read_signs(attempt, read_rank_events(attempt)), time.time()
    found, unknown = [], []
    for node in silent:
        fate = judge_node(node, signs, now).fate
        said = f"node {node.name} does not respond to Slurm ({node.raw_state}) {node.reason}".rstrip()
        if fate == "lost" and node.is_given_up:
            found.append(
                RunFinding(
                    "node_lost", f"node_lost:{attempt.name}:{node.name}", f"{said}: it is lost", now, attempt.name
                )
            )
        elif fate != "alive":  # by what clock its ranks are silent is not known here
            unknown.append(f"{said}: unknown whether it is lost")
    return found, unknown


def full_disk(run: RunDir) -> Iterator[RunFinding]:
    """Yield a finding if the disk of the run has no room for another checkpoint."""
    try:
        disk = os.statvfs(run.path)
    except OSError:
        return
    free = disk.f_bavail * disk.f_frsize
    size = _checkpoint_size(run)
    if free < (size if size is not None else LEAST_FREE_BYTES):
        needs = "" if size is None else f", but a checkpoint takes {format_bytes(size)}"
        yield RunFinding("disk", "disk", f"{run.path}: only {format_bytes(free)} free{needs}", time.time())
    elif disk.f_files and disk.f_favail < 1000:
        yield RunFinding("disk", "disk", f"{run.path}: only {disk.f_favail} more files can be created", time.time())


def refused_saves(attempt: AttemptDir, view: JobView) -> Iterator[RunFinding]:
    """Yield a finding while the disk refuses what the ranks save. They train on, and try again."""
    if view.is_running and (refused := read_refused_saves(attempt)) is not None:
        details = tuple(each for each in (refused.path, refused.hint) if each)
        key = f"save:{attempt.name}:{refused.since}"
        yield RunFinding("save", key, refused.sentence, time.time(), attempt.name, refused.step, details=details)


def _checkpoint_size(run: RunDir) -> int | None:
    newest = find_last_checkpoint(run)
    if newest is None:
        return None
    try:
        return sum(list_files(newest.path).values()) or None
    except (BslError, OSError):
        return None


def chain_warnings(run: RunDir, attempt: AttemptDir) -> Iterator[RunFinding]:
    """Yield what people should know before a chain stops: its last link, nothing queued, the same step twice."""
    for warning in chain_outlook(run, attempt, ask_slurm=False).warnings:
        yield RunFinding(warning.kind, f"{warning.key}:{attempt.name}", warning.sentence, time.time(), attempt.name)


def epoch_end(run: RunDir, config: RunConfig, tempo: Tempo) -> Iterator[RunFinding]:
    """Yield a finding if a long epoch of `bsl train` ends soon: from then on, samples are seen again."""
    newest, record = find_last_checkpoint(run), None
    with suppress(BslError):  # a damaged record says nothing of the data
        record = read_record(newest.path) if newest is not None else None
    tokens = (record.data or {}).get("num_tokens") if record is not None else None
    if record is None or tempo.step_s is None or tempo.step is None or not isinstance(tokens, int):
        return
    num_samples = int((tokens - 1) // config.model.sequence_length * (1 - config.data.held_out))
    size = config.training.global_batch_size
    consumed = record.consumed_samples + max(0, tempo.step - record.step) * size
    epoch, into = divmod(consumed, num_samples) if num_samples > 0 else (0, 0)
    left_s = (num_samples - into) / size * tempo.step_s
    if num_samples / size * tempo.step_s < LONG_EPOCH_S or left_s > SOON_S:
        return
    sentence = (
        f"epoch {epoch + 1} of the data ends in {format_age(left_s)}: samples repeat after {num_samples - into:,} more"
    )
    yield RunFinding("epoch_end", f"epoch_end:{epoch}", sentence, time.time(), step=tempo.step)


def near_limits(attempt: AttemptDir | None, view: JobView, tempo: Tempo) -> Iterator[RunFinding]:
    """Yield a finding for a time limit, or a maintenance, that comes before the next save can be done."""
    if not view.is_running:
        return
    name = attempt.name if attempt is not None else None
    yield from _near_end(attempt, name, view, tempo)
    for each in view.maintenance or ():
        left_s = each.begins - time.time()
        next_s = tempo.next_save_s
        if left_s > (next_s if next_s is not None else MAINTENANCE_S):
            continue
        when = f"begins in {format_age(left_s)}" if left_s > 0 else "has begun"
        save = (
            "the time of the next save is unknown" if next_s is None else f"the next save ends in {format_age(next_s)}"
        )
        sentence = f"maintenance {each.name} {when} on nodes of the job; {save}"
        yield RunFinding("maintenance", f"maintenance:{name}:{each.name}", sentence, time.time(), name)


def _near_end(attempt: AttemptDir | None, name: str | None, view: JobView, tempo: Tempo) -> Iterator[RunFinding]:
    if view.job.ends is None or view.job.source != "squeue":
        return
    left_s, margin_s = view.job.ends - time.time(), _margin_s(attempt)
    key = f"time_limit:{name}"
    if margin_s is None:
        next_s = tempo.next_save_s
        if next_s is not None and left_s < next_s:
            sentence = (
                f"the time limit is in {format_age(max(0.0, left_s))}, before the next save (in {format_age(next_s)})"
            )
            yield RunFinding("time_limit", key, sentence, time.time(), name)
        return
    if tempo.step_s is None or tempo.save_s is None:
        return
    need_s = tempo.step_s + tempo.save_s
    if need_s > margin_s:
        sentence = (
            f"the ranks are asked to save {margin_s} s before the time limit, but a step and a save take {need_s:.0f} "
            "s: the last save will be cut off"
        )
        details = (f"set monitor.exit_margin_s to {2 * need_s:.0f} or more, and submit again",)
        yield RunFinding("time_limit", key, sentence, time.time(), name, details=details)


def _margin_s(attempt: AttemptDir | None) -> int | None:
    try:
        found = _SIGNAL.search(read_file(attempt.script).decode("utf-8", "replace")) if attempt is not None else None
    except OSError:
        return None
    return int(found[1]) if found else None
