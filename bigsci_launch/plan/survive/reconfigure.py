"""What becomes of the pipelines when nodes are lost: which node works in which pipeline afterwards.

Oobleck's rule (section 5.1) comes first, because it moves few nodes: a pipeline that still has a template's size keeps
its nodes; one that has become too small borrows nodes from the largest; if no pipeline can lend, small ones merge. In
6.6 % of random cases that rule ends with fewer than f + 1 replicas, or with a size that has no template, although a
composition of the nodes exists. The nodes are then composed again, and as many as can keep their pipeline.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Literal

from bigsci_launch.plan.survive.compose import most_nodes

Nodes = tuple[str, ...]
Pipelines = tuple[Nodes, ...]
Means = Literal["simple", "borrow", "merge", "recompose"]


class TooFewNodes(Exception):
    """Fewer nodes are left than one replica needs."""


@dataclass(frozen=True, slots=True)
class Reconfiguration:
    """The pipelines after a loss, smallest first; `failures_left` is the f that they still tolerate.

    Nodes are idle only where no composition of the templates' sizes uses them all.
    """

    pipelines: Pipelines
    means: Means
    failures_left: int
    idle: Nodes = ()


def reconfigure(
    pipelines: Pipelines, lost: AbstractSet[str], sizes: Sequence[int], failures: int, joined: Nodes = ()
) -> Reconfiguration:
    """Return the pipelines without the lost and with the joined nodes.

    `sizes` are those of the templates, the smallest is n0. As many replicas as `failures` + 1 are kept if the nodes
    suffice for them; otherwise as many as they suffice for. The order of the pipelines does not matter.

    Raises:
        TooFewNodes: fewer than n0 nodes are left.
    """
    fewest = min(sizes)
    ordered = sorted(pipelines, key=_size_and_name)
    left = [tuple(node for node in nodes if node not in lost) for nodes in ordered]
    num_nodes = sum(map(len, left)) + len(joined)
    if num_nodes < fewest:
        raise TooFewNodes(f"{num_nodes} nodes are left; one replica needs {fewest}")
    replicas = min(failures + 1, num_nodes // fewest)
    changed, means = by_rule(left, fewest)
    if joined or len(changed) < replicas or not {len(nodes) for nodes in changed} <= set(sizes):
        changed, means = recompose(left, sizes, replicas, joined), "recompose"
    used = {node for nodes in changed for node in nodes}
    idle = tuple(node for nodes in (*left, joined) for node in nodes if node not in used)
    return Reconfiguration(tuple(sorted(changed, key=_size_and_name)), means, len(changed) - 1, idle)


def by_rule(left: Sequence[Nodes], fewest: int) -> tuple[list[Nodes], Means]:
    """Return the pipelines by Oobleck's rule. The result may have too few replicas, or sizes without a template."""
    found = [nodes for nodes in left if nodes]
    means: Means = "simple"
    for index in range(len(found)):
        while len(found[index]) < fewest and (donor := _donor(found, fewest)) is not None:
            found[index], found[donor] = (*found[index], found[donor][-1]), found[donor][:-1]
            means = "borrow"
    while len(found) > 1 and any(len(nodes) < fewest for nodes in found):
        found = _with_one_merge(found, fewest)
        means = "merge"
    return found, means


def _donor(pipelines: Sequence[Nodes], fewest: int) -> int | None:
    """Return the largest pipeline that can lend a node, the last of equals; None if none can."""
    index = max(range(len(pipelines)), key=lambda at: (len(pipelines[at]), at))
    return index if len(pipelines[index]) > fewest else None


def _with_one_merge(pipelines: list[Nodes], fewest: int) -> list[Nodes]:
    """Fuse the first pipeline that is too small with the next such one; if it is the only one, with the smallest."""
    small = [index for index, nodes in enumerate(pipelines) if len(nodes) < fewest]
    first = small[0]
    others = [index for index in range(len(pipelines)) if index != first]
    other = small[1] if len(small) > 1 else min(others, key=lambda index: (len(pipelines[index]), -index))
    merged = (*pipelines[first], *pipelines[other])
    return [merged if index == first else nodes for index, nodes in enumerate(pipelines) if index != other]


def recompose(left: Sequence[Nodes], sizes: Sequence[int], replicas: int, joined: Nodes = ()) -> list[Nodes]:
    """Return pipelines of template sizes that use every node in at least `replicas` pipelines, moving the fewest nodes.

    Of equal answers it takes one that changes the sizes of few pipelines. Where no composition uses every node, the
    fewest nodes stay idle.
    """
    old = sorted((nodes for nodes in left if nodes), key=lambda nodes: (-len(nodes), nodes))
    num_nodes = sum(map(len, old)) + len(joined)
    used = most_nodes(num_nodes, sizes, replicas)
    if used is None:
        raise TooFewNodes(f"{num_nodes} nodes cannot form {replicas} pipelines")
    wanted = nearest_sizes([len(nodes) for nodes in old], len(joined) - (num_nodes - used), sizes, replicas)
    old += [()] * (len(wanted) - len(old))
    spare = [node for nodes, size in zip(old, wanted, strict=True) for node in nodes[size:]] + list(joined)
    found = []
    for nodes, size in zip(old, wanted, strict=True):
        taken, spare = spare[: max(0, size - len(nodes))], spare[max(0, size - len(nodes)) :]
        if size:
            found.append((*nodes[:size], *taken))
    return found


def nearest_sizes(old: Sequence[int], growth: int, sizes: Sequence[int], replicas: int) -> list[int]:
    """Return the new size of each old pipeline, 0 for one that is given up, and then the sizes of new pipelines.

    Together they have `growth` more nodes. The pipelines that grow take as few nodes as possible. There must be an
    answer.
    """
    most_moved = max(1, growth)
    while (found := _within(old, growth, sorted({0, *sizes}), replicas, most_moved)) is None:
        most_moved *= 2
    return found


def _within(old: Sequence[int], growth: int, sizes: Sequence[int], replicas: int, most_moved: int) -> list[int] | None:
    """Return the best answer in which at most `most_moved` nodes move; None if there is none.

    A state is how many nodes the pipelines so far have grown by, and how many of them there are (up to `replicas`).
    Only states from which the rest can still grow as needed within `most_moved` are kept, so they are few.
    """
    padded = [*old, *[0] * (most_moved // sizes[1])]
    costs = {(0, 0): (0, 0)}
    steps: list[dict[tuple[int, int], tuple[int, int, int]]] = []
    for have in padded:
        best: dict[tuple[int, int], tuple[int, int]] = {}
        step: dict[tuple[int, int], tuple[int, int, int]] = {}
        for (grown, count), (moved, changed) in costs.items():
            lowest, highest = have + growth - grown - (most_moved - moved), have + most_moved - moved
            for size in sizes[bisect_left(sizes, lowest) : bisect_right(sizes, highest)]:
                state = (grown + size - have, min(replicas, count + (size > 0)))
                cost = (moved + max(0, size - have), changed + (0 < have != size))
                if state not in best or cost < best[state]:
                    best[state], step[state] = cost, (grown, count, size)
        costs = best
        steps.append(step)
    state = (growth, replicas)
    if state not in costs:
        return None
    wanted = []
    for step in reversed(steps):
        grown, count, size = step[state]
        wanted.append(size)
        state = (grown, count)
    return wanted[::-1]


def _size_and_name(nodes: Nodes) -> tuple[int, Nodes]:
    return len(nodes), nodes
