"""The dashboard for Grafana that comes with `bsl`."""

from __future__ import annotations

from bigsci_launch.content import packaged
from bigsci_launch.safe_files import read_file


def dashboard_text() -> str:
    """Return the dashboard as JSON, as Grafana imports it."""
    return read_file(packaged("configs", "grafana", "runs.json"), follow=True).decode().rstrip("\n")
