"""Starts one rank and records who it is, what it prints and how it ends. Stand-alone, standard library only.

    python -I -S rank_runner.py --attempt-dir DIR --topology tp=2,pp=2,dp=2 --ranks-per-node 2 -- PROGRAM ARGS

srun starts one runner per task; the local launcher starts one per rank and passes `--rank`. The program finds RANK,
LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, NODE_RANK, BSL_RUN_DIR and BSL_ATTEMPT in its environment. The runner writes
`pids/rank-NNNN.json`, `logs/rank-NNNN.log` (each line with its time, UTC) and `exits/rank-NNNN.json` under DIR, and
exits as the program did: with its exit code, or 128 + signal.

The runner must never be the reason why training ends. A record that it cannot write, such as on a full disk, goes to
stderr as a line of its own, `rank_runner: record exits/rank-0003 {...}`, which exit_reason.py reads from job.out.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import math
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from datetime import datetime, timezone
from pathlib import Path
from types import FrameType
from typing import IO, Any

if "__file__" in globals():
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # -I leaves it out

import rank_recorder
import rank_stacks
from rank_rings import Rings

STOP_SIGNALS = ("USR2", "USR1", "TERM", "INT")
# Of these, a program that does not handle one, or not yet, would end although nobody asked it to.
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
NEWEST_BYTES = 2**16
"""How much of the newest output a log keeps that has reached its limit."""
HEADING_BYTES = 128
KEEP_EVERY_S = 1.0
ORPHAN_GRACE_S = 60
"""How long a program may take to end after TERM when its local launcher has died."""


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    if options.rank is not None:
        end_with_launcher()
    rank = Rank(options)
    return rank.run(options.program)


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Start one rank and record how it runs and ends.")
    parser.add_argument("--attempt-dir", type=Path, required=True)
    parser.add_argument("--topology", type=parse_topology, required=True, help="tp=2,pp=2,dp=2")
    parser.add_argument("--ranks-per-node", type=int, required=True)
    parser.add_argument("--rank", type=int, help="global rank; default: Slurm's variables")
    parser.add_argument("--stop-signal", choices=STOP_SIGNALS, default="USR2", help="asks the program to save and stop")
    parser.add_argument("--log-limit-mib", type=int, default=0, help="largest size of a log; 0: no limit")
    parser.add_argument("--ring", default="none", help="folder on this node for the last calls; auto: found; none")
    parser.add_argument("program", nargs="+")
    return parser.parse_args(arguments)


def parse_topology(text: str) -> dict[str, int]:
    """The size of each axis in `tp=2,pp=2,dp=2`; 1 for an axis that is not there."""
    sizes = {axis: int(size) for axis, _, size in (part.partition("=") for part in text.split(","))}
    if not set(sizes) <= set(AXES):
        raise ValueError(text)
    return {axis: sizes.get(axis, 1) for axis in AXES}


def coordinate(rank: int, topology: dict[str, int]) -> dict[str, int]:
    """The index of `rank` on each axis; cp and ep only where the run has them."""
    index = {}
    for axis in AXES:
        rank, index[axis] = divmod(rank, topology[axis])
    return {axis: index[axis] for axis in RECORDED if axis in ALWAYS_RECORDED or topology[axis] > 1}


def end_with_launcher() -> None:
    """Have the kernel send TERM when the local launcher dies, so that no rank outlives it. (Slurm does that itself.)"""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def place(options: argparse.Namespace) -> dict[str, int]:
    """Return global rank, local rank, node rank and their counts, from `--rank` or from Slurm's variables."""
    if options.rank is not None:
        world_size = math.prod(options.topology.values())
        return {"rank": options.rank, "local_rank": options.rank, "node_rank": 0, "world_size": world_size,
                "local_world_size": world_size}  # fmt: skip
    variable = os.environ
    return {"rank": int(variable["SLURM_PROCID"]), "local_rank": int(variable["SLURM_LOCALID"]),
            "node_rank": int(variable["SLURM_NODEID"]), "world_size": int(variable["SLURM_NTASKS"]),
            "local_world_size": options.ranks_per_node}  # fmt: skip


def forwarded_signals(stop: signal.Signals, is_local: bool) -> dict[signal.Signals, signal.Signals]:
    """Return which signal the program gets for a signal to the runner.

    Slurm signals every process of a step itself, and USR2 kills those that do not handle it (data loaders, compilers).
    All but this runner ignore URG: job scripts send it.
    """
    if is_local:
        return {signal.SIGUSR2: stop, signal.SIGTERM: signal.SIGTERM, signal.SIGURG: stop}
    return {signal.SIGURG: stop}


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
    """Write `record` next to `path` and rename it into place. If that fails, put it on stderr."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        complain(path, error)
        say(f"rank_runner: record {path.parent.name}/{path.stem} {json.dumps(record)}")
        with contextlib.suppress(OSError):
            beside.unlink()


def complain(path: Path, error: OSError) -> None:
    say(f"rank_runner: cannot write {path}: {error}")


def say(text: str) -> None:
    """Write a line to stderr in one piece, so that the lines of several runners do not mix."""
    with contextlib.suppress(OSError):
        os.write(2, f"{text}\n".encode())


class StampedLog:
    """Appends bytes to a file, with the time before each line. Partial lines are written at once: a hang may follow.

    A file that has reached `limit` bytes gets only the newest output from then on, in a region at its end that is
    written again and again. So the disk does not fill, and the last words are there whatever ends the runner.
    """

    def __init__(self, path: Path, limit: int = 0) -> None:
        self._at_line_start = True
        self._room = limit or sys.maxsize
        self._newest: Newest | None = None
        self._descriptor: int | None = None
        self._lock = threading.Lock()
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            complain(path, error)

    def feed(self, chunk: bytes) -> None:
        stamp = time_stamp()
        pieces = []
        for line in split_lines(chunk):
            pieces.append(stamp + line if self._at_line_start else line)
            self._at_line_start = line.endswith(b"\n")
        with self._lock:
            self._write(b"".join(pieces))

    def end_line(self) -> None:
        if not self._at_line_start:
            self.feed(b"\n")
        self.keep_newest(now=True)

    def keep_newest(self, *, now: bool = False) -> float | None:
        """Write the newest output of a file that is full, not more often than once a second unless it must be `now`.

        Returns the seconds after which it is due; None if nothing waits.
        """
        with self._lock:
            return self._newest.keep(now=now) if self._newest else None

    def _write(self, data: bytes) -> None:
        # A full disk must not stop the program: what cannot be written is lost, but the pipe is still read.
        with contextlib.suppress(OSError):
            if self._descriptor is None:
                return
            if self._newest is None and len(data) > self._room:
                whole = data.rfind(b"\n", 0, self._room) + 1
                os.write(self._descriptor, data[:whole])
                data = data[whole:]
                self._newest = Newest(self._path, os.fstat(self._descriptor).st_size)
            if self._newest is not None:
                self._newest.add(data)
            else:
                self._room -= len(data)
                os.write(self._descriptor, data)


class Newest:
    """The newest output of a log that is full, at its end. The region grows to its size and then keeps it."""

    def __init__(self, path: Path, start: int) -> None:
        self._descriptor = os.open(path, os.O_RDWR)  # without O_APPEND, which would ignore the offset
        is_at_line_start = start == 0 or os.pread(self._descriptor, 1, start - 1) == b"\n"
        text = f"rank_runner: the log has reached run.log_limit_mib: only its newest {NEWEST_BYTES >> 10} KiB follow"
        note = (b"" if is_at_line_start else b"\n") + time_stamp() + text.encode() + b"\n"
        os.pwrite(self._descriptor, note, start)
        self._start = start + len(note)
        self._bytes = bytearray()
        self._num_dropped = 0
        self._kept_at = -math.inf
        self._is_kept = True

    def add(self, data: bytes) -> None:
        self._bytes += data
        self._is_kept = False
        if len(self._bytes) > 2 * NEWEST_BYTES:
            self._drop()
        self.keep()

    def keep(self, *, now: bool = False) -> float | None:
        due_s = self._kept_at + KEEP_EVERY_S - time.monotonic()
        if self._is_kept:
            return None
        if due_s > 0 and not now:
            return due_s
        if len(self._bytes) > NEWEST_BYTES:
            self._drop()
        with contextlib.suppress(OSError):
            os.pwrite(self._descriptor, self._heading() + self._bytes, self._start)
        self._kept_at, self._is_kept = time.monotonic(), True
        return None

    def _drop(self) -> None:
        """Drop the oldest lines. The first line that is left is whole, unless it is longer than everything kept."""
        first = len(self._bytes) - NEWEST_BYTES
        self._num_dropped += (at := self._bytes.find(b"\n", first) + 1 or first)
        del self._bytes[:at]

    def _heading(self) -> bytes:
        """Return a line that says how much was dropped. It fills the region, so that no older bytes follow."""
        if not self._num_dropped:
            return b""
        text = time_stamp() + f"rank_runner: {self._num_dropped} bytes are left out here".encode()
        return text.ljust(NEWEST_BYTES + HEADING_BYTES - len(self._bytes) - 1) + b"\n"


def time_stamp() -> bytes:
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ ").encode()


def split_lines(chunk: bytes) -> list[bytes]:
    """Split `chunk` at newlines only: a carriage return belongs to its line (progress bars)."""
    lines = [line + b"\n" for line in chunk.split(b"\n")]
    lines[-1] = lines[-1][:-1]
    return [line for line in lines if line]


class Rank:
    """One rank: its place, its process and its records."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.attempt: Path = options.attempt_dir.absolute()
        self.place = place(options)
        self.name = f"rank-{self.place['rank']:04d}"
        self.coordinate = coordinate(self.place["rank"], options.topology)
        self.topology = ",".join(f"{axis}={size}" for axis, size in options.topology.items() if size > 1)
        self.host = socket.gethostname()
        self.node = os.environ.get("SLURMD_NODENAME", self.host) if options.rank is None else self.host
        self.process: subprocess.Popen[bytes] | None = None
        self.received: list[int] = []
        self.terminated: float | None = None
        self.parent = os.getppid()
        self.stop_signal = signal.Signals["SIG" + options.stop_signal]
        self.forwarded = forwarded_signals(self.stop_signal, is_local=options.rank is not None)
        self.rings = Rings(options.ring, self.attempt, self.name)
        self.log = StampedLog(self.attempt / "logs" / f"{self.name}.log", options.log_limit_mib << 20)
        if options.ring != "none" and self.rings.why:
            self.log.feed(f"rank_runner: the last calls are not kept: {self.rings.why}\n".encode())

    def run(self, program: list[str]) -> int:
        """Start the program, log its output, wait for its end, and return the exit code for the runner."""
        for number in (signal.SIGUSR2, signal.SIGTERM, signal.SIGURG):
            signal.signal(number, self.receive)
        try:
            self.process = self.start(program)
        except OSError as error:
            self.log.feed(f"rank_runner: cannot start {program[0]}: {error.strerror}\n".encode())
            code = 127 if isinstance(error, FileNotFoundError) else 126
            self.write_exit(code, None, error=f"cannot start {program[0]}: {error.strerror}")
            return code
        self.write_pid()
        if self.rings.folder is not None:
            threading.Thread(target=rank_stacks.watch, args=(self.rings.folder,), daemon=True).start()
        for early in self.received:
            self.process.send_signal(early)
        output = threading.Thread(target=self.copy_output, args=(self.process.stdout,), daemon=True)
        output.start()
        status = self.process.wait()
        if status != 0 and self.terminated is None:
            time.sleep(TERMINATION_LAG_S)
        output.join(DRAIN_TIMEOUT_S)
        self.log.end_line()
        code = self.end(status)
        self.end_rings(status)
        return code

    def end_rings(self, status: int) -> None:
        if status != 0 or self.terminated is not None:
            self.keep_rings()
        why = self.rings.keep_traces(self.process.pid) if self.process is not None else None
        if why is not None:
            say(f"rank_runner: call traces of {self.name} stay in {self.rings.folder}: {why}")
        self.rings.remove()

    def keep_rings(self) -> None:
        """Copy the last calls into the attempt. After TERM, KILL may follow: then there is no later."""
        why = self.rings.keep()
        if why is not None:
            say(f"rank_runner: the last calls of {self.name} stay in {self.rings.folder}: {why}")

    def start(self, program: list[str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            program,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **self.environment()},
            preexec_fn=self.ignore_stop_signal,
        )

    def ignore_stop_signal(self) -> None:
        """The warning before the time limit must not end a program that does not handle it, or not yet."""
        for number in IGNORED_UNTIL_HANDLED:
            if number in (signal.SIGUSR2, self.stop_signal):
                signal.signal(number, signal.SIG_IGN)

    def environment(self) -> dict[str, str]:
        numbers = {name.upper(): str(value) for name, value in self.place.items()}
        run = {
            "BSL_RUN_DIR": str(self.attempt.parent.parent),
            "BSL_ATTEMPT": self.attempt.name,
            "BSL_TOPOLOGY": self.topology,
        }
        return {**numbers, **run, **self.rings.variables(), **rank_recorder.variables(self.attempt)}

    def receive(self, number: int, _frame: FrameType | None) -> None:
        """Pass a signal on to the program, or keep it until the program has started."""
        if number == signal.SIGTERM and self.terminated is None:
            self.note_termination()
        if self.process is None:
            self.received.append(forwarded_signals(self.stop_signal, is_local=True)[signal.Signals(number)])
        elif number in self.forwarded and self.process.returncode is None:
            self.process.send_signal(self.forwarded[signal.Signals(number)])

    def note_termination(self) -> None:
        """Record at once that this rank was told to end: KILL may follow, and no record would mean a lost node."""
        self.terminated = time.time()
        self.write_exit(None, None)
        self.keep_rings()
        if os.getppid() != self.parent:
            signal.signal(signal.SIGALRM, lambda *_: self.process.kill() if self.process else None)
            signal.alarm(ORPHAN_GRACE_S)

    def copy_output(self, stream: IO[bytes]) -> None:
        due_s = None
        while True:
            if due_s is None or select.select([stream], [], [], due_s)[0]:
                chunk = os.read(stream.fileno(), 65536)
                if not chunk:
                    return
                self.log.feed(chunk)
            due_s = self.log.keep_newest()

    def write_pid(self) -> None:
        assert self.process is not None
        write_record(
            self.attempt / "pids" / f"{self.name}.json",
            {
                "rank": self.place["rank"],
                "local_rank": self.place["local_rank"],
                "node_rank": self.place["node_rank"],
                "node": self.node,
                "host": self.host,
                "pid": self.process.pid,
                "runner_pid": os.getpid(),
                "start_ticks": start_ticks(self.process.pid),
                "coordinate": self.coordinate,
                "started": time.time(),
                "job_id": os.environ.get("SLURM_JOB_ID"),
                "step_id": os.environ.get("SLURM_STEP_ID"),
                "rings": str(self.rings.folder) if self.rings.folder else None,
                "why_no_rings": self.rings.why,
                "recorder_files": rank_recorder.files(self.attempt, self.place["rank"]),
            },
        )

    def end(self, status: int) -> int:
        """Write the exit record for wait status `status` (negative: signal) and return the exit code for the runner."""
        if status >= 0:
            self.write_exit(status, None)
            return status
        has_ended_cleanly = -status == signal.SIGABRT and self.has_ended()
        self.write_exit(None, signal_name(-status), clean_end=has_ended_cleanly)
        # gloo and NCCL may abort while they are torn down, after the training has ended well and recorded it.
        return 0 if has_ended_cleanly else 128 - status

    def has_ended(self) -> bool:
        """Whether the last event of the rank is `end`: the training was over."""
        try:
            with (self.attempt / "events" / f"{self.name}.jsonl").open("rb") as stream:
                stream.seek(max(0, stream.seek(0, os.SEEK_END) - EVENT_TAIL_BYTES))
                lines = stream.read().splitlines()
            return bool(json.loads(lines[-1])["kind"] == "end")
        except (OSError, ValueError, LookupError, TypeError):
            return False

    def write_exit(self, code: int | None, ended_by: str | None, **more: Any) -> None:
        write_record(
            self.attempt / "exits" / f"{self.name}.json",
            {
                "rank": self.place["rank"],
                "node": self.node,
                "host": self.host,
                "pid": self.process.pid if self.process else None,
                "code": code,
                "signal": ended_by,
                "time": time.time(),
                "terminated": self.terminated,
                "coordinate": self.coordinate,
                **more,
            },
        )


if __name__ == "__main__":
    sys.exit(main())
