"""Commands that an answer names, as a person can type them where `bsl spy` was typed."""

from __future__ import annotations

import re

from bigsci_launch.scheduler.choice import SCHEDULERS
from bigsci_launch.spy.evidence.ranks import Evidence

_ON_NODE = re.compile(r"(?P<command>.+)  # on (?P<node>[^\s:,]+)(?:[:,] (?P<note>.+))?")
ASK_NATIVE = "bsl spy --native  # shows which native code they are in, such as a collective"
ASK_RECORDER = "bsl spy --flight-recorder=fork  # torch's record of collectives shows who left"
OF_FILES = {
    ASK_NATIVE: "py-spy dump --native --pid PID  # for each rank, while it hangs: shows which native code it is in",
    ASK_RECORDER: "TORCH_FR_BUFFER_SIZE=2000  # in the next attempt: torch's record of collectives shows who left",
}
"""What to do instead where the evidence is in files: the processes are out of reach, or gone."""
ASK_DEVICES = (
    "nvidia-smi --query-gpu=index,utilization.gpu,power.draw --format=csv  # on each node: a device that waits in a "
    "collective is at 100 % with little power"
)
FIND_BUILD_LOCK = "find ${TORCH_EXTENSIONS_DIR:-~/.cache/torch_extensions} -name lock -mmin +10  # remove what is found"
_OF_BSL = ("bsl spy", "bsl trace last")


def on_node(node: str, command: str, note: str = "") -> str:
    """Return a command that is to be typed on a node, where the nodes' job is not known: `COMMAND  # on NODE: NOTE`."""
    return f"{command}  # on {node}" + (f": {note}" if note else "")


def typed(line: str, evidence: Evidence) -> str:
    """Return the line with what the user named, and of a job of a scheduler, with the step that runs it on its node."""
    if evidence.is_from_files and line in OF_FILES:
        return OF_FILES[line]
    for name in _OF_BSL:
        if line.startswith(name) and evidence.asked:
            return f"{name} {evidence.asked}{line.removeprefix(name)}"
    found = _ON_NODE.fullmatch(line)
    if found is None or evidence.scheduler not in SCHEDULERS:
        return line
    command, node, note = found["command"], found["node"], found["note"]
    if command.startswith("py-spy "):
        command = evidence.py_spy.get(node, "py-spy") + command.removeprefix("py-spy")
    group = evidence.het_groups.get(node)
    line = SCHEDULERS[evidence.scheduler].command_on_node(command, evidence.job_id, node=node, group=group)
    return line + (f"  # {note}" if note else "")
