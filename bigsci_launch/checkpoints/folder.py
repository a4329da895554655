"""Checkpoints on disk, in DeepSpeed's layout. Only files and folders: the tensors are read elsewhere.

    CHECKPOINTS/
      global_step20/                        one checkpoint; its checkpoint.json says what it is and lists its files
      latest                                name of the newest one that did not fail the guards' checks
      latest_checkpointed_iteration.txt     its step (Megatron's name for it)
      .saving-global_step20/global_step20/  one that is being written
      .saving-global_step20/commit          it is complete and only has to be renamed
      .deleting-global_step20.1f0e9c2b/     one that is not needed and is being deleted

A checkpoint is written completely in its `.saving-` folder, then renamed; `latest` is written last. So whatever is
killed, and when, `latest` names a complete checkpoint or does not exist, and `finish_interrupted` completes or discards
what is left. A checkpoint that failed the guards' checks never becomes `latest` and never replaces one that did not.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePath
from typing import Any

from bigsci_launch import own_place
from bigsci_launch.errors import CheckpointError
from bigsci_launch.file_names import CHECKPOINT_RECORD, LATEST, digests_name, step_of_tag
from bigsci_launch.safe_files import parse_json, read_file, write_file

SCHEMA_VERSION = 1
_STAGING = ".saving-"
_COMMIT = "commit"
LATEST_ITERATION = "latest_checkpointed_iteration.txt"
DELETING = ".deleting-"
LONGEST_NAME = 4096
MOST_SHOWN = 120
_UNNAMED = re.compile(rf"\.({LATEST}|{re.escape(LATEST_ITERATION)})\.[0-9a-f]{{16}}")
OTHER_CHECKPOINT = "resume from another checkpoint: set checkpoint.load to its global_stepN folder"


@dataclass(frozen=True, slots=True)
class CheckpointsDir:
    """A folder of checkpoints."""

    path: Path

    @property
    def latest(self) -> Path:
        return self.path / LATEST

    @property
    def latest_iteration(self) -> Path:
        return self.path / LATEST_ITERATION

    def read_latest(self) -> str:
        """Return the name of the newest checkpoint, as `latest` says; empty if it says none.

        Raises:
            OSError: it cannot be read, or names something that is not in this folder.
        """
        tag = read_file(self.latest, LONGEST_NAME, follow=True).decode("utf-8", "replace").strip()
        named = PurePath(tag)
        if tag and (named.is_absolute() or ".." in named.parts or not named.parts):
            raise OSError(errno.EINVAL, f"names {_shown_name(tag)}, which is not a folder here", str(self.latest))
        return tag

    def folder(self, tag: str) -> Path:
        return self.path / tag

    def staging(self, tag: str) -> Path:
        """Where checkpoint `tag` is written before it is renamed; contains a folder of that name."""
        return self.path / f"{_STAGING}{tag}"

    def tags(self) -> list[str]:
        """Names of the existing checkpoints, lowest step first."""
        names = (path.name for path in self.path.glob("*") if is_checkpoint_name(path))
        return sorted(names, key=lambda name: step_of_tag(name) or 0)

    def stagings(self) -> list[Path]:
        return sorted(self.path.glob(f"{_STAGING}*"))


@dataclass(frozen=True, slots=True)
class CheckpointRecord:
    """Contents of `checkpoint.json`. `model` has the sizes that tensors depend on, `files` the size of each file."""

    step: int
    consumed_samples: int
    topology: dict[str, int]
    precision: str
    model: dict[str, Any]
    files: dict[str, int]
    config: dict[str, Any] = field(default_factory=dict)
    """The resolved run file of the attempt that saved it."""
    code: dict[str, Any] = field(default_factory=dict)
    """The code that saved it: git revision, whether there were uncommitted changes, versions."""
    converted_from: dict[str, Any] | None = None
    """The checkpoint it was converted from (`path`, `topology`), and whether `random_states` were kept or are new."""
    digest: str | None = None
    """Over the rest of this record and the contents of every file; None: saved by an older version."""
    health: dict[str, Any] | None = None
    """What the guards found before the save: `passed` (None: not checked), `step`, `findings`; None: not known."""
    run_id: str | None = None
    """The run that saved it, as in its `run.json`; None: not known."""
    data: dict[str, Any] | None = None
    """Fingerprints of the dataset and the place in it; None: not known."""
    micro_batch: dict[str, Any] | None = None
    """The size that `training.micro_batch_size: auto` had found; None: the run file set one, or not known."""

    @property
    def passed(self) -> bool | None:
        """Whether the guards found nothing before the save; None: not known."""
        found = (self.health or {}).get("passed")
        return None if found is None else bool(found)

    def differences(self, other: CheckpointRecord) -> list[str]:
        """Return, in words, why a run described by `other` cannot load this checkpoint; step and files do not count."""
        mine, theirs = ({**record.topology, "precision": record.precision, **record.model} for record in (self, other))
        return [
            f"{key} is {_shown(mine.get(key))} in the checkpoint and {_shown(theirs.get(key))} in the run"
            for key in {**mine, **theirs}
            if mine.get(key) != theirs.get(key)
        ]


def _shown_name(name: str) -> str:
    """Return a name that a file contains, which may be anything, as part of a sentence."""
    shown = name if name.isprintable() else repr(name)
    return shown if len(shown) <= MOST_SHOWN else f"{shown[:MOST_SHOWN]}..."


def _shown(value: Any) -> str:
    return "absent" if value is None else str(value)


def is_checkpoint_name(path: Path) -> bool:
    """Whether `path` is a folder with the name of a checkpoint, whatever it contains."""
    return step_of_tag(path.name) is not None and path.is_dir()


def record_path(folder: Path) -> Path:
    return folder / CHECKPOINT_RECORD


def digests_path(folder: Path, rank: int) -> Path:
    """The file of a checkpoint that holds the digests of `rank`'s weights, optimizer and random states."""
    return folder / "digests" / digests_name(rank)


def write_digests(folder: Path, rank: int, document: Mapping[str, Any]) -> None:
    path = digests_path(folder, rank)
    path.parent.mkdir(exist_ok=True)
    write_file(path, json.dumps(document) + "\n")


def list_files(folder: Path) -> dict[str, int]:
    """Return the sizes of the files of a checkpoint, without its own record."""
    return {
        str(path.relative_to(folder)): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path != record_path(folder)
    }


def write_record(folder: Path, record: CheckpointRecord) -> None:
    document = {"schema_version": SCHEMA_VERSION, **asdict(record)}
    write_file(record_path(folder), json.dumps(document, indent=2) + "\n")


def read_record(folder: Path) -> CheckpointRecord:
    """Return the record of the checkpoint in `folder`.

    Raises:
        CheckpointError: there is none, or it cannot be read.
    """
    path = record_path(folder)
    try:
        document = read_record_document(folder)
        document.pop("schema_version")
        return CheckpointRecord(**document)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{folder}: not a checkpoint of `bsl train` (it has no {path.name})",
            hint="checkpoint.load names a global_stepN folder, or a folder with such folders and a file `latest`",
        ) from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(
            f"{path}: not a checkpoint record ({type(error).__name__}: {error})", hint=OTHER_CHECKPOINT
        ) from error


def read_record_document(folder: Path) -> dict[str, Any]:
    """Return `checkpoint.json` as it is.

    Raises:
        OSError, ValueError: it cannot be read, or is not JSON.
    """
    document: dict[str, Any] = parse_json(read_file(record_path(folder), follow=True), allow_nan=True)
    return document


def require_complete(folder: Path, record: CheckpointRecord) -> None:
    """Check that every file of the checkpoint exists and has its full size.

    Raises:
        CheckpointError: names the first that does not.
    """
    for problem in find_incomplete(folder, record).values():
        raise CheckpointError(problem, hint=OTHER_CHECKPOINT)


def find_incomplete(folder: Path, record: CheckpointRecord) -> dict[str, str]:
    """Return what is wrong with each file that is missing or has another size, by its name."""
    problems = {}
    for name, size in record.files.items():
        path = folder / name
        try:
            found = path.stat().st_size
        except OSError as error:
            problems[name] = f"{path}: {error.strerror or error}"
            continue
        if found != size:
            problems[name] = f"{path}: {found} bytes, but {size} were saved"
    return problems


def find_checkpoint(load: str, own: CheckpointsDir) -> Path | None:
    """Return the checkpoint folder that `checkpoint.load` selects, or None to start at step 0.

    A path outside the run's own folder only says where the run begins. Once the run has checkpoints of its own, it
    resumes from those, so that neither a requeue nor the next attempt goes back.

    Raises:
        CheckpointError: the checkpoint does not exist. Starting at step 0 instead would silently lose progress.
    """
    if load == "none":
        return None
    if load == "auto":
        return _newest(own) if own.path.is_dir() else None
    named = Path(load)
    is_elsewhere = own.path.resolve() not in (named.resolve(), *named.resolve().parents)
    if is_elsewhere and own.path.is_dir() and (newest := _newest(own)) is not None:
        return newest
    if record_path(named).is_file():
        return named
    newest = _newest(CheckpointsDir(named)) if named.is_dir() else None
    if newest is None:
        raise CheckpointError(f"checkpoint.load: {load}: contains no checkpoint")
    return newest


def _newest(checkpoints: CheckpointsDir) -> Path | None:
    try:
        tag = checkpoints.read_latest()
        folder = checkpoints.folder(tag)
        is_there = bool(tag) and folder.is_dir()
    except FileNotFoundError:
        if not checkpoints.tags():
            return None
        failed = [tag for tag in checkpoints.tags() if _has_failed(checkpoints.folder(tag))]
        why = f"; {', '.join(failed)} failed the guards' checks" if failed else ""
        raise CheckpointError(
            f"{checkpoints.latest}: missing, although there are checkpoints: {', '.join(checkpoints.tags())}{why}",
            hint="set checkpoint.load to one of these folders, or to `none` to start at step 0",
        ) from None
    except OSError as error:
        raise CheckpointError(
            f"{checkpoints.latest}: {error.strerror or error}", hint=_name_one(checkpoints)
        ) from error
    if not is_there:
        raise CheckpointError(
            f"{checkpoints.latest}: " + (f"names {_shown_name(tag)}, which does not exist" if tag else "is empty"),
            hint=_name_one(checkpoints),
        )
    return folder


def _name_one(checkpoints: CheckpointsDir) -> str:
    return f"there are {', '.join(checkpoints.tags()) or 'no checkpoints'}; write the name of one into this file"


def begin_checkpoint(checkpoints: CheckpointsDir, tag: str) -> Path:
    """Create and return an empty folder for checkpoint `tag`, which is written to a folder of its name in there."""
    staging = checkpoints.staging(tag)
    shutil.rmtree(staging, ignore_errors=True)
    own_place.make_folders(staging.parent)
    (staging / tag).mkdir(parents=True)
    return staging


def commit_checkpoint(checkpoints: CheckpointsDir, tag: str, step: int) -> None:
    """Rename the finished checkpoint into place and point `latest` to it. Its files are already synced.

    If it failed the guards' checks, `latest` stays, and one of the same step that did not fail is kept instead.
    """
    staging = checkpoints.staging(tag)
    for folder in _folders(staging / tag):
        sync_path(folder)
    write_file(staging / _COMMIT, str(step))
    _finish_commit(checkpoints, tag, step)


def _finish_commit(checkpoints: CheckpointsDir, tag: str, step: int) -> None:
    """Complete a commit that has begun; each part may already be done."""
    staging = checkpoints.staging(tag)
    staged, final = staging / tag, checkpoints.folder(tag)
    if _has_failed(staged) and final.is_dir() and not _has_failed(final):
        _discard(staging)
        return
    if staged.is_dir():
        if final.exists() and not _has_failed(staged):
            # `latest` may name the folder that is replaced: until the rename it names the complete, staged one.
            write_file(checkpoints.latest, f"{staging.name}/{tag}")
        if final.exists() or final.is_symlink():
            doomed = set_aside(final)
            staged.rename(final)
            with suppress(OSError):  # the next deletion tries again
                remove(doomed)
        else:
            staged.rename(final)
    for script in staging.glob("*.py"):
        script.replace(checkpoints.path / script.name)
    sync_path(checkpoints.path)
    if not _has_failed(final):
        write_file(checkpoints.latest_iteration, f"{step}\n")
        write_file(checkpoints.latest, tag)
    _discard(staging)


def _discard(staging: Path) -> None:
    """Remove the folder of a commit that is done: it must not be done again, after later ones."""
    (staging / _COMMIT).unlink(missing_ok=True)
    shutil.rmtree(staging, ignore_errors=True)


def set_aside(folder: Path) -> Path:
    """Take its name from a checkpoint that is not needed, and return the new one: half of it is no checkpoint."""
    # Files of a deletion that failed may still be there: a step can be saved again.
    doomed = folder.with_name(f"{DELETING}{folder.name}.{secrets.token_hex(4)}")
    folder.rename(doomed)
    return doomed


def remove(doomed: Path) -> None:
    """Delete what was set aside; of a checkpoint that was moved elsewhere and linked back, only the link."""
    doomed.unlink() if doomed.is_symlink() else shutil.rmtree(doomed)


def _has_failed(folder: Path) -> bool:
    """Whether the guards found something before the checkpoint in `folder` was saved; False if that is not known."""
    try:
        return read_record(folder).passed is False
    except CheckpointError:
        return False


def finish_interrupted(checkpoints: CheckpointsDir) -> None:
    """Clean up after a save that was killed: complete it if only the renaming is left, else remove it.

    Files that were to become `latest` are removed too: a kill leaves them under a random name.
    """
    for staging in checkpoints.stagings():
        commit = staging / _COMMIT
        if commit.is_file():
            _finish_commit(checkpoints, staging.name.removeprefix(_STAGING), int(read_file(commit)))
        else:
            shutil.rmtree(staging, ignore_errors=True)
    _remove_unnamed(checkpoints)


def _remove_unnamed(checkpoints: CheckpointsDir) -> None:
    """Remove this user's own unfinished copies of the two files that name the newest checkpoint."""
    for path in checkpoints.path.glob(".*"):
        if _UNNAMED.fullmatch(path.name):
            with suppress(OSError):
                found = path.lstat()
                if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid():
                    path.unlink()


def _folders(top: Path) -> Iterator[Path]:
    yield top
    yield from (path for path in top.rglob("*") if path.is_dir())


def sync_path(path: Path) -> None:
    """Make the contents of a file, or the names in a folder, survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
