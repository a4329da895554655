"""`bsl demo`: the whole tool on this machine."""

from __future__ import annotations

from pathlib import Path

import click

from bigsci_launch.cli.console import answer, progress


@click.command(short_help="Show the whole tool on this machine, in minutes.", epilog="Example: bsl demo")
@click.option(
    "--folder",
    type=click.Path(path_type=Path),
    default=Path(".demo"),
    show_default=True,
    help="Folder to work in: a new one, or that of an earlier demonstration.",
)
def demo(folder: Path) -> None:
    """Train on 8 local ranks, stop, resume, hang, and find the rank that hung.

    Needs neither Slurm nor root; takes a few minutes on two cores. Needs the `train` extra. The runs of an earlier
    demonstration in that folder are deleted, and nothing else.
    """
    from bigsci_launch.content import packaged
    from bigsci_launch.demo.folder import prepare_folder
    from bigsci_launch.demo.screen import last_screen
    from bigsci_launch.demo.story import Demo

    prepare_folder(folder)
    with progress("bsl demo", Demo.NUM_PARTS) as report_progress:
        result = Demo(folder.resolve(), packaged("configs", "demo.yaml"), report_progress).play()
    answer(last_screen(result, folder))
