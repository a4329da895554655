"""Twelve failures of ranks that srun starts."""

from __future__ import annotations

from failing.acts import cut_power
from failing.case import CRASHED, HANG, MEMORY, LaunchFailure
from failing.scripts import srun


def of_srun(name: str, what: str, kinds: tuple[str, ...], body: str, **more: object) -> LaunchFailure:
    return LaunchFailure("srun", name, what, kinds, body, **more)  # type: ignore[arg-type]


SRUN = (
    of_srun(
        "exception",
        "an IndexError of rank 5; its peers train on until srun ends them",
        CRASHED,
        srun("--how lookup --rank 5"),
    ),
    of_srun(
        "chained",
        "a RuntimeError from a JSONDecodeError; peers lose the connection",
        CRASHED,
        srun("--how chained --rank 6 --together tcp", "--label"),
        nodes=(2, 4),
    ),
    of_srun(
        "exit-code",
        "sys.exit(3), and a file for each rank",
        CRASHED,
        srun("--how exit_code --rank 3 --together tcp", "-o $LOGS/rank-%t.log"),
        nodes=(4, 3),
        has_logs=True,
    ),
    of_srun(
        "segfault",
        "a segmentation fault; gloo's peers see the connection close",
        CRASHED,
        srun("--how segfault --rank 2 --together gloo", "--label"),
        nodes=(6, 2),
    ),
    of_srun(
        "killed",
        "SIGKILL; gloo's peers complain first, without labels",
        CRASHED,
        srun("--how killed --rank 3 --together gloo", ""),
        nodes=(8, 2),
    ),
    of_srun(
        "memory",
        "MemoryError under ulimit -v",
        MEMORY,
        srun("--how memory --rank 4 --together tcp", "--label -K"),
        nodes=(1, 4),
    ),
    of_srun("disk", "a full tmpfs, no labels", ("disk",), srun("--how disk --rank 1 --together tcp", ""), nodes=(5, 2)),
    of_srun(
        "time-limit",
        "the time limit, while all is well",
        ("time_limit",),
        srun("--steps 1000", "--label"),
        nodes=(9, 2),
        options=("--time=1",),
        whose="none",
    ),
    of_srun(
        "monitored-barrier",
        "a rank sleeps; the others wait in a monitored barrier",
        HANG,
        srun("--how hang --rank 2 --together gloo --monitored --timeout 10", "--label -K"),
        nodes=(3, 2),
    ),
    of_srun(
        "two-apart",
        "rank 5 fails, and rank 1 for a reason of its own 1.5 s later",
        CRASHED,
        srun("--how key --rank 5 --then 1 lookup --style records", ""),
        nodes=(7, 4),
    ),
    of_srun(
        "survived",
        "rank 2 handles an OSError; later, rank 6 fails",
        CRASHED,
        srun("--how assertion --rank 6 --survives 2 --together tcp --at 12", "--label"),
        nodes=(6, 4),
    ),
    of_srun(
        "node-failure",
        "a node loses power",
        ("node_failure",),
        srun("--together tcp --steps 400", "--label"),
        nodes=(13, 3),
        act=cut_power,
        whose="node",
    ),
)
