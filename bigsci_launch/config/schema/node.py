"""What a site or a run prepares on each node: the container of the ranks, resource limits, files on local disks."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, model_validator

from bigsci_launch.config.schema.options import LongOption, SrunOptions
from bigsci_launch.config.schema.section import Section
from bigsci_launch.config.schema.values import Word

Limit = Literal["unlimited"] | NonNegativeInt


class ResourceLimits(Section):
    """Soft resource limits of the ranks, as bash's `ulimit` takes them. What is left out stays as it is. A job whose
    node refuses one ends before the ranks start."""

    core: Limit | None = None
    """Largest core file, KiB; 0: none is written."""

    memlock: Limit | None = None
    """Memory that a rank may lock, KiB. InfiniBand needs `unlimited`."""

    nofile: Limit | None = None
    """Open files."""

    nproc: Limit | None = None
    """Processes and threads of the user on a node."""

    stack: Limit | None = None
    """Largest stack, KiB."""

    @property
    def given(self) -> dict[str, str]:
        """Return the limits that are set, by name."""
        return {name: str(value) for name, value in self if value is not None}


class Container(Section):
    """The container in which ranks run. The run directory, the working directory and the dataset's folder are mounted,
    and ranks start in the working directory."""

    kind: Literal["pyxis", "apptainer"]
    """`pyxis`: srun's own options (`--container-image`). `apptainer`: `apptainer exec` before the program."""

    command: Word = "apptainer"
    """The program of the kind `apptainer`: `singularity` on sites where that is its name."""

    image: str | None = None
    """Image file or name, for runs without `slurm.container_image`."""

    optional: bool = False
    """Whether the ranks of a run without an image run without the container, instead of a refusal."""

    mounts: list[str] = []
    """Further bind mounts, `HOST[:CONTAINER]`."""

    mount_home: bool | None = None
    """Whether the home directory is mounted; default: whatever the site has configured."""

    options: list[LongOption] | None = None
    """Further options: of `apptainer exec`, or of srun with `pyxis` (`--container-name=NAME`). Default: `--nv` or
    `--rocm`, by `gpu.vendor`, with `apptainer`; nothing with `pyxis`. `[]` means none."""

    @model_validator(mode="after")
    def _fits_its_kind(self) -> Container:
        if self.kind == "pyxis":
            if "command" in self.model_fields_set:
                raise ValueError("`command` is for kind apptainer: pyxis is part of srun")
            _PyxisOptions(options=self.options or [])
        return self


class _PyxisOptions(Section):
    """Options of pyxis, which srun gets next to those that `bsl` writes."""

    options: SrunOptions


class StageIn(Section):
    """A file that is copied to every node before the ranks start (`sbcast`). A site's list applies to runs that have
    none."""

    file: str
    """The file. A relative path starts at the folder in which `bsl` is called."""

    to: Annotated[str, Field(pattern=r"^/")]
    """Path of the copy on each node, absolute. `%j` becomes the job's ID, `%u` the user's name."""
