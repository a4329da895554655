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

KEY, RANKS_PER_TASK = "run.command", "slurm.ranks_per_task"
_VARIABLE = re.compile(r"\$(?:[A-Za-z_]\w{0,60}|\{[A-Za-z_]\w{0,60}[^{}]{0,20}\}|\()")
_PLAIN = re.compile(r"[\w./-]*[A-Za-z][\w./-]*")
_SHOWN_WORDS = 3
"""Words of a program that a message shows; what follows may hold a secret."""


def check_launcher(config: RunConfig, site: Site) -> Iterator[Finding]:
    """`bsl` starts the ranks, or one launcher for `slurm.ranks_per_task` of them, and no further processes."""
    launcher = find_launcher(config.run.command)
    if launcher is None:
        return
    try:
        layout = site.layout(config)
    except ValueError:
        return
    if config.slurm.ranks_per_task > 1:
        yield from _check_one_launcher(launcher, layout, config.slurm.ranks_per_task)
        return
    tasks, num_tasks = layout.ranks_per_node, layout.nodes * layout.ranks_per_node
    if num_tasks == 1 or (1 in (tasks, launcher.processes) and not (launcher.is_global or launcher.is_alone)):
        times = "" if num_tasks == 1 else f" {num_tasks} times"
        text = (
            f"`bsl` starts {launcher.name}{times}, which starts the ranks: to `bsl status` and the exit records, a "
            f"launcher is a rank, which {RANKS_PER_TASK} changes; `bsl spy` and the rings find the processes below it"
        )
        yield Finding("launcher", "warning", (KEY,), text)
        return
    text = f"{_too_many(launcher, tasks, num_tasks)}. {_instead(launcher, layout)}"
    yield Finding("launcher", "error", (KEY, "slurm.site"), text)


def _check_one_launcher(launcher: CommandLauncher, layout: Layout, ranks_per_task: int) -> Iterator[Finding]:
    """Each task starts one launcher, which starts as many ranks as the task has."""
    num_tasks = layout.nodes * layout.ranks_per_node // ranks_per_task
    text = ""
    if launcher.is_global or (launcher.is_standalone and num_tasks > 1):
        text = _too_many(launcher, 1, num_tasks)
    elif launcher.says_processes and launcher.processes != ranks_per_task:
        started = "1 process" if launcher.processes == 1 else f"{launcher.processes} processes"
        text = f"{launcher.name} starts {started}, but slurm.ranks_per_task is {ranks_per_task}"
    if text:
        yield Finding("launcher", "error", (KEY, RANKS_PER_TASK), text)


def _too_many(launcher: CommandLauncher, tasks: int, num_tasks: int) -> str:
    name, count = launcher.name, launcher.processes
    if launcher.is_global:
        return f"each of the job's {num_tasks} tasks would start {name}, which starts ranks on all nodes"
    if 1 in (tasks, count):
        how = "with --standalone" if launcher.is_standalone else "without --nnodes"
        return f"each of the job's {num_tasks} tasks would start {name} {how}, for a training of its own"
    started = f"{name}, which starts {'processes of its own' if count is None else f'{count} processes'}"
    return f"each of the {tasks} tasks of a node would start {started}{f': {tasks * count} on a node' if count else ''}"


def _instead(launcher: CommandLauncher, layout: Layout) -> str:
    """Return what was probably meant."""
    shown = [_shown(word) for word in launcher.program[:_SHOWN_WORDS]]
    more = ["..."] if len(launcher.program) > _SHOWN_WORDS else []
    written = f": command: [{', '.join([*shown, *more])}]" if shown else ""
    without = f"`bsl` starts each rank with RANK, WORLD_SIZE and MASTER_ADDR, so leave {launcher.name} out{written}"
    if launcher.is_global:
        return without
    tasks, count = layout.ranks_per_node, launcher.processes or 1
    if tasks == 1:
        return f"{without}; or join them with --nnodes and --node_rank"
    each = count if count > 1 and tasks % count == 0 else tasks
    one = "each node" if each == tasks else f"{each} ranks"
    return f"{without}; or have one {launcher.name} for {one}: {RANKS_PER_TASK}: {each}"


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
