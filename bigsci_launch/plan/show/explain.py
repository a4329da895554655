"""Why one plan is better than another, term by term."""

from __future__ import annotations

from bigsci_launch.plan.choose.search import Plan
from bigsci_launch.plan.price.price import TERM_NAMES
from bigsci_launch.plan.shape.advice import advise

EXPLAIN_COLUMNS = ("seconds of a step", ">winner", ">runner-up", ">runner-up pays")


def explain_cells(best: Plan, other: Plan) -> list[tuple[str, ...]]:
    """Return the seconds of a step by term: the winner, the other, and the other's extra cost."""
    rows = [
        (name, f"{mine:.2f}", f"{theirs:.2f}", f"{theirs - mine:+.2f}")
        for name, mine, theirs in zip(TERM_NAMES, best.price.terms, other.price.terms, strict=True)
        if abs(mine) > 0.005 or abs(theirs) > 0.005
    ]
    mine, theirs = best.price.seconds, other.price.seconds
    return [*rows, ("a step", f"{mine:.2f}", f"{theirs:.2f}", f"{theirs - mine:+.2f}")]


def explain_lines(best: Plan, other: Plan) -> list[str]:
    """Return what the terms do not show: idle time, memory, the ramp, and how certain the order is."""
    lines = [
        f"idle time of the slowest stage: {100 * best.price.bubble:.1f} % against {100 * other.price.bubble:.1f} %",
        f"memory needed: {best.price.need_gib:.0f} GiB against {other.price.need_gib:.0f} GiB",
        f"whole run, including the ramp-up: {best.days:.1f} days against {other.days:.1f}",
    ]
    gap = other.run_seconds / best.run_seconds - 1
    bands = f"±{100 * best.price.band:.0f} % against ±{100 * other.price.band:.0f} %"
    if gap < 0:
        lines.append(
            f"the other is predicted {-100 * gap:.1f} % faster, but with less certainty ({bands}): 3 of 4 such plans "
            f"stay within {other.likely_days:.1f} days, those like the winner within {best.likely_days:.1f}; "
            "measure it before a long run"
        )
    elif gap < best.price.band + other.price.band:
        lines.append(f"the gap of {100 * gap:.1f} % is inside the bands ({bands}): measure both before a long run")
    lines += [f"the winner: {remark}" for remark in advise(best.setup)]
    lines += [f"the other: {remark}" for remark in advise(other.setup)]
    return lines
