"""What a rehearsal changes in a run file, each change with its reason. Pure.

The changes are overrides, as a user could give them with `--set`: all checks of a run file hold for the rehearsal too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from bigsci_launch.config.finding import DP, PP
from bigsci_launch.config.micro_batches import assumed_size
from bigsci_launch.config.schema.run import ParallelismSection, RunConfig
from bigsci_launch.topology import AXES, Topology
from bigsci_launch.units import format_slurm_duration, parse_slurm_duration

NODES = 2
MOST_LOCAL_REPLICAS = 2
MICRO_BATCHES_PER_STAGE = 2
"""Micro batches on each replica, for each stage: the pipeline fills, and no step takes long."""
SAVE_INTERVAL = 8
EVAL_INTERVAL = 4
EVAL_BATCHES = 2
STEPS = 500
"""More than a rehearsal makes: each attempt ends because it is killed or asked to stop."""
TIME_LIMIT_S = 1800
NAME_PREFIX, LONGEST_NAME = "rehearse-", 100
SAVING_OPTIONS = ("--save", "--save-dir", "--save_dir", "--output-dir", "--output_dir", "--checkpoint-dir")


@dataclass(frozen=True, slots=True)
class ConfigChange:
    """A key of the run file with another value in the rehearsal, and why."""

    key: str
    before: Any
    after: Any
    reason: str

    @property
    def override(self) -> str:
        """The change as an argument of `--set`."""
        return f"{self.key}={json.dumps(self.after)}"

    @property
    def line(self) -> str:
        return f"{self.key}: {_shown(self.before)} -> {_shown(self.after)}   ({self.reason})"


@dataclass(frozen=True, slots=True)
class Original:
    """The run to be rehearsed: its resolved config, where it runs, and the layers on each of its stages.

    `layers` is empty for a program whose layers are not known.
    """

    config: RunConfig
    ranks_per_node: int
    is_local_site: bool
    layers: tuple[int, ...]

    @property
    def num_replicas(self) -> int:
        return self.config.parallelism.data_parallel_size or 1

    @property
    def micro_batch_size(self) -> int:
        """Samples of a micro batch; what is expected if `bsl train` finds it."""
        parallelism = self.config.parallelism
        axes = (parallelism.tensor_parallel_size, parallelism.pipeline_parallel_size, self.num_replicas)
        return assumed_size(self.config.training, Topology(*axes))

    @property
    def num_micro_batches(self) -> int:
        """Micro batches of a step on one replica, after the ramp."""
        training = self.config.training
        return max(1, training.global_batch_size // (self.micro_batch_size * self.num_replicas))


@dataclass(frozen=True, slots=True)
class RehearsalSizes:
    """Nodes, stages and replicas of a rehearsal."""

    nodes: int
    pp: int
    dp: int


def find_changes(original: Original, *, root: str, fewer_layers: int = 0) -> tuple[ConfigChange, ...]:
    """Return what a rehearsal with its run directory below `root` changes; keys that keep their value are left out.

    With `fewer_layers`, each stage holds that many layers less than in the run, at least one.
    """
    sizes = choose_sizes(original)
    parts = (
        _place(original.config, root),
        _nodes(original, sizes),
        _stages(original, sizes, fewer_layers),
        _batches(original, sizes),
        _length(original.config),
        _evaluation(original.config),
        _checkpoints(original.config),
    )
    return tuple(change for part in parts for change in part if change.before != change.after)


def choose_sizes(original: Original) -> RehearsalSizes:
    """Return the sizes of the rehearsal.

    Groups of tensor, context and expert parallelism keep their size, on as many nodes as one of them needs, at least
    two. The pipeline is shortened only if it does not fit, or if there would be a single replica of a run with
    several: most hangs of large runs are between replicas or between stages, so each of these axes is kept where
    both fit.
    """
    config, dp = original.config, original.num_replicas
    pp, nodes = config.parallelism.pipeline_parallel_size, config.slurm.nodes
    if original.is_local_site:
        return RehearsalSizes(nodes, pp, min(dp, MOST_LOCAL_REPLICAS))
    group = inner_size(config.parallelism)
    few = next(n for n in range(min(NODES, nodes), nodes + 1) if n * original.ranks_per_node % group == 0)
    ranks = few * original.ranks_per_node // group
    fitting = [stages for stages in range(1, min(pp, ranks) + 1) if ranks % stages == 0]

    def worth(stages: int) -> tuple[int, int]:
        keeps_pipeline, keeps_replicas = stages > 1 or pp == 1, ranks // stages > 1 or dp == 1
        return (2 * keeps_pipeline + keeps_replicas, stages)

    stages = max(fitting, key=worth)
    return RehearsalSizes(few, stages, ranks // stages)


def inner_size(parallelism: ParallelismSection) -> int:
    """Return the ranks of one stage of one replica: tp x cp x ep."""
    inner = [getattr(parallelism, axis.key) for axis in AXES if axis.name not in ("dp", "pp")]
    return math.prod(size or 1 for size in inner)


def lost_axes(before: RunConfig, after: RunConfig) -> list[str]:
    """Return the axes of the run that its rehearsal does not have, one sentence each."""
    return [
        f"{axis.name} {old} -> 1: nothing between {what} was exercised"
        for axis, what in ((axis, _BETWEEN.get(axis.name, f"ranks of {axis.name}")) for axis in AXES)
        if (old := getattr(before.parallelism, axis.key) or 1) > 1 == (getattr(after.parallelism, axis.key) or 1)
    ]


_BETWEEN = {"dp": "replicas", "pp": "pipeline stages"}


def saved_elsewhere(command: Sequence[str], directory: str) -> list[str]:
    """Return the options of a program that save outside `directory`: `--save /big/run`. The rehearsal would too."""
    words = [word for part in command for word in part.split()]
    pairs = [(word, words[at + 1] if at + 1 < len(words) else "") for at, word in enumerate(words)]
    given = [
        (word.partition("=")[0], word.partition("=")[2]) if "=" in word else (word, value) for word, value in pairs
    ]
    inside = (directory, "$BSL_RUN_DIR", "${BSL_RUN_DIR")
    return [f"{name} {value}" for name, value in given if name in SAVING_OPTIONS and not value.startswith(inside)]


def slower_by(original: Original, rehearsed: RunConfig) -> float:
    """Return how many times longer a step of the run takes, from the micro batches that pass its stages."""
    small = Original(rehearsed, original.ranks_per_node, original.is_local_site, ())
    return _ticks(original) / _ticks(small)


def _ticks(original: Original) -> int:
    return original.num_micro_batches + original.config.parallelism.pipeline_parallel_size - 1


def _place(config: RunConfig, root: str) -> Iterator[ConfigChange]:
    name = f"{NAME_PREFIX}{config.run.name}"[:LONGEST_NAME]
    yield ConfigChange("run.name", config.run.name, name, "its jobs differ by name from those of the run")
    yield ConfigChange("run.root", config.run.root, root, "the checkpoints of the run are not touched")


def _nodes(original: Original, sizes: RehearsalSizes) -> Iterator[ConfigChange]:
    if original.is_local_site:
        return
    slurm = original.config.slurm
    yield ConfigChange("slurm.nodes", slurm.nodes, sizes.nodes, "a rehearsal takes few nodes")
    if slurm.nodelist and sizes.nodes != slurm.nodes:
        yield ConfigChange("slurm.nodelist", slurm.nodelist, None, "it names the nodes of the whole run")
    yield ConfigChange("slurm.requeue", slurm.requeue, False, "an attempt that is killed must end")
    yield ConfigChange("slurm.chain", slurm.chain and slurm.chain.by, None, "an attempt that is killed must end")
    yield ConfigChange("slurm.dependency", slurm.dependency, None, "a rehearsal waits for no other job")
    limit_s = parse_slurm_duration(slurm.time_limit) if slurm.time_limit else None
    short = format_slurm_duration(min(TIME_LIMIT_S, limit_s or TIME_LIMIT_S))
    yield ConfigChange("slurm.time_limit", slurm.time_limit, short, "a short job starts earlier")
    margin = original.config.monitor.exit_margin_s
    if margin is not None and margin >= parse_slurm_duration(short):
        yield ConfigChange("monitor.exit_margin_s", margin, None, f"it is longer than {short}")


def _stages(original: Original, sizes: RehearsalSizes, fewer: int) -> Iterator[ConfigChange]:
    config, layers = original.config, original.layers
    parallelism = config.parallelism
    pp, method = parallelism.pipeline_parallel_size, parallelism.partition_method
    fit = f"what fits on {sizes.nodes} nodes" if not original.is_local_site else "two replicas behave like more"
    yield ConfigChange(PP, pp, sizes.pp, fit)
    yield ConfigChange(DP, parallelism.data_parallel_size, sizes.dp, fit)
    if not layers or (pp == sizes.pp and not fewer):
        return
    kept = [max(1, count - fewer) for count in (*layers[: sizes.pp - 1], layers[-1])]
    why = "a stage holds as many layers as before"
    if fewer:
        why = f"with fewer replicas, a rank holds more of the optimizer's state: {fewer} layers less fit on a stage"
    yield ConfigChange("model.num_layers", config.model.num_layers, sum(kept), why)
    yield ConfigChange(
        "model.declared_parameters", config.model.declared_parameters, None, "the model has fewer layers"
    )
    name, _, counts = method.partition(":")
    if name in ("time", "memory") and counts:
        cut = f"{name}:{','.join(str(count) for count in kept)}"
        yield ConfigChange("parallelism.partition_method", method, cut, "the layers of the stages that are left")


def _batches(original: Original, sizes: RehearsalSizes) -> Iterator[ConfigChange]:
    training = original.config.training
    unit = original.micro_batch_size * sizes.dp
    few = min(original.num_micro_batches, MICRO_BATCHES_PER_STAGE * sizes.pp)
    if training.rampup is not None:
        few = max(2, few)
    yield ConfigChange(
        "training.global_batch_size",
        training.global_batch_size,
        unit * few,
        f"{few} micro batches for each replica: enough to fill the pipeline, and steps stay short",
    )
    if training.rampup is not None:
        before = training.rampup.model_dump()
        start = unit * (few - 1)
        after = {"start": start, "increment": unit, "samples": 2 * start}
        yield ConfigChange("training.rampup", before, after, "the batch grows once, after two steps")


def _length(config: RunConfig) -> Iterator[ConfigChange]:
    training, optimizer = config.training, config.optimizer
    yield ConfigChange("training.steps", training.steps, STEPS, "more than it runs: each attempt is ended on purpose")
    yield ConfigChange("training.stop_after_steps", training.stop_after_steps, None, "each attempt is ended on purpose")
    decay = optimizer.decay_steps or training.steps
    yield ConfigChange("optimizer.decay_steps", optimizer.decay_steps, decay, "the learning rate is that of the run")
    dumps = config.monitor.dump_weights_steps
    yield ConfigChange("monitor.dump_weights_steps", dumps, [], "no dumps are needed")


def _evaluation(config: RunConfig) -> Iterator[ConfigChange]:
    monitor = config.monitor
    if monitor.eval_interval is None:
        return
    yield ConfigChange("monitor.eval_interval", monitor.eval_interval, EVAL_INTERVAL, "one evaluation before the save")
    few = min(monitor.eval_batches, EVAL_BATCHES)
    yield ConfigChange("monitor.eval_batches", monitor.eval_batches, few, "a short one")


def _checkpoints(config: RunConfig) -> Iterator[ConfigChange]:
    checkpoint = config.checkpoint
    yield ConfigChange("checkpoint.save_interval", checkpoint.save_interval, SAVE_INTERVAL, "one save before the kill")
    yield ConfigChange("checkpoint.keep_last", checkpoint.keep_last, 1, "they are deleted at the end anyway")
    yield ConfigChange("checkpoint.load", checkpoint.load, "auto", "it starts at step 0 and resumes from its own")


def _shown(value: Any) -> str:
    return "none" if value is None else value if isinstance(value, str) else json.dumps(value)
