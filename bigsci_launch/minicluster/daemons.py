"""Starts and ends the cluster's daemons; no other module here starts programs.

Rule: a process is recorded before it does anything. A shell is started, its PID is recorded, and only then the shell is
asked to become the daemon. If `up` dies before that, the shell reads the end of its input and exits.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from bigsci_launch.errors import ClusterError
from bigsci_launch.minicluster.directory import ClusterDir
from bigsci_launch.minicluster.proctree import descendants, step_daemons
from bigsci_launch.procfs import Process, read_process, read_processes
from bigsci_launch.safe_files import parse_json, read_file

SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
TOOL_TIMEOUT_S = 20.0
KILL_TIMEOUT_S = 20.0
POLL_S = 0.02
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
INSTALL_HINT = "install them with `apt-get install slurm-wlm munge iproute2` (slurm/minicluster/install.sh does)"
GATE = 'read -r _ && exec "$@"'


@dataclass(frozen=True, slots=True)
class Recorded:
    """One line of the record: a process that was started. PIDs only mean something within the boot `boot_id`."""

    name: str
    pid: int
    start_ticks: int
    boot_id: str


@dataclass(frozen=True, slots=True)
class Started:
    """A daemon that has just been started by this process, with its input still open."""

    name: str
    popen: subprocess.Popen[str]

    @property
    def pid(self) -> int:
        return self.popen.pid

    def tell(self) -> None:
        """Write a line to its input, which opens the next gate."""
        assert self.popen.stdin is not None
        # A process that has already ended is reported, with its output, while waiting for the cluster.
        with suppress(BrokenPipeError):
            self.popen.stdin.write("\n")
            self.popen.stdin.flush()

    def dismiss(self) -> None:
        """Close its input, which ends it if a gate is still closed, and wait for its end."""
        assert self.popen.stdin is not None
        self.popen.stdin.close()
        self.popen.wait()


def search_path() -> str:
    """Return PATH with the system's sbin folders, which an ordinary user's PATH lacks."""
    return f"{os.environ.get('PATH', '')}:{SYSTEM_PATH}"


def require_programs(names: Sequence[str]) -> dict[str, str]:
    """Return the path of each program by name.

    Raises:
        ClusterError: names every program that is missing.
    """
    paths = {name: shutil.which(name, path=search_path()) for name in names}
    missing = [name for name, path in paths.items() if path is None]
    if missing:
        raise ClusterError(f"not installed: {', '.join(missing)}", hint=INSTALL_HINT)
    return {name: path for name, path in paths.items() if path is not None}


def start_daemon(directory: ClusterDir, name: str, argv: Sequence[str]) -> Started:
    """Start `argv` in its own session. It is recorded before it becomes the daemon, and its input stays open."""
    with directory.output(name).open("ab") as output:
        popen = subprocess.Popen(
            ["/bin/sh", "-c", GATE, "sh", *argv],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd="/",
            env=_daemon_environment(directory),
            start_new_session=True,
            text=True,
        )
    started = Started(name, popen)
    try:
        _append_record(directory, started)
    except BaseException:
        started.dismiss()
        raise
    started.tell()
    return started


def _daemon_environment(directory: ClusterDir) -> dict[str, str]:
    # Nothing from the caller: inside a job its SLURM_* variables would reach the daemons, and through them every task.
    return {"PATH": SYSTEM_PATH, "LANG": "C.UTF-8", "SLURM_CONF": str(directory.slurm_conf)}


def _append_record(directory: ClusterDir, started: Started) -> None:
    process = read_process(started.pid)
    assert process is not None, "a child that was not waited for has an entry in /proc"
    line = json.dumps(asdict(Recorded(started.name, process.pid, process.start_ticks, boot_id())))
    with directory.processes.open("a", encoding="utf-8") as stream:
        stream.write(line + "\n")
        stream.flush()
        os.fsync(stream.fileno())


def boot_id() -> str:
    return BOOT_ID.read_text(encoding="ascii").strip()


def read_record(directory: ClusterDir) -> list[Recorded]:
    """Return every process that was started, oldest first. A torn last line is a shell that was never released."""
    try:
        lines = read_file(directory.processes).decode("utf-8").split("\n")
    except FileNotFoundError:
        return []
    return [Recorded(**parse_json(line)) for line in lines[:-1]]


def living(recorded: Sequence[Recorded], processes: dict[int, Process]) -> list[Recorded]:
    """Return those of `recorded` that still run. A later process with the same PID does not count."""
    boot = boot_id()
    return [r for r in recorded if r.boot_id == boot and _start_ticks(processes, r.pid) == r.start_ticks]


def _start_ticks(processes: dict[int, Process], pid: int) -> int | None:
    process = processes.get(pid)
    return process.start_ticks if process else None


def kill_cluster_processes(directory: ClusterDir) -> int:
    """End every process of the cluster. Returns how many there were.

    All are stopped first, again and again until none is found running, so that none can start another unnoticed.
    Children are killed before their parents: if we are killed in between, the rest can still be found through their
    parents.

    Raises:
        ClusterError: we are one of them, or some do not end; the message names their PIDs.
    """
    stopped = _stop_all(directory)
    for process in stopped:
        _signal(process.pid, signal.SIGKILL)
    _wait_gone(stopped)
    return len(stopped)


def _stop_all(directory: ClusterDir) -> list[Process]:
    """Stop every process of the cluster. Returns all of them, children before parents."""
    stopped: set[int] = set()
    while True:
        processes = read_processes()
        roots = {recorded.pid for recorded in living(read_record(directory), processes)}
        ours = descendants(roots | step_daemons(directory.path, processes) | stopped, processes)
        if os.getpid() in ours:
            raise ClusterError("a job of the cluster cannot end the cluster", hint="run this command outside the job")
        if stopped.issuperset(ours):
            return [processes[pid] for pid in ours]
        for pid in ours:
            _signal(pid, signal.SIGSTOP)
        stopped.update(ours)


def kill_children(pid: int) -> int:
    """Kill the children of `pid` and wait for their end. Returns how many there were."""
    children = [process for process in read_processes().values() if process.parent_pid == pid]
    for child in children:
        _signal(child.pid, signal.SIGKILL)
    _wait_gone(children)
    return len(children)


def _signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _wait_gone(processes: Sequence[Process]) -> None:
    if wait_until(lambda: not any(map(_is_still_there, processes)), KILL_TIMEOUT_S):
        return
    left = [process for process in processes if _is_still_there(process)]
    raise ClusterError(
        f"{len(left)} processes do not end: " + ", ".join(f"{process.command} {process.pid}" for process in left),
        hint="`cat /proc/PID/wchan` shows what such a process is waiting for; `bsl cluster down` can be repeated",
    )


def _is_still_there(process: Process) -> bool:
    now = read_process(process.pid)
    return now is not None and now.is_alive and now.start_ticks == process.start_ticks


def run_tool(argv: Sequence[str], *, text: str = "") -> subprocess.CompletedProcess[str]:
    """Run a system program to its end with `text` as input. The caller checks the exit status.

    Raises:
        ClusterError: no answer in time.
    """
    try:
        return subprocess.run(
            argv,
            input=text,
            capture_output=True,
            text=True,
            timeout=TOOL_TIMEOUT_S,
            check=False,
            env=_tool_environment(),
        )
    except subprocess.TimeoutExpired as error:
        raise ClusterError(f"{argv[0]}: no answer in {TOOL_TIMEOUT_S:.0f} s") from error


def _tool_environment() -> dict[str, str]:
    return {"PATH": search_path(), "LANG": "C.UTF-8"}


def require_tool(argv: Sequence[str], *, text: str = "") -> str:
    """Run a system program with `text` as input and return its output.

    Raises:
        ClusterError: it failed; the message contains its own.
    """
    done = run_tool(argv, text=text)
    if done.returncode != 0:
        raise ClusterError(f"{' '.join(argv)}: {done.stderr.strip() or f'exit status {done.returncode}'}")
    return done.stdout


def wait_until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Wait for `condition`. Returns whether it became true within `timeout_s` seconds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True
