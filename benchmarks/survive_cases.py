"""Tries reconfiguration on many random losses, and Oobleck's own rule on the same ones.

    python benchmarks/survive_cases.py [--cases 100000] [--seed 0]

A case is n0 (1 to 6 nodes), f (0 to 4), up to 40 nodes in random pipelines, template sizes (the smallest sufficient or
all usable ones), and random losses, in half of the cases more than f. Each answer is checked: every surviving node is
in one pipeline or named as idle, every pipeline has a size of a template, f + 1 replicas are left whenever (f + 1) n0
nodes are, and otherwise the f that is reported is what the nodes suffice for. The same case with its pipelines, losses
and sizes in another order has the same answer, and a process with another hash seed finds the same answers.

Then the exhaustive list of small cases is tried: n0 of 1 to 4, f of 1 to 3, up to eight nodes more than (f + 1) n0,
every composition, every loss of up to f nodes that leaves (f + 1) n0. Prints a summary; exits with 1 on a violation.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations_with_replacement
from typing import TypeVar

from bigsci_launch.plan.survive.compose import compose, compositions, count_compositions, most_nodes
from bigsci_launch.plan.survive.cut import CutModel
from bigsci_launch.plan.survive.reconfigure import Pipelines, Reconfiguration, TooFewNodes, reconfigure
from bigsci_launch.plan.survive.schedule import StageTime
from bigsci_launch.plan.survive.templates import Template, sufficient_sizes, usable_sizes

MOST_NODES = 40
IN_ANOTHER_PROCESS = 5000
PRICED = 300
"""A composition is also priced where there are at most this many to choose from."""

Item = TypeVar("Item")


@dataclass(frozen=True)
class Case:
    fewest: int
    failures: int
    kind: str
    sizes: tuple[int, ...]
    pipelines: Pipelines
    lost: tuple[str, ...]

    @property
    def survivors(self) -> int:
        return sum(map(len, self.pipelines)) - len(self.lost)

    @property
    def is_promised(self) -> bool:
        return self.survivors >= (self.failures + 1) * self.fewest


def main() -> None:
    parser = argparse.ArgumentParser(description="Tries reconfiguration on many random losses.")
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--digest", action="store_true", help="only print a digest of the answers")
    options = parser.parse_args()
    if options.digest:
        print(digest(options.seed, options.cases))
        return
    begin = time.process_time()
    wrong = random_cases(options.cases, options.seed)
    wrong += small_cases()
    wrong += other_process(options.seed, min(options.cases, IN_ANOTHER_PROCESS))
    for line in wrong[:20]:
        print(f"VIOLATION: {line}")
    print(f"{len(wrong)} violations, {time.process_time() - begin:.0f} s CPU")
    sys.exit(bool(wrong))


def random_cases(count: int, seed: int) -> list[str]:
    """Check random cases and print a table of them; return what is wrong."""
    wrong: list[str] = []
    shuffling = random.Random(seed + 1)
    total: Counter[str] = Counter()
    means: Counter[tuple[str, str]] = Counter()
    moved: Counter[tuple[str, str]] = Counter()
    rule: Counter[tuple[str, str]] = Counter()
    layouts = set()
    for case in cases(count, seed):
        total[case.kind] += 1
        layouts.add((case.fewest, case.failures, case.kind, sum(map(len, case.pipelines))))
        found = answer(case)
        problems = check(case, found)
        wrong += [f"{case}: {what}" for what in problems]
        if answer(in_another_order(case, shuffling)) != found:
            wrong.append(f"{case}: another order has another answer")
        by = found.means if found else "too few nodes"
        means[case.kind, by] += 1
        if found:
            moved[case.kind, by] += count_moved(case.pipelines, found)
        if case.is_promised:
            rule[case.kind, "promised"] += 1
            rule[case.kind, "ours wrong"] += bool(problems)
            rule[case.kind, verdict(case.sizes, case.failures, oobleck(left_sizes(case), case.fewest))] += 1
    for fewest, failures, kind, num_nodes in sorted(layouts):
        wrong += unplanned(fewest, failures, kind, num_nodes)
    print(f"{sum(total.values())} random cases, seed {seed}; {len(layouts)} sets of templates")
    for kind in sorted(total):
        print(f"{kind} sizes: {total[kind]} cases")
        for by in ("simple", "borrow", "merge", "recompose", "too few nodes"):
            number = means[kind, by]
            each = moved[kind, by] / number if number else 0
            print(f"  {by:14} {number:7} ({number / total[kind]:6.1%}), {each:.2f} nodes moved each")
        print_rule({key: value for (of, key), value in rule.items() if of == kind})
    return wrong


def print_rule(rule: dict[str, int]) -> None:
    promised = rule["promised"]
    bad = promised - rule.get("kept", 0)
    print(f"  {promised} cases with (f + 1) n0 nodes left: ours fails in {rule.get('ours wrong', 0)},")
    print(
        f"  Oobleck's rule in {bad} ({bad / promised:.1%}): {rule.get('too few replicas', 0)} with too few replicas, "
        f"{rule.get('no template', 0)} with a size without a template"
    )


def small_cases() -> list[str]:
    """Check every small case, as the rule was first measured; return what is wrong."""
    wrong: list[str] = []
    number = bad = 0
    for fewest in (1, 2, 3, 4):
        for failures in (1, 2, 3):
            least = (failures + 1) * fewest
            for num_nodes in range(least, least + 9):
                sizes = tuple(usable_sizes(fewest, failures, num_nodes))
                for chosen in compositions(num_nodes, sizes, failures + 1):
                    pipelines = laid_out(chosen)
                    for count in range(1, min(failures, num_nodes - least) + 1):
                        for struck in combinations_with_replacement(range(len(chosen)), count):
                            losses = Counter(struck)
                            if any(losses[index] > chosen[index] for index in losses):
                                continue
                            lost = tuple(node for index in losses for node in pipelines[index][: losses[index]])
                            case = Case(fewest, failures, "all usable", sizes, pipelines, lost)
                            wrong += [f"{case}: {what}" for what in check(case, answer(case))]
                            number += 1
                            bad += verdict(sizes, failures, oobleck(left_sizes(case), fewest)) != "kept"
    print(f"{number} small cases, all: Oobleck's rule fails in {bad} ({bad / number:.1%}), ours in {len(wrong)}")
    return wrong


def other_process(seed: int, count: int) -> list[str]:
    """Compare the answers of two processes with other hash seeds; return what is wrong."""
    command = [sys.executable, __file__, "--digest", "--cases", str(count), "--seed", str(seed)]
    found = {
        subprocess.run(
            command, env={**os.environ, "PYTHONHASHSEED": hash_seed}, check=True, capture_output=True, text=True
        ).stdout
        for hash_seed in ("1", "20")
    }
    print(f"{count} cases in two processes with other hash seeds: {'same' if len(found) == 1 else 'OTHER'} answers")
    return [] if len(found) == 1 else ["another process has other answers"]


def digest(seed: int, count: int) -> str:
    """Return a digest of the answers; the losses are given as a set, whose order depends on the hash seed."""
    found = hashlib.sha256()
    for case in cases(count, seed):
        found.update(repr(answer(case)).encode())
    return found.hexdigest()


def cases(count: int, seed: int) -> Iterator[Case]:
    chance = random.Random(seed)
    for _ in range(count):
        fewest, failures = chance.randint(1, 6), chance.randint(0, 4)
        num_nodes = chance.randint((failures + 1) * fewest, MOST_NODES)
        kind = chance.choice(("sufficient", "all usable"))
        sizes = sizes_of(fewest, failures, kind, num_nodes)
        pipelines = laid_out(random_sizes(sizes, failures + 1, num_nodes, chance))
        nodes = [node for pipeline in pipelines for node in pipeline]
        most = failures if chance.random() < 0.5 else num_nodes
        lost = tuple(chance.sample(nodes, chance.randint(min(1, most), most)))
        yield Case(fewest, failures, kind, sizes, pipelines, lost)


@cache
def sizes_of(fewest: int, failures: int, kind: str, num_nodes: int) -> tuple[int, ...]:
    choose = sufficient_sizes if kind == "sufficient" else usable_sizes
    return tuple(choose(fewest, failures, num_nodes))


def random_sizes(sizes: Sequence[int], replicas: int, num_nodes: int, chance: random.Random) -> list[int]:
    """Return random sizes of at least so many pipelines. Sizes of templates are consecutive here."""
    smallest, largest = sizes[0], sizes[-1]
    most = num_nodes // smallest
    count = chance.randint(max(replicas, -(-num_nodes // largest)), most)
    found = [smallest] * count
    for _ in range(num_nodes - smallest * count):
        found[chance.choice([index for index, size in enumerate(found) if size < largest])] += 1
    return found


def laid_out(sizes: Sequence[int]) -> Pipelines:
    """Return pipelines of these sizes, with nodes numbered in order."""
    pipelines, first = [], 0
    for size in sizes:
        pipelines.append(tuple(f"n{node:02}" for node in range(first, first + size)))
        first += size
    return tuple(pipelines)


def answer(case: Case) -> Reconfiguration | None:
    try:
        return reconfigure(case.pipelines, set(case.lost), case.sizes, case.failures)
    except TooFewNodes:
        return None


def check(case: Case, found: Reconfiguration | None) -> list[str]:
    """Return what is wrong with an answer."""
    if found is None:
        return ["refused"] if case.survivors >= case.fewest else []
    if case.survivors < case.fewest:
        return ["planned without enough nodes"]
    wrong = []
    survivors = {node for nodes in case.pipelines for node in nodes} - set(case.lost)
    if sorted(survivors) != sorted([*(node for nodes in found.pipelines for node in nodes), *found.idle]):
        wrong.append("a node is missing or used twice")
    if not {len(nodes) for nodes in found.pipelines} <= set(case.sizes):
        wrong.append("a size has no template")
    if found.failures_left != len(found.pipelines) - 1:
        wrong.append("the f that is left is not reported")
    if found.failures_left < min(case.failures, case.survivors // case.fewest - 1):
        wrong.append("fewer replicas than the nodes suffice for")
    if case.is_promised and (found.idle or found.failures_left < case.failures):
        wrong.append("the promise is not kept")
    return wrong


def unplanned(fewest: int, failures: int, kind: str, num_nodes: int) -> list[str]:
    """Return the numbers of nodes from (f + 1) n0 on that have no composition with f + 1 replicas."""
    sizes = sizes_of(fewest, failures, kind, num_nodes)
    wrong = []
    for left in range((failures + 1) * fewest, num_nodes + 1):
        planned = most_nodes(left, sizes, failures + 1) == left
        if planned and count_compositions(left, sizes) <= PRICED:
            composed = compose(left, {size: template(size) for size in sizes}, 64, failures + 1)
            planned = composed is not None and sum(composed.sizes) == left and sum(composed.micro_batches) == 64
        if not planned:
            wrong.append(f"n0 {fewest}, f {failures}, {kind} sizes {sizes}: {left} nodes are not planned")
    return wrong


@cache
def template(size: int) -> Template:
    """Return a template of one stage: of interest is only which composition is found."""
    return Template(size, (1,), CutModel((StageTime(1 / size, 2 / size),), lambda stage, stages: 1))


def in_another_order(case: Case, chance: random.Random) -> Case:
    def shuffled(items: Sequence[Item]) -> tuple[Item, ...]:
        return tuple(chance.sample(items, len(items)))

    return Case(
        case.fewest, case.failures, case.kind, shuffled(case.sizes), shuffled(case.pipelines), shuffled(case.lost)
    )


def count_moved(pipelines: Pipelines, found: Reconfiguration) -> int:
    """Count nodes in another pipeline than before, where an old pipeline continues in one new pipeline at most."""
    home = {node: index for index, nodes in enumerate(pipelines) for node in nodes}
    together = Counter((home.get(node, -1), index) for index, nodes in enumerate(found.pipelines) for node in nodes)
    kept, seen_old, seen_new = 0, {-1}, set()
    for (old, new), number in together.most_common():
        if old not in seen_old and new not in seen_new:
            kept += number
            seen_old.add(old)
            seen_new.add(new)
    return sum(map(len, found.pipelines)) - kept


def left_sizes(case: Case) -> list[int]:
    lost = set(case.lost)
    return [sum(node not in lost for node in nodes) for nodes in case.pipelines]


def oobleck(sizes: Sequence[int], fewest: int) -> list[int] | None:
    """Return the sizes after Oobleck's rule (section 5.1), None if it finds the nodes insufficient.

    Pipelines that are too small borrow single nodes from the largest one, one pipeline after the other. When none can
    lend, the smallest one merges with the next smallest until none is too small.
    """
    found = [size for size in sizes if size]
    for index in range(len(found)):
        while found[index] < fewest < max(found):
            found[found.index(max(found))] -= 1
            found[index] += 1
    found.sort()
    while found and found[0] < fewest:
        if len(found) == 1:
            return None
        found = sorted([found[0] + found[1], *found[2:]])
    return found or None


def verdict(sizes: Sequence[int], failures: int, found: list[int] | None) -> str:
    """Say what is wrong with the sizes of the rule, or that they are kept."""
    if found is None or len(found) < failures + 1:
        return "too few replicas"
    return "kept" if set(found) <= set(sizes) else "no template"


if __name__ == "__main__":
    main()
