"""Steps that ranks of `benchmarks/slow_runs.py` have recorded, as gzipped JSON: what their timelines hold."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from bigsci_launch.slow.job import PlayedJob
from bigsci_launch.slow.straggler import StepPhase
from bigsci_launch.slow.timeline import Doing, RankTimeline, TimelinePiece, WithoutCore

HERE = Path(__file__).parent / "recordings"


def recorded(name: str) -> PlayedJob:
    """Return the steps of a recording."""
    ranks = json.loads(gzip.decompress((HERE / f"{name}.json.gz").read_bytes()))
    return PlayedJob([_timeline(each) for each in ranks], None, {})


def _timeline(each: dict[str, Any]) -> RankTimeline:
    kept = {int(step): WithoutCore(*seconds) for step, seconds in each["without_core"].items()}
    return RankTimeline(each["rank"], tuple(_piece(*row) for row in each["pieces"]), 1, kept)


def _piece(
    doing: str, step: int, begin: float, seconds: float, phase: str, site: str | None, key: Any, needs: Any, size: str
) -> TimelinePiece:
    known = tuple(key) if key is not None else None
    return TimelinePiece(
        Doing[doing], step, begin, begin + seconds, StepPhase(phase), site, known, tuple(needs), size
    )  # fmt: skip
