"""What a rehearsal is valid for: a revision of the code, and the parts of a run file that decide how ranks behave."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bigsci_launch.config.load import LoadedRun

LENGTH_KEYS = {"steps", "stop_after_steps"}
DIGITS = 12
SHORT = 7


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
    """Return a short digest of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:DIGITS]


def revision_document(revision: CodeRevision) -> dict[str, Any]:
    """Return the revision as it is stored in a report."""
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
