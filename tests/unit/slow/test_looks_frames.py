"""What a stack shows: a wait for others, or work in a phase."""

from __future__ import annotations

import pytest

from bigsci_launch.slow.looks_frames import activity_of, read_stack
from bigsci_launch.slow.straggler import StepPhase

SITE = "/venv/lib/python3.11/site-packages"
MAIN, STEP = "main (/job/train.py:9)", "train_step (/job/train.py:31)"
CALL = f"Module._call_impl ({SITE}/torch/nn/modules/module.py:1789)"
ENGINE = f"_engine_run_backward ({SITE}/torch/autograd/graph.py:979)"
REDUCE = f"all_reduce ({SITE}/torch/distributed/distributed_c10d.py:3252)"
LOADER = f"_BaseDataLoaderIter.__next__ ({SITE}/torch/utils/data/dataloader.py:721)"
ADAM = f"Adam.step ({SITE}/torch/optim/adam.py:236)"
SAVE = f"save ({SITE}/torch/serialization.py:900)"


@pytest.mark.parametrize(
    ("frames", "phase"),
    [
        ((STEP, CALL, "Block.forward (/job/model.py:12)"), StepPhase.FORWARD),
        ((STEP, ENGINE), StepPhase.BACKWARD),
        ((STEP, ENGINE, CALL, "Block.forward (/job/model.py:12)"), StepPhase.BACKWARD),
        ((STEP, ADAM), StepPhase.OPTIMIZER),
        ((STEP, ADAM, "closure (/job/train.py:40)", ENGINE), StepPhase.BACKWARD),
        ((LOADER,), StepPhase.DATA),
        (("get_batch (/job/train.py:70)",), StepPhase.DATA),
        (("write_state (/job/train.py:80)", SAVE), StepPhase.SAVE),
        (("evaluate (/job/train.py:90)", CALL), StepPhase.EVALUATION),
        ((), StepPhase.UNKNOWN),
    ],
)
def test_phase(frames: tuple[str, ...], phase: StepPhase) -> None:
    assert activity_of(";".join((MAIN, *frames))).phase is phase


def test_a_collective_is_a_wait_and_a_backward_pass_may_be_one() -> None:
    assert activity_of(f"{MAIN};{REDUCE}").waits
    doing = activity_of(f"{MAIN};{STEP};{ENGINE}")
    assert doing.may_wait and not doing.waits
    assert not activity_of(f"{MAIN};{STEP};{ENGINE};hook (/job/train.py:3)").may_wait
    receives = activity_of(f"{MAIN};recv ({SITE}/torch/distributed/distributed_c10d.py:2500)")
    assert receives.is_pointed and receives.waits and not activity_of(f"{MAIN};{REDUCE}").is_pointed


def test_the_line_shows_what_has_no_frame() -> None:
    assert activity_of(f"{MAIN};{STEP}", "gc.collect()").phase is StepPhase.GARBAGE_COLLECTION
    assert activity_of(f"{MAIN};{STEP}", "total = loss.item()").may_wait
    assert not activity_of(f"{MAIN};{STEP}", "total += 1").may_wait


def test_the_site_is_the_programs_own_line() -> None:
    assert activity_of(f"{MAIN};{STEP};{CALL}").site == "train.py:31 train_step"
    assert activity_of(f"{MAIN};evil\x1b[2J (/job/a\tb.py:1)").site == "a\\tb.py:1 evil\\x1b[2J"


def test_what_is_no_frame_is_left_out() -> None:
    assert [frame.function for frame in read_stack(f"x;{MAIN};(;a (b;c.py:1);{STEP}")] == ["train_step", "main"]
