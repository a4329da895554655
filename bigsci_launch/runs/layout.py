"""Every path in a run directory. No other module builds one.

nodes.json                    next to the runs: nodes that are left out of them, and why
node_speeds.json              next to the runs: how fast each node was in them, next to the others
RUN/
  run.json                    RunRecord: name, run ID, creation time, topology
  micro_batch.json            the size that `training.micro_batch_size: auto` has found, and its history
  attempts/0001/              one Slurm job, or one start of the local launcher; a requeue adds `0001.r1`
    config.yaml               the resolved config; ranks read this and nothing else; for your group only
    origins.json              where each value came from
    provenance.json           git revision, package versions, known variables, command line; for your group only
    dirty.diff                uncommitted changes to the code, if there are any; for your group only
    script.sh                 the rendered sbatch script; for your group only
    tools/                    the stand-alone programs that the script runs, as they were at submission
    job.json                  scheduler, job ID, cluster, time of submission
    job.out                   output of the batch step (start and end markers, srun's own messages)
    lease                     renewed by the launcher of a local attempt while it runs
    check/                    what the node check measured: n0.json for node n0, and result.json
    exit.json                 why the attempt ended
    chain.json                how the run starts itself again, and when this start began
    next.json                 whether the run continues after this start, and why
    queued                    the attempt waits behind another one; removed when it starts
    cancelled                 `bsl cancel` ended the attempt: it does not continue
    requests/                 what the processes of the attempt are asked: rank 0 to save, and to stop after a step; the
                              controller of `survive` to fence a rank; every rank to trace calls (trace.json)
    answers/                  requests that the controller of `survive` has granted or refused
    ended.json                who ended the ranks from outside, and why
    accepted.json             which changes since the checkpoint was saved `bsl submit --force` accepted
    step_line                 `monitor.step_line` of the run file, if it has one
    bad_nodes.json            nodes that the attempt has shown to be bad, and whether that is final
    steps.json                how long each rank worked in the newest steps that the watcher has looked at
    recover/                  what the controller of `survive` writes: generations.jsonl, strangers.json
    layouts.jsonl             the pipelines of each generation, with `parallelism.engine: uneven`
    pids/rank-0003.json       where rank 3 runs: host, PID, coordinate
    logs/rank-0003.log        output of rank 3, each line with its time
    events/rank-0003.jsonl    heartbeats and events of rank 3
    errors/rank-0003.json     the uncaught exception of rank 3
    exits/rank-0003.json      exit code or signal of rank 3
    {pids,logs,exits}/launcher-0001.*   a launcher, whose workers are the ranks (`slurm.ranks_per_task`)
    recorder/rank-0003.sock   socket on which rank 3 sends its recorded collectives; rank-0003.json: its groups;
                              nccl_trace_rank_3: written by torch when a collective of NCCL timed out
    rings/rank-0003.ring      the last calls of rank 3, if it ended badly; rank-0003.stacks: stacks that it wrote
  checkpoints/                global_step20/, latest, latest_checkpointed_iteration.txt
  dumps/                      per-rank weight dumps: step-000005-before/rank-0003.safetensors
  spy/                        evidence bundles
  control/                    the group's: what people ask of the run, as files: save, exit, restart, dump, kill
  watch/                      the owner's. findings.jsonl: what watchers noticed; acts.jsonl: what was done, by whom and
                              why; outbox.jsonl: messages that were sent, or could not be sent yet; NAME.json:
                              the newest heartbeat of watcher NAME; claims/: acts that are not repeated; requests/:
                              what was taken up from control/; by/UID/: what watchers of other people noticed
  export/                     token: what `monitor.metrics.port` asks for; NAME.json: what tracker NAME has; NAME/: the
                              files of a tracker that keeps them in the run

ROOT/rehearsals/NAME/0001/    a rehearsal of run NAME: report.json, and the run directory of its attempts
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bigsci_launch import safe_files
from bigsci_launch.errors import RunDirError
from bigsci_launch.file_names import dump_name, rank_name, rank_of_name
from bigsci_launch.runs.record_types import record_of

_ATTEMPT = re.compile(r"[0-9]+(\.r[0-9]+)?")
_ASK = "ask the owner of the run for read access to it"


def write_json(path: Path, document: Any, mode: int = 0o644, *, is_synced: bool = True) -> None:
    """Write `document` as indented JSON, atomically, with exactly this mode. A new folder is for its owner to write."""
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    safe_files.write_file(path, json.dumps(document, indent=2, default=str) + "\n", mode, is_synced=is_synced)


def read_json(path: Path) -> Any:
    """Return the JSON document in `path`.

    Raises:
        RunDirError: the file is missing, unreadable or not JSON.
    """
    try:
        return safe_files.read_json(path)
    except OSError as error:
        raise RunDirError(f"{path}: {error.strerror or error}") from error
    except ValueError as error:
        raise RunDirError(f"{path}: not a JSON document ({error})") from error


def read_record(path: Path) -> dict[str, Any]:
    """Return the record in `path`; an empty one if it is missing, torn or something else."""
    try:
        return record_of(safe_files.read_json(path))
    except (OSError, ValueError):
        return {}


def rank_files(folder: Path, suffix: str, number_of: Callable[[str], int | None] = rank_of_name) -> dict[int, Path]:
    """Return the per-rank files in `folder` with that suffix, by rank in ascending order; or those of launchers.

    Raises:
        RunDirError: the folder cannot be read.
    """
    ranks = {number_of(path.stem): path for path in entries_of(folder) if path.suffix == suffix}
    return {rank: ranks[rank] for rank in sorted(rank for rank in ranks if rank is not None)}


@dataclass(frozen=True, slots=True)
class AttemptDir:
    """The directory of one attempt. `name` is `0001`, or `0001.r2` for its second requeue."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def origins(self) -> Path:
        return self.path / "origins.json"

    @property
    def provenance(self) -> Path:
        return self.path / "provenance.json"

    @property
    def dirty_diff(self) -> Path:
        return self.path / "dirty.diff"

    @property
    def script(self) -> Path:
        return self.path / "script.sh"

    @property
    def job(self) -> Path:
        return self.path / "job.json"

    @property
    def job_output(self) -> Path:
        """Output of the batch step; a requeue appends to the file of the attempt that it belongs to."""
        return self.path.parent / self.base_name / "job.out"

    @property
    def base_name(self) -> str:
        """`0001` for attempt `0001` and for each of its requeues `0001.rK`."""
        return self.name.partition(".")[0]

    @property
    def order(self) -> tuple[int, int]:
        """Number and requeue: they order the attempts of a run."""
        number, _, requeue = self.name.partition(".r")
        return (int(number), int(requeue or 0))

    @property
    def run(self) -> RunDir:
        return RunDir(self.path.parent.parent)

    @property
    def base(self) -> AttemptDir:
        """The attempt that a requeue belongs to: it has the frozen files."""
        return AttemptDir(self.path.with_name(self.base_name))

    @property
    def tools(self) -> Path:
        return self.path / "tools"

    @property
    def lease(self) -> Path:
        return self.path / "lease"

    @property
    def exit(self) -> Path:
        return self.path / "exit.json"

    @property
    def chain(self) -> Path:
        return self.path / "chain.json"

    @property
    def next(self) -> Path:
        return self.path / "next.json"

    @property
    def queued_mark(self) -> Path:
        return self.path / "queued"

    @property
    def cancel_mark(self) -> Path:
        return self.path.parent / self.base_name / "cancelled"

    @property
    def accepted(self) -> Path:
        return self.path.parent / self.base_name / "accepted.json"

    @property
    def step_line(self) -> Path:
        return self.path.parent / self.base_name / "step_line"

    @property
    def bad_nodes(self) -> Path:
        return self.path / "bad_nodes.json"

    @property
    def steps(self) -> Path:
        return self.path / "steps.json"

    @property
    def pids(self) -> Path:
        return self.path / "pids"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def events(self) -> Path:
        return self.path / "events"

    @property
    def errors(self) -> Path:
        return self.path / "errors"

    @property
    def exits(self) -> Path:
        return self.path / "exits"

    @property
    def recorder(self) -> Path:
        return self.path / "recorder"

    @property
    def rings(self) -> Path:
        return self.path / "rings"

    @property
    def requests(self) -> Path:
        return self.path / "requests"

    @property
    def answers(self) -> Path:
        return self.path / "answers"

    @property
    def ended_by(self) -> Path:
        return self.path / "ended.json"

    @property
    def recover(self) -> Path:
        return self.path / "recover"

    @property
    def generations(self) -> Path:
        return self.recover / "generations.jsonl"

    @property
    def layouts(self) -> Path:
        return self.path / "layouts.jsonl"

    @property
    def strangers(self) -> Path:
        return self.recover / "strangers.json"

    @property
    def check_result(self) -> Path:
        return self.path / "check" / "result.json"

    def generation(self, number: int) -> Path:
        return self.recover / f"gen-{number:03d}"

    def pid_file(self, rank: int) -> Path:
        return self.pids / f"{rank_name(rank)}.json"

    def log_file(self, rank: int) -> Path:
        return self.logs / f"{rank_name(rank)}.log"

    def event_file(self, rank: int) -> Path:
        return self.events / f"{rank_name(rank)}.jsonl"

    def error_file(self, rank: int) -> Path:
        return self.errors / f"{rank_name(rank)}.json"

    def exit_file(self, rank: int) -> Path:
        return self.exits / f"{rank_name(rank)}.json"

    def recorder_socket(self, rank: int) -> Path:
        return self.recorder / f"{rank_name(rank)}.sock"

    @property
    def recorder_dumps(self) -> Path:
        """What the files begin with to which torch's watchdog adds the number of a rank, on GPUs."""
        return self.recorder / "nccl_trace_rank_"

    def recorder_groups(self, rank: int) -> Path:
        return self.recorder / f"{rank_name(rank)}.json"

    @property
    def folders(self) -> tuple[Path, ...]:
        return self.pids, self.logs, self.events, self.errors, self.exits, self.requests

    def make(self) -> None:
        for folder in self.folders:
            folder.mkdir(parents=True, exist_ok=True)


@dataclass(frozen=True, slots=True)
class RunDir:
    """A run directory; `path` is absolute."""

    path: Path

    @property
    def record(self) -> Path:
        return self.path / "run.json"

    @property
    def attempts_folder(self) -> Path:
        return self.path / "attempts"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def dumps(self) -> Path:
        return self.path / "dumps"

    def dump_folder(self, step: int, when: str) -> Path:
        """The weights of all ranks around `step`; `when` is `before` or `after`."""
        return self.dumps / dump_name(step, when)

    def dump_file(self, step: int, when: str, rank: int) -> Path:
        return self.dump_folder(step, when) / f"{rank_name(rank)}.safetensors"

    @property
    def bundles(self) -> Path:
        return self.path / "spy"

    @property
    def micro_batch(self) -> Path:
        return self.path / "micro_batch.json"

    @property
    def control(self) -> Path:
        return self.path / "control"

    @property
    def requests(self) -> Path:
        return self.watch / "requests"

    def watch_by(self, uid: int) -> Path:
        return self.watch / "by" / str(uid)

    @property
    def watch(self) -> Path:
        return self.path / "watch"

    @property
    def findings(self) -> Path:
        return self.watch / "findings.jsonl"

    @property
    def acts(self) -> Path:
        return self.watch / "acts.jsonl"

    @property
    def exports(self) -> Path:
        return self.path / "export"

    @property
    def metrics_token(self) -> Path:
        return self.exports / "token"

    def tracker_files(self, tracker: str) -> Path:
        return self.exports / tracker

    def tracker_cursor(self, tracker: str) -> Path:
        return self.exports / f"{tracker}.json"

    @property
    def own_entries(self) -> frozenset[Path]:
        """All that `bsl` makes in the run directory itself. The rest is the program's."""
        folders = (self.attempts_folder, self.checkpoints, self.dumps, self.bundles, self.control, self.watch)
        return frozenset((self.record, self.micro_batch, self.exports, *folders))

    @property
    def outbox(self) -> Path:
        return self.watch / "outbox.jsonl"

    def claim_file(self, key: str) -> Path:
        """The file whose creation takes the act `key` for one watcher."""
        return self.watch / "claims" / re.sub(r"[^A-Za-z0-9._-]", "_", key)

    def watcher_file(self, name: str) -> Path:
        return self.watch / f"{name}.json"

    @property
    def name(self) -> str:
        return self.path.name

    def attempt(self, name: str) -> AttemptDir:
        return AttemptDir(self.attempts_folder / name)

    def attempts(self) -> list[AttemptDir]:
        """Return every attempt, oldest first; requeues follow the attempt that they belong to. What is still queued
        behind another one is left out."""
        return [attempt for attempt in self._all_attempts() if not _exists(attempt.queued_mark)]

    def queued_attempts(self) -> list[AttemptDir]:
        """Return the attempts that are queued behind another one, oldest first."""
        return [attempt for attempt in self._all_attempts() if _exists(attempt.queued_mark)]

    def _all_attempts(self) -> list[AttemptDir]:
        found = [path for path in entries_of(self.attempts_folder) if _ATTEMPT.fullmatch(path.name) and path.is_dir()]
        return sorted((AttemptDir(path) for path in found), key=lambda attempt: attempt.order)

    def latest_attempt(self) -> AttemptDir | None:
        attempts = self.attempts()
        return attempts[-1] if attempts else None

    def next_attempt_name(self) -> str:
        numbers = [int(attempt.base_name) for attempt in self._all_attempts()]
        return f"{max(numbers, default=0) + 1:04d}"


def entries_of(folder: Path) -> list[Path]:
    """Return the entries of `folder`; none if it does not exist."""
    try:
        return list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise _closed(folder, error) from error


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError as error:
        raise _closed(path.parent, error) from error


def _closed(folder: Path, error: OSError) -> RunDirError:
    return RunDirError(f"{folder}: {error.strerror}", hint=_ASK if isinstance(error, PermissionError) else None)


def node_memory(root: Path) -> Path:
    """The file that remembers bad nodes for the runs in the folder `root`."""
    return root / "nodes.json"


def node_speeds(root: Path) -> Path:
    """The file that remembers how fast nodes were in the runs in the folder `root`."""
    return root / "node_speeds.json"


def find_runs(root: Path) -> list[RunDir]:
    """Return every run directly under `root`, sorted by name. A folder that we may not enter may be one.

    Raises:
        RunDirError: `root` cannot be read.
    """
    return [RunDir(path.resolve()) for path in sorted(entries_of(root)) if _may_be_run(path)]


def _may_be_run(path: Path) -> bool:
    try:  # a hidden name: what an interrupted deletion left
        return not path.name.startswith(".") and RunDir(path).record.is_file()
    except PermissionError:
        return True


def open_run(path: Path) -> RunDir:
    """Return the run directory at `path`.

    Raises:
        RunDirError: there is none, or it cannot be read.
    """
    try:
        run = RunDir(path.resolve())
        is_run = run.record.is_file()
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links, before Python 3.13
        raise RunDirError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    if not is_run:
        raise RunDirError(
            f"{path}: not a run directory (it has no run.json)", hint="`bsl list` shows the runs that can be found"
        )
    if not os.access(run.path, os.R_OK | os.X_OK):
        raise RunDirError(f"{path}: permission denied", hint=_ASK)
    return run
