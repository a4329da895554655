"""This process among the ranks of a run: its rank and run directory, from the environment the launcher sets."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bigsci_launch.config.check import TRAINER_KNOWS, foreign_axes
from bigsci_launch.config.schema.run import RunConfig
from bigsci_launch.errors import ConfigError, Problem
from bigsci_launch.runs.layout import AttemptDir, RunDir
from bigsci_launch.topology import Topology

VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "BSL_RUN_DIR", "BSL_ATTEMPT")


@dataclass(frozen=True, slots=True)
class RankIdentity:
    """This rank among `world_size` ranks, and the attempt it belongs to."""

    rank: int
    world_size: int
    host: str
    node: str
    run: RunDir
    attempt: AttemptDir


def parse_identity(environ: Mapping[str, str]) -> RankIdentity:
    """Return this process's identity, from its environment.

    Raises:
        ConfigError: names every variable that is missing or not a number. Without them DeepSpeed would look for MPI.
    """
    problems = [Problem("environment", name, "is not set") for name in VARIABLES if not environ.get(name)]
    problems += [
        Problem("environment", name, f"is not a number (got {environ[name]!r})")
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")
        if environ.get(name) and not environ[name].isdigit()
    ]
    if problems:
        raise ConfigError(
            f"{len(problems)} variables of a rank's environment are missing or wrong",
            problems=problems,
            hint="`bsl submit CONFIG --local` starts all ranks; with another launcher, export these for each rank",
        )
    host = socket.gethostname()
    run = RunDir(Path(environ["BSL_RUN_DIR"]).resolve())
    return RankIdentity(
        rank=int(environ["RANK"]),
        world_size=int(environ["WORLD_SIZE"]),
        host=host,
        node=environ.get("SLURMD_NODENAME", host),
        run=run,
        attempt=run.attempt(environ["BSL_ATTEMPT"]),
    )


def this_rank() -> RankIdentity:
    """Return the identity of the current process.

    Raises:
        ConfigError: as in `parse_identity`, or the attempt does not exist: a misspelt name must not create a directory.
    """
    identity = parse_identity(os.environ)
    if not identity.attempt.path.is_dir():
        raise ConfigError(
            f"{identity.attempt.path}: no such attempt",
            hint="`bsl submit` creates it; BSL_RUN_DIR and BSL_ATTEMPT, or --run-dir and --attempt, name it",
        )
    return identity


def this_attempt() -> AttemptDir:
    """Return the attempt that the current process belongs to, before it has a rank.

    Raises:
        ConfigError: the environment does not name it.
    """
    missing = [name for name in ("BSL_RUN_DIR", "BSL_ATTEMPT") if not os.environ.get(name)]
    if missing:
        raise ConfigError(
            f"{' and '.join(missing)} not set", hint="`bsl submit CONFIG` starts ranks with all they need"
        )
    return RunDir(Path(os.environ["BSL_RUN_DIR"]).resolve()).attempt(os.environ["BSL_ATTEMPT"])


def require_topology(config: RunConfig, world_size: int) -> Topology:
    """Return the topology of a run file on the ranks that were actually started.

    Raises:
        ConfigError: the run file asks for another number of ranks.
    """
    if foreign := foreign_axes(config):
        raise ConfigError(f"parallelism.{foreign[0].key}: {TRAINER_KNOWS}", hint="set it to 1")
    topology = config.parallelism.topology(world_size)
    if topology.world_size != world_size:
        raise ConfigError(
            f"parallelism: {topology.product} = {topology.world_size} ranks, but {world_size} were started",
            hint="start as many ranks as the run file asks for, or change parallelism.*",
        )
    return topology
