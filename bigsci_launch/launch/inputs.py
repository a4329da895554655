"""What `bsl train` needs before its ranks start, as far as this machine can know: the dataset, and torch."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from bigsci_launch.config.load import LoadedRun
from bigsci_launch.config.schema.run import RunConfig
from bigsci_launch.errors import INSTALL_TRAIN, BslError, ConfigError, Problem
from bigsci_launch.launch.job.request import JobRequest


def require_inputs(loaded: LoadedRun, request: JobRequest, *, force: bool) -> None:
    """Refuse what the ranks would refuse after their start, or after a wait in the queue.

    Raises:
        ConfigError: the dataset is missing, and it is not only this machine that does not see it. With `force`, a job
            is submitted all the same.
        BslError: the ranks start here, and their Python has no torch or no deepspeed.
    """
    is_local = request.scheduler == "local"
    missing = missing_data(loaded.config)
    if missing and (is_local or (not force and is_seen_by_nodes(loaded.config, request))):
        where = loaded.origins.get("data.prefix", "")
        hint = prepare_hint(loaded.config) + ("" if is_local else "; --force submits anyway")
        problem = Problem(where, "data.prefix", f"{missing}: no such file")
        raise ConfigError(str(problem), problems=[problem], hint=hint)
    if is_local and (packages := missing_packages(loaded.config, request)):
        raise BslError(
            f"{packages[0]} is not installed in {request.rank_python}, the Python of the ranks", hint=INSTALL_TRAIN
        )


def missing_data(config: RunConfig) -> str | None:
    """Return the file of the dataset that is not on this machine; None if all are, or the program is another."""
    files = (f"{config.data.prefix}.bin", f"{config.data.prefix}.idx") if config.run.starts_trainer else ()
    return next((name for name in files if not Path(name).exists()), None)


def prepare_hint(config: RunConfig) -> str:
    return f"`bsl data prepare DIR --output {config.data.prefix}` makes a dataset"


def is_seen_by_nodes(config: RunConfig, request: JobRequest) -> bool:
    """Return whether the nodes of a job see the folder of the dataset as this machine does, for certain: it is on the
    file system of the run, and nothing makes or mounts the files before the ranks start."""
    slurm, folder = config.slurm, Path(config.data.prefix).parent
    if slurm.stage_in or slurm.dependency or slurm.container_image or request.activation or not folder.is_dir():
        return False
    root = next(parent for parent in request.run.path.parents if parent.exists())
    return folder.stat().st_dev == root.stat().st_dev


def missing_packages(config: RunConfig, request: JobRequest) -> list[str]:
    """Return which packages of `bsl train` its ranks will not find; none if they have another Python or path than
    `bsl`, where that is not known."""
    is_known = config.run.starts_trainer and not request.command and request.rank_python == request.host_python
    if not is_known or "PYTHONPATH" in config.env:
        return []
    return [name for name in ("torch", "deepspeed") if find_spec(name) is None]
