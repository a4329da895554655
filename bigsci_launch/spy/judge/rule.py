"""What a rule is, and how one of several that match is chosen.

Every rule looks at every case. A rule may beat others, by name: that order is partial and has no circles. Rules that
match, are not beaten and accuse different ranks make sides: then no rank is accused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Generic, TypeVar

from bigsci_launch.spy.evidence.ranks import Evidence
from bigsci_launch.spy.judge.case import JobCase
from bigsci_launch.spy.judge.conclusion import Conclusion, Side
from bigsci_launch.spy.taxonomy import State

CALM = (State.PROGRESSING, State.SLOW, State.FINISHED)
"""States that need no action."""
Subject = TypeVar("Subject")
RuleResult = TypeVar("RuleResult")


@dataclass(frozen=True, slots=True)
class TableRule(Generic[Subject, RuleResult]):
    """One way to read what was seen, a case or one rank. `match` returns what it finds, or None if it does not apply.

    `beats` names rules that are weaker where both match. `source` is why the rule holds. `shown_by` is a recording in
    which it decides, `silent_on` a similar one in which it does not apply.
    """

    name: str
    match: Callable[[Subject], RuleResult | None]
    beats: tuple[str, ...]
    source: str
    shown_by: str
    silent_on: str

    @property
    def says(self) -> str:
        """What the rule looks for: the first sentence of its function's documentation."""
        return " ".join((self.match.__doc__ or "").split()).partition(". ")[0].rstrip(".")


JobRule = TableRule[JobCase, Conclusion]


def make_rule(
    match: Callable[[Subject], RuleResult | None], beats: str, source: str, shown_by: str, silent_on: str
) -> TableRule[Subject, RuleResult]:
    """Return a row of a table of rules, named as its function. `beats` are names with spaces between them."""
    name = match.__name__.strip("_").replace("_", "-")
    return TableRule(name, match, tuple(beats.split()), source, shown_by, silent_on)


@dataclass(frozen=True, slots=True)
class Weighed:
    """A rule on one case: its conclusion if it matches, and the names of matching rules that beat it."""

    rule: JobRule
    conclusion: Conclusion | None
    beaten_by: tuple[str, ...] = ()

    @property
    def decides(self) -> bool:
        return self.conclusion is not None and not self.beaten_by


def weigh(case: JobCase, rules: Sequence[JobRule]) -> tuple[Weighed, ...]:
    found = [(rule, rule.match(case)) for rule in rules]
    matching = [rule.name for rule, conclusion in found if conclusion is not None]
    order = beaten_names(tuple((rule.name, rule.beats) for rule in rules))
    return tuple(
        Weighed(rule, conclusion, tuple(name for name in matching if rule.name in order[name]) if conclusion else ())
        for rule, conclusion in found
    )


@lru_cache(maxsize=8)
def beaten_names(beats: tuple[tuple[str, tuple[str, ...]], ...]) -> Mapping[str, frozenset[str]]:
    """Return {name: every name that it beats, directly or through others}.

    Raises:
        ValueError: a rule beats itself through others, or beats one that does not exist.
    """
    direct = dict(beats)
    found = {}
    for name in direct:
        reached: set[str] = set()
        left = list(direct[name])
        while left:
            one = left.pop()
            if one not in direct:
                raise ValueError(f"rule {name!r} beats {one!r}, which does not exist")
            if one not in reached:
                reached.add(one)
                left += direct[one]
        if name in reached:
            raise ValueError(f"rule {name!r} beats itself through others")
        found[name] = frozenset(reached)
    return found


def resolve(weighed: Iterable[Weighed], evidence: Evidence) -> Conclusion | None:
    """Return the conclusion that stands: the only one that is not beaten, or what is left of several.

    Of several, those that raise no alarm count: a job that makes progress by one rule is not called hung
    because the two rules are not ordered.
    """
    standing = [each.conclusion for each in weighed if each.conclusion is not None and not each.beaten_by]
    standing = [one for one in standing if one.state in CALM] or standing
    if not standing:
        return None
    strongest = max(standing, key=lambda conclusion: conclusion.strength.level)
    accused = {tuple(suspect.rank for suspect in conclusion.suspects) for conclusion in standing if conclusion.suspects}
    if len(accused) < 2:
        return next((conclusion for conclusion in standing if conclusion.suspects), strongest)
    return _as_sides(standing, strongest, evidence)


def _as_sides(standing: Sequence[Conclusion], strongest: Conclusion, evidence: Evidence) -> Conclusion:
    """The verdict where rules accuse different ranks and none of them is known to be the better one."""
    sides = [(tuple(suspect.rank for suspect in one.suspects), one.suspects[0].why) for one in standing if one.suspects]
    words = "; ".join(f"{evidence.names(ranks)}: {why}" for ranks, why in sides)
    states = {conclusion.state for conclusion in standing}
    return replace(
        strongest,
        state=states.pop() if len(states) == 1 else State.UNKNOWN,
        claim=f"the evidence is contradictory, so no rank is accused: {words}",
        hang_class=None,
        suspects=(),
        sides=tuple(Side(ranks, why) for ranks, why in sides),
    )
