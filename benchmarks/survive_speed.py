"""Times the planning of a large job: its templates, its first composition, and its pipelines after losses.

    python benchmarks/survive_speed.py [--nodes 1000] [--layers 126] [--fewest 16] [--failures 1]

Each line is CPU time of one process. Templates are made once for the smallest sufficient sizes and once for every
usable size up to one layer a stage, which is more than anybody needs. Exits with 1 if the templates of the sufficient
sizes, their composition or any reconfiguration takes a second or more.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TypeVar

from survive_cases import count_moved

from bigsci_launch.plan.survive.compose import compose
from bigsci_launch.plan.survive.cut import CutModel, find_cut
from bigsci_launch.plan.survive.reconfigure import Pipelines, reconfigure
from bigsci_launch.plan.survive.schedule import StageTime
from bigsci_launch.plan.survive.templates import Template, sufficient_sizes, usable_sizes

Answer = TypeVar("Answer")
LIMIT = 1.0
MICRO_BATCHES = 2048


def main() -> None:
    parser = argparse.ArgumentParser(description="Times the planning of a large job.")
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--layers", type=int, default=126)
    parser.add_argument("--fewest", type=int, default=16, help="nodes of the smallest pipeline")
    parser.add_argument("--failures", type=int, default=1)
    options = parser.parse_args()
    model = model_of(options.layers)
    sufficient = sufficient_sizes(options.fewest, options.failures, options.nodes)
    every = [size for size in usable_sizes(options.fewest, options.failures, options.nodes) if size <= options.layers]
    slow = 0.0
    for name, sizes in (("sufficient", sufficient), ("all usable", every)):
        templates, took = timed(lambda sizes=sizes: templates_of(model, sizes))
        print(f"{len(templates):4} templates ({name} sizes {sizes[0]}-{sizes[-1]}): {took:.3f} s")
        slow = max(slow, took if name == "sufficient" else 0)
        composed, took = timed(
            lambda templates=templates: compose(options.nodes, templates, MICRO_BATCHES, options.failures + 1)
        )
        slow = max(slow, took if name == "sufficient" else 0)
        assert composed is not None
        shown = ", ".join(f"{count} x {size}" for size, count in sorted(Counter(composed.sizes).items()))
        print(f"     composition of {options.nodes} nodes, {shown} nodes: {took:.3f} s")
        pipelines = named(composed.sizes)
        nodes = [node for pipeline in pipelines for node in pipeline]
        for lost in (1, 2, 20, 100, 500, 900):
            gone = set(random.Random(lost).sample(nodes, lost))
            slow = max(slow, reconfigured(pipelines, gone, sizes, options.failures, f"{lost} nodes lost at random"))
        whole = set(nodes) - {node for pipeline in pipelines[:1] for node in pipeline}
        label = "all but one pipeline lost"
        slow = max(slow, reconfigured(pipelines, whole, sizes, options.failures, label))
        back = tuple(f"back{index:04}" for index in range(37))
        slow = max(slow, reconfigured(pipelines, set(), sizes, options.failures, "37 nodes joined", back))
    print(f"slowest of those with a limit: {slow:.3f} s, limit {LIMIT} s")
    sys.exit(slow >= LIMIT)


def model_of(num_layers: int) -> CutModel:
    """Return equal layers with an embedding and a head; a stage holds a quarter more than its share."""
    layer = StageTime(0.010, 0.030)
    layers = (StageTime(0.011, 0.032), *[layer] * (num_layers - 2), StageTime(0.016, 0.046))
    return CutModel(layers, lambda stage, stages: -(-num_layers * 5 // (stages * 4)) + 1, 0.0005)


def templates_of(model: CutModel, sizes: Iterable[int]) -> dict[int, Template]:
    """Return a template for every size, one stage to a node."""
    cuts = {size: find_cut(model, size, 4 * size) for size in sizes}
    return {size: Template(size, cut.counts, model) for size, cut in cuts.items() if cut}


def named(sizes: Iterable[int]) -> Pipelines:
    """Return pipelines of these sizes; their nodes are named in order."""
    pipelines, first = [], 0
    for size in sizes:
        pipelines.append(tuple(f"node{index:04}" for index in range(first, first + size)))
        first += size
    return tuple(pipelines)


def reconfigured(
    pipelines: Pipelines, lost: set[str], sizes: Iterable[int], failures: int, label: str, joined: tuple[str, ...] = ()
) -> float:
    """Print one reconfiguration; return its seconds."""
    found, took = timed(lambda: reconfigure(pipelines, lost, tuple(sizes), failures, joined))
    moved = count_moved(pipelines, found)
    print(
        f"     {label}: {found.means}, {len(found.pipelines)} pipelines, {moved} nodes moved, {len(found.idle)} idle: "
        f"{took:.3f} s"
    )
    return took


def timed(work: Callable[[], Answer]) -> tuple[Answer, float]:
    """Return the answer and the CPU seconds it took."""
    begin = time.process_time()
    answer = work()
    return answer, time.process_time() - begin


if __name__ == "__main__":
    main()
