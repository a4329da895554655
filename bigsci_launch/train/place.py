"""Where this process stands: its rank, as the launcher says it in the environment, and its run directory."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bigsci_launch.config.schema import RunConfig
from bigsci_launch.errors import ConfigError, Problem
from bigsci_launch.runs.layout import AttemptDir, RunDir
from bigsci_launch.topology import Topology

VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "BSL_RUN_DIR", "BSL_ATTEMPT")


@dataclass(frozen=True, slots=True)
class Place:
    """This rank among `world_size`, and the attempt that it belongs to."""

    rank: int
    world_size: int
    host: str
    node: str
    run: RunDir
    attempt: AttemptDir


def read_place(environ: Mapping[str, str]) -> Place:
    """This process's place.

    Raises:
        ConfigError: naming every variable that is missing or no number. Without them DeepSpeed would look for MPI.
    """
    problems = [Problem("environment", name, "is not set") for name in VARIABLES if not environ.get(name)]
    problems += [
        Problem("environment", name, f"is no number (got {environ[name]!r})")
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")
        if environ.get(name) and not environ[name].isdigit()
    ]
    if problems:
        raise ConfigError(
            f"{len(problems)} variables of a rank's environment are missing or wrong",
            problems=problems,
            hint="`bsl submit CONFIG --local` starts all ranks; under another launcher export these for each of them",
        )
    host = socket.gethostname()
    run = RunDir(Path(environ["BSL_RUN_DIR"]).resolve())
    return Place(
        rank=int(environ["RANK"]),
        world_size=int(environ["WORLD_SIZE"]),
        host=host,
        node=environ.get("SLURMD_NODENAME", host),
        run=run,
        attempt=run.attempt(environ["BSL_ATTEMPT"]),
    )


def this_place() -> Place:
    """The place of this very process.

    Raises:
        ConfigError: as `read_place`, or the attempt is not there: nothing must be made where a name is misspelt.
    """
    place = read_place(os.environ)
    if not place.attempt.path.is_dir():
        raise ConfigError(
            f"{place.attempt.path}: no such attempt",
            hint="`bsl submit` makes one; BSL_RUN_DIR and BSL_ATTEMPT, or --run-dir and --attempt, name it",
        )
    return place


def require_topology(config: RunConfig, world_size: int) -> Topology:
    """The topology of a run file on the ranks that were really started.

    Raises:
        ConfigError: they cannot be laid out.
    """
    parallelism = config.parallelism
    tp, pp = parallelism.tensor_parallel_size, parallelism.pipeline_parallel_size
    dp = parallelism.data_parallel_size or max(1, world_size // (tp * pp))
    if tp * pp * dp != world_size:
        raise ConfigError(
            f"parallelism: tp {tp} x pp {pp} x dp {dp} = {tp * pp * dp} ranks, but {world_size} were started",
            hint="start as many ranks as the run file asks for, or change parallelism.*",
        )
    return Topology(tp=tp, pp=pp, dp=dp)
