"""Checks that a checkpoint is what was saved, and chooses which may be deleted. Runs neither torch nor pickle code.

Every rank stores the digests of the files that it wrote with those of its tensors, and the step that it was at. The
record has one digest over itself and all of these, so nothing can be exchanged or edited alone. A verified checkpoint
contains
`verified.json` (when, and the newest change of its files at that time); a pinned one contains `pinned`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

from bigsci_launch.checkpoints.folder import (
    DELETING,
    OTHER_CHECKPOINT,
    CheckpointRecord,
    CheckpointsDir,
    digests_path,
    find_incomplete,
    read_record,
    read_record_document,
    record_path,
    remove,
    set_aside,
)
from bigsci_launch.errors import INSTALL_WEIGHTS, CheckpointError
from bigsci_launch.file_names import step_of_tag
from bigsci_launch.progress import Progress, no_progress
from bigsci_launch.safe_files import open_stream, parse_json, read_file, read_json, write_file
from bigsci_launch.topology import Topology
from bigsci_launch.topology.naming import name_ranks_and_part

_CHUNK = 8 << 20


def file_digest(path: Path) -> str:
    """Return the xxh3-128 digest of a file.

    Raises:
        CheckpointError: xxhash is not installed.
    """
    digest = _new_digest()
    with open_stream(path, follow=True) as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return str(digest.hexdigest())


def _new_digest() -> Any:
    try:
        from xxhash import xxh3_128
    except ModuleNotFoundError as error:
        raise CheckpointError("digests need xxhash", hint=INSTALL_WEIGHTS) from error
    return xxh3_128()


def with_digest(folder: Path, record: CheckpointRecord) -> CheckpointRecord:
    """Return `record` with the digest over itself and the contents of every file of the checkpoint in `folder`."""
    return replace(record, digest=_whole_digest(folder, record, asdict(record)))


def _whole_digest(folder: Path, record: CheckpointRecord, document: Mapping[str, Any]) -> str:
    """Return the digest of a record, given as a `document`, and of every file, as digested by the rank that wrote it.

    The documents of the ranks, and files that none of them digested, are digested here.
    """
    contents = saved_digests(folder, record)
    contents |= {name: file_digest(folder / name) for name in record.files if name not in contents}
    fields = {key: value for key, value in document.items() if key not in ("digest", "schema_version")}
    digest = _new_digest()
    digest.update(json.dumps([fields, contents], sort_keys=True).encode())
    return str(digest.hexdigest())


def find_damage(folder: Path, report_progress: Progress = no_progress) -> list[str]:
    """Return what is wrong with the checkpoint in `folder`: one sentence per file; none if it is as it was saved.

    `report_progress` gets the percentage of files that are done, and the name of the next.
    """
    try:
        record = read_record(folder)
    except CheckpointError as error:
        return [_with_instead(error.message, record_path(folder))]
    problems = find_incomplete(folder, record)
    try:
        expected = saved_digests(folder, record)
    except CheckpointError as error:
        return [*problems.values()] or [error.message]
    for number, (name, digest) in enumerate(sorted(expected.items())):
        report_progress(100 * number // len(expected), name)
        if name not in problems and (problem := _find_other_bytes(folder / name, digest)):
            problems[name] = problem
    problems = {name: _with_instead(problem, folder / name) for name, problem in problems.items()}
    return [*problems.values(), *(find_disagreements(folder, record) if not problems else ())]


def _with_instead(problem: str, path: Path) -> str:
    """Add what has taken the place of a damaged file, if its content shows that."""
    from bigsci_launch.weights.files.instead import what_instead

    try:
        with open_stream(path, follow=True) as file, mmap(file.fileno(), 0, access=ACCESS_READ) as content:
            instead = what_instead(content)
    except (OSError, ValueError):
        return problem
    return f"{problem}: it is {instead}" if instead else problem


@dataclass(frozen=True, slots=True)
class Verification:
    """What is wrong with a checkpoint, and what is not known of one with which nothing is; one sentence each."""

    problems: tuple[str, ...]
    remarks: tuple[str, ...] = ()


def verify_checkpoint(folder: Path, report_progress: Progress = no_progress) -> Verification:
    """Check that the checkpoint in `folder` is as it was saved, and that all of its files are of one step; record it.

    Until that is known, it is not deleted.
    """
    from bigsci_launch.weights.formats.counters import find_other_counters

    with verifying(folder):
        problems = find_damage(folder, report_progress)
        record = None if problems else read_record(folder)
        if record:
            problems = [*find_other_counters(folder, record.step, record.consumed_samples)]
    if not problems:
        mark_verified(folder)
    return Verification(tuple(problems), tuple(remark(record)) if record else ())


def find_disagreements(folder: Path, record: CheckpointRecord) -> list[str]:
    """Return how the record and the documents of the ranks contradict each other, one sentence each.

    The files that the ranks digested are not read. In a checkpoint of an older version only the counters are compared.

    Raises:
        CheckpointError: a document of a rank is missing or cannot be read.
    """
    return [*_find_other_counters(folder, record), *_find_other_record(folder, record)]


def remark(record: CheckpointRecord) -> list[str]:
    """Return what is not known of a checkpoint that is as it was saved, or what the guards found before the save."""
    remarks = []
    if record.digest is None:
        remarks.append("saved by an older version: its record has no digest, so edits of checkpoint.json go undetected")
    if record.passed is False:
        found = [str(each) for each in (record.health or {}).get("findings") or ()]
        remarks.append(f"it failed the guards' checks: {'; '.join(found) or 'no details recorded'}")
    elif record.passed is None:
        remarks.append("unknown whether its state was sound: the guards did not check the step before the save")
    return remarks


def require_agreement(folder: Path, record: CheckpointRecord) -> None:
    """Check that the record and the documents of the ranks were written together.

    Raises:
        CheckpointError: they were not, or a document of a rank is missing or cannot be read.
    """
    if problems := find_disagreements(folder, record):
        raise CheckpointError("; ".join(problems), hint=OTHER_CHECKPOINT)


def _find_other_counters(folder: Path, record: CheckpointRecord) -> Iterator[str]:
    named = step_of_tag(folder.name)
    if named is not None and named != record.step:
        yield f"{record_path(folder)}: it records step {record.step}, but its folder is step {named}"
    due = ((record.data or {}).get("cursor") or {}).get("consumed_samples", record.consumed_samples)
    if due != record.consumed_samples:
        text = f"it records {record.consumed_samples} consumed samples, but its position in the data is {due}"
        yield f"{record_path(folder)}: {text}"
    topology = Topology(**record.topology)
    steps: dict[Any, list[int]] = {}
    adam: dict[Any, list[int]] = {}
    for rank, document in _documents(folder, topology):
        steps.setdefault(document.get("step"), []).append(rank)
        optimizer = document.get("optimizer") or {}
        for step in sorted({value for key, value in optimizer.items() if key.endswith(".step")}):
            adam.setdefault(step, []).append(rank)
    for step, ranks in steps.items():
        if step is not None and step != record.step:
            where = name_ranks_and_part(ranks, topology)
            yield f"{folder}: the files of {where} are of step {step}, the checkpoint is of step {record.step}"
    usual = max(adam, key=lambda step: len(adam[step]), default=0)
    for step, ranks in adam.items():
        if step > record.step or step != usual:
            where = name_ranks_and_part(ranks, topology)
            right = f"the checkpoint is of step {record.step}" if step > record.step else f"{usual} on the others"
            yield f"{folder}: the optimizer's step is {step} on {where}, {right}"


def _find_other_record(folder: Path, record: CheckpointRecord) -> Iterator[str]:
    if record.digest is None:
        return
    try:
        found = _whole_digest(folder, record, read_record_document(folder))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder}: cannot be read: {error}") from error
    if found != record.digest:
        text = "the digest over the whole checkpoint differs: this file or the digests of a rank are not as saved"
        yield f"{record_path(folder)}: {text}"


def _find_other_bytes(path: Path, digest: str) -> str | None:
    """Return what is wrong with the contents of a file; None if they are what was saved."""
    try:
        return None if file_digest(path) == digest else f"{path}: its contents differ from what was saved"
    except OSError as error:
        return f"{path}: {error.strerror or error}"


def saved_digests(folder: Path, record: CheckpointRecord) -> dict[str, str]:
    """Return the digests of the files of a checkpoint, as stored by the ranks that wrote them.

    Raises:
        CheckpointError: those of a rank are missing or cannot be read.
    """
    found: dict[str, str] = {}
    for rank, document in _documents(folder, Topology(**record.topology)):
        try:
            found.update(document["files"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{digests_path(folder, rank)}: cannot be read: {error}") from error
    return found


def _documents(folder: Path, topology: Topology) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield what each rank stored: its digests, and the step that it was at."""
    for rank in range(topology.world_size):
        path = digests_path(folder, rank)
        try:
            document = parse_json(read_file(path, follow=True), allow_nan=True)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: cannot be read: {error}") from error
        if not isinstance(document, dict):
            raise CheckpointError(f"{path}: cannot be read: not a JSON object")
        yield rank, document


def recorded_digests(folder: Path) -> dict[Path, str]:
    """Return the digests of the files of the checkpoint in `folder`, as recorded when it was saved.

    A file that no longer has its recorded size is left out.

    Raises:
        CheckpointError: the checkpoint has no digests.
    """
    record = read_record(folder)
    found = {}
    for name, digest in saved_digests(folder, record).items():
        path = folder / name
        with suppress(OSError):
            if path.stat().st_size == record.files.get(name):
                found[path] = digest
    return found


@dataclass(frozen=True, slots=True)
class CheckpointState:
    """One checkpoint of a run, as found on disk. `size_bytes` is None if its record cannot be read."""

    folder: Path
    step: int
    size_bytes: int | None
    is_latest: bool
    is_pinned: bool
    is_verified: bool
    is_half_verified: bool = False
    """Its verification is in progress or was interrupted, or files have changed since."""
    passed: bool | None = None
    """Whether the guards found nothing before the save; None if that is not known."""

    @property
    def document(self) -> dict[str, Any]:
        return {
            "path": str(self.folder),
            "step": self.step,
            "bytes": self.size_bytes,
            "latest": self.is_latest,
            "pinned": self.is_pinned,
            "verified": self.is_verified,
            "half_verified": self.is_half_verified,
            "passed": self.passed,
        }


def list_checkpoints(checkpoints: CheckpointsDir) -> list[CheckpointState]:
    """Return the existing checkpoints, oldest first."""
    latest = checkpoints.read_latest() if checkpoints.latest.is_file() else ""
    return [_state(checkpoints.folder(tag), latest) for tag in checkpoints.tags()]


def _state(folder: Path, latest: str) -> CheckpointState:
    try:
        record: CheckpointRecord | None = read_record(folder)
    except CheckpointError:
        record = None
    is_sound = is_verified(folder)
    return CheckpointState(
        folder=folder,
        step=step_of_tag(folder.name) or 0,
        size_bytes=sum(record.files.values()) if record else None,
        is_latest=folder.name == latest,
        is_pinned=pin_path(folder).exists(),
        is_verified=is_sound,
        is_half_verified=_begun_path(folder).exists() or (_mark_path(folder).exists() and not is_sound),
        passed=record.passed if record else None,
    )


def pin_path(folder: Path) -> Path:
    """The file whose presence keeps a checkpoint from being deleted."""
    return folder / "pinned"


def _mark_path(folder: Path) -> Path:
    return folder / "verified.json"


def _begun_path(folder: Path) -> Path:
    return folder / "verifying"


@contextmanager
def verifying(folder: Path) -> Iterator[None]:
    """Keep a checkpoint from being deleted while it is verified, and afterwards if the verification is interrupted."""
    # A checkpoint of another user, or on a read-only disk, can be verified too.
    with suppress(OSError):
        _begun_path(folder).touch()
    yield
    with suppress(OSError):
        _begun_path(folder).unlink(missing_ok=True)


def mark_verified(folder: Path) -> None:
    """Record that the checkpoint was found as it was saved, if its folder is writable."""
    mark = {"schema_version": 1, "time": time.time(), "newest_change": _newest_change(folder)}
    with suppress(OSError):
        write_file(_mark_path(folder), json.dumps(mark) + "\n")


def is_verified(folder: Path) -> bool:
    """Whether the checkpoint was verified and none of its files has changed since."""
    try:
        mark = read_json(_mark_path(folder))
        return bool(mark["newest_change"] == _newest_change(folder))
    except (OSError, ValueError, KeyError, CheckpointError):
        return False


def _newest_change(folder: Path) -> int:
    names = [record_path(folder).name, *read_record(folder).files]
    return max((folder / name).stat().st_mtime_ns for name in names)


def choose_prunable(states: Sequence[CheckpointState], keep: int) -> list[CheckpointState]:
    """Return which checkpoints may be deleted so that the newest `keep` stay.

    A checkpoint that is pinned, half verified or named by `latest` always stays. So do the newest verified one and the
    newest that passed the guards' checks, because no later one is known to be good.
    """
    kept = {state.folder for state in states[-keep:]}
    kept |= {state.folder for state in states if state.is_pinned or state.is_latest or state.is_half_verified}
    kept |= {state.folder for state in [state for state in states if state.is_verified][-1:]}
    kept |= {state.folder for state in [state for state in states if state.passed][-1:]}
    return [state for state in states if state.folder not in kept]


def delete_checkpoint(folder: Path) -> None:
    """Delete a checkpoint; of one that was moved elsewhere and linked back, only the link.

    If this is killed or fails, no half checkpoint is left under its name.

    Raises:
        OSError: what is left waits for `finish_deletions`.
    """
    remove(set_aside(folder))


def prune_checkpoints(checkpoints: CheckpointsDir, keep: int) -> list[str]:
    """Delete the checkpoints that are not needed, and what earlier deletions left; return what could not be deleted.

    It is housekeeping after a good save: nothing that fails here may end the training, and the next save tries again.
    """
    try:
        problems = finish_deletions(checkpoints)
        doomed = choose_prunable(list_checkpoints(checkpoints), keep)
    except OSError as error:
        return [_not_deleted(checkpoints.path, error)]
    for state in doomed:
        try:
            delete_checkpoint(state.folder)
        except OSError as error:
            problems.append(_not_deleted(state.folder, error))
    return problems


def _not_deleted(path: Path, error: OSError) -> str:
    return f"{path}: cannot be deleted: {error.filename or path}: {error.strerror or error}"


def finish_deletions(checkpoints: CheckpointsDir) -> list[str]:
    """Remove what interrupted deletions left behind; return what is still there, and why."""
    problems = []
    for doomed in leftovers(checkpoints):
        try:
            remove(doomed)
        except OSError as error:
            problems.append(_not_deleted(doomed, error))
    return problems


def leftovers(checkpoints: CheckpointsDir) -> Iterator[Path]:
    """Yield the folders of interrupted deletions."""
    yield from checkpoints.path.glob(f"{DELETING}*")
