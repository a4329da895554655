"""Lists every file below a folder, at any depth. If checkpoints are next to each other, one of them must be chosen."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from bigsci_launch.errors import CheckpointError
from bigsci_launch.weights.files.mapped import os_reason
from bigsci_launch.weights.files.sources import Unreadable
from bigsci_launch.weights.formats.dcp_metadata import is_dcp_name
from bigsci_launch.weights.formats.table import BY_SUFFIX
from bigsci_launch.weights.locate.choice import SideName, choose_checkpoint, is_checkpoint_name, is_pointer

# What tools keep for themselves: no part of a checkpoint, and possibly huge.
SKIPPED_FOLDERS = (".git", ".cache", "__pycache__", ".ipynb_checkpoints")
MAX_ENTRIES = 200_000
MAX_DEPTH = 32


@dataclass
class Listing:
    """What is in a folder: `tensors` are files of tensors, `dcp` folders that torch.distributed.checkpoint wrote.

    `others` are all other files. `odd` are entries that cannot be opened. `home` is the only checkpoint in the folder
    if everything is in it, otherwise the folder; it is known once everything is listed.
    """

    root: Path
    tensors: list[Path] = field(default_factory=list)
    dcp: list[Path] = field(default_factory=list)
    others: list[Path] = field(default_factory=list)
    odd: list[Unreadable] = field(default_factory=list)
    notes: tuple[str, ...] = ()

    @cached_property
    def home(self) -> Path:
        held = {*(file.parent for file in self.tensors), *self.dcp}
        if not held:
            return self.root
        common = Path(os.path.commonpath(held))
        inside = [folder for folder in (common, *common.parents) if folder.is_relative_to(self.root)]
        return next((folder for folder in inside[:-1] if is_checkpoint_name(folder.name)), self.root)

    def label(self, path: Path) -> str:
        """Return the path below `home`, or below the folder if it is not in `home`."""
        return path.relative_to(self.home if path.is_relative_to(self.home) else self.root).as_posix()

    def leave_out(self, paths: Collection[Path]) -> None:
        """Take files out of `others`: a reader knows what they are."""
        known = frozenset(paths)
        self.others = [file for file in self.others if file not in known]


def walk(root: Path, side: SideName) -> Listing:
    """List the files below `root`. Links are followed; no folder is read twice.

    Raises:
        CheckpointError: `root` cannot be read, has too many files, or several checkpoints but no `latest`.
    """
    found = Listing(root)
    # A link to a folder above must not lead out of the root.
    seen = {_identity(folder) for folder in (root.resolve(), *root.resolve().parents)}
    waiting = deque([(root, 0)])
    num_entries = 0
    while waiting:
        folder, depth = waiting.popleft()
        try:
            with os.scandir(folder) as scan:
                entries = sorted(scan, key=lambda entry: (entry.is_symlink(), entry.name))
        except OSError as error:
            if folder == root:
                raise
            found.odd.append(Unreadable(folder, os_reason(error)))
            continue
        num_entries += len(entries)
        if num_entries > MAX_ENTRIES:
            raise CheckpointError(f"{root}: more than {MAX_ENTRIES:,} files", hint="name one checkpoint inside it")
        left_out, notes = choose_checkpoint(folder, [entry.name for entry in entries if _is_candidate(entry)], side)
        found.notes += notes
        kept = [entry for entry in entries if entry.name not in left_out]
        inner = list(_sort_entries(folder, kept, found))
        if inner and depth == MAX_DEPTH:
            found.odd.append(Unreadable(folder, f"nested more than {MAX_DEPTH} folders deep"))
            continue
        for entry in inner:
            identity = _identity(Path(entry))
            if identity not in seen:
                seen.add(identity)
                waiting.append((Path(entry), depth + 1))
    for paths in (found.tensors, found.dcp, found.others):
        paths.sort()
    return found


def _identity(folder: Path) -> tuple[int, int]:
    status = folder.stat()
    return status.st_dev, status.st_ino


def _is_candidate(entry: os.DirEntry[str]) -> bool:
    return _is_folder(entry) or entry.name.endswith(".ckpt") or is_pointer(entry.name)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False


def _sort_entries(folder: Path, entries: list[os.DirEntry[str]], found: Listing) -> Iterator[os.DirEntry[str]]:
    """Put each entry where it belongs in `found`; yield the folders."""
    is_dcp = any(is_dcp_name(entry.name) for entry in entries)
    if is_dcp:
        found.dcp.append(folder)
    for entry in entries:
        path = folder / entry.name
        suffix = path.suffix
        if _is_folder(entry):
            if entry.name not in SKIPPED_FOLDERS:
                yield entry
        elif is_dcp_name(entry.name):
            continue
        elif not _is_file(entry):
            if suffix in BY_SUFFIX:
                found.odd.append(Unreadable(path, "a broken link" if entry.is_symlink() else "not a regular file"))
        elif suffix in BY_SUFFIX:
            found.tensors.append(path)
        elif not is_pointer(entry.name):
            found.others.append(path)


def _is_file(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_file()
    except OSError:
        return False
