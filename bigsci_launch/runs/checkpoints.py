"""Checkpoints on disk, in DeepSpeed's layout. Files only: what is in them is read elsewhere.

    CHECKPOINTS/
      global_step20/                        one checkpoint; checkpoint.json in it says what it is and lists its files
      latest                                name of the newest one
      latest_checkpointed_iteration.txt     its step (Megatron's name for it)
      .saving-global_step20/global_step20/  one that is being written
      .saving-global_step20/commit          it is complete: only its name is missing

A checkpoint is written whole in its `.saving-` folder, then renamed; `latest` comes last. So at every moment, whatever
is killed, `latest` names a complete checkpoint or does not exist, and `finish_interrupted` can finish or forget.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bigsci_launch.errors import CheckpointError
from bigsci_launch.runs.layout import write_atomically

SCHEMA_VERSION = 1
_STAGING = ".saving-"
_COMMIT = "commit"
_OTHER_CHECKPOINT = "resume from another checkpoint: set checkpoint.load to its global_stepN folder"


@dataclass(frozen=True, slots=True)
class CheckpointsDir:
    """A folder of checkpoints."""

    path: Path

    @property
    def latest(self) -> Path:
        return self.path / "latest"

    @property
    def latest_iteration(self) -> Path:
        return self.path / "latest_checkpointed_iteration.txt"

    def folder(self, tag: str) -> Path:
        return self.path / tag

    def staging(self, tag: str) -> Path:
        """Where the checkpoint `tag` is written before it gets its name; it holds a folder of that name."""
        return self.path / f"{_STAGING}{tag}"

    def tags(self) -> list[str]:
        """Names of the checkpoints that are there, oldest step first."""
        names = (path.name for path in self.path.glob("global_step*") if path.is_dir())
        return sorted((name for name in names if _step_of(name) is not None), key=lambda name: _step_of(name) or 0)

    def stagings(self) -> list[Path]:
        return sorted(self.path.glob(f"{_STAGING}*"))


def checkpoint_tag(step: int) -> str:
    """The name of the checkpoint after `step`."""
    return f"global_step{step}"


def _step_of(tag: str) -> int | None:
    digits = tag.removeprefix("global_step")
    return int(digits) if digits.isdigit() else None


@dataclass(frozen=True, slots=True)
class CheckpointRecord:
    """What a checkpoint is: `checkpoint.json`. `model` holds the sizes that its tensors depend on, `files` sizes in
    bytes by name."""

    step: int
    consumed_samples: int
    topology: dict[str, int]
    precision: str
    model: dict[str, Any]
    files: dict[str, int]
    config: dict[str, Any] = field(default_factory=dict)
    """The resolved run file of the attempt that saved it."""
    code: dict[str, Any] = field(default_factory=dict)
    """What saved it: git revision, whether there were changes on top of it, versions."""
    converted_from: dict[str, Any] | None = None
    """The checkpoint that it was converted from, `path` and `topology`, and whether `random_states` are kept or new."""

    def differences(self, other: CheckpointRecord) -> list[str]:
        """What keeps a run described by `other` from loading this checkpoint, in words; step and files do not count."""
        mine, theirs = ({**record.topology, "precision": record.precision, **record.model} for record in (self, other))
        return [
            f"{key} is {_shown(mine.get(key))} in the checkpoint and {_shown(theirs.get(key))} in the run"
            for key in {**mine, **theirs}
            if mine.get(key) != theirs.get(key)
        ]


def _shown(value: Any) -> str:
    return "absent" if value is None else str(value)


def is_checkpoint_name(path: Path) -> bool:
    """Whether the folder `path` is called as a checkpoint is, whatever it holds."""
    return _step_of(path.name) is not None and path.is_dir()


def record_path(folder: Path) -> Path:
    """The file that describes the checkpoint in `folder`."""
    return folder / "checkpoint.json"


def digests_path(folder: Path, rank: int) -> Path:
    """The file of a checkpoint that holds the digests of `rank`'s weights, optimizer and random states."""
    return folder / "digests" / f"rank-{rank:04d}.digests.json"


def list_files(folder: Path) -> dict[str, int]:
    """Sizes of the files of a checkpoint, its own record left out."""
    return {
        str(path.relative_to(folder)): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path != record_path(folder)
    }


def write_record(folder: Path, record: CheckpointRecord) -> None:
    """Describe the checkpoint in `folder`."""
    document = {"schema_version": SCHEMA_VERSION, **asdict(record)}
    write_atomically(record_path(folder), json.dumps(document, indent=2) + "\n")


def read_record(folder: Path) -> CheckpointRecord:
    """The record of the checkpoint in `folder`.

    Raises:
        CheckpointError: there is none, or it cannot be read.
    """
    path = record_path(folder)
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        document.pop("schema_version")
        return CheckpointRecord(**document)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{folder}: not a checkpoint of `bsl train` (it has no {path.name})",
            hint="checkpoint.load names a global_stepN folder, or a folder that holds some and a file `latest`",
        ) from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(
            f"{path}: not the record of a checkpoint ({type(error).__name__}: {error})", hint=_OTHER_CHECKPOINT
        ) from error


def require_complete(folder: Path, record: CheckpointRecord) -> None:
    """Check that every file of the checkpoint is there in its full length.

    Raises:
        CheckpointError: naming the first that is not.
    """
    for problem in find_incomplete(folder, record).values():
        raise CheckpointError(problem, hint=_OTHER_CHECKPOINT)


def find_incomplete(folder: Path, record: CheckpointRecord) -> dict[str, str]:
    """What is wrong with each file, by its name, that is not there or not in its full length."""
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
    """The checkpoint folder that `checkpoint.load` means, or None to start at step 0.

    A path elsewhere is where the run begins: from its first own checkpoint on it goes on from those, so that neither a
    requeue nor the next attempt goes back.

    Raises:
        CheckpointError: it means one that is not there. Starting at step 0 instead would be a silent loss.
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
        raise CheckpointError(f"checkpoint.load: {load}: holds no checkpoint")
    return newest


def _newest(checkpoints: CheckpointsDir) -> Path | None:
    try:
        tag = checkpoints.latest.read_text(encoding="utf-8", errors="replace").strip()
    except FileNotFoundError:
        if not checkpoints.tags():
            return None
        raise CheckpointError(
            f"{checkpoints.latest}: missing, although {', '.join(checkpoints.tags())} are there",
            hint="set checkpoint.load to one of these folders, or to `none` to start at step 0",
        ) from None
    except OSError as error:
        raise CheckpointError(f"{checkpoints.latest}: {error.strerror or error}") from error
    folder = checkpoints.folder(tag)
    if not tag or not folder.is_dir():
        raise CheckpointError(
            f"{checkpoints.latest}: " + (f"names {tag}, which is not there" if tag else "is empty"),
            hint=f"there are {', '.join(checkpoints.tags()) or 'no checkpoints'}; write the name of one into it",
        )
    return folder


def begin_checkpoint(checkpoints: CheckpointsDir, tag: str) -> Path:
    """An empty folder into which the checkpoint `tag` is to be written (in a folder of its name)."""
    staging = checkpoints.staging(tag)
    shutil.rmtree(staging, ignore_errors=True)
    (staging / tag).mkdir(parents=True)
    return staging


def commit_checkpoint(checkpoints: CheckpointsDir, tag: str, step: int) -> None:
    """Give the checkpoint that was written its name, and point `latest` to it. Its files are synced already."""
    staging = checkpoints.staging(tag)
    for folder in _folders(staging / tag):
        sync_path(folder)
    write_atomically(staging / _COMMIT, str(step))
    _finish_commit(checkpoints, tag, step)


def _finish_commit(checkpoints: CheckpointsDir, tag: str, step: int) -> None:
    """What is left of a commit that has begun; each part may have been done already."""
    staging = checkpoints.staging(tag)
    staged, final = staging / tag, checkpoints.folder(tag)
    if staged.is_dir():
        if final.exists():
            # Replacing what `latest` may name: let it name the staged one, which is complete, meanwhile.
            write_atomically(checkpoints.latest, f"{staging.name}/{tag}")
            shutil.rmtree(final)
        staged.rename(final)
    for script in staging.glob("*.py"):
        script.replace(checkpoints.path / script.name)
    sync_path(checkpoints.path)
    write_atomically(checkpoints.latest_iteration, f"{step}\n")
    write_atomically(checkpoints.latest, tag)
    shutil.rmtree(staging)


def finish_interrupted(checkpoints: CheckpointsDir) -> None:
    """Tidy up after a save that was killed: finish it where only the naming is left, else remove it."""
    for staging in checkpoints.stagings():
        commit = staging / _COMMIT
        if commit.is_file():
            _finish_commit(checkpoints, staging.name.removeprefix(_STAGING), int(commit.read_text(encoding="utf-8")))
        else:
            shutil.rmtree(staging, ignore_errors=True)


def _folders(top: Path) -> Iterator[Path]:
    yield top
    yield from (path for path in top.rglob("*") if path.is_dir())


def sync_path(path: Path) -> None:
    """Make a file's content, or a folder's names, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
