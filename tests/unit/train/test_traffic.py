"""What a rank that ran out of memory still sends: the calls that an instruction owes, in order, without data."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from bigsci_launch.train.microbatch import traffic as module
from bigsci_launch.train.microbatch.traffic import Instruction, Traffic, UnknownCallsError, end_traffic

pytestmark = pytest.mark.torch

FORWARD = Instruction("ForwardPass", True, False)


class Peer:
    """Stands for torch.distributed, and notes what reaches it."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, list[float]]] = []
        self.fails = False

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum", async_op: bool = False) -> None:
        if self.fails:
            raise torch.OutOfMemoryError("no room")
        self.seen.append((op, tensor.flatten().tolist()))
        tensor += 1


@pytest.fixture
def peer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Peer]:
    found = Peer()
    monkeypatch.setattr(dist, "all_reduce", module._noted(found.all_reduce))
    yield found
    end_traffic()


def step(peer: Peer, traffic: Traffic, *, fails_at: int | None = None, is_muted: bool = False) -> None:
    with traffic.inside(FORWARD, is_muted=is_muted):
        for number in range(3):
            peer.fails = number == fails_at
            dist.all_reduce(torch.full((2,), float(number + 1)), op=f"op{number}")


def test_an_instruction_that_failed_makes_the_calls_that_it_owes(peer: Peer) -> None:
    traffic = Traffic()
    step(peer, traffic)
    peer.seen.clear()
    with pytest.raises(torch.OutOfMemoryError):
        step(peer, traffic, fails_at=1)
    peer.fails = False
    traffic.finish(FORWARD)
    assert peer.seen == [("op0", [1.0, 1.0]), ("op1", [0.0, 0.0]), ("op2", [0.0, 0.0])]


def test_the_whole_instruction_is_made_without_data(peer: Peer) -> None:
    traffic = Traffic()
    step(peer, traffic, is_muted=True)
    assert peer.seen == []
    traffic.repeat(FORWARD)
    assert [op for op, _ in peer.seen] == ["op0", "op1", "op2"]


def test_what_never_ran_to_its_end_is_not_known(peer: Peer) -> None:
    traffic = Traffic()
    with pytest.raises(torch.OutOfMemoryError):
        step(peer, traffic, fails_at=2)
    with pytest.raises(UnknownCallsError, match="ForwardPass"):
        traffic.finish(FORWARD)


def test_tapes_of_other_shapes_are_forgotten(peer: Peer) -> None:
    traffic = Traffic()
    step(peer, traffic)
    traffic.forget(lambda instruction: not instruction.is_training)
    traffic.repeat(FORWARD)
    traffic.forget(lambda instruction: instruction.is_training)
    with pytest.raises(UnknownCallsError):
        traffic.repeat(FORWARD)


def test_integers_keep_their_values_because_they_describe_shapes(peer: Peer) -> None:
    traffic = Traffic()
    with traffic.inside(FORWARD, is_muted=True):
        dist.all_reduce(torch.tensor([3, 2, 32]))
    traffic.repeat(FORWARD)
    assert peer.seen == [("sum", [3, 2, 32])]


def test_calls_outside_of_instructions_are_only_passed_on(peer: Peer, tmp_path: Path) -> None:
    Traffic()
    dist.all_reduce(torch.ones(1))
    end_traffic()
    dist.all_reduce(torch.ones(1))
    assert len(peer.seen) == 2
