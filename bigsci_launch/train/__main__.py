"""Entry point of one rank: `python -m bigsci_launch.train`. No arguments: the launcher's environment says everything.

The exit status is 0 if the run or this attempt ended as requested, and otherwise the exit code of the error.
"""

from __future__ import annotations

import os

# Before anything imports numpy or torch: ranks that share a machine must not each start a thread per core.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# torch's C++ code warns about its own sockets and servers, on every rank.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import signal
import sys
import traceback

from bigsci_launch.config.load import load_resolved
from bigsci_launch.errors import BslError, ConfigError
from bigsci_launch.train.identity import RankIdentity, require_topology, this_rank
from bigsci_launch.train.rank_events import RankReport
from bigsci_launch.train.stop import SIGNALS, StopFlag


def main() -> None:
    """Run this rank until it finishes or fails."""
    try:
        identity = this_rank()
    except BslError as error:
        sys.exit(_explain(error))
    report, stop = RankReport(identity), StopFlag()
    try:
        reason = _train(identity, report, stop)
    except BaseException as error:
        report.fail(error)
        report.close()
        code = _explain(error)
        sys.stdout.flush()
        sys.stderr.flush()
        # An orderly teardown of the process group would wait for peers that are waiting for this rank.
        os._exit(code)
    report.end(reason)
    report.close()
    _leave()


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
        raise BslError(f"{error.name} is not installed", hint="pip install 'bigsci-launch[train]'") from error
    return train(config, topology, identity, report, stop)


def _leave() -> None:
    # The interpreter gives a signal its default action back while it ends, unless it is ignored: a request to stop that
    # comes now would kill a rank that has finished.
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    import torch.distributed as dist

    dist.destroy_process_group()


def _explain(error: BaseException) -> int:
    """Print `error` on stderr and return the exit status for it."""
    if isinstance(error, KeyboardInterrupt):
        return 130
    if not isinstance(error, BslError):
        traceback.print_exception(error)
        return 1
    problems = error.problems if isinstance(error, ConfigError) else ()
    for line in [str(problem) for problem in problems] or [error.message]:
        print(f"error: {line}", file=sys.stderr)
    if error.hint:
        print(f"hint: {error.hint}", file=sys.stderr)
    return error.exit_code


if __name__ == "__main__":
    main()
