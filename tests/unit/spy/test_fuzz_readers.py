"""Every reader of foreign input meets some damaged files; `benchmarks/fuzz_readers.py` has many more."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
from fuzz_readers import Tally, damage, run_case  # noqa: E402
from fuzzing.floods import FLOODS  # noqa: E402
from fuzzing.readers import READERS, Broken, Reader, as_bytes, write  # noqa: E402

sys.path.remove(str(BENCHMARKS))
CASES = 12
QUICK = ("pipes", "devices", "links in a circle", "odd names", "empty files", "closed files", "a terabyte of nothing")


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name)
def test_damage_ends_with_an_answer_or_an_error_of_ours(reader: Reader, tmp_path: Path) -> None:
    tally = Tally()
    for number in range(CASES):
        folder, draw = tmp_path / str(number), random.Random(f"test {reader.name} {number}")
        write(folder, draw.choice(reader.seeds), damage(reader, draw))
        run_case(reader, folder, tally, f"case {number}", limit_s=20.0)
    assert (tally.cases, tally.failures) == (CASES, {})


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name)
def test_sound_files_are_read(reader: Reader, tmp_path: Path) -> None:
    """Damage is found only in what would be read."""
    for number, files in enumerate(reader.seeds[:12]):
        write(tmp_path / str(number), files, lambda _, content: as_bytes(content))
        reader.read(tmp_path / str(number))


@pytest.mark.parametrize("name", QUICK)
def test_places_that_are_no_files(name: str, tmp_path: Path) -> None:
    flood = next(each for each in FLOODS if each.name == name)
    flood.make(tmp_path)
    tally = Tally()
    for reader in READERS:
        if reader.name in flood.readers:
            run_case(reader, tmp_path, tally, name, limit_s=20.0)
    assert tally.cases and not tally.failures


def test_what_is_wrong_is_noted_once_for_each_kind(tmp_path: Path) -> None:
    def fail(_folder: Path) -> None:
        raise Broken("accuses ranks [9], which no file holds")

    tally = Tally()
    for number in range(2):
        assert run_case(Reader("x", (), fail), tmp_path, tally, f"case {number}")
    assert (tally.cases, len(tally.failures)) == (2, 1)
