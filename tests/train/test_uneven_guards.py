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


@pytest.mark.parametrize("damage", [pytest.param("factor", marks=pytest.mark.long), "sum", "update", "memory"])
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


@pytest.mark.long
def test_copies_on_tensor_parallel_ranks_are_compared(
    start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 4 has another moment of the positions than the other rank of its stage, and those of another pipeline."""
    monkeypatch.setenv("DAMAGE", "update")
    monkeypatch.setenv("DAMAGED", "4")
    attempt = start(tmp_path, "tp=2,dp=4", "damaged_uneven", **SETTINGS)
    assert set(attempt.wait()) == {1}, attempt.logs()
    records = [each for each in attempt.events(0, "guard") if each["tensor"] == "exp_avg of 1.weight"]
    assert {each["check"]: each["accused"] for each in records} == {
        "data-parallel copies": [4],
        "tensor-parallel copies": [4],
    }


@pytest.mark.parametrize("topology", ["dp=5", pytest.param("tp=2,dp=4", marks=pytest.mark.long)])
def test_sound_steps_pass(finish: Any, tmp_path: Path, topology: str) -> None:
    """In bf16, with dropout, an interval that is chosen, and a resumed run."""
    run = {**SETTINGS, "guards": {"interval": "auto"}, "checkpoint": {"save_interval": 2}}
    model = {"model": {**OFF["model"], "dropout": 0.1}}
    for steps, stop in ((4, 2), (4, None)):
        training = {"steps": steps, "precision": "bf16", "stop_after_steps": stop}
        attempt = finish(tmp_path, topology, **{**run, **model, "training": training})
        assert not attempt.events(0, "guard")
        saved = read_record(attempt.run.checkpoints / f"global_step{stop or steps}")
        assert saved.health["passed"] is True
