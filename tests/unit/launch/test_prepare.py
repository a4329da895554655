"""Preparation of a submission: everything is decided once, with the same answer for every caller."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from click.testing import CliRunner, Result

from bigsci_launch.checkpoints.folder import write_record
from bigsci_launch.checkpoints.resume import describe_run
from bigsci_launch.cli.main import bsl
from bigsci_launch.config import check
from bigsci_launch.config.finding import Finding
from bigsci_launch.config.load import load_run
from bigsci_launch.errors import CheckpointError, ConfigError, RunDirError
from bigsci_launch.launch.decide import decide_start
from bigsci_launch.launch.prepare import Prepared, prepare, require_sound
from bigsci_launch.plan.choose.check import check_everything
from bigsci_launch.plan.price import calibration
from bigsci_launch.topology import Topology
from bigsci_launch.typed_path import open_typed

RunFile = Callable[..., Path]
ROOT = Path(__file__).parents[3]
BLOOM = ROOT / "configs" / "bloom-176b.yaml"
CALIBRATION = ROOT / "slurm" / "calibrations" / "jean-zay-a100.json"
METHOD = "parallelism.partition_method"
BY_TIME = ("--set", f"{METHOD}=time")
WRONG = "model.declared_parameters=104B"


def invoke(*words: str) -> Result:
    done = CliRunner().invoke(bsl, list(words))
    assert done.exit_code == 0, done.output
    return done


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts how often the rules across sections ran, and how often a calibration was read."""
    calls: Counter[str] = Counter()

    def counted_rule(*_: object) -> Iterator[Finding]:
        calls["check_run"] += 1
        yield from ()

    def counted_open(path: Path) -> BinaryIO:
        calls["calibration"] += path.resolve().parent == CALIBRATION.parent
        return open_typed(path)

    monkeypatch.setattr(check, "CHECKS", (*check.CHECKS, counted_rule))
    monkeypatch.setattr(calibration, "open_typed", counted_open)
    return calls


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["submit", BLOOM, "--dry-run"], (1, 1)),
        (["submit", BLOOM, "--dry-run", "--json", *BY_TIME], (1, 1)),
        (["submit", BLOOM, "--dry-run", "--force", "--set", WRONG], (1, 1)),
        (["plan", "check", BLOOM, *BY_TIME], (1, 1)),
        (["plan", "check", BLOOM, "--calibration", CALIBRATION], (1, 1)),
        (["plan", BLOOM, "--top", "1"], (0, 1)),
        (["config", "check", BLOOM], (1, 0)),
    ],
)
def test_a_command_checks_the_run_once_and_reads_the_calibration_once(
    calls: Counter[str], words: list[object], expected: tuple[int, int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    invoke(*map(str, words))
    assert (calls["check_run"], calls["calibration"]) == expected


def test_a_conversion_reads_the_calibration_once(calls: Counter[str], tmp_path: Path) -> None:
    config = load_run(BLOOM, [f"{METHOD}=time:5,{'6,' * 10}5", "slurm.site=jean-zay-a100-2022"]).config
    saved = tmp_path / "global_step20"
    saved.mkdir()
    record = describe_run(config, Topology(tp=4, pp=12, dp=8), step=20, consumed_samples=320)
    (saved / "mp_rank_00_model_states.pt").touch()
    write_record(saved, record)
    calls.clear()
    done = invoke("checkpoint", "convert", str(saved), "--pp", "6", "-o", str(tmp_path / "out"), "--dry-run")
    assert "pp=12" in done.stderr
    assert calls["calibration"] == 1


def prepared(path: Path, *overrides: str) -> Prepared:
    return prepare(path, overrides, working_directory=Path.cwd(), python="python3")


def test_everything_in_it_is_about_the_same_run(fake_slurm: Callable[..., Any]) -> None:
    fake_slurm("sbatch")
    run = prepared(BLOOM, f"{METHOD}=time")
    config = run.loaded.config
    assert config.parallelism.partition_method == run.setup.partition_method
    assert run.setup.partition_method.startswith("time:")
    assert run.loaded.origins[METHOD] == "computed"
    assert [stage.layers.count("TransformerLayer") for stage in run.stages] == list(run.setup.layers_per_stage)
    assert run.request.topology == run.setup.topology
    assert all(stage.milliseconds is not None for stage in run.stages)
    everything = check_everything(config, run.loaded.site, run.calibration)
    assert list(run.findings) == [finding for finding in everything if finding.price]


def test_a_cut_that_goes_by_no_price_is_left_as_it_was_written(run_file: RunFile) -> None:
    run = prepared(run_file())
    assert run.loaded.origins[METHOD] == "default"
    assert run.stages == ()
    assert run.calibration is None


def test_errors_of_the_arithmetic_stop_a_submission_that_is_not_forced(tmp_path: Path) -> None:
    run = prepared(BLOOM, WRONG)
    with pytest.raises(ConfigError, match="bsl plan check") as refused:
        require_sound(run)
    (problem,) = refused.value.problems
    assert (problem.where, problem.key) == ("--set", "model.declared_parameters")
    assert "the sizes give 176.3B" in problem.text
    require_sound(prepared(BLOOM))
    forced = invoke("submit", str(BLOOM), "--dry-run", "--force", "--set", WRONG)
    assert "error: model.declared_parameters and model.num_layers: 104B" in forced.stderr and forced.exit_code == 0


def test_a_new_run_starts_at_step_0(run_file: RunFile) -> None:
    trained = prepared(run_file(run={"name": "trial"}, parallelism={"tensor_parallel_size": 2}))
    assert decide_start(trained.loaded.config, trained.request).folder is None


def test_a_start_that_cannot_be_is_found_before_the_queue(run_file: RunFile) -> None:
    path = run_file(run={"name": "trial"})
    missing = prepared(path, "checkpoint.load=nowhere")
    with pytest.raises(CheckpointError, match="nowhere"):
        decide_start(missing.loaded.config, missing.request)
    again = prepared(path)
    again.request.run.path.mkdir(parents=True)
    (again.request.run.path / "thesis.tex").touch()
    with pytest.raises(RunDirError, match=str(again.request.run.path)):
        decide_start(again.loaded.config, again.request)


def test_another_program_has_no_checkpoint_of_ours(run_file: RunFile) -> None:
    other = prepared(run_file(), "checkpoint.load=nowhere")
    assert decide_start(other.loaded.config, other.request).folder is None
