"""`bsl rehearse` on this machine: a program that behaves gets a go, and each that does not is caught in its phase."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.texts import has_parts

PROGRAM = Path(__file__).parent / "programs" / "megatron_like.py"
SURVIVING = Path(__file__).parents[2] / "benchmarks" / "surviving"
DEMO = Path(__file__).parents[2] / "configs" / "demo.yaml"
MODEL = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "sequence_length": 8, "vocab_size": 64}
Rehearse = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def rehearse(tmp_path: Path) -> Rehearse:
    """`rehearse(mode, *options)` starts the rehearsal of a program that behaves, or not, in that mode."""

    def start(mode: str = "", *options: str) -> subprocess.Popen[str]:
        config = {
            "run": {"name": "trial", "command": [sys.executable, str(PROGRAM), *([mode] if mode else [])]},
            "slurm": {"site": "local"},
            "parallelism": {"tensor_parallel_size": 2, "data_parallel_size": 2},
            "model": {**MODEL, "vocab_size_multiple": 8},
            "training": {"steps": 10, "micro_batch_size": 1, "global_batch_size": 4},
            "data": {"prefix": "none"},
            "monitor": {"step_time_s": 1, "save_time_s": 1, "exit_margin_s": 5 if mode == "ignores-stop" else 60},
        }
        (tmp_path / "run.yaml").write_text(json.dumps(config))
        return subprocess.Popen(
            [sys.executable, "-m", "bigsci_launch", "rehearse", "run.yaml", *options],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start


def finish(process: subprocess.Popen[str]) -> tuple[int, dict[str, Any]]:
    """Return the exit code and the JSON document."""
    stdout, stderr = process.communicate(timeout=300)
    assert stdout, stderr
    document: dict[str, Any] = json.loads(stdout)
    return process.returncode, document


def outcomes(document: dict[str, Any]) -> dict[str, str]:
    return {phase["name"]: phase["outcome"] for phase in document["phases"]}


def found(document: dict[str, Any], name: str) -> str:
    return "; ".join(next(phase["found"] for phase in document["phases"] if phase["name"] == name))


def processes_of(folder: Path) -> list[str]:
    """Return the processes whose environment names a run directory in `folder`."""
    left = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if f"BSL_RUN_DIR={folder}".encode() in (path / "environ").read_bytes():
                left.append(f"{path.name} {(path / 'comm').read_text().strip()}")
        except OSError:
            continue
    return left


def test_a_program_that_behaves_gets_a_go(rehearse: Rehearse, tmp_path: Path) -> None:
    code, document = finish(rehearse("", "--json"))
    assert (code, document["verdict"], document["not_checked"]) == (0, "go", [])
    assert set(outcomes(document).values()) == {"ok"}
    assert has_parts(found(document, "kill a rank"), "rank 3", "no process left")
    assert "digit" in found(document, "resume after kill")
    folder = Path(document["directory"])
    assert folder == tmp_path / "runs" / "rehearsals" / "trial" / "0001"
    assert json.loads((folder / "report.json").read_text()) == document
    assert not list(folder.rglob("checkpoints")), "nobody needs them after a go"
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["rehearsals"], "the run itself was not begun"
    assert len(list(folder.glob("*/attempts/*"))) == 3


@pytest.mark.parametrize(
    ("mode", "phase", "words"),
    [
        ("ignores-stop", "stop", "ran 5 s"),
        pytest.param("ends", "steps", r"exit code 1, .*rank \d on .*: OutOfMemoryError", marks=pytest.mark.long),
        # The interrupted rehearsal below finds and kills such a child, too.
        pytest.param("leaves-child", "kill a rank", r"and now killed: pid \d+ \(sleep\)", marks=pytest.mark.long),
        pytest.param("starts-over", "resume after kill", "step 2, .*step 2", marks=pytest.mark.long),
        pytest.param("other-losses", "resume after kill", "differ", marks=pytest.mark.long),
        pytest.param("infinite-loss", "steps", "step 1 is nan", marks=pytest.mark.long),
    ],
)
def test_a_program_that_is_unfit_gets_a_no_go(
    rehearse: Rehearse, tmp_path: Path, mode: str, phase: str, words: str
) -> None:
    """tests/unit/rehearse holds the other judgements, on evidence alone."""
    code, document = finish(rehearse(mode, "--json"))
    assert (code, document["verdict"], outcomes(document)[phase]) == (1, "no-go", "failed"), document["phases"]
    assert re.search(words, found(document, phase)), found(document, phase)
    assert not processes_of(tmp_path)


def test_a_save_on_a_full_disk_is_a_no_go_even_if_the_report_cannot_be_stored(
    rehearse: Rehearse, small_disk: Path
) -> None:
    subprocess.run(["mount", "-o", "remount,size=4m", str(small_disk)], check=True)
    process = rehearse("fills-disk", "--json", "--set", f"run.root={small_disk}")
    stdout, stderr = process.communicate(timeout=300)
    assert stdout, stderr
    document = json.loads(stdout)
    assert (process.returncode, document["verdict"]) == (1, "no-go"), stderr
    assert outcomes(document)["steps"] == "failed", document["phases"]
    assert has_parts(stderr, "warning: ", "report.json", "No space left")
    assert not processes_of(small_disk)


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGHUP, marks=pytest.mark.long)])
def test_an_interrupted_rehearsal_ends_everything_and_says_so(
    rehearse: Rehearse, tmp_path: Path, number: signal.Signals
) -> None:
    process = rehearse("leaves-child")
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("steps: ok"):
            break
    assert processes_of(tmp_path)
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=300)
    assert (process.returncode, stdout) == (130, "")
    assert has_parts(stderr, "attempt 0001, pid", "has ended")
    # The runner of a rank ends what its program has left; `test_kill.py` is about what a dead runner leaves.
    assert not processes_of(tmp_path)
    assert not list(tmp_path.rglob("report.json")), "it has no verdict"


def test_a_program_that_would_save_into_the_run_is_refused(rehearse: Rehearse, tmp_path: Path) -> None:
    process = rehearse("", "--set", "run.command=[python3, --save, /big/run]")
    stderr = process.communicate(timeout=300)[1]
    assert process.returncode == 2
    assert "run.command: --save /big/run: " in stderr
    assert not (tmp_path / "runs").exists()


def test_a_run_that_cannot_be_written_leaves_nothing(rehearse: Rehearse, tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("not a folder")
    process = rehearse()
    stderr = process.communicate(timeout=300)[1]
    assert process.returncode == 2 and "run.root" in stderr, stderr


@pytest.mark.torch
@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "phase", "words"),
    [
        (None, "resume after kill", r"step 8, .*step 9; .*steps 9-\d+ .*last bit"),
        ("{kind: flipped_byte, rank: 1, step: 8}", "resume after kill", "contents differ"),
    ],
)
def test_the_demo_is_rehearsed(tmp_path: Path, fault: str | None, phase: str, words: str) -> None:
    source = Path(sysconfig.get_path("stdlib")) / "asyncio"
    argv = [sys.executable, "-m", "bigsci_launch"]
    data = ["data", "prepare", str(source), "--output", "corpus/text", "--vocab-size", "512", "--glob", "*.py"]
    subprocess.run([*argv, *data], cwd=tmp_path, check=True, capture_output=True)
    settings = ["data.prefix=corpus/text", "data.held_out=0.1", "monitor.eval_interval=10"]
    settings += [f"faults=[{fault}]"] if fault else []
    words_of = [word for setting in settings for word in ("--set", setting)]
    done = subprocess.run(
        [*argv, "rehearse", str(DEMO), "--json", *words_of],
        cwd=tmp_path,
        env={**os.environ, "COLUMNS": "100"},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    document = json.loads(done.stdout)
    assert (done.returncode, document["verdict"]) == ((1, "no-go") if fault else (0, "go")), document
    assert re.search(words, found(document, phase)), found(document, phase)
    assert outcomes(document)["evaluation"] == "ok"


@pytest.mark.long
@pytest.mark.torch
def test_an_engine_that_no_rank_can_be_replaced_of_is_said_before_the_run_starts(tmp_path: Path) -> None:
    """A loop with `Survivor`, whose run file describes no model."""
    config = {
        "run": {"name": "zero", "command": [sys.executable, str(SURVIVING / "with_deepspeed.py")]},
        "slurm": {"site": "local"},
        "parallelism": {"data_parallel_size": 2},
        "training": {"steps": 40, "micro_batch_size": 2, "global_batch_size": 24},
        "survive": {"in_place": True},
        "env": {"STAGE": "0"},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(config))
    argv = [sys.executable, "-m", "bigsci_launch", "rehearse", "run.yaml", "--json"]
    process = subprocess.Popen(argv, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    code, document = finish(process)
    assert code == 1 and outcomes(document)["steps"] == "failed"
    assert has_parts(found(document, "steps"), "engine", "stage 0", "cannot be replaced in place", "survive: true")
