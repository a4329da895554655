"""Cases of programs that exchange arrays: mpi4py, torch under mpirun, and JAX."""

from __future__ import annotations

from typing import Any

from foreign.case import ForeignCase

MPIRUN = ("mpirun", "--oversubscribe", "--allow-run-as-root", "-n", "{world_size}")
NEEDS_MPI = ("mpi4py", "numpy", "command:mpirun")
STEPS = {"state": "progressing", "sign": "step 5 ", "sign_count": 4}
LEFT_BEHIND = ("H01", "H02", "H10")


def stencil(name: str, trouble: str = "none", who: int = 0, words: str = "", **more: Any) -> ForeignCase:
    """heat_stencil.py under mpirun, where rank `who` is in trouble."""
    command = (*MPIRUN, "{python}", "{program}", f"--trouble={trouble}", f"--at={who}", *words.split())
    usual = {"state": "hang", "culprits": () if trouble == "none" else (who,), "needs": NEEDS_MPI}
    return ForeignCase(f"mpi-{name}", "mpi4py", "mpirun", "heat_stencil.py", command, **{**usual, **more})


def mpi_ddp(name: str, trouble: str = "none", who: int = 0, words: str = "", **more: Any) -> ForeignCase:
    """mpi_ddp.py under mpirun."""
    port = ("-x", "MASTER_PORT={port}")
    command = (*MPIRUN, *port, "{python}", "{program}", f"--trouble={trouble}", f"--at={who}", *words.split())
    usual = {"state": "hang", "culprits": () if trouble == "none" else (who,), "needs": ("torch", "command:mpirun")}
    return ForeignCase(f"mpi-ddp-{name}", "ddp", "mpirun", "mpi_ddp.py", command, **{**usual, **more})


def regression(
    name: str, trouble: str = "none", who: int = 0, words: str = "", way: str = "argument", **more: Any
) -> ForeignCase:
    """jax_regression.py, started by a shell loop; the number of a process is an argument or a variable."""
    start = ("bash", "{programs}/start_processes.sh", "{world_size}", "{port}", way, "{python}", "{program}")
    command = (*start, f"--trouble={trouble}", f"--at={who}", *words.split())
    usual = {"state": "hang", "culprits": () if trouble == "none" else (who,), "needs": ("jax",)}
    return ForeignCase(f"jax-{name}", "jax", "shell", "jax_regression.py", command, **{**usual, **more})


def mpich(name: str, trouble: str = "none", who: int = 0, **more: Any) -> ForeignCase:
    """mpi_ddp.py under MPICH's mpirun, which sets other variables."""
    start = ("mpirun.mpich", "-n", "{world_size}", "-genv", "MASTER_PORT", "{port}", "{python}", "{program}")
    command = (*start, f"--trouble={trouble}", f"--at={who}")
    usual = {"state": "hang", "culprits": () if trouble == "none" else (who,)}
    needs = ("torch", "command:mpirun.mpich")
    return ForeignCase(f"mpich-ddp-{name}", "ddp", "mpich", "mpi_ddp.py", command, needs=needs, **{**usual, **more})


def ring(interpreter: str, name: str, trouble: str = "none", who: int = 0, **more: Any) -> ForeignCase:
    """ring_sum.py, which starts its own processes, with an interpreter of another version or kind."""
    command = ("{python}", "{program}", f"--trouble={trouble}", f"--who={who}")
    usual = {"state": "hang", "culprits": () if trouble == "none" else (who,), "needs": ()}
    more = {**usual, "interpreter": interpreter, "environment": (("PYTHONPATH", ""),), **more}
    return ForeignCase(f"{interpreter}-ring-{name}", "sockets", "popen", "ring_sum.py", command, **more)


OTHER_PYTHON = {"environment": (("PYTHONPATH", ""),)}
"""The packages of the extra interpreters are their own."""

CASES: tuple[ForeignCase, ...] = (
    stencil("steps", **STEPS),
    stencil("slow-steps", words="--think=3", **{**STEPS, "sign": "step 1 "}),
    stencil("writes-snapshot", "snapshot", 0, state="slow", classes=("H64", "H102", "H51")),
    stencil("integrates", "source", 2, state="slow", classes=("H51", "H101", "H100")),
    stencil("probe-silent", "probe", 2, classes=("H31", "H35", "H41")),
    stencil("license-server-silent", "license", 1, classes=("H43", "H31")),
    stencil("refines-for-ever", "refine", 3, classes=("H30",)),
    stencil("mesh-missing", "mesh", 0, classes=("H44", "H30", "H31")),
    stencil("stopped", "paused", 1, classes=("H55",)),
    stencil("converges-alone", "converged", 2, classes=(*LEFT_BEHIND, "H15", "H48")),
    stencil("tag-differs", "tag", 2, classes=("H09",)),
    stencil("residual-skipped", "no-residual", 1, classes=("H01", "H03")),
    stencil("steers-first", "steer-first", 3, classes=("H03",)),
    stencil("probe-silent-random", "probe", 0, classes=("H31", "H35", "H41"), moment="random", between_s=(1.0, 20.0)),
    mpi_ddp("steps", **STEPS),
    mpi_ddp("tokenizes", "tokenize", 1, state="slow", classes=("H51", "H100", "H101")),
    mpi_ddp("saves", "save", 0, state="slow", classes=("H64", "H102", "H51")),
    mpi_ddp("archive-silent", "archive", 3, classes=("H31", "H35", "H36", "H41")),
    mpi_ddp("hook-never-ends", "hook", 2, classes=("H35",)),
    mpi_ddp("stopped", "stopped", 1, classes=("H55",)),
    mpi_ddp("metric-in-other-operation", "metric", 3, classes=("H03",)),
    regression("steps", **STEPS),
    regression("steps-by-variable", way="variable", **STEPS),
    regression("slow-steps", words="--think=3", way="variable", **{**STEPS, "sign": "step 1 "}),
    regression("evaluates", "evaluate", 0, state="slow", classes=("H51", "H101", "H104")),
    regression("retries", "retry", 3, way="variable", state="slow", classes=("H100", "H51")),
    regression("pipe-silent", "vocabulary", 2, classes=("H31", "H35", "H41")),
    regression("lease-missing", "lease", 1, way="variable", classes=("H44", "H30", "H31")),
    regression("normalises-for-ever", "normalise", 3, classes=("H30",)),
    regression("stopped", "suspend", 2, way="variable", classes=("H55",)),
    regression("exits", "exit", 1, also=("crashed",), classes=("H48", "H70", "H72"), limit_s=60.0),
    regression("publishes-alone", "publish", 2, classes=("H03", "H10", "H01")),
    regression("steps-starting", state="progressing", moment="starting", between_s=(1.0, 14.0)),
    regression("pipe-silent-random", "vocabulary", 3, classes=("H31", "H35", "H41"), moment="random",
               between_s=(3.0, 40.0)),
    regression("py312-steps", interpreter="py312", **STEPS, **OTHER_PYTHON),
    regression("py312-pipe-silent", "vocabulary", 1, interpreter="py312", **OTHER_PYTHON),
    stencil("py312-residual-skipped", "no-residual", 2, classes=("H01", "H03"), interpreter="py312", **OTHER_PYTHON),
    mpi_ddp("py310-steps", interpreter="py310", **STEPS, **OTHER_PYTHON),
    mpi_ddp("py310-archive-silent", "archive", 2, interpreter="py310", **OTHER_PYTHON),
    mpich("steps", **STEPS),
    mpich("hook-never-ends", "hook", 1, classes=("H35",)),
    ring("py38", "steps", **STEPS),
    ring("py313", "sensor-silent", "sensor", 1, classes=("H31", "H35", "H41")),
    ring("py313", "settles-for-ever", "settles", 3, classes=("H30",)),
    ring("pypy", "steps", **STEPS),
    ring("pypy", "sensor-silent", "sensor", culprits=(), involved=(0,)),
)  # fmt: skip
