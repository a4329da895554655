"""What the columns of a measured row say of the model, the layout and the technique, and what empty cells mean.

A row that names its framework has the defaults of that framework today. A row without is one of Megatron-DeepSpeed in
2022, as all rows were before there was such a column: unfused attention, all activations recomputed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from bigsci_launch.config.schema.run import Activation, Norm, Positions
from bigsci_launch.config.schema.technique import (
    Attention,
    ExpertProducts,
    Framework,
    Hidden,
    Kernels,
    LossKernel,
    Precision,
    Schedule,
    ZeroStage,
)
from bigsci_launch.plan.calibrate.cells import Cells
from bigsci_launch.plan.shape.parameters import Experts, ModelShape
from bigsci_launch.plan.shape.setup import OPTIMIZER_BYTES, UNFUSED_2021, Technique, usual_overlap
from bigsci_launch.topology import Topology


def _words(choices: Any) -> dict[str, Any]:
    """Return the words of a `Literal`, which mean themselves."""
    return {str(word): word for word in get_args(choices)}


_FLAGS = {"0": False, "1": True}
_OVERLAP: dict[str, Hidden] = {"tp": "tensor", "dp": "data", "pp": "pipeline"}
# A squared ReLU has the matrices of GELU and keeps as much.
_ACTIVATIONS = {**_words(Activation), "relu2": "gelu"}
_PRECISIONS = {**_words(Precision), "mxfp8": "fp8"}


@dataclass(frozen=True, slots=True)
class Program:
    """What is assumed of the program that trained: `named` is the framework of the row, None if it has none."""

    named: Framework | None
    technique: Technique
    precision: Precision = "bf16"

    @property
    def framework(self) -> Framework:
        return self.named or "deepspeed"

    @property
    def is_deepspeed(self) -> bool:
        """Whether layers are cut by DeepSpeed's partitioner, and its pipeline runs."""
        return self.framework in ("deepspeed", "bsl")


_UNNAMED = Program(None, UNFUSED_2021, "fp16")
_SHARDED = Technique(zero_stage=3, overlap=frozenset(("data",)))
_PROGRAMS = {
    program.framework: program
    for program in (
        Program("bsl", Technique()),
        Program("deepspeed", Technique()),
        Program("megatron", Technique(kernels="compiled", sequence_parallel=True, overlap=frozenset(("data",)))),
        Program("torchtitan", replace(_SHARDED, kernels="compiled", sequence_parallel=True)),
        Program("fsdp", replace(_SHARDED, loss="plain")),
        Program("other", Technique(loss="plain")),
    )
}


def program_of(row: Cells) -> Program:
    """Return the program that a row names.

    Raises:
        ValueError: the framework is not one of those that are modelled; the same holds for the functions below.
    """
    return row.choice("framework", {str(name): program for name, program in _PROGRAMS.items()}, _UNNAMED)


def precision_of(row: Cells, program: Program) -> Precision:
    """Return the number format of the matrix products."""
    return row.choice("precision", _PRECISIONS, program.precision)


def shape_of(row: Cells, program: Program) -> ModelShape:
    heads, hidden = row.size("nheads"), row.size("nhidden")
    kv_heads, head_size = row.optional_size("kv_heads"), row.optional_size("head_dim")
    activation = row.choice("activation", _ACTIVATIONS, "gelu")
    experts = _experts_of(row)
    if kv_heads and heads % kv_heads:
        raise ValueError(f"{heads} heads are not a multiple of kv_heads {kv_heads}")
    return ModelShape(
        num_layers=row.size("nlayers"),
        hidden_size=hidden,
        num_attention_heads=heads,
        ffn_hidden_size=_ffn_of(row, hidden, experts),
        sequence_length=row.size("seq"),
        vocab_size=row.size("vocab"),
        vocab_size_multiple=1 if program.framework in ("torchtitan", "fsdp") else 128,
        tied_embeddings=row.choice("tied", _FLAGS, True),
        positions=row.choice("positions", _words(Positions), "learned"),
        num_key_value_heads=None if kv_heads == heads else kv_heads,
        activation=activation,
        norm=row.choice("norm", _words(Norm), "layernorm"),
        biases=row.choice("biases", _FLAGS, True),
        head_size=None if head_size and head_size * heads == hidden else head_size,
        experts=experts,
    )


def _ffn_of(row: Cells, hidden: int, experts: Experts | None) -> int:
    """Return the width of the MLP. That of a model which has experts in every layer is not used."""
    given = row.optional_size("ffn")
    if given:
        return given
    if experts and not experts.dense_layers:
        return experts.ffn_hidden_size
    if row.text("activation") == "swiglu":
        raise ValueError("ffn is empty, and swiglu has no usual width")
    return 4 * hidden


def _experts_of(row: Cells) -> Experts | None:
    count = row.optional_size("experts")
    if count is None:
        return None
    experts = Experts(
        count=count,
        per_token=row.size("experts_per_token"),
        ffn_hidden_size=row.size("expert_ffn"),
        shared_ffn_hidden_size=row.optional_size("shared_expert_ffn") or 0,
        dense_layers=row.optional_size("dense_layers") or 0,
        capacity_factor=row.number("capacity_factor"),
        products=row.choice("expert_products", _words(ExpertProducts), None),
    )
    if experts.per_token > count:
        raise ValueError(f"experts_per_token {experts.per_token} is more than the {count} experts")
    if experts.dense_layers >= row.size("nlayers"):
        raise ValueError(f"dense_layers {experts.dense_layers} of {row.size('nlayers')} leave none with experts")
    return experts


def topology_of(row: Cells) -> Topology:
    """Return the layout. Experts are spread inside it, so ep is not an axis."""
    return Topology(tp=row.size("tp"), pp=row.size("pp"), dp=row.size("dp"), cp=row.optional_size("cp") or 1)


def expert_shards_of(row: Cells, shape: ModelShape, topology: Topology) -> int:
    """Return the ranks over which experts are spread."""
    shards, spread_over = row.optional_size("ep") or 1, topology.world_size // topology.pp
    if shards > 1 and shape.experts is None:
        raise ValueError(f"ep {shards}, but the row has no experts")
    if shape.experts and shape.experts.count % shards:
        raise ValueError(f"{shape.experts.count} experts are not a multiple of ep {shards}")
    if spread_over % shards:
        raise ValueError(f"ep {shards} does not divide the {spread_over} ranks of a stage")
    return shards


def technique_of(row: Cells, program: Program, topology: Topology) -> Technique:
    """Return how the program computes."""
    default = program.technique
    schedule, chunks = _schedule_of(row, topology.pp)
    recomputation, recomputed_layers = _recomputation_of(row, default)
    group = row.optional_size("shard_group")
    if group and topology.dp * topology["cp"] % group:
        raise ValueError(f"shard_group {group} does not divide dp {topology.dp}")
    zero_stage = row.choice("zero", _words(ZeroStage), default.zero_stage)
    return Technique(
        attention=row.choice("attention", _words(Attention), default.attention),
        kernels=row.choice("kernels", _words(Kernels), default.kernels),
        recomputation=recomputation,
        recomputed_layers=recomputed_layers,
        sequence_parallel=row.choice("sequence_parallel", _FLAGS, default.sequence_parallel) and topology.tp > 1,
        zero_stage=zero_stage,
        shard_group_size=group if group and group < topology.dp * topology["cp"] else None,
        schedule=schedule,
        chunks_per_rank=chunks,
        loss=row.choice("loss", _words(LossKernel), default.loss),
        optimizer_bytes=_amount(row, "optimizer_bytes", OPTIMIZER_BYTES, "bytes"),
        hop_wait=_amount(row, "hop_wait", 0.0, "seconds"),
        overlap=_overlap_of(row, default.overlap | usual_overlap(program.framework, zero_stage)),
    )


def _amount(row: Cells, column: str, usual: float, unit: str) -> float:
    given, text = row.number(column), row.text(column)
    if text and not (given is not None and 0 <= given < 100):
        raise ValueError(f"{column} is {text!r}, not a number of {unit}; {usual:g} is usual")
    return usual if given is None else given


def _recomputation_of(row: Cells, default: Technique) -> tuple[Literal["none", "selective", "full"], int | None]:
    """Return what is recomputed, and of how many layers of a stage if not of all."""
    text = row.text("recompute")
    if text.isdecimal():
        return ("full", int(text)) if int(text) else ("none", None)
    return row.choice("recompute", _words(Literal["none", "selective", "full"]), default.recomputation), None


def _schedule_of(row: Cells, pp: int) -> tuple[Schedule, int]:
    """Return the schedule and the chunks of layers on each rank. Without a pipeline, neither means anything."""
    chunks = row.optional_size("virtual_stages") or 1
    usual: Schedule = "interleaved" if chunks > 1 else "1f1b"
    schedule = row.choice("schedule", _words(Schedule), usual)
    if pp == 1:
        return "1f1b", 1
    if chunks > 1 and schedule != "interleaved":
        raise ValueError(f"virtual_stages {chunks} with schedule {schedule} is not modelled")
    if chunks == 1 and schedule == "interleaved":
        raise ValueError("schedule interleaved, but virtual_stages is empty or 1")
    return schedule, chunks


def _overlap_of(row: Cells, default: frozenset[Hidden]) -> frozenset[Hidden]:
    words = row.text("overlap").split()
    if not words:
        return default
    if words == ["none"]:
        return frozenset()
    unknown = next((word for word in words if word not in _OVERLAP), None)
    if unknown:
        raise ValueError(f"overlap {unknown!r} is not modelled; none, tp, dp, pp are")
    return frozenset(_OVERLAP[word] for word in words)


def method_of(row: Cells, program: Program, num_layers: int, pp: int, chunks: int) -> str:
    """Return the partition method of a row; its own, or that of the framework.

    Megatron cuts evenly, or counts the embedding and the head as layers (`account_for_embedding_in_pipeline_split`).
    torchtitan always counts them, and gives what is left over to the first stages (`generate_llm_fqn_per_model_part`).
    Other programs do so with their layers.
    """
    given = row.text("partition_method")
    if given or program.is_deepspeed:
        return given or ("type:transformer|embedding" if program.framework == "bsl" else "type:transformer")
    parts = pp * chunks
    for embedding, head in ((1, 1),) if program.framework == "torchtitan" and pp > 1 else ((0, 0), (0, 1), (1, 1)):
        size, rest = divmod(num_layers + embedding + head, parts)
        if not rest or program.framework in ("torchtitan", "other"):
            sizes = [size + (part < rest) for part in range(parts)]
            sizes[0] -= embedding
            sizes[-1] -= head
            return "time:" + ",".join(str(sum(sizes[stage::pp])) for stage in range(pp))
    hint = "name the layers of every stage in partition_method, as time:4,3,3,4"
    raise ValueError(f"{num_layers} layers cannot be cut evenly into {parts} parts; {hint}")
