"""What `bsl status` says of the end of an attempt."""

from __future__ import annotations

from typing import Any

import pytest

from bigsci_launch.status.ending import ending_advice, ending_facts
from tests.support.texts import CheckText

RANK_5 = {"rank": 5, "node": "n2", "coordinate": {"pp": 1, "tp": 1, "dp": 0}, "signal": None, "error": None, "code": 3}
STACKS = "/runs/x/spy/1"


def record(reason: str, exit_code: int | None = 1, failure: dict[str, Any] | None = RANK_5, **more: Any) -> Any:
    return {"reason": reason, "exit_code": exit_code, "first_failure": failure, **more}


RECORDS = [
    {"reason": "finished", "exit_code": 0},
    {"reason": "cancelled", "exit_code": None},
    {"reason": "launch_failed", "exit_code": 127, "cause": "line 80: module: command not found"},
    record("crashed"),
    record("crashed", 139, {**RANK_5, "signal": "SIGSEGV", "last_words": "Fatal Python error: Segmentation fault"}),
    record("crashed", 137, {**RANK_5, "signal": "SIGKILL"}),
    record("hang", 134, None, evidence=["timed out: ALLREDUCE 178", "cannot determine which rank hung"]),
    record("hang", 134, spy_bundle=STACKS),
    record("node_failure"),
    record("node_failure", 1, {**RANK_5, "node": None}),
]


def test_the_words_of_each_end(check_text: CheckText) -> None:
    lines = []
    for each in RECORDS:
        lines += [f"{name}: {value}" for name, value in ending_facts(each)]
        lines += [f"next: {ending_advice(each, 'x')}", ""]
    check_text(*lines)


@pytest.mark.parametrize("reason", ["finished", "cancelled", "requeued"])
def test_there_is_nothing_to_do(reason: str) -> None:
    assert ending_advice({"reason": reason}, "x") is None


def test_advice_names_what_is_known_alone() -> None:
    assert "--rank" not in (ending_advice(record("hang", failure=None), "x") or "")
    assert STACKS in (ending_advice(record("hang", spy_bundle=STACKS), "x") or "")
    assert ending_advice(record("crashed"), "x") == "bsl logs x --rank 5"
    assert ending_advice(record("node_failure", failure={**RANK_5, "node": None}), "x") == "bsl logs x --rank 5"
