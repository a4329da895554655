"""A process that outlives generations: it takes part in each as the rank that it is given.

A generation that is over, or whose peers are gone, is left: groups are torn down, and the process waits for the next.
Any other error ends the process as it always does; what it means is for the controller to decide.
"""

from __future__ import annotations

import os
import time
from typing import NoReturn, Protocol

from bigsci_launch.errors import BslError
from bigsci_launch.train.rank.events import RankReport, is_lost_peer
from bigsci_launch.train.rank.identity import this_rank
from bigsci_launch.train.rank.stop import drop_frames, end_at_once
from bigsci_launch.train.survive.blocked import end_blocked_communication
from bigsci_launch.train.survive.channel import Begin, Channel

GRACE_S = 0.2
FINAL_GRACE_S = 2.0
"""Seconds in which the generation may turn out to be over before an error is taken for this rank's own. What a lost
peer leaves can look like anything; a final error ends the whole job, so there is more time for it."""


class Participant(Protocol):
    """What a rank does in a generation."""

    @property
    def done(self) -> int:
        """The last step that this process has finished, or restored."""

    def take_part(self, begin: Begin, report: RankReport) -> str:
        """Train in a generation, and return why the run has ended with it."""

    def let_go(self) -> None:
        """Tear down what belongs to the generation, which is over; nothing may wait for a peer."""


def outlive_generations(channel: Channel, participant: Participant) -> None:
    """Take part in generations until the run ends."""
    channel.say("warm")
    while not _finishes(channel, participant):
        pass
    # Without this word, a process that ends with 0 has left in the middle.
    channel.say("finished")


def _finishes(channel: Channel, participant: Participant) -> bool:
    """Take part in a generation, and return whether the run has ended with it. If not, this process has left it."""
    begin = channel.wait_for_begin()
    os.environ.update(begin.environment)
    report = RankReport(this_rank())
    try:
        report.start(begin.topology.coordinate(begin.rank))
        report.event("generation", generation=begin.generation, topology=begin.topology.as_dict())
        report.phase("init")
        reason = participant.take_part(begin, report)
    except BaseException as error:
        _require_left(channel, begin, report, error)
        failure = error
    else:
        report.end(reason)
        report.close()
        return True
    started = time.monotonic()
    # A process that is out of its step may wait for a CPU; one that hangs never says this.
    channel.say("leaving")
    # Ranks that wait for this one, and not for the one that is lost, are freed as well.
    end_blocked_communication()
    drop_frames(failure)
    channel.say("leaving")
    participant.let_go()
    channel.wait_for_end()
    channel.leave()
    report.event("left", generation=begin.generation)
    report.close()
    seconds = round(time.monotonic() - started, 4)
    channel.say("left", generation=begin.generation, step=participant.done, seconds=seconds)
    return False


def _require_left(channel: Channel, begin: Begin, report: RankReport, error: BaseException) -> None:
    """Return if `error` only says that the generation is over; otherwise end the process."""
    is_lost = _says_lost(error)
    grace = 0.0 if is_lost else FINAL_GRACE_S if isinstance(error, BslError) else GRACE_S
    if channel.is_over(grace):
        return
    report.fail(error)
    if not is_lost:
        report.close()
        end_with(channel, error)
    channel.say("lost", generation=begin.generation, text=f"{type(error).__name__}: {error}"[:500])


def _says_lost(error: BaseException) -> bool:
    import torch.distributed as dist

    return is_lost_peer(error) or isinstance(error, dist.DistError)


def end_with(channel: Channel, error: BaseException) -> NoReturn:
    """End the process for an error of its own; one of ours would come again in every generation."""
    if isinstance(error, BslError):
        channel.say("final", text=error.message)
    end_at_once(error)
