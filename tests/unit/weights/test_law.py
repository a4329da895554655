"""The law: a random checkpoint with one random change anywhere is never "equal", and saved again it always is.

`python benchmarks/weights_law.py` runs as many cases as one has time for, and repeats one that failed here.
"""

from __future__ import annotations

import importlib
import shutil
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from bigsci_launch.weights.match import pairing

# torch warns of prototypes: sparse, nested and quantized tensors, complex32.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture(scope="module")
def law() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        return importlib.import_module("weights_law")


@pytest.mark.slow
@given(seed=st.integers(0, 2**32))
@settings(phases=(Phase.explicit, Phase.reuse, Phase.generate))
def test_no_change_is_equal_and_the_same_is(
    seed: int, law: ModuleType, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Each example is a checkpoint in a random container, with about nine copies."""
    folder = tmp_path_factory.mktemp("law")
    try:
        wrong = [str(verdict) for verdict in law.run_round(f"{seed}/0", folder) if verdict.wrong]
    finally:
        shutil.rmtree(folder)
    assert not wrong, f"{wrong}: python benchmarks/weights_law.py --seed {seed} --rounds 1"


def test_the_law_notices_what_is_left_out(law: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that forgets the values of a file calls a changed number "equal"."""
    read = pairing.read_contents
    monkeypatch.setattr(pairing, "read_contents", lambda *given: replace(read(*given), values=()))
    found = [verdict.wrong for verdict in law.run_round("1/0", tmp_path, "trainer")]
    assert "EQUAL" in found
