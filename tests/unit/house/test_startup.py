"""`bsl --help` is fast and loads nothing heavy."""

from __future__ import annotations

import json
import resource
import subprocess
import sys

import pytest

HEAVY = {"torch", "deepspeed", "pydantic", "rich", "yaml", "jinja2", "numpy", "textual"}
PROGRAM = """
import json, sys
sys.argv = ["bsl", "--help"]
from bigsci_launch.cli.main import main
try:
    main()
finally:
    print("MODULES " + json.dumps(sorted({name.split(".")[0] for name in sys.modules})), file=sys.stderr)
"""


def test_help_loads_nothing_heavy() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300, check=True)
    loaded = set(json.loads(done.stderr.split("MODULES ")[1]))
    assert not loaded & HEAVY
    assert "Commands:" in done.stdout


def processor_seconds() -> float:
    """Return what ended children have used so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def cheapest_start(*words: str) -> float:
    """Return the processor time of the cheapest of several starts, so that other work on the machine counts less."""
    seconds = []
    for _ in range(5):
        before = processor_seconds()
        subprocess.run([sys.executable, *words], capture_output=True, timeout=300, check=True)
        seconds.append(processor_seconds() - before)
    return min(seconds)


@pytest.mark.slow
def test_help_costs_less_than_five_imports_of_click() -> None:
    """Compared on one machine, because a busy or a slower one needs more time for both."""
    assert cheapest_start("-m", "bigsci_launch", "--help") < 5 * cheapest_start("-c", "import click")
