"""What `bsl status` says of the end of an attempt."""

from __future__ import annotations

from typing import Any

import pytest

from bigsci_launch.runs.show.ending import ending_advice, ending_facts

RANK_5 = {"rank": 5, "node": "n2", "coordinate": {"pp": 1, "tp": 1, "dp": 0}, "signal": None, "error": None, "code": 3}


def text(reason: str, code: int | None = 1, **fields: Any) -> str:
    return "\n".join(
        f"{name}: {value}" for name, value in ending_facts({"reason": reason, "exit_code": code, **fields})
    )


def test_a_record_of_an_older_version_has_only_a_reason() -> None:
    assert text("finished", 0) == "ended: finished, exit code 0"
    assert text("cancelled", None) == "ended: cancelled"


def test_a_failed_launch_quotes_its_cause() -> None:
    cause = "line 80: module: command not found"
    assert text("launch_failed", 127, cause=cause) == f"ended: launch_failed, exit code 127\ncause: {cause}"
    assert ending_advice({"reason": "launch_failed", "cause": cause}, "x") == "bsl logs x"


def test_the_last_words_of_a_killed_rank_are_shown() -> None:
    killed = {**RANK_5, "signal": "SIGSEGV", "last_words": "Fatal Python error: Segmentation fault"}
    assert text("crashed", 139, first_failure=killed).splitlines()[1:] == [
        "first failure: rank 5 (dp0 pp1 tp1) on n2: SIGSEGV",
        "last words: Fatal Python error: Segmentation fault",
    ]


def test_a_hang_without_suspects_names_nobody() -> None:
    shown = text("hang", 134, first_failure=None, evidence=["timed out: ALLREDUCE 178", "which rank hung is not known"])
    assert "first failure: not known: nothing says which rank hung" in shown
    assert shown.endswith("evidence: timed out: ALLREDUCE 178\nevidence: which rank hung is not known")
    assert "--rank" not in (ending_advice({"reason": "hang", "first_failure": None}, "x") or "")


def test_a_hang_with_stacks_leads_to_them() -> None:
    ended = {"reason": "hang", "first_failure": RANK_5, "spy_bundle": "/runs/x/spy/1"}
    assert "stacks: /runs/x/spy/1" in text(**ended)
    assert ending_advice(ended, "x") == "bsl spy --bundle /runs/x/spy/1   (the stacks while it hung)"


def test_nothing_claims_that_a_silent_node_is_left_out() -> None:
    assert "`bsl nodes` shows whether n2 is left out" in (
        ending_advice({"reason": "node_failure", "first_failure": RANK_5}, "x") or ""
    )
    no_name = {"reason": "node_failure", "first_failure": {**RANK_5, "node": None}}
    assert ending_advice(no_name, "x") == "bsl logs x --rank 5"


@pytest.mark.parametrize("reason", ["finished", "cancelled", "requeued"])
def test_there_is_nothing_to_do(reason: str) -> None:
    assert ending_advice({"reason": reason}, "x") is None


def test_a_rank_that_was_killed_from_outside_may_have_had_no_memory() -> None:
    killed = {"reason": "crashed", "first_failure": {**RANK_5, "signal": "SIGKILL"}}
    assert "memory" in (ending_advice(killed, "x") or "")
    assert ending_advice({"reason": "crashed", "first_failure": RANK_5}, "x") == "bsl logs x --rank 5"
