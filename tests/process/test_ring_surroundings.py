"""Rings in surroundings that do not help: no folder, no room, other hooks, handlers and timers of the program."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

import pytest

from .recorded_ranks import HOOK, Ranks, find_python, hooked, read


def test_a_folder_that_cannot_be_made_is_said_and_the_program_runs(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ranks.start([sys.executable, "-c", "import os; print('ring', 'BSL_RING_DIR' in os.environ)"], 1, f"{tmp_path}/file")
    assert ranks.wait() == [0]
    assert "ring False" in ranks.log(0)
    assert ranks.record(0)["rings"] is None and "Not a directory" in ranks.record(0)["why_no_rings"]
    assert ranks.log(0).count("rank_runner: ") == ranks.log(0).count("[Errno 20]") == 1


def test_the_program_keeps_its_own_sitecustomize_and_its_path(ranks: Ranks, tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("print('my own sitecustomize')\n")
    program = "import sitecustomize, sys; print(sitecustomize.__file__); print('torch' in sys.modules)"
    ranks.start([sys.executable, "-c", program], 1, PYTHONPATH=str(own))
    assert ranks.wait() == [0]
    assert "my own sitecustomize" in ranks.log(0) and f"{own}/sitecustomize.py" in ranks.log(0)
    assert "False" in ranks.log(0)


def test_the_disk_is_full_and_the_program_runs_on(tmp_path: Path) -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
    done = hooked(tmp_path, limit + "print(ring_hook.lane(), ring_hook.lane(), ring_hook.ring())")
    assert done.stdout == "None None None\n"
    assert done.stderr.count("[Errno ") == len(done.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_the_disk_of_the_node_is_full_and_the_program_runs_on(ranks: Ranks, small_disk: Path) -> None:
    ranks.start([sys.executable, "-c", HOOK + "print(ring_hook.lane(), ring_hook.ring())"], 1, str(small_disk))
    assert ranks.wait() == [0]
    assert "None None" in ranks.log(0)
    assert ranks.log(0).count("no ring of ") == ranks.log(0).count(os.strerror(errno.ENOSPC)) == 1


def test_the_hook_runs_on_python_38_and_is_in_no_ones_way(ranks: Ranks, tmp_path: Path) -> None:
    python = find_python("3.8") or pytest.skip("there is no Python 3.8 here")
    program = "import sys; print(sys.version_info[:2], 'torch' in sys.modules, 'ring_hook' in sys.modules)"
    ranks.start([python, "-c", program], 1)
    assert ranks.wait() == [0]
    assert len(ranks.log(0).splitlines()) == 1 and ranks.log(0).endswith(" (3, 8) False False\n")
    hooked(tmp_path, "ring_hook.mark(7, 'step')", python)
    assert read(*tmp_path.glob("*.ring"))[0]["step"] == 7


def test_a_program_keeps_its_timer_of_faulthandler_and_its_children_end(tmp_path: Path) -> None:
    program = """
import faulthandler, signal, sys, time
ring_hook.HEARTBEAT_S = 0.001
ring_hook.mark(7, "step")
for _ in range(200):
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # it ends as programs do, and not by os._exit
        sys.exit()
    assert os.waitpid(child, 0)[1] == 0
faulthandler.dump_traceback_later(0.5, file=sys.stderr)
time.sleep(1)
print("ended")
"""
    done = hooked(tmp_path, program)
    assert done.stdout == "ended\n" and done.stderr.count("Timeout (0:00:00.5") == 1
    assert [path.read_text() for path in tmp_path.glob("*.stacks")] == [""]


def test_a_handler_of_the_program_is_left_alone(tmp_path: Path) -> None:
    program = """
import signal, time
said = []
signal.signal(ring_hook.STACKS_SIGNAL, lambda *_: said.append("mine"))
ring_hook.mark(7, "step")
time.sleep(0.2)
os.kill(os.getpid(), ring_hook.STACKS_SIGNAL)
print(said)
"""
    assert hooked(tmp_path, program).stdout == "['mine']\n"
    assert not list(tmp_path.glob("*.stacks"))


@pytest.mark.torch
def test_torch_is_imported_late(ranks: Ranks) -> None:
    pytest.importorskip("torch")
    late = "import sys; assert 'torch' not in sys.modules; import torch.distributed as d; print(d.all_reduce.__name__, "
    late += "hasattr(d.all_reduce, '_bsl_original'), hasattr(d.distributed_c10d.all_reduce, '_bsl_original'))"
    ranks.start([sys.executable, "-c", late], 1)
    assert ranks.wait() == [0]
    assert "all_reduce True True" in ranks.log(0)


@pytest.mark.torch
def test_an_isolated_python_runs_without_a_ring(ranks: Ranks) -> None:
    pytest.importorskip("torch")
    program = "import torch.distributed as d; print(hasattr(d.all_reduce, '_bsl_original'))"
    ranks.start([sys.executable, "-I", "-c", program], 1)
    assert ranks.wait() == [0]
    assert "False" in ranks.log(0)
