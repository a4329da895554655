"""The tables of SECURITY.md, held against what runs of each kind really do: their ports, and the modes of their files.

Every socket at which a process of a run listens is in a row of the table of ports, at a place which that row names.
Every path of a run is in a row of the table of modes, and has the mode in it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bigsci_launch.data.indexed import IndexedWriter
from bigsci_launch.runs.layout import RunDir
from tests.support.listening import Listener, allowed_places, listeners, processes_of, table
from tests.support.ports import find_port
from tests.support.waiting import wait_until
from tests.unit.house.conftest import PACKAGE, standalone

from .test_check_node import scontrol, start

__all__ = ["scontrol"]
pytestmark = pytest.mark.torch
PORTS, MODES = table("Which port listens, where and when"), table("What is stored with which mode")
MODEL = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "sequence_length": 8, "vocab_size": 64}
RINGS, IN_EACH = "rings of ranks that run", "what is in such a folder"
"""Rows that no path of the run is in: a test below looks at rings, tests/unit/watch/test_strangers.py at the other."""
SECRET = "a-value-of-env-4711"
STORE, GLOO, RECORDER = "torch's store", "gloo", "a rank's recorder"
METRICS, METRICS_PROGRAM = "metrics of a run", "bigsci_launch metrics"
CONTROLLER, CHECK, FORK = "controller of `survive`", "node check", "`bsl spy --flight-recorder=fork`"
ELSEWHERE = {"`bsl cluster`": "tests/slurm/test_survive.py", "`srun` of a step": "tests/slurm/test_survive.py"}
NOT_TRIED = ["NCCL"]
LIMIT_S = 120.0
LISTENING = {
    "door.py": f"{CONTROLLER}, {CHECK}",
    "train/rank/flight_recorder.py": RECORDER,
    "node_injection.py": FORK,
    "export/port.py": METRICS,
    "free_port.py": "none: it closes at once, and accepts nobody",
    "launch/job/free_port.py": "the same file",
    "lab/step_loop.py": RECORDER,
    "lab/host_stall.py": "none: a hang of the lab, whose server accepts nobody",
}
"""Which programs of ours listen, and the row that says so. Torch, Slurm and munge are not ours."""
LISTENS = re.compile(r"\.listen\(|create_server\(|_WorkerServer\(|HTTPServer\b")


@dataclass
class Training:
    """A run of two ranks with `survive` on this machine, and what was seen of it. It was submitted under `umask`."""

    folder: Path
    umask: int
    listening: list[Listener] = field(default_factory=list)
    forked: list[Listener] = field(default_factory=list)
    rings: dict[Path, int] = field(default_factory=dict)
    modes: dict[str, int] = field(default_factory=dict)

    @property
    def run(self) -> RunDir:
        return RunDir(self.folder / "runs" / "run")

    def submit(self) -> None:
        config = {
            "run": {"name": "run"},
            "slurm": {"site": "local"},
            "parallelism": {"data_parallel_size": 2},
            "model": MODEL,
            "training": {"steps": 1_000_000, "micro_batch_size": 1, "global_batch_size": 2},
            "checkpoint": {"save_interval": 500_000},
            "data": {"prefix": "tokens"},
            "env": {"SECRET_WORD": {"value": SECRET, "reason": "a test looks for it"}},
            "monitor": {
                "notify": {"webhook": f"http://127.0.0.1:9/{SECRET}"},
                "metrics": {"port": find_port()},
                "trackers": ["tensorboard"],
            },
            "survive": True,
        }
        (self.folder / "run.yaml").write_text(json.dumps(config))
        with (self.folder / "output").open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "bigsci_launch", "submit", "run.yaml"],
                cwd=self.folder,
                stdout=output,
                stderr=subprocess.STDOUT,
                umask=self.umask,
            )

    def log(self, rank: int) -> str:
        path = self.run.attempt("0001").log_file(rank)
        return path.read_text() if path.exists() else ""

    def pid(self, rank: int) -> dict[str, Any]:
        return dict(json.loads(self.run.attempt("0001").pid_file(rank).read_text()))

    def spy(self) -> None:
        argv = [sys.executable, "-m", "bigsci_launch", "spy", "runs/run", "--settle", "0"]
        subprocess.run(argv, cwd=self.folder, capture_output=True, check=True, timeout=LIMIT_S, umask=self.umask)

    def look(self) -> None:
        """Note where it listens, and where its ranks keep rings."""
        wait_until(lambda: " iteration " in self.log(0) + self.log(1), LIMIT_S)
        wait_until(lambda: any(METRICS_PROGRAM in each.command for each in self.all_listeners()), LIMIT_S)
        self.listening = self.all_listeners()
        self.modes = {self.name(path): path.lstat().st_mode for path in self.run.path.rglob("*.sock")}
        folders = [Path(self.pid(rank)["rings"]) for rank in range(2)]
        rings = [*folders, *(ring for folder in folders for ring in folder.glob("*.ring"))]
        self.rings = {path: stat.S_IMODE(path.stat().st_mode) for path in rings}

    def fork(self) -> None:
        """Pull the recorder of rank 0, and note where this process listens when the rank is to connect."""
        with standalone() as program, pytest.MonkeyPatch.context() as patch:
            injection = program("node_injection")
            inject = injection.inject

            def look_and_inject(*words: Any) -> Any:
                self.forked += listeners([os.getpid()])
                return inject(*words)

            patch.setattr(injection, "inject", look_and_inject)
            assert injection.pull(self.pid(0)["pid"], {})

    def lose_a_rank(self) -> None:
        os.kill(self.pid(1)["pid"], signal.SIGKILL)

    def end(self) -> None:
        """Wait for the next generation, save, stop, and note the modes of all that is there."""
        records = self.run.attempt("0001").generations
        wait_until(lambda: records.read_text().count('"first_step"') == 2, LIMIT_S)
        (self.run.control / "exit").write_text("seen enough")
        assert self.process.wait(LIMIT_S) == 0, (self.folder / "output").read_text()[-2000:]
        wait_until(lambda: not processes_of(self.folder), LIMIT_S)  # what exports metrics has a last look
        paths = [self.run.path, *self.run.path.rglob("*")]
        self.modes |= {self.name(path): path.lstat().st_mode for path in paths}

    def all_listeners(self) -> list[Listener]:
        return listeners(processes_of(self.folder))

    def name(self, path: Path) -> str:
        return path.relative_to(self.run.path).as_posix()


@pytest.fixture(scope="module", params=[0o002, pytest.param(0o022, marks=pytest.mark.long)], ids="umask-{:03o}".format)
def training(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Training]:
    """A run that was looked at by `bsl spy` in both ways, has lost a rank, and has saved and stopped."""
    folder = tmp_path_factory.mktemp("run")
    with IndexedWriter(folder / "tokens", np.dtype(np.uint16)) as writer:
        writer.add_document(np.random.default_rng(0).integers(60, size=4000))
    training = Training(folder, request.param)
    training.submit()
    try:
        training.look()
        training.fork()
        training.spy()
        training.lose_a_rank()
        training.end()
        yield training
    finally:
        training.process.kill()
        training.process.wait(180)
        for pid in processes_of(training.folder):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


# ------------------------------------------------------------------------------------------------------------- ports


def row_of(listener: Listener) -> str:
    """Return the row of the table that a socket of a run belongs to."""
    if "bigsci_launch.recover.controller" in listener.command:
        return CONTROLLER
    if METRICS_PROGRAM in listener.command:
        return METRICS
    assert "bigsci_launch.train" in listener.command, listener
    if listener.port is None:
        return RECORDER
    return STORE if "everywhere" in listener.kinds else GLOO


def test_every_row_of_the_table_was_tried_here_or_says_where() -> None:
    rows = [row[0] for row in PORTS]
    assert sorted(rows) == sorted([STORE, GLOO, RECORDER, METRICS, CONTROLLER, CHECK, FORK, *ELSEWHERE, *NOT_TRIED])
    assert all("test" in row[2] for row in PORTS if row[0] in NOT_TRIED)
    root = PACKAGE.parent
    assert all("listeners(" in (root / place).read_text() for place in ELSEWHERE.values())


def test_a_run_listens_where_the_table_says_and_nowhere_else(training: Training) -> None:
    assert {row_of(each) for each in training.listening} == {CONTROLLER, METRICS, STORE, GLOO, RECORDER}, (
        training.listening
    )
    for each in training.listening:
        row = row_of(each)
        places = allowed_places(PORTS, row, "`--local`" if row == CONTROLLER else "")
        assert each.kinds & places, (each, row, places)


def test_the_recorder_is_pulled_by_a_name_that_the_table_has(training: Training) -> None:
    (listener,) = set(training.forked)
    assert listener.kinds == allowed_places(PORTS, FORK) == {"abstract"}
    assert re.fullmatch("@bsl-[0-9a-f]{17}", listener.place)


@pytest.mark.parametrize(
    ("host", "clause"), [("127.0.0.1", "by which the other nodes"), ("localhost", "as a loopback address only")]
)
def test_the_node_check_listens_where_the_table_says(scontrol: Path, tmp_path: Path, host: str, clause: str) -> None:
    program = tmp_path / "scontrol"
    program.write_text((scontrol / "scontrol").read_text().replace("127.0.0.1", host))
    program.chmod(0o755)
    nodes, seen = [start(tmp_path, index, 2, step=7 + (host == "localhost")) for index in range(2)], set()
    while any(node.poll() is None for node in nodes):
        seen |= set(listeners([node.pid for node in nodes]))
        time.sleep(0.01)
    for node in nodes:
        node.communicate()
    assert len({each.port for each in seen}) >= 2, "each node listens, and the first also where the others look for it"
    assert all(each.kinds & allowed_places(PORTS, CHECK, clause) for each in seen), seen


def test_no_other_program_of_ours_listens() -> None:
    """A new one needs a row in the table of ports, and a run in this file that shows where it listens."""
    folders = [path for path in PACKAGE.iterdir() if path.name != "assets"], [PACKAGE.parent / "diagnostics"]
    found = set()
    for root, places in zip((PACKAGE, PACKAGE.parent / "diagnostics"), folders, strict=True):
        for path in (path for place in places for path in (place, *place.rglob("*")) if path.suffix == ".py"):
            if LISTENS.search(path.read_text()):
                found.add(path.relative_to(root).as_posix())
    assert found - {"check_peers.py"} == set(LISTENING), "check_peers.py listens by door.py"


# ------------------------------------------------------------------------------------------------------------- modes


@dataclass(frozen=True)
class Row:
    """A row of the table of modes. `None` is a cell without a mode: nothing of that kind, or as the umask says."""

    what: str
    patterns: list[str]
    folders: int | None
    files: int | None
    is_free: bool

    def holds(self, path: str) -> bool:
        return any(pattern.fullmatch(path) for pattern in map(as_expression, self.patterns))


def as_expression(pattern: str) -> re.Pattern[str]:
    """Return a pattern of paths: `*` is a name, `**` is any number of them, also none."""
    words = re.escape(pattern).replace(r"/\*\*", "(/.*)?").replace(r"\*", "[^/]*")
    return re.compile(words)


def mode_rows() -> list[Row]:
    rows = []
    for what, where, folders, files in MODES:
        modes = [int(cell, 8) if cell.isdigit() else None for cell in (folders, files)]
        rows.append(Row(what, re.findall("`([^`]+)`", where), *modes, is_free="umask" in folders))
    return rows


def test_every_path_has_the_mode_of_its_row(training: Training) -> None:
    rows, wrong, used = mode_rows(), [], set()
    for path, found in training.modes.items():
        row = next((row for row in rows if row.holds(path)), None)
        if row is None:
            wrong.append(f"{path}: is in no row")
            continue
        used.add(row.what)
        mode, wanted = stat.S_IMODE(found), row.folders if stat.S_ISDIR(found) else row.files
        if row.is_free and mode & training.umask:
            wrong.append(f"{path}: {mode:04o}, which the umask denies")
        if not row.is_free and mode != wanted:
            wrong.append(f"{path}: {mode:04o}, not as in: {row.what}")
    assert not wrong, "\n".join(wrong)
    assert [row.what for row in rows if row.what not in used] == [IN_EACH, RINGS]


def test_nothing_but_the_shared_folders_may_be_written_by_others(training: Training) -> None:
    """Whatever the other rows say: the controller, the job script and the ranks act on what is there."""
    shared = {path for path, mode in training.modes.items() if mode & 0o022 and not stat.S_ISLNK(mode)}
    assert "attempts/0001/recover/gen-000/exits" in training.modes
    assert shared == {"control", "watch/by"}


def test_values_of_env_are_only_where_the_table_says(training: Training) -> None:
    private = [row for row in mode_rows() if "values of `env:`" in row.what]
    files = [path for path in training.run.path.rglob("*") if path.is_file()]
    names = [training.name(path) for path in files if SECRET.encode() in path.read_bytes()]
    assert len(names) == 2 and all(any(row.holds(name) for row in private) for name in names), names


def test_rings_may_be_read_by_the_group_and_written_by_nobody_else(training: Training) -> None:
    row = next(row for row in mode_rows() if row.what == RINGS)
    assert {mode for path, mode in training.rings.items() if path.suffix} == {row.files}
    assert {mode for path, mode in training.rings.items() if not path.suffix} == {row.folders}
