"""What `bsl submit` says about earlier rehearsals: only the same code and the same configuration count."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from bigsci_launch.config.load import load_run
from bigsci_launch.launch.notes import read_revision, rehearsal_note
from bigsci_launch.rehearse.phases import Measured
from bigsci_launch.rehearse.report import find_advice
from bigsci_launch.runs.layout import write_json
from bigsci_launch.runs.rehearsals import (
    CodeRevision,
    PastRehearsal,
    config_identity,
    describe_past,
    next_rehearsal,
    read_rehearsals,
    rehearsals_of,
    revision_document,
)
from tests.support.texts import has_parts

CONFIGS = Path(__file__).parents[3] / "configs"
GOLDEN = Path(__file__).parents[2] / "golden" / "reports" / "past-rehearsals.txt"
HERE = CodeRevision({"bigsci_launch": "a" * 40, "working_directory": "a" * 40}, False, None)
UNKNOWN = CodeRevision({"bigsci_launch": None}, None, None)
GO = PastRehearsal(Path("/r"), "go", 1795226527.0, "id", HERE, (), 0)


def told(*past: PastRehearsal, revision: CodeRevision = HERE, identity: str = "id") -> str:
    return describe_past(past, revision, identity, command="bsl rehearse run.yaml")


def test_only_the_newest_rehearsal_of_the_same_code_and_configuration_counts(
    check_golden: Callable[[Path, str], None],
) -> None:
    """What is said in each case is in a golden file. Only a rehearsal that counts has no severity before it."""
    bad = replace(GO, verdict="no-go", failed=("save",))
    other = {
        "later": CodeRevision({"bigsci_launch": "b" * 40}, False, None),
        "dirty": replace(HERE, is_dirty=True, diff_digest="d1"),
        "unknown": UNKNOWN,
    }
    said = {
        "go": told(GO),
        "2 not checked": told(replace(GO, num_not_checked=2)),
        "no-go after go": told(GO, bad),
        "go after no-go": told(bad, GO),
        "none": told(),
        "other configuration": told(GO, identity="other"),
        **{name: told(GO, revision=revision) for name, revision in other.items()},
        "all unknown": told(replace(GO, revision=UNKNOWN), revision=UNKNOWN),
    }
    check_golden(GOLDEN, "".join(f"{name}: {line}\n" for name, line in said.items()))
    counted = {name for name, line in said.items() if not line.startswith(("note: ", "warning: "))}
    assert counted == {"go", "2 not checked", "go after no-go"}
    assert {name for name, line in said.items() if line.startswith("warning: ")} == {"no-go after go"}
    assert UNKNOWN.is_same(UNKNOWN) is None


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
    assert has_parts(short, "3 s", "7.5 s", "monitor.step_time_s (now 5)", "8")
    (long,) = find_advice(config, Measured(step_s=4.0, save_s=0.31))
    assert has_parts(long, "0.31 s", "monitor.save_time_s (now 10)", "0.4")
    assert not list(find_advice(config, Measured()))
