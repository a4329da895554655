"""Logs of Megatron-LM and Megatron-DeepSpeed: a block of arguments, then `elapsed time per iteration`."""

from __future__ import annotations

import re

from bigsci_launch.iteration_line import MILLISECONDS, SECONDS
from bigsci_launch.plan.calibrate.logs.arguments import NEEDED, columns_of
from bigsci_launch.plan.calibrate.logs.steps import AS_A_ROW, WARM_UP_STEPS, typical_step
from bigsci_launch.step_lines import parse_steps

STEP_SIGNS = (SECONDS, MILLISECONDS)

_BLOCK = re.compile(r"-+ arguments -+\s*$(.*?)-+ end of arguments -+", re.DOTALL | re.MULTILINE)
_ARGUMENT = re.compile(r"(?:^|[\s\]:])([A-Za-z]\w*) \.{2,}[ \t]?(.*?)[ \t]*$", re.MULTILINE)

# What is printed later: newer versions pad the vocabulary after the arguments, DeepSpeed has its own configuration.
_PRINTED = {
    "padded_vocab_size": re.compile(r"padded vocab \(size: \d+\) with \d+ dummy tokens \(new size: (\d+)\)"),
    "zero_stage": re.compile(r"zero_optimization_stage \.+ (\d)"),
    "pp_partition_method": re.compile(r"Partitioning pipeline stages with method (\S+)"),
    "offload_optimizer": re.compile(r"zero_config \.+ .*?\boffload_optimizer=(?!None)(\S+)"),
}


def read_megatron(text: str) -> dict[str, str]:
    """Return the run of a log as the columns of a measured row.

    Raises:
        ValueError: the log leaves something out, or the run is not modelled.
    """
    steps = [(line.batch_size, line.seconds) for _, line in parse_steps(text) if line.seconds is not None]
    typical = typical_step(steps)
    if typical is None:
        raise ValueError(f"no `elapsed time per iteration` after the first {WARM_UP_STEPS} steps")
    arguments = _arguments(text)
    batch = str(typical[0] or arguments.get("global_batch_size", "None"))
    missing = [name for name in NEEDED if arguments.get(name, "None") == "None"]
    missing += ["global_batch_size"] if batch == "None" else []
    if missing:
        raise ValueError(f"the log does not begin with Megatron's arguments (no {', '.join(missing)}); {AS_A_ROW}")
    is_deepspeed = arguments.get("deepspeed") == "True" or "pp_partition_method" in arguments
    cells = columns_of(arguments, "deepspeed" if is_deepspeed else "megatron")
    return {**cells, "gbs": batch, "sec_per_it": f"{typical[1]:.6g}"}


def _arguments(text: str) -> dict[str, str]:
    """Return the arguments of the last job in a log, with what is printed after them."""
    blocks = _BLOCK.findall(text)
    if not blocks:
        return {}
    arguments = dict(_ARGUMENT.findall(blocks[-1]))
    for name, pattern in _PRINTED.items():
        found = pattern.findall(text)
        if found and (name != "padded_vocab_size" or arguments.get(name, "None") == "None"):
            arguments[name] = found[-1]
    return arguments
