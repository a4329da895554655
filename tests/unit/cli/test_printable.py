"""What people read does nothing to their terminal: control characters of others are shown, not obeyed."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bigsci_launch.printable import printable, without_escapes

ROOT = Path(__file__).resolve().parents[3]
ACTIVE = [*range(32), 0x7F, *range(0x80, 0xA0), 0x061C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A)]
EVIL = "\x1b]52;c;ZXZpbA==\x07\x1b[2J\x9b2J\u202egnp.exe\u2028\x7f\rx"
SHOWN = r"\x1b]52;c;ZXZpbA==\x07\x1b[2J\x9b2J\u202egnp.exe\u2028\x7f\x0dx"
PROGRAM = f"""
import logging, sys
from bigsci_launch.cli import console
from bigsci_launch.cli.boundary import Boundary
from bigsci_launch.errors import BslError
evil = {EVIL!r}
for way in sys.argv[1:]:
    print(f"== {{way}}", flush=True)
    if way == "answer": console.answer(evil)
    if way == "lines": console.answer_lines([evil])
    if way == "styled": console.answer_styled(evil, {{"fg": "red"}})
    if way == "spans": console.answer_spans([(evil, {{"dim": True}}), ("x", {{}})])
    if way == "wrapped": console.answer_wrapped([evil])
    if way == "table": console.answer_table(("name", ">n"), [(evil + "\\n[bold]forged", "1")])
    if way == "talk": console.talk(evil)
    if way == "json": console.answer_json({{"x": evil}})
    if way == "log":
        logging.getLogger().handlers.clear()
        from bigsci_launch.cli.main import bsl
        bsl.callback(0)
        logging.warning(evil)
    if way == "progress":
        with console.progress("x", 2) as report: report(1, evil)
    if way == "live":
        with console.live() as show: show(lambda width, height: [[(evil, {{}})]], evil)
    if way == "error":
        def fail(*_): raise BslError(evil, hint=evil)
        group = Boundary(name="x", callback=fail, invoke_without_command=True)
        group.main([], standalone_mode=False)
    if way.startswith("output"):
        line = console.output_printer(way == "output-color")("\\x1b[31mred\\x1b[0m " + evil)
        console.answer_output(line)
    sys.stdout.flush()
"""
WAYS = ("answer", "lines", "styled", "spans", "wrapped", "table", "talk", "json", "log", "progress", "live", "error")
Shown = Callable[..., str]


@pytest.fixture
def on_terminal() -> Shown:
    """What a program writes to the terminal that it runs in."""

    def run(*argv: str, cwd: Path | None = None) -> str:
        master, terminal = pty.openpty()
        environment = {**os.environ, "COLUMNS": "400", "LINES": "9", "TERM": "xterm", "PYTHONPATH": str(ROOT)}
        program = subprocess.Popen(
            [sys.executable, *argv], stdin=terminal, stdout=terminal, stderr=terminal, env=environment, cwd=cwd
        )
        os.close(terminal)
        parts = []
        try:
            while part := os.read(master, 65536):
                parts.append(part)
        except OSError:  # Linux says so at the end
            pass
        os.close(master)
        program.wait()
        return b"".join(parts).decode().replace("\r\n", "\n")

    return run


def without_our_own(text: str) -> str:
    """Leave out colours, and what rich needs to draw bars and live screens."""
    return re.sub(r"\x1b\[[0-9;]*m|\x1b\[\??[0-9;]*[hlHAJK]|\r", "", text)


def test_every_active_character_becomes_a_visible_escape():
    for number in range(0x3000):
        letter = chr(number)
        shown = printable(letter)
        if number in ACTIVE and letter not in "\n\t":
            assert shown in (f"\\x{number:02x}", f"\\u{number:04x}")
        else:
            assert shown == letter
    assert printable(EVIL) == SHOWN
    assert printable("half \ud800") == "half \\ud800"


def test_nothing_that_is_printed_reaches_the_terminal_as_it_is(on_terminal: Shown):
    everything = without_our_own(on_terminal("-c", PROGRAM, *WAYS))
    assert not [letter for letter in everything if ord(letter) in ACTIVE and letter not in "\n\t"]
    said = dict(part.split("\n", 1) for part in everything.split("== ")[1:])
    assert json.loads(said.pop("json")) == {"x": EVIL}
    assert r"\n[bold]forged" in said["table"]
    assert set(said) == {*WAYS} - {"json"}
    for way, text in said.items():
        assert SHOWN in text, way


def test_the_output_of_ranks_keeps_colours_on_request_and_nothing_else(on_terminal: Shown):
    plain = on_terminal("-c", PROGRAM, "output")
    assert plain.endswith(f"\nred {SHOWN}\n")
    coloured = on_terminal("-c", PROGRAM, "output-color")
    assert coloured == f"== output-color\n\x1b[31mred\x1b[0m {SHOWN}\x1b[0m\n"
    piped = subprocess.run([sys.executable, "-c", PROGRAM, "output-color"], capture_output=True, text=True, cwd=ROOT)
    assert piped.stdout == f"== output-color\nred {SHOWN}\n"


PRINTING = re.compile(r"click\.s?echo|\bprint\(|sys\.std(out|err)\.write")


def test_only_the_console_prints():
    for path in (ROOT / "bigsci_launch" / "cli").rglob("*.py"):
        if path.name != "console.py":
            assert not PRINTING.search(path.read_text()), path


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("\x1b[31mstep:  1  \x1b[38;5;214mloss: 2.5\x1b[39m", "step:  1  loss: 2.5"),
        ("\x1b]0;a title\x07text", "text"),
        ("\x1b]8;;http://n0/log\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x1b]0;without an end\nnext line", "\nnext line"),
        ("a\x1b=b\x1b>c\x1bMd", "abcd"),
        ("no escape [31m", "no escape [31m"),
    ],
)
def test_what_a_terminal_would_not_show_is_left_out(text: str, left: str) -> None:
    assert without_escapes(text) == left
