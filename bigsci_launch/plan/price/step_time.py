"""Predicts the time of a step: a pipeline of stages, each a sum of work divided by measured rates.

    T = drift x [ (m - 1) x (slowest stage + hop) + fill and drain + (pp - 1) x hop + once per step ]

with m micro batches per replica. `fill and drain` is the sum of the stages with 1F1B; chunks of layers, or weight
gradients that wait, divide what exceeds one stage. Kernel launches add to a layer's time if the host waits for every
launch; otherwise they overlap with the GPU's work, as do messages that the program sends while it computes. A stage is
its layers, and the last one has the head too; the input embedding costs memory, not time. All work is counted once per
setup (`work`) and the constants only weigh it, so fitting and searching are fast.
"""

from __future__ import annotations

from dataclasses import dataclass

from bigsci_launch.plan.price.constants import Constants
from bigsci_launch.plan.price.count import StepWork
from bigsci_launch.plan.price.terms import LAUNCHES, MESSAGES, NETWORK, TERMS, rates_of, weigh_work

HIDING_NORM = 4
"""Things that run at the same time take the norm of this order of their times: nearly the longest of them."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """A predicted step: seconds in total, per term, and per stage and micro batch; what one more micro batch adds;
    seconds of a hop and of what comes once per step; and `bubble`, the share of time that the slowest stage is idle."""

    seconds: float
    terms: tuple[float, ...]
    stage_seconds: tuple[float, ...]
    micro_batch_seconds: float
    hop_seconds: float
    bubble: float


def drift_on(day_ordinal: int | None, drift: float, drift_from: int | None) -> float:
    """Return the factor on a day: `drift` from `drift_from` on, and without a day; else 1."""
    if drift_from is None:
        return 1.0
    return drift if day_ordinal is None or day_ordinal >= drift_from else 1.0


@dataclass(frozen=True, slots=True)
class _Pieces:
    """Seconds of the parts of a step, before drift."""

    layer: float
    head: float
    hop: float
    wait: float
    step: float
    hidden_step: float


def _weigh(work: StepWork, rates: tuple[float, ...]) -> _Pieces:
    return _Pieces(
        _layer_seconds(work, rates),
        weigh_work(work.head, rates),
        hop_seconds(work, rates),
        _wait_seconds(work),
        weigh_work(work.step, rates) + work.unexplained_seconds,
        weigh_work(work.hidden_step, rates),
    )


def _layer_seconds(work: StepWork, rates: tuple[float, ...]) -> float:
    """Return the seconds of a layer and micro batch: work, and what happens at the same time."""
    launching = work.layer[LAUNCHES] * rates[LAUNCHES]
    working = weigh_work(work.layer, rates) - launching
    hidden = weigh_work(work.hidden, rates)
    working += EXPOSED_SHARE * hidden
    if work.is_blocking:
        return _at_once(working, hidden) + launching
    return _at_once(working, hidden, launching)


HOP_SPEEDUP = 4.0
"""Rate of messages between two ranks relative to the collectives of many, if the nominal rate is not known: 3.8 and 6
when fitted separately on Jean Zay."""


def hop_seconds(work: StepWork, rates: tuple[float, ...]) -> float:
    """Return the seconds of sending to the next stage and back: near the nominal rate, whatever collectives reach."""
    return weigh_work(work.hop, _hop_rates(work, rates))


def _wait_seconds(work: StepWork) -> float:
    """Return what messages between stages wait for one more micro batch, each for itself. A stage between two others
    has four of them: its inputs and outputs, forward and backward."""
    return 2 * min(2, len(work.layers_per_stage) - 1) * work.hop_wait


def _hop_rates(work: StepWork, rates: tuple[float, ...]) -> tuple[float, ...]:
    slow = rates[NETWORK]
    direct = work.direct_seconds_per_gb
    return (*rates[:NETWORK], min(slow, direct) if direct else slow / HOP_SPEEDUP, *rates[NETWORK + 1 :])


def _at_once(*seconds: float) -> float:
    """Return the time of things that run at the same time."""
    longest = max(seconds)
    if longest <= 0:
        return 0.0
    return longest * float(sum((each / longest) ** HIDING_NORM for each in seconds) ** (1 / HIDING_NORM))


EXPOSED_SHARE = 0.5
"""Share of a layer's hidden messages that it waits for anyway, because the next layer needs them."""


def step_seconds(work: StepWork, rates: tuple[float, ...]) -> float:
    """Return the seconds of a step before drift; the fast path of `predict_step`, for fitting."""
    return _total(work, _weigh(work, rates))


def _total(work: StepWork, pieces: _Pieces) -> float:
    stages = work.layers_per_stage
    slowest = max(max(stages) * pieces.layer, stages[-1] * pieces.layer + pieces.head)
    rest = (sum(stages) * pieces.layer + pieces.head - slowest) / work.rounds
    pipeline = (work.num_micro_batches - 1) * (slowest + pieces.hop + pieces.wait) + slowest + rest
    pipeline += (len(stages) - 1) * (pieces.hop + 2 * work.hop_wait)
    return pipeline + pieces.step + _exposed(work.hiding_micro_batches * slowest, pieces.hidden_step)


def _exposed(computing: float, hidden: float) -> float:
    """Return what is left of a reduction that runs during some seconds of computing."""
    return _at_once(computing, hidden) - computing if hidden else 0.0


def layer_and_head_seconds(work: StepWork, constants: Constants) -> tuple[float, float]:
    """Return the seconds of a layer and of the head per micro batch, before drift. They give the price of a stage."""
    rates = rates_of(constants)
    return _layer_seconds(work, rates), weigh_work(work.head, rates)


def predict_step(work: StepWork, constants: Constants, drift_from: int | None = None) -> StepTime:
    """Return the step with all its terms. `drift_from` is the proleptic ordinal of the day on which `drift` begins.

    What is hidden belongs to no term of its own: its exposed part counts in the terms that it consists of.
    """
    rates, stages, m = rates_of(constants), work.layers_per_stage, work.num_micro_batches
    factor = drift_on(work.day_ordinal, constants.drift, drift_from)
    pieces = _weigh(work, rates)
    stage_seconds = [count * pieces.layer for count in stages]
    stage_seconds[-1] += pieces.head
    slowest = stage_seconds.index(max(stage_seconds))
    seconds = _total(work, pieces)
    pipeline = seconds - pieces.step
    pipeline -= _exposed(work.hiding_micro_batches * stage_seconds[slowest], pieces.hidden_step)
    return StepTime(
        seconds=seconds * factor,
        terms=tuple(term * factor for term in _terms(work, rates, pieces, slowest)),
        stage_seconds=tuple(each * factor for each in stage_seconds),
        micro_batch_seconds=(stage_seconds[slowest] + pieces.hop + pieces.wait) * factor,
        hop_seconds=pieces.hop * factor,
        bubble=1 - m * (stage_seconds[slowest] + pieces.hop + pieces.wait) / pipeline if pipeline else 0.0,
    )


def _terms(work: StepWork, rates: tuple[float, ...], pieces: _Pieces, slowest: int) -> list[float]:
    """Return the seconds of the step by term, before drift; without the constant of a step."""
    stages, m = work.layers_per_stage, work.num_micro_batches
    layer = _layer_terms(work, rates, pieces.layer)
    head, step, hidden = (
        [amount * rate for amount, rate in zip(part, rates, strict=True)]
        for part in (work.head, work.step, work.hidden_step)
    )
    hop = [amount * rate for amount, rate in zip(work.hop, _hop_rates(work, rates), strict=True)]
    longest = stages[slowest] * pieces.layer + (pieces.head if slowest == len(stages) - 1 else 0.0)
    computing = work.hiding_micro_batches * longest
    exposed = _exposed(computing, pieces.hidden_step) / pieces.hidden_step if pieces.hidden_step else 0.0
    has_head = float(slowest == len(stages) - 1)
    # Of the longest stage all micro batches, of the others the share with which the pipeline fills and drains.
    layers = (m - 1 / work.rounds) * stages[slowest] + sum(stages) / work.rounds
    heads = (m - 1 / work.rounds) * has_head + 1 / work.rounds
    hops = m - 1 + len(stages) - 1
    terms = [
        layers * layer[i] + heads * head[i] + hops * hop[i] + step[i] + exposed * hidden[i] for i in range(len(TERMS))
    ]
    terms[MESSAGES] += (m - 1) * pieces.wait + (len(stages) - 1) * 2 * work.hop_wait
    return terms


def _layer_terms(work: StepWork, rates: tuple[float, ...], seconds: float) -> list[float]:
    """Return the seconds of a layer by term: launches and hidden messages get what they add to the rest."""
    terms = [amount * rate for amount, rate in zip(work.layer, rates, strict=True)]
    hidden = [amount * rate for amount, rate in zip(work.hidden, rates, strict=True)]
    launching, terms[LAUNCHES] = terms[LAUNCHES], 0.0
    added, at_once = seconds - sum(terms), launching + sum(hidden)
    if at_once:
        share = added / at_once
        terms = [term + share * other for term, other in zip(terms, hidden, strict=True)]
        terms[LAUNCHES] += share * launching
    return terms
