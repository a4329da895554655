"""Sites, the clusters that `bsl` knows: finding a site file, reading it, and placing a run on its nodes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bigsci_launch.config.document import Node, at_one_place
from bigsci_launch.config.problems import closest, read_valid
from bigsci_launch.config.schema.run import RunConfig
from bigsci_launch.config.schema.site import SiteConfig
from bigsci_launch.content import content_folders, packaged
from bigsci_launch.errors import ConfigError
from bigsci_launch.gpus import gpu_named
from bigsci_launch.topology import Topology

TEMPLATE = "template"
MOST_RANKS = 200_000
"""More ranks than any cluster has. Many places list every rank."""

_HINT = "copy slurm/sites/template.yaml to sites/NAME.yaml next to the run file, or give the path of a site file"


@dataclass(frozen=True, slots=True)
class Layout:
    """How many ranks run where: `nodes` x `ranks_per_node` = `topology.world_size`."""

    nodes: int
    ranks_per_node: int
    topology: Topology


@dataclass(frozen=True, slots=True)
class Site:
    """One cluster: its name (the file's stem), the file, and its contents."""

    name: str
    path: Path
    config: SiteConfig

    @property
    def is_local(self) -> bool:
        return self.config.scheduler == "local"

    def layout(self, run: RunConfig) -> Layout:
        """Return where the ranks of `run` go. Only this function decides the world size.

        On a Slurm site, the nodes decide: the world size is nodes x ranks_per_node, and the product of the sizes must
        equal it. On a local site, the topology decides: there is one node with as many ranks as the sizes multiply to,
        or `ranks_per_node` if the run leaves out `data_parallel_size`. `slurm.nodes` has no effect there.

        Raises:
            ValueError: the sizes do not fit.
        """
        ranks = self.config.ranks_per_node
        if not self.is_local:
            self._require_countable(run.slurm.nodes * ranks, f"{run.slurm.nodes} nodes x {ranks} ranks")
            return Layout(run.slurm.nodes, ranks, run.topology(ranks))
        topology = run.parallelism.topology(ranks)
        self._require_countable(topology.world_size, topology.product)
        if run.parallelism.data_parallel_size is None and topology.world_size != ranks:
            replica = topology.product.rpartition(" x dp ")[0]
            raise ValueError(f"{ranks} local ranks are not a multiple of {replica}")
        return Layout(1, topology.world_size, topology)

    def _require_countable(self, num_ranks: int, words: str) -> None:
        if num_ranks > MOST_RANKS:
            raise ValueError(f"{words} = {num_ranks} ranks; the most is {MOST_RANKS}")


@dataclass(frozen=True, slots=True)
class BrokenSite:
    """A site file that cannot be read or is wrong: its name, the file, and the first thing that is wrong."""

    name: str
    path: Path
    problem: str


def search_path(near: Path | None = None) -> list[Path]:
    """Return folders with site files, strongest first: `sites` next to the run file, in each of `$BSL_PATH`, our
    own."""
    return content_folders("sites", packaged("slurm", "sites"), near)


def find_sites(near: Path | None = None) -> dict[str, Path]:
    """Return every site file on the search path by name, without the template."""
    found: dict[str, Path] = {}
    for folder in search_path(near):
        for path in sorted(folder.glob("*.yaml")):
            if path.stem != TEMPLATE:
                found.setdefault(path.stem, path)
    return dict(sorted(found.items()))


def list_sites(near: Path | None = None) -> list[Site | BrokenSite]:
    """Return every site on the search path, ordered by name."""
    return [_try_site(path) for path in find_sites(near).values()]


def _try_site(path: Path) -> Site | BrokenSite:
    try:
        return read_site(path)
    except ConfigError as error:
        return BrokenSite(path.stem, path, str(error.problems[0]) if error.problems else error.message)


def is_path(name_or_path: str) -> bool:
    """Return whether a `slurm.site` value is a path rather than a name on the search path."""
    return "/" in name_or_path or name_or_path.endswith(".yaml")


def load_site(name_or_path: str, near: Path | None = None) -> Site:
    """Return the site with that name, or in that file if it is a path (relative to `near`, the run file's folder).

    Raises:
        ConfigError: there is no such site, or its file is wrong.
    """
    if is_path(name_or_path):
        path = (near or Path()) / name_or_path
        if not path.is_file():
            raise ConfigError(f"no such site file: {path}", hint=_HINT)
        return read_site(path)
    known = find_sites(near)
    if name_or_path not in known:
        near_miss = closest(name_or_path, known)
        meant = f"; did you mean {near_miss}?" if near_miss else ""
        searched = ", ".join(str(folder) for folder in search_path(near))
        raise ConfigError(
            f"unknown site {name_or_path!r}{meant} (known: {', '.join(known) or 'none'}; searched: {searched})",
            hint=_HINT,
        )
    return read_site(known[name_or_path])


def read_site(path: Path) -> Site:
    """Return the site in the file at `path`.

    Raises:
        ConfigError: the file cannot be read or is wrong; lists every problem.
    """
    return Site(path.stem, path, read_valid(SiteConfig, path))


def site_layer(site: Site) -> Node:
    """Return the site's defaults for runs, in the shape of a run file."""
    config = site.config
    given: dict[str, dict[str, Any]] = {
        "slurm": {
            "time_limit": config.default_time_limit,
            "partition": config.default_partition,
            "account": config.account,
            "qos": config.qos,
            "reservation": config.reservation,
            "constraint": config.constraint,
            "container_image": config.container.image if config.container else None,
            "ulimits": config.ulimits.model_dump(exclude_none=True) or None,
            "stage_in": [each.model_dump() for each in config.stage_in] or None,
        },
        "monitor": {"peak_tflops_per_rank": _peak_tflops(config)},
        "env": {name: variable.model_dump() for name, variable in config.environment.items()},
    }
    sections = {
        section: {key: value for key, value in values.items() if value is not None} for section, values in given.items()
    }
    return at_one_place(sections, f"site {site.name}")


def _peak_tflops(config: SiteConfig) -> float | None:
    if config.gpu is None or config.gpu.peak_tflops:
        return config.gpu.peak_tflops if config.gpu else None
    known = gpu_named(config.gpu.name)
    return known.peak_tflops if known else None
