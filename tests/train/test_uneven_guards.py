"""The guards of an uneven run: each defect is found in its step, and a sound run passes every check."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bigsci_launch.checkpoints.folder import read_record

from .uneven_settings import OFF, UNEVEN

pytestmark = pytest.mark.torch

SETTINGS: dict[str, Any] = {"training": {"steps": 4}, **OFF, "guards": {"interval": 1}, "parallelism": UNEVEN}
FOUND = {
    "factor": ("gradient reduction", []),
    "sum": ("gradient reduction", []),
    "update": ("data-parallel copies", []),
    "memory": ("memory", [2]),
}


@pytest.mark.parametrize("damage", FOUND)
def test_a_defect_is_found_in_its_step(
    start: Any, tmp_path: Path, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there are only two owners, none of them is accused; the embedding has four."""
    monkeypatch.setenv("DAMAGE", damage)
    attempt = start(tmp_path, "dp=5", "damaged_uneven", **SETTINGS)
    assert set(attempt.wait()) == {1}, attempt.logs()
    records = attempt.events(0, "guard")
    assert (records[0]["step"], records[0]["check"], records[0]["accused"]) == (3, *FOUND[damage])
    copies = [each for each in records if each["check"] == "reduced gradients" and "tied" in each["tensor"]]
    assert [each["accused"] for each in copies] == ([[2]] if damage == "sum" else [])
    if damage == "memory":
        assert records[0]["coordinates"] == [{"pp": 0, "tp": 0, "dp": 1}]


def test_sound_steps_pass(finish: Any, tmp_path: Path) -> None:
    """In bf16, with dropout, an interval that is chosen, and a resumed run."""
    run = {**SETTINGS, "guards": {"interval": "auto"}, "checkpoint": {"save_interval": 2}}
    model = {"model": {**OFF["model"], "dropout": 0.1}}
    for steps, stop in ((4, 2), (4, None)):
        training = {"steps": steps, "precision": "bf16", "stop_after_steps": stop}
        attempt = finish(tmp_path, "dp=5", **{**run, **model, "training": training})
        assert not attempt.events(0, "guard")
        saved = read_record(attempt.run.checkpoints / f"global_step{stop or steps}")
        assert saved.health["passed"] is True
