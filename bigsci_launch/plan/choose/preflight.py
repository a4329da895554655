"""What would hang or crash after minutes on all nodes, seen from the cut of the layers alone, in milliseconds.

DeepSpeed computes one gradient norm per optimizer group and drops empty groups rank by rank, so a stage without layer
norms and biases waits in another collective than the others, for ever (DeepSpeed#1522; what BLOOM's prequel met with
96 stages). In bf16, a rank on which no parameter counts for that norm crashes while its peers wait. And a tied
attribute is summed over its stages only where it has a gradient: where one has none, the other waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bigsci_launch.config.finding import PP, Finding
from bigsci_launch.config.schema import RunConfig
from bigsci_launch.plan.price.balance import PRICED_METHODS, share_out_layers
from bigsci_launch.plan.shape.parameters import ModelShape, cut_model


@dataclass(frozen=True, slots=True)
class Held:
    """What a layer holds: parameters that are decayed (matrices), others (vectors), parts that differ over tp."""

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
TIE_REMEDY = "tie the weight alone, and put norms and positions into layers of their own; faults: tied_norm ties a norm"


@dataclass(frozen=True, slots=True)
class Tie:
    """A module that the first and the last stage share: which of its attributes are tied, and which of them each of the
    two makes gradients for."""

    attributes: tuple[str, ...]
    with_gradient: tuple[frozenset[str], frozenset[str]]


def embedding_tie(config: RunConfig) -> Tie | None:
    """What the ends of the vocabulary share: the table alone, unless a fault ties more."""
    if not config.model.tied_embeddings:
        return None
    norm = ("norm.weight", "norm.bias") if any(fault.kind == "tied_norm" for fault in config.faults) else ()
    return Tie(("weight", *norm), (frozenset(("weight", *norm)), frozenset(("weight",))))


def find_tie_refusals(tie: Tie | None, *, pp: int, precision: str) -> list[Finding]:
    """Tied attributes without a gradient on one of their two stages: DeepSpeed sums over both, and skips where there is
    none."""
    if tie is None or pp == 1:
        return []
    effect = (
        "the ranks there would crash for want of it while the others wait"
        if precision == "bf16"
        else "the ranks there would not take part in the sum over stages, and the others would wait for ever"
    )
    return [
        _refusal("tied gradients on every holder", f"stage {stage} makes no gradient for {names}", effect)
        for stage, made in zip((0, pp - 1), tie.with_gradient, strict=True)
        if (names := ", ".join(f"the tied {name}" for name in tie.attributes if name not in made))
    ]


def find_stage_refusals(stages: Sequence[Sequence[str]], *, tied: bool, tp: int, precision: str) -> list[Finding]:
    """The rules that a cut breaks; `stages` are the class names of every stage's layers."""
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
            text = f"stage {stage} would hold {held}: copies of parameters alone on some of its ranks"
            effect = "these have nothing to add to the gradient norm, and DeepSpeed's bf16 optimizer crashes there"
            found.append(_refusal("parameters of its own", text, effect))
    return found


def _refusal(rule: str, text: str, effect: str) -> Finding:
    """Why a stage cannot train: the rule that it breaks, in words, and what that would lead to."""
    return Finding(rule, "error", KEYS, text, effect)


def _missing_groups(names: Sequence[str]) -> str:
    held = [LAYERS[name] for name in names]
    missing = [] if any(layer.matrices for layer in held) else ["no matrix"]
    if not any(layer.vectors for layer in held):
        missing.append("no layer norm and no bias")
    return " and ".join(missing)


def _counts_everywhere(names: Sequence[str], *, is_first: bool, tied: bool, tp: int) -> bool:
    """Whether every rank of a stage counts a parameter: copies count once, on the first stage and the first tp rank."""
    is_copy = tied and not is_first and names[-1] == "VocabularyEmbedding"
    own = [LAYERS[name] for name in (names[:-1] if is_copy else names)]
    return any(layer.is_sharded for layer in own) if tp > 1 else bool(own)


def preflight(config: RunConfig, pp: int | None = None) -> list[Finding]:
    """The rules that the cut of a run file breaks, or would break with `pp` stages.

    Raises:
        ValueError: the partition method is unknown or matches no layer.
    """
    parallelism = config.parallelism
    pp = pp or parallelism.pipeline_parallel_size
    tp, shape = parallelism.tensor_parallel_size, ModelShape.of_config(config)
    cut = cut_model(shape, _method(config, pp), pp, tp=tp)
    stages = [[layer.name for layer in cut.layers_of(stage)] for stage in range(pp)]
    precision = config.training.precision
    found = find_stage_refusals(stages, tied=shape.tied_embeddings, tp=tp, precision=precision)
    return [*found, *find_tie_refusals(embedding_tie(config), pp=pp, precision=precision)]


def _method(config: RunConfig, pp: int) -> str:
    """The partition method; of cuts by price an even one, since all of them have a transformer layer on every stage,
    and more is not asked here."""
    method = config.parallelism.partition_method
    if method.split(":")[0] not in PRICED_METHODS:
        return method
    return f"time:{','.join(map(str, share_out_layers(config.model.num_layers, [float] * pp)))}"


def remedy(config: RunConfig) -> str:
    """What to change where the cut is refused: the most stages that would do, if stages are what is wrong."""
    pp = config.parallelism.pipeline_parallel_size
    if find_tie_refusals(embedding_tie(config), pp=pp, precision=config.training.precision):
        return TIE_REMEDY
    most = next((fewer for fewer in range(pp - 1, 0, -1) if not preflight(config, fewer)), 1)
    return (
        f"set parallelism.pipeline_parallel_size to {most}, or use more layers or another parallelism.partition_method"
    )
