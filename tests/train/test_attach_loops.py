"""The guards in other people's loops, on two real ranks: a healthy loop ends, and a defect in it is named.

The loops and what must be found in them are those of `benchmarks/foreign_guards.py`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from bigsci_launch.runs.events import read_events  # noqa: E402
from tests.support.ports import find_port  # noqa: E402
from tests.support.texts import has_parts  # noqa: E402

from .rank_processes import StartRank  # noqa: E402

ROOT, PROGRAMS = Path(__file__).parents[2], Path(__file__).parent / "programs"
with pytest.MonkeyPatch.context() as path:
    path.syspath_prepend(ROOT / "benchmarks")
    import foreign_guards
NEEDS = {"accelerate_loop": "accelerate", "deepspeed_zero1": "deepspeed"}
HELD = {
    ("ddp", "unreduced"),
    ("ddp", "untied"),
    ("accelerate_loop", "scaled-one"),
    ("accelerate_loop", "same-data"),
    ("fsdp2", "moments-zeroed"),
    ("deepspeed_zero1", "unreduced"),
}
"""The others are variants, or below: `python benchmarks/foreign_guards.py` runs all of them, and `make long` does."""

Run = Callable[..., Any]


@pytest.fixture
def run(start_rank: StartRank, tmp_path: Path) -> Run:
    """`run(case)` runs a loop of the benchmark on two ranks, and returns its outcome."""

    def run_ranks(case: Any) -> Any:
        program = [str(foreign_guards.HERE / f"{case.loop}.py"), *case.arguments]
        program += ["--defect", case.defect] if case.defect else []
        return foreign_guards.judge(case, *run_program(start_rank, program, tmp_path), 0.0)

    return run_ranks


def run_program(start: StartRank, program: list[str], folder: Path, size: int = 2) -> tuple[list[str], list[int]]:
    """Return what each of `size` ranks printed, and their exit codes."""
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_port()), "WORLD_SIZE": str(size)}
    processes = []
    for rank in range(size):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"}
        environment = {**os.environ, **common, **place, "PYTHONPATH": str(ROOT)}
        processes.append(start(program, environment, folder / f"{rank}.log"))
    codes = [process.wait(240) for process in processes]
    return [(folder / f"{rank}.log").read_text() for rank in range(size)], codes


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.long), 4])
def test_the_majority_of_replicas_accuses_the_one_that_differs(
    size: int, start_rank: StartRank, tmp_path: Path
) -> None:
    program = [str(PROGRAMS / "attach_majority.py"), str(tmp_path)]
    logs, codes = run_program(start_rank, program, tmp_path, size)
    assert codes == [0] * size, logs
    for log in logs:
        found = json.loads(log.splitlines()[-1])
        assert all(has_parts(each["message"], "step 1: ", "copies: 0.weight on rank") for each in found)
        assert [each["accused"] for each in found] == ([[0], [1], [2], [3]] if size == 4 else [[], []])
        assert size == 4 or [each["suspects"] for each in found] == [[0, 1]] * 2


def chosen() -> list[Any]:
    marked = []
    for case in foreign_guards.cases():
        is_held = (case.loop, case.defect) in HELD or case.arguments == ("--interval", "1")
        marks = [] if is_held else [pytest.mark.long]
        name = f"{case.loop}-{case.defect or ' '.join(case.arguments)}"
        marked.append(pytest.param(case, marks=marks, id=name))
    return marked


@pytest.mark.parametrize("case", chosen())
def test_a_loop_is_clean_or_its_defect_is_found(case: Any, run: Run) -> None:
    if case.loop in NEEDS:
        pytest.importorskip(NEEDS[case.loop])
    outcome = run(case)
    assert outcome.verdict == ("found" if case.defect else "clean"), outcome.output[-6000:]


def test_a_loop_of_ones_own_is_followed_by_status_and_its_finding_is_the_reason_of_its_end(tmp_path: Path) -> None:
    model = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "sequence_length": 8, "vocab_size": 64}
    loop = ROOT / "benchmarks" / "foreign_loops" / "ddp.py"
    config = {
        "run": {"name": "own", "command": [sys.executable, str(loop), "--defect", "lr-apart"]},
        "slurm": {"site": "local"},
        "parallelism": {"data_parallel_size": 2},
        "model": model,
        "training": {"steps": 8, "micro_batch_size": 1, "global_batch_size": 2},
        "data": {"prefix": "none"},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(config))

    def bsl(*words: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "bigsci_launch", *words]
        return subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)

    submitted = bsl("submit", "run.yaml", "--local")
    assert submitted.returncode == 1, submitted.stdout + submitted.stderr
    status = bsl("status", "own").stdout
    assert "step           4, " in status and "loss 4." in status
    assert has_parts(status, "GuardError: step 4: ", "group 0 on ranks 0-1: ", "0.003 on rank 1")
    records = list(read_events(tmp_path / "runs/own/attempts/0001/events/rank-0000.jsonl"))
    assert [record["step"] for record in records if record["kind"] == "step"] == [1, 2, 3, 4]
    first = next(record for record in records if record["kind"] == "guard")
    assert first["check"] == "optimizer settings" and has_parts(first["tensor"], "lr of ", "group 0")
    assert [each["dp"] for each in first["coordinates"]] == [0, 1]


@pytest.fixture(scope="module")
def saves(start_rank: StartRank, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """What `programs/attach_save.py` has found on two ranks, and its folder."""
    folder = tmp_path_factory.mktemp("saves")
    logs, codes = run_program(start_rank, [str(PROGRAMS / "attach_save.py"), str(folder)], folder)
    assert codes == [0, 0], logs
    return json.loads(logs[0].splitlines()[-1]), folder


def test_what_was_loaded_as_it_was_saved_continues(saves: tuple[Any, Path]) -> None:
    found, _ = saves
    assert found["right"] == "continued to step 5"
    assert (found["document"]["passed"], found["document"]["gradients_checked"]) == (True, 3)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("optimizer", "load: 0.weight: exp_avg on ranks 0-1: "),
        ("moments", "load: 0.weight: exp_avg on rank 1 (dp1 pp0 tp0): "),
        ("weights", "load: 2.bias on rank 1 (dp1 pp0 tp0): "),
        ("step", "load: step count on rank 1 (dp1 pp0 tp0): is 4, but 3 "),
    ],
)
def test_what_a_load_has_changed_is_named(saves: tuple[Any, Path], name: str, words: str) -> None:
    found, _ = saves
    assert words in found[name]


def test_a_save_of_other_ranks_is_not_compared_and_the_records_say_so(saves: tuple[Any, Path]) -> None:
    found, folder = saves
    assert found["other"] == "continued to step 5"
    loads = [record for record in read_events(folder / "0.jsonl") if record["kind"] == "load"]
    assert [record["compared"] for record in loads] == [True, True, True, True, True, False]


def test_a_damaged_state_is_not_called_sound_when_it_is_saved(saves: tuple[Any, Path]) -> None:
    refused = saves[0]["refused"]
    assert refused["stop"] == "stopped"
    assert refused["warn"]["passed"] is False
    assert has_parts(refused["warn"]["findings"][0], ": 0.weight: exp_avg on rank 1 (dp1 pp0 tp0): ", "step 2")


def test_gloo_has_let_go_of_the_last_exchange_when_the_guards_end(saves: tuple[Any, Path]) -> None:
    assert saves[0]["held"] == 0
