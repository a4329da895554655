"""Twelve failures under Ray."""

from __future__ import annotations

from failing import scripts
from failing.acts import cancel, cut_power
from failing.case import CRASHED, MEMORY, LaunchFailure
from failing.scripts import rayed


def of_ray(name: str, what: str, kinds: tuple[str, ...], body: str, **more: object) -> LaunchFailure:
    return LaunchFailure("Ray", name, what, kinds, body, tasks=1, **more)  # type: ignore[arg-type]


RAY = (
    of_ray(
        "exception",
        "an actor raises; Ray's Slurm guide",
        CRASHED,
        rayed(scripts.RAY_START, "ray_actors.py", "--how lookup --rank 2 --named"),
        nodes=(0, 2),
    ),
    of_ray(
        "killed",
        "an actor is killed",
        CRASHED,
        rayed(scripts.RAY_START, "ray_actors.py", "--how killed --rank 3 --named", dedup=0),
        nodes=(2, 2),
    ),
    of_ray(
        "exit-code",
        "an actor calls sys.exit(3) on a cluster inside the job",
        CRASHED,
        rayed(scripts.RAY_LOCAL, "ray_actors.py", "--how exit_code --rank 1 --named"),
        nodes=(4, 1),
    ),
    of_ray(
        "memory",
        "MemoryError in an actor",
        MEMORY,
        rayed(scripts.RAY_LOCAL, "ray_actors.py", "--how memory --rank 2", dedup=0),
        nodes=(5, 1),
    ),
    of_ray(
        "chained",
        "a chained exception; Ray's Slurm guide",
        CRASHED,
        rayed(scripts.RAY_START, "ray_actors.py", "--how chained --rank 3 --named"),
        nodes=(6, 2),
    ),
    of_ray(
        "segfault",
        "a segmentation fault; Ray's Slurm guide",
        CRASHED,
        rayed(scripts.RAY_START, "ray_actors.py", "--how segfault --rank 1", dedup=0),
        nodes=(8, 2),
    ),
    of_ray(
        "train-exception",
        "Ray Train: a worker raises",
        CRASHED,
        rayed(scripts.RAY_LOCAL, "ray_train.py", "--how key --rank 3"),
        nodes=(0, 1),
    ),
    of_ray(
        "train-killed",
        "Ray Train: a worker is killed",
        CRASHED,
        rayed(scripts.RAY_START, "ray_train.py", "--how killed --rank 1", each=3),
        nodes=(2, 2),
    ),
    of_ray(
        "train-disk",
        "Ray Train: a full tmpfs",
        ("disk",),
        rayed(scripts.RAY_START, "ray_train.py", "--how disk --rank 2", each=3),
        nodes=(4, 2),
    ),
    of_ray(
        "survived",
        "an actor handles an OSError; another one raises later",
        CRASHED,
        rayed(scripts.RAY_LOCAL, "ray_actors.py", "--how context --rank 3 --survives 0 --named"),
        nodes=(6, 1),
    ),
    of_ray(
        "cancelled",
        "scancel, while all is well",
        ("cancelled",),
        rayed(scripts.RAY_LOCAL, "ray_actors.py", "--steps 400"),
        nodes=(8, 1),
        act=cancel,
        whose="none",
    ),
    of_ray(
        "node-failure",
        "a node loses power",
        ("node_failure",),
        rayed(scripts.RAY_START, "ray_actors.py", "--steps 400 --size 6"),
        nodes=(9, 3),
        act=cut_power,
        whose="node",
    ),
)
