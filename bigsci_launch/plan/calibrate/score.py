"""Scores predictions by the rules of the benchmark: time, ranking, memory, and running out of memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

from bigsci_launch.plan.calibrate.rows import MeasuredRow, setup_of
from bigsci_launch.plan.price.calibration import quantile
from bigsci_launch.plan.shape.tflops import CONVENTION_DAY, tflops_of

TIE = 0.01
"""Times closer than this count as a tie, because repeated measurements differ by as much."""

MeasuredAndPredicted = tuple[float, float]


@dataclass(frozen=True, slots=True)
class ErrorFigures:
    """Relative errors in percent over `num_rows` rows."""

    num_rows: int
    mean: float | None
    median: float | None
    p90: float | None


@dataclass(frozen=True, slots=True)
class Ranking:
    """Order inside sections: Kendall's `tau` over all pairs, and the mean of each section's own as `tau_of_sections`.
    In `num_found` of `num_sections` sections, the predicted best is within 1 % of the best; `regret` is its mean excess
    in percent."""

    num_pairs: int
    tau: float | None
    tau_of_sections: float | None
    num_sections: int
    num_found: int
    regret: float | None


@dataclass(frozen=True, slots=True)
class OomFigures:
    """Rows that ran out of memory and how many of them were predicted to, and rows that fitted and the false alarms."""

    num_oom: int
    num_caught: int
    num_fitting: int
    num_false: int


@dataclass(frozen=True, slots=True)
class Score:
    """All figures of one table of predictions. `tflops_*` compare TFLOP/s from measured seconds with the printed
    ones."""

    time: ErrorFigures
    ranking: Ranking
    memory: ErrorFigures
    oom: OomFigures
    tflops_weights: ErrorFigures
    tflops_full: ErrorFigures
    num_unpriced: int


def score_rows(rows: Sequence[MeasuredRow]) -> Score:
    """Return the score of rows that have both measurements and predictions."""
    sections: dict[str, list[MeasuredAndPredicted]] = defaultdict(list)
    for row in rows:
        predicted = row.number("pred_sec_per_it")
        if row.is_scored("time") and row.seconds and predicted:
            sections[row.section].append((row.seconds, predicted))
    memory = [
        (row.memory_gib, predicted)
        for row in rows
        if row.is_scored("mem") and row.memory_gib and (predicted := row.number("pred_mem_gb"))
    ]
    return Score(
        time=error_figures(pair for pairs in sections.values() for pair in pairs),
        ranking=rank_figures(sections.values()),
        memory=error_figures(memory),
        oom=_oom_figures(rows),
        tflops_weights=error_figures(_tflops_pairs(rows, is_newer=False)),
        tflops_full=error_figures(_tflops_pairs(rows, is_newer=True)),
        num_unpriced=sum(row.number("pred_sec_per_it") is None for row in rows),
    )


def error_figures(pairs: Iterable[MeasuredAndPredicted]) -> ErrorFigures:
    """Return the figures of `(measured, predicted)` pairs."""
    errors = [100 * abs(predicted / measured - 1) for measured, predicted in pairs]
    if not errors:
        return ErrorFigures(0, None, None, None)
    return ErrorFigures(len(errors), sum(errors) / len(errors), quantile(errors, 0.5), quantile(errors, 0.9))


def rank_figures(sections: Iterable[Sequence[MeasuredAndPredicted]]) -> Ranking:
    """Return the figures of sections of `(measured, predicted)` pairs."""
    compared = [pairs for pairs in sections if len(pairs) > 1]
    votes = [_votes(pairs) for pairs in compared]
    all_votes = [vote for section in votes for vote in section]
    regrets = [_regret(pairs) for pairs in compared]
    return Ranking(
        num_pairs=len(all_votes),
        tau=_mean(all_votes),
        tau_of_sections=_mean([sum(section) / len(section) for section in votes if section]),
        num_sections=len(compared),
        num_found=sum(regret <= TIE for regret in regrets),
        regret=None if not regrets else 100 * sum(regrets) / len(regrets),
    )


def _votes(pairs: Sequence[MeasuredAndPredicted]) -> list[int]:
    """Return +1 for each pair of rows in the right order, -1 in the wrong one, 0 if they are predicted equal."""
    votes = []
    for (measured, predicted), (other, other_predicted) in combinations(pairs, 2):
        if abs(measured - other) >= TIE * min(measured, other):
            order = (measured - other) * (predicted - other_predicted)
            votes.append((order > 0) - (order < 0))
    return votes


def _regret(pairs: Sequence[MeasuredAndPredicted]) -> float:
    """Return by what fraction the row that is predicted best took longer than the best."""
    chosen = min(pairs, key=lambda pair: pair[1])[0]
    return chosen / min(measured for measured, _ in pairs) - 1


def _mean(numbers: Sequence[float]) -> float | None:
    return sum(numbers) / len(numbers) if numbers else None


def _oom_figures(rows: Sequence[MeasuredRow]) -> OomFigures:
    judged = [row for row in rows if row.is_scored("oom") and row.text("pred_oom")]
    oom = [row for row in judged if row.flag("oom")]
    fitting = [row for row in judged if not row.flag("oom")]
    return OomFigures(
        num_oom=len(oom),
        num_caught=sum(row.flag("pred_oom") for row in oom),
        num_fitting=len(fitting),
        num_false=sum(row.flag("pred_oom") for row in fitting),
    )


def _tflops_pairs(rows: Sequence[MeasuredRow], *, is_newer: bool) -> list[MeasuredAndPredicted]:
    """Return the printed and recomputed TFLOP/s of the rows whose date is in one convention."""
    pairs = []
    for row in rows:
        setup, printed = setup_of(row), row.number("tflops_reported")
        if isinstance(setup, str) or not printed or not row.seconds or not row.is_scored("time") or not row.day:
            continue
        if (row.day >= CONVENTION_DAY) == is_newer:
            pairs.append((printed, tflops_of(setup, row.seconds).of_day(row.day)))
    return pairs


def score_document(score: Score) -> dict[str, Any]:
    """Return the score for JSON; errors and regret are in percent."""
    return {"schema_version": 1, **asdict(score)}


def score_lines(score: Score) -> list[str]:
    ranking, oom = score.ranking, score.oom
    lines = [
        f"seconds per step: {_figures(score.time)}",
        f"order inside sections: Kendall tau {_number(ranking.tau)} over {ranking.num_pairs} pairs, "
        f"{_number(ranking.tau_of_sections)} as the mean of sections",
        f"best found within 1 %: in {ranking.num_found} of {ranking.num_sections} sections, "
        f"mean regret {_number(ranking.regret)} %",
        f"memory: {_figures(score.memory)}",
        f"out of memory: {oom.num_caught} of {oom.num_oom} caught, {oom.num_false} of {oom.num_fitting} false",
        f"TFLOP/s from the measured seconds, before 2022-02-21: {_figures(score.tflops_weights)}",
        f"TFLOP/s from the measured seconds, since: {_figures(score.tflops_full)}",
    ]
    if score.num_unpriced:
        lines.append(f"{score.num_unpriced} rows are not priced")
    return lines


def _figures(errors: ErrorFigures) -> str:
    return (
        f"{errors.num_rows} rows, error mean {_number(errors.mean)}, median {_number(errors.median)}, "
        f"p90 {_number(errors.p90)} %"
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
