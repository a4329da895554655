"""Compares the files of two folders that no reader knows: by their bytes, which say whether they are the same."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bigsci_launch.file_names import CHECKPOINT_RECORD
from bigsci_launch.safe_files import open_stream
from bigsci_launch.weights.files.mapped import UnreadableFile
from bigsci_launch.weights.files.pool import MANY_FILES, FilePool, equal_segments
from bigsci_launch.weights.files.sources import OtherFile, Weights
from bigsci_launch.weights.files.tensors import NotRead, Segment

START_BYTES = 8192
TEXT_CONTROLS = "\t\n\r\f\x1b"
MAX_NAMES = 8


@dataclass(frozen=True, slots=True)
class OtherFiles:
    """What differs: files that may hold weights, and a note about those that hold none."""

    not_read: tuple[NotRead, ...] = ()
    notes: tuple[str, ...] = ()


def compare_others(a: Weights, b: Weights) -> OtherFiles:
    """Compare the files that no reader knows, by their names in the two folders."""
    left = {file.label: file for file in a.others}
    right = {file.label: file for file in b.others}
    files = FilePool(MANY_FILES)
    plain: list[str] = []
    not_read: list[NotRead] = []
    are_folders = a.path.is_dir() and b.path.is_dir()
    for label in sorted(left.keys() | right.keys()):
        one, other = left.get(label), right.get(label)
        if Path(label).name == CHECKPOINT_RECORD or (one and other and _are_equal(one.path, other.path, files)):
            continue
        present = one or other
        assert present is not None
        which = "" if one and other else " (only in A)" if one else " (only in B)"
        if all(file is None or holds_no_weights(file) for file in (one, other)):
            plain += [f"{label}{which}"] * are_folders
        else:
            differs = "its bytes differ" if one and other else f"only {'A' if one else 'B'} has it"
            not_read.append(NotRead(label, "a file", present.path, f"its format is unknown, and {differs}"))
    files.close_all()
    return OtherFiles(tuple(not_read), tuple(_note(plain)))


def _note(names: list[str]) -> Iterator[str]:
    if names:
        more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
        yield f"files that hold no weights differ: {', '.join(names[:MAX_NAMES])}{more}"


def _are_equal(a: Path, b: Path, files: FilePool) -> bool:
    try:
        sizes = [path.stat().st_size for path in (a, b)]
        if sizes[0] != sizes[1] or not sizes[0]:
            return sizes[0] == sizes[1]
        return equal_segments((Segment(a, 0, sizes[0]),), (Segment(b, 0, sizes[1]),), files)
    except (OSError, UnreadableFile):
        return False


def holds_no_weights(file: OtherFile) -> bool:
    """Whether a file holds no weights: its name says so, or it is text."""
    if file.is_plain:
        return True
    try:
        with open_stream(file.path, follow=True) as stream:
            start = stream.read(START_BYTES)
    except OSError:
        return False
    try:
        # A character may be cut at the end, which this decoder accepts.
        text = getincrementaldecoder("utf-8")().decode(start)
    except UnicodeDecodeError:
        return False
    return not any(ord(character) < 32 and character not in TEXT_CONTROLS for character in text)
