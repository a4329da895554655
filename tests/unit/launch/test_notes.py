"""What the user is warned of before a run starts: packages that are missing, and a folder that cannot be written."""

from __future__ import annotations

from pathlib import Path

import pytest

from bigsci_launch.config.load import load_run
from bigsci_launch.launch.notes import notes

DEMO = Path(__file__).parents[3] / "configs" / "demo.yaml"


def warnings(*overrides: str) -> list[str]:
    return [line for line in notes(load_run(DEMO, overrides), is_local=True) if "monitor." in line]


def test_a_tracker_without_its_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    trackers = 'monitor.trackers=["mlflow", "trackio", "neptune"]'
    monkeypatch.setattr("bigsci_launch.launch.notes.find_spec", lambda name: name == "trackio" or None)
    assert [line.split()[2] for line in warnings(trackers)] == ["mlflow", "neptune"]


def test_otlp_without_its_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    otlp = "monitor.metrics.otlp=http://collector:4318/v1/metrics"
    assert warnings(otlp) == []
    monkeypatch.setattr("bigsci_launch.launch.notes.OTLP_MODULE", "not_there.at_all")
    [line] = warnings(otlp)
    assert "monitor.metrics.otlp" in line and "[otlp]" in line


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert warnings(f"monitor.metrics.file={tmp_path}/new/folder/x.prom") == []
    [line] = warnings(f"monitor.metrics.file={tmp_path}/file/below")
    assert f"{tmp_path}/file/below" in line
