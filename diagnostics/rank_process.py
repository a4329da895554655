"""A rank and its process: its place, its records and how it is started. For rank_runner.py. Standard library only."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import select
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path

import rank_recorder
import rank_stacks
import safe_files
from own_place import why_not_ours
from rank_log import StampedLog, complain, say
from rank_rings import Rings

TYPE_CHECKING = False  # typing costs start-up time, and annotations are never evaluated
if TYPE_CHECKING:
    import argparse
    from typing import IO, Any

# Of these, a program that does not handle one, or not yet, would end although it was not asked to.
IGNORED_UNTIL_HANDLED = (signal.SIGUSR1, signal.SIGUSR2)
# As in bigsci_launch/topology: the order in which ranks are numbered, fastest first, and the order in records.
AXES = ("tp", "cp", "ep", "dp", "pp")
ALWAYS_RECORDED = ("pp", "tp", "dp")
RECORDED = (*ALWAYS_RECORDED, "cp", "ep")
PR_SET_PDEATHSIG = 1
DRAIN_TIMEOUT_S = 2.0
"""How long to wait for output after the program has ended: a process it left behind may hold the pipe forever."""
EVENT_TAIL_BYTES = 8192
TERMINATION_LAG_S = 0.1
"""Slurm sends TERM to every process of a step, one after the other: the program may get it before the runner."""
_LIBC = ctypes.CDLL(None)  # loaded before any fork


def parse_topology(text: str) -> dict[str, int]:
    """The size of each axis in `tp=2,pp=2,dp=2`; 1 for an axis that is not there."""
    return all_axes({axis: int(size) for axis, _, size in (part.partition("=") for part in text.split(","))})


def all_axes(sizes: dict[str, int]) -> dict[str, int]:
    if not set(sizes) <= set(AXES):
        raise ValueError(", ".join(sizes))
    return {axis: sizes.get(axis, 1) for axis in AXES}


def coordinate(rank: int, topology: dict[str, int]) -> dict[str, int]:
    """The index of `rank` on each axis; cp and ep only where the run has them."""
    index = {}
    for axis in AXES:
        rank, index[axis] = divmod(rank, topology[axis])
    return {axis: index[axis] for axis in RECORDED if axis in ALWAYS_RECORDED or topology[axis] > 1}


def place_in_pipelines(attempt: Path, rank: int) -> dict[str, int] | None:
    """Where a rank is in the newest pipelines of an uneven run, as `topology` writes them; None for any other run."""
    try:
        with safe_files.open_stream(attempt / "layouts.jsonl") as stream:
            text = safe_files.parse_json(stream.read().splitlines()[-1])["topology"]
        tp, pipelines = re.findall(r"^pipelines=(?:tp=(\d+),)?(.*)", text)[0]
        for dp, pipeline in enumerate(pipelines.split("/")):
            at = 0
            for part in pipeline.partition("x")[0].split(","):
                first, _, last = part.partition("-")
                if int(first) <= rank <= int(last or first):
                    pp, lane = divmod(at + rank - int(first), int(tp or 1))
                    return {"pp": pp, "tp": lane, "dp": dp}
                at += int(last or first) - int(first) + 1
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        pass
    return None


def end_with_parent(number: int) -> None:
    """Have the kernel send a signal to this process when its parent dies, so that it does not outlive it."""
    with contextlib.suppress(OSError, AttributeError):
        _LIBC.prctl(PR_SET_PDEATHSIG, number)


def start_ticks(pid: int) -> int | None:
    """Return the start time of a process in clock ticks since boot. With the PID, it identifies the process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return int(text.rpartition(")")[2].split()[19])


def signal_name(number: int) -> str:
    """`SIGKILL` for 9; `SIG40` for a real-time signal."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIG{number}"


def write_record(path: Path, record: dict[str, Any]) -> None:
    """Replace the file at `path` by `record`. If that fails, put it on stderr. No recovery waits for a disk."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        safe_files.write_file(path, json.dumps(record, indent=1) + "\n", is_synced=False)
    except OSError as error:
        complain(path, error)
        say(f"rank_runner: record {path.parent.name}/{path.stem} {json.dumps(record)}")


def run_variables(attempt: Path, topology: dict[str, int]) -> dict[str, str]:
    """Return what every process of a run finds in its environment."""
    sizes = ",".join(f"{axis}={size}" for axis, size in topology.items() if size > 1)
    return {
        "BSL_RUN_DIR": str(attempt.parent.parent),
        "BSL_ATTEMPT": attempt.name,
        "BSL_TOPOLOGY": sizes,
        **rank_recorder.variables(attempt),
    }


def start_program(
    program: list[str], environment: dict[str, str], stop_signal: int, *, is_tied: bool = False, keep: int = -1
) -> subprocess.Popen[bytes]:
    """Start a program with its output in a pipe. One that is `is_tied` does not outlive its runner. It inherits the
    descriptor `keep`.

    Raises:
        OSError: it cannot be started, or the tools of the attempt, which it may use, may be another user's by now.
    """
    if (why := why_not_ours(Path(__file__).absolute().parent)) is not None:
        raise PermissionError(0, why)
    runner = os.getpid()

    def prepare() -> None:
        # The warning before the time limit must not end a program that does not handle it, or not yet.
        for number in IGNORED_UNTIL_HANDLED:
            if number in (signal.SIGUSR2, stop_signal):
                signal.signal(number, signal.SIG_IGN)
        if is_tied:
            end_with_parent(signal.SIGKILL)
            if os.getppid() != runner:
                os._exit(1)  # it died before the kernel was asked

    return subprocess.Popen(
        program,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
        preexec_fn=prepare,
        pass_fds=() if keep < 0 else (keep,),
    )


def watch_stacks(rings: Rings) -> None:
    if rings.folder is not None:
        threading.Thread(target=rank_stacks.watch, args=(rings.folder,), daemon=True).start()


class Output:
    """Copies what a program prints to a log, in a thread of its own. The log may be exchanged for another one."""

    def __init__(self, stream: IO[bytes], log: StampedLog) -> None:
        self._stream, self._log = stream, log
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._copy, daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Wait for the rest of the output of a program that has ended."""
        self._thread.join(DRAIN_TIMEOUT_S)
        self._log.end_line()

    def switch(self, log: StampedLog) -> None:
        """Write what comes from now on into another log; what the program has printed so far belongs to this one."""
        with self._lock:
            while log is not self._log and self._take():
                pass
            if log is not self._log:
                self._log.end_line()
            self._log = log

    def _copy(self) -> None:
        due_s = None
        while True:
            if select.select([self._stream], [], [], due_s)[0]:
                with self._lock:
                    if self._take() is False:
                        return
            due_s = self._log.keep_newest()

    def _take(self) -> bool | None:
        """Copy what the program has printed. False: that was all; None: nothing is there now."""
        if not select.select([self._stream], [], [], 0)[0]:
            return None
        chunk = os.read(self._stream.fileno(), 65536)
        if chunk:
            self._log.feed(chunk)
        return bool(chunk)


class Rank:
    """One rank: its place and its records."""

    def __init__(
        self,
        options: argparse.Namespace,
        place: dict[str, int],
        topology: dict[str, int],
        rings: Rings,
        log: StampedLog,
        generation: int | None = None,
    ) -> None:
        self.attempt: Path = options.attempt_dir.absolute()
        self.place, self.topology = place, topology
        self.number = place["rank"]
        self.name = self.name_of(self.number)
        self.identity = {"rank": self.number}
        self.coordinate = place_in_pipelines(self.attempt, self.number) or coordinate(self.number, topology)
        self.host = socket.gethostname()
        self.node = node_name(is_local=options.rank is not None or options.slot is not None)
        self.more: dict[str, Any] = {} if generation is None else {"generation": generation}
        self.pid: int | None = None
        self.terminated: float | None = None
        self.rings, self.log = rings, log

    @staticmethod
    def name_of(number: int) -> str:
        """Return what its records are called."""
        return f"rank-{number:04d}"

    def environment(self) -> dict[str, str]:
        """Return what the program finds in its environment, apart from what the runner has."""
        return {**self.numbers(), **run_variables(self.attempt, self.topology), **self.rings.variables()}

    def numbers(self) -> dict[str, str]:
        return {name.upper(): str(value) for name, value in self.place.items()}

    def recorder_files(self) -> list[str]:
        return rank_recorder.files(self.attempt, self.number)

    def write_pid(self, pid: int) -> None:
        self.pid = pid
        write_record(
            self.attempt / "pids" / f"{self.name}.json",
            {
                **self.identity,
                "local_rank": self.place["local_rank"],
                "node_rank": self.place["node_rank"],
                "node": self.node,
                "host": self.host,
                "pid": pid,
                "runner_pid": os.getpid(),
                "start_ticks": start_ticks(pid),
                "coordinate": self.coordinate,
                "started": time.time(),
                "job_id": os.environ.get("SLURM_JOB_ID"),
                "step_id": os.environ.get("SLURM_STEP_ID"),
                "rings": str(self.rings.folder) if self.rings.folder else None,
                "why_no_rings": self.rings.why,
                "recorder_files": self.recorder_files(),
                **self.more,
            },
        )

    def note_termination(self) -> None:
        """Record at once that this rank was asked to stop: KILL may follow, and no record would mean a lost node."""
        self.terminated = time.time()
        self.write_exit(None, None)
        self.keep_rings()

    def end(self, status: int, *, is_finished: bool = False) -> int:
        """Write the exit record for wait status `status` (negative: signal) and return the exit code for the runner.
        `is_finished`: the training was over for this rank, so that its end is clean whatever its status is."""
        if status >= 0:
            self.write_exit(status, None, **({"clean_end": True} if is_finished and status else {}))
            return 0 if is_finished else status
        # gloo and NCCL may abort while they are torn down, after the training has ended well and recorded it.
        has_ended_cleanly = is_finished or (-status == signal.SIGABRT and self.has_ended())
        self.write_exit(None, signal_name(-status), clean_end=has_ended_cleanly)
        return 0 if has_ended_cleanly else 128 - status

    def end_unstarted(self, program: str, error: OSError) -> int:
        """Write the exit record of a program that cannot be started and return the exit code for the runner."""
        words = f"cannot start {program}: {error.strerror}"
        self.log.feed(f"rank_runner: {words}\n".encode())
        code = 127 if isinstance(error, FileNotFoundError) else 126
        self.write_exit(code, None, error=words)
        return code

    def has_ended(self) -> bool:
        """Whether the last event of the rank is `end`: the training was over."""
        try:
            with safe_files.open_stream(self.attempt / "events" / f"{self.name}.jsonl") as stream:
                stream.seek(max(0, stream.seek(0, os.SEEK_END) - EVENT_TAIL_BYTES))
                lines = stream.read().splitlines()
            return bool(safe_files.parse_json(lines[-1], allow_nan=True)["kind"] == "end")
        except (OSError, ValueError, LookupError, TypeError):
            return False

    def write_exit(self, code: int | None, ended_by: str | None, **more: Any) -> None:
        write_record(
            self.attempt / "exits" / f"{self.name}.json",
            {
                **self.identity,
                "node": self.node,
                "host": self.host,
                "pid": self.pid,
                "code": code,
                "signal": ended_by,
                "time": time.time(),
                "terminated": self.terminated,
                "coordinate": self.coordinate,
                **self.more,
                **more,
            },
        )

    def end_rings(self, status: int) -> None:
        if status != 0 or self.terminated is not None:
            self.keep_rings()
        why = self.rings.keep_traces(self.pid) if self.pid is not None else None
        if why is not None:
            say(f"rank_runner: call traces of {self.name} stay in {self.rings.folder}: {why}")
        self.rings.remove()

    def keep_rings(self) -> None:
        """Copy the last calls into the attempt. After TERM, KILL may follow: then there is no later."""
        why = self.rings.keep()
        if why is not None:
            say(f"rank_runner: the last calls of {self.name} stay in {self.rings.folder}: {why}")


def node_name(*, is_local: bool) -> str:
    host = socket.gethostname()
    return host if is_local else os.environ.get("SLURMD_NODENAME", host)
