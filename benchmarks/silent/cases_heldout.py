"""Held-out defects: declared by somebody who had not read the code that checks, before any of them was run.

Each has really happened to people who train large models. The names of checks cannot be known from outside, so `check`
is open; the cause is judged by the ranks that may be blamed, by the tensor, and by words that speak of the defect.
Where two ranks disagree and neither can know which of them is wrong, no rank is judged. None of them is impossible to
detect: each breaks something that a trainer knows of its model, its data or its own schedule.
"""

from __future__ import annotations

from typing import Any

from silent.case import Case, Truth

DROPOUT: dict[str, Any] = {"model": {"dropout": 0.1}}
ROTARY: dict[str, Any] = {"model": {"positions": "rotary"}}
SLOW: dict[str, Any] = {"optimizer": {"warmup_steps": 10}}
FIRST, ONE = (0,), (1,)


def held_out(name: str, what: str, shape: str, defect: str, words: str, **more: Any) -> Case:
    """Return a case that must be stopped within a step, before a save, with one of `words` in what is said first.
    `blamed` are the ranks that may be blamed: those that have the defect, unless it says otherwise."""
    ranks = more.get("ranks") or None
    truth = Truth(words=words, ranks=more.pop("blamed", ranks), tensor=more.pop("tensor", "."))
    return Case(name, "heldout", what, shape, defect, truth=truth, **more)


CASES = (
    held_out(
        # A generator that two replicas share correlates their noise: equal states in different replicas show it.
        "dropout-same-dp",
        "two replicas draw the same dropout masks",
        "dp=2",
        "reseeded",
        "random|dropout|generator|mask|seed",
        sections=DROPOUT,
    ),
    held_out(
        # After the sum over tp both ranks must draw the same mask, or their copies of the residual stream differ.
        "dropout-apart-tp",
        "two tp ranks draw different dropout masks for the same activations",
        "tp=2",
        "reseeded",
        "random|dropout|generator|mask|seed|activation|hidden|residual|copies|replica",
        ranks=ONE,
        blamed=None,
        sections=DROPOUT,
    ),
    held_out(
        # A label mask from elsewhere (prompts, padding): the mean is over other tokens than the trainer has.
        "half-mask-dp",
        "the loss of a dp rank is the mean over the first half of each sequence",
        "dp=2",
        "half of the labels masked",
        "loss|label|mask|logits",
        ranks=ONE,
    ),
    held_out(
        # A buffer of tokens that is not filled for the second micro batch. The loader has read the right samples.
        "micro-batch-twice-dp",
        "a dp rank trains on its first micro batch twice, after reading the right ones",
        "dp=2",
        "micro batch twice",
        "data|micro batch|sample|token|label",
        ranks=ONE,
    ),
    held_out(
        # The last micro batch of the step is lost to accumulation on one stage alone.
        "micro-batch-lost-pp",
        "the first stage leaves out the backward pass of the last micro batch",
        "pp=2",
        "backward pass left out",
        "gradient|micro batch|backward|accumulat",
        ranks=FIRST,
    ),
    held_out(
        # A receive buffer that is read before the next activations are in it.
        "stale-activations-pp",
        "the last stage computes its second micro batch from the activations of the first",
        "pp=2",
        "stale activations",
        "activation|stage|receive|sent|pipeline|hidden|input",
        ranks=ONE,
        blamed=None,
    ),
    held_out(
        # A gradient buffer that was not cleared, for example on the path of a skipped step.
        "gradients-kept-dp",
        "the gradients of the step before are still in the buffer of a dp rank, once",
        "dp=2",
        "gradients kept",
        "gradient|accumulat|buffer",
        ranks=ONE,
    ),
    held_out(
        # A default of a library where the run file's value should be.
        "norm-epsilon-dp",
        "layer norms of a dp rank have an epsilon of 0.1",
        "dp=2",
        "norm epsilon",
        r"epsilon|\beps\b|layer ?norm|_norm|setting|module|forward|activation",
        ranks=ONE,
    ),
    held_out(
        # `train()` does not reach a layer after an evaluation.
        "layer-in-eval-dp",
        "a transformer layer of a dp rank stays in evaluation mode, without dropout",
        "dp=2",
        "layer in evaluation mode",
        r"\bmode\b|\beval|dropout|training",
        ranks=ONE,
        sections=DROPOUT,
    ),
    held_out(
        # The head becomes a copy (by a cast, a wrapper, a load): nothing trains it, and the embedding loses its part.
        "tie-lost",
        "the head computes with a frozen copy of the embedding from now on, on all ranks",
        "dp=2",
        "tie lost",
        r"\btie|embedding|head|logits|output",
    ),
    held_out(
        # Heads are split over tp, so no replicated tensor need differ: only the constant itself is wrong.
        "rope-base-tp",
        "rotary positions of a tp rank have another base",
        "tp=2",
        "other rotary base",
        r"rotary|rope|\bbase\b|position|angle|attention|forward|activation",
        ranks=ONE,
        sections=ROTARY,
    ),
    held_out(
        # Counted from 0 on one rank and from 1 on the other.
        "schedule-late-dp",
        "the learning rate of a dp rank is that of the step before, during warm-up",
        "dp=2",
        "late schedule",
        r"learning rate|learning_rate|schedule|\blr\b|optimizer (settings|update|groups)",
        ranks=ONE,
        blamed=None,
        sections=SLOW,
    ),
    held_out(
        # The flag is lost in one of two kernels: half of the heads see the future.
        "not-causal-tp",
        "attention of a tp rank is not causal",
        "tp=2",
        "not causal",
        "causal|mask|attention|future|forward|activation",
        ranks=ONE,
    ),
    held_out(
        # The owner's master shows which of the two copies is right.
        "gather-loses-shard-dp",
        "a dp rank keeps its old copy of the other's shard when updated weights are gathered, once",
        "dp=2",
        "shard not gathered",
        "cop(y|ies)|weight|master|gather|shard|parameter",
        ranks=FIRST,
        options={"once": True},
    ),
    held_out(
        # Every stage clips by its own norm, so the stages are scaled differently.
        "clip-own-norm-pp",
        "every stage clips by the norm of its own gradients",
        "pp=2",
        "own norm",
        "norm|clip",
    ),
)
