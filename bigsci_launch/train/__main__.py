"""One rank: `python -m bigsci_launch.train`. No arguments; the launcher's environment says everything.

Exit status: 0 when the training or this attempt of it ended as it was asked to; that of the error otherwise.
"""

from __future__ import annotations

import os

# Before anything imports numpy or torch: ranks that share a machine must not each start a thread per core.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# torch's C++ side warns of its own doings (sockets, servers) on every rank.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import sys
import traceback

from bigsci_launch.config.load import load_resolved
from bigsci_launch.errors import BslError, ConfigError
from bigsci_launch.train.place import Place, require_topology, this_place
from bigsci_launch.train.rank_events import RankReport
from bigsci_launch.train.stop import StopFlag


def main() -> None:
    """Run this rank to its end."""
    try:
        place = this_place()
    except BslError as error:
        sys.exit(_explain(error))
    report, stop = RankReport(place), StopFlag()
    try:
        reason = _train(place, report, stop)
    except BaseException as error:
        report.fail(error)
        report.close()
        code = _explain(error)
        sys.stdout.flush()
        sys.stderr.flush()
        # Torn down in order, the process group would wait for peers that wait for this rank.
        os._exit(code)
    report.end(reason)
    report.close()
    _leave()


def _train(place: Place, report: RankReport, stop: StopFlag) -> str:
    config = load_resolved(place.attempt.config)
    topology = require_topology(config, place.world_size)
    report.start(topology.coordinate(place.rank))
    report.phase("init")
    # Only now: a wrong config must not cost the seconds that torch takes to import.
    try:
        from bigsci_launch.train import startup

        startup.start_torch()
        startup.start_deepspeed()
        from bigsci_launch.train.loop import train
    except ModuleNotFoundError as error:
        raise BslError(f"{error.name} is not installed", hint="pip install 'bigsci-launch[train]'") from error
    return train(config, topology, place, report, stop)


def _leave() -> None:
    import torch.distributed as dist

    dist.destroy_process_group()


def _explain(error: BaseException) -> int:
    """Print `error` on stderr; the exit status that it asks for."""
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
