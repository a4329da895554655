"""The `SBATCH_*` variables of the caller, from which sbatch takes options: each applies or is dropped, and is named.

For sbatch, a variable is stronger than the header of a script. Sites ask their users to export some, usually the
account. So a variable applies where the run says nothing, and where only the site's default would be replaced, if
nothing else of the run depends on it. Everything that the run file says is stronger.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from bigsci_launch.config.load import LoadedRun
from bigsci_launch.launch.job.request import CallerOption, JobRequest

PREFIX = "SBATCH_"
_OPTION_OF = {
    "ARRAY_INX": "array",
    "MEM_PER_NODE": "mem",
    "REQ_SWITCH": "switches",
    "TIMELIMIT": "time",
    "WAIT4SWITCH": "switches",
    "WORKDIR": "chdir",
}
"""Variables that are not named as their options."""
_REPLACEABLE = frozenset({"account", "qos", "reservation"})
"""Options whose site default a variable replaces: nothing is computed from them."""
_RESERVED = {
    "array": "an attempt is one job",
    "clusters": "the job would not be found again; SLURM_CLUSTERS chooses the cluster",
    "error": "the output goes to job.out",
    "export": "the ranks need the variables of the job",
    "export-file": "the ranks need the variables of the job",
    "ignore-pbs": "the script has no such lines",
    "input": "the ranks read no input",
    "no-requeue": "slurm.requeue decides",
    "requeue": "slurm.requeue decides",
    "signal": "monitor.exit_margin_s decides",
    "wait": "`bsl submit --wait` waits",
}
"""Options that would break a job of `bsl`, whether it writes them or not."""
_UNSEEN = {"time": "; ranks are warned before it only with slurm.time_limit"}


def apply_caller_options(request: JobRequest, environment: Mapping[str, str], loaded: LoadedRun) -> JobRequest:
    """Return `request` with what becomes of each `SBATCH_*` variable in `environment`; a local attempt has none.

    An option that such a variable replaces is left out, so that the script says nothing that is wrong.
    """
    if request.scheduler != "slurm":
        return request
    names = sorted(name for name in environment if name.startswith(PREFIX) and name != PREFIX)
    found = tuple(_decide(name, environment[name], loaded, request) for name in names)
    replaced = {option.option for option in found if option.applies}
    kept = tuple(option for option in request.options if option.name not in replaced)
    return replace(request, options=kept, caller_options=found)


def _decide(variable: str, value: str, loaded: LoadedRun, request: JobRequest) -> CallerOption:
    word = variable.removeprefix(PREFIX)
    name = _OPTION_OF.get(word, word.lower().replace("_", "-"))
    given = next((option for option in request.options if option.name == name), None)
    if name in _RESERVED:
        return CallerOption(variable, value, name, False, _RESERVED[name])
    if given is None:
        return CallerOption(variable, value, name, True, f"nothing else sets --{name}" + _UNSEEN.get(name, ""))
    if name in _REPLACEABLE and _is_site_default(loaded, name):
        why = f"it replaces the default of site {loaded.site.name}, {given.value}"
        return CallerOption(variable, value, name, True, why)
    return CallerOption(variable, value, name, False, f"{_who_sets(loaded, name)} sets --{name}={given.value or ''}")


def _is_site_default(loaded: LoadedRun, name: str) -> bool:
    return loaded.origins.get(f"slurm.{name}", "").startswith("site ")


def _who_sets(loaded: LoadedRun, name: str) -> str:
    key = {"time": "slurm.time_limit"}.get(name, f"slurm.{name}")
    place = loaded.origins.get(key)
    return f"{key} ({place})" if place else "bsl"
