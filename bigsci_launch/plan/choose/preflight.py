"""Finds, in milliseconds and from the cut of the layers alone, what would hang or crash after minutes on all nodes.

DeepSpeed computes one gradient norm per optimizer group and drops empty groups on each rank. A stage without layer
norms and biases therefore waits forever in another collective than the others (DeepSpeed#1522; BLOOM's prequel met this
with 96 stages). In bf16, a rank without any parameter that counts for the norm crashes while its peers wait. A tied
attribute is summed over its stages only where it has a gradient; if one stage has none, the other waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bigsci_launch.config.finding import PP, Finding
from bigsci_launch.config.schema.run import RunConfig
from bigsci_launch.plan.price.balance import PRICED_METHODS, share_out_layers
from bigsci_launch.plan.shape.parameters import ModelShape, cut_model


@dataclass(frozen=True, slots=True)
class Held:
    """What a layer contains: decayed parameters (matrices), others (vectors), parts that differ over tp."""

    matrices: bool
    vectors: bool
    is_sharded: bool


_TABLE = Held(matrices=True, vectors=False, is_sharded=True)
_NORM = Held(matrices=False, vectors=True, is_sharded=False)
LAYERS = {
    "VocabularyEmbedding": _TABLE,
    "OutputEmbedding": _TABLE,
    "EmbeddingWithNorm": Held(matrices=True, vectors=True, is_sharded=True),
    "LearnedPositions": Held(matrices=True, vectors=False, is_sharded=False),
    "InputNorm": _NORM,
    "TransformerLayer": Held(matrices=True, vectors=True, is_sharded=True),
    "FinalNorm": _NORM,
}


KEYS = (PP, "parallelism.partition_method")
TIE_REMEDY = "tie only the weight, and put norms and positions into separate layers; the fault tied_norm ties a norm"


@dataclass(frozen=True, slots=True)
class Tie:
    """A module that the first and the last stage share: its tied attributes, and those for which each of the two stages
    makes gradients."""

    attributes: tuple[str, ...]
    with_gradient: tuple[frozenset[str], frozenset[str]]


def embedding_tie(config: RunConfig) -> Tie | None:
    """Return what the first and the last stage share: only the table, unless a fault ties more."""
    if not config.model.tied_embeddings:
        return None
    norm = ("norm.weight", "norm.bias") if any(fault.kind == "tied_norm" for fault in config.faults) else ()
    return Tie(("weight", *norm), (frozenset(("weight", *norm)), frozenset(("weight",))))


def find_tie_refusals(tie: Tie | None, *, pp: int, precision: str) -> list[Finding]:
    """Return findings for tied attributes without a gradient on one of their two stages. DeepSpeed sums over both, but
    skips a stage without a gradient."""
    if tie is None or pp == 1:
        return []
    effect = (
        "its ranks would crash without it while the others wait"
        if precision == "bf16"
        else "its ranks would not take part in the sum over stages, and the others would wait forever"
    )
    return [
        _refusal("tied gradients on every holder", f"stage {stage} makes no gradient for {names}", effect)
        for stage, made in zip((0, pp - 1), tie.with_gradient, strict=True)
        if (names := ", ".join(f"the tied {name}" for name in tie.attributes if name not in made))
    ]


def find_stage_refusals(stages: Sequence[Sequence[str]], *, tied: bool, tp: int, precision: str) -> list[Finding]:
    """Return the rules that a cut breaks; `stages` has the class names of every stage's layers."""
    found = []
    for stage, names in enumerate(stages):
        held = ", ".join(names) or "nothing"
        missing = _missing_groups(names)
        if missing:
            text = f"stage {stage} would hold {held}: {missing}"
            effect = (
                "its optimizer would have fewer parameter groups than the others', and the gradient norm would hang"
            )
            found.append(_refusal("equal parameter groups", text, effect))
        elif precision == "bf16" and not _counts_everywhere(names, is_first=stage == 0, tied=tied, tp=tp):
            text = f"stage {stage} would hold {held}: some of its ranks would have only copies of parameters"
            effect = (
                "they would have nothing to add to the gradient norm, and DeepSpeed's bf16 optimizer would crash there"
            )
            found.append(_refusal("parameters of its own", text, effect))
    return found


def _refusal(rule: str, text: str, effect: str) -> Finding:
    """Return a finding that a stage cannot train: the rule that it breaks, in words, and what that would lead to."""
    return Finding(rule, "error", KEYS, text, effect)


def _missing_groups(names: Sequence[str]) -> str:
    held = [LAYERS[name] for name in names]
    missing = [] if any(layer.matrices for layer in held) else ["no matrix"]
    if not any(layer.vectors for layer in held):
        missing.append("no layer norm and no bias")
    return " and ".join(missing)


def _counts_everywhere(names: Sequence[str], *, is_first: bool, tied: bool, tp: int) -> bool:
    """Return whether every rank of a stage counts a parameter. Copies count only on the first stage and tp rank."""
    is_copy = tied and not is_first and names[-1] == "VocabularyEmbedding"
    own = [LAYERS[name] for name in (names[:-1] if is_copy else names)]
    return any(layer.is_sharded for layer in own) if tp > 1 else bool(own)


def preflight(config: RunConfig, pp: int | None = None) -> list[Finding]:
    """Return the rules that the cut of a run file breaks, or would break with `pp` stages.

    Raises:
        ValueError: the partition method is unknown or matches no layer.
    """
    parallelism = config.parallelism
    pp = pp or parallelism.pipeline_parallel_size
    tp, shape = parallelism.tensor_parallel_size, ModelShape.of_config(config)
    cut = cut_model(shape, _method(config, pp), pp, tp=tp)
    stages = [[layer.name for layer in cut.layers_of(stage)] for stage in range(pp)]
    precision = config.training.weight_format
    found = find_stage_refusals(stages, tied=shape.tied_embeddings, tp=tp, precision=precision)
    return [*found, *find_tie_refusals(embedding_tie(config), pp=pp, precision=precision)]


def _method(config: RunConfig, pp: int) -> str:
    """Return the partition method. For a cut by price, return an even cut: the rules here only need a transformer layer
    on every stage, and every cut by price has that."""
    method = config.parallelism.partition_method
    if method.split(":")[0] not in PRICED_METHODS:
        return method
    return f"time:{','.join(map(str, share_out_layers(config.model.num_layers, [float] * pp)))}"


def remedy(config: RunConfig) -> str:
    """Return what to change if the cut is refused: the largest number of stages that works, if stages are the
    problem."""
    pp = config.parallelism.pipeline_parallel_size
    if find_tie_refusals(embedding_tie(config), pp=pp, precision=config.training.weight_format):
        return TIE_REMEDY
    most = next((fewer for fewer in range(pp - 1, 0, -1) if not preflight(config, fewer)), 1)
    return (
        f"set parallelism.pipeline_parallel_size to {most}, or use more layers or another parallelism.partition_method"
    )
