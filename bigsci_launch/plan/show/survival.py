"""The text and JSON of `bsl plan --survive`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from bigsci_launch.plan.price.memory import TIGHT_SHARE
from bigsci_launch.plan.shape.setup import describe_stages
from bigsci_launch.plan.survive.answer import REBUILD_S, ComparedStrategy, SurvivalAnswer
from bigsci_launch.plan.survive.loss import Loss
from bigsci_launch.plan.survive.survival import OnNodes, Survival, Tier
from bigsci_launch.plan.survive.templates import Template
from bigsci_launch.scheduler.hostlist import compress_hostlist
from bigsci_launch.topology.naming import agree
from bigsci_launch.units import format_age, format_bytes, format_percent

SCHEMA_VERSION = 1
SHOWN_NUMBERS = 24
"""Numbers of nodes in the table on the terminal; JSON and page have all."""

SHOWN_FIRST = 8
"""Of these, the first are shown without a gap."""

TEMPLATE_COLUMNS = ("for", ">nodes", ">stages", "layers", ">GiB of a GPU", ">ms a micro batch", ">host GiB")
NODES_COLUMNS = (
    ">nodes", "pipelines", "micro batches", ">s a step", ">of full speed", ">whole replicas", ">of full speed", ">idle",
    ">f left",
)  # fmt: skip
LOSS_COLUMNS = (">pipeline", "before", "after")
STRATEGY_COLUMNS = ("strategy", ">effective", ">paused", ">stopped")
REPLAY_COLUMNS = ("strategy", ">samples/s", ">effective", ">paused", ">stopped")


def head_lines(answer: SurvivalAnswer) -> Iterator[str]:
    """Yield what is guaranteed, and what it rests on."""
    survival = answer.survival
    tier, failures = survival.tier, survival.failures
    fewest = min(survival.by_nodes)
    which = "no node may fail" if failures == 0 else f"any {_nodes(failures)} may fail at the same time"
    yield (
        f"{answer.name} on {answer.site_name}, {_nodes(survival.num_nodes)}: {which} (f {failures}) while "
        f"{survival.guaranteed_nodes} or more are left"
    )
    yield (
        f"n0 {tier.fewest_nodes}: with {_replicas(tier.replicas)} each needs {_nodes(tier.fewest_nodes)} of "
        f"{survival.replica.setup.ranks_per_node} ranks; {_other_tiers(survival)}"
    )
    sizes = ", ".join(map(str, survival.sizes))
    extra = "; those of other tiers raise the throughput" if survival.extra_sizes else ""
    yield f"templates of {sizes} nodes suffice for every number of nodes from {survival.guaranteed_nodes} on{extra}"
    if fewest < survival.guaranteed_nodes:
        yield f"below {survival.guaranteed_nodes} nodes f falls; below {fewest} the run stops"
    if survival.replica.node_memory_gib is None and failures:
        yield "host memory of a node unknown (site.node_memory_gib): the copies of shards may not fit"
    if failures:
        yield _copies_line(survival)
    if tight := _tight_sizes(survival):
        yield f"tight, above {format_percent(TIGHT_SHARE)} of a GPU's memory: templates of {tight} nodes"


def _copies_line(survival: Survival) -> str:
    full, replica = survival.by_nodes[survival.num_nodes], survival.replica
    num_bytes = replica.num_state_bytes * survival.failures / sum(full.composition.sizes)
    seconds = num_bytes / (replica.calibration.constants.network_gb_per_s * 1e9)
    return (
        f"copies of shards: each node sends {format_bytes(num_bytes)} after each step, {seconds:.1f} s of "
        f"{full.seconds:.1f} s unless they are sent while it computes; step times below leave them out"
    )


def _tight_sizes(survival: Survival) -> str:
    limit = TIGHT_SHARE * survival.replica.calibration.gpu.memory_gib
    tight = {
        template.size
        for tier in survival.tiers
        for template in tier.templates.values()
        if survival.replica.with_replicas(tier.replicas).need_gib(template.counts) > limit
    }
    return ", ".join(map(str, sorted(tight)))


def _other_tiers(survival: Survival) -> str:
    others = [tier for tier in survival.tiers if tier is not survival.tier]
    if not others:
        return "with more replicas as many"
    return ", ".join(f"with {_replicas(tier.replicas)} {tier.fewest_nodes}" for tier in others)


def _nodes(count: int) -> str:
    return "1 node" if count == 1 else f"{count} nodes"


def _replicas(count: int) -> str:
    return "1 replica" if count == 1 else f"{count} or more replicas"


def template_cells(survival: Survival) -> list[tuple[str, ...]]:
    """Return a row for every template."""
    return [
        _template_row(survival, tier, template)
        for tier in survival.tiers
        for _, template in sorted(tier.templates.items())
    ]


def _template_row(survival: Survival, tier: Tier, template: Template) -> tuple[str, ...]:
    replica = survival.replica.with_replicas(tier.replicas)
    return (
        _replicas(tier.replicas),
        str(template.size),
        str(len(template.counts)),
        describe_stages(template.counts),
        f"{replica.need_gib(template.counts):.1f}",
        f"{1e3 * template.seconds_per_micro_batch:.0f}",
        f"{replica.host_gib(template.size):.0f}",
    )


def shown_numbers(survival: Survival) -> list[OnNodes]:
    """Return the numbers of nodes for the terminal, the largest first: the first without a gap, then an even choice."""
    every = [found for _, found in sorted(survival.by_nodes.items(), reverse=True)]
    rest = every[SHOWN_FIRST:]
    step = -(-len(rest) // (SHOWN_NUMBERS - SHOWN_FIRST)) or 1
    return every if len(every) <= SHOWN_NUMBERS else [*every[:SHOWN_FIRST], *rest[step - 1 :: step]]


def nodes_cells(survival: Survival, shown: Sequence[OnNodes]) -> list[tuple[str, ...]]:
    """Return a row for every number of nodes."""
    full = survival.by_nodes[survival.num_nodes].seconds
    return [_nodes_row(survival, found, full) for found in shown]


def _nodes_row(survival: Survival, found: OnNodes, full: float) -> tuple[str, ...]:
    return (
        str(found.num_nodes),
        describe_sizes(found.composition.sizes),
        _range(found.composition.micro_batches),
        f"{found.seconds:.1f}",
        format_percent(full / found.seconds),
        str(found.num_whole),
        format_percent(full / found.whole_seconds) if found.whole_seconds else "does not fit",
        str(found.num_idle) if found.num_idle else "",
        str(survival.failures_left(len(found.composition.sizes))),
    )


def describe_sizes(sizes: Sequence[int]) -> str:
    """`6x7,5`: seven pipelines of 6 nodes and one of 5, as layers of stages are written."""
    return describe_stages(tuple(sorted(sizes, reverse=True)))


def _range(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low}-{high}"


def expected_lines(answer: SurvivalAnswer) -> Iterator[str]:
    """Yield what a job of the time limit is expected to train although nodes fail, or why that is not known."""
    mtbf, hours = answer.node_mtbf_h, answer.horizon_h
    if mtbf is None:
        yield "expected time unknown: the site file does not give how often a node fails (site.node_mtbf_h)"
        return
    survival = answer.survival
    found = [compared for compared in answer.strategies if compared.expected]
    losses = found[0].expected.num_losses if found and found[0].expected else 0.0
    yield (
        f"expected in {hours:g} h without a replacement: {losses:.2g} lost nodes (one of {survival.num_nodes} every "
        f"{mtbf / survival.num_nodes:.0f} h); each loss is assumed to cost {REBUILD_S:.0f} s for new communicators, "
        "not measured on this site, then the transfer, and half a step"
    )
    if survival.failures == 0:
        yield (
            "with f 0 no copy of the optimizer's shards is kept: each loss goes back to a checkpoint, on average "
            f"{format_age(answer.undone_s)} of work"
        )
    for each in answer.strategies:
        if each.expected is None:
            yield f"not compared: {each.strategy} cannot train on {_nodes(survival.num_nodes)}"


def strategy_cells(answer: SurvivalAnswer) -> list[tuple[str, ...]]:
    """Return a row for every strategy: shares of a run at full size without failures."""
    return [
        (each.strategy, *(_share(share) for share in shares))
        for each in answer.strategies
        if each.expected
        and (shares := (each.expected.effective_share, each.expected.paused_share, each.expected.stopped_share))
    ]


def _share(share: float) -> str:
    return "< 0.01 %" if 0 < share < 1e-4 else format_percent(share)


def trace_lines(answer: SurvivalAnswer) -> Iterator[str]:
    """Yield what the trace holds, and who cannot train under it."""
    trace = answer.trace
    assert trace is not None
    added = sum(event.change == "add" for event in trace.events)
    fewest = min(span.num_nodes for span in trace.spans)
    yield (
        f"trace: {trace.num_nodes} nodes at the start, {added} additions and {len(trace.events) - added} removals in "
        f"{trace.spans[-1].end / 3600:.1f} h, {fewest} nodes at the fewest; shares are of {trace.most_nodes} nodes "
        "without a failure"
    )
    for each in answer.strategies:
        if each.replayed is None:
            yield f"not replayed: {each.strategy} cannot train on {_nodes(trace.most_nodes)}"


def replay_cells(answer: SurvivalAnswer) -> list[tuple[str, ...]]:
    """Return a row for every strategy that was replayed."""
    return [_replay_row(each) for each in answer.strategies if each.replayed]


def _replay_row(each: ComparedStrategy) -> tuple[str, ...]:
    found = each.replayed
    assert found is not None
    return (
        each.strategy,
        f"{found.samples / found.seconds:.3g}",
        format_percent(found.effective_share),
        format_age(found.paused_s),
        format_age(found.stopped_s),
    )


def loss_lines(answer: SurvivalAnswer) -> Iterator[str]:
    """Yield what a loss does, in short."""
    loss = answer.loss
    assert loss is not None
    survival, moved = answer.survival, loss.transfer
    rate = survival.replica.calibration.constants.network_gb_per_s
    left = sum(map(len, loss.after)) + len(loss.idle)
    yield f"lost {compress_hostlist(loss.lost)}: {_nodes(left)} {agree('is left', left)}; {_MEANS[loss.means]}"
    yield (
        f"a step takes {loss.seconds:.1f} s instead of {loss.seconds_before:.1f} s "
        f"({format_percent(loss.seconds_before / loss.seconds)} of the speed); f {loss.failures_left} is left"
    )
    yield (
        f"{format_bytes(moved.now.num_bytes)} move over {len(moved.now.links)} links before the next step: "
        f"{loss.transfer_seconds:.1f} s at {rate:.1f} GB/s of a node; then "
        f"{format_bytes(moved.afterwards.num_bytes)} for copies of shards, {loss.later_seconds:.1f} s"
    )
    if loss.idle:
        yield f"idle: {compress_hostlist(loss.idle)}"
    yield from _lost_lines(loss)


_MEANS = {
    "simple": "every pipeline that lost nodes has a template of its new size",
    "borrow": "a pipeline that became too small borrows nodes",
    "merge": "pipelines that became too small merge",
    "recompose": "the nodes are composed again",
}


def _lost_lines(loss: Loss) -> Iterator[str]:
    for what, sense in (("weights", "weights"), ("state", "optimizer state")):
        parts = [part for part in loss.transfer.lost if part.kind == what]
        if parts:
            units = compress_units([part.unit for part in parts])
            size = format_bytes(sum(part.num_bytes for part in parts))
            yield f"LOST: {size} of the {sense} of {units}: no copy is left, only a checkpoint has it"


def compress_units(names: Sequence[str]) -> str:
    """`embedding, layers 0-5`."""
    layers = sorted({int(name.removeprefix("layer ")) for name in names if name.startswith("layer ")})
    others = [name for name in dict.fromkeys(names) if not name.startswith("layer ")]
    runs: list[list[int]] = []
    for layer in layers:
        if runs and runs[-1][-1] == layer - 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    text = ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return ", ".join([*others, *([f"layers {text}"] if layers else [])])


def loss_cells(loss: Loss) -> list[tuple[str, ...]]:
    """Return a row for every pipeline whose nodes change."""
    rows = []
    for index in range(max(len(loss.before), len(loss.after))):
        before = loss.before[index] if index < len(loss.before) else ()
        after = loss.after[index] if index < len(loss.after) else ()
        if before != after:
            rows.append((str(index), *(compress_hostlist(nodes) or "-" for nodes in (before, after))))
    return rows


def survival_document(answer: SurvivalAnswer) -> dict[str, Any]:
    """Return the whole answer for JSON."""
    survival = answer.survival
    document: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "run": answer.name,
        "site": answer.site_name,
        "num_nodes": survival.num_nodes,
        "failures": survival.failures,
        "fewest_nodes_of_a_replica": survival.tier.fewest_nodes,
        "guaranteed_nodes": survival.guaranteed_nodes,
        "sufficient_sizes": list(survival.sizes),
        "templates": [_template_document(survival, tier, size) for tier in survival.tiers for size in tier.templates],
        "on_nodes": [_nodes_document(survival, found) for _, found in sorted(survival.by_nodes.items(), reverse=True)],
        "node_mtbf_h": answer.node_mtbf_h,
        "horizon_h": answer.horizon_h,
        "assumed_rebuild_s": REBUILD_S,
        "strategies": [_strategy_document(compared) for compared in answer.strategies],
        "loss": _loss_document(answer.loss) if answer.loss else None,
    }
    return document


def _template_document(survival: Survival, tier: Tier, size: int) -> dict[str, Any]:
    replica, template = survival.replica.with_replicas(tier.replicas), tier.templates[size]
    return {
        "fewest_replicas": tier.replicas,
        "num_nodes": size,
        "layers_per_stage": list(template.counts),
        "is_needed": tier is survival.tier and size in survival.sizes,
        "micro_batch_seconds": template.seconds_per_micro_batch,
        "need_gib": replica.need_gib(template.counts),
        "host_gib": replica.host_gib(size),
    }


def _nodes_document(survival: Survival, found: OnNodes) -> dict[str, Any]:
    return {
        "num_nodes": found.num_nodes,
        "pipelines": [
            {"num_nodes": size, "micro_batches": count}
            for size, count in zip(found.composition.sizes, found.composition.micro_batches, strict=True)
        ],
        "idle_nodes": found.num_idle,
        "step_seconds": found.seconds,
        "samples_per_second": survival.samples_per_second(found.num_nodes),
        "failures_left": survival.failures_left(len(found.composition.sizes)),
        "whole_replicas": found.num_whole,
        "whole_replicas_step_seconds": found.whole_seconds,
    }


def _strategy_document(compared: ComparedStrategy) -> dict[str, Any]:
    expected, replayed = compared.expected, compared.replayed
    return {
        "strategy": compared.strategy,
        "expected": {
            "effective_share": expected.effective_share,
            "paused_share": expected.paused_share,
            "stopped_share": expected.stopped_share,
            "num_losses": expected.num_losses,
        }
        if expected
        else None,
        "trace": {
            "samples": replayed.samples,
            "seconds": replayed.seconds,
            "effective_share": replayed.effective_share,
            "paused_s": replayed.paused_s,
            "stopped_s": replayed.stopped_s,
            "num_changes": replayed.num_changes,
        }
        if replayed
        else None,
    }


def _loss_document(loss: Loss) -> dict[str, Any]:
    return {
        "lost": list(loss.lost),
        "means": loss.means,
        "before": [list(nodes) for nodes in loss.before],
        "after": [list(nodes) for nodes in loss.after],
        "idle": list(loss.idle),
        "step_seconds_before": loss.seconds_before,
        "step_seconds": loss.seconds,
        "failures_left": loss.failures_left,
        "transfer_seconds": loss.transfer_seconds,
        "copies_seconds": loss.later_seconds,
        "links": [
            {"source": source, "target": target, "bytes": count}
            for (source, target), count in loss.transfer.now.links.items()
        ],
        "copy_links": [
            {"source": source, "target": target, "bytes": count}
            for (source, target), count in loss.transfer.afterwards.links.items()
        ],
        "lost_state": [{"unit": part.unit, "kind": part.kind, "bytes": part.num_bytes} for part in loss.transfer.lost],
    }
