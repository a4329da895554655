"""A run under attack, as the function of a case sees it: its processes, its steps, and how to hurt them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from bigsci_launch.errors import BslError
from bigsci_launch.runs.events import read_events
from bigsci_launch.runs.layout import AttemptDir, RunDir, rank_files, read_json
from recovering.attack import Attack
from recovering.cases import Layout
from recovering.injured_run import BSL, read_generations, steps_of

LOOK_S = 0.02
CONTROLLER, TRAINER = "bigsci_launch.recover.controller", "bigsci_launch.train"


class StartedRun:
    """A run, its run file and its processes. Everything is found by the folder of the run, and only that is hurt."""

    def __init__(self, attack: Attack, path: Path, run: RunDir, injuries: Path) -> None:
        self.attack, self.path, self.run, self.name = attack, path, run, run.name
        self.injuries = injuries
        self.problems: list[str] = []
        self.notes: list[str] = []
        self.exit_code: int | None = None
        self.earlier: list[tuple[RunDir, Layout]] = []
        """Runs whose losses count as the earlier ones of this run, which continues from their checkpoints."""
        self.variables: dict[str, str] = {}
        """Of the environment of this run and of all commands about it."""
        self._at_end: list[Callable[[], object]] = []
        self._until = time.monotonic() + attack.limit_s
        self._process: subprocess.Popen[bytes] | None = None
        injuries.mkdir(parents=True, exist_ok=True)

    # Start, wait, end

    def start(
        self,
        *more: str,
        environment: Mapping[str, str] | None = None,
        before: Sequence[str] = (),
        local: bool = True,
    ) -> None:
        """Submit the run, or submit it again after it has ended.

        `more` are further arguments of `bsl submit`; `before` is what starts its command, such as `unshare`. Without
        `local`, Slurm gets it, and it is awaited all the same.
        """
        words = [*before, sys.executable, "-c", BSL, "submit", str(self.path), "--local" if local else "--wait", *more]
        known = {**self.environment(), **(environment or {})}
        with self.output.open("ab") as output:
            self._process = subprocess.Popen(
                words, env=known, cwd=self.path.parent, stdout=output, stderr=subprocess.STDOUT
            )

    def environment(self) -> dict[str, str]:
        """Return the environment in which processes of this run can be injured from inside."""
        site = str(Path(__file__).parent / "injured_site")
        paths = os.pathsep.join(filter(None, (site, os.environ.get("PYTHONPATH"))))
        return {**os.environ, "BSL_INJURIES": str(self.injuries), "PYTHONPATH": paths, **self.variables}

    @property
    def output(self) -> Path:
        """What `bsl submit` has printed, of all attempts."""
        return self.path.with_suffix(".out")

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def wait(self) -> int:
        """Wait for the end, and return the exit code; 124 if it does not end within the limit of the attack."""
        assert self._process is not None
        try:
            self.exit_code = self._process.wait(max(1.0, self._until - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(60)
            self.exit_code = 124
        return self.exit_code

    def at_end(self, work: Callable[[], object]) -> None:
        """Do this after the run was judged, the last one first; it may fail."""
        self._at_end.append(work)

    def end_all(self) -> None:
        """End every process that still belongs to this run, and undo what the case has set up."""
        for pid in self.processes():
            self.kill(pid, signal.SIGKILL)
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        for work in reversed(self._at_end):
            with suppress(Exception):
                work()

    # Look

    @property
    def attempt(self) -> AttemptDir:
        """The newest attempt; waits until there is one."""
        while (found := self.run.latest_attempt()) is None:
            self.keep_waiting("an attempt")
        return found

    def step(self) -> int:
        """Return the newest step that the newest attempt has finished; 0 before the first."""
        found = self.run.latest_attempt()
        steps = [] if found is None else steps_of(found, self.attack.layout)
        return max((int(each["step"]) for each in steps), default=0)

    def until(self, step: int) -> None:
        """Wait until a step is finished.

        Raises:
            SystemError: the run ended before, or did not get there within the limit of the attack.
        """
        while self.step() < step:
            self.keep_waiting(f"step {step}")

    def until_standbys(self) -> None:
        """Wait until all standbys wait next to their ranks."""
        while not any(each.get("phase") == "standby" for each in self.generations()):
            self.keep_waiting("standbys")

    def until_generation(self, number: int) -> None:
        """Wait until that generation has begun."""
        while not any(each["event"] == "began" and each["generation"] >= number for each in self.generations()):
            self.keep_waiting(f"generation {number}")

    def until_noticed(self) -> None:
        """Wait until the controller has noticed a failure: the recovery begins."""
        while not any(each["event"] == "failed" for each in self.generations()):
            self.keep_waiting("the notice of a failure")

    def generations(self) -> list[dict[str, Any]]:
        """Return the records of the controller, of the newest attempt."""
        return read_generations(self.attempt)

    def reason(self) -> str | None:
        """Return how the newest attempt ended, as its exit.json says."""
        with suppress(BslError):
            return str(read_json(self.attempt.exit)["reason"])
        return None

    def submit_at_once(self, *more: str) -> subprocess.CompletedProcess[str]:
        """Submit it in the foreground and return what was printed; for submissions that must be refused."""
        return self.bsl("submit", self.path, "--local", *more)

    def failures(self) -> list[tuple[str, int | None]]:
        """Return what ended each generation, and the rank that it names, of all attempts: `("died", 0)`."""
        records = [each for attempt in self.run.attempts() for each in read_generations(attempt)]
        return [(str(each["kind"]), each.get("rank")) for each in records if each["event"] == "failed"]

    def keep_waiting(self, what: str) -> None:
        """Wait for a moment; what a loop does until something has come.

        Raises:
            SystemError: the run has ended, or takes longer than the limit of the attack.
        """
        if not self.is_running or time.monotonic() > self._until:
            raise SystemError(f"waited for {what}, and the run {'hangs' if self.is_running else 'has ended'}")
        time.sleep(LOOK_S)

    # Processes

    def rank_pid(self, rank: int) -> int:
        return int(self._record_of(rank)["pid"])

    def runner_pid(self, rank: int) -> int:
        return int(self._record_of(rank)["runner_pid"])

    def _record_of(self, rank: int) -> dict[str, Any]:
        while True:
            with suppress(BslError, KeyError):
                found: dict[str, Any] = read_json(rank_files(self.attempt.pids, ".json")[rank])
                return found
            self.keep_waiting(f"the process of rank {rank}")

    @property
    def controller_pid(self) -> int:
        return self._pids_of(CONTROLLER)[0]

    @property
    def standby_pids(self) -> list[int]:
        """The trainers that wait to replace a rank."""
        ranks = {self.rank_pid(rank) for rank in range(self.attack.layout.ranks)}
        return [pid for pid in self.trainer_pids if pid not in ranks]

    @property
    def trainer_pids(self) -> list[int]:
        """All processes that run the trainer: ranks and standbys."""
        return self._pids_of(TRAINER)

    def _pids_of(self, program: str) -> list[int]:
        """Return the processes that run this program themselves; what follows ` -- ` is run by others."""
        return [pid for pid, line in self.processes().items() if program in line.split(" -- ")[0].split()]

    def processes(self) -> dict[int, str]:
        """Return all living processes of this run with their command lines, but not `bsl submit` itself."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError, ValueError):
                line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                theirs = f"BSL_RUN_DIR={self.run.path}".encode() in (folder / "environ").read_bytes().split(b"\0")
                if line and (theirs or f"{self.run.path}/" in line):
                    found[int(folder.name)] = line
        return {pid: line for pid, line in found.items() if pid != os.getpid()}

    def kill(self, pid: int, number: int = signal.SIGKILL) -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, number)

    # Hurt from inside

    def inject(self, rank: int, code: str) -> None:
        """Run Python code in a thread of that rank's process, and wait until it has begun."""
        self.inject_into(self.rank_pid(rank), code)

    def inject_into(self, pid: int, code: str) -> None:
        program = self.injuries / f"{pid}.py"
        hidden = program.with_name(f".{pid}")
        hidden.write_text(code)
        hidden.rename(program)
        while program.exists():
            self.keep_waiting("the injected code")

    # Say

    def bsl(self, *arguments: str | Path, limit_s: float = 120.0) -> subprocess.CompletedProcess[str]:
        """Run a command of bsl in the folder of the run file. A run is named by `run.run.path`."""
        command = [sys.executable, "-c", BSL, *map(str, arguments)]
        known = {**os.environ, **self.variables}
        folder = self.path.parent
        return subprocess.run(command, cwd=folder, env=known, capture_output=True, text=True, timeout=limit_s)

    def status(self) -> dict[str, Any]:
        """Return what `bsl status --json` says."""
        found: dict[str, Any] = json.loads(self.bsl("status", self.run.path, "--json").stdout or "{}")
        return found

    def claim(self, text: str, holds: bool) -> None:
        """Say what must hold; what does not hold is a problem of the row."""
        if not holds:
            self.problems.append(f"not true: {text}")

    def note(self, text: str) -> None:
        """Add a remark to the row."""
        self.notes.append(text)


def losses(*runs: tuple[RunDir, Layout]) -> dict[int, dict[str, Any]]:
    """Return the last record of each step, of all attempts of all these runs together."""
    attempts = [(attempt, layout) for run, layout in runs for attempt in run.attempts()]
    return {each["step"]: each for attempt, layout in attempts for each in steps_of(attempt, layout)}


def events_of(run: RunDir, kind: str, rank: int | None = None) -> list[dict[str, Any]]:
    """Return the records of this kind that the ranks, or one, have left in the newest attempt."""
    attempt = run.latest_attempt()
    files = {} if attempt is None else rank_files(attempt.events, ".jsonl")
    chosen = [path for number, path in files.items() if rank in (None, number)]
    return [each for path in chosen for each in read_events(path) if each["kind"] == kind]
