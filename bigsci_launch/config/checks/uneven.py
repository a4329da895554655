"""What `parallelism.engine: uneven` asks of a run file: it says in one error what that engine cannot do yet."""

from __future__ import annotations

from collections.abc import Iterator

from bigsci_launch.config.finding import DP, Finding
from bigsci_launch.config.rules.described import DescribedLayout
from bigsci_launch.config.schema.run import RunConfig
from bigsci_launch.config.site import Site
from bigsci_launch.errors import ConfigError
from bigsci_launch.topology import Topology

ENGINE = "parallelism.engine"
FAULTS = ("hang", "die", "slow")
"""Those that stand in front of a step; the others change what DeepSpeed does."""


def unsupported(config: RunConfig) -> dict[str, str]:
    """Return the keys of a run that the uneven engine does not support, each with what to set it to."""
    parallelism, training = config.parallelism, config.training
    wanted = {
        "parallelism.context_parallel_size": (parallelism.context_parallel_size == 1, "1"),
        "parallelism.expert_parallel_size": (parallelism.expert_parallel_size == 1, "1"),
        "parallelism.sequence_parallel": (not parallelism.sequence_parallel, "false"),
        "parallelism.zero_stage": (parallelism.zero_stage in (0, 1), "0 or 1"),
        "parallelism.overlap": (not parallelism.overlap, "nothing"),
        "parallelism.partition_method": (
            parallelism.partition_method == "type:transformer|embedding",
            "nothing, since stages are cut by price",
        ),
        "slurm.spare_nodes": (config.slurm.spare_nodes == 0, "0, since all nodes are used from the start"),
        "training.micro_batch_size": (training.micro_batch_size != "auto", "a number of samples"),
        "training.rampup": (training.rampup is None, "nothing"),
        "training.precision": (training.precision in ("fp32", "bf16"), "fp32 or bf16"),
        "training.compile": (not training.compile, "false"),
        "checkpoint.background": (not config.checkpoint.background, "false"),
        "monitor.eval_interval": (config.monitor.eval_interval is None, "nothing"),
        "monitor.watch": (config.monitor.watch == "off", "off, since a watcher would take all ranks for replicas"),
        "faults": (all(each.kind in FAULTS for each in config.faults), f"no other kinds than {', '.join(FAULTS)}"),
    }
    return {key: remedy for key, (is_supported, remedy) in wanted.items() if not is_supported}


def unsupported_text(found: dict[str, str]) -> str:
    """Return what must change, in one sentence."""
    return f"uneven does not support these yet; set {'; '.join(f'{key} to {remedy}' for key, remedy in found.items())}"


def check_uneven(config: RunConfig, site: Site) -> Iterator[Finding]:
    """The uneven engine trains pipelines of different depths; it cannot do everything that DeepSpeed's can."""
    if config.parallelism.engine == "deepspeed":
        return
    if not config.run.starts_trainer:
        yield Finding("uneven", "error", (ENGINE, "run.command"), "uneven, but run.command starts another program")
        return
    found = unsupported(config)
    # `bsl submit` writes the number of ranks.
    if config.parallelism.data_parallel_size not in (None, DescribedLayout.of_run(config, site).topology.dp):
        found = {**found, DP: "nothing, since all ranks are used"}
    if found:
        yield Finding("uneven", "error", (ENGINE, *found), unsupported_text(found))
    yield from _check_sizes(config)
    yield from _check_failures(config, DescribedLayout.of_run(config, site).topology)


def _check_sizes(config: RunConfig) -> Iterator[Finding]:
    """Every number of stages from n0 on can form pipelines of n0 to 2 n0 - 1 stages."""
    key, fewest = "parallelism.pipeline_parallel_size", config.parallelism.pipeline_parallel_size
    layers, training = config.model.num_layers, config.training
    if 2 * fewest - 1 > layers:
        text = (
            f"pipelines have {fewest} to {2 * fewest - 1} stages, so that every number of ranks can be used, but there "
            f"are {layers} layers; the most is {(layers + 1) // 2}"
        )
        yield Finding("uneven", "error", (key, "model.num_layers"), text)
    if training.micro_batch_size != "auto" and training.global_batch_size % training.micro_batch_size:
        size = training.micro_batch_size
        text = f"{training.global_batch_size} samples are not a multiple of micro batches of {size}"
        yield Finding("uneven", "error", ("training.global_batch_size", "training.micro_batch_size"), text)


def _check_failures(config: RunConfig, topology: Topology) -> Iterator[Finding]:
    """f + 1 pipelines of n0 stages need so many ranks; each stage has tp."""
    key, fewest = "parallelism.pipeline_parallel_size", config.parallelism.pipeline_parallel_size
    if config.survive is not None and (config.survive.failures + 1) * fewest > topology.dp:
        count = topology.dp // fewest
        text = (
            f"{topology.world_size} ranks form at most {count} pipelines, so f = {max(0, count - 1)} is what the run "
            "begins with"
        )
        yield Finding("uneven", "warning", ("survive.failures", key), text)


def require_supported(config: RunConfig) -> None:
    """Raise ConfigError for a run that the uneven engine cannot train."""
    if found := unsupported(config):
        raise ConfigError(f"{ENGINE}: {unsupported_text(found)}", hint="or leave out parallelism.engine")
