"""Ranks of which no stack shows a collective, and where to look first: words claim no more than stacks show."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from bigsci_launch.spy.evidence.ranks import Evidence
from bigsci_launch.spy.inputs.gather import open_evidence
from bigsci_launch.spy.judge.conclusion import Reason
from bigsci_launch.spy.judge.verdict import judge
from bigsci_launch.spy.taxonomy import HangClass, State

BACKWARD = (
    "_engine_run_backward (torch/autograd/graph.py:913)", "backward (torch/_tensor.py:633)", "step (src/train.py:8)",
)  # fmt: skip
CLIP = ("clip_grad_norm (megatron/core/optimizer/clip_grads.py:110)", "step (src/train.py:9)")
ITEM = ("log_loss (src/train.py:30)", "step (src/train.py:11)")
SEND = ("isend (torch/distributed/distributed_c10d.py:2371)", "send_forward (src/pipeline.py:5)")
RECEIVE = ("irecv (torch/distributed/distributed_c10d.py:2421)", "recv_forward (src/pipeline.py:9)")
REDUCE = ("all_reduce (torch/distributed/distributed_c10d.py:2800)", "step (src/train.py:12)")
MAP = (
    "_recv (multiprocess/connection.py:398)", "recv (multiprocess/connection.py:253)",
    "iflatmap_unordered (datasets/utils/py_utils.py:610)", "map (datasets/arrow_dataset.py:3600)",
    "encode (src/sft.py:3)",
)  # fmt: skip
TOKENIZE = (
    "encode (src/tokens.py:4)",
    "_map_single (datasets/arrow_dataset.py:3500)",
    "map (datasets/arrow_dataset.py:36)",
)
SLEEP = ("_try_wait (lib/python3.11/subprocess.py:20)", "fetch (src/sft.py:4)")


def first_at(function: str, file: str) -> tuple[str, ...]:
    return ("barrier (torch/distributed/distributed_c10d.py:5030)", f"{function} ({file}:66)", "encode (src/sft.py:3)")


def evidence_of(folder: Path, *stacks: Sequence[str]) -> Evidence:
    for rank, frames in enumerate(stacks):
        lines = [
            f"Process {500 + rank}: python train.py",
            "Python v3.11.9",
            f'Thread {500 + rank} (idle): "MainThread"',
        ]
        (folder / f"rank-{rank}.txt").write_text("\n".join([*lines, *(f"    {frame}" for frame in frames)]) + "\n")
    return open_evidence([folder]).evidence()


@pytest.mark.parametrize("stack", [BACKWARD, CLIP, ITEM], ids=["backward", "clip", "item"])
@pytest.mark.parametrize("odd", [False, True])
def test_a_collective_without_a_frame_is_not_denied(tmp_path: Path, stack: tuple[str, ...], odd: bool) -> None:
    other = ("forward (src/model.py:3)",) if odd else stack
    found = judge(evidence_of(tmp_path, stack, stack, stack, other))
    assert found.state is State.UNKNOWN
    assert "no stack shows a collective" in found.claim and "none" not in found.claim
    assert [words in " ".join(found.next) for words in ("--native", "TORCH_FR_BUFFER_SIZE", "power.draw")] == [True] * 3


def test_ranks_that_wait_in_a_library_are_in_no_collective(tmp_path: Path) -> None:
    found = judge(evidence_of(tmp_path, SLEEP, SLEEP))
    assert "none is in a collective" in found.claim
    assert not found.next


def test_of_sides_of_the_same_size_none_is_odd(tmp_path: Path) -> None:
    found = judge(evidence_of(tmp_path, SEND, SEND, RECEIVE, RECEIVE))
    assert [(pointer.rank, pointer.reason) for pointer in found.look_first] == [
        (0, Reason.EQUAL_SIDE), (2, Reason.EQUAL_SIDE),
    ]  # fmt: skip
    assert found.look_first[0].hit_rate is None


def test_of_two_stacks_without_a_collective_both_are_named(tmp_path: Path) -> None:
    found = judge(evidence_of(tmp_path, ("forward (src/model.py:3)",), ("load (src/data.py:3)",)))
    assert {(pointer.rank, pointer.reason) for pointer in found.look_first} == {
        (0, Reason.EQUAL_SIDE), (1, Reason.EQUAL_SIDE),
    }  # fmt: skip


def test_a_minority_is_odd_and_no_rate_is_printed_of_it(tmp_path: Path) -> None:
    found = judge(evidence_of(tmp_path, REDUCE, SEND, REDUCE, REDUCE))
    pointer = next(each for each in found.look_first if each.rank == 1)
    assert (pointer.was_measured, pointer.hit_rate) == (True, None)


@pytest.mark.parametrize("work", [MAP, TOKENIZE], ids=["in workers", "alone"])
@pytest.mark.parametrize(
    "barrier",
    [
        first_at("safe_ddp_context", "swift/utils/torch_utils.py"),
        first_at("main_process_first", "transformers/training_args.py"),
        first_at("_goes_first", "accelerate/state.py"),
    ],
    ids=["swift", "transformers", "accelerate"],
)
def test_rank_0_may_prepare_data_while_others_wait_at_a_barrier_made_for_that(
    tmp_path: Path, work: tuple[str, ...], barrier: tuple[str, ...]
) -> None:
    found = judge(evidence_of(tmp_path, work, barrier, barrier))
    assert (found.state, found.hang_class, found.suspects) == (State.WAITING, HangClass.PREPARES_ALONE, ())
    assert found.look_first[0].rank == 0
    assert "map (arrow_dataset.py" in found.claim and "ranks 1-2" in found.claim


@pytest.mark.parametrize(
    ("work", "barrier"),
    [
        (MAP, REDUCE),
        (MAP, first_at("check", "src/sft.py")),
        (SLEEP, first_at("safe_ddp_context", "swift/utils/torch_utils.py")),
    ],
    ids=["no barrier", "another barrier", "other work"],
)
def test_other_waits_are_not_called_meant(tmp_path: Path, work: tuple[str, ...], barrier: tuple[str, ...]) -> None:
    assert judge(evidence_of(tmp_path, work, barrier)).state is not State.WAITING
