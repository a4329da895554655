"""The page of `bsl plan --html` in a real browser."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from bigsci_launch.cli.main import bsl

ROOT = Path(__file__).parents[2]
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.mark.skipif(BROWSER is None, reason="neither chromium nor google-chrome is installed")
def test_a_browser_draws_the_page_without_complaint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    page, picture = tmp_path / "plan.html", tmp_path / "plan.png"
    assert CliRunner().invoke(bsl, ["plan", "configs/bloom-176b.yaml", "--html", str(page)]).exit_code == 0
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--window-size=1280,3000"]
    options += [f"--user-data-dir={tmp_path / 'profile'}", f"--screenshot={picture}"]
    done = subprocess.run(
        [str(BROWSER), *options, page.as_uri()],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0
    assert "CONSOLE" not in done.stderr  # a page logs errors in its style, markup or script
    # As a PNG, an empty page of this size has only a few kilobytes.
    assert picture.stat().st_size > 100_000
