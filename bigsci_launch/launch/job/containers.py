"""The container of the ranks as options of srun, or as words before the program."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from bigsci_launch.config.load import LoadedRun
from bigsci_launch.config.schema.node import Container
from bigsci_launch.launch.job.options import Option, parse_option
from bigsci_launch.runs.layout import RunDir

VENDOR_OPTIONS = {"nvidia": "--nv", "amd": "--rocm"}


@dataclass(frozen=True, slots=True)
class RankContainer:
    """A site's container with the image and the mounts of one run."""

    container: Container
    image: str
    mounts: tuple[str, ...]
    working_directory: Path
    options: tuple[str, ...]
    """The further options of the container, as they are written."""


def container_of(loaded: LoadedRun, run: RunDir, working_directory: Path) -> RankContainer | None:
    """Return the container of the run's ranks; None if they run without one."""
    container, image = loaded.site.config.container, loaded.config.slurm.container_image
    if container is None or image is None:
        return None
    folders = unnested([run.path, working_directory, *_dataset_folder(loaded, working_directory)])
    return RankContainer(
        container=container,
        image=image,
        mounts=(*(f"{folder}:{folder}" for folder in folders), *container.mounts),
        working_directory=working_directory,
        options=_options_of(container, loaded),
    )


def _dataset_folder(loaded: LoadedRun, working_directory: Path) -> list[Path]:
    if not loaded.config.describes("data"):
        return []
    return [working_directory / PurePosixPath(loaded.config.data.prefix).parent]


def _options_of(container: Container, loaded: LoadedRun) -> tuple[str, ...]:
    gpu = loaded.site.config.gpu
    if container.options is not None:
        return tuple(container.options)
    return (VENDOR_OPTIONS[gpu.vendor],) if gpu is not None and container.kind == "apptainer" else ()


def unnested(folders: Iterable[Path]) -> list[Path]:
    """Return the folders that are in no other one. The root is left out: a container has its own."""
    kept: list[Path] = []
    for folder in sorted({folder for folder in folders if folder != Path("/")}):
        if not any(folder.is_relative_to(outer) for outer in kept):
            kept.append(folder)
    return kept


def pyxis_options(container: RankContainer | None, variables: Iterable[str]) -> tuple[Option, ...]:
    """Return srun's options for a pyxis container. `variables` are those that the job script exports."""
    if container is None or container.container.kind != "pyxis":
        return ()
    home = {True: ("container-mount-home",), False: ("no-container-mount-home",), None: ()}
    return (
        Option("container-image", container.image),
        Option(
            "container-mounts",
            ",".join(container.mounts),
            "the config, the runner and all records are in the run directory; relative paths and data in the others",
        ),
        Option("container-workdir", str(container.working_directory), "where bsl was called, as without a container"),
        Option("container-env", ",".join(variables), "otherwise values from the image would replace these"),
        *(Option(name) for name in home[container.container.mount_home]),
        *(parse_option(text) for text in container.options),
    )


def apptainer_prefix(container: RankContainer | None) -> tuple[str, ...]:
    """Return the words before the program for a container of apptainer or singularity."""
    if container is None or container.container.kind != "apptainer":
        return ()
    home = ("--no-home",) if container.container.mount_home is False else ()
    binds = (f"--bind={mount}" for mount in container.mounts)
    return (
        *(container.container.command, "exec", *home, *container.options, *binds),
        *(f"--pwd={container.working_directory}", container.image),
    )
