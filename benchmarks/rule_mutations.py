"""Changes the rules of the verdict one at a time, and lists the changes that no recorded case notices.

    python benchmarks/rule_mutations.py [--only rules|order|stalls|constants]

Drops each rule, turns each precedence round, and halves and doubles each number. Every mutant judges each recording
with all facts, without recorded collectives, without kernel functions and with one look only, and the small cases of
the tests; numbers also go through `sizes.py` there. A mutant that changes no verdict is a survivor: nothing holds that
rule or number. Nothing is written.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bigsci_launch.spy.evidence.ranks import Evidence
from bigsci_launch.spy.judge import conclusion, verdict
from bigsci_launch.spy.judge.rules import process
from bigsci_launch.spy.judge.verdict import judge

ENGINE = "bigsci_launch.spy.judge."
VIEWS = ("", " without recorded collectives", " without kernel functions", " without a second look")
Mutant = tuple[str, Callable[[], Any]]


def main() -> None:
    parser = argparse.ArgumentParser(description="Finds rules and numbers of the verdict that nothing holds.")
    parser.add_argument("--only", choices=("rules", "order", "stalls", "constants"))
    only = parser.parse_args().only
    cases = list(all_cases())
    right = [answer(evidence) for evidence in cases]
    sizes = importlib.import_module("tests.unit.spy.judge.sizes").SIZES
    survivors, count = [], 0
    kinds = {"rules": dropped, "order": turned, "stalls": changed_stalls, "constants": changed_constants}
    for kind, mutants in kinds.items():
        for name, change in mutants() if only in (None, kind) else ():
            count += 1
            with change():
                is_seen = not all(check() for check in sizes.values()) or any(
                    answer(evidence) != expected for evidence, expected in zip(cases, right, strict=True)
                )
            if not is_seen:
                survivors.append(name)
                print(f"survivor: {name}", flush=True)
    print(f"{count} mutants, {len(survivors)} survivors, {len(cases)} cases")


def all_cases() -> Iterator[Evidence]:
    """Every recording in each view, those that the tables name, and the small cases."""
    thinning = importlib.import_module("tests.unit.spy.thinning")
    small = importlib.import_module("tests.unit.spy.judge.small_cases")
    pairs = importlib.import_module("tests.unit.spy.judge.rule_pairs")
    named = {*pairs.PAIRS.values(), *pairs.STALL_PAIRS.values()}
    named |= {rule.shown_by for rule in (*verdict.RULES, *process.STALL_RULES)}
    names = [name + view for name in thinning.all_names() for view in VIEWS]
    # What is named shows most: a mutant is noticed there first.
    names = [*sorted(name for name in named if not name.startswith("test: ")), *names]
    yield from (case() for case in small.CASES.values())
    yield from (thinning.evidence_of(name) for name in dict.fromkeys(names))


def answer(evidence: Evidence) -> object:
    """The verdict, or the error that a mutant ends in."""
    try:
        return judge(evidence)
    except Exception as error:
        return repr(error)


@contextmanager
def setting(module: Any, name: str, value: object) -> Iterator[None]:
    before = getattr(module, name)
    object.__setattr__(module, name, value) if not isinstance(module, ModuleType) else setattr(module, name, value)
    try:
        yield
    finally:
        object.__setattr__(module, name, before) if not isinstance(module, ModuleType) else setattr(
            module, name, before
        )


def without(rules: Sequence[Any], name: str) -> tuple[Any, ...]:
    rest = [rule for rule in rules if rule.name != name]
    return tuple(replace(rule, beats=tuple(each for each in rule.beats if each != name)) for rule in rest)


def turn(rules: Sequence[Any], one: str, other: str) -> tuple[Any, ...]:
    beats = {rule.name: rule.beats for rule in rules}
    beats[one] = tuple(name for name in beats[one] if name != other)
    beats[other] = (*beats[other], one)
    return tuple(replace(rule, beats=beats[rule.name]) for rule in rules)


def dropped() -> Iterator[Mutant]:
    for rule in verdict.RULES:
        rules = without(verdict.RULES, rule.name)
        yield f"without {rule.name}", lambda rules=rules: setting(verdict, "RULES", rules)


def turned() -> Iterator[Mutant]:
    for rule in verdict.RULES:
        for other in rule.beats:
            rules = turn(verdict.RULES, rule.name, other)
            yield f"{other} > {rule.name}", lambda rules=rules: setting(verdict, "RULES", rules)


def changed_stalls() -> Iterator[Mutant]:
    rules = process.STALL_RULES
    for rule in rules:
        rest = without(rules, rule.name)
        yield f"without stall {rule.name}", lambda rest=rest: setting(process, "STALL_RULES", rest)
        for other in rule.beats:
            found = turn(rules, rule.name, other)
            yield f"stall {other} > {rule.name}", lambda found=found: setting(process, "STALL_RULES", found)


def changed_constants() -> Iterator[Mutant]:
    """Each number in capitals, also where another module has imported it, and each of `GracePeriod`."""
    modules = [module for name, module in sorted(sys.modules.items()) if name.startswith(ENGINE)]
    for module in modules:
        for name, value in vars(module).items():
            if name.isupper() and type(value) in (int, float) and is_defined(module, name):
                for factor in (0.5, 2):
                    changed = type(value)(value * factor)
                    label = f"{module.__name__.removeprefix(ENGINE)}.{name} = {changed:g}"
                    yield label, lambda name=name, changed=changed: everywhere(modules, name, changed)
    for grace in conclusion.GracePeriod:
        for name in ("asleep_s", "late_s"):
            for factor in (0.5, 2):
                if seconds := getattr(grace, name):
                    label = f"GracePeriod.{grace.name}.{name} = {seconds * factor:g}"
                    yield (
                        label,
                        lambda p=grace, n=name, value=seconds * factor: setting(p, n, value),
                    )


def is_defined(module: ModuleType, name: str) -> bool:
    """Whether the number is the module's own, not imported from another."""
    return f"\n{name} = " in Path(str(module.__file__)).read_text(encoding="utf-8")


@contextmanager
def everywhere(modules: Sequence[ModuleType], name: str, value: object) -> Iterator[None]:
    held = [module for module in modules if hasattr(module, name)]
    before = [getattr(module, name) for module in held]
    for module in held:
        setattr(module, name, value)
    try:
        yield
    finally:
        for module, old in zip(held, before, strict=True):
            setattr(module, name, old)


if __name__ == "__main__":
    main()
