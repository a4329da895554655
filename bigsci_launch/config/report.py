"""What `bsl config` reports about a run file, as text and JSON: values with their origins, problems, warnings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from bigsci_launch.config.document import KeyPath, dotted
from bigsci_launch.config.finding import finding_document
from bigsci_launch.config.load import LoadedRun
from bigsci_launch.config.masking import SECRET, shown_value
from bigsci_launch.config.render import render_yaml
from bigsci_launch.config.site import BrokenSite, Layout, Site
from bigsci_launch.errors import ConfigError
from bigsci_launch.topology.naming import count_ranks

SCHEMA_VERSION = 1


def summary(run: LoadedRun) -> str:
    """Return one line: how many ranks, on what, and in which topology."""
    layout, axes = run.layout, run.layout.topology
    nodes = f"{layout.nodes} node{'s'[: layout.nodes > 1]} x {layout.ranks_per_node}"
    return f"{count_ranks(axes.world_size)} ({nodes}) on site {run.site.name}: {axes.product}"


def warning_lines(run: LoadedRun) -> list[str]:
    """Return one line per warning: the origin of the value, its key, and why it was probably not meant."""
    return [str(finding.at(run.origins.get(finding.keys[0], ""))) for finding in run.warnings]


def show_text(run: LoadedRun) -> str:
    """Return the resolved config as YAML with the origin of each value as a comment. It can be used as a run file."""

    def origin(path: KeyPath) -> str:
        key = dotted(path)
        below = [place for leaf, place in run.origins.items() if leaf == key or leaf.startswith(f"{key}.")]
        return ", ".join(dict.fromkeys(below))

    return f"# {summary(run)}\n" + render_yaml(_without_secret(run), origin)


def show_document(run: LoadedRun) -> dict[str, Any]:
    """Return the resolved config, its origins and its warnings, for `--json`."""
    return {
        "schema_version": SCHEMA_VERSION,
        "file": str(run.path),
        "site": {"name": run.site.name, "file": str(run.site.path)},
        "layout": _layout_document(run.layout),
        "config": _without_secret(run),
        "origins": run.origins,
        "warnings": [finding_document(finding) for finding in run.warnings],
    }


def _without_secret(run: LoadedRun) -> dict[str, Any]:
    """Return the config without the URL of a webhook, and without the values of variables that are not known to hold no
    secret: what is shown is soon pasted somewhere."""
    document = run.config.model_dump(mode="json")
    _mask_variables(document["env"])
    notify = document["monitor"]["notify"]
    if notify is not None and notify["webhook"] is not None:
        notify["webhook"] = SECRET
    return document


def _mask_variables(variables: dict[str, Any]) -> None:
    for name, variable in variables.items():
        if "value" in variable:
            variable["value"] = shown_value(name, variable["value"])


def _layout_document(layout: Layout) -> dict[str, Any]:
    return {
        "nodes": layout.nodes,
        "ranks_per_node": layout.ranks_per_node,
        "topology": layout.topology.as_dict(),
    }


def check_document(file: str, run: LoadedRun | None, error: ConfigError | None = None) -> dict[str, Any]:
    """Return what a check found, for `--json`: give `run` if it passed, `error` if it did not."""
    problems = [asdict(problem) for problem in error.problems] if error else []
    if error and not problems:
        problems = [{"where": file, "key": "", "text": error.message}]
    return {
        "schema_version": SCHEMA_VERSION,
        "file": file,
        "ok": error is None,
        "problems": problems,
        "warnings": [finding_document(finding) for finding in run.warnings] if run else [],
        "layout": _layout_document(run.layout) if run else None,
    }


def site_rows(sites: Sequence[Site | BrokenSite]) -> list[tuple[str, str, str, str]]:
    """Return name, scheduler, ranks per node and description of each site; of a broken one, what is wrong."""
    return [_site_row(site) for site in sites]


def _site_row(site: Site | BrokenSite) -> tuple[str, str, str, str]:
    if isinstance(site, BrokenSite):
        return site.name, "?", "?", f"cannot be used: {site.problem}"
    return site.name, site.config.scheduler, str(site.config.ranks_per_node), site.config.description


def sites_document(sites: Sequence[Site | BrokenSite]) -> dict[str, Any]:
    return {"schema_version": SCHEMA_VERSION, "sites": [_site_document(site) for site in sites]}


def _site_document(site: Site | BrokenSite) -> dict[str, Any]:
    named = {"name": site.name, "file": str(site.path)}
    if isinstance(site, BrokenSite):
        return {**named, "config": None, "problem": site.problem}
    config = site.config.model_dump(mode="json")
    _mask_variables(config["environment"])
    return {**named, "config": config, "problem": None}
