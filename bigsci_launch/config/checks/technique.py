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


def check_experts(config: RunConfig, _site: Site) -> Iterator[Finding]:
    """Tokens visit experts that exist, and experts spread evenly over ranks."""
    experts, shards = config.model.experts, config.parallelism.expert_shards
    key = "parallelism.expert_shards"
    if experts is None:
        if shards > 1:
            yield Finding("experts", "error", (key, "model.experts"), "there are no experts to spread")
        return
    if experts.per_token > experts.count:
        text = f"{experts.per_token} is more than the {experts.count} experts"
        yield Finding("experts", "error", ("model.experts.per_token", "model.experts.count"), text)
    if experts.count % shards:
        text = f"{experts.count} experts are not a multiple of {shards} ranks"
        yield Finding("experts", "error", (key, "model.experts.count"), text)
    if experts.dense_layers >= config.model.num_layers:
        text = f"{experts.dense_layers} dense layers of {config.model.num_layers} leave none with experts"
        yield Finding("experts", "error", ("model.experts.dense_layers", "model.num_layers"), text)


def check_schedule(config: RunConfig, _site: Site) -> Iterator[Finding]:
    """Chunks of layers and the schedule belong together, and ZeRO beyond stage 1 excludes DeepSpeed's pipeline."""
    parallelism, key = config.parallelism, "parallelism.chunks_per_rank"
    chunks, pp, layers = parallelism.chunks_per_rank, parallelism.pipeline_parallel_size, config.model.num_layers
    if (parallelism.schedule == "interleaved") != (chunks > 1):
        text = f"{chunks} with {parallelism.schedule}: more than 1 chunk is `interleaved`, and only that"
        yield Finding("schedule", "error", (key, "parallelism.schedule"), text)
    elif chunks > 1 and (pp == 1 or layers < pp * chunks):
        text = f"{layers} layers on {pp} stages cannot be cut into {chunks} chunks each"
        yield Finding("schedule", "error", (key, "parallelism.pipeline_parallel_size"), text)
    if config.run.framework == "deepspeed" and pp > 1 and parallelism.zero_stage > 1:
        text = f"DeepSpeed's pipeline does not work with ZeRO stage {parallelism.zero_stage}"
        yield Finding("schedule", "error", ("parallelism.zero_stage", "parallelism.pipeline_parallel_size"), text)


def check_shard_group(config: RunConfig, site: Site) -> Iterator[Finding]:
    """The ranks that share one copy of the state divide the data-parallel ranks."""
    size = config.parallelism.shard_group_size
    try:
        dp = site.layout(config).topology.dp
    except ValueError:
        return
    if size is not None and dp % size:
        key = "parallelism.shard_group_size"
        yield Finding(
            "shard_group", "error", (key, "parallelism.data_parallel_size"), f"{size} does not divide dp {dp}"
        )
