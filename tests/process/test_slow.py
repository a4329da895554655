"""Who makes a job slow: four real ranks of DDP on gloo, one of which computes its gradients slowly."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from bigsci_launch.cli.main import bsl
from bigsci_launch.runs.layout import RunDir
from bigsci_launch.runs.watching.ledger import RunFinding
from bigsci_launch.watch.facts import stragglers
from bigsci_launch.watch.rounds.loop import Watcher
from bigsci_launch.watch.watched import watched_run
from tests.support.waiting import wait_until

from .recorded_ranks import DIAGNOSTICS, Ranks

NONE = -(1 << 31)
"""What a ring has for a number that is not known."""

PROGRAM = """
import time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
torch.set_num_threads(1)
dist.init_process_group("gloo")
is_slow = dist.get_rank() == 2
class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
    def forward(self, values):
        time.sleep(0.02)
        out = self.linear(values)
        out.register_hook(lambda _: time.sleep(0.08 if is_slow else 0.02))
        return out
model = DistributedDataParallel(torch.nn.Sequential(Layer(), Layer()))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step, batch in enumerate(DataLoader(torch.ones(1000, 8))):
    optimizer.zero_grad()
    model(batch).sum().backward()
    optimizer.step()
    if step == 18: print("ready", flush=True)
"""


@pytest.mark.torch
def test_a_rank_that_is_slow_in_backward_is_named_while_ranks_run_and_after_their_end(
    ranks: Ranks, tmp_path: Path
) -> None:
    """A delay in backward makes the backward passes of all ranks equally long: DDP waits in it."""
    pytest.importorskip("torch")
    ranks.start([sys.executable, "-c", PROGRAM], 4)
    wait_until(lambda: all("ready" in ranks.log(rank) for rank in range(4)), 300)
    live = tmp_path / "live"
    live.mkdir()
    for rank in range(4):
        (live / ranks.live(rank).name).write_bytes(ranks.live(rank).read_bytes())
        os.kill(ranks.record(rank)["pid"], signal.SIGKILL)
    ranks.wait()
    for folder in (live, ranks.kept(0).parent):
        done = CliRunner().invoke(bsl, ["slow", str(folder), "--json"])
        assert done.exit_code == 0, done.output
        found = json.loads(done.stdout)
        assert [(each["kind"], each["ranks"], each["phase"]) for each in found["stragglers"]] == [
            ("slow rank", [2], "backward")
        ]
        assert found["num_steps"] >= 10 and 60 < found["stragglers"][0]["cost"]["ms_per_step"] < 180


@pytest.mark.torch
def test_a_watcher_raises_a_slow_rank_and_keeps_the_steps_for_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(stragglers, "FIRST_STEPS", 16)
    monkeypatch.setattr(stragglers, "AGAIN_S", 0.5)
    monkeypatch.setattr(stragglers, "MOST_PART_OF_NEWS", 1.0)
    program = PROGRAM.replace(
        '    if step == 18: print("ready", flush=True)', "    print(SAID.format(step), flush=True)"
    )
    said = 'SAID = " iteration {}/ 1000 | elapsed time per iteration (ms): 200.0 | lm loss: 2.0E+00 |"'
    config = {
        "run": {"name": "run", "command": [sys.executable, "-c", f"{said}\n{program}"]},
        "slurm": {"site": "local"},
        "parallelism": {"data_parallel_size": 3},
        "model": {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "sequence_length": 8, "vocab_size": 64},
        "training": {"steps": 10, "micro_batch_size": 1, "global_batch_size": 3},
        "data": {"prefix": "none"},
        "monitor": {"watch": "off"},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(config))
    submit = [sys.executable, "-m", "bigsci_launch", "submit", "run.yaml", "--local", "--detach"]
    subprocess.run(submit, check=True, timeout=120)
    run = RunDir(tmp_path / "runs" / "run")
    told: list[RunFinding] = []
    watcher = Watcher(watched_run(run), name="test", may_act=False, say=lambda _: None, tell=told.append)
    try:
        wait_until(lambda: watcher.tick() and told, 300)
        document = json.loads(CliRunner().invoke(bsl, ["status", "run", "--json", "--html", "run.html"]).stdout)
    finally:
        CliRunner().invoke(bsl, ["cancel", "run"])
    assert [(each.kind, each.cleared) for each in told] == [("straggler", None)]
    assert "rank 2" in told[0].sentence and "backward" in told[0].sentence
    (found,) = document["watching"]["findings"]
    assert 0 < found["lost_ranks"] < 3 and found["lost_rank_hours"] > 0
    page = (tmp_path / "run.html").read_text()
    assert page.count('class="more4"') > 10 and 'class="in-backward"' in page


COUNTING = """
import os, subprocess, sys, time
sys.path.insert(0, sys.argv[1])
import ring_phases
def spin(seconds):
    end = time.thread_time() + seconds
    while time.thread_time() < end: pass
counters = ring_phases.CoreCounters()
print(*counters.rise())
os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
try:
    spin(0.3)
    print(*counters.rise())
finally:
    other.kill()
if len(sys.argv) > 2:
    with open(f"{sys.argv[2]}/cgroup.procs", "w") as file: file.write(str(os.getpid()))
    counters.rise()
    spin(0.01)
    print(*counters.rise())
"""


def counted(*words: str) -> list[tuple[int, int]]:
    argv = [sys.executable, "-c", COUNTING, str(DIAGNOSTICS), *words]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=True)
    lines = (line.split() for line in done.stdout.splitlines())
    return [(int(held), int(ready)) for held, ready in lines]


@pytest.fixture
def small_quota() -> Iterator[Path]:
    """Yield a cgroup that may use a hundredth of a core: less than a busy machine gives it."""
    for root, limits in (
        ("cpu", {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": "1000"}),
        ("", {"cpu.max": "1000 100000"}),
    ):
        folder = Path("/sys/fs/cgroup") / root / f"bsl-test-{os.getpid()}"
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            for name, limit in limits.items():
                (folder / name).write_text(limit)
            yield folder
            return
        except OSError:
            continue
        finally:
            folder.rmdir()
    pytest.skip("this process may make no cgroup with a quota")


@pytest.mark.skipif(not Path("/proc/thread-self/schedstat").exists(), reason="the kernel does not count it")
def test_a_thread_counts_for_how_long_it_was_ready_without_a_core() -> None:
    first, then = counted()
    assert first[1] == NONE and 50_000 < then[1] < 100_000_000


def test_a_process_counts_for_how_long_a_quota_held_it_up(small_quota: Path) -> None:
    _, before, under = counted(str(small_quota))
    assert before[0] == NONE and 100_000 < under[0] < 10_000_000
