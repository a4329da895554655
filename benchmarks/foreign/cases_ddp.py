"""Cases of plain DDP: under torchrun, under launchers of one's own, and on spawned processes."""

from __future__ import annotations

from typing import Any

from foreign.case import ForeignCase

TORCHRUN = (
    "{python}", "-m", "torch.distributed.run", "--nproc-per-node={world_size}", "--master-addr=127.0.0.1",
    "--master-port={port}",
)  # fmt: skip
HEALTHY = {"state": "progressing", "sign": "step 5 ", "sign_count": 4}
SLOW = {"state": "slow"}


def torchrun(name: str, program: str, words: str = "", state: str = "hang", **more: Any) -> ForeignCase:
    """A program of `framework` started by torchrun with some words of its own."""
    framework = more.pop("framework", "ddp")
    command = (*TORCHRUN, "{program}", *words.split())
    return ForeignCase(f"{framework}-{name}", framework, "torchrun", program, command, state, **more)


def digits(name: str, trouble: str, who: int = 0, words: str = "", **more: Any) -> ForeignCase:
    """digits.py under torchrun, where `who` is in trouble."""
    return torchrun(name, "digits.py", f"--trouble={trouble} --who={who} {words}", **{"culprits": (who,), **more})


def own(name: str, options: str, words: str, state: str = "hang", **more: Any) -> ForeignCase:
    """digits.py under start_all.py."""
    launcher = "own-args" if "--as-arguments" in options else "own-env"
    command = ("{python}", "{programs}/start_all.py", "--port={port}", *options.split(), "{program}", *words.split())
    return ForeignCase(f"{launcher}-{name}", "ddp", launcher, "digits.py", command, state, **more)


def spawn(name: str, method: str, what: str = "", **more: Any) -> ForeignCase:
    """tune_spawn.py, `spawn` or `fork`."""
    command = ("{python}", "{program}", method, "{port}", "{world_size}", what, "{culprit}")
    name = f"{method}-{name}"
    return ForeignCase(name, "ddp", f"mp-{method}", "tune_spawn.py", command, **{"state": "hang", **more})


def shell(name: str, words: str, **more: Any) -> ForeignCase:
    """digits.py, each rank started by a shell loop."""
    command = ("bash", "{programs}/start_all.sh", "{port}", "{world_size}", "{python}", "{program}", *words.split())
    return ForeignCase(f"shell-{name}", "ddp", "shell", "digits.py", command, **{"state": "hang", **more})


CASES: tuple[ForeignCase, ...] = (
    torchrun("steps", "digits.py", **HEALTHY),
    torchrun("slow-steps", "digits.py", "--width=1200 --rows=6000", **{**HEALTHY, "sign": "step 2 "}),
    torchrun("accumulates", "digits.py", "--accumulate=40 --width=256 --rows=128", **HEALTHY),
    digits("exchanges", "exchange", culprits=(), state="progressing", sign="exchanged 3 ", sign_count=4),
    digits("logs-a-lot", "log", culprits=(), **{**HEALTHY, "sign": "step 9 "}),
    torchrun("steps-starting", "digits.py", state="progressing", moment="starting", between_s=(1.0, 14.0)),
    digits("short-epoch", "short-epoch", 2, classes=("H02", "H10")),
    digits("short-epoch-random", "short-epoch", 1, classes=("H02", "H10"), moment="random", between_s=(3.0, 45.0)),
    digits("metric-skipped", "metrics", 3, classes=("H01",)),
    digits("validates-on-first", "validate", state="slow", classes=("H51", "H101", "H104"), settle_s=8.0),
    digits("exception-ignored", "ignored", 1, classes=("H47",)),
    digits("locks-crossed", "locks", 2, classes=("H34",)),
    digits("loops", "loop", 1, classes=("H30",)),
    digits("waits-for-event", "event", 3),
    digits("stopped", "stopped", 0, classes=("H55",)),
    digits("file-locked", "flock", 2, classes=("H41",)),
    digits("child-silent", "child", 3, classes=("H35",)),
    digits("service-silent", "service", 1, classes=("H43",)),
    digits("service-silent-random", "service", 0, classes=("H43",), moment="random", between_s=(3.0, 45.0)),
    digits("backs-off", "retry", 1, state="slow", classes=("H100",)),
    digits("polls", "poll", 3, state="slow", classes=("H51", "H100", "H104")),
    digits("fetches", "fetch", 0, state="slow", classes=("H51",)),
    digits("indexes", "index", 0, state="slow", classes=("H51", "H101")),
    digits("saves-in-blocks", "save", 0, state="slow", classes=("H64", "H102")),
    digits("serves", "serve", 0, state="slow", classes=("H104", "H51")),
    digits("late-data", "late", 2, state="slow", classes=("H100",), settle_s=10.0),
    digits("hands-in", "finish", 1, state="finished", classes=("H105",), also=("slow", "progressing"), moment="ending",
           settle_s=3.0),
    digits("barrier-in-handler", "preempt", 2, classes=("H77", "H49")),
    digits("reduces-in-del", "cache", 1, classes=("H52",)),
    digits("config-missing", "config", 2, classes=("H44",)),
    own("leaves-with-thread", "", "--trouble=leave --who={culprit}", culprits=(2,), classes=("H48",)),
    own("killed-while-polled", "", "--trouble=flag --who={culprit}", state="crashed", also=("hang",),
        culprits=(2,), classes=("H70",)),
    own("gone-while-awaited", "", "--trouble=keys --who={culprit}", also=("crashed",), culprits=(3,),
        classes=("H72", "H44")),
    own("one-missing", "--omit=3", "", culprits=(3,), classes=("H45", "H74"), settle_s=15.0),
    own("one-misdirected", "--misdirect=2", "", culprits=(2,), classes=("H46",), sign="hello", sign_count=4,
        settle_s=10.0),
    own("steps", "--as-arguments", "", **HEALTHY),
    own("locks", "--as-arguments", "--trouble=locks --who={culprit}", culprits=(1,), classes=("H34",)),
    own("short-epoch", "--as-arguments", "--trouble=short-epoch --who={culprit}", culprits=(0,),
        classes=("H02", "H10")),
    shell("steps", "", **HEALTHY),
    shell("event", "--trouble=event --who={culprit}", culprits=(3,)),
    spawn("steps", "spawn", **HEALTHY),
    spawn("steps", "fork", **HEALTHY),
    spawn("heavy-steps", "spawn", "heavy", **{**HEALTHY, "sign": "step 3 "}),
    spawn("uneven", "spawn", "uneven", culprits=(1,), classes=("H02", "H03", "H10", "H12")),
    spawn("lock", "fork", "lock", culprits=(2,)),
    spawn("stopped", "spawn", "stopped", culprits=(3,), classes=("H55",)),
    spawn("backoff", "spawn", "backoff", culprits=(0,), state="slow", classes=("H100",)),
    spawn("uneven-random", "fork", "uneven", culprits=(2,), classes=("H02", "H03", "H10", "H12"), moment="random",
          between_s=(2.0, 30.0)),
)  # fmt: skip
