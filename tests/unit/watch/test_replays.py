"""The quick ones of the replayed incidents and healthy runs, as the page of the manual has them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "benchmarks"))
from watch_replays import incident_row, line_of, normal_row  # noqa: E402
from watching.incidents import INCIDENTS, Incident, evaluation_hang_with_heartbeats  # noqa: E402
from watching.normal import NORMAL, Normal, bars, evaluations, ramp_up  # noqa: E402
from watching.simulation import replay  # noqa: E402

pytestmark = pytest.mark.slow

sys.path.remove(str(ROOT / "benchmarks"))
PAGE = (ROOT / "docs" / "measurements" / "watch-replays.md").read_text(encoding="utf-8")
SLOW = (evaluation_hang_with_heartbeats, evaluations, ramp_up, bars)
"""384 ranks, long runs, floods: `benchmarks/watch_replays.py` has them all."""


@pytest.mark.parametrize("incident", [each for each in INCIDENTS if each.make not in SLOW], ids=lambda each: each.what)
def test_an_incident_is_noticed_as_the_page_says(incident: Incident) -> None:
    seen = replay(incident.make())
    *_, found, sentence = row = incident_row(incident, seen)
    assert sentence and found.endswith(" s") and not seen.is_early
    assert line_of(row) in PAGE


@pytest.mark.parametrize("normal", [each for each in NORMAL if each.make not in SLOW], ids=lambda each: each.what)
def test_a_healthy_run_shows_nothing(normal: Normal) -> None:
    seen = replay(normal.make())
    assert (seen.stalls, seen.noticed) == ([], [])
    assert line_of(normal_row(normal, seen)) in PAGE
