"""Measured runs from run directories of bsl and from logs in Megatron's format."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from bigsci_launch.config.load import dump_resolved, load_run
from bigsci_launch.errors import BslError, DataError
from bigsci_launch.plan.calibrate.sources import read_sources
from bigsci_launch.plan.shape.setup import UNFUSED_2021
from bigsci_launch.runs.layout import AttemptDir, RunDir, write_json
from bigsci_launch.topology import Topology
from tests.support.texts import has_parts

ARGUMENTS = """
[default0]:------------------------ arguments ------------------------
[default0]:  bf16 ............................................ True
[default0]:  checkpoint_activations .......................... True
[default0]:  data_parallel_size .............................. 8
[default0]:  fp16 ............................................ False
[default0]:  hidden_size ..................................... 14336
[default0]:  micro_batch_size ................................ 2
[default0]:  num_attention_heads ............................. 112
[default0]:  num_layers ...................................... 70
[default0]:  padded_vocab_size ............................... 250880
[default0]:  pipeline_model_parallel_size .................... 12
[default0]:  pp_partition_method ............................. type:transformer|embedding
[default0]:  seq_length ...................................... 2048
[default0]:  tensor_model_parallel_size ...................... 4
[default0]:  world_size ...................................... 384
[default0]:-------------------- end of arguments ---------------------
"""


def line(step: int, elapsed: str, batch: int = 2048) -> str:
    return (
        f"[default7]: iteration {step:8d}/ 115311 | consumed samples: 1 | elapsed time per iteration {elapsed} | "
        f"learning rate: 6.000E-05 | global batch size:  {batch} | lm loss: 2.1E+00 | TFLOPs: 149.02 |\n"
    )


def test_a_log_of_megatron(tmp_path: Path) -> None:
    path = tmp_path / "main_log.txt"
    steps = [line(1, "(s): 300.00"), line(2, "(s): 111.0"), line(3, "(s): 105.30"), line(4, "(s): 105.10", 2032)]
    path.write_text(ARGUMENTS + "".join(steps) + line(5, "(ms): 104900.0") + line(6, "(s): 105.1") + "noise\n")
    (measured,), left = read_sources([path])
    assert not left
    assert measured.seconds == pytest.approx(105.1)
    assert measured.setup.topology == Topology(tp=4, pp=12, dp=8)
    assert measured.setup.global_batch_size == 2048
    assert measured.setup.layers_per_stage == (5, *(6,) * 10, 5)
    assert measured.setup.has_fp32_gradients
    assert measured.setup.ranks_per_node == 8
    assert measured.setup.technique == UNFUSED_2021
    assert measured.setup.framework == "deepspeed"


def test_a_log_without_arguments_says_so(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    path.write_text("".join(line(step, "(s): 105") for step in range(1, 9)))
    with pytest.raises(DataError, match="arguments"):
        read_sources([path])
    path.write_text("nothing of the kind\n")
    with pytest.raises(DataError, match="Megatron, torchtitan, NeMo or DeepSpeed"):
        read_sources([path])


@pytest.fixture
def run(root: Path, tmp_path: Path) -> RunDir:
    """A run directory with two attempts: one trained, the other ended before it could."""
    run = RunDir(tmp_path / "demo")
    loaded = load_run(root / "configs/demo.yaml")
    for name, steps in (("0001", 8), ("0002", 0)):
        attempt = AttemptDir(run.attempts_folder / name)
        attempt.make()
        attempt.config.write_text(dump_resolved(loaded.config))
        records = [
            {"kind": "step", "step": step, "seconds": 9.0 if step < 3 else 0.5, "global_batch_size": 16}
            for step in range(1, steps + 1)
        ]
        attempt.event_file(0).write_text('{"kind": "start"}\n')
        attempt.event_file(4).write_text("".join(json.dumps(record) + "\n" for record in records) + '{"torn')
    write_json(run.record, {"name": "demo"})
    return run


def test_a_run_directory(run: RunDir) -> None:
    found, left = read_sources([run.path])
    assert [measured.seconds for measured in found] == [0.5]
    assert found[0].setup.topology == Topology(tp=2, pp=2, dp=2)
    assert found[0].setup.global_batch_size == 16
    assert found[0].setup.framework == "bsl"
    assert [has_parts(line, "demo/0002: ", "2") for line in left] == [True]


def test_a_run_that_finds_its_micro_batches_has_a_row_for_its_steps_and_one_for_each_trial(run: RunDir) -> None:
    attempt = run.attempt("0001")
    text = attempt.config.read_text()
    attempt.config.write_text(re.sub(r"micro_batch_size: \d+", "micro_batch_size: auto", text))
    trials = [{"size": 2, "fits": True, "used_bytes": 5 << 30}, {"size": 4, "fits": False, "used_bytes": 8 << 30}]
    on_cpu = {"kind": "trial", "size": 1, "fits": True, "used_bytes": None}
    records = [{"kind": "trial", "seconds": 0.1, **each} for each in trials] + [on_cpu]
    attempt.event_file(0).write_text("".join(json.dumps(record) + "\n" for record in records))
    lines = attempt.event_file(4).read_text().splitlines()[:-1]
    attempt.event_file(4).write_text(
        "".join(json.dumps({**json.loads(line), "micro_batch_size": 2}) + "\n" for line in lines)
    )
    found, _ = read_sources([run.path])
    assert [(each.setup.micro_batch_size, each.seconds, each.memory_gib, each.ran_out_of_memory) for each in found] == [
        (2, 0.5, None, False),
        (2, None, 5.0, False),
        (4, None, None, True),
    ]


def test_other_folders_and_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BslError):
        read_sources([tmp_path])
    with pytest.raises(DataError, match="nothing"):
        read_sources([tmp_path / "nothing"])


def test_sources_come_together(run: RunDir, root: Path) -> None:
    found, _ = read_sources([run.path, root / "benchmarks/rows/vtrain.csv"])
    assert len(found) == 104
