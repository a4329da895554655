"""From what was collected to the answer: the verdict with the known hang that it matches, and the stored evidence."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from bigsci_launch.errors import ConfigError
from bigsci_launch.spy.evidence import known_code
from bigsci_launch.spy.evidence.bundle import Bundle, write_bundle
from bigsci_launch.spy.evidence.ranks import Evidence
from bigsci_launch.spy.evidence.stack_classes import unlike_most
from bigsci_launch.spy.judge.conclusion import Conclusion
from bigsci_launch.spy.judge.verdict import Judgment, deliberate
from bigsci_launch.spy.known.library import name_hang, read_library
from bigsci_launch.spy.show.document import to_document
from bigsci_launch.spy.show.report import to_lines, to_text

MOST_NAMED = 8


@dataclass(frozen=True, slots=True)
class SpyAnswer:
    """The evidence and the verdict on it. `problems` are files with knowledge that could not be used, in words."""

    evidence: Evidence
    judgment: Judgment
    problems: tuple[str, ...]

    @property
    def conclusion(self) -> Conclusion:
        return self.judgment.conclusion


def answer_from(found: Bundle, axes: str | None = None) -> SpyAnswer:
    """Judge what was collected. `axes` is the topology, if the user named one.

    Raises:
        ConfigError: `axes` is another number of ranks than the job has.
    """
    evidence = found.evidence(axes)
    if axes is not None and evidence.topology and evidence.topology.world_size != evidence.world_size:
        size = evidence.topology.world_size
        raise ConfigError(
            f"--topology: {axes} is {size} ranks, but the job has {evidence.world_size}",
            hint=_hint_at_strangers(evidence, size) or "omit --topology: the verdict is the same, without coordinates",
        )
    judgment, library = deliberate(evidence), read_library()
    problems = (
        *(f"known code left out: {problem}" for problem in known_code.PROBLEMS),
        *(f"signature left out: {problem}" for problem in library.problems),
    )
    named = replace(judgment, conclusion=name_hang(evidence, judgment.conclusion, library))
    return SpyAnswer(evidence, named, problems)


def _hint_at_strangers(evidence: Evidence, size: int) -> str:
    """Return which processes of files are not like most, if there are more of them than ranks."""
    unlike = unlike_most(evidence)
    if not evidence.is_from_files or not 0 < len(unlike) <= evidence.world_size - size:
        return ""
    unplaced = replace(evidence, topology=None)
    named = ", ".join(f"{unplaced.name(seen.rank)} in {seen.place}" for seen in unlike[:MOST_NAMED])
    more = f" and {len(unlike) - MOST_NAMED} more" if len(unlike) > MOST_NAMED else ""
    return f"these do not look like ranks: {named}{more}; leave them out of the files"


def store_evidence(folder: Path, found: Bundle, answer: SpyAnswer) -> None:
    """Write the bundle with its report to `folder`.

    Raises:
        CollectError: the folder cannot be written.
    """
    report = to_text(to_lines(answer.evidence, answer.conclusion))
    write_bundle(folder, found, to_document(answer.evidence, answer.conclusion), report)
