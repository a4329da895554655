"""What a run remembers of its micro-batch size, and what `bsl status` says about it."""

from __future__ import annotations

from pathlib import Path

import pytest

from bigsci_launch.checkpoints.found_size import FoundSize, read_found_size, size_of_checkpoint, write_found_size
from bigsci_launch.runs.layout import RunDir
from bigsci_launch.status.sections import size_facts
from tests.support.texts import CheckText

FINGERPRINT = {"model": {"num_layers": 4}, "device": {"name": "cpu", "memory": None}}


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    (tmp_path / "run").mkdir()
    return RunDir(tmp_path / "run")


def grown() -> FoundSize:
    first = FoundSize(8, 8, FINGERPRINT, too_large=16, headroom=0.11)
    found = first.changed("found", 8, step=0, words="3 trials: 8 fits; 16 does not fit: rank 2 in ForwardPass")
    return found.changed("out_of_memory", 4, step=41, words="rank 3 in BackwardPass")


def test_what_is_written_is_read_again(run: RunDir) -> None:
    assert read_found_size(run) is None
    write_found_size(run, grown())
    found = read_found_size(run)
    assert found is not None
    assert [(each.was, each.size, each.step, each.why) for each in found.history] == [
        (8, 8, 0, "found"),
        (8, 4, 41, "out_of_memory"),
    ]
    assert (found.size, found.too_large, found.headroom, found.fingerprint) == (4, 16, 0.11, FINGERPRINT)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"size": "many"}', '{"size": 4, "evaluation_size": 4}'])
def test_what_cannot_be_read_is_found_again(text: str, run: RunDir) -> None:
    run.micro_batch.write_text(text)
    assert read_found_size(run) is None


def test_a_checkpoint_keeps_it_without_the_history() -> None:
    document = grown().document
    assert "history" not in document
    kept = size_of_checkpoint(document)
    assert kept is not None
    assert (kept.size, kept.history) == (4, ())
    assert size_of_checkpoint(None) is None
    assert size_of_checkpoint({"size": 4}) is None


def test_status_says_the_size_its_room_and_its_newest_changes(check_text: CheckText) -> None:
    assert size_facts(None) == []
    check_text(*(f"{name:12}{value}" for name, value in size_facts(grown())))
