"""`bsl open`: the page of a run, in a browser, or where to copy it from."""

from __future__ import annotations

import os
from pathlib import Path

import click

from bigsci_launch.cli import console
from bigsci_launch.cli.options import RUN

DISPLAYS = ("DISPLAY", "WAYLAND_DISPLAY")


@click.command("open", short_help="Open the page of a run in a browser.", epilog="Example: bsl open demo")
@RUN
def open_(run: str | None) -> None:
    """Write the HTML page of RUN (a name or a directory; default: the run submitted last), and open it in a browser.
    Without a display, print the command that copies it to your machine.

    It is the page of `bsl status --html`: losses, findings, acts. It is in ~/.local/state/bsl/pages.
    """
    from bigsci_launch.runs.find import find_run
    from bigsci_launch.spy.look.target import state_folder
    from bigsci_launch.status.read import read_status
    from bigsci_launch.watch.show.kept_page import write_run_page

    found = find_run(run)
    page = state_folder(os.environ) / "pages" / f"{found.name}.html"
    page.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_run_page(page, read_status(found))
    if any(os.environ.get(name) for name in DISPLAYS) and _open_in_browser(page):
        console.answer(f"opened {page}")
    else:
        console.answer(_copy_command(page))


def _open_in_browser(page: Path) -> bool:
    import webbrowser

    return webbrowser.open_new_tab(page.as_uri())


def _copy_command(page: Path) -> str:
    import getpass
    import shlex
    import socket

    return f"scp {getpass.getuser()}@{socket.gethostname()}:{shlex.quote(str(page))} ."
