"""Laws of the tables of rules: each rule decides somewhere and is silent elsewhere, and each precedence changes an
answer somewhere. `benchmarks/rule_mutations.py` looks for what they leave open.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bigsci_launch.spy.evidence.ranks import Evidence
from bigsci_launch.spy.judge.case import JobCase
from bigsci_launch.spy.judge.conclusion import Conclusion, Strength, Suspect
from bigsci_launch.spy.judge.rule import JobRule, Weighed, beaten_names, resolve, weigh
from bigsci_launch.spy.judge.rules.process import STALL_RULES, Stall, StallRule
from bigsci_launch.spy.judge.table import RULES
from bigsci_launch.spy.judge.verdict import judge
from bigsci_launch.spy.taxonomy import State

from ..thinning import evidence_of
from .rule_pairs import PAIRS, STALL_PAIRS
from .sizes import SIZES
from .small_cases import CASES

ALL = [*RULES, *STALL_RULES]
GOLDEN = Path(__file__).parents[3] / "golden" / "reports" / "verdicts.txt"
AnyRule = JobRule | StallRule


def evidence_named(name: str) -> Evidence:
    return CASES[name.removeprefix("test: ")]() if name.startswith("test: ") else evidence_of(name)


def pairs_of(rules: Sequence[AnyRule]) -> set[str]:
    return {f"{rule.name} > {beaten}" for rule in rules for beaten in rule.beats}


def flipped(rules: Sequence[Any], pair: str) -> tuple[Any, ...]:
    """The rules with one precedence the other way round."""
    one, _, other = pair.partition(" > ")
    beats = {rule.name: rule.beats for rule in rules}
    beats[one] = tuple(name for name in beats[one] if name != other)
    beats[other] = (*beats[other], one)
    return tuple(replace(rule, beats=beats[rule.name]) for rule in rules)


def without(rules: Sequence[Any], name: str) -> list[Any]:
    """The rules without one, which nobody beats any longer."""
    rest = [rule for rule in rules if rule.name != name]
    return [replace(rule, beats=tuple(each for each in rule.beats if each != name)) for rule in rest]


def is_circle(rules: Sequence[AnyRule]) -> bool:
    try:
        beaten_names(tuple((rule.name, rule.beats) for rule in rules))
    except ValueError:
        return True
    return False


def stalls_of(evidence: Evidence, rules: Sequence[StallRule]) -> Mapping[int, Mapping[str, Stall]]:
    """By rank, what each rule that fits says of it."""
    return {
        seen.rank: {rule.name: stall for rule in rules if (stall := rule.match(seen)) is not None}
        for seen in evidence.ranks
    }


def standing(found: Mapping[str, Stall], rules: Sequence[StallRule]) -> set[str]:
    order = beaten_names(tuple((rule.name, rule.beats) for rule in rules))
    return {name for name in found if not any(name in order[other] for other in found)}


@pytest.mark.parametrize("rules", [RULES, STALL_RULES], ids=["rules", "stalls"])
def test_names_are_unique_and_the_order_has_no_circle(rules: Sequence[AnyRule]) -> None:
    names = [rule.name for rule in rules]
    assert len(set(names)) == len(names)
    assert not is_circle(rules)


@pytest.mark.parametrize("rule", ALL, ids=lambda rule: rule.name)
def test_a_rule_says_what_it_rests_on(rule: AnyRule) -> None:
    assert rule.source
    assert rule.shown_by != rule.silent_on


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_rule_decides_where_its_row_says_so(rule: JobRule) -> None:
    """Without it, the answer would be another."""
    assert rule.says, "the function of a rule says what it looks for"
    evidence = evidence_named(rule.shown_by)
    case = JobCase.of(evidence)
    weighed = weigh(case, RULES)
    assert rule.name in {each.rule.name for each in weighed if each.decides}
    assert resolve(weighed, evidence) != resolve(weigh(case, without(RULES, rule.name)), evidence)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_rule_is_silent_where_its_row_says_so(rule: JobRule) -> None:
    assert rule.match(JobCase.of(evidence_named(rule.silent_on))) is None


@pytest.mark.parametrize("rule", STALL_RULES, ids=lambda rule: rule.name)
def test_a_stall_is_explained_where_its_row_says_so(rule: StallRule) -> None:
    found = stalls_of(evidence_named(rule.shown_by), STALL_RULES)
    assert any(standing(stalls, STALL_RULES) == {rule.name} for stalls in found.values()), found
    silent = stalls_of(evidence_named(rule.silent_on), STALL_RULES)
    assert not any(rule.name in stalls for stalls in silent.values())


def test_every_precedence_has_a_case() -> None:
    assert set(PAIRS) == pairs_of(RULES)
    assert set(STALL_PAIRS) == pairs_of(STALL_RULES)


@pytest.mark.parametrize("pair", PAIRS)
def test_a_precedence_changes_an_answer(pair: str) -> None:
    """Both rules match. The other way round, the answer is another, or the order has a circle."""
    evidence = evidence_named(PAIRS[pair])
    case = JobCase.of(evidence)
    weighed = weigh(case, RULES)
    assert set(pair.split(" > ")) <= {each.rule.name for each in weighed if each.conclusion is not None}
    other = flipped(RULES, pair)
    assert is_circle(other) or resolve(weighed, evidence) != resolve(weigh(case, other), evidence)


@pytest.mark.parametrize("pair", STALL_PAIRS)
def test_a_precedence_changes_what_a_stall_is(pair: str) -> None:
    found = stalls_of(evidence_named(STALL_PAIRS[pair]), STALL_RULES)
    both = [stalls for stalls in found.values() if set(pair.split(" > ")) <= stalls.keys()]
    assert both
    other = flipped(STALL_RULES, pair)
    assert is_circle(other) or any(standing(each, STALL_RULES) != standing(each, other) for each in both)


@pytest.mark.parametrize("name", sorted({*PAIRS.values(), *(rule.shown_by for rule in RULES)}))
def test_the_order_of_the_rows_means_nothing(name: str) -> None:
    evidence = evidence_named(name)
    case = JobCase.of(evidence)
    assert resolve(weigh(case, RULES), evidence) == resolve(weigh(case, RULES[::-1]), evidence)


def test_rules_that_accuse_different_ranks_accuse_nobody() -> None:
    accuse = [Conclusion(State.HANG, "", Strength.GUESS, suspects=(Suspect(rank, "stands"),)) for rank in (0, 1)]
    weighed = [Weighed(rule, conclusion) for rule, conclusion in zip(RULES, accuse, strict=False)]
    found = resolve(weighed, CASES["in-two-places"]())
    assert found is not None and not found.suspects
    assert [side.ranks for side in found.sides] == [(0,), (1,)]


@pytest.mark.parametrize("number", SIZES)
def test_a_number_is_neither_half_nor_double(number: str) -> None:
    assert SIZES[number]()


def test_what_verdicts_say(check_golden: Callable[[Path, str], None]) -> None:
    """The wording of verdicts; the tests of rules assert on their fields."""
    found = {name: judge(case()) for name, case in CASES.items()}
    text = "".join(f"{name}: {conclusion.claim}\n" for name, conclusion in found.items())
    for kind in ("evidence", "missing"):
        text += "".join(
            f"{kind}: {line}\n" for line in sorted({line for c in found.values() for line in getattr(c, kind)})
        )
    check_golden(GOLDEN, text)
