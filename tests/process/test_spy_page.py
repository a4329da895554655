"""The page of `bsl spy --html` in a real browser: what a click, a key and an address show."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from html import unescape
from pathlib import Path

import pytest

from bigsci_launch.spy.evidence.bundle import Bundle
from bigsci_launch.spy.judge.verdict import judge
from bigsci_launch.spy.show.page import render_page

RECORDING = Path(__file__).parents[1] / "unit" / "spy" / "recordings" / "deepspeed-skip-5.json"
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
OPTIONS = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-quic", "--disable-sync",
           "--disable-background-networking", "--disable-component-update", "--enable-logging=stderr")  # fmt: skip

pytestmark = pytest.mark.skipif(BROWSER is None, reason="neither chromium nor google-chrome is installed")
Browse = Callable[..., str]


@pytest.fixture
def browse(tmp_path: Path) -> Browse:
    """`browse(script, "#rank=5")` runs `script` on a recorded hang's page and returns the text next to the grid."""
    evidence = Bundle({"topology": "tp=2,pp=2,dp=2"}, (json.loads(RECORDING.read_text()),)).evidence()
    page = render_page(evidence, judge(evidence))

    def look(script: str = "", fragment: str = "") -> str:
        path = tmp_path / "spy.html"
        path.write_text(page.replace("</body>", f"<script>{script}</script></body>"))
        argv = [
            str(BROWSER),
            *OPTIONS,
            f"--user-data-dir={tmp_path / 'profile'}",
            "--dump-dom",
            path.as_uri() + fragment,
        ]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0
        assert "CONSOLE" not in done.stderr, done.stderr  # a page logs errors in its style, markup or script
        found = re.search(r'<aside id="detail".*?</aside>', done.stdout, re.DOTALL)
        assert found is not None
        return unescape(re.sub(r"<[^>]+>", " ", found[0]))

    return look


def test_the_first_suspect_is_shown_until_another_rank_is_asked_for(browse: Browse) -> None:
    text = browse()
    assert "rank 5 (n0, dp0 pp1 tp1)" in text
    assert re.search(r"Suspect: .*all_reduce", text)
    assert "rank 3 (n0, dp1 pp0 tp1)" in browse(fragment="#rank=3")


def test_a_click_shows_the_stack_the_kernel_and_what_the_rank_waits_for(browse: Browse) -> None:
    text = browse("document.getElementById('rank-0').click()")
    assert "rank 0 (n0, dp0 pp0 tp0)" in text
    assert re.search(r"\brecv\b.*\bnext stage", text)
    assert re.search(r"PipelineEngine\._exec_recv_grads\s+engine\.py:1216", text)
    assert "S, sleeping in futex_do_wait" in text


def test_the_arrow_keys_walk_over_the_grid(browse: Browse) -> None:
    press = "document.activeElement.dispatchEvent(new KeyboardEvent('keydown', {key: '%s', bubbles: true}));"
    keys = "".join(press % key for key in ("ArrowRight", "ArrowRight", "ArrowDown", "ArrowDown"))
    assert "rank 6 (n0, dp1 pp1 tp0)" in browse(f"document.getElementById('rank-0').focus(); {keys}")
