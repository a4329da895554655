"""Failures that were written without looking at how `bsl` judges: a test of rules that were not made for them.

What is true of each was declared from how it is made, before the first measurement.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from injected.case import Check, Injection, Look, Truth
from injected.field import PROGRAMS, Field, MiniCluster, NotMade, Run, wait_until

Inject = Callable[[Field], Iterator[Look]]
PROGRAM = "odd_rank.py"
HARM = (r"bsl cancel", r"batch host died", r"node_failure", r"(?m)^lost node")


def odd(*words: str, nodes: int = 2) -> Inject:
    """Return an injection that is in the words of the program, and is looked at after the end."""

    def inject(field: Field) -> Iterator[Look]:
        run = field.submit(*words, program=PROGRAM, nodes=nodes)
        run.wait_over()
        yield run.look()

    return inject


def failed(rank: int, code: int | str, *words: str, never: Sequence[str] = ()) -> Truth:
    """The truth of a rank that failed on its own; the words are also in its log."""
    advice = (rf"bsl logs .*--rank {rank}\b",)
    said = words[0] if words and not words[0].startswith("SIG") else ""
    return Truth(code, ("FAILED",), ("crashed",), rank, words=words, advice=advice, never=(*HARM, *never), said=said)


def ends(run: Run, timeout_s: float) -> Check:
    """Whether the job is over in time. If not, it is cancelled, so that somebody may look at it."""
    try:
        run.wait_over(timeout_s)
    except NotMade:
        run.cluster.run("scancel", run.job_id)
        run.wait_over()
        return Check("cause", "wrong", f"the job still runs after {timeout_s:.0f} s")
    return Check("cause", "right", "the job is over")


def two_looks(*programs: tuple[str, ...]) -> Inject:
    """Return an injection with one run of each program, one after the other."""

    def inject(field: Field) -> Iterator[Look]:
        for number, words in enumerate(programs):
            run = field.submit(*words, program=PROGRAM, name=f"run{number}")
            over = ends(run, 60)
            yield run.look(" ".join(words), over)

    return inject


def inside(cluster: MiniCluster, node: str) -> list[str]:
    """The words that run a command among the mounts of an isolated node."""
    pid = cluster.daemon(node)
    child = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0]
    return ["nsenter", f"--mount=/proc/{child}/ns/mnt", f"--pid=/proc/{child}/ns/pid"]


def missing_on_one_node(field: Field) -> Iterator[Look]:
    """The folder of a module is not mounted on the second node of the job."""
    folder = field.folder / "software"
    folder.mkdir(parents=True)
    (folder / "house_of_tokens.py").touch()
    enter = inside(field.cluster, "n13")
    subprocess.run([*enter, "mount", "-t", "tmpfs", "none", str(folder)], check=True)
    try:
        run = field.submit("import", str(folder), program=PROGRAM, sets=["slurm.nodelist=n12,n13"])
        run.wait_over()
        yield run.look()
    finally:
        subprocess.run([*enter, "umount", "-l", str(folder)], check=False)


def read_only_node(field: Field) -> Iterator[Look]:
    """The mount of the run directory becomes read-only on one node, as after an error of its file system client."""
    root, flag = field.folder / "runs", field.folder / "flag"
    run = field.submit("save", str(root), str(flag), program=PROGRAM, root=root)
    run.wait_for_line("iteration 2")
    enter = inside(field.cluster, run.nodes()[1])
    subprocess.run([*enter, "mount", "--bind", str(root), str(root)], check=True)
    try:
        subprocess.run([*enter, "mount", "-o", "remount,bind,ro", str(root)], check=True)
        flag.touch()
        run.wait_over()
        yield run.look()
    finally:
        subprocess.run([*enter, "umount", "-l", str(root)], check=False)


def step_cancelled(field: Field) -> Iterator[Look]:
    run = field.submit()
    run.wait_for_line("iteration 2")
    listed = run.cluster.ask("squeue", "--steps", "-h", "-j", run.job_id, "-o", "%i")
    steps = [step for step in listed.split() if re.fullmatch(r"\d+\.\d+", step)]
    if len(steps) != 1:
        raise NotMade(f"the steps of the job are {listed}")
    run.cluster.ask("scancel", steps[0])
    run.wait_over()
    yield run.look()


def polite_cancel(field: Field) -> Iterator[Look]:
    run = field.submit("polite", program=PROGRAM)
    run.wait_for_line("iteration 2")
    run.cluster.ask("scancel", run.job_id)
    run.wait_over()
    yield run.look()


def clock_jumps(field: Field) -> Iterator[Look]:
    """The clock of the second node is set back by a minute while the job runs; then a rank fails on each node.

    Rank 1 fails 3 s before rank 2. srun is stopped so that both can fail.
    """
    library, flag, jump = field.folder / "clock.so", field.folder / "flag", field.folder / "jump"
    field.folder.mkdir(parents=True, exist_ok=True)
    built = ["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(PROGRAMS / "clock.c"), "-ldl"]
    if subprocess.run(built, capture_output=True, check=False).returncode != 0:
        raise NotMade("needs a C compiler")
    variables = {"LD_PRELOAD": str(library), "SKEWED_NODE": "1", "SKEW_S": "-60", "SKEW_FROM": str(jump)}
    site = {"environment": {key: {"value": value, "reason": "a wrong clock"} for key, value in variables.items()}}
    early = (f"1@3=flag:{flag}", "1@3=raise:ValueError: the first")
    late = (f"2@3=flag:{flag}.1", "2@3=raise:KeyError: later")
    run = field.submit(*early, *late, site=site)
    run.wait_for_line("iteration 2")
    jump.touch()
    time.sleep(4)
    srun = run.find_launcher(b"srun")
    os.kill(srun, signal.SIGSTOP)
    flag.touch()
    time.sleep(3)
    flag.with_name("flag.1").touch()
    wait_until(lambda: "KeyError" in run.log(2), "the other rank fails too")
    time.sleep(0.5)
    os.kill(srun, signal.SIGCONT)
    run.wait_over()
    yield run.look()


def rebooted(field: Field) -> Iterator[Look]:
    """A node is reset: all of its processes end at once, and its slurmd is back with a new time of boot."""
    cluster = field.cluster
    run = field.submit()
    run.wait_for_line("iteration 2")
    time.sleep(5)
    nodes = run.nodes()
    daemon = cluster.daemon(nodes[1])
    argv = Path(f"/proc/{daemon}/cmdline").read_text().rstrip("\0").split("\0")
    variables = dict(word.partition("=")[::2] for word in Path(f"/proc/{daemon}/environ").read_text().split("\0"))
    reset(cluster, nodes[1])
    time.sleep(3)
    with (cluster.directory / "slurmd-again").open("ab") as output:
        again = subprocess.Popen(
            [*argv, "-b"], env=variables, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    try:
        run.wait_over()
        yield run.look(nodes=nodes)
    finally:
        again.kill()
        again.wait()


def reset(cluster: MiniCluster, node: str) -> None:
    """Kill slurmd, and what it started on its node; all stand still first, so that nobody sees another's end."""
    log = str(cluster.directory / "log" / f"slurmd-{node}.log")
    holders = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit() and holds(path, log)]
    found = [pid for holder in holders for pid in family(holder)]
    if len(found) < 6:
        raise NotMade(f"only {len(found)} processes of the node are found")
    for signum in (signal.SIGSTOP, signal.SIGKILL):
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signum)


def holds(process: Path, log: str) -> bool:
    """Whether it is a slurmd or slurmstepd of the node: they have the log open."""
    with suppress(OSError):
        return any(str(each.readlink()) == log for each in (process / "fd").iterdir())
    return False


def family(pid: int) -> list[int]:
    """Return a process and what it started."""
    with suppress(OSError):
        children = [word for path in Path(f"/proc/{pid}/task").glob("*/children") for word in path.read_text().split()]
        return [pid, *(each for child in children for each in family(int(child)))]
    return []


def same_crash(field: Field) -> Iterator[Look]:
    """A chain: the first start fails at step 4, the second one gets to step 8, the third one fails there too."""
    run = field.submit("resume", program=PROGRAM, sets=["slurm.chain={by: requeue}"])
    wait_until(lambda: run.attempt("0001.r2").is_dir(), "it starts for the third time", 150)
    over = ends(run, 60)
    starts = sorted(path.name for path in (run.directory / "attempts").iterdir())
    true = ["0001", "0001.r1", "0001.r2"]
    yield run.look("", over, Check("cause", "right" if starts == true else "wrong", f"it made the starts {starts}"))


FINISHED = Truth(0, ("COMPLETED",), ("finished",), never=HARM)
STEP_CANCELLED = Truth(
    r"[1-9]\d*", ("FAILED", "CANCELLED"), ("cancelled",), never=(*HARM, r"ended +(finished|crashed)")
)
CANCELLED = Truth(None, ("CANCELLED",), ("cancelled",), never=(*HARM, r"ended +finished", "left_early"))
MISSING = Truth(
    1,
    ("FAILED",),
    ("crashed",),
    node_index=1,
    words=("No module named",),
    advice=(r"bsl logs .*--rank [23]\b",),
    never=HARM,
    said="No module named",
)
REBOOTED = Truth(
    None,
    ("NODE_FAIL", "FAILED"),
    ("node_failure",),
    node_index=1,
    advice=(r"bsl submit", r"submit it again", r"bsl nodes", r"bsl logs"),
    never=(r"bsl cancel", r"scancel", r"batch host died"),
)
SAME_CRASH = Truth(
    1,
    ("FAILED",),
    ("crashed",),
    2,
    words=("NaN in gradients", r"next start +none", r"no (?:step|progress)"),
    advice=(r"bsl logs .*--rank 2\b",),
    never=(*HARM, "a shard is empty"),
    said="NaN in gradients",
)
ROWS: tuple[tuple[str, str, Inject, tuple[Truth, ...]], ...] = (
    (
        "missing-on-one-node",
        "a folder is not mounted on one node: a module cannot be imported there",
        missing_on_one_node,
        (MISSING,),
    ),
    (
        "daemon-holds-output",
        "a rank leaves a daemon that holds its output: all end with 0; another time, the rank ends with 3",
        two_looks(("daemon", "0"), ("daemon", "3")),
        (FINISHED, failed(1, 3)),
    ),
    (
        "thread-traceback",
        "a thread of a rank dies and says so, which harms no other; another time, another rank ends with 9 later",
        two_looks(("thread",), ("thread", "9")),
        (FINISHED, failed(3, 9, never=("connection reset",))),
    ),
    (
        "odd-bytes",
        "a rank prints a progress bar, colours and bytes that are not UTF-8, then ends with -1",
        odd("bytes"),
        (failed(2, 255, "bad shard", never=(r"\x1b", r"\bSIG[A-Z]")),),
    ),
    (
        "slow-death",
        "a rank has no memory left and takes 4 s to end; the others lose its connection and end first",
        odd("slow-death", nodes=4),
        (failed(5, r"[1-9]\d*", "out of memory"),),
    ),
    (
        "teardown-segv",
        "all ranks make their last step; one dies of SIGSEGV at its exit",
        odd("teardown"),
        (failed(1, 139, "SIGSEGV"),),
    ),
    ("step-cancelled", "a person cancels the step of the ranks: `scancel JOB.0`", step_cancelled, (STEP_CANCELLED,)),
    (
        "polite-cancel",
        "a person cancels the job, and the program ends with 0 when it is told to",
        polite_cancel,
        (CANCELLED,),
    ),
    (
        "read-only-node",
        "the run directory becomes read-only on one node, where a rank fails to save",
        read_only_node,
        (failed(2, 1, "Read-only file system"),),
    ),
    (
        "clock-jumps",
        "the clock of a node is set back by a minute during the run; then ranks of two nodes fail",
        clock_jumps,
        (failed(1, 1, "the first", "clock"),),
    ),
    ("rebooted", "a node is reset, and its slurmd is back before Slurm misses it", rebooted, (REBOOTED,)),
    (
        "same-crash",
        "`slurm.chain`, and the second and the third start fail at the same step",
        same_crash,
        (SAME_CRASH,),
    ),
)
CASES = tuple(
    Injection(
        name,
        what,
        inject,
        truths,
        cluster="rebooting" if name == "rebooted" else "isolated",
        is_own=True,
        is_held_out=True,
    )
    for name, what, inject, truths in ROWS
)
