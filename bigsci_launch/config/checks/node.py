"""Rules about what a site prepares on its nodes for a run: containers, NVLink domains, and the signal to stop."""

from __future__ import annotations

from collections.abc import Iterator

from bigsci_launch.config.finding import TP, Finding
from bigsci_launch.config.schema.options import name_of
from bigsci_launch.config.schema.run import RunConfig
from bigsci_launch.config.site import Site

TRAINER_SIGNALS = ("USR2", "TERM")
"""What `bsl train` takes as the request to save and stop."""


def check_segment(config: RunConfig, site: Site) -> Iterator[Finding]:
    """`--segment`, if it is given, holds whole tensor-parallel groups."""
    span = config.parallelism.tensor_parallel_size // site.config.ranks_per_node
    for key, options in (
        ("slurm.sbatch_options", config.slurm.sbatch_options),
        ("site.sbatch_options", site.config.sbatch_options),
    ):
        for option in options:
            size = option.partition("=")[2]
            if name_of(option) == "--segment" and span > 1 and size.isdigit() and int(size) % span:
                text = f"{option} is not a multiple of the {span} nodes of a tensor-parallel group, which may be split"
                yield Finding("segment", "error", (key, TP), text)


def check_container(config: RunConfig, site: Site) -> Iterator[Finding]:
    """There is an image exactly if ranks run in a container."""
    key, image = "slurm.container_image", config.slurm.container_image
    if site.is_local:
        return
    container = site.config.container
    if container is None and image is not None:
        text = f"site {site.name} runs ranks without a container; give a copy of its file a `container` with the kind"
        yield Finding("container", "error", (key, "slurm.site"), text)
    elif container is not None and image is None and not container.optional:
        text = f"site {site.name} runs ranks in a container but names no image: set {key}"
        yield Finding("container", "error", (key, "slurm.site"), text)


def check_stop_signal(config: RunConfig, site: Site) -> Iterator[Finding]:
    """`bsl train` stops on the signal that it gets."""
    stop = config.run.stop_signal
    if config.run.starts_trainer and stop not in TRAINER_SIGNALS:
        text = f"bsl train does not save on {stop}: leave it out; it is for a program in run.command"
        yield Finding("stop_signal", "error", ("run.stop_signal", "run.command"), text)


def check_survive(config: RunConfig, _site: Site) -> Iterator[Finding]:
    """A run that survives keeps its global batch size, so it names it."""
    if config.survive is not None and not config.describes("training"):
        text = "the replicas that are left keep the global batch size: describe it in the section `training`"
        yield Finding("survive", "error", ("survive", "training"), text)


def check_spare_nodes(config: RunConfig, _site: Site) -> Iterator[Finding]:
    """Spare nodes are used only with `survive`."""
    spares = config.slurm.spare_nodes
    if spares and config.survive is None:
        named = "1 spare node" if spares == 1 else f"{spares} spare nodes"
        text = (
            f"{named} would have no effect: without survive, a job that loses a node ends; set survive: true, or "
            "leave them out"
        )
        yield Finding("spare_nodes", "error", ("slurm.spare_nodes", "survive"), text)
