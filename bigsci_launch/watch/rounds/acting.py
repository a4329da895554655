"""What a watcher that may act does after a round. What cannot be written down is not done."""

from __future__ import annotations

import time
from collections.abc import Iterable
from functools import partial

from bigsci_launch.errors import BslError
from bigsci_launch.progress import Report
from bigsci_launch.runs.layout import AttemptDir, RunDir
from bigsci_launch.runs.watching.ledger import RunFinding
from bigsci_launch.scheduler.slurm import partition_nodes
from bigsci_launch.watch.act.actions import end_hang, finish_end, pin_around
from bigsci_launch.watch.act.fence import ask_controller, follow_recovery, recovery_request
from bigsci_launch.watch.act.jobs import end_ranks, kill_ranks
from bigsci_launch.watch.facts.stalls import STALL
from bigsci_launch.watch.rounds.one_attempt import AttemptWatch, WatchRound
from bigsci_launch.watch.rounds.open_findings import SPIKES

STALLS = ("hang", "dead")


class Acting:
    """Acts as `who`. `say` gets what was done, and once why nothing was."""

    def __init__(self, who: str, say: Report) -> None:
        self._who = who
        self._say = say
        self._undone = self._asked = ""

    def act(self, now: AttemptWatch, seen: WatchRound, findings: Iterable[RunFinding]) -> None:
        """Do what may be done after the round `seen` of an attempt; `findings` are open."""
        run, attempt = now.watched.run, now.watched.attempt
        if run is None or attempt is None:
            return
        try:
            for finding in findings:
                if finding.kind in SPIKES and finding.step is not None:
                    self._say_all(pin_around(run, self._who, finding))
            if seen.view.is_running:
                self._say_all([finish_end(run, attempt, partial(kill_ranks, attempt), time.time())])
                if (survive := now.survives) is not None:
                    self._recover(run, attempt, now, seen, begins_again=survive.on_unexplained_hang == "restart")
                else:
                    self._end_hang(run, attempt, now, seen)
            self._undone = ""
        except (BslError, OSError) as error:
            if str(error) != self._undone:
                self._say(f"nothing was done: {error}")
            self._undone = str(error)

    def _end_hang(self, run: RunDir, attempt: AttemptDir, now: AttemptWatch, seen: WatchRound) -> None:
        stalled = next((each for each in seen.standing if each.kind in STALLS and each.key.startswith(STALL)), None)
        if stalled is None or not now.stalls.may_act(seen.silence):
            return
        if now.read(time.monotonic()):
            return  # it moves after all
        nodes, why_not = _nodes_to_leave_out(now, seen)
        self._say_all([end_hang(run, attempt, self._who, stalled, nodes, partial(end_ranks, attempt)), why_not])

    def _recover(
        self, run: RunDir, attempt: AttemptDir, now: AttemptWatch, seen: WatchRound, *, begins_again: bool
    ) -> None:
        """Have the controller of `survive` fence the rank that holds up the others. Without a suspect nothing is
        killed, unless the run file allows it."""
        generations, stalls = now.generations, now.stalls
        if generations is None or (found := generations.found) is None:
            return
        self._say_all(follow_recovery(run, attempt, found, time.time()))
        stalled = next((each for each in seen.standing if each.key.startswith(STALL)), None)
        if stalled is None or (look := stalls.look) is None or found.newest.is_disturbed or generations.is_ending:
            return
        is_certain = stalled.kind in STALLS and bool(look.suspects) and stalls.may_act(seen.silence)
        if not (is_certain or (begins_again and stalls.is_unexplained(seen.silence))):
            return
        if now.read(time.monotonic()):
            return  # it moves after all
        taking_part = [rank for rank in look.suspects if found.has(rank)]
        if taking_part or (begins_again and not look.suspects):
            number, why, is_stopped = found.newest.number, look.sentence, look.is_stopped
            request = recovery_request(attempt, self._who, number, taking_part, why, is_stopped=is_stopped)
            self._say_new_act(ask_controller(run, attempt, stalled, request))

    def _say_new_act(self, words: str) -> None:
        if words != self._asked:
            self._say_all([words])
        self._asked = words or self._asked

    def _say_all(self, lines: Iterable[str]) -> None:
        for words in lines:
            if words:
                self._say(words)


def _nodes_to_leave_out(now: AttemptWatch, seen: WatchRound) -> tuple[tuple[str, ...], str]:
    """Return the node of the suspects, if it may be the cause and another can take its place; else why not."""
    look, job = now.stalls.look, seen.view.job
    if look is None or len(look.nodes) != 1 or now.watched.is_local:
        return (), ""
    node = look.nodes[0]
    try:
        num_nodes = len(partition_nodes(job.partition or None))
    except BslError as error:
        return (), f"{node} is not left out: cannot determine whether there are other nodes: {error.message}"
    if num_nodes <= (job.num_nodes or 0):
        return (), f"{node} is not left out: partition {job.partition} has no other node"
    return look.nodes, ""
