"""The judge of injected defects: a wrong judge would take silence for a finding, or a false alarm for health."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
from silent.case import Case, Finding, Row, Seen, Truth  # noqa: E402
from silent.defects import DEFECTS  # noqa: E402
from silent.defects_heldout import HELD_OUT  # noqa: E402
from silent.edits import EDITS  # noqa: E402
from silent.judge import finding_of_error, findings_of, judge, named_ranks  # noqa: E402
from silent.page import page  # noqa: E402
from silent_defects import CASES, NUMBERS, reference_key  # noqa: E402

from bigsci_launch.topology import Topology  # noqa: E402
from tests.support.texts import has_parts  # noqa: E402

sys.path.remove(str(BENCHMARKS))
MOMENT = Case("m", "state", "a moment", truth=Truth(check="memory", ranks=(1,)), at=6)
FOUND = Finding(6, "memory", "first moment of 2.weight", (1,), "it is zero")
STOPPED = Seen("stopped", 6, (FOUND,), saved=(4,), latest=4, message="GuardError: memory")


def verdict(case: Case, seen: Seen) -> tuple[str, str, bool, bool]:
    row = judge(case, seen)
    return row.verdict, row.cause, row.tainted, row.is_right


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (STOPPED, ("in its step", "right", False, True)),
        (replace(STOPPED, latest=6), ("in its step", "right", True, False)),
        (Seen("finished", saved=(4, 8, 12), latest=12), ("silent", "-", True, False)),
        (Seen("finished", findings=(FOUND,), saved=(4, 8), latest=8), ("named", "right", True, False)),
        (replace(STOPPED, findings=(replace(FOUND, ranks=(0,)),)), ("in its step", "wrong", False, False)),
        (replace(STOPPED, findings=(replace(FOUND, ranks=(0, 1)),)), ("in its step", "wrong", False, False)),
        (replace(STOPPED, findings=(replace(FOUND, check="masters"),)), ("in its step", "wrong", False, False)),
        (
            replace(STOPPED, stopped_at=7, findings=(replace(FOUND, step=7),)),
            ("1 late, before a save", "right", False, True),
        ),
        (
            replace(STOPPED, stopped_at=8, findings=(replace(FOUND, step=8),)),
            ("2 late, before a save", "right", False, False),
        ),
        (
            Seen("stopped", 9, (replace(FOUND, step=9),), saved=(4, 8), latest=8),
            ("after a save, 3 late", "right", True, False),
        ),
        (Seen("stopped", 5, (replace(FOUND, step=5),), latest=4), ("1 steps too early", "right", False, False)),
        (Seen("crashed", message="RuntimeError"), ("crashed", "-", False, False)),
        (Seen("hung"), ("hung", "-", False, False)),
    ],
)
def test_a_defect_of_the_state(seen: Seen, expected: tuple[str, str, bool, bool]) -> None:
    assert verdict(MOMENT, seen) == expected


def test_only_what_comes_first_is_the_cause() -> None:
    effect = replace(FOUND, check="masters")
    assert verdict(MOMENT, replace(STOPPED, findings=(effect, FOUND)))[1] == "wrong"
    assert verdict(MOMENT, replace(STOPPED, findings=(FOUND, effect)))[1] == "right"


def test_between_armed_steps_a_defect_may_be_found_later_but_before_a_save() -> None:
    case = replace(MOMENT, at=15, sections={"guards": {"interval": "auto"}})
    late = Seen("stopped", 18, (replace(FOUND, step=18),), saved=(), latest=None)
    assert verdict(case, late) == ("3 late, before a save", "right", False, True)
    assert verdict(case, replace(late, stopped_at=20, saved=(18,), latest=18))[2:] == (True, False)


def test_an_undisturbed_run_must_say_nothing() -> None:
    healthy = Case("h", "healthy", "undisturbed", at=0, truth=Truth("nothing"))
    assert verdict(healthy, Seen("finished", saved=(6,), latest=6)) == ("silent", "-", False, True)
    for seen in (Seen("finished", findings=(FOUND,)), STOPPED, Seen("hung"), Seen("crashed")):
        assert not judge(healthy, seen).is_right


def test_a_changed_setting_must_be_named_and_another_run_refused() -> None:
    line = Finding(None, "submit", "", None, "global_step6: optimizer.betas: [0.9, 0.95] -> [0.5, 0.6]")
    named = Case("b", "restart", "betas", base="dp2", at=7, truth=Truth("name", words="betas"))
    assert verdict(named, Seen("finished", findings=(line,), latest=12)) == ("named", "right", False, True)
    assert verdict(named, Seen("finished", findings=(replace(line, text="warning: slow"),)))[0] == "silent"
    assert not judge(named, Seen("refused", findings=(line,))).is_right
    refused = replace(named, truth=Truth("stop", words="betas"))
    assert verdict(refused, Seen("refused", findings=(line,), latest=6)) == ("refused", "right", False, True)
    other = replace(line, text="error: no space left")
    assert verdict(refused, Seen("refused", findings=(other,), latest=6))[1:] == ("-", False, False)


def test_a_finding_is_read_from_an_error_and_from_an_event() -> None:
    message = "step 6: load: optimizer state decay.step on ranks 0-1: is 0, but 6 was saved (and 1 more)"
    found = finding_of_error({"step": 6, "type": "GuardError", "message": message})
    assert (found.check, found.tensor, found.ranks) == ("load (GuardError)", "optimizer state decay.step", (0, 1))
    assert [*named_ranks("ranks 0-1, 3")] == [0, 1, 3]
    topology = Topology.parse("tp=2,pp=2")
    place = topology.coordinate(3).as_dict()
    event: dict[str, Any] = {"kind": "guard", "step": 6, "check": "data", "tensor": "samples", "text": "differ"}
    assert [*findings_of({**event, "coordinates": [place]}, topology)] == [
        Finding(6, "data", "samples", (3,), "differ")
    ]


def test_the_table_is_complete_and_its_names_are_known() -> None:
    from bigsci_launch.config.schema.run import RunConfig

    names = [case.name for case in CASES]
    assert len(names) == len(set(names))
    assert sum(case.truth.wanted in ("stop", "name") for case in CASES) >= 70
    assert sum(case.group == "healthy" for case in CASES) >= 20
    assert all(case.edit in EDITS for case in CASES if case.edit)
    sections = {key for case in CASES for key in case.sections}
    assert sections <= RunConfig.model_fields.keys()
    assert all(case.truth.why for case in CASES if case.truth.wanted == "anything")
    assert len({reference_key(case) for case in CASES}) < len(CASES) / 2


def test_held_out_defects_are_counted_and_shown_apart() -> None:
    held_out = [case for case in CASES if case.group == "heldout"]
    assert len(held_out) == 15
    assert all(case.defect in {**DEFECTS, **HELD_OUT} for case in held_out)
    rows = {case.name: Row(case.name, "silent", "-", False, False) for case in (held_out[0], MOMENT)}
    text = page((MOMENT, *held_out), rows, {}, NUMBERS)
    assert "## Held out\n" in text
    assert "| now | 1 | 0 | 1 |" in text and "| the same, now | 1 | 0 | 1 |" in text


def test_the_page_has_every_row_and_says_what_is_not_right() -> None:
    silent = Row("m-zero-all", "silent", "-", True, False, jump=0.5)
    text = page(CASES, {"m-zero-all": replace(silent, verdict="in its step", is_right=True)}, {}, NUMBERS)
    assert has_parts(text, f"**{len(CASES) - 1} of {len(CASES)} cases ")
    assert "| `m-zero-all` |" in text and "| **no** |" not in text
    text = page(CASES, {"m-zero-all": silent}, {"m-zero-all": silent}, NUMBERS)
    assert "| **no** | silent |" in text and "| now | 1 | 0 | 1 | 1 | 0 | 0 |" in text
