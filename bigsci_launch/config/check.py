"""Rules across sections. Each is a small pure function whose findings name the keys that do not fit together.

`check_run` runs all of them. Those of the layout are in `rules`, for `plan` too. Rules that need a model of time or
memory, or the pipeline partitioner, are in `plan`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import suppress

from bigsci_launch.config.checks.command import check_launcher, check_unexpanded
from bigsci_launch.config.checks.exports import check_metrics
from bigsci_launch.config.checks.node import (
    check_container,
    check_segment,
    check_spare_nodes,
    check_stop_signal,
    check_survive,
)
from bigsci_launch.config.checks.notify import check_notify
from bigsci_launch.config.checks.tasks import check_ranks_per_task
from bigsci_launch.config.checks.technique import (
    check_framework,
    check_overlap,
    check_technique,
)
from bigsci_launch.config.checks.uneven import check_uneven
from bigsci_launch.config.finding import DP, PP, Finding, worst_first
from bigsci_launch.config.masking import SECRET
from bigsci_launch.config.problems import closest
from bigsci_launch.config.rules.described import check_layout
from bigsci_launch.config.rules.own_cut import parse_layer_counts
from bigsci_launch.config.schema.run import ModelSection, RunConfig
from bigsci_launch.config.schema.section import NotDescribed
from bigsci_launch.config.site import Site
from bigsci_launch.topology import AXES, Axis
from bigsci_launch.units import format_slurm_duration, parse_slurm_duration

# The launcher sets these for every rank; a run file that overrides one would send ranks to the wrong place.
LAUNCHER_VARIABLES = re.compile(
    r"RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|NODE_RANK|MASTER_ADDR|MASTER_PORT|BSL_RUN_DIR|BSL_ATTEMPT|"
    r"BSL_GENERATION|BSL_SLOT_FD|BSL_CONTROLLER|BSL_CONTROLLER_TOKEN|SLURM_.*"
)

Check = Callable[[RunConfig, Site], Iterator[Finding]]

TRAINER_AXES = ("tp", "pp", "dp")
"""The axes that `bsl train` supports and `bsl plan` prices."""
TRAINER_KNOWS = "bsl train supports tensor, pipeline and data parallelism only"


def check_run(config: RunConfig, site: Site) -> list[Finding]:
    """Return the findings of every rule for `config` on `site`, errors first. A rule about a section that the run file
    leaves out finds nothing."""
    found: list[Finding] = []
    for check in CHECKS:
        with suppress(NotDescribed):
            found += check(config, site)
    return worst_first(found)


def error(rule: str, keys: tuple[str, ...], text: str) -> Finding:
    """Return a finding that stops the run. `rule` is the name of the rule's function without `check_`."""
    return Finding(rule, "error", keys, text)


def warning(rule: str, keys: tuple[str, ...], text: str) -> Finding:
    """Return a finding that the user should know about but may ignore."""
    return Finding(rule, "warning", keys, text)


def check_axes(config: RunConfig, site: Site) -> Iterator[Finding]:
    """`bsl train` splits a model over three axes; other programs may use more."""
    for axis in foreign_axes(config) if config.run.starts_trainer else ():
        key = f"parallelism.{axis.key}"
        text = f"{TRAINER_KNOWS}; set {key} to 1, or start your own program with run.command"
        yield error("axes", (key, "run.command"), text)


def check_trace(config: RunConfig, _site: Site) -> Iterator[Finding]:
    """The import hook of the ring also traces calls."""
    if config.monitor.trace is not None and config.monitor.ring == "none":
        text = "without a ring, no calls are traced; set monitor.ring to auto, or leave out monitor.trace"
        yield error("trace", ("monitor.trace", "monitor.ring"), text)


def foreign_axes(config: RunConfig) -> list[Axis]:
    """Return the axes of a run that `bsl train` does not support."""
    return [axis for axis in AXES if axis.name not in TRAINER_AXES and getattr(config.parallelism, axis.key) > 1]


def check_partition_method(config: RunConfig, site: Site) -> Iterator[Finding]:
    """The partition method is DeepSpeed's or a cut by price, and its pattern or counts are valid."""
    key, method = "parallelism.partition_method", config.parallelism.partition_method
    name, _, pattern = method.partition(":")
    if name in ("time", "memory") and ":" in method:
        yield from _check_counts(config, pattern)
        return
    known = ("uniform", "parameters", "time", "memory")
    if method not in known and not (name == "type" and pattern):
        meant = closest(method, known)
        ending = f"; did you mean {meant}?" if meant else ""
        text = f"{method!r} is not uniform, parameters, type:REGEX, time or memory{ending}"
        yield error("partition_method", (key,), text)
        return
    try:
        re.compile(pattern)
    except re.error as problem:
        yield error("partition_method", (key,), f"{pattern!r} is not a valid regular expression: {problem}")
        return
    if name == "type" and config.run.starts_trainer:
        yield from _check_pattern_matches(config, method.split(":")[1])


def layer_names(model: ModelSection) -> tuple[str, ...]:
    """Return the class names of `bsl train`'s pipeline layers in order, without repetitions."""
    return (
        "VocabularyEmbedding",
        *(["LearnedPositions"] if model.positions == "learned" else []),
        *(["InputNorm"] if model.embedding_norm else []),
        "TransformerLayer",
        "FinalNorm",
        *([] if model.tied_embeddings else ["OutputEmbedding"]),
    )


def _check_pattern_matches(config: RunConfig, pattern: str) -> Iterator[Finding]:
    """`type:REGEX` matches a layer. Otherwise DeepSpeed would cut by weights that are all zero."""
    names = layer_names(config.model)
    if not any(re.search(pattern, name, re.IGNORECASE) for name in names):
        text = f"{pattern!r} matches no layer; the layers are {', '.join(names)}"
        yield error("partition_method", ("parallelism.partition_method",), text)


def _check_counts(config: RunConfig, counts: str) -> Iterator[Finding]:
    """`time:7,6,6,5`, the layers of every stage as `bsl submit` records them, fits the run."""
    key = "parallelism.partition_method"
    layers, pp = config.model.num_layers, config.parallelism.pipeline_parallel_size
    numbers = parse_layer_counts(config.parallelism.partition_method)
    if numbers is None:
        yield error("partition_method", (key,), f"{counts!r} is not a list of layers per stage, such as 7,6,6,5")
        return
    if (sum(numbers), len(numbers)) != (layers, pp):
        text = f"{counts!r} puts {sum(numbers)} layers on {len(numbers)} stages; the run has {layers} on {pp}"
        yield error("partition_method", (key, PP), text)


def check_vocabulary_padding(config: RunConfig, site: Site) -> Iterator[Finding]:
    """The padding of the vocabulary (to `vocab_size_multiple` x tp) is small compared with the vocabulary."""
    vocab, padded = config.model.vocab_size, config.padded_vocab_size
    if padded - vocab > vocab // 2:
        text = f"{config.model.vocab_size_multiple} x tp pads the vocabulary from {vocab} to {padded}"
        yield warning("vocabulary_padding", ("model.vocab_size_multiple", "model.vocab_size"), text)


def check_automatic_size(config: RunConfig, site: Site) -> Iterator[Finding]:
    """Only `bsl train` finds the size of micro-batches itself."""
    if config.training.micro_batch_size == "auto" and not config.run.starts_trainer:
        text = "auto is for bsl train; this run starts another program"
        yield error("automatic_size", ("training.micro_batch_size", "run.command"), text)


def check_rampup_range(config: RunConfig, site: Site) -> Iterator[Finding]:
    """The ramp rises in whole increments to the global batch size."""
    ramp, goal = config.training.rampup, config.training.global_batch_size
    if ramp is None:
        return
    start, increment = "training.rampup.start", "training.rampup.increment"
    if ramp.start > goal:
        yield error("rampup_range", (start, "training.global_batch_size"), f"{ramp.start} is above the goal {goal}")
    elif ramp.start == goal:
        text = f"no effect: the ramp starts at its goal {goal}"
        yield warning("rampup_range", (start, "training.global_batch_size"), text)
    elif (goal - ramp.start) % ramp.increment:
        text = (
            f"from {ramp.start} to {goal} is {goal - ramp.start} samples, which is not a multiple of {ramp.increment}"
        )
        yield error("rampup_range", (increment, "training.global_batch_size"), text)


def check_learning_rate(config: RunConfig, site: Site) -> Iterator[Finding]:
    """The learning rate decays to a lower value, and only after the warm-up."""
    optimizer = config.optimizer
    if optimizer.min_learning_rate > optimizer.learning_rate:
        text = f"{optimizer.min_learning_rate} is above the peak {optimizer.learning_rate}"
        yield error("learning_rate", ("optimizer.min_learning_rate", "optimizer.learning_rate"), text)
    decay_key = "optimizer.decay_steps" if optimizer.decay_steps else "training.steps"
    decay = optimizer.decay_steps or config.training.steps
    if optimizer.warmup_steps > decay:
        text = f"{optimizer.warmup_steps} is longer than the decay, which ends at step {decay}"
        yield error("learning_rate", ("optimizer.warmup_steps", decay_key), text)


def check_partition(config: RunConfig, site: Site) -> Iterator[Finding]:
    """The partition is one of the site's. If the site lists partitions without a default, the run names one."""
    partitions, name = site.config.partitions, config.slurm.partition
    if site.is_local or not partitions or name in partitions:
        return
    listed = ", ".join(partitions)
    if name is None:
        text = f"site {site.name} has no default partition: name one of {listed}"
    else:
        meant = closest(name, partitions)
        ending = f"did you mean {meant}?" if meant else f"it has {listed}"
        text = f"site {site.name} has no partition {name!r}; {ending}"
    yield error("partition", ("slurm.partition", "slurm.site"), text)


def check_time_limit(config: RunConfig, site: Site) -> Iterator[Finding]:
    """There is a time limit, and the partition allows it. A reservation or a quality of service may allow more."""
    if site.is_local:
        return
    partition = site.config.partitions.get(config.slurm.partition or "")
    limit = config.slurm.time_limit
    if limit is None:
        text = "no limit given: the partition's applies, and ranks are not asked to save before it"
        yield warning("time_limit", ("slurm.time_limit", "slurm.partition"), text)
    elif partition and partition.max_time and parse_slurm_duration(limit) > parse_slurm_duration(partition.max_time):
        text = f"{limit} is above the {partition.max_time} of partition {config.slurm.partition}"
        if other := _other_limits(config, site):
            yield warning("time_limit", ("slurm.time_limit", "slurm.partition"), f"{text}: {other} must allow it")
            return
        text = f"{text}; if a reservation or a QOS allows more, name it: slurm.reservation, slurm.qos"
        yield error("time_limit", ("slurm.time_limit", "slurm.partition"), text)


def _other_limits(config: RunConfig, site: Site) -> str:
    """Return which further limits the run asks for, in addition to its site's; an empty text if none."""
    named = (("reservation", "reservation"), ("qos", "QOS"))
    values = [(word, getattr(config.slurm, key), getattr(site.config, key)) for key, word in named]
    return " and ".join(f"{word} {value}" for word, value, usual in values if value not in (None, usual))


def check_exit_margin(config: RunConfig, site: Site) -> Iterator[Finding]:
    """The signal to save comes after the start of the job and leaves time for a step and a save."""
    monitor, limit = config.monitor, config.slurm.time_limit
    if limit is None or site.is_local:
        return
    key, limit_s = "monitor.exit_margin_s", parse_slurm_duration(limit)
    needed_s = monitor.step_time_s + monitor.save_time_s
    if monitor.exit_margin_s is None:
        if 2 * needed_s >= limit_s:
            text = f"two steps and two saves take {2 * needed_s:g} s, which uses up the whole limit of {limit}"
            yield warning("exit_margin", ("monitor.step_time_s", "slurm.time_limit"), text)
    elif monitor.exit_margin_s >= limit_s:
        text = f"{format_slurm_duration(monitor.exit_margin_s)} before the limit of {limit} is before the job starts"
        yield error("exit_margin", (key, "slurm.time_limit"), text)
    elif monitor.exit_margin_s < needed_s:
        text = f"{monitor.exit_margin_s} s is less than one step and one save take together ({needed_s:g} s)"
        yield warning("exit_margin", (key, "monitor.save_time_s"), text)


def check_faults(config: RunConfig, site: Site) -> Iterator[Finding]:
    """Injected faults hit a rank and a step that exist."""
    try:
        world_size = site.layout(config).topology.world_size
    except ValueError:
        return
    for index, fault in enumerate(config.faults):
        if fault.rank is not None and fault.rank >= world_size:
            text = f"rank {fault.rank} is outside the world of {world_size} ranks"
            yield error("faults", (f"faults.{index}.rank", DP), text)
        if fault.step > config.training.steps:
            text = f"no effect: step {fault.step} is after the last, {config.training.steps}"
            yield warning("faults", (f"faults.{index}.step", "training.steps"), text)
        if fault.kind != "slow" and "seconds" in fault.model_fields_set and fault.seconds != 1.0:
            yield warning("faults", (f"faults.{index}.seconds", f"faults.{index}.kind"), f"no effect on `{fault.kind}`")


def check_environment(config: RunConfig, site: Site) -> Iterator[Finding]:
    """The run file leaves the launcher's variables alone, and has the values themselves."""
    for name, variable in config.env.items():
        if LAUNCHER_VARIABLES.fullmatch(name):
            yield error("environment", (f"env.{name}",), "the launcher sets it for every rank; leave it out")
        if variable.value == SECRET:
            text = f"{SECRET} is a placeholder of `bsl config show`: write the value itself, or `from: environment`"
            yield error("environment", (f"env.{name}.value",), text)


def check_held_out(config: RunConfig, site: Site) -> Iterator[Finding]:
    """`bsl train` evaluates only on held-out samples, so an evaluation needs some."""
    if config.run.starts_trainer and config.monitor.eval_interval and not config.data.held_out:
        text = "no samples are held out, so there will be no evaluation"
        yield warning("held_out", ("monitor.eval_interval", "data.held_out"), text)


def check_steps_without_effect(config: RunConfig, site: Site) -> Iterator[Finding]:
    """Steps that the run file names are within the run."""
    steps, key = config.training.steps, "training.steps"
    save, stop = config.checkpoint.save_interval, config.training.stop_after_steps
    if save and save > steps:
        text = f"no effect: {save} is more than the {steps} steps of the run, which is saved at its end"
        yield warning("steps_without_effect", ("checkpoint.save_interval", key), text)
    if stop and stop >= steps:
        text = f"no effect: the run ends after {steps} steps anyway"
        yield warning("steps_without_effect", ("training.stop_after_steps", key), text)
    for index, step in enumerate(config.monitor.dump_weights_steps):
        if step > steps:
            text = f"no effect: step {step} is after the last, {steps}"
            yield warning("steps_without_effect", (f"monitor.dump_weights_steps.{index}", key), text)


def check_command_without_effect(config: RunConfig, site: Site) -> Iterator[Finding]:
    """Keys that only `bsl train` follows are not used with another program."""
    if config.run.starts_trainer:
        return
    for key in _keys_of_trainer(config):
        text = "no effect: only `bsl train` does this, and run.command starts another program"
        if key == "monitor.eval_interval":
            text = "no effect on the ranks: run.command starts another program; only `bsl plan check` uses it"
        yield warning("command_without_effect", (key, "run.command"), text)


def _keys_of_trainer(config: RunConfig) -> Iterator[str]:
    """Yield the keys that the run file sets and that only `bsl train` follows."""
    if config.faults:
        yield "faults"
    followed = {
        "guards": tuple(type(config.guards).model_fields),
        "checkpoint": ("keep_last", "load"),
        "monitor": ("dump_weights_steps", "eval_interval"),
        "training": ("stop_after_steps",),
        "data": ("held_out",),
        "survive": ("snapshot_steps",) if config.survive and config.survive.in_place else ("snapshot_steps", "standby"),
    }
    for section, names in followed.items():
        values = getattr(config, section)
        for name in names if values is not None else ():
            if getattr(values, name) != type(values).model_fields[name].default:
                yield f"{section}.{name}"


def check_local_without_effect(config: RunConfig, site: Site) -> Iterator[Finding]:
    """A local site has no scheduler, so Slurm's options have no effect."""
    if not site.is_local:
        return
    for name, field in type(config.slurm).model_fields.items():
        if name not in ("site", "ranks_per_task") and getattr(config.slurm, name) != field.default:
            text = f"no effect: site {site.name} starts ranks on this machine, without Slurm"
            yield warning("local_without_effect", (f"slurm.{name}", "slurm.site"), text)


CHECKS: tuple[Check, ...] = (
    check_layout,
    check_axes,
    check_uneven,
    check_technique,
    check_overlap,
    check_framework,
    check_launcher,
    check_ranks_per_task,
    check_unexpanded,
    check_trace,
    check_notify,
    check_metrics,
    check_segment,
    check_spare_nodes,
    check_survive,
    check_partition_method,
    check_vocabulary_padding,
    check_automatic_size,
    check_rampup_range,
    check_learning_rate,
    check_partition,
    check_time_limit,
    check_exit_margin,
    check_stop_signal,
    check_container,
    check_faults,
    check_environment,
    check_held_out,
    check_steps_without_effect,
    check_command_without_effect,
    check_local_without_effect,
)
