"""What `bsl plan` prints: cells and lines for the screen, and the JSON document."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bigsci_launch.plan.choose.answer import PlanRequest
from bigsci_launch.plan.choose.search import Plan, SearchResult
from bigsci_launch.plan.price.calibration import Calibration
from bigsci_launch.plan.price.price import TERM_NAMES, price_stage_memory
from bigsci_launch.plan.price.stages import lay_out_stages, layout_lines
from bigsci_launch.plan.shape.legality import advise
from bigsci_launch.plan.shape.parameters import (
    ModelShape,
    checkpoint_bytes,
    count_parameters,
    count_stage_parameters,
    state_bytes,
)
from bigsci_launch.plan.shape.setup import Setup, describe_stages
from bigsci_launch.plan.shape.tflops import tflops_of
from bigsci_launch.units import format_bytes, format_count

SCHEMA_VERSION = 1
PLAN_COLUMNS = (
    *(">#", ">tp", ">pp", ">dp", ">mbs", "partition", "stages", ">s/step", ">TFLOP/s"),
    *(">GiB", ">bubble", ">days", ">3 of 4"),
)
REFUSED_COLUMNS = ("rule", ">refused", "asks", "source", "example")
EXPLAIN_COLUMNS = ("seconds of a step", ">winner", ">runner-up", ">runner-up pays")


def model_line(shape: ModelShape, tp: int) -> str:
    """Return the model in one line, with its parameters as they will be trained."""
    return (
        f"{shape.num_layers} layers of {shape.hidden_size}, {_heads(shape)}, "
        f"vocabulary {shape.vocab_size} padded to {shape.padded_vocab_size(tp)}: "
        f"{format_count(count_parameters(shape, tp))} parameters ({count_parameters(shape, tp)})"
    )


def _heads(shape: ModelShape) -> str:
    shared = shape.num_key_value_heads
    return f"{shape.num_attention_heads} heads" + (f" on {shared} key/value heads" if shared else "")


def calibration_line(calibration: Calibration, setup: Setup) -> str:
    """Return one line on how far the figures for `setup` can be trusted."""
    errors = calibration.time_errors
    if not calibration.is_measured:
        return (
            "uncalibrated: every time and memory figure is a guess within 40 % or more; "
            "`bsl plan calibrate` learns from measured runs"
        )
    basis = calibration.origin or f"{len(errors.pairs)} timed runs"
    different = "; ".join(calibration.differences(setup))
    if different:
        return f"calibrated on {basis} of something else, so every figure is a guess within 40 % or more: {different}"
    if not errors.pairs:
        return f"calibrated on {basis}, too few to know the error"
    mean, most = 100 * errors.mean, 100 * errors.quantile(0.9)
    return (
        f"calibrated on {basis}; predicting each from the others gives a mean error of {mean:.1f} %, 9 of 10 within "
        f"{most:.1f} %"
    )


def sizes_lines(setup: Setup, calibration: Calibration | None = None) -> list[str]:
    """Return what a layout means: ranks, the contents of each stage, parameters and state per rank; with a calibration
    also what each stage costs."""
    topology = setup.topology
    stages = count_stage_parameters(setup.shape, topology.tp, setup.layers_per_stage)
    shown = list(dict.fromkeys((stages[0], stages[len(stages) // 2], stages[-1])))
    lines = [
        f"{topology} = {topology.world_size} ranks on {_nodes(setup)}, micro batch {setup.micro_batch_size}, "
        f"{setup.num_micro_batches} micro batches a step, {setup.partition_method}",
        f"layers per stage: {describe_stages(setup.layers_per_stage)}",
        *layout_lines(lay_out_stages(setup, calibration)),
    ]
    for stage in shown:
        state = state_bytes(stage.num_parameters, topology.dp, setup.precision)
        lines.append(
            f"a rank of stage {stage.stage}: {format_count(stage.num_parameters)} parameters; "
            f"weights {format_bytes(state.weights)}, gradients {format_bytes(state.gradients)}, "
            f"optimizer {format_bytes(state.optimizer)}, together {format_bytes(state.total)}"
        )
    lines.append(f"a checkpoint: {format_bytes(checkpoint_bytes(setup.shape, topology.tp))}")
    return lines


def _nodes(setup: Setup) -> str:
    return f"{setup.num_nodes} nodes" if setup.num_nodes > 1 else "1 node"


def plan_cells(rank: int, plan: Plan, calibration: Calibration) -> tuple[str, ...]:
    """Return one line of the table, in the order of `PLAN_COLUMNS`."""
    setup, price, topology = plan.setup, plan.price, plan.setup.topology
    middle = price_stage_memory(setup, topology.pp // 2, calibration)
    tflops = tflops_of(setup, price.seconds)
    return (
        *(str(rank), str(topology.tp), str(topology.pp), str(topology.dp)),
        str(setup.micro_batch_size),
        *(_method(setup), describe_stages(setup.layers_per_stage)),
        f"{price.seconds:.1f} ±{100 * price.band:.0f}%",
        f"{tflops.full:.0f} ({tflops.weights:.0f})",
        "/".join(f"{stage.predicted_gib:.0f}" for stage in (price.first_stage, middle, price.last_stage)),
        f"{100 * price.bubble:.0f}%",
        f"{plan.days:.1f}",
        f"{plan.likely_days:.1f}",
    )


def _method(setup: Setup) -> str:
    """Return the partition method as the table shows it next to the stages."""
    name, _, pattern = setup.partition_method.partition(":")
    return pattern if name == "type" else name


def plan_table(
    plans: Sequence[Plan], calibration: Calibration, configured: Setup
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return columns and lines of the table of plans; nodes and shapes are shown only if they vary."""
    columns, lines = list(PLAN_COLUMNS), [list(plan_cells(*pair, calibration)) for pair in enumerate(plans, 1)]
    if any(plan.setup.num_nodes != configured.num_nodes for plan in plans):
        columns.insert(1, ">nodes")
        for line, plan in zip(lines, plans, strict=True):
            line.insert(1, str(plan.setup.num_nodes))
    if any(plan.setup.shape != configured.shape for plan in plans):
        columns.insert(1, ">L/heads")
        for line, plan in zip(lines, plans, strict=True):
            line.insert(1, f"{plan.setup.shape.num_layers}/{plan.setup.shape.num_attention_heads}")
    return tuple(columns), [tuple(line) for line in lines]


def best_line(plan: Plan) -> str:
    """Return a line with the total cost of the best plan."""
    setup = plan.setup
    checkpoint = format_bytes(checkpoint_bytes(setup.shape, setup.topology.tp))
    return (
        f"the best takes {plan.days:.1f} days and {plan.gpu_hours:,.0f} GPU-hours for {plan.num_tokens / 1e9:,.0f}e9 "
        f"tokens; each checkpoint takes {checkpoint}"
    )


def rank_of(result: SearchResult, setup: Setup) -> int | None:
    """Return the rank of a setup among the plans that fit; 1 is the best. Methods with the same cut count as equal."""
    alike = (setup.shape, setup.topology, setup.micro_batch_size, setup.layers_per_stage)
    for rank, plan in enumerate(result.plans, 1):
        other = plan.setup
        if alike == (other.shape, other.topology, other.micro_batch_size, other.layers_per_stage):
            return rank
    return None


def summary_line(result: SearchResult) -> str:
    """Return how many setups fit, run out of memory, or are refused."""
    refused = sum(entry.count for entry in result.refused)
    return (
        f"{len(result.plans)} plans fit, {len(result.out_of_memory)} run out of memory, "
        f"{refused} are refused by {len(result.refused)} rules"
    )


def refused_cells(result: SearchResult) -> list[tuple[str, ...]]:
    """Return for each rule how many setups it refused, what it requires, its source, and one example."""
    rows: list[tuple[str, ...]] = [
        (entry.rule.name, str(entry.count), entry.rule.asks, entry.rule.source, entry.example)
        for entry in sorted(result.refused, key=lambda entry: -entry.count)
    ]
    if result.out_of_memory:
        first = result.out_of_memory[0]
        example = (
            f"{first.setup.topology} micro batch {first.setup.micro_batch_size}: {first.price.need_gib:.0f} GiB needed"
        )
        rows.append(("memory", str(len(result.out_of_memory)), "the needed memory fits the GPU", "predicted", example))
    return rows


def explain_cells(best: Plan, other: Plan) -> list[tuple[str, ...]]:
    """Return the seconds of a step by term: the winner, the other, and the other's extra cost."""
    rows = [
        (name, f"{mine:.2f}", f"{theirs:.2f}", f"{theirs - mine:+.2f}")
        for name, mine, theirs in zip(TERM_NAMES, best.price.terms, other.price.terms, strict=True)
        if abs(mine) > 0.005 or abs(theirs) > 0.005
    ]
    mine, theirs = best.price.seconds, other.price.seconds
    return [*rows, ("a step", f"{mine:.2f}", f"{theirs:.2f}", f"{theirs - mine:+.2f}")]


def explain_lines(best: Plan, other: Plan) -> list[str]:
    """Return what the terms do not show: idle time, memory, the ramp, and how certain the order is."""
    lines = [
        f"idle time of the slowest stage: {100 * best.price.bubble:.1f} % against {100 * other.price.bubble:.1f} %",
        f"memory needed: {best.price.need_gib:.0f} GiB against {other.price.need_gib:.0f} GiB",
        f"whole run, including the ramp-up: {best.days:.1f} days against {other.days:.1f}",
    ]
    gap = other.run_seconds / best.run_seconds - 1
    bands = f"±{100 * best.price.band:.0f} % against ±{100 * other.price.band:.0f} %"
    if gap < 0:
        lines.append(
            f"the other is predicted {-100 * gap:.1f} % faster, but with less certainty ({bands}): 3 of 4 such plans "
            f"stay within {other.likely_days:.1f} days, those like the winner within {best.likely_days:.1f}; "
            "measure it before a long run"
        )
    elif gap < best.price.band + other.price.band:
        lines.append(f"the gap of {100 * gap:.1f} % is inside the bands ({bands}): measure both before a long run")
    lines += [f"the winner: {remark}" for remark in advise(best.setup)]
    lines += [f"the other: {remark}" for remark in advise(other.setup)]
    return lines


def plan_document(plan: Plan, calibration: Calibration) -> dict[str, Any]:
    """Return a plan for JSON: sizes in GiB, times in seconds, shares from 0 to 1."""
    setup, price = plan.setup, plan.price
    tflops = tflops_of(setup, price.seconds)
    middle = price_stage_memory(setup, setup.topology.pp // 2, calibration)
    return {
        "nodes": setup.num_nodes,
        **setup.topology.as_dict(),
        "micro_batch_size": setup.micro_batch_size,
        "partition_method": setup.partition_method,
        "num_layers": setup.shape.num_layers,
        "num_attention_heads": setup.shape.num_attention_heads,
        "layers_per_stage": list(setup.layers_per_stage),
        "seconds_per_step": price.seconds,
        "seconds_low": price.seconds * (1 - price.band),
        "seconds_high": price.seconds * (1 + price.band),
        "tflops": {"full": tflops.full, "weights": tflops.weights},
        "memory_gib": {
            "first": price.first_stage.predicted_gib,
            "middle": middle.predicted_gib,
            "last": price.last_stage.predicted_gib,
            "need": price.need_gib,
            "gpu": calibration.gpu.memory_gib,
        },
        "out_of_memory": price.is_out_of_memory,
        "bubble": price.bubble,
        "terms": dict(zip(TERM_NAMES, price.terms, strict=True)),
        "days": plan.days,
        "likely_days": plan.likely_days,
        "gpu_hours": plan.gpu_hours,
        "checkpoint_bytes": checkpoint_bytes(setup.shape, setup.topology.tp),
        "advice": list(advise(setup)),
    }


def search_document(
    request: PlanRequest, result: SearchResult, calibration: Calibration, top: int, configured: Plan | None
) -> dict[str, Any]:
    """Return the whole answer for JSON."""
    return {
        "schema_version": SCHEMA_VERSION,
        **request_document(request, calibration),
        "calibration": calibration_document(calibration, request.configured),
        "configured": plan_document(configured, calibration) if configured else None,
        "rank_of_configured": rank_of(result, configured.setup) if configured else None,
        "num_plans": len(result.plans),
        "plans": [plan_document(plan, calibration) for plan in result.plans[:top]],
        "num_out_of_memory": len(result.out_of_memory),
        "out_of_memory": [plan_document(plan, calibration) for plan in result.out_of_memory[:top]],
        "refused": [
            {"rule": entry.rule.name, "count": entry.count, "example": entry.example, "source": entry.rule.source}
            for entry in result.refused
        ],
    }


def request_document(request: PlanRequest, calibration: Calibration | None = None) -> dict[str, Any]:
    """Return what was asked and what follows from the sizes alone, for JSON."""
    setup = request.configured
    shape, tp = setup.shape, setup.topology.tp
    document: dict[str, Any] = {
        "run": request.name,
        "site": request.site_name,
        "world_size": setup.topology.world_size,
        "num_steps": request.num_steps,
        "num_tokens": request.num_samples * shape.sequence_length,
        "num_parameters": count_parameters(shape, tp),
        "padded_vocab_size": shape.padded_vocab_size(tp),
        "checkpoint_bytes": checkpoint_bytes(shape, tp),
        "refusal": request.refusal.text if request.refusal else None,
    }
    if request.refusal is None:
        document["stages"] = _stage_documents(setup, calibration)
    return document


def _stage_documents(setup: Setup, calibration: Calibration | None) -> list[dict[str, Any]]:
    counts = setup.layers_per_stage
    return [
        {
            "stage": stage.stage,
            "layers": list(stage.layers),
            "num_transformer_layers": counts[stage.stage],
            "parameters_per_rank": stage.num_parameters,
            "state_bytes_per_rank": state_bytes(stage.num_parameters, setup.topology.dp, setup.precision).total,
            "micro_batch_milliseconds": stage.milliseconds,
            "need_gib": stage.need_gib,
        }
        for stage in lay_out_stages(setup, calibration)
    ]


def calibration_document(calibration: Calibration, setup: Setup) -> dict[str, Any]:
    """Return how far the figures for `setup` can be trusted, for JSON."""
    errors = calibration.time_errors
    return {
        "is_measured": calibration.is_measured,
        "num_timed_runs": len(errors.pairs),
        "mean_left_out_error": errors.mean if errors.pairs else None,
        "constants": calibration.constants.as_dict(),
        "drift_from": calibration.drift_from.isoformat() if calibration.drift_from else None,
        "gpu": calibration.gpu.name,
        "assumed": list(calibration.gpu.assumed),
        "site": calibration.site,
        "framework": calibration.framework,
        "attention": calibration.attention,
        "differences": list(calibration.differences(setup)),
    }
