"""Call traces: real programs whose calls are traced in each way, and read while they live and after SIGKILL."""

from __future__ import annotations

import errno
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from bigsci_launch.runs.layout import AttemptDir
from bigsci_launch.trace.last import RankCalls
from bigsci_launch.trace.read import files_in, read_files
from tests.support.command import invoke
from tests.support.waiting import wait_until

from .recorded_ranks import find_python

WANTED = """
import threading
def leaf(x):
    return x
def fails():
    raise ValueError
def numbers():
    yield 1
    yield 2
def work(count):
    for each in range(count):
        leaf(each)
    try:
        fails()
    except ValueError:
        pass
    return sum(numbers())
def in_thread(count):
    thread = threading.Thread(target=work, args=(count,), name="side")
    thread.start()
    thread.join()
"""
OTHER = "def leaf(x):\n    return x\n"
PROGRAM = """
import os, sys
from wanted import utils as mine
from other import utils as theirs
mine.work(2)
theirs.leaf(1)
mine.in_thread(1)
child = os.fork()
if child == 0:
    mine.leaf(3)
    os._exit(0)
os.waitpid(child, 0)
mine.leaf = lambda _: os.kill(os.getpid(), 9)
mine.work(1)
"""
WORK = ["work", *["leaf"] * 2, "fails", *["numbers"] * 3]
BSL = [sys.executable, "-m", "bigsci_launch"]
IN_C, IN_PYTHON = "in C", "in Python"
NO_COMPILER = {"CC": "no-such-compiler", "XDG_CACHE_HOME": "/dev/null"}


WAYS = {"C": {}, "Python": NO_COMPILER}
IN_EACH_WAY = pytest.mark.parametrize(
    "environment", [{}, pytest.param(NO_COMPILER, marks=pytest.mark.long)], ids=list(WAYS)
)


def interpreters() -> Iterator[Any]:
    """Yield the Python of the tests, and others that are installed next to it, with each way to trace them. Of the
    others, 3.12 is the first that has sys.monitoring."""
    for version, way in product(("own", "3.8", "3.9", "3.12", "3.13"), WAYS):
        python = sys.executable if version == "own" else find_python(version)
        marks = [pytest.mark.skipif(python is None, reason=f"there is no Python {version} here")]
        if version != "own" and (version, way) != ("3.12", "Python"):
            marks.append(pytest.mark.long)
        yield pytest.param(python, WAYS[way], id=f"{version}-{way}", marks=marks)


class Traced:
    """A folder with two packages, in which programs are run with the calls of one of them traced."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.traces = folder, folder / "traces"
        for package, text in (("wanted", WANTED), ("other", OTHER)):
            (folder / package).mkdir()
            (folder / package / "__init__.py").write_text("")
            (folder / package / "utils.py").write_text(text)

    def run(
        self, program: str, *options: str, python: str = sys.executable, rc: int = 0, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        (self.folder / "program.py").write_text(program)
        argv = [*BSL, "trace", "run", "--output", str(self.traces), *options]
        given = {**os.environ, "XDG_CACHE_HOME": str(self.folder.parent / "cache"), **environment}
        done = subprocess.run(
            [*argv, "--", *python.split(), "-W", "ignore", "program.py"],
            cwd=self.folder,
            env=given,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == rc, done.stderr
        return done

    def read(self) -> list[RankCalls]:
        """Return the processes, that with the most calls first."""
        return sorted(read_files(files_in(self.traces), 1 << 20), key=lambda each: -len(each.calls))


@pytest.fixture
def traced(tmp_path: Path) -> Traced:
    return Traced(tmp_path)


def names(each: RankCalls, thread: int | None = None) -> list[str]:
    """Return the traced functions in the order of their calls."""
    calls = [call for call in each.calls if thread in (None, call.thread)]
    return [str(call.operation).removeprefix("wanted.utils.") for call in calls]


@pytest.mark.parametrize(("python", "environment"), list(interpreters()))
def test_calls_of_a_package_are_traced_in_all_threads_and_children_until_the_process_is_killed(
    traced: Traced, python: str, environment: dict[str, str]
) -> None:
    traced.run(PROGRAM, "--include", "wanted", python=python, rc=128 + 9, **environment)
    whole, child = traced.read()
    assert whole.trace is not None and child.trace is not None
    assert (IN_PYTHON if environment else IN_C) in whole.trace.how
    main = whole.trace.pid
    assert names(whole, main) == ["wanted.<module>", "<module>", *WORK, "in_thread", "work"]
    is_old_native = not environment and "3.8" in python
    side = [name for call, name in zip(whole.calls, names(whole), strict=True) if call.thread != main]
    assert side == ([] if is_old_native else ["work", "leaf", "fails", *["numbers"] * 3])
    assert [name for call, name in zip(whole.calls, names(whole), strict=True) if call.left is None] == ["work"]
    assert names(child) == ["leaf"], "a child writes into a file of its own"
    assert all(call.entered <= (call.left or call.entered) for call in whole.calls)


def test_a_trace_begins_at_a_call_and_nothing_before_it_is_kept(traced: Traced) -> None:
    program = "from wanted import utils\nutils.work(1)\nutils.fails = lambda: 1\nutils.in_thread(1)\n"
    for number, environment in enumerate(({}, NO_COMPILER)):
        traced.traces = traced.folder / f"traces-{number}"
        traced.run(program, "--include", "wanted", "--from-call", "wanted.utils:in_thread", **environment)
        (whole,) = traced.read()
        assert names(whole)[0] == "in_thread" and names(whole).count("work") == 1


def test_the_newest_calls_are_kept_and_the_file_does_not_grow(traced: Traced) -> None:
    traced.run("from wanted import utils\nutils.work(100_000)\nutils.leaf(1)\n", "--include", "wanted.utils")
    (whole,) = traced.read()
    assert names(whole)[-2:] == ["numbers", "leaf"] and 30_000 < len(whole.calls) < 33_000
    assert max(file.stat().st_size for file in traced.traces.glob("*.calls")) < 1.6 * 2**20


def test_threads_without_room_are_counted_and_the_program_runs_on(traced: Traced) -> None:
    program = """
import threading
from wanted import utils
gate = threading.Barrier(1001)
def each():
    utils.leaf(1)
    gate.wait()
threads = [threading.Thread(target=each) for _ in range(1000)]
[thread.start() for thread in threads]
gate.wait()
[thread.join() for thread in threads]
"""
    traced.run(program, "--include", "wanted")
    (whole,) = traced.read()
    assert whole.trace is not None and whole.trace.lost_threads == 1000 - 31  # the main thread has imported it
    assert "969 threads" in invoke("trace", "last", str(traced.traces)).stdout


@IN_EACH_WAY
def test_a_profile_function_of_the_program_stays_and_the_answer_says_that_calls_are_missing(
    traced: Traced, environment: dict[str, str]
) -> None:
    program = """
import sys
from wanted import utils
utils.leaf(1)
seen = []
sys.setprofile(lambda frame, event, _: seen.append(frame.f_code.co_name))
utils.leaf(2)
assert "leaf" in seen
"""
    done = traced.run(program, "--include", "wanted", **environment)
    (whole,) = traced.read()
    assert whole.trace is not None and names(whole).count("leaf") == 1
    assert "profile function" in whole.trace.words and "profile function" in done.stderr


@IN_EACH_WAY
def test_a_profile_function_that_was_there_before_the_trace_stays(traced: Traced, environment: dict[str, str]) -> None:
    program = """
import sys
from wanted import utils
def mine(*_):
    pass
sys.setprofile(mine)
sys.modules["ring_hook"].reach(1)
utils.leaf(1)
assert sys.getprofile() is mine
sys.setprofile(None)
sys.modules["ring_hook"].reach(2)
utils.in_thread(1)
"""
    done = traced.run(program, "--include", "wanted", "--from-step", "1", **environment)
    (whole,) = traced.read()
    assert "work" in names(whole) and "leaf" in names(whole), "threads that start later are traced"
    assert "profile function" in done.stderr


@pytest.mark.parametrize(
    ("program", "python"), [("from wanted import utils", f"{sys.executable} -I"), ("print(1)", sys.executable)]
)
def test_nothing_traced_is_said_and_the_exit_code_is_that_of_the_program(
    traced: Traced, program: str, python: str
) -> None:
    done = traced.run(
        f"import sys\nsys.path.insert(0, '')\n{program}\nsys.exit(3)", "--include", "wanted", python=python, rc=3
    )
    assert "calls of wanted" in done.stderr and not list(traced.traces.glob("*.calls"))


def test_a_full_disk_ends_the_trace_and_not_the_program(traced: Traced) -> None:
    program = """
import resource
from wanted import utils
utils.leaf(1)
print("done")
"""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))  # a disk without room for the file
    try:
        done = traced.run(program, "--include", "wanted")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "done" in done.stdout and os.strerror(errno.EFBIG) in done.stderr


def test_a_program_that_closes_every_file_is_traced_on_and_its_own_files_are_left_alone(traced: Traced) -> None:
    program = """
import os
from wanted import utils
utils.leaf(1)
os.closerange(3, 256)
theirs = [open(f"theirs-{number}", "w") for number in range(50)]
utils.in_thread(1)
assert {os.fstat(each.fileno()).st_size for each in theirs} == {0}
"""
    traced.run(program, "--include", "wanted")
    (whole,) = traced.read()
    assert whole.trace is not None and whole.trace.lost_threads == 0 and names(whole).count("work") == 1


def damaged(change: Callable[[bytearray], Any]) -> Callable[[Path], None]:
    def damage(file: Path) -> None:
        data = bytearray(file.read_bytes())
        result = change(data)
        file.write_bytes(data if result is None else result)

    return damage


def test_a_trace_that_is_damaged_or_foreign_says_so_and_what_is_whole_is_read(traced: Traced) -> None:
    traced.run("from wanted import utils\nutils.work(3)\n", "--include", "wanted")
    (file,) = traced.traces.glob("*.calls")
    whole = file.read_bytes()
    first_event = 4096 + (1 << 19) + 64

    def answer(change: Callable[[bytearray], Any]) -> str:
        file.write_bytes(whole)
        damaged(change)(file)
        return invoke("trace", "last", str(traced.traces), "-n", "32").stdout

    def tear(data: bytearray) -> None:
        data[first_event + 12] ^= 1

    assert answer(lambda data: data[: first_event + 16 * 3]).count("wanted") > 1
    assert "wanted.utils.leaf" in answer(tear) and answer(tear).count("\n") == answer(lambda _: None).count("\n") - 1
    assert "version 9" in answer(lambda data: data.__setitem__(8, 9))
    assert "not a call trace" in answer(lambda data: data[:20])


@pytest.mark.parametrize(
    "options",
    [
        ["--include", "a b"],
        ["--include", ","],
        ["--include", "a", "--from-call", "train"],
        ["--include", "a", "--from-call", "a:b", "--from-step", "2"],
    ],
    ids=" ".join,
)
def test_a_wish_that_cannot_be_is_refused_before_anything_starts(
    traced: Traced, options: list[str], check_text: Callable[..., None]
) -> None:
    done = invoke("trace", "run", "--output", str(traced.traces), *options, "--", sys.executable, "-c", "exit(9)")
    assert done.exit_code == 2 and not traced.traces.exists()
    check_text(done.stderr)


def test_a_folder_in_use_and_a_program_that_is_missing_leave_nothing_behind(traced: Traced) -> None:
    done = invoke("trace", "run", "--include", "a", "--output", str(traced.traces), "--", "no-such")
    assert "cannot start no-such" in done.stderr and not traced.traces.exists()
    traced.traces.mkdir()
    (traced.traces / "mine").write_text("")
    assert f"{traced.traces}: " in traced.run("", "--include", "a", rc=2).stderr


RANK = """
import os, sys, time, torch, torch.distributed as dist
sys.path.insert(0, os.environ["WANTED"])
from wanted import utils
dist.init_process_group("gloo")
weight = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.SGD([weight], lr=0.1)
step = 0
while True:
    step += 1
    utils.work(1)
    weight.grad = torch.ones(2)
    dist.all_reduce(weight.grad)
    optimizer.step()
    print("up", flush=True) if step == 3 else None
    time.sleep(0.05)
"""


@pytest.mark.torch
def test_a_running_run_is_traced_from_a_step_on_until_it_is_switched_off(
    traced: Traced, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rank.py").write_text(RANK)
    config = {
        "run": {"name": "run", "command": [sys.executable, str(tmp_path / "rank.py")]},
        "slurm": {"site": "local"},
        "parallelism": {"tensor_parallel_size": 2, "data_parallel_size": 1},
        "model": {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "sequence_length": 8, "vocab_size": 64},
        "training": {"steps": 10, "micro_batch_size": 1, "global_batch_size": 1},
        "data": {"prefix": "none"},
        "monitor": {"trace": {"include": ["wanted"], "from_step": 3}},
        "env": {"WANTED": {"value": str(tmp_path), "reason": "where the packages are"}},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(config))
    attempt = AttemptDir(tmp_path / "runs" / "run" / "attempts" / "0001")
    done = subprocess.run([*BSL, "submit", "run.yaml", "--detach"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    living: list[dict[str, Any]] = []

    def ranks() -> list[dict[str, Any]]:
        shown = invoke("trace", "last", "run", "--json")
        living[:] = json.loads(shown.stdout)["ranks"] if shown.exit_code == 0 else []
        return living

    def traced_calls(each: dict[str, Any], package: str) -> list[dict[str, Any]]:
        return [call for call in each["calls"] if str(call["operation"]).startswith(package)]

    try:
        logs = [attempt.log_file(rank) for rank in (0, 1)]
        wait_until(lambda: all(log.exists() and "up" in log.read_text() for log in logs))
        both = {"wanted.utils.work", "all_reduce"}
        wait_until(lambda: sum({call["operation"] for call in each["calls"]} >= both for each in ranks()) == 2)
        assert [each["traced"] for each in living] == ["wanted", "wanted"]
        for each in living:
            assert all(call["step"] >= 3 for call in traced_calls(each, "wanted"))
        assert invoke("trace", "on", "run", "--include", "torch.optim").exit_code == 0
        wait_until(lambda: all(traced_calls(each, "torch.optim") for each in ranks()) and len(living) == 2)
        assert not any(traced_calls(each, "wanted") for each in living)
        first, second = (attempt.rings / f"rank-{rank:04d}.calls" for rank in (0, 1))
        assert b"wanted" in first.read_bytes(), "the trace that was replaced is kept until the next is"
        assert invoke("trace", "off", "run").exit_code == 0
        wait_until(lambda: b"torch.optim" in first.read_bytes() and b"torch.optim" in second.read_bytes())
        whole = invoke("trace", "export", "run", "--perfetto", "t.json")
        assert whole.exit_code == 0, whole.output
        events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
        assert {"all_reduce", "torch.optim.sgd.SGD.step"} <= {event["name"] for event in events}
    finally:
        invoke("cancel", "run")
    late = wait_until(lambda: (asked := invoke("trace", "on", "run", "--include", "a")).exit_code == 2 and asked)
    assert "has ended" in late.stderr
