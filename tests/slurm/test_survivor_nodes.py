"""`Survivor` loses a node: its slurmd and all its steps are killed, and a spare node takes its place in memory."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path

import pytest

from .conftest import MakeCluster
from .test_submit import Run
from .test_survive import events, nodes_of

pytestmark = [pytest.mark.slurm, pytest.mark.torch, pytest.mark.long]
LOOPS = Path(__file__).parents[2] / "benchmarks" / "surviving"
STEPS = 300


def losses_of(run: Run) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+) loss (\S+)", run.log(0))}


@pytest.mark.parametrize("loop", ["ddp", "fsdp2"])
def test_a_loop_loses_a_node_and_continues_on_a_spare_one(
    make_cluster: MakeCluster, short_tmp_path: Path, loop: str
) -> None:
    cluster = make_cluster(nodes=3, gpus_per_node=2)
    text = (
        (LOOPS / f"{loop}.py")
        .read_text()
        .replace("STEPS, GLOBAL_BATCH, MICRO_BATCH = 40,", f"STEPS, GLOBAL_BATCH, MICRO_BATCH = {STEPS},")
    )
    pause = "        total = 0.0\n"
    (short_tmp_path / "loop.py").write_text(text.replace(pause, f"{pause}        __import__('time').sleep(0.1)\n"))
    runs = {}
    for name, more in (("hurt", {"spare_nodes": 1}), ("sound", {})):
        config = {
            "run": {"name": name, "root": "runs", "command": [sys.executable, "loop.py"]},
            "slurm": {"site": "minicluster", "time_limit": "00:10:00", "nodes": 2, **more},
            "training": {"steps": STEPS, "micro_batch_size": 2, "global_batch_size": 24},
            "monitor": {"step_time_s": 1, "save_time_s": 1, "watch": "off"},
            "env": {"RES_OPTIONS": {"value": "attempts:1 timeout:1", "reason": "no name server answers in a node"}},
            "survive": {"in_place": True},
        }
        (short_tmp_path / f"{name}.yaml").write_text(json.dumps(config))
        runs[name] = Run(
            cluster, short_tmp_path, short_tmp_path / f"{name}.yaml", (short_tmp_path / "runs" / name).resolve()
        )
    hurt, sound = runs["hurt"], runs["sound"]
    hurt.submit()
    hurt.wait_for(lambda: "standby" in [each["phase"] for each in events(hurt, "phase")], timeout_s=300)
    began = events(hurt, "began")[0]
    victim, killed = nodes_of(began)[-1], time.time()
    assert cluster.bsl("cluster", "kill-node", victim).returncode == 0
    hurt.wait_for_state("COMPLETED", timeout_s=300)
    first = next(each for each in events(hurt, "phase") if (each["generation"], each["phase"]) == (1, "first_step"))
    ended = events(hurt, "ended")[0]
    left_s, step_s = ended["time"] - killed, first["time"] - killed
    print(f"node killed: {left_s:.2f} s until all had left, {step_s:.2f} s until a new step")
    assert nodes_of(events(hurt, "began")[-1]).count(victim) == 0
    assert {each["node"] for each in events(hurt, "failed")} == {victim}
    restored = [each for each in events(hurt, "phase") if each["phase"] == "restored"]
    assert restored[-1]["source"] == {"ddp": "replicas", "fsdp2": "buddies"}[loop]
    sound.submit()
    sound.wait_for_state("COMPLETED", timeout_s=300)
    assert sorted(losses_of(hurt)) == list(range(1, STEPS + 1))
    # The ranks of the spare node are added in another order.
    assert losses_of(hurt) == pytest.approx(losses_of(sound), rel=1e-6)
