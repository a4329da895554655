"""Who makes a run slow, by the rings of its ranks: asked from time to time, and at once when steps become slower.

One answer accuses no rank: a finding is what two answers in a row say. What they show of the steps is kept for the
page of the run, and how fast its nodes are for the runs that come.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from dataclasses import asdict, replace

from bigsci_launch.errors import BslError
from bigsci_launch.nodes.speeds import NodeSpeed, add_speeds
from bigsci_launch.printable import one_line
from bigsci_launch.runs.attempts import read_job
from bigsci_launch.runs.layout import node_speeds, write_json
from bigsci_launch.runs.watching.ledger import RunFinding
from bigsci_launch.slow.answer import Asked, who_is_slow
from bigsci_launch.slow.straggler import SlowKind, Straggler
from bigsci_launch.slow.words import straggler_sentence
from bigsci_launch.watch.watched import WatchedRun

FIRST_STEPS = 20
"""Steps that a watcher sees before it asks for the first time: the first of a program count for nothing."""
EVERY_S, AGAIN_S = 30.0, 20.0
"""Time between two questions, and until an answer is asked for again that names someone new, or no one any longer."""
ALERT_S = 120.0
"""For so long after steps have become slower, it asks as if there were news: rings fill with such steps only then."""
MOST_PART, MOST_PART_OF_NEWS = 0.05, 0.2
"""The part of the time that questions take at most: in a large job, each reads many rings."""
STRAGGLER = "straggler"
WhoIsSlow = tuple[SlowKind, tuple[int, ...]]


class SlowQuestion(threading.Thread):
    """Asks in a thread of its own: a silent node takes its time, and a hang must not wait for it. None: no answer.
    `trouble` is a defect of the question itself, in a line; empty if it met none."""

    def __init__(self, run: str) -> None:
        super().__init__(daemon=True)
        self._run = run
        self.asked: Asked | None = None
        self.trouble = ""
        self.took_s = 0.0
        self.start()

    def run(self) -> None:
        began = time.monotonic()
        try:
            self.asked = who_is_slow(self._run)
        except BslError:
            pass  # no rank can be asked now: the next question may find some
        except Exception as error:
            self.trouble = f"who makes the run slow is unknown: {type(error).__name__}: {one_line(str(error))}"
        self.took_s = time.monotonic() - began


class StragglerWatch:
    """The ranks, stages and links of one attempt that make it slow."""

    def __init__(self, watched: WatchedRun) -> None:
        self._watched = watched
        self._due: float | None = None
        self._alert_until = 0.0
        self._began_at: int | None = None
        self._question: SlowQuestion | None = None
        self._last: dict[WhoIsSlow, float] = {}
        self._standing: dict[WhoIsSlow, RunFinding] = {}
        self.trouble = ""
        """Why the last question has no answer, if that is a defect; else empty."""

    @property
    def standing(self) -> list[RunFinding]:
        """What holds, as far as the newest answers say."""
        return list(self._standing.values())

    def consider(self, step: int | None, now: float, *, is_slower: bool) -> None:
        """Take in an answer that has come, or ask if that is due after `step`. `now` is the watcher's own clock."""
        if self._watched.run is None or step is None:
            return
        if is_slower:
            self._alert_until = now + ALERT_S
            self._due = now if self._due is not None else None
        if self._question is not None:
            self._take_answer(self._question, now)
            return
        if self._began_at is None or step < self._began_at:
            self._began_at = step
        if self._due is None and step - self._began_at >= FIRST_STEPS:
            self._due = now
        if self._due is None or now < self._due:
            return
        self._question = SlowQuestion(str(self._watched.home.path))

    def _take_answer(self, question: SlowQuestion, now: float) -> None:
        if question.is_alive():
            return
        self._question, self.trouble = None, question.trouble
        is_news = question.asked is not None and self._is_news(question.asked)
        if is_news or now < self._alert_until:
            self._due = now + max(AGAIN_S, question.took_s / MOST_PART_OF_NEWS)
        else:
            self._due = now + max(EVERY_S, question.took_s / MOST_PART)

    def _is_news(self, asked: Asked) -> bool:
        """Return whether the answer is another one than the last."""
        if asked.answer.undecided is not None:
            return False  # what was found stands: that this answer does not see it shows nothing
        found = {(each.kind, each.ranks): each for each in asked.answer.stragglers if each.kind is not SlowKind.CUT}
        before, moment = self._last, time.time() - asked.answer.seconds
        self._last = {key: before.get(key, moment) for key in found}
        self._standing = {key: self._finding(each, asked) for key, each in found.items() if key in before}
        with suppress(OSError, BslError):  # neither is worth an error: the next answer is kept again
            self._keep(asked)
        return set(self._last) != set(before)

    def _finding(self, each: Straggler, asked: Asked) -> RunFinding:
        attempt = self._watched.attempt
        name = attempt.name if attempt is not None else None
        key = f"{STRAGGLER}:{name}:{each.kind}:{each.ranks[0]}-{len(each.ranks)}"
        known = self._standing.get((each.kind, each.ranks))
        since = self._last[each.kind, each.ranks]
        lost = None if each.cost.share is None or asked.job is None else each.cost.share * len(asked.job.ranks)
        found = RunFinding(STRAGGLER, key, straggler_sentence(each, asked.topology), time.time(), name, since=since)
        last = asked.job.numbers[-1] if asked.job is not None else None
        return known or replace(found, step=last, details=(f"bsl slow {self._watched.argument}",), lost_ranks=lost)

    def _keep(self, asked: Asked) -> None:
        run, attempt = self._watched.run, self._watched.attempt
        if run is None or attempt is None:
            return
        if (picture := asked.picture) is not None:
            write_json(attempt.steps, asdict(picture))
        record = read_job(attempt)
        cluster = record.cluster if record is not None else None
        speeds = [
            NodeSpeed(cluster, node, run.name, attempt.name, longer, time.time())
            for node, longer in asked.speeds.items()
        ]
        if speeds:
            add_speeds(node_speeds(run.path.parent), speeds)
