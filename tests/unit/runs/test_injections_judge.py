"""The judge of what `bsl status` says of injected failures: a wrong judge would hide a wrong answer."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
from injected.case import COLUMNS, Check, Look, Row, Truth  # noqa: E402
from injected.judge import judge  # noqa: E402
from injected.page import page  # noqa: E402
from injections import CASES, is_chosen  # noqa: E402

sys.path.remove(str(BENCHMARKS))
DIED = Truth(137, ("FAILED",), ("crashed",), 2, words=("SIGKILL",), advice=("--rank 2",), never=("bsl cancel", "lost"))
RIGHT = "ended          crashed\nfirst failure  rank 2: SIGKILL\nnext: bsl logs run --rank 2"


def look(
    reason: str | None = "crashed",
    rank: int | None = 2,
    node: str = "n1",
    code: int | None = 137,
    text: str = RIGHT,
    **more: Any,
) -> Look:
    first = None if rank is None else {"rank": rank, "node": node}
    ended = None if reason is None else {"reason": reason, "exit_code": code, "first_failure": first}
    document = {"job": {"state": "FAILED"}, "exit": ended, "lost_nodes": []}
    return Look("", document, text, slurm_code=137, nodes=("n0", "n1"), **more)


@pytest.mark.parametrize(
    ("seen", "column", "grade"),
    [
        (look(), "exit status", "right"),
        (look(code=143), "exit status", "wrong"),
        (look(code=None), "exit status", "unknown"),
        (look(), "cause", "right"),
        (look("node_failure"), "cause", "wrong"),
        (look("unknown"), "cause", "unknown"),
        (look(None), "cause", "unknown"),
        (look(text="ended crashed\nnext: bsl logs run --rank 2"), "cause", "unknown"),
        (look(text=f"node n1 was lost\n{RIGHT}"), "cause", "wrong"),
        (look(), "rank", "right"),
        (look(rank=1), "rank", "wrong"),
        (look(rank=None), "rank", "unknown"),
        (look(node="n0"), "node", "wrong"),
        (look(), "next step", "right"),
        (look(text="SIGKILL"), "next step", "unknown"),
        (look(text="SIGKILL\nnext: bsl logs run --rank 1"), "next step", "wrong"),
        (look(text=f"{RIGHT}; or bsl cancel run"), "next step", "wrong"),
        (look(checks=(Check("next step", "wrong", "orphans"),)), "next step", "wrong"),
    ],
)
def test_each_column(seen: Look, column: Any, grade: str) -> None:
    grades, faults = judge((DIED,), (seen,))
    assert grades[column] == grade
    assert (grade == "right") or any(fault.column == column for fault in faults)


def test_where_nobody_is_to_blame_naming_somebody_is_wrong() -> None:
    nobody = Truth(states=("FAILED",), reasons=("cancelled",))
    assert judge((nobody,), (look("cancelled", None),))[0]["rank"] == "right"
    assert judge((nobody,), (look("cancelled", 0, "n0"),))[0]["rank"] == "wrong"


def test_any_rank_of_a_lost_node_will_do() -> None:
    lost = Truth(reasons=("node_failure",), node_index=1)
    for rank, node, grade in ((2, "n1", "right"), (3, "n1", "right"), (0, "n0", "wrong")):
        assert judge((lost,), (look("node_failure", rank, node),))[0]["rank"] == grade


def test_a_look_is_missing() -> None:
    with pytest.raises(ValueError, match="zip"):
        judge((DIED, DIED), (look(),))


def test_the_worst_look_decides() -> None:
    grades, _ = judge((DIED, DIED), (look(), look(rank=0)))
    assert grades["rank"] == "wrong" and grades["cause"] == "right"


def test_every_injection_has_a_name_and_a_truth() -> None:
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names) and all(case.truths and case.what for case in CASES)
    assert sum(not case.is_own for case in CASES) == 29, "the first 28, and a healthy run"
    assert all(case.before for case in CASES if not case.is_own)


def test_the_held_out_are_a_group_of_their_own() -> None:
    held_out = [case for case in CASES if is_chosen(case, "held-out/*")]
    assert len(held_out) == 12 and not any(case.before for case in held_out)
    text = page([Row(case, dict.fromkeys(COLUMNS, "right"), (), (), 1.0) for case in CASES])
    _, more, section = re.split(r"^## (?:More|Held out)$", text, flags=re.MULTILINE)
    assert all(f"`{case.name}`" in section and f"`{case.name}`" not in more for case in held_out)
    assert "Now, of 12 rows: 12 right." in section
