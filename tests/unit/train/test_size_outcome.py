"""What the trials of all ranks say of a size together."""

from __future__ import annotations

import pytest

pytest.importorskip("deepspeed")

from bigsci_launch.train.microbatch.automatic import _Outcome
from bigsci_launch.train.microbatch.probe import SizeTrial
from tests.support.texts import CheckText

pytestmark = pytest.mark.torch

FITS = SizeTrial(4, True, seconds=0.1, used_bytes=3)
SHORT = SizeTrial(4, False, place="BackwardPass", used_bytes=7)
TIGHT = SizeTrial(4, True, seconds=0.3, used_bytes=5, retries=2)


def test_a_size_fits_if_it_fits_on_every_rank() -> None:
    assert _Outcome((FITS, FITS)).fits
    assert not _Outcome((FITS, SHORT)).fits
    assert not _Outcome((FITS, TIGHT)).fits
    assert _Outcome((FITS, TIGHT), is_smallest=True).fits
    assert not _Outcome((FITS, SHORT), is_smallest=True).fits


def test_the_slowest_and_the_fullest_rank_count() -> None:
    assert _Outcome((FITS, TIGHT)).verdict.seconds == 0.3
    assert _Outcome((FITS, SHORT)).used_bytes == 7
    assert _Outcome((SizeTrial(4, True),)).used_bytes is None


def test_the_ranks_are_named(check_text: CheckText) -> None:
    check_text(*(_Outcome(trials).words for trials in ((FITS, SHORT), (TIGHT, FITS), (FITS, FITS))))
