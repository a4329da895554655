"""`bsl top` with keys that are really pressed, on real run directories and a fake queue."""

from __future__ import annotations

import asyncio
import os
import pty
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from textual.events import Key
from textual.pilot import Pilot
from textual.widgets import Input

from bigsci_launch.cli.screens.top import TopApp
from bigsci_launch.runs.attempts import JobRecord, write_job
from bigsci_launch.runs.layout import RunDir, write_json
from bigsci_launch.runs.watching.ledger import RunFinding, raise_finding
from bigsci_launch.scheduler.slurm import UserJob, jobs_of_user
from bigsci_launch.top.list import list_rows
from bigsci_launch.topology import Topology

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
TOPOLOGY = Topology(tp=1, pp=1, dp=2)
FINDING = RunFinding("hang", "h", "rank 1 waits for rank 0", 1.0, "0001")


def queue_line(
    number: int, name: str, state: str = "RUNNING", comment: str = "(null)", gres: str = "gres/gpu:4"
) -> str:
    times = "2026-01-01T00:00:00|2036-01-01T00:00:00|1:00:00|2026-01-01T00:00:00"
    return f"{gres}|{number} {number}|{state}|me|gpu|2|n[1-2]|None|{times}|{name}|{comment}\n"


def make_run(root: Path, name: str, job_id: str) -> RunDir:
    run = RunDir((root / name).resolve())
    write_json(run.record, {"name": name, "topology": TOPOLOGY.as_dict()})
    attempt = run.attempt("0001")
    attempt.make()
    write_job(attempt, JobRecord("slurm", 1.0, job_id=job_id, total_steps=20))
    record = '{"kind": "step", "time": 2.0, "mono": 1.0, "step": 7, "loss": 2.5, "seconds": 1.5}\n'
    attempt.event_file(1).write_text('{"kind": "heartbeat", "time": 2.0, "mono": 1.0, "phase": "eval"}\n' + record)
    where = {"rank": 1, "node": "n1", "coordinate": TOPOLOGY.coordinate(1).as_dict()}
    write_json(attempt.pid_file(1), {**where, "pid": 1, "started": 1.0})
    return run


@pytest.fixture
def root(tmp_path: Path, fake_slurm: Callable[..., Any]) -> Path:
    """A run with a finding, and five thousand jobs of another launcher that wait."""
    run = make_run(tmp_path / "runs", "mine", "7")
    raise_finding(run, FINDING)
    jobs = [queue_line(7, "mine", comment=f"bsl:{run.path}")]
    jobs += [queue_line(number, f"other{number:04d}", "PENDING") for number in range(1000, 6000)]
    fake_slurm("squeue").answer("squeue", "".join(jobs))
    return tmp_path / "runs"


def text(app: TopApp) -> str:
    return "\n".join("".join(part for part, _ in line) for line in app.canvas.shown)


async def until(pilot: Pilot[None], look: Callable[[], object], app: TopApp) -> None:
    for _ in range(1200):
        if look():
            return
        await pilot.pause(0.1)
    raise AssertionError(text(app))


def play(root: Path, keys: Callable[[TopApp, Pilot[None]], Awaitable[None]], size: tuple[int, int] = (80, 24)) -> None:
    async def run() -> None:
        app = TopApp(root)
        async with app.run_test(size=size) as pilot:
            await until(pilot, lambda: app.state.details, app)
            await keys(app, pilot)

    asyncio.run(run())


def test_a_finding_is_first_and_the_run_opens_with_its_ranks(root: Path) -> None:
    async def keys(app: TopApp, pilot: Pilot[None]) -> None:
        await until(pilot, lambda: "7/20" in text(app) and "5,000 waiting" in text(app), app)
        lines = text(app).splitlines()
        assert lines[2].split() == ["mine", "RUNNING", "7/20", "1.5", "2.5", "eval", "1", "8"]
        assert "1 running" in lines[0] and "5,000 waiting" in lines[0] and "1 with findings" in lines[0]
        assert FINDING.sentence in lines[-3] and lines[-2].startswith("next: limit in ")
        await pilot.press("enter")
        await until(pilot, lambda: "pp0" in text(app), app)
        assert FINDING.sentence in text(app)
        await pilot.press("escape", "G")
        await until(pilot, lambda: app.state.at == 5000, app)
        assert "other5999" in text(app).splitlines()[-4]
        await pilot.press("slash", *"other5000", "enter")
        assert [each.name for each in app.state.rows] == ["other5000"]

    play(root, keys)


def test_a_key_runs_the_command_of_the_selected_row(root: Path) -> None:
    async def keys(app: TopApp, pilot: Pilot[None]) -> None:
        await until(pilot, lambda: app.state.row and app.state.row.run, app)
        await pilot.press("g")
        await until(pilot, lambda: app.output and app.output.code is not None, app)
        assert app.output is not None and "bsl logs" in text(app) and str(root / "mine") in app.output.command
        await pilot.press("escape")
        assert app.output is None and "mine" in text(app)

    play(root, keys)


def test_cancel_asks_first_and_only_yes_does_it(root: Path) -> None:
    async def keys(app: TopApp, pilot: Pilot[None]) -> None:
        await pilot.press("slash", *"other5000", "enter", "x")
        line = app.query_one(Input)
        await until(pilot, lambda: line.display, app)
        assert "other5000" in line.placeholder and "5000" in line.placeholder
        await pilot.press(*"y", "enter")
        assert app.output is None
        await pilot.press("x")
        await until(pilot, lambda: line.display, app)
        await pilot.press("escape")
        assert app.output is None and not line.display
        await pilot.press("x")
        await until(pilot, lambda: line.display, app)
        await pilot.press(*"yes", "enter")
        await until(pilot, lambda: app.output and app.output.code is not None, app)
        assert app.output is not None and app.output.command == "bsl cancel --jobid 5000"

    play(root, keys)


def test_what_is_typed_right_after_a_key_that_asks_is_the_answer(root: Path) -> None:
    """As a pasted text, or over a slow line: the keys are there before the question is."""

    async def keys(app: TopApp, pilot: Pilot[None]) -> None:
        for key in ("slash", *"sxo", "enter"):
            app.post_message(Key(key, key if len(key) == 1 else None))
        await until(pilot, lambda: app.state.words, app)
        assert (app.state.words, app.state.order, app.output) == ("sxo", "activity", None)

    play(root, keys)


def test_ctrl_c_ends_it(root: Path) -> None:
    async def keys(app: TopApp, pilot: Pilot[None]) -> None:
        await pilot.press("ctrl+c")
        await until(pilot, lambda: app.return_code == 0, app)

    play(root, keys)


def test_control_is_for_runs_and_passes_the_reason_on(root: Path) -> None:
    async def keys(app: TopApp, pilot: Pilot[None]) -> None:
        await until(pilot, lambda: app.state.row and app.state.row.run, app)
        await pilot.press("c", *"exit the", "space", *"loss", "enter")
        await until(pilot, lambda: app.output and app.output.code is not None, app)
        assert app.output is not None and app.output.command.endswith("mine exit --why 'the loss'")

    play(root, keys)


def test_slurm_is_asked_once_for_all_and_not_again_within_30_s(root: Path, fake_slurm: Any, monkeypatch: Any) -> None:
    calls: list[int] = []

    def counted(user: int) -> list[UserJob]:
        calls.append(user)
        return jobs_of_user(user)

    monkeypatch.setattr("bigsci_launch.top.list.jobs_of_user", counted)

    async def keys(app: TopApp, pilot: Pilot[None]) -> None:
        for _ in range(5):
            await pilot.press("r")
            await pilot.pause(0.2)
        assert calls == [os.geteuid()]

    play(root, keys)


def test_gpus_and_runs_are_known_from_one_line(root: Path, monkeypatch: Any) -> None:
    rows, trouble = list_rows(root)
    mine = next(row for row in rows if row.name == "mine")
    assert (trouble, mine.gpus, mine.run and mine.run.name) == ("", 8, "mine")
    lines = {
        "gpu:a100:2": 4,
        "gres/gpu:a100:3,gres/nvme:1": 6,
        "gres:gpu:1": 2,
        "gpu": 2,
        "gpu:4(S:0-1)": 8,
        "N/A": None,
        "shard:4": None,
    }
    for gres, gpus in lines.items():
        done = replace_answer(queue_line(1, "x", gres=gres), monkeypatch)
        assert [each.gpus for each in done] == [gpus], gres


def replace_answer(line: str, monkeypatch: Any) -> list[UserJob]:
    completed = subprocess.CompletedProcess([], 0, line, "")
    monkeypatch.setattr("bigsci_launch.scheduler.slurm.run_slurm", lambda argv, **options: completed)
    return jobs_of_user(0)


def test_without_slurm_there_are_the_runs_and_the_reason(tmp_path: Path, fake_slurm: Callable[..., Any]) -> None:
    fake_slurm()
    make_run(tmp_path / "runs", "mine", "7")
    rows, trouble = list_rows(tmp_path / "runs")
    assert [row.name for row in rows] == ["mine"] and "squeue" in trouble


def test_the_first_frame_comes_before_textual_is_loaded(tmp_path: Path) -> None:
    program = """
import sys
import bigsci_launch.cli.console as console
def noted(text, **words):
    heavy = {"textual", "pydantic", "bigsci_launch.watch"} & sys.modules.keys()
    open("frame", "w").write(f"{sorted(heavy)}\\n{text}")
    raise SystemExit
console.click.echo = noted
from bigsci_launch.cli.main import main
sys.argv = ["bsl", "top"]
main()
"""
    master, slave = pty.openpty()
    subprocess.run([sys.executable, "-c", program], stdin=slave, stdout=slave, stderr=slave, timeout=120, check=True,
                   cwd=tmp_path)  # fmt: skip
    os.close(slave)
    os.close(master)
    heavy, *frame = (tmp_path / "frame").read_text().splitlines()
    assert heavy == "[]"
    assert len(frame) == 24 and "s/step" in frame[1] and "q quit" in frame[-1]


def test_without_textual_it_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from click.testing import CliRunner

    from bigsci_launch.cli.main import bsl

    monkeypatch.setattr("bigsci_launch.cli.top.find_spec", lambda name: None)
    done = CliRunner().invoke(bsl, ["top"])
    assert done.exit_code == 1 and ".[top]" in done.output
