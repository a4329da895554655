"""How a verdict is compared with the truth."""

from __future__ import annotations

import pytest

from bigsci_launch.hang_lab.judgement import Judgement, Verdict, expectation, judge, read_verdict
from bigsci_launch.hang_lab.zoo import find_reproduction
from bigsci_launch.spy.taxonomy import HangClass, State
from bigsci_launch.topology import Topology

TOPOLOGY = Topology(tp=2, pp=1, dp=2)


def verdict(state: str, hang_class: str | None, *suspects: int) -> Verdict:
    return Verdict(State(state), HangClass.parse(hang_class) if hang_class else None, frozenset(suspects), "")


@pytest.mark.parametrize(
    ("name", "said", "judgement"),
    [
        ("H01", verdict("hang", "H01", 1), Judgement.RIGHT),
        ("H01", verdict("hang", "H02", 1), Judgement.OTHER_CLASS),
        ("H01", verdict("hang", "H10"), Judgement.NOBODY_NAMED),
        ("H01", verdict("hang", "H01", 0), Judgement.WRONG_ACCUSATION),
        ("H01", verdict("hang", "H01", 0, 1), Judgement.WRONG_ACCUSATION),
        ("H01", verdict("unknown", None, 0), Judgement.WRONG_ACCUSATION),
        ("H01", verdict("unknown", None), Judgement.UNKNOWN),
        ("H01", verdict("slow", "H100", 1), Judgement.OTHER_STATE),
        ("H07", verdict("hang", "H07", 1, 2), Judgement.RIGHT),
        ("H07", verdict("hang", "H07", 1), Judgement.OTHER_CLASS),
        ("H10", verdict("hang", "H10"), Judgement.RIGHT),
        ("H10", verdict("hang", "H10", 3), Judgement.WRONG_ACCUSATION),
        ("H47-finally", verdict("hang", "H02", 1), Judgement.RIGHT),
        ("H64", verdict("hang", "H31", 1), Judgement.FALSE_ALARM),
        ("H64", verdict("slow", "H64", 1), Judgement.RIGHT),
        ("H64", verdict("slow", None), Judgement.RIGHT),
        ("H64", verdict("slow", "H01"), Judgement.OTHER_CLASS),
        ("H00", verdict("progressing", None), Judgement.RIGHT),
        ("H00", verdict("progressing", None, 2), Judgement.WRONG_ACCUSATION),
        ("H70", verdict("crashed", "H70", 1), Judgement.RIGHT),
    ],
)
def test_judge(name: str, said: Verdict, judgement: Judgement) -> None:
    assert judge(said, find_reproduction(name), 1, TOPOLOGY) is judgement


def test_what_does_harm() -> None:
    assert {one for one in Judgement if one.is_harmful} == {Judgement.FALSE_ALARM, Judgement.WRONG_ACCUSATION}


def test_expectation_in_words() -> None:
    assert expectation(find_reproduction("H01"), 3, TOPOLOGY) == "hang H01, rank 3"
    assert "hang H06, rank 3 or " in expectation(find_reproduction("H06"), 3, TOPOLOGY)
    assert expectation(find_reproduction("H10"), 3, TOPOLOGY) == "hang H10, no rank accused"
    assert expectation(find_reproduction("H07"), 1, TOPOLOGY) == "hang H07, ranks 1-2"


def test_read_verdict() -> None:
    suspects = [{"rank": 3, "node": "n1", "pid": 7, "coordinate": None, "why": "stopped"}]
    document = {
        "verdict": {
            "state": "hang",
            "class": "H55",
            "suspects": suspects,
            "look_first": [],
            "confidence": 0.9,
            "claim": "so",
        }
    }
    assert read_verdict(document) == Verdict(State.HANG, HangClass.PROCESS_STOPPED, frozenset({3}), "so", 0.9)
    assert str(read_verdict(document)) == "hang H55, rank 3"
