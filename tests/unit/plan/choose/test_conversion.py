"""What a checkpoint becomes at another topology."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from bigsci_launch.checkpoints.folder import list_files, write_record
from bigsci_launch.checkpoints.resume import describe_run
from bigsci_launch.cli.main import bsl
from bigsci_launch.config.load import load_run
from bigsci_launch.errors import CheckpointError
from bigsci_launch.plan.choose.conversion import Conversion, plan_conversion, require_room
from bigsci_launch.topology import Topology
from tests.support.texts import has_parts

DEMO = Path(__file__).parents[4] / "configs/demo.yaml"
SAVED = Topology(tp=2, pp=2, dp=2)


def checkpoint(folder: Path, *overrides: str, num_bytes: int = 1000) -> Path:
    saved = folder / "global_step20"
    saved.mkdir()
    with (saved / "mp_rank_00_model_states.pt").open("wb") as states:
        states.truncate(num_bytes)
    record = describe_run(load_run(DEMO, overrides).config, SAVED, step=20, consumed_samples=320)
    write_record(saved, replace(record, files=list_files(saved), code={"revision": "abc"}))
    return saved


def plan(folder: Path, topology: str) -> Conversion:
    return plan_conversion(folder, Topology.parse(topology))


def test_progress_and_revision_are_kept_and_the_vocabulary_is_padded_anew(tmp_path: Path) -> None:
    conversion = plan(checkpoint(tmp_path, "model.vocab_size=300"), "tp=1,pp=3,dp=1")
    after = conversion.after
    assert (after.step, after.consumed_samples, after.code) == (20, 320, {"revision": "abc"})
    assert after.topology == {"tp": 1, "pp": 3, "dp": 1}
    assert after.model["padded_vocab_size"] == 384
    assert after.converted_from == {
        "path": str(tmp_path / "global_step20"),
        "topology": {"tp": 2, "pp": 2, "dp": 2},
        "random_states": "new",
    }
    assert [len(stage) for stage in conversion.stages] and sum(map(len, conversion.stages)) == 8
    assert conversion.changes[1].startswith("padded vocabulary 512 -> 384 rows")


@pytest.mark.parametrize(
    ("topology", "kept", "warning"),
    [
        ("tp=1,pp=2,dp=2", True, None),
        ("tp=2,pp=1,dp=2", False, "dropout 0.1"),
        ("tp=2,pp=2,dp=1", False, "dropout 0.1"),
    ],
)
def test_random_states_outlive_a_change_of_tp_alone(
    tmp_path: Path, topology: str, kept: bool, warning: str | None
) -> None:
    conversion = plan(checkpoint(tmp_path, "model.dropout=0.1"), topology)
    assert conversion.keeps_random_states == kept
    lines = [line for line in conversion.changes if line.startswith("random states")]
    assert [warning in line for line in lines if warning] == ([True] if warning else [])
    assert bool(lines) != kept


@pytest.mark.parametrize(
    ("topology", "text"), [("tp=3", r"tp 3 .*heads \(4\)"), ("pp=6", "stage 0 .*VocabularyEmbedding, LearnedPositions")]
)
def test_what_could_not_train_is_refused(tmp_path: Path, topology: str, text: str) -> None:
    with pytest.raises(CheckpointError, match=text):
        plan(checkpoint(tmp_path), topology)


def test_a_cut_by_price_is_made_again_for_other_stages(tmp_path: Path) -> None:
    saved = checkpoint(tmp_path, "parallelism.partition_method=time:3,1")
    assert plan(saved, "tp=1,pp=2,dp=1").after.model["partition_method"] == "time:3,1"
    assert plan(saved, "tp=1,pp=1,dp=1").after.model["partition_method"] == "time:4"


def test_nothing_is_begun_without_room(tmp_path: Path) -> None:
    conversion = plan(checkpoint(tmp_path, num_bytes=1 << 43), "tp=1")
    with pytest.raises(CheckpointError, match=r"GiB .*10\.0 TiB"):
        require_room(conversion, tmp_path / "out")
    with pytest.raises(CheckpointError, match="global_step20: already exists"):
        require_room(conversion, tmp_path)
    assert not (tmp_path / "out").exists()


def test_a_dry_run_says_what_changes_and_writes_nothing(tmp_path: Path) -> None:
    saved = checkpoint(tmp_path, "model.dropout=0.1")
    command = ["checkpoint", "convert", str(saved), "--tp", "1", "--dp", "1", "-o", str(tmp_path / "out"), "--dry-run"]
    done = CliRunner().invoke(bsl, command)
    assert (done.exit_code, done.stdout) == (0, f"would write {tmp_path}/out/global_step20, about 1000 B\n")
    assert has_parts(done.stderr, "tp=2,pp=2,dp=2 -> tp=1,pp=2,dp=1", "dropout 0.1")
    assert not (tmp_path / "out").exists()
