"""The open findings of one watcher, kept in the run's ledger and reported once."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from functools import partial

from bigsci_launch.progress import Report
from bigsci_launch.runs.layout import RunDir
from bigsci_launch.runs.watching.ledger import RunFinding, clear_finding, raise_finding, read_findings
from bigsci_launch.units import format_age
from bigsci_launch.watch.facts.stalls import STALL
from bigsci_launch.watch.notify.of_run import NotifyFinding

SPIKES = ("loss_spike", "grad_spike", "nan")
LASTING = (*SPIKES, "slower", "restart_spike")
"""Findings that stay until the run has recovered, or the attempt is over: they are noticed once."""
SETTLED_S = 900.0
"""After this long, a watcher has seen and asked everything that shows whether a finding holds."""


class OpenFindings:
    """Raises what is new and clears what is over. Findings are sent even if the ledger cannot be written.

    `say` gets a line for the screen, `tell` each finding that was not sent yet.
    """

    def __init__(self, run: RunDir, say: Report, tell: NotifyFinding) -> None:
        self._run = run
        self._say = say
        self._tell = tell
        known = read_findings(run)
        self._past = known
        self._open = {finding.key: finding for finding in known if finding.cleared is None}
        self._held: set[str] = set()
        self._began = time.monotonic()
        self.unwritten = ""
        """Why the ledger could not be written; empty if it could."""

    @property
    def open(self) -> list[RunFinding]:
        return list(self._open.values())

    def raise_all(self, found: Iterable[RunFinding]) -> None:
        """Take in what was found. One that is open already is sent again only if it is now of another kind, or once it
        says which ranks caused it."""
        for finding in found:
            known = self._open.get(finding.key)
            is_new = known is None or known.kind != finding.kind or (finding.accuses and not known.accuses)
            if known is not None and not is_new and (known.bundle or not finding.bundle):
                continue
            if (other := self._of_another(finding)) is not None:
                self._open[finding.key] = other
                self._say("; ".join((other.sentence, *other.details)))
                continue
            finding = replace(finding, details=(*finding.details, *self._seen_before(finding)))
            self._open[finding.key] = finding
            self._write(partial(raise_finding, self._run, finding))
            if is_new:
                self._say("; ".join((finding.sentence, *finding.details)))
                self._tell(finding)
            self._past.append(finding)

    def note(self, found: Iterable[RunFinding]) -> None:
        """Take in what is over already, and worth reporting, unless another watcher has reported it."""
        for finding in found:
            if any(each.key == finding.key for each in read_findings(self._run)):
                continue
            self._write(partial(raise_finding, self._run, finding))
            self._say("; ".join((finding.sentence, *finding.details)))
            self._tell(finding)
            self._past.append(finding)

    def settle(
        self, attempt: str | None, standing: set[str], passed: Collection[str], *, is_over: bool, has_moved: bool
    ) -> None:
        """Note what is over: what no longer holds, what the run has recovered from, and what earlier attempts had.

        What another watcher has found, and this one has never seen hold, is not over because this one does not see it.
        `standing` are the keys of what holds now, `passed` the kinds that are over. `is_over`: the job is, and
        `has_moved`: the ranks have, since this watch began.
        """
        self._held |= standing
        self.clear([each.key for each in self.open if each.attempt not in (None, attempt)], "the attempt is over")
        gone = [each for each in self.open if each.kind not in LASTING and each.key not in standing]
        known = [each.key for each in gone if is_over or self._knows_over(each, has_moved)]
        self.clear(known, "the job is over" if is_over else "it no longer holds")
        self.clear([each.key for each in self.open if each.kind in passed], "the run has recovered")

    def _knows_over(self, finding: RunFinding, has_moved: bool) -> bool:
        """Whether this watcher can tell that a finding, which it does not see, is over."""
        is_settled = has_moved if finding.key.startswith(STALL) else time.monotonic() - self._began > SETTLED_S
        return finding.key in self._held or is_settled

    def clear(self, keys: Iterable[str], words: str) -> None:
        """Note that findings are over, and why."""
        for key in keys:
            finding = self._open.pop(key, None)
            if finding is None:
                continue
            self._write(partial(clear_finding, self._run, key, words))
            self._say(
                f"over: {finding.kind.replace('_', ' ')} of {format_age(time.time() - finding.noticed)} ago ({words})"
            )

    def _of_another(self, finding: RunFinding) -> RunFinding | None:
        if finding.key in self._open:
            return None
        known = (each for each in read_findings(self._run) if each.key == finding.key and each.cleared is None)
        return next((each for each in known if each.kind == finding.kind), None)

    def _seen_before(self, finding: RunFinding) -> list[str]:
        alike = [
            past
            for past in self._past
            if past.signature and past.signature == finding.signature and past.key != finding.key
        ]
        if not alike:
            return []
        last = alike[-1]
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(last.noticed))
        where = "" if last.step is None else f" after step {last.step}"
        return [f"the ranks are in the same places as on {when} (attempt {last.attempt}{where})"]

    def _write(self, write: Callable[[], None]) -> None:
        try:
            write()
            self.unwritten = ""
        except OSError as error:
            self.unwritten = f"{self._run.watch}: {error.strerror or error}"
