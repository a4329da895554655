"""Rules about the words of `run.command`: launchers, which start ranks themselves, and variables in it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from bigsci_launch.config.finding import Finding
from bigsci_launch.config.render import render_scalar
from bigsci_launch.config.schema.launcher import CommandLauncher, find_launcher
from bigsci_launch.config.schema.program import script_at
from bigsci_launch.config.schema.run import RunConfig
from bigsci_launch.config.site import Layout, Site

KEY = "run.command"
_VARIABLE = re.compile(r"\$(?:[A-Za-z_]\w{0,60}|\{[A-Za-z_]\w{0,60}[^{}]{0,20}\}|\()")
_PLAIN = re.compile(r"[\w./-]*[A-Za-z][\w./-]*")
_SHOWN_WORDS = 3
"""Words of a program that a message shows; what follows may hold a secret."""


def check_launcher(config: RunConfig, site: Site) -> Iterator[Finding]:
    """`bsl` starts the ranks. A launcher in the command would start some in the place of each."""
    launcher = find_launcher(config.run.command)
    if launcher is None:
        return
    try:
        layout = site.layout(config)
    except ValueError:
        return
    tasks, num_tasks = layout.ranks_per_node, layout.nodes * layout.ranks_per_node
    if num_tasks == 1 or (1 in (tasks, launcher.processes) and not (launcher.is_global or launcher.is_alone)):
        times = "" if num_tasks == 1 else f" {num_tasks} times"
        text = (
            f"`bsl` starts {launcher.name}{times}, which starts the ranks: to `bsl status` and the exit records, a "
            "launcher is a rank; `bsl spy` and the rings find the processes below it"
        )
        yield Finding("launcher", "warning", (KEY,), text)
        return
    text = f"{_too_many(launcher, tasks, num_tasks)}. {_instead(launcher, site, layout)}"
    yield Finding("launcher", "error", (KEY, "slurm.site"), text)


def _too_many(launcher: CommandLauncher, tasks: int, num_tasks: int) -> str:
    name, count = launcher.name, launcher.processes
    if launcher.is_global:
        return f"each of the job's {num_tasks} tasks would start {name}, which starts ranks on all nodes"
    if 1 in (tasks, count):
        return f"each of the job's {num_tasks} tasks would start {name} without --nnodes, for a training of its own"
    started = f"{name}, which starts {'processes of its own' if count is None else f'{count} processes'}"
    return f"each of the {tasks} tasks of a node would start {started}{f': {tasks * count} on a node' if count else ''}"


def _instead(launcher: CommandLauncher, site: Site, layout: Layout) -> str:
    """Return what was probably meant."""
    shown = [_shown(word) for word in launcher.program[:_SHOWN_WORDS]]
    more = ["..."] if len(launcher.program) > _SHOWN_WORDS else []
    written = f": command: [{', '.join([*shown, *more])}]" if shown else ""
    without = f"`bsl` starts each rank with RANK, WORLD_SIZE and MASTER_ADDR, so leave {launcher.name} out{written}"
    if launcher.is_global:
        return without
    if layout.ranks_per_node == 1:
        return f"{without}; or join them with --nnodes and --node_rank"
    one = "in a run of one rank" if site.is_local else "a node: ranks_per_node: 1 in a copy of the site file"
    return f"{without}; or start one {launcher.name} {one}"


def _shown(word: str) -> str:
    return word if _PLAIN.fullmatch(word) else render_scalar(word)


def check_unexpanded(config: RunConfig, _site: Site) -> Iterator[Finding]:
    """The words of a command reach the program as they are written."""
    command = config.run.command or ()
    script = script_at(command)
    found = [(at, match[0]) for at, word in enumerate(command) if at != script and (match := _VARIABLE.search(word))]
    if not found:
        return
    names = ", ".join(dict.fromkeys("$(...)" if text == "$(" else text for _, text in found))
    text = (
        f"{names} reaches the program as it is written: no shell expands the words of run.command. If the value is "
        "meant, let one do it: [bash, -c, 'exec PROGRAM ...']"
    )
    yield Finding("unexpanded", "warning", (f"{KEY}.{found[0][0]}",), text)
