"""Verdicts on recorded hangs of the hang lab and the trainer: the rank that diverges is named, or nobody is."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest

from bigsci_launch.spy.evidence.bundle import Bundle
from bigsci_launch.spy.judge.conclusion import Conclusion
from bigsci_launch.spy.judge.verdict import judge
from bigsci_launch.spy.taxonomy import HangClass
from tests.support.texts import has_parts

from ..conftest import an_hour_later

FOLDER = Path(__file__).parents[1] / "recordings" / "lab"
Document = dict[str, Any]

# The right state and class, the ranks that must be accused, and those that may be.
EXPECTED: dict[str, tuple[str, str, set[int], set[int]]] = {
    "H01-world-1": ("hang", HangClass.COLLECTIVE_SKIPPED, {1}, {1}),
    "H01-wrapped-1": ("hang", HangClass.COLLECTIVE_SKIPPED, {1}, {1}),
    "H01-wrapped-3": ("hang", HangClass.COLLECTIVE_SKIPPED, {3}, {3}),
    "H03-majority-1": ("hang", HangClass.OPERATION_DIFFERS, set(), {0, 2, 3}),
    "H03-wrapped-1": ("hang", HangClass.OPERATION_DIFFERS, {1}, {1}),
    "H04-0": ("crashed", HangClass.SIZE_DIFFERS, set(), {0}),
    "H06-0": ("hang", HangClass.ROOT_DIFFERS, set(), {0}),
    "H06-3": ("hang", HangClass.ROOT_DIFFERS, set(), {3}),
    "H08-0": ("hang", HangClass.MESSAGES_NEVER_MEET, set(), {0, 2}),
    "H09-3": ("hang", HangClass.MESSAGE_TAG_DIFFERS, set(), {1, 3}),
    "H12-1": ("hang", HangClass.OBJECT_COLLECTIVE_SKIPPED, set(), {1}),
    "H13-3": ("hang", HangClass.GROUP_MADE_ALONE, {3}, {3}),
    "H14-0": ("hang", HangClass.FIRST_USE_SKIPPED, set(), {0}),
    "H20-0": ("hang", HangClass.COLLECTIVE_SKIPPED, {0}, {0}),
    "H22-1": ("hang", HangClass.PROGRAM_DIFFERS, set(), {1}),
    "H70-1": ("crashed", HangClass.RANK_KILLED, {1}, {1}),
    "prequel-4": ("hang", HangClass.PHASES_SPLIT, set(), set()),
    "prequel-8": ("hang", HangClass.PHASES_SPLIT, set(), set()),
}


def read(name: str) -> Document:
    return an_hour_later(json.loads((FOLDER / f"{name}.json").read_text()))


def judge_document(document: Document, topology: str | None = "recorded") -> Conclusion:
    known = document["collection"]["topology"] if topology == "recorded" else topology
    return judge(Bundle({**document["collection"], "topology": known}, tuple(document["nodes"])).evidence())


def accused(conclusion: Conclusion) -> set[int]:
    return {suspect.rank for suspect in conclusion.suspects}


@pytest.mark.parametrize("name", EXPECTED)
def test_the_verdict(name: str) -> None:
    state, hang_class, must, may = EXPECTED[name]
    conclusion = judge_document(read(name))
    assert (conclusion.state.value, conclusion.hang_class) == (state, hang_class), conclusion.claim
    assert must <= accused(conclusion) <= may, conclusion.claim


@pytest.mark.parametrize("name", EXPECTED)
def test_less_evidence_accuses_nobody_else(name: str) -> None:
    """Without coordinates, recorders, arguments of calls, or with rings that cover different times on each rank."""
    allowed = EXPECTED[name][3]
    whole = read(name)
    assert accused(judge_document(whole, None)) <= allowed
    for less in (without(whole, "recorder"), without_arguments(whole)):
        assert accused(judge_document(less)) <= allowed
    for seed in range(8):
        conclusion = judge_document(with_short_rings(whole, random.Random(seed)))
        assert accused(conclusion) <= allowed, f"seed {seed}: {conclusion.claim}"


def samples_of(document: Document) -> list[Document]:
    return [sample for node in document["nodes"] for rank in node["ranks"] for sample in rank["samples"]]


def without(document: Document, key: str) -> Document:
    less = copy.deepcopy(document)
    for sample in samples_of(less):
        sample.pop(key, None)
    return less


def without_arguments(document: Document) -> Document:
    less = copy.deepcopy(document)
    for sample in samples_of(less):
        for thread in sample.get("stack", {}).get("threads", []):
            for frame in thread["frames"]:
                frame.pop("arguments", None)
    return less


def with_short_rings(document: Document, rng: random.Random) -> Document:
    less = copy.deepcopy(document)
    for sample in samples_of(less):
        recorder = sample.get("recorder", {})
        lost = max(0, len(recorder.get("stream", [])) - rng.choice([4, 6, 8, 12, 16, 20, 28]))
        if lost:
            recorder["stream"] = recorder["stream"][lost:]
            recorder["first_record"] += lost
            recorder["open"] = [position - lost for position in recorder["open"] if position >= lost]
    return less


def test_the_prequel_in_one_sentence() -> None:
    """An optimizer whose parameter groups differ per stage: one stage leaves the gradient norm an all-reduce early."""
    conclusion = judge_document(read("prequel-8"))
    here, there = conclusion.claim.split("; ", 1)
    assert has_parts(here, "ranks 0-5 (pp0-2)", "all_reduce number 3", "(stage_1_and_2.py:2646)", "gradient norm")
    assert has_parts(there, "ranks 6-7 (pp3)", "broadcast number 1", "_aggregate_total_loss (engine.py:619)", "norm")
    assert [side.ranks for side in conclusion.sides] == [(6, 7), (0, 1, 2, 3, 4, 5)]
    assert conclusion.confidence > 0.7
    assert any("bsl plan check" in command for command in conclusion.next)


def test_the_prequel_without_a_recorder_is_the_same_finding() -> None:
    conclusion = judge_document(without(read("prequel-8"), "recorder"))
    assert conclusion.hang_class is HangClass.PHASES_SPLIT and "all-reduces in the norm" in conclusion.claim


def test_two_roots_are_named() -> None:
    claim = judge_document(read("H06-3")).claim
    assert has_parts(claim, "broadcast number 20", "(dp1 pp0 tp1) it is rank 0", "ranks 0-2 it is rank 3")


def test_both_ends_of_messages_that_do_not_meet_are_named() -> None:
    claim = judge_document(read("H08-0")).claim
    assert has_parts(claim, "tp0) in recv from rank 2", "tp0) in recv from rank 0")
    claim = judge_document(read("H09-3")).claim
    assert has_parts(claim, "(dp1 pp0 tp1) in send", "to rank 1", "tag 7", "in recv from rank 3", "tag 8")


def test_an_abort_over_an_amount_says_both_amounts_and_accuses_nobody() -> None:
    conclusion = judge_document(read("H04-0"))
    assert has_parts(conclusion.claim, "512 bytes", "256")
    assert [side.ranks for side in conclusion.sides] == [(1,), (0, 2, 3)]


def test_the_past_of_the_few_speaks_against_the_many() -> None:
    conclusion = judge_document(read("H03-majority-1"))
    assert {side.ranks for side in conclusion.sides} == {(1,), (0, 2, 3)}
    assert any(has_parts(line, "ranks 0,2-3", "never") for line in conclusion.evidence)
