"""Ranks as processes on this machine, for small trials and for machines without Slurm.

The script of an attempt runs this module as a program, the launcher. The launcher starts one runner per rank, ends the
others when one fails, and has `exit.json` written at the end. `Launcher` and `start_launcher` are for code that starts,
queries or stops a launcher.

    python run_module.py bigsci_launch.scheduler.local --attempt-dir DIR --world-size 8 --exit-reason FILE --wait-s 60
        --lease FILE -- PYTHON rank_runner.py OPTIONS -- PROGRAM

Signals to the launcher: USR2 asks the ranks to save and stop. TERM, INT or HUP ends them, with KILL after a grace
period; a second one kills them at once.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from bigsci_launch.errors import RunDirError
from bigsci_launch.own_place import why_not_ours
from bigsci_launch.printable import one_line
from bigsci_launch.procfs import PROC, start_ticks
from bigsci_launch.scheduler.lease import kept_lease

KILL_GRACE_S = 10.0
"""Time from TERM to KILL for the remaining ranks after one has failed."""
STOP_GRACE_S = 30.0
"""Time from TERM to KILL when the attempt is cancelled: Slurm's default KillWait."""
POLL_S = 0.05
FIRST_PORT, NUM_PORTS = 10000, 20000


@dataclass(frozen=True, slots=True)
class Launcher:
    """A launcher process on `host`. PID and start time together identify it, even after the PID is reused."""

    pid: int
    start_ticks: int
    host: str

    @property
    def is_here(self) -> bool:
        return self.host == socket.gethostname()

    @property
    def is_alive(self) -> bool:
        """Whether it still runs on this machine; False for a launcher on another host."""
        return self.is_here and start_ticks(self.pid) == self.start_ticks

    def ask_to_stop(self, attempt: Path) -> None:
        """Have it ask its ranks to save and stop. Raises RunDirError if it is not the launcher of `attempt`."""
        self._signal(signal.SIGUSR2, attempt)

    def terminate(self, attempt: Path) -> None:
        """Ask it to end its ranks; the second time, to kill them at once. Raises as `ask_to_stop`."""
        self._signal(signal.SIGTERM, attempt)

    def _signal(self, number: int, attempt: Path) -> None:
        why = self.why_not_of(attempt) if self.is_alive else None
        if not self.is_alive:
            return
        if why is not None:
            raise RunDirError(f"no signal sent to pid {self.pid}: {why}", hint=f"`ps -fp {self.pid}` shows what it is")
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def why_not_of(self, attempt: Path) -> str | None:
        """Return why this process is not known to be the launcher of `attempt`, and this user's; None if it is.

        The PID is from a file, whose writer may have named any process.
        """
        try:
            is_ours = (PROC / str(self.pid)).stat().st_uid == os.geteuid()
        except OSError:
            return "it has ended"
        if not is_ours:
            return "it belongs to another user"
        words = read_words(self.pid)
        if words is None:
            return "its command line cannot be read"
        is_named = any(is_same(word, place) for word in words for place in (attempt, attempt / "script.sh"))
        return None if is_named else f"its command does not name {attempt}"


def read_words(pid: int, wait_s: float = 5.0) -> list[str] | None:
    """Return the command line of a process; None if it has ended, or does not answer in time: the file waits for a lock
    that a stuck process may hold."""
    found: list[bytes] = []

    def read() -> None:
        with contextlib.suppress(OSError):
            found.append((PROC / str(pid) / "cmdline").read_bytes())

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    reader.join(wait_s)
    return [os.fsdecode(word) for word in found[0].split(b"\0")] if found and found[0] else None


def is_same(word: str, place: Path) -> bool:
    """Whether a word of a command line names a file or folder, perhaps by way of a link."""
    try:
        return word.startswith("/") and (Path(word) == place or Path(word).samefile(place))
    except (OSError, ValueError):
        return False


def start_launcher(script: Path, output: Path, working_directory: Path) -> tuple[Launcher, subprocess.Popen[bytes]]:
    """Start the script of an attempt in its own session, appending its output to `output`, where only we write."""
    with output.open("ab") as stream:
        os.fchmod(stream.fileno(), os.fstat(stream.fileno()).st_mode & 0o755)
        process = subprocess.Popen(
            ["/bin/bash", str(script)],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            cwd=working_directory,
            start_new_session=True,
        )
    return Launcher(process.pid, start_ticks(process.pid) or 0, socket.gethostname()), process


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """Yield a rendezvous port that no other launcher on this machine will choose.

    Rank 0 must be able to bind the port, so the launcher cannot hold it. Instead it holds an abstract socket with the
    port in its name, which goes away with the process. The ports are below the ephemeral range, so outgoing
    connections never use them. Any process may hold such names: a launcher that finds none left does without one.
    """
    for offset in range(NUM_PORTS):
        port = FIRST_PORT + (os.getpid() * 7 + offset) % NUM_PORTS
        with contextlib.closing(socket.socket(socket.AF_UNIX)) as name:
            try:
                name.bind(f"\0bsl-port-{port}")
            except OSError:
                continue
            if is_free(port):
                yield port
                return
    for port in range(FIRST_PORT, FIRST_PORT + NUM_PORTS):
        if is_free(port):
            yield port
            return
    raise OSError("no free port below the ephemeral range")


def is_free(port: int) -> bool:
    """Whether a server could listen on `port` on every address."""
    with contextlib.closing(socket.socket()) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


class Children:
    """Processes that this one has started, by number, each in its own session: Ctrl-C in the terminal reaches only the
    launcher, and KILL reaches all that a child has started."""

    def __init__(self) -> None:
        self._running: dict[int, subprocess.Popen[bytes]] = {}

    @property
    def numbers(self) -> list[int]:
        """Those that still run."""
        return sorted(self._running)

    def start(self, number: int, argv: Sequence[str], environment: dict[str, str]) -> None:
        self._running[number] = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, env=environment, start_new_session=True
        )

    def reap(self) -> list[tuple[int, int]]:
        """Return those that have ended since the last call, with exit code or 128 + signal."""
        ended = []
        for number, process in list(self._running.items()):
            if (status := process.poll()) is not None:
                del self._running[number]
                ended.append((number, status if status >= 0 else 128 - status))
        return ended

    def signal(self, number: int) -> None:
        for process in list(self._running.values()):
            process.send_signal(number)

    def kill(self) -> None:
        """Send KILL to every remaining session."""
        for number in self.numbers:
            self.end(number)

    def end(self, number: int) -> None:
        """Send KILL to the session of one, if it has not been reaped."""
        if (process := self._running.get(number)) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


class RankRunners:
    """The runners of one attempt, from start to end: each starts a rank, or a launcher of `ranks_per_task` of them."""

    def __init__(self, command: Sequence[str], world_size: int, wait_s: float, ranks_per_task: int = 1) -> None:
        self._before, self._after = split_command(command)
        self._world_size, self._ranks_per_task = world_size, ranks_per_task
        self._wait_s = wait_s
        self._children = Children()
        self._deadline: float | None = None
        self._is_ending = False
        self._is_cut_short = False
        self.exit_code = 0
        """Exit code of the first rank that failed; 0 if none has."""
        self.terminated: float | None = None
        self.stop_requested = False

    def run(self, environment: dict[str, str]) -> int:
        """Start every runner and wait for all. Returns the exit code of the first that failed, or 0."""
        for number in range(self._world_size // self._ranks_per_task):
            if not self._is_ending:
                self._children.start(number, [*self._before, "--rank", str(number), *self._after], environment)
        if self._is_ending:
            self._children.signal(signal.SIGTERM)  # the request may have come while a rank was being started
        while self._children.numbers:
            for _, code in self._children.reap():
                self._note_end(code)
            self._enforce_deadline()
            time.sleep(POLL_S)
        return 128 + signal.SIGTERM if self._is_cut_short and self.exit_code == 0 else self.exit_code

    def _note_end(self, code: int) -> None:
        if code != 0 and not self._is_ending:
            self.exit_code = code
            self.end(KILL_GRACE_S)
        elif code != 0 and self.terminated is not None:
            self._is_cut_short = True
        elif self._deadline is None and self._wait_s > 0:
            self._deadline = time.monotonic() + self._wait_s

    def end(self, grace_s: float) -> None:
        """Send TERM to every rank now, and KILL after `grace_s`."""
        self._is_ending = True
        self._deadline = time.monotonic() + grace_s
        self._children.signal(signal.SIGTERM)

    def _enforce_deadline(self) -> None:
        if self._deadline is None or time.monotonic() < self._deadline:
            return
        if self._is_ending:
            self._children.kill()
            return
        each = self._ranks_per_task
        running = [number * each + at for number in self._children.numbers for at in range(each)]
        say(f"ranks {running} still run {self._wait_s:g} s after the first rank ended: ending them")
        self.exit_code = 1
        self.end(KILL_GRACE_S)

    def on_termination(self, _number: int, _frame: FrameType | None) -> None:
        if self.terminated is not None:
            self._children.kill()
            return
        self.terminated = time.time()
        self.end(STOP_GRACE_S)

    def on_stop_request(self, _number: int, _frame: FrameType | None) -> None:
        self.stop_requested = True
        self._children.signal(signal.SIGUSR2)


def split_command(command: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split into the runner's command and `-- PROGRAM`; `--rank N` goes between them."""
    at = list(command).index("--")
    return list(command[:at]), list(command[at:])


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    started = time.time()
    runners = RankRunners(options.command, options.world_size, options.wait_s, options.ranks_per_task)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, runners.on_termination)
    signal.signal(signal.SIGUSR2, runners.on_stop_request)
    with kept_lease(options.lease), reserved_port() as port:
        say(f"start attempt={options.attempt_dir.name} ranks={options.world_size} rendezvous=127.0.0.1:{port}")
        code = runners.run({**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
    code = write_exit(
        options.exit_reason,
        options.attempt_dir,
        options.world_size,
        started,
        code,
        terminated=runners.terminated,
        stop_requested=runners.stop_requested,
    )
    say(f"end attempt={options.attempt_dir.name} exit_code={code}")
    return code


def write_exit(
    helper: Path,
    attempt: Path,
    world_size: int,
    started: float,
    code: int,
    *,
    terminated: float | None,
    stop_requested: bool,
) -> int:
    """Have the same helper as on Slurm write `exit.json`. Returns the training's exit code, as the helper found it.

    Hours have passed since the script looked whose it is, so it is asked again.
    """
    if (why := why_not_ours(helper.parent)) is not None:
        say(f"the program that writes exit.json is not started: {why}")
        return code
    argv = [sys.executable, "-I", "-S", str(helper), "exit-reason", "--attempt-dir", str(attempt)]
    argv += ["--world-size", str(world_size), "--started", str(started), "--exit-code", str(code)]
    argv += ["--terminated", str(terminated)] if terminated else []
    argv += ["--stop-requested"] if stop_requested else []
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, check=False)
    except OSError as error:
        say(f"the program that writes exit.json cannot be started: {error}")
        return code
    if done.returncode != 0:
        say("exit.json could not be written")
    return int(done.stdout) if done.stdout.strip().isdigit() else code


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Start the ranks of an attempt on this machine.")
    parser.add_argument("--attempt-dir", type=Path, required=True)
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument("--ranks-per-task", type=int, default=1, help="each runner starts a launcher of so many ranks")
    parser.add_argument("--exit-reason", type=Path, required=True, help="the helper that writes exit.json")
    parser.add_argument("--lease", type=Path, required=True, help="the file that is renewed while the ranks run")
    parser.add_argument(
        "--wait-s", type=float, required=True, help="seconds that ranks may run after the first has ended; 0: no limit"
    )
    words = list(sys.argv[1:] if arguments is None else arguments)
    at = words.index("--")
    options = parser.parse_args(words[:at])
    options.command = words[at + 1 :]
    return options


def say(text: str) -> None:
    """Write a line to the attempt's output, in the format of the job script. The disk that it is on may be full.

    The text may quote any program, and exit records are read from that output: it is one line, whatever is in it.
    """
    with contextlib.suppress(OSError):
        os.write(1, f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} bsl: {one_line(text)}\n".encode())


if __name__ == "__main__":
    sys.exit(main())
