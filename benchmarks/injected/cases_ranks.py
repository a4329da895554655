"""Failures of ranks: they die, leave, hang, complain of each other, or cannot write."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from injected.case import Check, Injection, Look, Truth
from injected.field import PROGRAMS, Field, NotMade, wait_until

Inject = Callable[[Field], Iterator[Look]]
LOGS = (r"bsl logs .*--rank {}\b",)
HARM = (r"bsl cancel", r"scancel", r"batch host died", r"node_failure", r"(?m)^lost node")
WATCHDOG = (
    "[E1122 03:12:41.1 ProcessGroupNCCL.cpp:632] [PG ID 2 PG GUID 4(DP) Rank 1] Watchdog caught collective operation "
    "timeout: WorkNCCL(SeqNum=178, OpType=ALLREDUCE, NumelIn=4, NumelOut=4, Timeout(ms)=600000) ran for 600027 "
    "milliseconds before timing out."
)
AFTERMATH = "terminate called after throwing an instance of 'c10::DistBackendError'"
RESET = "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Read error: Connection reset by peer"


def simple(*words: str, nodes: int = 2, program: str = "rank.py", timeout_s: float = 90.0) -> Inject:
    """Return an injection that is in the words of the program, and is looked at after the end."""

    def inject(field: Field) -> Iterator[Look]:
        run = field.submit(*words, nodes=nodes, program=program)
        run.wait_over(timeout_s)
        yield run.look()

    return inject


def died(rank: int, code: int, *words: str, said: str = "") -> Truth:
    """The truth of a rank that failed on its own."""
    advice = tuple(text.format(rank) for text in LOGS)
    return Truth(code, ("FAILED",), ("crashed",), rank, words=words, advice=advice, never=HARM, said=said)


def skewed(seconds: int, first: int, second: int) -> Inject:
    """One rank fails 3 s before another; the clock of ranks 2 and 3 is wrong. srun is stopped so that both can fail."""

    def inject(field: Field) -> Iterator[Look]:
        library, flag = field.folder / "clock.so", field.folder / "flag"
        field.folder.mkdir(exist_ok=True)
        built = ["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(PROGRAMS / "clock.c"), "-ldl"]
        if subprocess.run(built, capture_output=True, check=False).returncode != 0:
            raise NotMade("needs a C compiler")
        variables = {"LD_PRELOAD": str(library), "SKEWED_NODE": "1", "SKEW_S": str(seconds)}
        site = {"environment": {key: {"value": value, "reason": "a wrong clock"} for key, value in variables.items()}}
        early = (f"{first}@3=flag:{flag}", f"{first}@3=raise:ValueError: the first")
        late = (f"{second}@3=flag:{flag}.1", f"{second}@3=raise:KeyError: later")
        run = field.submit(*early, *late, site=site)
        run.wait_for_line("iteration 2")
        srun = run.find_launcher(b"srun")
        os.kill(srun, signal.SIGSTOP)
        flag.touch()
        time.sleep(3)
        flag.with_name("flag.1").touch()
        wait_until(lambda: "KeyError" in run.log(second), "the other rank fails too")
        time.sleep(0.5)
        os.kill(srun, signal.SIGCONT)
        run.wait_over()
        yield run.look()

    return inject


def full(kind: str) -> Inject:
    """The run directory is on a small file system of its own, which rank 3 fills before it fails for another reason."""

    def inject(field: Field) -> Iterator[Look]:
        root = field.disks / kind
        run = field.submit(f"3@3={'fill' if kind == 'bytes' else 'inodes'}:{root}/rest", "3@4=exit:7", root=root)
        run.wait_over()
        yield run.look()

    return inject


def cascade(field: Field) -> Iterator[Look]:
    flag = field.folder / "flag"
    culprit, victims = (
        ("5@4=say:ValueError: NaN in loss", f"5@4=gone:{flag}"),
        (f"!5@3=flag:{flag}", f"!5@3=raise:{RESET}"),
    )
    run = field.submit(*culprit, *victims, nodes=4)
    run.wait_over()
    yield run.look()


def submitted_to_full_disk(field: Field) -> Iterator[Look]:
    root = field.disks / "tiny"
    done, directory = field.try_submit(root=root)
    said = done.stderr.strip()
    yield Look(
        "",
        checks=(
            Check("exit status", "wrong" if done.returncode == 0 else "right", f"exit code {done.returncode}"),
            Check(
                "cause", "right" if "No space left" in said and "Traceback" not in said else "wrong", f"said: {said}"
            ),
            Check("next step", "wrong" if directory.exists() else "right", "a run directory was left"),
        ),
    )


def frozen(field: Field) -> Iterator[Look]:
    root = field.disks / "frozen"
    run = field.submit("3@15=raise:ValueError: while it was frozen", root=root)
    run.wait_for_line("iteration 2")
    subprocess.run(["fsfreeze", "-f", str(root)], check=True)
    try:
        time.sleep(20)
    finally:
        subprocess.run(["fsfreeze", "-u", str(root)], check=True)
    run.wait_over()
    yield run.look()


def stopped(field: Field) -> Iterator[Look]:
    run = field.submit("timeout=8", program="gloo_rank.py")
    run.wait_for_line("iteration 2")
    os.kill(run.pid(2), signal.SIGSTOP)
    run.wait_over(120)
    yield run.look()


def asked_to_end(field: Field) -> Iterator[Look]:
    run = field.submit()
    run.wait_for_line("iteration 2")
    os.kill(run.pid(1), signal.SIGTERM)
    run.wait_over()
    yield run.look()


def flooding(megabytes: int, *more: str) -> Inject:
    """A rank prints a lot; a user must see the first lines of its log at once."""

    def inject(field: Field) -> Iterator[Look]:
        run = field.submit(f"1@2=flood:{megabytes}", *more, "steps=5", nodes=1, sets=["slurm.wait_s=0"])
        run.wait_over(150)
        _, seconds = run.read_logs("logs", str(run.directory))
        size = sum(path.stat().st_size for path in (run.attempt() / "logs").iterdir())
        quick = Check(
            "next step", "right" if seconds < 10 else "wrong", f"first line of bsl logs after {seconds:.0f} s"
        )
        cap = Check("cause", "right" if size < 600e6 else "wrong", f"{size / 1e6:.0f} MB of logs were kept")
        yield run.look("", quick, *([cap] if megabytes > 600 else []))

    return inject


NO_ROOM = replace(died(3, 7), words=("No space left on device",), advice=("make room there",))
LEFT = Truth(
    r"[1-9]\d*", ("FAILED",), ("left_early",), 3, words=(r"exit code 0|left",), advice=(r"bsl logs .*3\b",), never=HARM
)
HANG = Truth(
    r"[1-9]\d*", ("FAILED",), ("hang",), 2, words=("did not take part",), advice=("bsl (logs|spy)",), never=HARM
)
CASES = (
    Injection("segv", "a rank dies of SIGSEGV", simple("2@3=kill:SIGSEGV"), (died(2, 139, "SIGSEGV"),), "right"),
    Injection(
        "killed",
        "a rank is killed, as for lack of memory",
        simple("2@3=kill:SIGKILL"),
        (died(2, 137, "SIGKILL"),),
        "right",
    ),
    Injection(
        "ecc",
        "a rank ends with 5 and an ECC error, others wait",
        simple("2@3=say:CUDA error: uncorrectable ECC error encountered", "2@3=exit:5", "!2@3=wait"),
        (died(2, 5, "ECC error", said="ECC error"),),
        "right",
    ),
    Injection(
        "cascade",
        "one rank of 8 fails, seven die of lost connections",
        cascade,
        (died(5, 1, "NaN in loss", said="NaN in loss"),),
        "right",
    ),
    Injection(
        "clock-ahead",
        "ranks of two nodes fail, the clock of the first is 20 s ahead",
        skewed(20, first=2, second=1),
        (died(2, 1, "the first", "clock"),),
        "wrong rank",
    ),
    Injection(
        "watchdog",
        "NCCL's watchdog (its words) aborts 7 of 8 ranks, the other hangs",
        simple(f"!5@4=say:{WATCHDOG}", f"!5@4=say:{AFTERMATH}", "!5@4=kill:SIGABRT", "5@3=deaf", "5@3=wait", nodes=4),
        (Truth(134, ("FAILED",), ("hang",), 5, words=("did not take part",), advice=("bsl (logs|spy)",), never=HARM),),
        "only SIGABRT, and a victim blamed",
    ),
    Injection(
        "left-early",
        "a rank of a program ends with 0 early, others wait",
        simple("3@3=exit:0", "!3@4=wait"),
        (LEFT,),
        "an innocent rank and its node blamed as lost",
    ),
    Injection(
        "left-early-gloo",
        "a rank of a training ends with 0 early, others lose their connections",
        simple("3@4=leave", program="gloo_rank.py", timeout_s=120),
        (LEFT,),
        "a victim blamed",
        needs_torch=True,
    ),
    Injection(
        "hung-at-exit",
        "a rank hangs at its exit when all others have ended",
        simple("steps=4", "1@4=wait"),
        (
            Truth(
                r"[1-9]\d*",
                ("FAILED",),
                ("hung_at_exit",),
                1,
                words=("still ran",),
                advice=(r"bsl logs .*1\b",),
                never=HARM,
            ),
        ),
        "the rank, but not that it hung at its exit",
    ),
    Injection(
        "healthy",
        "all ranks end with 0",
        simple("steps=4"),
        (Truth(0, ("COMPLETED",), ("finished",), never=HARM),),
        "right",
    ),
    Injection(
        "disk-full",
        "the file system of the run directory is full (tmpfs) when a rank ends with 7",
        full("bytes"),
        (NO_ROOM,),
        "wrong exit code, false cause, no rank",
    ),
    Injection(
        "frozen",
        "the file system of the run directory stands still for 20 s",
        frozen,
        (died(3, 1, "while it was frozen"),),
        "right",
    ),
    Injection(
        "gigabyte",
        "a rank prints 1 GB",
        flooding(1000),
        (Truth(0, ("COMPLETED",), ("finished",), never=HARM),),
        "no limit of the log; bsl logs takes a minute",
    ),
    Injection(
        "sigstop",
        "a rank is stopped from outside (SIGSTOP), gloo times out on the others",
        stopped,
        (HANG,),
        is_own=True,
        needs_torch=True,
    ),
    Injection(
        "gloo-timeout",
        "a rank waits for data, gloo times out on the others",
        simple("timeout=8", "2@4=load", program="gloo_rank.py", timeout_s=120),
        (HANG,),
        is_own=True,
        needs_torch=True,
    ),
    Injection(
        "clock-behind",
        "ranks of two nodes fail, the clock of the second to fail is 20 s behind",
        skewed(-20, first=1, second=2),
        (died(1, 1, "the first", "clock"),),
        is_own=True,
    ),
    Injection(
        "inodes",
        "the file system of the run directory has no inodes left when a rank ends with 7",
        full("inodes"),
        (NO_ROOM,),
        is_own=True,
    ),
    Injection(
        "flood-and-die",
        "a rank prints 200 MB, then fails",
        flooding(200, "1@3=raise:ValueError: after the flood"),
        (died(1, 1, "after the flood"),),
        is_own=True,
    ),
    Injection(
        "retried",
        "ranks survive a lost connection and say so, then one fails on its own",
        simple(f"*@2=say:warning: {RESET}, trying again", "1@5=raise:AssertionError: loss scale"),
        (died(1, 1, "loss scale", said="loss scale"),),
        is_own=True,
    ),
    Injection(
        "submit-disk-full",
        "the disk is full when the run is submitted",
        submitted_to_full_disk,
        (Truth(),),
        is_own=True,
    ),
    Injection(
        "long-line",
        "a rank prints 20 MB without a line end, then fails",
        simple("2@3=line:20", "2@3=exit:3"),
        (died(2, 3),),
        is_own=True,
    ),
    Injection(
        "terminated",
        "a person sends SIGTERM to one rank",
        asked_to_end,
        (died(1, 143, "SIGTERM"),),
        is_own=True,
    ),
)
