"""Attacks from inside a rank: what it raises, what it writes to its runner, what it leaves behind; and the guards."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

from recovering.attack import Attack, Expected
from recovering.attacked_run import StartedRun, losses
from recovering.cases import Layout

RAISE_IN_STEP = """
import bigsci_launch.train.loop as loop
from bigsci_launch.errors import DataError
before = loop._train_batch
def injured(training, progress):
    loop._train_batch = before
    raise {error}
loop._train_batch = injured
"""
"""The next step of the rank raises, once."""
RAISE_IN = """
import {module} as module
before = {owner}.{name}
def injured(*arguments, **named):
    {owner}.{name} = before
    raise RuntimeError("attack")
{owner}.{name} = injured
"""
"""The next call of a function raises, once."""
ENGINE = {"module": "deepspeed.runtime.engine", "owner": "module.DeepSpeedEngine", "name": "_take_model_step"}
TO_RUNNER = """
import json, os
descriptor = int(os.environ["BSL_SLOT_FD"])
def write(data):
    data += b"\\n"
    while data:
        data = data[os.write(descriptor, data):]
"""
GARBAGE = """
for data in (os.urandom(100000), b"[" * 100000, b"\\xff\\xfe", b"{}", b"[1]", b'{"word": 7}', b'{"word": [1]}'):
    write(data)
"""
FORK = """
import os, signal, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(1e5)
    os._exit(0)
time.sleep(0.2)
os.kill(os.getpid(), signal.SIGKILL)
"""
OVERFLOW = """
import sys, threading
sys.setrecursionlimit(10**9)
nested = []
for _ in range(10**6):
    nested = [nested]
repr(nested)
import ctypes
ctypes.string_at(0)
"""
NAN = """
import bigsci_launch.train.loop as loop
before = loop._train_batch
def injured(training, progress):
    loop._train_batch = before
    parameter = next(each for each in training.engine.module.parameters() if each.requires_grad)
    handle = parameter.register_hook(lambda gradient: gradient * float("nan"))
    try:
        return before(training, progress)
    finally:
        handle.remove()
loop._train_batch = injured
"""
CORRUPT = """
import gc, time, torch
weight = next(each for each in gc.get_objects() if isinstance(each, torch.nn.Parameter) and each.dim() == 2)
until = time.time() + 3
while time.time() < until:
    with torch.no_grad():
        weight.data[3, 5] += 0.01
    time.sleep(0.004)
"""
STAY = """
import time
import bigsci_launch.train.lives as lives
lives.leave = lambda: time.sleep(1e5)
"""
DP4 = Layout(tp=1, pp=1, dp=4, precision="fp32", dropout=0.0)
LONGER = {"training": {"steps": 60}}
EACH_STEP = {"guards": {"interval": 1}}
WARN = {"guards": {"interval": 1, "action": "warn"}}


def inside(rank: int, code: str) -> Callable[[StartedRun], None]:
    """Return an attack that runs `code` in a rank after step 12."""

    def injure(run: StartedRun) -> None:
        _until_quiet(run)
        run.inject(rank, code)

    return injure


def _until_quiet(run: StartedRun, step: int = 12) -> None:
    run.until(step)
    run.until_standbys()


def _raise(rank: int, error: str) -> Callable[[StartedRun], None]:
    return inside(rank, RAISE_IN_STEP.format(error=error))


def _two_leave(run: StartedRun) -> None:
    _until_quiet(run)
    run.inject(2, "import os; os._exit(0)")
    run.until_generation(1)
    run.until(run.step() + 3)
    run.inject(1, "import os; os._exit(0)")
    run.wait()
    run.claim("both ends name the rank", run.failures() == [("left_early", 2), ("left_early", 1)])


def _fork(run: StartedRun) -> None:
    inside(1, FORK)(run)
    run.wait()
    run.claim("no process of a rank is left", not run.trainer_pids)


def _two_raise(run: StartedRun) -> None:
    _until_quiet(run)
    for rank in (1, 2):
        run.inject(rank, RAISE_IN.format(**ENGINE))
    run.wait()
    run.claim("the cause is rank 1 or 2", run.failures()[:1] in ([("died", 1)], [("died", 2)]))


def _interrupt(run: StartedRun) -> None:
    _until_quiet(run)
    run.kill(run.rank_pid(2), signal.SIGINT)
    run.wait()
    run.claim("rank 2 died", run.failures()[:1] == [("died", 2)])


def _after_finished(run: StartedRun) -> None:
    _until_quiet(run)
    run.inject(3, STAY)
    pid = run.rank_pid(3)
    while not (run.run.checkpoints / "global_step30").exists():
        time.sleep(0.1)
    time.sleep(4)
    run.kill(pid)


def _warn_then_kill(run: StartedRun) -> None:
    _until_quiet(run)
    run.inject(0, CORRUPT)
    time.sleep(4)
    run.kill(run.rank_pid(3))
    run.wait()
    run.claim("the run ends with 0", run.exit_code == 0)
    text = run.attempt.log_file(0).read_text(errors="replace") + run.output.read_text(errors="replace")
    run.claim("a guard has warned", "guard" in text)
    run.claim("rank 3 died", ("died", 3) in run.failures())


def _corrupt_rank_3(run: StartedRun) -> None:
    _until_quiet(run)
    run.inject(3, CORRUPT)
    run.wait()
    run.claim("there is no second generation", not any(each.get("generation") == 1 for each in run.generations()))
    blamed = [each.get("rank") for each in run.generations() if each["event"] == "gave_up"]
    run.claim(f"the controller gives up because of rank 3, not {blamed}", blamed == [3])


def _nan(run: StartedRun) -> None:
    inside(1, NAN)(run)
    run.wait()
    run.claim("the run ends with 0", run.exit_code == 0)
    skipped = [each["step"] for each in losses(run.run, run.attack.layout).values() if each["num_skipped"]]
    run.claim(f"one step is skipped, not {skipped}", len(skipped) == 1)


def _old_error(run: StartedRun) -> None:
    _until_quiet(run, 8)
    for path in sorted(run.attempt.recover.rglob("*"), reverse=True):
        path.unlink()
    run.attempt.recover.rmdir()
    run.attempt.recover.write_text("no folder")
    run.inject(1, RAISE_IN_STEP.format(error="RuntimeError('attack of rank 1')"))
    run.until(run.step() + 8)
    run.inject(3, RAISE_IN_STEP.format(error="DataError('attack of rank 3')"))


EQUAL = Expected(equal=True)
SAVE = {"module": "bigsci_launch.train.state.checkpoint", "owner": "module", "name": "save_checkpoint"}
EVALUATE = {"module": "bigsci_launch.train.loop", "owner": "module", "name": "evaluate"}
BACKWARD = {"module": "torch", "owner": "module.autograd", "name": "backward"}
LONG_LINE = TO_RUNNER + "write(json.dumps({'word': 'stepped', 'step': 3, 'more': 'x' * 2000000}).encode())"

ATTACKS = (
    Attack("two-leave", "rank", "ranks 2 and 1 exit with 0, some steps apart", _two_leave, EQUAL, settings=LONGER),
    Attack("close-slot", "rank", "rank 1 closes BSL_SLOT_FD", inside(1, TO_RUNNER + "os.close(descriptor)"), EQUAL),
    Attack("garbage", "rank", "rank 1 writes garbage to BSL_SLOT_FD", inside(1, TO_RUNNER + GARBAGE), EQUAL),
    Attack("long-line", "rank", "rank 1 writes a line of 2 MB to BSL_SLOT_FD", inside(1, LONG_LINE), EQUAL),
    Attack("child-holds", "rank", "rank 1 dies; a detached child keeps all that it had open", _fork, EQUAL),
    Attack("backward", "rank", "rank 1 raises in backward", inside(1, RAISE_IN.format(**BACKWARD)), EQUAL),
    Attack("optimizer-two", "rank", "ranks 1 and 2 raise in the optimizer", _two_raise, EQUAL),
    Attack("save-raises", "rank", "rank 3 raises in a save", inside(3, RAISE_IN.format(**SAVE)), EQUAL),
    Attack("eval-raises", "rank", "rank 1 raises in an evaluation", inside(1, RAISE_IN.format(**EVALUATE)), EQUAL,
           settings={"monitor": {"eval_interval": 8, "eval_batches": 2}}),
    Attack("data-error", "rank", "rank 0 raises DataError", _raise(0, "DataError('attack')"),
           Expected(reason="crashed", rank=0)),
    Attack("interrupt", "rank", "SIGINT to rank 2", _interrupt, EQUAL),
    Attack("abort", "rank", "rank 1 calls os.abort", inside(1, "import os; os.abort()"), EQUAL),
    Attack("stack", "rank", "the stack of rank 1 overflows", inside(1, OVERFLOW), EQUAL),
    Attack("memory-error", "rank", "rank 3 raises MemoryError in a step", _raise(3, "MemoryError()"), EQUAL),
    Attack("finished-killed", "rank", "rank 3 is killed after it has said that it has finished",
           _after_finished, EQUAL),
    Attack("old-error", "rank", "recover/ is a file; rank 1 raises; later rank 3 raises DataError", _old_error,
           Expected(reason="crashed", rank=3), settings=LONGER),
    Attack("nan", "guards", "NaN in a gradient of rank 1 alone, once", _nan, Expected()),
    Attack("warn-corrupt", "guards", "guards warn: the copy of rank 0 changes, then rank 3 is killed", _warn_then_kill,
           Expected(), layout=DP4, settings=WARN),
    Attack("stop-corrupt", "guards", "guards stop: the copy of rank 3 changes", _corrupt_rank_3,
           Expected(reason="crashed", rank=3), layout=DP4, settings=EACH_STEP),
)  # fmt: skip
