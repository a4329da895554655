"""`bsl train`: run one rank. The job script starts it in every task."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click


@click.command(epilog="Example: srun bsl train --run-dir runs/demo --attempt 0001")
@click.option("--run-dir", type=click.Path(path_type=Path), help="The run directory; default: $BSL_RUN_DIR.")
@click.option("--attempt", help="The attempt, such as 0001; default: $BSL_ATTEMPT.")
def train(run_dir: Path | None, attempt: str | None) -> None:
    """Run one rank of a training run.

    `bsl submit` starts it on every rank. It reads the attempt's resolved config, and finds its place from RANK,
    LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. On SIGUSR2 or SIGTERM, it saves at the next step boundary and
    exits with 0.
    """
    from bigsci_launch.content import module_argv

    if run_dir is not None:
        os.environ["BSL_RUN_DIR"] = str(run_dir.absolute())
    if attempt is not None:
        os.environ["BSL_ATTEMPT"] = attempt
    # The rank replaces this process, so the PID that the launcher recorded is that of the process that trains.
    os.execv(sys.executable, module_argv(sys.executable, "bigsci_launch.train"))
