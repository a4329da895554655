"""A plugin of pytest that writes each result as a line of JSON at once: `-p on_gpu.test_report`, file in TEST_REPORT.

With pytest-xdist the process that hands out the tests reports them, once each.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write the result of a test, or of what failed or was skipped before it."""
    if os.environ.get("PYTEST_XDIST_WORKER") or (report.when != "call" and report.passed):
        return
    words = "" if report.passed else _words(report)
    line = {"test": report.nodeid.partition("::")[2], "state": report.outcome, "words": words}
    with Path(os.environ["TEST_REPORT"]).open("a") as stream:
        stream.write(json.dumps({**line, "seconds": round(report.duration, 1)}) + "\n")


def _words(report: pytest.TestReport) -> str:
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2]
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(crash.message if crash else report.longrepr)[:1500]
