"""Whether the code and the run file that are about to be submitted were rehearsed."""

from __future__ import annotations

import shlex
from pathlib import Path

import bigsci_launch
from bigsci_launch.config.load import OVERRIDE, LoadedRun
from bigsci_launch.config.schema.section import DESCRIBING
from bigsci_launch.launch.provenance import describe_repository, uncommitted_changes
from bigsci_launch.runs.rehearsals.identity import CodeRevision, config_identity, digest
from bigsci_launch.runs.rehearsals.record import describe_past, read_rehearsals

MOST_NODES = 2
"""A run on so few nodes is as small as its rehearsal."""


def read_revision(working_directory: Path) -> CodeRevision:
    """Return the revision of `bsl` and of the working directory. Takes some tenths of a second, in git."""
    folders = {"bigsci_launch": Path(bigsci_launch.__file__).parent, "working_directory": working_directory}
    found = {role: describe_repository(folder) for role, folder in folders.items()}
    roots = list(dict.fromkeys(entry["root"] for entry in found.values() if entry["root"]))
    diff = "".join(uncommitted_changes(Path(root)) for root in roots)
    changed = {
        f"{entry['root']} {line}" for entry in found.values() if entry["root"] for line in entry["changed_files"] or ()
    }
    return CodeRevision(
        {role: entry.get("revision") for role, entry in found.items()},
        bool(diff) if roots else None,
        digest(diff) if diff else None,
        sum("?? " in line for line in changed),
    )


def rehearsal_note(loaded: LoadedRun, working_directory: Path) -> list[str]:
    """Return one line on whether the run was rehearsed; none for a run that is not larger than a rehearsal, or that
    cannot be made smaller, because it is not described."""
    is_small = loaded.site.is_local or loaded.layout.nodes <= MOST_NODES
    if is_small or not loaded.config.describes(*DESCRIBING):
        return []
    root = (working_directory / loaded.config.run.root).resolve()
    past = read_rehearsals(root, loaded.config.run.name)
    same = " with the same --set" if OVERRIDE in loaded.origins.values() else ""
    command = f"`bsl rehearse {shlex.quote(str(loaded.path))}`{same}"
    return [describe_past(past, read_revision(working_directory), config_identity(loaded), command=command)]
