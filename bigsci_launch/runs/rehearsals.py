"""Which code and which run files were rehearsed: what a rehearsal is valid for, and the reports of earlier ones."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bigsci_launch.config.load import LoadedRun
from bigsci_launch.errors import RunDirError
from bigsci_launch.runs.layout import entries_of, read_json

LENGTH_KEYS = {"steps", "stop_after_steps"}
DIGITS = 12
SHORT = 7
_NUMBER = re.compile(r"[0-9]+")


@dataclass(frozen=True, slots=True)
class RehearsalDir:
    """The folder of one rehearsal, which holds its report and the run directory of its attempts."""

    path: Path

    @property
    def report(self) -> Path:
        return self.path / "report.json"


def rehearsals_of(root: Path, name: str) -> list[RehearsalDir]:
    """Return the rehearsals of run `name` below `root`, the oldest first."""
    found = [path for path in entries_of(root / "rehearsals" / name) if _NUMBER.fullmatch(path.name)]
    return [RehearsalDir(path) for path in sorted(found, key=lambda path: int(path.name))]


def next_rehearsal(root: Path, name: str) -> RehearsalDir:
    """Return the folder of the next rehearsal of run `name` below `root`, which does not exist yet."""
    numbers = [int(rehearsal.path.name) for rehearsal in rehearsals_of(root, name)]
    return RehearsalDir(root / "rehearsals" / name / f"{max(numbers, default=0) + 1:04d}")


@dataclass(frozen=True, slots=True)
class CodeRevision:
    """The state of the code: the revision of each git repository by its role, and the digest of what is not committed.

    A revision is None if the folder is in no repository, or git does not answer. `is_dirty` is None if no repository
    says it. Files that git does not track are only counted.
    """

    repositories: Mapping[str, str | None]
    is_dirty: bool | None
    diff_digest: str | None
    num_untracked: int = 0

    @property
    def is_known(self) -> bool:
        return any(self.repositories.values())

    @property
    def short(self) -> str:
        """The revision for people: `1a2b3c4`, with a word on changes that are not committed."""
        known = list(dict.fromkeys(revision[:SHORT] for revision in self.repositories.values() if revision))
        text = "+".join(known) or "an unknown revision"
        return f"{text} with uncommitted changes" if self.is_dirty else text

    def is_same(self, other: CodeRevision) -> bool | None:
        """Whether both are the same code; None if one of them is not known."""
        if not (self.is_known and other.is_known):
            return None
        return (dict(self.repositories), self.diff_digest) == (dict(other.repositories), other.diff_digest)


def config_identity(loaded: LoadedRun) -> str:
    """Return the digest of everything in a run that a rehearsal is about: model, parallelism, training, program, site.

    The name of the run, its length, its data, its queue and its learning rate are not part of it.
    """
    config = loaded.config.model_dump(mode="json")
    training = {key: value for key, value in config["training"].items() if key not in LENGTH_KEYS}
    document = {
        **{key: config[key] for key in ("model", "parallelism", "guards", "env", "faults")},
        "training": training,
        "command": config["run"]["command"],
        "site": {"name": loaded.site.name, **loaded.site.config.model_dump(mode="json")},
    }
    return digest(json.dumps(document, sort_keys=True))


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:DIGITS]


def revision_document(revision: CodeRevision) -> dict[str, Any]:
    return {
        "repositories": dict(revision.repositories),
        "dirty": revision.is_dirty,
        "diff_digest": revision.diff_digest,
        "untracked_files": revision.num_untracked,
    }


def parse_revision(document: Mapping[str, Any]) -> CodeRevision:
    """Read what `revision_document` wrote.

    Raises:
        KeyError, TypeError: it is something else.
    """
    return CodeRevision(
        dict(document["repositories"]), document["dirty"], document["diff_digest"], document["untracked_files"]
    )


@dataclass(frozen=True, slots=True)
class PastRehearsal:
    """What a stored report says. `made` is seconds since the epoch, `failed` the phases that failed."""

    path: Path
    verdict: str
    made: float
    identity: str
    revision: CodeRevision
    failed: tuple[str, ...]
    num_not_checked: int

    @property
    def words(self) -> str:
        """The verdict and the day: `go, with 1 thing not checked, on 2026-11-23`."""
        text = self.verdict
        if self.failed:
            text += f" ({', '.join(self.failed)} failed)"
        if self.verdict == "go" and self.num_not_checked:
            text += f", with {self.num_not_checked} thing{'s'[: self.num_not_checked > 1]} not checked"
        return f"{text}, on {time.strftime('%Y-%m-%d', time.gmtime(self.made))}"


def read_rehearsals(root: Path, name: str) -> list[PastRehearsal]:
    """Return the rehearsals of run `name` with a verdict, the oldest first.

    Those that were interrupted, that never started, or that another version stored are left out.
    """
    found = []
    for folder in rehearsals_of(root, name):
        try:
            document = read_json(folder.report)
            if document["verdict"] == "unknown":
                continue
            found.append(
                PastRehearsal(
                    folder.path,
                    str(document["verdict"]),
                    float(document["made"]),
                    str(document["identity"]),
                    parse_revision(document["revision"]),
                    tuple(phase["name"] for phase in document["phases"] if phase["outcome"] == "failed"),
                    len(document["not_checked"]),
                )
            )
        except (RunDirError, KeyError, TypeError, ValueError):
            continue
    return found


def describe_past(past: Sequence[PastRehearsal], revision: CodeRevision, identity: str, *, command: str) -> str:
    """Return one line on whether this revision and this configuration were rehearsed; `command` would do it."""
    same = [each for each in past if each.identity == identity and each.revision.is_same(revision)]
    if same and same[-1].verdict == "go":
        return f"rehearsed at {revision.short}: {same[-1].words}"
    if same:
        return f"warning: rehearsed at {revision.short}: {same[-1].words}; {command} rehearses it again"
    last = f" (last rehearsal: at {past[-1].revision.short}: {past[-1].words})" if past else ""
    if not revision.is_known:
        what = "the revision of the code is unknown, so past rehearsals cannot be matched"
    elif past and past[-1].revision.is_same(revision):
        what = "never rehearsed with this configuration"
    elif past and past[-1].revision.repositories == revision.repositories:
        what = f"never rehearsed at {revision.short}: the uncommitted changes differ"
    else:
        what = f"never rehearsed at {revision.short}"
    return f"note: {what}{last}; {command} does it in minutes"
