"""The only door to rich, and to the two streams: stdout is the answer, stderr is talk."""

from __future__ import annotations

import codecs
import io
import json
import locale
import logging
import math
import os
import re
import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import click

from bigsci_launch.printable import one_line, printable
from bigsci_launch.progress import Progress
from bigsci_launch.units import format_age, format_bytes

Spans = Sequence[tuple[str, dict[str, Any]]]
"""A line whose parts have their own styles, in click's words."""
INTERRUPTED = 130
"""The exit code after Ctrl-C, as a shell reports it."""
MOST_LINES_HELD = 1000
LONGEST_HELD_S = 0.1
_COLOUR = re.compile(r"\x1b\[[0-9;:]*m")


def use_utf8() -> None:
    """Let no locale change how names of files are read: they are UTF-8, as are run files and records.

    In another locale, the program starts again in Python's UTF-8 mode, and prints what that locale can print.
    """
    if sys.getfilesystemencoding() != "utf-8":
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])
    codec = codecs.lookup(locale.nl_langinfo(locale.CODESET)).name
    is_own = codec == "ascii" or "PYTHONIOENCODING" in os.environ
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding=None if is_own else codec, errors="backslashreplace")


def open_closed_streams() -> None:
    """Give what the caller has closed (`bsl list >&-`) a place to go: else the next file opened would be stdout."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115


def answer(text: str = "") -> None:
    """Print a line of the answer on stdout; see `printable`."""
    click.echo(printable(text))


def answer_output(line: str) -> None:
    """Print a line from `output_printer` on stdout."""
    click.echo(line)


def answer_lines(lines: Iterable[str], show: Callable[[str], None] = answer) -> None:
    """Print lines of the answer in blocks, since millions of them may come; none waits for long."""
    block: list[str] = []
    printed = 0.0
    for line in lines:
        block.append(line)
        now = time.monotonic()
        if len(block) >= MOST_LINES_HELD or now - printed >= LONGEST_HELD_S:
            show("\n".join(block))
            block, printed = [], now
    if block:
        show("\n".join(block))


def talk(text: str) -> None:
    """Print a line of talk on stderr."""
    click.echo(printable(text), err=True)


class PrintableFormatter(logging.Formatter):
    """Log records for people; see `printable`."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def output_printer(wants_colours: bool) -> Callable[[str], str]:
    """Return what makes a line that a program printed safe to show.

    Its colours are left out, unless they are wanted and stdout is a terminal; then they end with the line.
    """
    if not (wants_colours and is_interactive()):
        return lambda line: printable(_COLOUR.sub("", line))
    return _with_colours


def _with_colours(line: str) -> str:
    between = [printable(part) for part in _COLOUR.split(line)]
    colours = _COLOUR.findall(line)
    return "".join(
        part for pair in zip(between, [*colours, "\x1b[0m" if colours else ""], strict=True) for part in pair
    )


def answer_styled(text: str, style: dict[str, Any]) -> None:
    """Print a line of the answer in click's `style`; plain where `has_colour` says so."""
    answer_spans([(text, style)])


def answer_spans(spans: Spans) -> None:
    """Print a line of the answer whose parts have their own styles; plain where `answer_styled` is plain."""
    click.echo(_styled(spans), color=has_colour())


def _styled(spans: Spans) -> str:
    is_styled = has_colour()
    shown = ((printable(text), style if is_styled else {}) for text, style in spans)
    return "".join(click.style(text, **style) if style else text for text, style in shown)


def has_colour() -> bool:
    """Return whether stdout has colours: those of a terminal, unless NO_COLOR is set, and wherever FORCE_COLOR is."""
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or is_interactive()


def answer_json(document: Any) -> None:
    click.echo(json.dumps(document, indent=2, default=str).replace("\x7f", "\\u007f"))


def answer_wrapped(lines: Iterable[str]) -> None:
    """Print lines of the answer; on a terminal, long ones are broken between words."""
    width = terminal_width()
    for line in map(printable, lines):
        indent = line[: len(line) - len(line.lstrip())] + "  "
        folded = textwrap.wrap(line, width, subsequent_indent=indent, break_on_hyphens=False) if width else []
        for part in folded or [line]:
            answer(part)


def terminal_width() -> int | None:
    """Return the width of the terminal on which a person reads stdout, or None."""
    return shutil.get_terminal_size().columns if is_interactive() else None


def is_interactive() -> bool:
    """Return whether a person reads stdout."""
    return sys.stdout.isatty()


def answer_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], *, title: str | None = None, spare: Sequence[str] = ()
) -> None:
    """Print a table on stdout; columns in `columns` whose name starts with `>` hold numbers, right-aligned.

    Numbers are never folded, because half a number is another number. On a terminal that is too narrow, columns without
    any text are left out, then the `spare` ones, the first one first, and then text is folded; in a pipe, a row is
    always one line.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    columns, rows = _without_spare(columns, [[one_line(cell) for cell in row] for row in rows], spare)
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        is_number = column.startswith(">")
        table.add_column(
            column.lstrip(">"), justify="right" if is_number else "left", no_wrap=is_number, overflow="fold"
        )
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console = Console(highlight=False)
    console.width = max(console.width, _width(columns, rows)) if is_interactive() else 10_000
    # Click writes it: if the reader goes away, rich would exit with 1, which means that the answer is bad.
    with console.capture() as capture:
        console.print(table)
    click.echo(capture.get(), nl=False)


def _without_spare(
    columns: Sequence[str], rows: Sequence[Sequence[str]], spare: Sequence[str]
) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """Return the table without as many of its empty and its `spare` columns as the terminal has no room for."""
    width = terminal_width()
    empty = [name for at, name in enumerate(columns) if rows and not any(row[at] for row in rows)]
    for name in dict.fromkeys((*empty, *spare)):
        if width is None or _width(columns, rows, longest_text=width) <= width:
            break
        at = columns.index(name)
        columns = [*columns[:at], *columns[at + 1 :]]
        rows = [[*row[:at], *row[at + 1 :]] for row in rows]
    return columns, rows


def _width(columns: Sequence[str], rows: Sequence[Sequence[str]], longest_text: int = 12) -> int:
    """Return the width of a table whose numbers are not folded and whose texts are folded at `longest_text`."""
    widths = []
    for index, column in enumerate(columns):
        longest = max(len(cell) for cell in (column.lstrip(">"), *(row[index] for row in rows)))
        widths.append(longest if column.startswith(">") else min(longest, longest_text))
    return sum(widths) + 3 * len(columns) + 1


@contextmanager
def progress(title: str, total: int | None) -> Iterator[Progress]:
    """Show a progress bar on stderr; without a terminal, a plain line at every tenth. With no `total`, it pulses."""
    if not sys.stderr.isatty():
        yield _plain_progress(
            total, lambda done, text: f"{title}: {done}{f'/{total}' if total else ''} {text}".rstrip()
        )
        return
    with _bar(title, total, "{task.completed}/{task.total} {task.description}") as report_progress:
        yield report_progress


@contextmanager
def _bar(title: str, total: int | None, words: str) -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn(title, markup=False), BarColumn(), TextColumn(words, markup=False), TimeElapsedColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda num_done, text="": bar.update(task, completed=num_done, description=one_line(text))


@contextmanager
def late_progress(title: str, total: int | None, *, after_s: float = 2.0) -> Iterator[Progress]:
    """Like `progress`, but only after `after_s` seconds: shorter work shows nothing and does not load rich."""
    with _late(lambda num_done: progress(title, total), after_s) as report_progress:
        yield report_progress


@contextmanager
def late_bytes(title: str, total: Callable[[], int], *, after_s: float = 2.0) -> Iterator[Progress]:
    """Like `late_progress`, for bytes: shows how many of `total()` are done, how fast, and the time left."""
    with _late(lambda num_done: _bytes(title, total(), num_done), after_s) as report_progress:
        yield report_progress


@contextmanager
def seconds_progress(title: str, total_s: float) -> Iterator[None]:
    """Show how many of `total_s` seconds have passed, like `progress`, until the block ends."""
    is_over = threading.Event()

    def report_seconds(report_progress: Progress) -> None:
        began = time.monotonic()
        while not is_over.wait(min(1.0, total_s / 10)):
            report_progress(min(int(time.monotonic() - began), math.ceil(total_s)), "s")

    with progress(title, math.ceil(total_s)) as report_progress:
        ticking = threading.Thread(target=report_seconds, args=(report_progress,), daemon=True)
        ticking.start()
        try:
            yield
        finally:
            is_over.set()
            ticking.join()


@contextmanager
def _late(show: Callable[[int], AbstractContextManager[Progress]], after_s: float) -> Iterator[Progress]:
    """Report nothing for `after_s` seconds, then to what `show` opens, given how much was done before."""
    began = time.monotonic()
    shown: list[Progress] = []
    with ExitStack() as stack:

        def report_progress(num_done: int, text: str = "") -> None:
            if not shown and time.monotonic() - began > after_s:
                shown.append(stack.enter_context(show(num_done)))
            if shown:
                shown[0](num_done, text)

        yield report_progress


@contextmanager
def _bytes(title: str, total: int, num_before: int) -> Iterator[Progress]:
    # What was done before may not have been read: the rate counts from here.
    began = time.monotonic()

    def words(num_done: int) -> str:
        return bytes_text(num_done, total, num_done - num_before, time.monotonic() - began)

    if not sys.stderr.isatty():
        yield _plain_progress(total, lambda num_done, text: f"{title}: {words(num_done)}")
        return
    with _bar(title, total, "{task.description}") as report_progress:
        yield lambda num_done, text="": report_progress(min(num_done, total), words(num_done))


def bytes_text(num_done: int, total: int, num_read: int, seconds: float) -> str:
    """Return `1.2 TiB of 2.0 TiB, 1.1 GiB/s, 13 min 05 s left`, without a rate if nothing has been read yet."""
    text = f"{format_bytes(num_done)} of {format_bytes(total)}" if num_done <= total else format_bytes(num_done)
    if num_read <= 0 or seconds <= 0:
        return text
    rate = num_read / seconds
    left = f", {format_age((total - num_done) / rate)} left" if num_done <= total else ""
    return f"{text}, {format_bytes(rate)}/s{left}"


@contextmanager
def first_frame(draw: Callable[[int, int], Sequence[Spans]]) -> Iterator[None]:
    """Show a frame on a screen of its own at once, while what draws the next ones is loaded."""
    lines = draw(*shutil.get_terminal_size())
    click.echo("\x1b[?1049h\x1b[H\x1b[2J" + "\n".join(map(_styled, lines)), nl=False)
    try:
        yield
    except BaseException:
        click.echo("\x1b[?1049l", nl=False)
        raise


class Screen(Protocol):
    """Shows a frame: on a terminal, what `draw` returns for its width and height; elsewhere the one line of `plain`."""

    def __call__(self, draw: Callable[[int, int], Sequence[Spans]], plain: str) -> None: ...


@contextmanager
def live() -> Iterator[Screen]:
    """Yield what shows frames, each in place of the last one; the last stays. Without a terminal, they are lines, and
    one like the last is left out."""
    if not is_interactive():
        yield _plain_screen()
        return
    with _terminal_screen() as show:
        yield show


def _plain_screen() -> Screen:
    last = ""

    def show(draw: Callable[[int, int], Sequence[Spans]], plain: str) -> None:
        nonlocal last
        if plain != last:
            answer(f"{time.strftime('%H:%M:%S')} {plain}")
        last = plain

    return show


@contextmanager
def _terminal_screen() -> Iterator[Screen]:
    from rich.console import Console
    from rich.live import Live
    from rich.style import Style
    from rich.text import Text

    console, last = Console(highlight=False), Text()
    with Live(console=console, screen=True, auto_refresh=False) as screen:

        def show(draw: Callable[[int, int], Sequence[Spans]], plain: str) -> None:
            lines = draw(console.width, console.height)
            nonlocal last
            last = Text("\n", no_wrap=True, overflow="crop").join(
                Text.assemble(
                    *(
                        (printable(text), Style(color=style.get("fg"), bold=style.get("bold"), dim=style.get("dim")))
                        for text, style in line
                    )
                )
                for line in lines
            )
            screen.update(last, refresh=True)

        try:
            yield show
        finally:
            screen.stop()
            console.print(last)


def _plain_progress(total: int | None, line: Callable[[int, str], str]) -> Progress:
    shown = -1

    def report_progress(num_done: int, text: str = "") -> None:
        nonlocal shown
        tenth = num_done * 10 // total if total else num_done
        if tenth > shown:
            shown = tenth
            talk(line(num_done, text))

    return report_progress
