"""Runs the terminal sessions of the manual, and compares what they print with the page.

A fenced block ```console holds a session: `$ command` lines, each followed by its output on a terminal of 100 columns.
The words after `console` say what the session needs: `torch` starts ranks, `slurm` starts a cluster, and `tutorial`
continues where the tutorial ended (in a copy of its folder). Blocks of a page with the same words share one shell, in
order. A command must exit with 0, unless the next command is `echo $?` and shows another status. In the manual, `...`
matches any text of a line; on a line of its own, it matches any number of lines.

What cannot be run here is in a ```text block (output alone) or a ```sh block (commands for another machine). Every
`bsl` line in those is still checked against the existing commands and options.
"""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TUTORIAL = ROOT / "docs" / "tutorial.md"
HOME = "/home/me"
FOLDER = "bigsci-launch"
HOST = "vm"
WORDS = {"torch", "slurm", "tutorial"}
# The same is shown by tests/slurm/test_training.py and test_nodes.py, tests/process/test_rehearse.py, and
# tests/train/test_diff_weights_defects.py, test_survivor.py and test_attach_loops.py.
LONG = {
    ("submit.md", "slurm"),
    ("nodes.md", "slurm"),
    ("rehearse.md", "tutorial"),
    ("restart-spike.md", "torch"),
    ("survivor.md", "torch"),
    ("guards-library.md", "torch"),
}
COLUMNS = 100
SESSION_TIMEOUT_S = 270.0
MARK = "\x1e"


def pages() -> list[Path]:
    """Return the pages whose sessions are run."""
    folders = [ROOT / "docs" / name for name in ("how-to", "explanation", "measurements")]
    return [ROOT / "README.md", TUTORIAL, *(page for folder in folders for page in sorted(folder.glob("*.md")))]


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block: the text after the fence, its lines, and the number of its first line in the page."""

    info: str
    lines: tuple[str, ...]
    first_line: int


def read_blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of a page."""
    blocks, info, held, first = [], None, [], 0
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        if line.startswith("```"):
            if info is None:
                info, held, first = line[3:].strip(), [], number + 1
            else:
                blocks.append(Block(info, tuple(held), first))
                info = None
        elif info is not None:
            held.append(line)
    assert info is None, f"{page}: a block is not closed"
    return blocks


@dataclass(frozen=True, slots=True)
class Command:
    """A command of a session, the output on the page, and its line number there."""

    line: int
    text: str
    expected: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Session:
    """The commands of a page that share a shell, and what they need."""

    page: Path
    needs: frozenset[str]
    commands: tuple[Command, ...]


def read_commands(block: Block) -> list[Command]:
    """Return the commands of a ```console block. A line that begins with `> ` continues the command before it."""
    commands: list[tuple[int, list[str], list[str]]] = []
    for number, line in enumerate(block.lines, start=block.first_line):
        if line.startswith("$ "):
            commands.append((number, [line[2:]], []))
        elif line.startswith("> ") and commands and not commands[-1][2]:
            commands[-1][1].append(line[2:])
        else:
            assert commands, f"line {number}: a console block begins with `$ `"
            commands[-1][2].append(line)
    return [Command(number, "\n".join(text), tuple(expected)) for number, text, expected in commands]


def read_sessions(page: Path) -> list[Session]:
    """Return the sessions of a page; blocks with the same needs form one session."""
    sessions: dict[frozenset[str], list[Command]] = {}
    for block in read_blocks(page):
        words = block.info.split()
        if words[:1] == ["console"]:
            needs = frozenset(words[1:])
            assert needs <= WORDS, f"{page}:{block.first_line}: unknown words {needs - WORDS}"
            sessions.setdefault(needs, []).extend(read_commands(block))
    return [Session(page, needs, tuple(commands)) for needs, commands in sessions.items()]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a command printed, with the names of the manual's machine, and its exit status."""

    printed: str
    status: int


def run_session(session: Session, home: Path) -> list[Outcome]:
    """Return the outcome of each command, in order, up to the first unexpected failure."""
    script = home / "session.sh"
    script.write_text(session_script(session.commands), encoding="utf-8")
    parts = run_on_terminal(["bash", "--norc", str(script)], home).split(MARK)
    printed, statuses = parts[0::2], parts[1::2]
    return [Outcome(as_in_manual(text, home), int(status)) for text, status in zip(printed, statuses, strict=False)]


def session_script(commands: Sequence[Command]) -> str:
    """Return a script that runs the commands in one shell and marks the end and status of each."""
    lines = ["status=0"]
    for command, following in zip(commands, [*commands[1:], None], strict=True):
        may_fail = following is not None and following.text == "echo $?"
        lines += [
            '(exit "$status")',
            command.text,
            f"status=$?; printf '{MARK}%s{MARK}' \"$status\"",
            *([] if may_fail else ['[ "$status" = 0 ] || exit']),
        ]
    return "\n".join(lines) + "\n"


def run_on_terminal(argv: Sequence[str], home: Path) -> str:
    """Run a program in the session's folder and return its output on a terminal of 100 columns without colour."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, COLUMNS, 0, 0))
    process = subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=slave,
        stderr=slave,
        cwd=home / FOLDER,
        env=environment(home),
        start_new_session=True,
    )
    os.close(slave)
    try:
        return read_terminal(master, process).replace("\r\n", "\n")
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
        process.wait()
        os.close(master)


def read_terminal(master: int, process: subprocess.Popen[bytes]) -> str:
    """Return all output until the process has ended, even if other processes still hold the terminal."""
    deadline = time.monotonic() + SESSION_TIMEOUT_S
    held = b""
    while time.monotonic() < deadline:
        has_ended = process.poll() is not None
        if select.select([master], [], [], 0.1)[0]:
            try:
                held += os.read(master, 65536)
            except OSError:  # the last writer has closed it
                break
        elif has_ended:
            break
    return held.decode(errors="replace")


def environment(home: Path) -> dict[str, str]:
    """Return a user's environment: no variables of a job, of bsl, or of a cluster."""
    foreign = ("SLURM", "SBATCH_", "BSL_", "XDG_", "TORCHELASTIC_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    return {
        **kept,
        "HOME": str(home),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "TERM": "dumb",
        "NO_COLOR": "1",
        "COLUMNS": str(COLUMNS),
        "LINES": "50",  # for a dumb terminal, rich believes COLUMNS only together with LINES
        "LC_ALL": "C.UTF-8",
    }


def as_in_manual(text: str, home: Path) -> str:
    """Replace the names of this machine by those in the manual. Logs of the tutorial name the home in which it ran."""
    text = re.sub(r"/tmp/bsl-\w{8}", HOME, text.replace(str(home), HOME))
    return re.sub(rf"\b{re.escape(os.uname().nodename)}\b", HOST, text)


MEASURED = (
    (re.compile(r"\d{4}-\d\d-\d\dT[\d:.]+Z?|\d\d-\d\d \d\d:\d\d:\d\d\.\d+|\b\d{8}-\d{6}Z?\b"), "TIME"),
    (re.compile(r"\b\d+(\.\d+)?(e-?\d+)? (d|h|min|s)\b( \d+ (h|min|s)\b)?"), "SPAN"),
    (re.compile(r"[-+]?\b\d+\.\d+([eE][-+]?\d+)?|\b\d+e[-+]?\d+"), "NUMBER"),
    (re.compile(r"(\bpid |\bnumber |:)\d+\b"), r"\1NUMBER"),
    (re.compile(r"\b\d{4,}\b"), "NUMBER"),
    (re.compile(r"[─━]+"), "─"),
    (re.compile(r"\s+"), " "),
)
"""Times, spans, fractions, pids, line numbers and numbers from 1000 on differ from run to run. All else is exact."""


def without_measurements(line: str) -> str:
    for pattern, stand_in in MEASURED:
        line = pattern.sub(stand_in, line)
    return line.strip()


def pattern_of(expected: Sequence[str]) -> re.Pattern[str]:
    """Return a pattern that matches the outputs that the page allows, without blank lines."""
    lines = []
    for line in filter(None, map(without_measurements, expected)):
        inside = ".*".join(re.escape(part) for part in re.split(r" ?\.\.\. ?", line))
        lines.append(r"(?:[^\n]*\n)*" if line == "..." else rf"{inside}\n")
    return re.compile("".join(lines))


def is_as_expected(expected: Sequence[str], printed: str) -> bool:
    """Return whether a command printed what the page says, apart from measurements."""
    lines = filter(None, map(without_measurements, printed.splitlines()))
    return pattern_of(expected).fullmatch("".join(f"{line}\n" for line in lines)) is not None


@dataclass
class Rehearsals:
    """Sessions that were run, each once and in its own home."""

    outcomes: dict[Session, list[Outcome]] = field(default_factory=dict)
    homes: dict[Session, Path] = field(default_factory=dict)

    def outcome_of(self, session: Session) -> list[Outcome]:
        if session not in self.outcomes:
            self.outcomes[session] = run_session(session, self.home_of(session))
        return self.outcomes[session]

    def home_of(self, session: Session) -> Path:
        if session not in self.homes:
            self.homes[session] = self._make_home(session)
        return self.homes[session]

    def is_as_expected(self, expected: Sequence[str], printed: str) -> bool:
        return is_as_expected(expected, printed)

    def _make_home(self, session: Session) -> Path:
        home = Path(tempfile.mkdtemp(prefix="bsl-", dir="/tmp"))  # short: a cluster's sockets are made in it
        if "tutorial" in session.needs:
            (tutorial,) = read_sessions(TUTORIAL)
            self.outcome_of(tutorial)
            no_sockets = shutil.ignore_patterns("*.sock")
            shutil.copytree(self.homes[tutorial] / FOLDER, home / FOLDER, symlinks=True, ignore=no_sockets)
        else:
            shutil.copytree(ROOT / "configs", home / FOLDER / "configs")
            for name in ("benchmarks", "diagnostics", "slurm"):
                (home / FOLDER / name).symlink_to(ROOT / name)
        return home

    def end(self) -> None:
        """End what sessions left running, and remove every home."""
        for session, home in self.homes.items():
            end_runs(home)
            if "slurm" in session.needs:
                bsl_in(home, "cluster down")
            shutil.rmtree(home, ignore_errors=True)


def end_runs(home: Path) -> None:
    """Cancel all active runs, and wait for their end."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        runs = json.loads(bsl_in(home, "list --json") or '{"runs": []}')["runs"]
        alive = [run["directory"] for run in runs if run["state"] in ("RUNNING", "PENDING")]
        if not alive:
            return
        for directory in alive:
            bsl_in(home, f"cancel {directory}")


def bsl_in(home: Path, words: str) -> str:
    """Return what `bsl WORDS` prints in a session's folder; `words` are as typed in a shell."""
    done = subprocess.run(
        ["bash", "-c", f"bsl {words}"],
        cwd=home / FOLDER,
        env=environment(home),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return done.stdout


@pytest.fixture(scope="session")
def rehearsals() -> Iterator[Rehearsals]:
    """The sessions of the manual; each runs when the first of its commands is tested."""
    held = Rehearsals()
    yield held
    held.end()


@pytest.fixture(scope="session")
def print_alone(rehearsals: Rehearsals) -> Callable[[str], str]:
    """`print_alone("list --json")`: what a command prints in a fresh folder."""
    home = rehearsals.home_of(Session(ROOT, frozenset(), ()))
    return lambda words: bsl_in(home, words)


@pytest.fixture(scope="session")
def print_after_tutorial(rehearsals: Rehearsals) -> Callable[[str], str]:
    """`print_after_tutorial("status demo")`: what a command prints in a copy of the tutorial's folder."""
    pytest.importorskip("deepspeed")
    home = rehearsals.home_of(Session(ROOT, frozenset({"tutorial"}), ()))
    return lambda words: bsl_in(home, words)


@pytest.fixture
def blocks_of() -> Callable[[Path], list[Block]]:
    """`blocks_of(page)`: the fenced blocks of a page."""
    return read_blocks


@pytest.fixture
def compare() -> Callable[[str, str], bool]:
    """`compare(expected, printed)`: whether a command printed what the page says."""
    return lambda expected, printed: is_as_expected(expected.splitlines(), printed)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make one test per command of the manual, for tests that take `session` and `index`."""
    if "session" not in metafunc.fixturenames:
        return
    cases = []
    for session in (session for page in pages() if page.is_file() for session in read_sessions(page)):
        needs_torch = session.needs & {"torch", "tutorial"}
        marks = [
            pytest.mark.timeout(2 * SESSION_TIMEOUT_S),
            *([pytest.mark.torch] if needs_torch else []),
            *([pytest.mark.slurm] if "slurm" in session.needs else []),
            *([pytest.mark.long] if any((session.page.name, need) in LONG for need in session.needs) else []),
        ]
        for index, command in enumerate(session.commands):
            name = f"{session.page.name}:{command.line} {command.text.splitlines()[0][:40]}"
            cases.append(pytest.param(session, index, marks=marks, id=name))
    metafunc.parametrize(("session", "index"), cases)
