"""Tables on terminals of different widths, and in a pipe: real pseudo-terminals, read as a person sees them."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest

from bigsci_launch.status.list import LIST_COLUMNS
from bigsci_launch.weights.show.report import COLUMNS

LIST_ROW = ("night-of-the-176b", "COMPLETED", "0002", "20/20", "pid 2626 on vm", "14 min 55 s", "runs/night-176b")
TENSOR = "transformer.layers.0.self_attention.query_key_value.weight"
DIFF_ROW = ("dp0-1 pp3 tp0-3", TENSOR, "value", "100 %", "0.0171", "0.152", "637,764", "scaled by a constant")
PROGRAM = "import sys; from bigsci_launch.cli import console; console.answer_table({!r}, [{!r}], spare={!r})"
LIST = PROGRAM.format(LIST_COLUMNS, LIST_ROW, ("directory", "attempt"))
DIFF = PROGRAM.format(COLUMNS, DIFF_ROW, (">max ulp", ">max abs"))


def on_terminal(program: str, width: int) -> str:
    """What the program prints on a terminal of that width."""
    reader, writer = pty.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    environment["TERM"] = "xterm"
    subprocess.run([sys.executable, "-c", program], stdout=writer, env=environment, timeout=300, check=True)
    os.close(writer)
    text = b""
    while (read := _read(reader)) != b"":
        text += read
    os.close(reader)
    return re.sub(r"\x1b\[[0-9;]*m", "", text.decode()).replace("\r\n", "\n")


def _read(reader: int) -> bytes:
    try:
        return os.read(reader, 65536)
    except OSError:  # the other side is closed
        return b""


@pytest.mark.parametrize(
    ("program", "width", "left_out", "whole"),
    [
        (LIST, 80, ("attempt", "directory"), LIST_ROW[0]),
        (LIST, 90, ("directory",), "pid 2626 on vm"),
        (LIST, 140, (), "runs/night-176b"),
        (DIFF, 80, ("max abs", "max ulp"), "0.0171"),
        (DIFF, 100, ("max abs", "max ulp"), "0.0171"),
        (DIFF, 200, (), TENSOR),
    ],
)
def test_no_line_is_wider_than_the_terminal(program: str, width: int, left_out: tuple[str, ...], whole: str) -> None:
    text = on_terminal(program, width)
    assert max(map(len, text.splitlines())) <= width
    spare = ("attempt", "directory") if program == LIST else ("max abs", "max ulp")
    assert tuple(name for name in spare if name not in text) == left_out
    assert whole in text


def test_columns_without_text_make_room_for_names() -> None:
    row = ("", TENSOR, *DIFF_ROW[2:-1], "")
    text = on_terminal(PROGRAM.format(COLUMNS, row, (">max ulp", ">max abs")), 70)
    heading = text.split("─")[0].split()
    assert COLUMNS[0] not in heading and COLUMNS[-1] not in heading and COLUMNS[1] in heading


@pytest.mark.parametrize(("program", "row"), [(LIST, LIST_ROW), (DIFF, DIFF_ROW)])
def test_in_a_pipe_a_row_is_whole(program: str, row: tuple[str, ...]) -> None:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=True)
    assert any(all(cell in line for cell in row) for line in done.stdout.splitlines())
