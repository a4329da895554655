"""What `bsl submit` says about earlier rehearsals: only the same code and the same configuration count."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from bigsci_launch.config.load import load_run
from bigsci_launch.launch.rehearsed import read_revision, rehearsal_note
from bigsci_launch.rehearse.phases import Measured
from bigsci_launch.rehearse.report import find_advice
from bigsci_launch.runs.layout import next_rehearsal, rehearsals_of, write_json
from bigsci_launch.runs.rehearsals.identity import CodeRevision, config_identity, revision_document
from bigsci_launch.runs.rehearsals.record import PastRehearsal, describe_past, read_rehearsals

CONFIGS = Path(__file__).parents[3] / "configs"
HERE = CodeRevision({"bigsci_launch": "a" * 40, "working_directory": "a" * 40}, False, None)
GO = PastRehearsal(Path("/r"), "go", 1795226527.0, "id", HERE, (), 0)


def told(*past: PastRehearsal, revision: CodeRevision = HERE, identity: str = "id") -> str:
    return describe_past(past, revision, identity, command="bsl rehearse run.yaml")


def test_only_the_newest_rehearsal_of_the_same_code_and_configuration_counts() -> None:
    assert told(GO) == "rehearsed at aaaaaaa: go, on 2026-11-21"
    assert "with 2 things not checked" in told(replace(GO, num_not_checked=2))
    bad = replace(GO, verdict="no-go", failed=("save",))
    assert told(GO, bad).startswith("warning: rehearsed at aaaaaaa: no-go (save failed)")
    assert told(bad, GO).startswith("rehearsed at")
    assert told().startswith("note: never rehearsed at aaaaaaa; bsl rehearse")
    assert told(GO, identity="other").startswith("note: never rehearsed with this configuration (last rehearsal")
    later = CodeRevision({"bigsci_launch": "b" * 40}, False, None)
    assert told(GO, revision=later).startswith("note: never rehearsed at bbbbbbb (last rehearsal: at aaaaaaa: go")
    dirty = replace(HERE, is_dirty=True, diff_digest="d1")
    assert "what is not committed has changed" in told(GO, revision=dirty)


def test_an_unknown_revision_is_not_called_never_rehearsed() -> None:
    unknown = CodeRevision({"bigsci_launch": None}, None, None)
    assert "cannot be told whether it was rehearsed" in told(replace(GO, revision=unknown), revision=unknown)
    assert unknown.is_same(unknown) is None


def test_the_identity_is_what_ranks_do_and_not_how_long() -> None:
    def identity(*overrides: str) -> str:
        return config_identity(load_run(CONFIGS / "minicluster.yaml", overrides))

    same = ("run.name=other", "training.steps=7", "slurm.time_limit=01:00:00", "optimizer.learning_rate=5e-3")
    assert {identity(*[each]) for each in same} == {identity()}
    other = (
        "model.hidden_size=128",
        "parallelism.partition_method=uniform",
        "training.micro_batch_size=1",
        "env.X={value: a, reason: b}",
    )
    assert len({identity(), *(identity(each) for each in other)}) == 1 + len(other)


def test_reports_without_a_verdict_are_left_out(tmp_path: Path) -> None:
    document = {
        "verdict": "go",
        "made": 1795226527.0,
        "identity": "id",
        "revision": revision_document(HERE),
        "phases": [{"name": "save", "outcome": "ok"}],
        "not_checked": ["x"],
    }
    texts = (document, {**document, "verdict": "unknown"}, {"schema": 9}, "torn")
    for text in texts:
        folder = next_rehearsal(tmp_path, "trial")
        write_json(folder.report, text)
    next_rehearsal(tmp_path, "trial").path.mkdir()
    assert len(rehearsals_of(tmp_path, "trial")) == 5
    (found,) = read_rehearsals(tmp_path, "trial")
    assert (found.verdict, found.num_not_checked, found.revision.is_same(HERE)) == ("go", 1, True)
    assert read_rehearsals(tmp_path, "other") == []


def test_the_revision_follows_commits_and_changes(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        argv = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e", *words]
        subprocess.run(argv, check=True, capture_output=True)

    git("init")
    (tmp_path / "model.py").write_text("1")
    git("add", "."), git("commit", "-m", "one")
    first = read_revision(tmp_path)
    (tmp_path / "model.py").write_text("2")
    changed = read_revision(tmp_path)
    git("commit", "-am", "two")
    second = read_revision(tmp_path)
    assert first.is_same(read_revision(tmp_path)) is False
    assert (first.is_same(changed), changed.is_same(second), second.is_same(second)) == (False, False, True)
    assert changed.is_dirty and changed.diff_digest != second.diff_digest
    assert json.loads(json.dumps(revision_document(second)))["repositories"]["working_directory"]


@pytest.mark.parametrize(("nodes", "dp", "lines"), [(4, 2, 1), (2, 1, 0)])
def test_only_a_run_that_is_larger_than_its_rehearsal_is_told_about(
    tmp_path: Path, nodes: int, dp: int, lines: int
) -> None:
    overrides = [f"slurm.nodes={nodes}", f"parallelism.data_parallel_size={dp}"]
    loaded = load_run(CONFIGS / "minicluster.yaml", overrides)
    found = rehearsal_note(loaded, tmp_path)
    assert len(found) == lines
    assert all("with the same --set" in line for line in found)
    assert rehearsal_note(load_run(CONFIGS / "demo.yaml"), tmp_path) == []


def test_advice_names_the_key_and_the_value() -> None:
    config = load_run(CONFIGS / "minicluster.yaml").config  # step 5 s, save 10 s
    (short,) = find_advice(config, Measured(step_s=3.0, save_s=9.0, slower_by=2.5))
    assert short.startswith("a step took 3 s, so about 7.5 s with all micro batches of the run: the margin")
    assert "set monitor.step_time_s (now 5) to 8 or more" in short
    (long,) = find_advice(config, Measured(step_s=4.0, save_s=0.31))
    assert long == "a save took 0.31 s: monitor.save_time_s (now 10) may be 0.4"
    assert not list(find_advice(config, Measured()))
