"""A rank process of `bsl train` under `survive`: what it does in each of the generations that it outlives."""

from __future__ import annotations

import gc
from typing import Any

from bigsci_launch.config.load import load_resolved
from bigsci_launch.config.schema.run import RunConfig
from bigsci_launch.errors import INSTALL_TRAIN, BslError
from bigsci_launch.topology import Topology
from bigsci_launch.train.rank.events import RankReport
from bigsci_launch.train.rank.identity import require_topology, this_attempt, this_rank
from bigsci_launch.train.rank.stop import StopFlag, end_finished, leave
from bigsci_launch.train.survive.blocked import end_blocked_communication
from bigsci_launch.train.survive.channel import Begin, Channel, wait_for_store
from bigsci_launch.train.survive.outlive import end_with, outlive_generations


def live(descriptor: int) -> None:
    """Take part in generations until the run ends."""
    stop = StopFlag()
    channel = Channel(descriptor, end_blocked_communication)
    try:
        trainer = TrainerLives(channel, stop)
    except BslError as error:
        end_with(channel, error)
    outlive_generations(channel, trainer)
    leave()
    end_finished()


class TrainerLives:
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
            from bigsci_launch.train.survive.life import RankLife
            from bigsci_launch.train.survive.snapshot import Memory
            from bigsci_launch.train.survive.waits import Waits
        except ModuleNotFoundError as error:
            raise BslError(f"{error.name} is not installed", hint=INSTALL_TRAIN) from error
        self._waits = Waits(channel.is_over)
        self._waits.install()
        self._memory: Any = Memory()
        self._kind: Any = RankLife
        if self._config.parallelism.engine == "uneven":
            from bigsci_launch.train.uneven.life import KeptStages, UnevenLife

            self._memory, self._kind = KeptStages(), UnevenLife
        self._life: Any = None
        # What is imported stays: whoever leaves a generation collects what is left of it, and nothing else.
        gc.freeze()

    @property
    def done(self) -> int:
        done: int = self._memory.done
        return done

    def take_part(self, begin: Begin, report: RankReport) -> str:
        from bigsci_launch.train.loop import train

        topology = begin.topology
        config = _fitted(self._config, topology)
        identity = this_rank()
        require_topology(config, identity.world_size)
        self._life = self._kind(self._channel, self._memory, self._waits, begin, report)
        wait_for_store(begin, self._channel)
        reason = train(config, topology, identity, report, self._stop, self._life)
        self._life.finish()
        return reason

    def let_go(self) -> None:
        from bigsci_launch.train.survive.teardown import tear_down

        self._waits.keep_groups()
        engine = self._life.engine if self._life else None
        self._life = None
        tear_down(engine)


def _fitted(config: RunConfig, topology: Topology) -> RunConfig:
    """Return the run file for the replicas of a generation."""
    if config.parallelism.engine == "uneven":
        return config
    parallelism = config.parallelism.model_copy(update={"data_parallel_size": topology.dp})
    return config.model_copy(update={"parallelism": parallelism})
