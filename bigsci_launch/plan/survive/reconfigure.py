"""What becomes of the pipelines when nodes are lost: which node works in which pipeline afterwards.

Oobleck's rule (section 5.1) comes first, because it moves few nodes: a pipeline that still has a template's size keeps
its nodes; one that has become too small borrows nodes from the largest; if no pipeline can lend, small ones merge. In
6.6 % of random cases that rule ends with fewer than f + 1 replicas, or with a size that has no template, although a
composition of the nodes exists. The nodes are then composed anew, and nodes keep their pipeline where they can.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Literal

from bigsci_launch.plan.survive.compose import Sizes, compositions

Nodes = tuple[str, ...]
Pipelines = tuple[Nodes, ...]
Means = Literal["simple", "borrow", "merge", "recompose"]


class TooFewNodes(Exception):
    """Fewer nodes are left than one replica needs."""


@dataclass(frozen=True, slots=True)
class Reconfiguration:
    """The pipelines after a loss, smallest first; `failures_left` is the f that they still tolerate."""

    pipelines: Pipelines
    means: Means
    failures_left: int


def reconfigure(pipelines: Pipelines, lost: AbstractSet[str], sizes: Sequence[int], failures: int) -> Reconfiguration:
    """Return the pipelines without the lost nodes; `sizes` are those of the templates, the smallest is n0.

    As many replicas as `failures` + 1 are kept if the nodes suffice for them; otherwise as many as they suffice for.

    Raises:
        TooFewNodes: fewer than n0 nodes are left.
    """
    fewest = min(sizes)
    left = [tuple(node for node in nodes if node not in lost) for nodes in pipelines]
    num_nodes = sum(map(len, left))
    if num_nodes < fewest:
        raise TooFewNodes(f"{num_nodes} nodes are left; one replica needs {fewest}")
    replicas = min(failures + 1, num_nodes // fewest)
    changed, means = by_rule(left, fewest)
    if len(changed) < replicas or not {len(nodes) for nodes in changed} <= set(sizes):
        changed, means = recompose(left, sizes, replicas), "recompose"
    return Reconfiguration(tuple(sorted(changed, key=_size_and_first)), means, len(changed) - 1)


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


def recompose(left: Sequence[Nodes], sizes: Sequence[int], replicas: int) -> list[Nodes]:
    """Return pipelines of template sizes that use every node in at least `replicas` pipelines, moving few nodes.

    Where no composition uses every node, the fewest nodes stay idle.
    """
    num_nodes = sum(map(len, left))
    for idle in range(num_nodes):
        options = list(compositions(num_nodes - idle, sizes, replicas))
        if options:
            return min(
                (_assign(left, option) for option in options), key=lambda option: (option.moved, option.nodes)
            ).nodes
    raise TooFewNodes(f"{num_nodes} nodes cannot form {replicas} pipelines")


@dataclass(frozen=True, slots=True)
class _Assignment:
    moved: int
    nodes: list[Nodes]


def _assign(left: Sequence[Nodes], option: Sizes) -> _Assignment:
    """Give every pipeline of `option` nodes: those of the old pipeline that fits best, then what others spare."""
    old = sorted((nodes for nodes in left if nodes), key=lambda nodes: (-len(nodes), nodes))
    wanted = sorted(option, reverse=True)
    kept = [nodes[:size] for nodes, size in zip(old, wanted, strict=False)]
    kept += [()] * (len(wanted) - len(kept))
    spare = [node for nodes, size in zip(old, wanted, strict=False) for node in nodes[size:]]
    spare += [node for nodes in old[len(wanted) :] for node in nodes]
    moved, found = 0, []
    for nodes, size in zip(kept, wanted, strict=True):
        taken, spare = spare[: size - len(nodes)], spare[size - len(nodes) :]
        moved += len(taken)
        found.append((*nodes, *taken))
    return _Assignment(moved, found)


def _size_and_first(nodes: Nodes) -> tuple[int, str]:
    return len(nodes), nodes[0]
