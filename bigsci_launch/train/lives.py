"""A rank process under `survive`: it outlives generations, and takes part in each as the rank that it is given.

A generation that is over, or whose peers are gone, is left: groups are torn down, and the process waits for the next.
Any other error ends the process as it always does; what it means is for the controller to decide.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, NoReturn

from bigsci_launch.config.load import load_resolved
from bigsci_launch.config.schema.run import RunConfig
from bigsci_launch.errors import INSTALL_TRAIN, BslError
from bigsci_launch.topology import Topology
from bigsci_launch.train.rank.events import RankReport, is_lost_peer
from bigsci_launch.train.rank.identity import require_topology, this_attempt, this_rank
from bigsci_launch.train.rank.stop import StopFlag, drop_frames, end_at_once, end_finished, leave
from bigsci_launch.train.survive.blocked import end_blocked_communication
from bigsci_launch.train.survive.channel import Begin, Channel, wait_for_store

if TYPE_CHECKING:
    from bigsci_launch.train.survive.life import RankLife

GRACE_S = 0.2
FINAL_GRACE_S = 2.0
"""Seconds in which the generation may turn out to be over before an error is taken for this rank's own. What a lost
peer leaves can look like anything; a final error ends the whole job, so there is more time for it."""


def live(descriptor: int) -> None:
    """Take part in generations until the run ends."""
    stop = StopFlag()
    channel = Channel(descriptor, end_blocked_communication)
    try:
        survivor = Survivor(channel, stop)
    except BslError as error:
        _end(channel, error)
    channel.say("warm")
    while not survivor.finishes(channel.wait_for_begin()):
        pass
    # Without this word, a process that ends with 0 has left in the middle.
    channel.say("finished")
    leave()
    end_finished()


class Survivor:
    """What outlives generations: the imports, the copies of states, and the request to stop."""

    def __init__(self, channel: Channel, stop: StopFlag) -> None:
        self._channel, self._stop = channel, stop
        self._config = load_resolved(this_attempt().config)
        try:
            from bigsci_launch.train import startup

            startup.start_torch(self._config.training)
            startup.start_deepspeed()
            # The first backward pass would import it, and sympy with it.
            import torch.fx.experimental.symbolic_shapes  # noqa: F401

            import bigsci_launch.train.loop  # noqa: F401
            from bigsci_launch.train.survive.snapshot import Memory
            from bigsci_launch.train.survive.waits import Waits
        except ModuleNotFoundError as error:
            raise BslError(f"{error.name} is not installed", hint=INSTALL_TRAIN) from error
        self._memory, self._waits = Memory(), Waits(channel.is_over)
        self._life: RankLife | None = None

    def finishes(self, begin: Begin) -> bool:
        """Take part in a generation, and return whether the run has ended with it. If not, this process has left it."""
        os.environ.update(begin.environment)
        report = RankReport(this_rank())
        try:
            reason = self._train(begin, report)
        except BaseException as error:
            self._require_left(begin, report, error)
            failure = error
        else:
            report.end(reason)
            report.close()
            return True
        started = time.monotonic()
        self._leave(failure)
        report.event("left", generation=begin.generation)
        report.close()
        seconds = round(time.monotonic() - started, 4)
        self._channel.say("left", generation=begin.generation, step=self._memory.done, seconds=seconds)
        return False

    def _train(self, begin: Begin, report: RankReport) -> str:
        from bigsci_launch.train.loop import train
        from bigsci_launch.train.survive.life import RankLife

        topology = begin.topology
        config = _fitted(self._config, topology)
        identity = this_rank()
        require_topology(config, identity.world_size)
        report.start(topology.coordinate(identity.rank))
        report.event("generation", generation=begin.generation, topology=topology.as_dict())
        report.phase("init")
        self._life = RankLife(self._channel, self._memory, self._waits, begin, report)
        wait_for_store(begin, self._channel)
        reason = train(config, topology, identity, report, self._stop, self._life)
        self._life.finish()
        return reason

    def _require_left(self, begin: Begin, report: RankReport, error: BaseException) -> None:
        """Return if `error` only says that the generation is over; otherwise end the process."""
        is_lost = _says_lost(error)
        grace = 0.0 if is_lost else FINAL_GRACE_S if isinstance(error, BslError) else GRACE_S
        if self._channel.is_over(grace):
            return
        report.fail(error)
        if not is_lost:
            report.close()
            _end(self._channel, error)
        self._channel.say("lost", generation=begin.generation, text=f"{type(error).__name__}: {error}"[:500])

    def _leave(self, failure: BaseException) -> None:
        from bigsci_launch.train.survive.teardown import tear_down

        # Ranks that wait for this one, and not for the one that is lost, are freed as well.
        end_blocked_communication()
        drop_frames(failure)
        self._waits.keep_groups()
        engine = self._life.engine if self._life else None
        self._life = None
        tear_down(engine)
        self._channel.wait_for_end()
        self._channel.leave()


def _fitted(config: RunConfig, topology: Topology) -> RunConfig:
    """Return the run file for the replicas of a generation."""
    parallelism = config.parallelism.model_copy(update={"data_parallel_size": topology.dp})
    return config.model_copy(update={"parallelism": parallelism})


def _says_lost(error: BaseException) -> bool:
    import torch.distributed as dist

    return is_lost_peer(error) or isinstance(error, dist.DistError)


def _end(channel: Channel, error: BaseException) -> NoReturn:
    if isinstance(error, BslError):
        channel.say("final", text=error.message)
    end_at_once(error)
