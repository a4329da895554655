"""The screen of `bsl top`. What it shows is drawn by `top.draw` and `watch.show.live`; here are its keys and threads.

A question that a command answers is asked of that command, in a process of its own: the answer is the same, and `Esc`
ends it.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import zip_longest
from pathlib import Path
from typing import Any, ClassVar

from textual import events, work
from textual.app import App, ComposeResult, RenderResult
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.geometry import Region, Size
from textual.widget import Widget
from textual.widgets import Input

from bigsci_launch.content import module_argv
from bigsci_launch.errors import BslError
from bigsci_launch.printable import printable
from bigsci_launch.styled_lines import StyledLine, changed_cells
from bigsci_launch.top.draw import list_lines, rows_in
from bigsci_launch.top.load import TopLoader
from bigsci_launch.top.output import CommandOutput, output_lines
from bigsci_launch.top.rows import TopDetails, TopRow, TopState, moved, next_order, scrolled, with_details, with_rows
from bigsci_launch.top.rows import with_words as find

FRAME_S = 1.0
FIRST_FRAME_S = 0.5
"""How long the frame that was there before this program is left for the first rows to come."""
RUN_EVERY_S = 2.0
TAIL = "500"
"""Lines of logs that are shown at once."""
COMMANDS = {"s": ("spy",), "l": ("slow",), "w": ("why",), "g": ("logs", "--tail", TAIL)}
OF_RUNS = ("logs", "control")
"""Commands that take no job which `bsl` did not submit."""

DrawLines = Callable[[int, int], Sequence[StyledLine]]


# What follows loads the readers of all records: the first screens do not wait for them.


def _run_screen(row: TopRow) -> DrawLines:
    from bigsci_launch.top.run_screen import read_run_screen

    return read_run_screen(row)


def _would_end(row: TopRow) -> str:
    from bigsci_launch.launch.cancel import would_end

    return ", ".join(would_end(row.run)) if row.run is not None else f"job {row.argument[-1]}"


def _key(keys: str, action: str) -> Binding:
    """Return a key that is obeyed before the next one is looked at: what is typed after `/` is the answer to it."""
    return Binding(keys, action, priority=True)


class Canvas(Widget):
    """The whole screen: lines that a function draws for its size."""

    can_focus = True

    def __init__(self) -> None:
        super().__init__()
        self.draw: DrawLines = lambda width, height: []
        self.shown: Sequence[StyledLine] = ()
        self._drawn_for = Size(0, 0)

    def show(self) -> None:
        """Draw what has changed again: each byte counts over a slow line."""
        before, self.shown = self.shown, self.draw(self.size.width, self.size.height)
        nothing: StyledLine = []
        for at, (old, new) in enumerate(zip_longest(before, self.shown, fillvalue=nothing)):
            if old != new:
                self.refresh(Region(0, at, changed_cells(old, new) or self.size.width, 1))

    def render(self) -> RenderResult:
        if self._drawn_for != self.size:
            self._drawn_for, self.shown = self.size, self.draw(self.size.width, self.size.height)
        return Content("\n").join(Content.assemble(*map(_span, line)) for line in self.shown)


def _span(part: tuple[str, Mapping[str, Any]]) -> tuple[str, str]:
    """Return a part of a line in textual's words: the terminal's own colours."""
    text, style = part
    colour = [f"ansi_{style['fg']}"] if style.get("fg") and not os.environ.get("NO_COLOR") else []
    return printable(text), " ".join(
        colour + [name for name in ("bold", "dim", "reverse", "underline") if style.get(name)]
    )


class TopApp(App[None]):
    """Three views on one canvas: all jobs, one run, and the output of a command."""

    CSS = "Canvas { height: 1fr; } Input { display: none; border: none; height: 1; padding: 0; }"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        _key("q,ctrl+c", "quit"),
        _key("escape,left,h", "leave"),
        _key("enter,right", "open_run"),
        _key("down,j", "move(1)"),
        _key("up,k", "move(-1)"),
        _key("pagedown,space,ctrl+f", "page(1)"),
        _key("pageup,ctrl+b", "page(-1)"),
        _key("home,shift+g", "move(-1000000)"),
        _key("end,G", "move(1000000)"),
        *(_key(key, f"ask('{key}')") for key in COMMANDS),
        _key("c", "control"),
        _key("x", "cancel"),
        _key("slash", "find"),
        _key("o", "order"),
        _key("r", "read"),
    ]

    def __init__(self, root: Path) -> None:
        super().__init__(ansi_color=True)
        self.state = TopState()
        self.output: CommandOutput | None = None
        self.opened: TopRow | None = None
        self._loader = TopLoader(root, self)
        self._drawn = 0.0
        self._process: asyncio.subprocess.Process | None = None
        self._answer: Callable[[str], None] | None = None
        self._first_frame = ExitStack()

    def on_load(self) -> None:
        self._first_frame.enter_context(self.batch_update())

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool:
        """Whether a key is a command: not while a question is answered."""
        return self._answer is None

    def compose(self) -> ComposeResult:
        yield Canvas()
        yield Input()

    def on_mount(self) -> None:
        self.screen.set_focus(self.canvas)
        self._draw_list()
        self.set_interval(FRAME_S, self._tick)
        self.set_timer(FIRST_FRAME_S, self._first_frame.close)
        self._loader.start()

    def on_unmount(self) -> None:
        self._loader.stop()
        self._end_command()

    @property
    def canvas(self) -> Canvas:
        return self.query_one(Canvas)

    @property
    def height(self) -> int:
        return rows_in(self.canvas.size.height)

    # What was read; called from the thread that reads.

    def take_rows(self, rows: Sequence[TopRow], asked: float, trouble: str) -> None:
        self._soon(lambda state: with_rows(state, rows, asked, trouble))

    def take_details(self, details: Mapping[str, TopDetails]) -> None:
        self._soon(lambda state: with_details(state, details))

    def _soon(self, change: Callable[[TopState], TopState]) -> None:
        if self.is_running:
            self.call_from_thread(self._change, change)

    def _change(self, change: Callable[[TopState], TopState]) -> None:
        is_first = self.state.asked is None
        self.state = scrolled(change(self.state), self.height)
        if is_first:
            self._first_frame.close()
        if is_first or time.monotonic() - self._drawn > FRAME_S / 2:
            self._tick()

    # What is shown.

    def _tick(self) -> None:
        self._drawn = time.monotonic()
        self._loader.show(self.state.visible(self.height))
        self.canvas.show()

    def _draw_list(self) -> None:
        self.opened = self.output = None
        self.canvas.draw = lambda width, height: list_lines(self.state, width, height, time.time())
        self._tick()

    @work(exclusive=True, group="run")
    async def _draw_run(self, row: TopRow) -> None:
        """Show a run until another view is shown. Its files are read in a thread."""
        self.opened = row
        while self.opened is not None and self.opened.key == row.key:
            newest = next((each for each in self.state.found if each.key == row.key), row)
            try:
                draw = await asyncio.to_thread(_run_screen, newest)
            except BslError as error:
                self._show_lines([[(error.message, {"fg": "red"})]])
                return
            if self.opened is not None and self.output is None:
                self.canvas.draw = draw
                self.canvas.show()
            await asyncio.sleep(RUN_EVERY_S)

    def _show_lines(self, lines: Sequence[StyledLine]) -> None:
        self.canvas.draw = lambda width, height: lines
        self.canvas.show()

    # Keys.

    @property
    def row(self) -> TopRow | None:
        """What a key is about: the run that is open, or the selected row."""
        return self.opened or self.state.row

    def action_move(self, by: int) -> None:
        if self.output is not None:
            self.output.scroll(by, self.canvas.size.height)
        elif self.opened is None:
            self.state = moved(self.state, by, self.height)
        self._tick()

    def action_page(self, by: int) -> None:
        self.action_move(by * max(1, self.height - 1))

    def action_leave(self) -> None:
        if self.output is not None:
            self._end_command()
            self.output = None
            if self.opened is not None:
                self._draw_run(self.opened)
                return
        self._draw_list()

    def action_open_run(self) -> None:
        row = self.row
        if row is not None and row.run is not None and self.output is None:
            self._draw_run(row)

    def action_order(self) -> None:
        self.state = scrolled(next_order(self.state), self.height)
        self._tick()

    def action_read(self) -> None:
        self._loader.read_again()

    def action_find(self) -> None:
        def take(words: str) -> None:
            self.state = scrolled(find(self.state, words), self.height)
            self._draw_list()

        self._prompt("name, job or state; empty: all", take)

    def action_ask(self, key: str) -> None:
        row = self.row
        if row is not None:
            self._command(row, COMMANDS[key])

    def action_control(self) -> None:
        row = self.row

        def take(words: str) -> None:
            verb, _, why = words.strip().partition(" ")
            if row is not None and verb:
                self._command(row, ("control", verb, "--why", why.strip()) if why.strip() else ("control", verb))

        if row is not None and row.run is not None:
            self._prompt(f"{row.name}: save, exit, restart, dump or kill, and the reason for the others", take)

    @work(exclusive=True, group="cancel")
    async def action_cancel(self) -> None:
        row = self.row
        if row is None:
            return
        try:
            whole = await asyncio.to_thread(_would_end, row)
        except BslError as error:
            self.notify(error.message, markup=False)
            return

        def take(words: str) -> None:
            if words.strip() == "yes":
                self._command(row, ("cancel",))

        self._prompt(f"end {row.name}, {whole}? Type yes", take)

    # The line at the bottom.

    def _prompt(self, question: str, answer: Callable[[str], None]) -> None:
        line = self.query_one(Input)
        line.value, line.placeholder, line.styles.display = "", printable(question), "block"
        self._answer = answer
        # At once, not when there is time: what is typed next is the answer.
        self.screen.set_focus(line)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        answer = self._answer
        self._close_prompt()
        if answer is not None:
            answer(event.value)

    def on_key(self, event: events.Key) -> None:
        if event.key == "escape" and self._answer is not None:
            event.stop()
            self._close_prompt()

    def _close_prompt(self) -> None:
        self._answer = None
        self.query_one(Input).styles.display = "none"
        self.screen.set_focus(self.canvas)

    # Commands.

    @work(exclusive=True, group="command")
    async def _command(self, row: TopRow, words: tuple[str, ...]) -> None:
        """Run a command of `bsl`, and show its output as it comes."""
        if row.run is None and words[0] in OF_RUNS:
            self.notify(f"bsl did not submit job {row.argument[-1]}: {words[0]} is for runs of bsl", markup=False)
            return
        named = row.argument if words[0] != "why" or row.run is not None else row.argument[1:]
        whole = (words[0], *named, *words[1:])
        output = self.output = CommandOutput(shlex.join(["bsl", *whole]), self.canvas.size.width)
        self.canvas.draw = lambda width, height: output_lines(output, width, height)
        self._tick()
        self._process = process = await asyncio.create_subprocess_exec(
            *module_argv(sys.executable, "bigsci_launch"),
            *whole,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, "COLUMNS": str(self.canvas.size.width)},
        )
        assert process.stdout is not None
        while block := await process.stdout.read(1 << 16):
            output.add(block.decode("utf-8", "replace"))
            self._tick()
        output.end(await process.wait())
        self._tick()

    def _end_command(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()
