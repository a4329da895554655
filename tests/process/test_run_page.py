"""The curves of a run's page in a real browser: pointing at one says which step is there."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from bigsci_launch import pages
from bigsci_launch.watch.show.curves import Curve, Flag, draw
from bigsci_launch.watch.show.page import SCRIPT, STYLE

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")

POINT = """
const svg = document.querySelector("svg[data-places]"), box = svg.getBoundingClientRect();
const x = box.left + box.width * svg.querySelector("g.seam line").getAttribute("x1") / svg.viewBox.baseVal.width;
svg.dispatchEvent(new PointerEvent("pointermove", {clientX: x, clientY: box.top + 50}));
"""


@pytest.mark.skipif(BROWSER is None, reason="neither chromium nor google-chrome is installed")
def test_pointing_at_a_curve_says_which_step_is_there(tmp_path: Path) -> None:
    old = Curve("0001", tuple((step, 6.0 - step / 10) for step in range(1, 17)))
    new = Curve("0002", tuple((step, 5.0 - step / 10) for step in range(17, 31)))
    chart = draw([old, new], [Flag(17, "0002", "begins", "seam")], "loss")
    path = tmp_path / "run.html"
    path.write_text(pages.render_page("run", STYLE, f"{chart}<script>{SCRIPT}</script><script>{POINT}</script>"))
    argv = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--enable-logging=stderr"]
    argv += [f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", f"file://{path}"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=True)
    assert re.search(r"<output[^>]*>step 17: 3\.3, attempt 0002<", done.stdout)
    assert "Uncaught" not in done.stderr
