"""How every rule of the verdict was weighed on one job, as lines: `bsl spy --why`."""

from __future__ import annotations

from bigsci_launch.spy.judge.verdict import Judgment

NAME_WIDTH = 26


def to_why_lines(judgment: Judgment) -> list[str]:
    """Return one line for each rule that matched, what beat it, and the names of those that did not match."""
    matched = [weighed for weighed in judgment.weighed if weighed.conclusion is not None]
    silent = [weighed.rule.name for weighed in judgment.weighed if weighed.conclusion is None]
    lines = [f"{len(matched)} of {len(judgment.weighed)} rules match:"]
    for weighed in sorted(matched, key=lambda weighed: not weighed.decides):
        verdict = "decides" if weighed.decides else f"beaten by {', '.join(weighed.beaten_by)}"
        lines.append(f"  {weighed.rule.name:{NAME_WIDTH}} {verdict}: {weighed.rule.says}")
    tempered = judgment.conclusion.if_hang
    if tempered is not None:
        lines.append(f"  then: not called a hang yet; missing: {judgment.conclusion.missing[0]}")
    return [*lines, f"do not match: {', '.join(silent)}"]
