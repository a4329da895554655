"""A finding: what a rule says about a run file, a setup, a cut into stages or a whole run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from bigsci_launch.errors import Problem

Severity = Literal["error", "warning", "note"]
_ORDER: tuple[Severity, ...] = ("error", "warning", "note")

TP = "parallelism.tensor_parallel_size"
PP = "parallelism.pipeline_parallel_size"
DP = "parallelism.data_parallel_size"


@dataclass(frozen=True, slots=True)
class Finding:
    """A rule that does not hold.

    `keys` are the one or two full keys that do not fit together, first the one to change. Keys of the site file begin
    with `site.`. `text` says what is wrong, and `price` what it costs or leads to if the rule knows it.
    """

    rule: str
    severity: Severity
    keys: tuple[str, ...]
    text: str
    price: str = ""

    @property
    def is_error(self) -> bool:
        return self.severity == "error"

    def at(self, where: str) -> Problem:
        """Return the finding as a problem of the file, at the place `where`."""
        return Problem(where, self.keys[0], _priced(self.text, self.price))


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """Return errors, then warnings, then notes, each in the order in which they were found."""
    return sorted(findings, key=lambda finding: _ORDER.index(finding.severity))


def finding_line(finding: Finding) -> str:
    """Return a finding as a line of text: its keys, what is wrong, and the price."""
    return f"{finding.severity}: {' and '.join(finding.keys)}: {_priced(finding.text, finding.price)}"


def finding_document(finding: Finding) -> dict[str, str]:
    """Return a finding for JSON, without its price."""
    key, other_key = (*finding.keys, "")[:2]
    return {
        "rule": finding.rule,
        "severity": finding.severity,
        "key": key,
        "other_key": other_key,
        "text": finding.text,
    }


def _priced(text: str, price: str) -> str:
    return f"{text}: {price}" if price else text
