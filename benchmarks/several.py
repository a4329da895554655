"""Runs several attempts in turn on the same ranks: `python -m several RUN/ATTEMPT...`.

Used by tests and benchmarks where starting ranks would cost more than training them. Each attempt trains like `bsl
train` and writes the same files. An attempt that fails in the same way on all ranks is followed by the next one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path


def main(prepare: Callable[[], object] = lambda: None) -> None:
    """Run the attempts whose folders are on the command line, all on the device of the first one.

    `prepare` is called before the first of them, once DeepSpeed is started: it may change the trainer.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from bigsci_launch.config.load import load_resolved
    from bigsci_launch.runs.layout import AttemptDir
    from bigsci_launch.train import startup

    startup.start_torch(load_resolved(AttemptDir(Path(sys.argv[1])).config).training)
    startup.start_deepspeed()
    prepare()
    for name in sys.argv[1:]:
        os.environ["BSL_RUN_DIR"], os.environ["BSL_ATTEMPT"] = str(Path(name).parent.parent), Path(name).name
        train_one()
    import torch.distributed as dist

    dist.destroy_process_group()


def train_one() -> None:
    """Train the attempt that the environment names, as `bsl train` would; a collective call of all ranks."""
    from bigsci_launch.config.load import load_resolved
    from bigsci_launch.errors import BslError
    from bigsci_launch.train.loop import train
    from bigsci_launch.train.rank.events import RankReport
    from bigsci_launch.train.rank.identity import require_topology, this_rank
    from bigsci_launch.train.rank.stop import StopFlag

    identity = this_rank()
    config = load_resolved(identity.attempt.config)
    topology = require_topology(config, identity.world_size)
    report = RankReport(identity)
    report.start(topology.coordinate(identity.rank))
    try:
        report.end(train(config, topology, identity, report, StopFlag()))
    except BslError as error:
        report.fail(error)
    finally:
        report.close()


if __name__ == "__main__":
    main()
    from bigsci_launch.train.rank.stop import end_finished

    end_finished()
