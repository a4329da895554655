"""Provenance of an attempt: code revision, uncommitted changes, package versions, environment, command line.

Whole groups read run directories. So variables are recorded with their values only if they are known to hold no secret,
and of all others only the names; what looks like a secret is removed everywhere.
"""

from __future__ import annotations

import getpass
import os
import platform
import re
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import bigsci_launch
from bigsci_launch.config.masking import SECRET, is_known, is_secret_name, redact_text

GIT_TIMEOUT_S = 20.0
MAX_DIFF_BYTES = 5_000_000
# Long hexadecimal text is probably a key in an environment, but as likely a checksum in a diff.
_LONG_HEX = re.compile(r"\b[0-9a-fA-F]{32,}\b")
_ASSIGNMENT = re.compile(r"(?P<option>--set=)?(?P<name>[\w.-]+)=(?P<value>[\s\S]*)")
_SECRET_KEY = re.compile(r"(env|monitor\.notify)(\..*)?")
"""Keys of a run file whose values are recorded only in the config itself."""


@dataclass(frozen=True, slots=True)
class Provenance:
    """The document of `provenance.json`, and the text of `dirty.diff` (empty: nothing uncommitted)."""

    document: dict[str, Any]
    diff: str


def collect_provenance(argv: Sequence[str], working_directory: Path, secrets: Collection[str] = ()) -> Provenance:
    """Collect everything that identifies what is about to run. Takes some tenths of a second, mostly in git.

    `secrets` are the names of variables that are known to hold one, whatever they are called.
    """
    known = {name: value for name, value in os.environ.items() if is_known(name) and name not in secrets}
    folders = {"bigsci_launch": Path(bigsci_launch.__file__).parent, "working_directory": working_directory}
    repositories = {name: describe_repository(folder) for name, folder in folders.items()}
    roots = {entry["root"]: Path(entry["root"]) for entry in repositories.values() if entry.get("root")}
    document = {
        "schema_version": 1,
        "collected": time.time(),
        "command": [redact_argument(word) for word in argv],
        "working_directory": str(working_directory),
        "user": _user(),
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "python": {"executable": sys.executable, "version": platform.python_version()},
        "bigsci_launch": bigsci_launch.__version__,
        "bigsci_launch_file": bigsci_launch.__file__,
        "repositories": repositories,
        "packages": installed_packages(),
        "environment": redact_environment(known),
        "other_variables": sorted(os.environ.keys() - known.keys()),
    }
    return Provenance(document, "".join(uncommitted_changes(root) for root in roots.values()))


def describe_repository(folder: Path) -> dict[str, Any]:
    """Return revision and state of the git repository around `folder`; if there is none, `why`."""
    root = run_git(folder, "rev-parse", "--show-toplevel")
    if root is None:
        return {"root": None, "why": f"{folder} is not in a git repository, or git cannot be run"}
    changed = run_git(folder, "status", "--porcelain", "--untracked-files=normal")
    return {
        "root": root.strip(),
        "revision": _line(run_git(folder, "rev-parse", "HEAD")),
        "branch": _line(run_git(folder, "rev-parse", "--abbrev-ref", "HEAD")),
        "description": _line(run_git(folder, "describe", "--always", "--dirty", "--tags")),
        "changed_files": changed.splitlines() if changed is not None else None,
    }


def uncommitted_changes(root: Path) -> str:
    """Return `git diff HEAD` of the repository at `root`, below a line that names it; empty if nothing changed."""
    diff = run_git(root, "diff", "--no-ext-diff", "--no-color", "HEAD")
    if not diff:
        return ""
    cut = "" if len(diff) <= MAX_DIFF_BYTES else f"\n# cut after {MAX_DIFF_BYTES} of {len(diff)} characters\n"
    return f"# repository: {root}\n{redact_text(diff[:MAX_DIFF_BYTES])}{cut}"


def run_git(folder: Path, *arguments: str) -> str | None:
    """Return what git prints; None if it fails, is missing, or takes too long (on a slow file system)."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=GIT_TIMEOUT_S,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"},
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def installed_packages() -> dict[str, str]:
    """Return the version of every installed distribution, by name."""
    found = {each.metadata["Name"]: each.version for each in metadata.distributions() if each.metadata["Name"]}
    return dict(sorted(found.items(), key=lambda item: item[0].lower()))


def redact_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return `environment` without the parts of values that look like secrets."""
    return {name: _LONG_HEX.sub(SECRET, redact_text(value)) for name, value in sorted(environment.items())}


def redact_argument(word: str) -> str:
    """Return a word of a command line without secrets; the value of a secret's name or key is removed."""
    match = _ASSIGNMENT.fullmatch(word)
    if match and (_SECRET_KEY.fullmatch(match["name"]) or is_secret_name(re.sub(r"[.-]", "_", match["name"]))):
        return f"{match['option'] or ''}{match['name']}={SECRET}"
    return redact_text(word)


def _line(text: str | None) -> str | None:
    return text.strip() if text else None


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())
