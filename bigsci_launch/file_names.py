"""Names of files and folders that one room writes and another finds; for each, the function that reads the name."""

from __future__ import annotations

import re

LATEST = "latest"
"""The file in a folder of checkpoints that names the newest one. The name is DeepSpeed's."""
CHECKPOINT_RECORD = "checkpoint.json"
"""What bsl writes into a checkpoint about it: when it was saved, by which run, and which files it has."""

_TAG = re.compile(r"global_step([0-9]+)")
_DUMP = re.compile(r"step-([0-9]+)-(before|after)")
_RANK = re.compile(r"rank-([0-9]+)")
_LAUNCHER = re.compile(r"launcher-([0-9]+)")
_DIGESTS = ".digests.json"


def checkpoint_tag(step: int) -> str:
    """Return the name of the checkpoint after `step`, which is DeepSpeed's: `global_step20`."""
    return f"global_step{step}"


def step_of_tag(name: str) -> int | None:
    """Return the step of a checkpoint's name; None for another name."""
    match = _TAG.fullmatch(name)
    return int(match[1]) if match else None


def dump_name(step: int, when: str) -> str:
    """Return the name of a dump of weights: `step-000005-before`. `when` is `before` or `after`."""
    return f"step-{step:06d}-{when}"


def moment_of_dump(name: str) -> tuple[int, str] | None:
    """Return step and `before` or `after` of a dump's name; None for another name."""
    match = _DUMP.fullmatch(name)
    return (int(match[1]), match[2]) if match else None


def steps_done_at_dump(name: str) -> int | None:
    """Return how many steps were done when a dump was made, from its name; None for another name."""
    moment = moment_of_dump(name)
    return moment[0] - (moment[1] == "before") if moment else None


def rank_name(rank: int) -> str:
    """Return the stem of every per-rank file: `rank-0003`."""
    return f"rank-{rank:04d}"


def rank_of_name(stem: str) -> int | None:
    """Return the rank of a per-rank file's stem; None for another name."""
    match = _RANK.fullmatch(stem)
    return int(match[1]) if match else None


def launcher_name(number: int) -> str:
    """Return the stem of every file of a launcher of ranks: `launcher-0001`."""
    return f"launcher-{number:04d}"


def launcher_of_name(stem: str) -> int | None:
    """Return the number in the stem of a file of a launcher; None for another name."""
    match = _LAUNCHER.fullmatch(stem)
    return int(match[1]) if match else None


def digests_name(rank: int) -> str:
    """Return the name of the file with the digests of `rank`: `rank-0003.digests.json`."""
    return rank_name(rank) + _DIGESTS


def is_digests_name(name: str) -> bool:
    """Whether a file is called as one with the digests of a rank."""
    return name.endswith(_DIGESTS) and rank_of_name(name.removesuffix(_DIGESTS)) is not None
