"""Known hangs: found as folders on a search path, read, and recognised in a verdict and its evidence.

A signature is content, not code: `signatures/NAME/signature.yaml`, with a recording next to it that it must match.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from bigsci_launch.content import content_folders, packaged
from bigsci_launch.errors import ConfigError
from bigsci_launch.spy.evidence.known_code import bare_name
from bigsci_launch.spy.evidence.ranks import Evidence, RankEvidence
from bigsci_launch.spy.evidence.samples import Child
from bigsci_launch.spy.evidence.stacks import ThreadStack
from bigsci_launch.spy.evidence.trusted import read_trusted
from bigsci_launch.spy.judge.conclusion import Conclusion, KnownHang
from bigsci_launch.spy.taxonomy import HangClass

if TYPE_CHECKING:
    from bigsci_launch.spy.known.schema import RankCondition, SignatureFile

FILE = "signature.yaml"


@dataclass(frozen=True, slots=True)
class Signature:
    """A known hang: the name of its folder, its file, and the content of that file."""

    name: str
    path: Path
    file: SignatureFile

    @property
    def num_conditions(self) -> int:
        """How many conditions it has: of two that match, the one with more conditions is more specific."""
        conditions = self.file.when.ranks
        patterns = sum(len(condition.stack or ()) for condition in conditions)
        keys = sum(len(condition.model_fields_set - {"who", "stack"}) for condition in conditions)
        return patterns + keys + (self.file.when.classes is not None)


@dataclass(frozen=True, slots=True)
class Library:
    """Signatures in the order of the search path; `problems` has a line for each file that cannot be used."""

    signatures: tuple[Signature, ...]
    problems: tuple[str, ...]


def read_library() -> Library:
    """Read every signature on the search path. An invalid file becomes a problem: it must not hide a verdict."""
    found: dict[str, Signature] = {}
    problems: list[str] = []
    own = packaged("diagnostics", "signatures")
    for folder in content_folders("signatures", own):
        for path in sorted(folder.glob(f"*/{FILE}")):
            if path.parent.name in found:
                continue
            try:
                found[path.parent.name] = read_signature(path, is_trusted=folder == own)
            except ConfigError as error:
                problems.append("; ".join(str(problem) for problem in error.problems) or error.message)
    return Library(tuple(found.values()), tuple(problems))


def read_signature(path: Path, *, is_trusted: bool = False) -> Signature:
    """Read the signature in the file at `path`. `is_trusted`: it is known to be valid.

    Raises:
        ConfigError: the file cannot be read, or it is invalid; with all problems, each `file:line:column: key: text`.
    """
    if is_trusted:
        return Signature(path.parent.name, path, cast("SignatureFile", read_trusted(path)))
    from bigsci_launch.config.problems import read_valid
    from bigsci_launch.spy.known.schema import SignatureFile

    return Signature(path.parent.name, path, read_valid(SignatureFile, path))


def name_hang(evidence: Evidence, conclusion: Conclusion, library: Library) -> Conclusion:
    """Return `conclusion` with the known hang that it matches, if any.

    A job that may not hang is compared as if it did, but no remedy is given: it may cost a node or a job.
    """
    signature = find_signature(evidence, conclusion, library.signatures)
    if signature is None:
        return conclusion
    remedy = _one_line(signature.file.remedy) if conclusion.if_hang is None else ""
    known = KnownHang(signature.name, _one_line(signature.file.explanation), remedy)
    return replace(conclusion, signature=known)


def _one_line(text: str) -> str:
    return " ".join(text.split())


def find_signature(evidence: Evidence, conclusion: Conclusion, signatures: Sequence[Signature]) -> Signature | None:
    """Return the signature that matches; of several, the one with most conditions, then the first on the path."""
    matching = [signature for signature in signatures if matches(signature, evidence, conclusion)]
    return max(matching, key=lambda signature: signature.num_conditions, default=None)


def matches(signature: Signature, evidence: Evidence, conclusion: Conclusion) -> bool:
    """Whether every condition of `signature` is true of the job, or would be if it were known to hang."""
    when, conclusion = signature.file.when, conclusion.if_hang or conclusion
    if conclusion.state not in when.states or (when.classes and conclusion.hang_class not in when.classes):
        return False
    if conclusion.hang_class is HangClass.NODE_LOST and not when.classes:
        return False  # what the other ranks show is how they wait for it
    return all(_holds(condition, evidence, conclusion) for condition in when.ranks)


def _holds(condition: RankCondition, evidence: Evidence, conclusion: Conclusion) -> bool:
    """Whether enough of the ranks in question show what `condition` asks for."""
    if condition.who == "some":
        return any(_shows(condition, seen) for seen in evidence.ranks)
    suspects = {suspect.rank for suspect in conclusion.suspects}
    asked = [seen for seen in evidence.ranks if condition.who != "suspects" or seen.rank in suspects]
    num_known = sum(1 for seen in asked if seen.threads or seen.is_gone)
    needed = {"suspects": len(asked), "most": num_known // 2 + 1, "all": num_known}[condition.who]
    return 0 < needed <= sum(_shows(condition, seen) for seen in asked)


_TEXTS: tuple[tuple[str, Callable[[RankEvidence], list[str]]], ...] = (
    ("wchan", lambda seen: [seen.last.wchan] if seen.last and seen.last.wchan else []),
    ("call", lambda seen: [seen.last.system_call] if seen.last else []),
    ("child", lambda seen: [f"{child.comm} {child.state} {child.wchan}" for child in _children(seen)]),
    ("error", lambda seen: [str(error) for error in (seen.error, seen.failure) if error]),
    ("exit", lambda seen: [str(seen.exit or "gone")] if seen.is_gone else []),
)
"""The texts of a rank that the pattern of each key is matched against."""


def _shows(condition: RankCondition, seen: RankEvidence) -> bool:
    """Whether one rank shows everything that `condition` asks for."""
    for key, texts_of in _TEXTS:
        pattern = getattr(condition, key)
        if pattern is not None and not any(re.search(pattern, text) for text in texts_of(seen)):
            return False
    return (
        (condition.state is None or (seen.last is not None and seen.last.state in condition.state))
        and (condition.writing is None or condition.writing == _is_writing(seen))
        and (condition.stack is None or any(_is_within(condition.stack, thread) for thread in seen.threads or ()))
        and (condition.without is None or _is_without(condition.without, seen))
    )


def _children(seen: RankEvidence) -> Sequence[Child]:
    return (seen.last.children or ()) if seen.last else ()


def _is_writing(seen: RankEvidence) -> bool:
    written = [sample.written_bytes for sample in (*seen.samples[:1], *seen.samples[1:][-1:])]
    return len(written) == 2 and (written[1] or 0) > (written[0] or 0)


def _is_without(pattern: str, seen: RankEvidence) -> bool:
    return bool(seen.threads) and not any(_is_within((pattern,), thread) for thread in seen.threads or ())


def _is_within(patterns: Sequence[str], thread: ThreadStack) -> bool:
    """Whether calls of `thread` match `patterns` in their order; other calls may be in between."""
    calls = iter(f"{bare_name(frame.function)} {frame.file}" for frame in thread.frames)
    return all(any(re.search(pattern, call) for call in calls) for pattern in patterns)
