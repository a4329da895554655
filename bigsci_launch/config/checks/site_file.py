"""A site file that replaces one of the same name that comes with `bsl`: it must be known and intended."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from bigsci_launch import safe_files
from bigsci_launch.config.finding import Finding
from bigsci_launch.config.site import Site
from bigsci_launch.content import packaged
from bigsci_launch.procfs import user_name

KEY = "slurm.site"


def check_site_file(site: Site, run_file: Path, named: str) -> Iterator[Finding]:
    """A site that a run file names, and that is not the packaged one of that name, is reported; if another user may
    write it, it is refused: its activation lines run as you. The run file's owner could write such lines there too."""
    own = packaged("slurm", "sites") / f"{named}.yaml"
    if not own.is_file() or site.path.resolve() == own.resolve():
        return
    here = f"site {named} is from {site.path} (owner {user_name(site.path.stat().st_uid)}), not the packaged one"
    if (open_part := _part_of_others(site.path, run_file)) is None:
        yield Finding("site_file", "warning", (KEY,), here)
        return
    text = (
        f"{here}, and others may write to {open_part}: run `chmod go-w` on it, or, if you trust its owner, give its "
        f"path: slurm.site: {site.path}"
    )
    yield Finding("site_file", "error", (KEY,), text)


def _part_of_others(path: Path, run_file: Path) -> Path | None:
    """Return the site file or its folder if another user may write it; None if neither."""
    trusted = {0, os.geteuid(), run_file.stat().st_uid}
    for part in (path, path.parent):
        found = part.stat()
        if safe_files.others_may_write(found) or found.st_uid not in trusted:
            return part
    return None
