"""The judge of `bsl spy` on foreign programs: a wrong judge would hide a wrong answer."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
from foreign.case import ForeignCase, Truth, truth_of  # noqa: E402
from foreign.scoring import Answer, figures, outcome, read_answer, summary  # noqa: E402
from foreign.table import all_cases  # noqa: E402

from bigsci_launch.spy.taxonomy import HangClass  # noqa: E402
from tests.support.texts import has_parts  # noqa: E402

sys.path.remove(str(BENCHMARKS))
CASES = all_cases()

PIDS = {4000: 0, 4001: 1, 4002: 2, 4003: 3}
HANG = Truth("hang", frozenset({2}), frozenset(), frozenset({"H34"}), frozenset(), PIDS)
SYMMETRIC = Truth("hang", frozenset(), frozenset({0, 3}), frozenset(), frozenset(), PIDS)
SLOW = Truth("slow", frozenset({1}), frozenset(), frozenset(), frozenset(), PIDS)
HEALTHY = Truth("progressing", frozenset(), frozenset(), frozenset(), frozenset(), PIDS)
ENDING = Truth("finished", frozenset({1}), frozenset(), frozenset(), frozenset({"slow"}), PIDS)


def said(state: str, *suspects: int, first: tuple[int, ...] | None = None, hang_class: str | None = None) -> Answer:
    return Answer(state, hang_class, suspects, suspects if first is None else first, "", 0.5, 4, 4)


@pytest.mark.parametrize(
    ("truth", "answer", "expected"),
    [
        (HANG, said("hang", 2), "right"),
        (HANG, said("hang", 1), "wrong accusation"),
        (HANG, said("hang", 2, 1), "wrong accusation"),
        (HANG, said("crashed", 1), "wrong accusation"),
        (HANG, said("slow", 1), "wrong accusation"),
        (HANG, said("slow", 2), "missed"),
        (HANG, said("progressing"), "missed"),
        (HANG, said("finished"), "missed"),
        (HANG, said("hang"), "no rank named"),
        (HANG, said("waiting", 1), "undecided"),
        (HANG, said("unknown"), "undecided"),
        (SYMMETRIC, said("hang"), "right"),
        (SYMMETRIC, said("hang", 0), "wrong accusation"),
        (SLOW, said("slow", 1), "right"),
        (SLOW, said("waiting"), "right"),
        (SLOW, said("slow", 0), "wrong accusation"),
        (SLOW, said("hang", 1), "false alarm"),
        (SLOW, said("progressing"), "slow called healthy"),
        (HEALTHY, said("progressing"), "right"),
        (HEALTHY, said("crashed"), "false alarm"),
        (HEALTHY, said("slow", 1), "healthy called slow"),
        (HEALTHY, said("waiting"), "undecided"),
        (ENDING, said("slow", 1), "right"),
        (ENDING, said("slow", 2), "wrong accusation"),
        (ENDING, said("hang", 1), "false alarm"),
    ],
)
def test_outcome(truth: Truth, answer: Answer, expected: str) -> None:
    assert outcome(truth, answer) == expected


def test_who_stands_first_is_counted_apart_from_who_is_accused() -> None:
    found = figures(HANG, said("hang", first=(0, 2), hang_class="H34"))
    assert (found["state_right"], found["ranks_right"], found["class_right"]) == (True, False, True)
    assert (found["top1"], found["top3"], found["unnamed"]) == (False, True, True)
    assert [
        figures(HANG, answer)["astray"]
        for answer in (
            said("hang", first=(0, 2)),
            said("hang", first=(2,)),
            said("hang", 2),
            said("waiting", first=(0,)),
        )
    ] == [True, False, False, None]
    assert figures(SYMMETRIC, said("hang", first=(3,)))["top1"] is True
    assert figures(HEALTHY, said("progressing"))["ranks_right"] is None


def test_a_right_rank_in_a_wrong_state_is_no_right_rank() -> None:
    assert figures(HANG, said("slow", 2))["ranks_right"] is False


def test_a_number_is_taken_as_printed_and_a_process_is_looked_up() -> None:
    numbered = {"rank": 0, "pid": 4002, "why": ""}
    process = {"rank": None, "pid": 4002, "why": ""}
    stranger = {"rank": None, "pid": 77, "why": ""}
    answer = read_answer(document([numbered, process, stranger]), PIDS)
    assert answer.suspects == (0, 2, -1)
    assert outcome(HANG, answer) == "wrong accusation"
    assert read_answer(document([process], look_first=[numbered]), PIDS).look_first == (0,)
    assert read_answer(document([process]), PIDS).look_first == (2,)


def document(suspects: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    verdict = {"state": "hang", "class": None, "suspects": suspects, "claim": "", "confidence": 0.5, **more}
    return {"verdict": verdict, "world_size": 4, "coverage": {"ranks_read": 4}}


def test_summary_leaves_out_what_is_not_scored() -> None:
    row = {"case": "a", "ask": 1, "truth": HANG.document(), "answer": said("hang", 1).document()}
    counted = {**row, "outcome": outcome(HANG, said("hang", 1)), "figures": figures(HANG, said("hang", 1))}
    text = summary([counted, {**row, "case": "b", "outcome": "not scored"}])
    assert has_parts(text, "1 questions", "1 programs", "0 of 1")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_table_is_consistent(case: ForeignCase) -> None:
    folder = BENCHMARKS / "foreign" / "programs"
    assert (folder / case.program).exists()
    assert {str(HangClass.parse(name)) for name in case.classes} == set(case.classes)
    assert set(case.culprits) | set(case.involved) <= set(range(case.world_size))
    has_no_ranks = case.world_size == 0
    assert bool(case.culprits or case.involved) or has_no_ranks or case.state in ("progressing", "finished"), "who?"
    assert truth_of(case, "before", {}).state == "progressing"


def test_a_third_of_the_table_is_healthy_or_slow() -> None:
    well = [case for case in CASES if case.state in ("progressing", "slow", "finished")]
    assert 3 * len(well) >= len(CASES)


def test_programs_know_nothing_of_this_package() -> None:
    for path in (BENCHMARKS / "foreign" / "programs").iterdir():
        if path.is_file():
            assert "bigsci" not in path.read_text(), path
