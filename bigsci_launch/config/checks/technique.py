"""Rules on how a program computes: what only other programs than `bsl train` can do, and values that exclude others."""

from __future__ import annotations

from collections.abc import Iterator

from bigsci_launch.config.finding import Finding
from bigsci_launch.config.schema.run import ParallelismSection, RunConfig
from bigsci_launch.config.site import Site

ANOTHER_PROGRAM = "set run.command and run.framework to a program that does"


def foreign_keys(config: RunConfig) -> list[str]:
    """Return the keys of a run that ask for what `bsl train` cannot do, in the order of the run file."""
    training, model = config.training, config.model
    parallelism = [
        name
        for name in ("sequence_parallel", "expert_shards", "shard_group_size", "schedule", "chunks_per_rank", "overlap")
        if getattr(config.parallelism, name)
        != ParallelismSection.model_fields[name].get_default(call_default_factory=True)
    ]
    found = {
        "model.head_size": model.head_size not in (None, model.hidden_size // model.num_attention_heads),
        "model.experts": model.experts is not None,
        "training.precision": training.precision == "fp8",
        "training.attention": training.attention == "unfused",
        "training.activation_checkpointing": not isinstance(training.activation_checkpointing, bool),
        "parallelism.zero_stage": config.parallelism.zero_stage != 1,
        **{f"parallelism.{name}": True for name in parallelism},
    }
    return [key for key, is_foreign in found.items() if is_foreign]


def check_technique(config: RunConfig, _site: Site) -> Iterator[Finding]:
    """`bsl train` trains dense models with ZeRO-1 and 1F1B; `bsl plan` prices more than that."""
    for key in foreign_keys(config) if config.run.starts_trainer else ():
        text = f"bsl train cannot do this; {ANOTHER_PROGRAM}, or leave it out"
        yield Finding("technique", "error", (key, "run.command"), text)


def check_framework(config: RunConfig, _site: Site) -> Iterator[Finding]:
    """`run.framework` describes the program that is started."""
    framework = config.run.framework
    if framework == "bsl" and not config.run.starts_trainer:
        text = "bsl, but run.command starts another program"
        yield Finding("framework", "error", ("run.framework", "run.command"), text)
