"""What `bsl plan` prints: cells and lines for the screen, and the JSON document."""

from __future__ import annotations

from typing import Any

from bigsci_launch.plan.choose.answer import Answer, PlanRequest
from bigsci_launch.plan.choose.search import Plan, SearchResult
from bigsci_launch.plan.choose.variations import Variation
from bigsci_launch.plan.price.calibration import UNCALIBRATED_BAND, Calibration
from bigsci_launch.plan.price.hardware import assumed_line
from bigsci_launch.plan.price.held import expert_shard_ranks, expert_weights, shard_ranks
from bigsci_launch.plan.price.price import TERM_NAMES, price_stage_memory
from bigsci_launch.plan.price.stages import lay_out_stages, layout_lines
from bigsci_launch.plan.shape.advice import advise
from bigsci_launch.plan.shape.parameters import (
    ModelShape,
    StateBytes,
    checkpoint_bytes,
    count_active_parameters,
    count_parameters,
    count_stage_parameters,
    state_bytes,
)
from bigsci_launch.plan.shape.setup import Setup, describe_stages
from bigsci_launch.plan.shape.tflops import tflops_of
from bigsci_launch.plan.show.throughput import throughput_line, throughput_of
from bigsci_launch.units import format_bytes, format_count

SCHEMA_VERSION = 1
REFUSED_COLUMNS = ("rule", ">refused", "asks", "source", "example")


def head_lines(request: PlanRequest) -> list[str]:
    """Return what is known before the search: the model, the layout as configured, the site, and what to trust."""
    setup, calibration = request.configured, request.calibration
    lines = [f"{request.name}: {model_line(setup.shape, setup.topology.tp)}"]
    if request.refusal:
        lines.append(f"as configured: refused: {request.refusal.text}")
    else:
        lines += ["as configured:", *(f"  {line}" for line in sizes_lines(setup, calibration))]
    if request.program_needed:
        lines.append(request.program_needed)
    if calibration is None:
        return [*lines, f"site {request.site_name} has no GPU: time and memory are not predicted"]
    lines.append(f"site {request.site_name}, {calibration.gpu.name}: {calibration_line(calibration, setup)}")
    return [*lines, *hardware_lines(setup, calibration)]


def hardware_lines(setup: Setup, calibration: Calibration) -> list[str]:
    """Return what had to be assumed of the hardware."""
    gpu, assumed = calibration.gpu, assumed_line(calibration.gpu)
    lines = [assumed] if assumed else []
    if setup.precision == "fp8" and gpu.fp8_tflops is None:
        lines.append(f"{gpu.name} has no fp8, or its rate is unknown (gpu.fp8_tflops): products are priced as in bf16")
    if setup.loops_over_experts:
        lines.append(
            "a loop over the experts of a rank, one after the other: mostly launches, priced roughly; "
            "model.experts.products: grouped, if one kernel does them all"
        )
    return lines


def model_line(shape: ModelShape, tp: int) -> str:
    """Return the model in one line, with its parameters as they will be trained."""
    return (
        f"{shape.num_layers} layers of {shape.hidden_size}, {_heads(shape)}, "
        f"vocabulary {shape.vocab_size} padded to {shape.padded_vocab_size(tp)}: "
        f"{format_count(count_parameters(shape, tp))} parameters ({count_parameters(shape, tp)})"
        + (f"; each token meets {format_count(count_active_parameters(shape, tp))} of them" if shape.experts else "")
    )


def _heads(shape: ModelShape) -> str:
    shared = shape.num_key_value_heads
    return f"{shape.num_attention_heads} heads" + (f" on {shared} key/value heads" if shared else "")


def calibration_line(calibration: Calibration, setup: Setup) -> str:
    """Return one line on how far the figures for `setup` can be trusted."""
    errors = calibration.time_errors
    if not calibration.is_measured:
        return (
            f"uncalibrated: every time and memory figure is a guess within {_guess()}; "
            "`bsl plan calibrate` learns from measured runs"
        )
    basis = calibration.origin or f"{len(errors.pairs)} timed runs"
    different = "; ".join(calibration.differences(setup))
    if different:
        return f"calibrated on {basis} of something else, so every figure is a guess within {_guess()}: {different}"
    if not errors.pairs:
        return f"calibrated on {basis}, too few to know the error"
    mean, most = 100 * errors.mean, 100 * errors.quantile(0.9)
    guessed = calibration.guessed_terms(setup)
    return (
        f"calibrated on {basis}; predicting each from the others gives a mean error of {mean:.1f} %, 9 of 10 within "
        f"{most:.1f} %"
        + (
            f"; they had {calibration.attention} attention, this run has {setup.technique.attention}: "
            f"{' and '.join(guessed)} are guesses, so the bands are wider"
            if guessed
            else ""
        )
    )


def _several(count: int, noun: str, ending: str = "s") -> str:
    return f"{count} {noun}{'' if count == 1 else ending}"


def _guess() -> str:
    return f"{100 * UNCALIBRATED_BAND:.0f} % or more"


def _state(num_parameters: int, num_layers: int, setup: Setup) -> StateBytes:
    """Return the state of a rank, of which experts have fewer replicas than the rest to share it."""
    experts = round(num_layers * expert_weights(setup))
    weight, zero_stage = setup.element_bytes, setup.technique.zero_stage
    gradient = 4 if setup.has_fp32_gradients else weight
    dense, own = (
        state_bytes(count, ranks, weight=weight, gradient=gradient, zero_stage=zero_stage)
        for count, ranks in ((num_parameters - experts, shard_ranks(setup)), (experts, expert_shard_ranks(setup)))
    )
    return StateBytes(dense.weights + own.weights, dense.gradients + own.gradients, dense.optimizer + own.optimizer)


def sizes_lines(setup: Setup, calibration: Calibration | None = None) -> list[str]:
    """Return what a layout means: ranks, the contents of each stage, parameters and state per rank; with a calibration
    also what each stage costs."""
    topology = setup.topology
    stages = count_stage_parameters(setup.shape, topology.tp, setup.layers_per_stage, setup.expert_shards)
    lines = [
        f"{topology} = {topology.world_size} ranks on {_nodes(setup)}, micro batch {setup.micro_batch_size}, "
        f"{_several(setup.num_micro_batches, 'micro batch', 'es')} a step, {setup.partition_method}",
        f"layers per stage: {describe_stages(setup.layers_per_stage)}",
        *layout_lines(lay_out_stages(setup, calibration)),
    ]
    for stage in dict.fromkeys((0, len(stages) // 2, len(stages) - 1)):
        state = _state(stages[stage], setup.layers_per_stage[stage], setup)
        lines.append(
            f"a rank of stage {stage}: {format_count(stages[stage])} parameters; "
            f"weights {format_bytes(state.weights)}, gradients {format_bytes(state.gradients)}, "
            f"optimizer {format_bytes(state.optimizer)}, together {format_bytes(state.total)}"
        )
    lines.append(f"a checkpoint: {format_bytes(checkpoint_bytes(setup.shape, topology.tp))}")
    return lines


def _nodes(setup: Setup) -> str:
    return f"{setup.num_nodes} nodes" if setup.num_nodes > 1 else "1 node"


def result_lines(answer: Answer, result: SearchResult) -> list[str]:
    """Return what follows the table of plans."""
    calibration = answer.request.calibration
    lines = []
    if result.plans and calibration:
        lines += [throughput_line(answer.request.configured, calibration.gpu), best_line(result.plans[0])]
    lines += memory_lines(result)
    lines.append(f"{summary_line(result)} (--rejected lists them)")
    rank = rank_of(result, answer.configured.setup) if answer.configured else None
    if rank:
        lines.append(f"the configured layout is number {rank} of {len(result.plans)}")
    elif answer.configured and not answer.configured.price.is_safe:
        lines.append(f"the configured layout needs {_need(answer.configured)}: {answer.configured.price.fit}")
    elif answer.configured:
        lines.append("the configured layout uses another number of nodes")
    if answer.variation and calibration:
        lines.append(variation_line(answer.variation, result, calibration))
    return lines


def variation_line(variation: Variation, result: SearchResult, calibration: Calibration) -> str:
    """Return what keys that the search leaves alone would gain."""
    setup, seconds = variation.plan.setup, variation.plan.price.seconds
    tokens = throughput_of(setup, seconds, calibration.gpu).tokens_per_second
    if not result.plans:
        return f"this fits: {_set(variation)}: {setup.topology} micro batch {setup.micro_batch_size}"
    gain = result.plans[0].likely_days / variation.plan.likely_days - 1
    return (
        f"another technique is faster by {100 * gain:.0f} %: {_set(variation)}: {setup.topology} micro batch "
        f"{setup.micro_batch_size}, {seconds:.3g} s a step, {tokens:.0f} tok/s/GPU, {_need(variation.plan)}"
    )


def _set(variation: Variation) -> str:
    return " ".join(f"--set {key}" for key in variation.keys)


def memory_lines(result: SearchResult) -> list[str]:
    """Return what the words next to the memory of a plan mean, if there are any."""
    lines = []
    if any(plan.price.fit == "tight" for plan in result.plans):
        lines.append("tight: it fits, but by less than the error of the estimate")
    if result.doubtful:
        first = result.doubtful[0]
        lines.append(
            "doubtful: it needs more than the GPU has, by less than the error of the estimate, and is not ranked: "
            f"{first.setup.topology} micro batch {first.setup.micro_batch_size}, {_need(first)}; try ten steps of it"
        )
    return lines


def _need(plan: Plan) -> str:
    return f"{plan.price.need_gib:.0f} GiB"


def out_of_memory_hint(setup: Setup) -> str:
    """Return what would save memory where no plan fits, as keys; `bsl train` has only some of it."""
    technique, framework = setup.technique, setup.framework
    helps = ["training.activation_checkpointing=true"] if technique.recomputation != "full" else []
    if framework in ("torchtitan", "fsdp") and technique.zero_stage < 3:
        helps.append("parallelism.zero_stage=3")
    elif technique.zero_stage == 0:
        helps.append("parallelism.zero_stage=1")
    if framework not in ("bsl", "deepspeed"):
        helps += ["parallelism.sequence_parallel=true"] if not technique.sequence_parallel else []
        helps.append(f"parallelism.context_parallel_size={2 * setup.topology['cp']}")
    return f"--rejected shows the rules; these save memory: {', '.join(('more nodes', *helps))}"


def best_line(plan: Plan) -> str:
    """Return a line with the layout and the total cost of the best plan."""
    setup = plan.setup
    checkpoint = format_bytes(checkpoint_bytes(setup.shape, setup.topology.tp))
    return (
        f"the best, cut by {setup.partition_method}, takes {plan.days:.1f} days and {plan.gpu_hours:,.0f} GPU-hours "
        f"for {format_count(plan.num_tokens)} tokens; each checkpoint takes {checkpoint}"
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
    """Return how many setups fit, are in doubt, run out of memory, or are refused."""
    refused = sum(entry.count for entry in result.refused)
    doubtful = f"{len(result.doubtful)} are doubtful, " if result.doubtful else ""
    return (
        f"{len(result.plans)} plans fit, {doubtful}{len(result.out_of_memory)} run out of memory, "
        f"{refused} are refused by {_several(len(result.refused), 'rule')}"
    )


def refused_cells(result: SearchResult) -> list[tuple[str, ...]]:
    """Return for each rule how many setups it refused, what it requires, its source, and one example."""
    rows: list[tuple[str, ...]] = [
        (entry.rule.name, str(entry.count), entry.rule.asks, entry.rule.source, entry.example)
        for entry in sorted(result.refused, key=lambda entry: -entry.count)
    ]
    if result.out_of_memory:
        first = result.out_of_memory[0]
        example = f"{first.setup.topology} micro batch {first.setup.micro_batch_size}: {_need(first)} needed"
        rows.append(("memory", str(len(result.out_of_memory)), "the needed memory fits the GPU", "predicted", example))
    return rows


def plan_document(plan: Plan, calibration: Calibration) -> dict[str, Any]:
    """Return a plan for JSON: sizes in GiB, times in seconds, shares from 0 to 1."""
    setup, price = plan.setup, plan.price
    tflops = tflops_of(setup, price.seconds)
    throughput = throughput_of(setup, price.seconds, calibration.gpu)
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
        "tokens_per_second_per_gpu": throughput.tokens_per_second,
        "mfu": throughput.mfu,
        "model_tflops": throughput.model_tflops,
        "hardware_tflops": throughput.hardware_tflops,
        "tflops": {"full": tflops.full, "weights": tflops.weights},
        "memory_gib": {
            "first": price.first_stage.predicted_gib,
            "middle": middle.predicted_gib,
            "last": price.last_stage.predicted_gib,
            "need": price.need_gib,
            "gpu": calibration.gpu.memory_gib,
        },
        "fit": price.fit,
        "out_of_memory": price.is_out_of_memory,
        "bubble": price.bubble,
        "terms": dict(zip(TERM_NAMES, price.terms, strict=True)),
        "days": plan.days,
        "likely_days": plan.likely_days,
        "gpu_hours": plan.gpu_hours,
        "checkpoint_bytes": checkpoint_bytes(setup.shape, setup.topology.tp),
        "advice": list(advise(setup)),
    }


def answer_document(answer: Answer, top: int) -> dict[str, Any]:
    """Return the whole answer for JSON."""
    request, result, calibration = answer.request, answer.result, answer.request.calibration
    document = {"schema_version": SCHEMA_VERSION, **request_document(request, calibration)}
    if result is None or calibration is None:
        return {**document, "plans": None}
    configured = answer.configured
    return {
        **document,
        "calibration": calibration_document(calibration, request.configured),
        "configured": plan_document(configured, calibration) if configured else None,
        "rank_of_configured": rank_of(result, configured.setup) if configured else None,
        "num_plans": len(result.plans),
        "plans": [plan_document(plan, calibration) for plan in result.plans[:top]],
        "variation": _variation_document(answer.variation, calibration),
        "num_doubtful": len(result.doubtful),
        "doubtful": [plan_document(plan, calibration) for plan in result.doubtful[:top]],
        "num_out_of_memory": len(result.out_of_memory),
        "out_of_memory": [plan_document(plan, calibration) for plan in result.out_of_memory[:top]],
        "refused": [
            {"rule": entry.rule.name, "count": entry.count, "example": entry.example, "source": entry.rule.source}
            for entry in result.refused
        ],
    }


def _variation_document(variation: Variation | None, calibration: Calibration) -> dict[str, Any] | None:
    return {"set": list(variation.keys), **plan_document(variation.plan, calibration)} if variation else None


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
        "program_needed": request.program_needed,
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
            "state_bytes_per_rank": _state(stage.num_parameters, counts[stage.stage], setup).total,
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
