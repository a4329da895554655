"""Rules on how a program computes: what only other programs than `bsl train` can do, and values that exclude others."""

from __future__ import annotations

from collections.abc import Iterator

from bigsci_launch.config.finding import Finding
from bigsci_launch.config.schema.run import ParallelismSection, RunConfig
from bigsci_launch.config.site import Site

ANOTHER_PROGRAM = "set run.command and run.framework to a program that does"


_OF_PROGRAMS = ("kernels", "loss", "gradients", "optimizer_bytes")
"""Keys of `training` that describe another program."""


def foreign_keys(config: RunConfig) -> list[str]:
    """Return the keys of a run that ask for what `bsl train` cannot do, in the order of the run file."""
    training, model = config.training, config.model
    parallelism = [
        name
        for name in ("expert_shards", "shard_group_size", "schedule", "chunks_per_rank")
        if getattr(config.parallelism, name)
        != ParallelismSection.model_fields[name].get_default(call_default_factory=True)
    ]
    found = {
        "model.head_size": model.head_size not in (None, model.hidden_size // model.num_attention_heads),
        "model.experts": model.experts is not None,
        "training.attention": training.attention != "fused",
        **{f"training.{key}": True for key in _OF_PROGRAMS if getattr(training, key) is not None},
        "training.activation_checkpointing": not (
            isinstance(training.activation_checkpointing, bool) or training.activation_checkpointing == "selective"
        ),
        "parallelism.zero_stage": config.parallelism.zero_stage != 1 and config.parallelism.engine == "deepspeed",
        **{f"parallelism.{name}": True for name in parallelism},
        "parallelism.overlap": not {*(config.parallelism.overlap or ())} <= {"data"},
    }
    return [key for key, is_foreign in found.items() if is_foreign]


def check_technique(config: RunConfig, _site: Site) -> Iterator[Finding]:
    """`bsl train` trains dense models with ZeRO-1 and 1F1B; `bsl plan` prices more than that."""
    for key in foreign_keys(config) if config.run.starts_trainer else ():
        text = f"bsl train cannot do this; {ANOTHER_PROGRAM}, or leave it out"
        yield Finding("technique", "error", (key, "run.command"), text)


def check_overlap(config: RunConfig, _site: Site) -> Iterator[Finding]:
    """`bsl train` overlaps the reduction of gradients that are sent in 16 bits, by micro-batches of one size."""
    if not config.run.starts_trainer or "data" not in (config.parallelism.overlap or ()):
        return
    key, training = "parallelism.overlap", config.training
    if training.micro_batch_size == "auto":
        text = "[data], but a rank that runs out of memory cannot take back what it has sent; set a number of samples"
        yield Finding("overlap", "error", (key, "training.micro_batch_size"), text)
    if training.weight_format != "bf16":
        text = f"[data], but {training.precision} is reduced by an optimizer that does not overlap; use bf16 or fp8"
        yield Finding("overlap", "error", (key, "training.precision"), text)


def check_framework(config: RunConfig, _site: Site) -> Iterator[Finding]:
    """`run.framework` describes the program that is started."""
    framework = config.run.framework
    if framework == "bsl" and not config.run.starts_trainer:
        text = "bsl, but run.command starts another program"
        yield Finding("framework", "error", ("run.framework", "run.command"), text)
