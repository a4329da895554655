"""Entry point of one rank: `python -m bigsci_launch.train`. No arguments: the launcher's environment says everything.

The exit status is 0 if the run or this attempt ended as requested, and otherwise the exit code of the error.
"""

from __future__ import annotations

import os

# Before anything imports numpy or torch: ranks that share a machine must not each start a thread per core.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# torch's C++ code warns about its own sockets and servers, on every rank.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import sys

from bigsci_launch.config.load import load_resolved
from bigsci_launch.errors import INSTALL_TRAIN, BslError
from bigsci_launch.train.rank.events import RankReport
from bigsci_launch.train.rank.identity import RankIdentity, require_topology, this_rank
from bigsci_launch.train.rank.stop import StopFlag, end_at_once, end_finished, explain, leave


def main() -> None:
    """Run this rank until it finishes or fails. With `survive`, its process outlives generations of ranks.

    No other user may write its checkpoints, whatever the umask: they would decide what the next attempt trains.
    """
    os.umask(os.umask(0o077) | 0o022)
    if slot := os.environ.get("BSL_SLOT_FD"):
        from bigsci_launch.train.lives import live

        live(int(slot))
        return
    try:
        identity = this_rank()
    except BslError as error:
        sys.exit(explain(error))
    report, stop = RankReport(identity), StopFlag()
    try:
        reason = _train(identity, report, stop)
    except BaseException as error:
        report.fail(error)
        report.close()
        end_at_once(error)
    report.end(reason)
    report.close()
    leave()
    end_finished()


def _train(identity: RankIdentity, report: RankReport, stop: StopFlag) -> str:
    config = load_resolved(identity.attempt.config)
    topology = require_topology(config, identity.world_size)
    report.start(topology.coordinate(identity.rank))
    report.phase("init")
    # Imported late: a wrong config must fail before torch takes seconds to import.
    try:
        from bigsci_launch.train import startup

        startup.start_torch(config.training)
        startup.start_deepspeed()
        from bigsci_launch.train.loop import train
    except ModuleNotFoundError as error:
        raise BslError(f"{error.name} is not installed", hint=INSTALL_TRAIN) from error
    return train(config, topology, identity, report, stop)


if __name__ == "__main__":
    main()
