"""Who accompanies the training of a rank, in which order. The only place that lets faults on purpose in."""

from __future__ import annotations

from collections.abc import Sequence

from bigsci_launch.train.guards.engine.companion import Checks
from bigsci_launch.train.guards.engine.watch import EngineGuards
from bigsci_launch.train.microbatch.automatic import AutoSize
from bigsci_launch.train.state.checkpoint import Origin
from bigsci_launch.train.steps.companion import Companion, RankSetup
from bigsci_launch.train.steps.dump import Dumps
from bigsci_launch.train.steps.garbage import Garbage
from bigsci_launch.train.steps.log import StepLog


def companions_of(setup: RankSetup, origin: Origin) -> list[Companion]:
    """Return the companions of a run. Each moment calls them from the first to the last, so:

    - Weights are dumped as the step leaves them, before a check looks at them.
    - The checks stand next to the engine: faults stand around them, and the agreement about memory around both, so
      that a rank that runs out of memory still makes the calls of all.
    - A step is judged before it is printed, and printed before its size of micro-batches changes.
    - The origin is the last: it keeps only what all others have let pass, and waits for its copies right before the
      ranks exchange their words.
    """
    config = setup.config
    checks = Checks(setup, _guards_of(setup))
    return [
        *([Dumps(setup)] if config.monitor.dump_weights_steps else []),
        checks,
        *([StepLog(setup)] if setup.tells else []),
        Garbage(freezes=config.survive is None),
        *_fault_injection(setup),
        *([AutoSize(setup, checks)] if config.training.micro_batch_size == "auto" else []),
        origin,
    ]


def _guards_of(setup: RankSetup) -> type[EngineGuards]:
    if setup.config.parallelism.engine == "deepspeed":
        return EngineGuards
    from bigsci_launch.train.uneven.guards import UnevenGuards

    return UnevenGuards


def _fault_injection(setup: RankSetup) -> Sequence[Companion]:
    if not setup.config.faults:
        return ()
    from bigsci_launch.train.fault_injection.faults import Faults

    return (Faults(setup),)
