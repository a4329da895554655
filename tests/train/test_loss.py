"""The loss in parts of a buffer against the plain formula over a whole fp32 copy, bit by bit."""

from __future__ import annotations

import threading
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from bigsci_launch.errors import BslError  # noqa: E402
from bigsci_launch.train.device import compiler  # noqa: E402
from bigsci_launch.train.parallel import loss as loss_module  # noqa: E402
from bigsci_launch.train.parallel.loss import VocabularyParallelLoss, compiled_kernels  # noqa: E402
from bigsci_launch.train.parallel.tensor import TensorParallel  # noqa: E402

VOCABULARY, PADDED = 300, 512


def plain_loss(logits: Any, labels: Any) -> tuple[Any, Any]:
    """Return loss and gradient as the formula has them: probabilities minus one at the label, over the tokens."""
    scores = logits.float()
    scores[..., VOCABULARY:] = torch.finfo(torch.float32).min
    shifted = scores - scores.amax(dim=-1, keepdim=True)
    target = shifted.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    exponentials = shifted.exp()
    totals = exponentials.sum(dim=-1)
    gradient = exponentials / totals.unsqueeze(-1)
    gradient.scatter_add_(-1, labels.unsqueeze(-1), -torch.ones_like(labels, dtype=torch.float32).unsqueeze(-1))
    return (totals.log() - target).mean(), (gradient * torch.tensor(1.0 / labels.numel())).to(logits.dtype)


def sample(dtype: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    return (4 * torch.randn(3, 7, PADDED)).to(dtype), torch.randint(0, VOCABULARY, (3, 7))


@pytest.mark.parametrize("rows", [1, 4, 21, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_loss_in_parts_is_the_loss_bit_by_bit(rows: int, dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_module, "BUFFER_ELEMENTS", rows * PADDED)
    logits, labels = sample(dtype)
    expected, gradient = plain_loss(logits, labels)
    logits.requires_grad_(True)
    found = VocabularyParallelLoss(VOCABULARY, TensorParallel(0, 1, None))(logits, labels)
    found.backward()
    assert found.dtype == torch.float32
    assert logits.grad.dtype == dtype
    assert torch.equal(found, expected)
    assert torch.equal(logits.grad, gradient)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler's own modules
@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.long), torch.bfloat16], ids=str)
def test_the_compiled_loss_is_the_loss_within_rounding(dtype: Any) -> None:
    logits, labels = sample(dtype)
    expected, gradient = plain_loss(logits, labels)
    logits.requires_grad_(True)
    found = VocabularyParallelLoss(VOCABULARY, TensorParallel(0, 1, None), compiled_kernels())(logits, labels)
    found.backward()
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    assert logits.grad.dtype == dtype
    torch.testing.assert_close(logits.grad, gradient, rtol=2 * torch.finfo(dtype).eps, atol=1e-7)
    assert not logits.grad[..., VOCABULARY:].any()


def test_a_loss_that_cannot_be_compiled_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("no gcc here")

    monkeypatch.setattr(compiler, "BACKEND", broken)
    logits, labels = sample(torch.float32)
    loss = VocabularyParallelLoss(VOCABULARY, TensorParallel(0, 1, None), compiled_kernels())
    with pytest.raises(BslError, match=r"training.compile: the loss .* no gcc here") as info:
        loss(logits, labels)
    assert info.value.hint


class RanksAsThreads(TensorParallel):
    """Tensor-parallel ranks of which each is a thread; the last one has nothing but padding."""

    def __init__(self, rank: int, size: int, shared: dict[str, Any]) -> None:
        super().__init__(rank, size, None)
        self.shared = shared

    def all_reduce(self, tensor: Any, operation: Any = torch.distributed.ReduceOp.SUM) -> None:
        self.shared[self.rank] = tensor.clone()
        self.shared["barrier"].wait()
        everyone = torch.stack([self.shared[rank] for rank in range(self.size)])
        is_max = operation == torch.distributed.ReduceOp.MAX
        self.shared["barrier"].wait()
        tensor.copy_(everyone.amax(dim=0) if is_max else everyone.sum(dim=0))


def test_shards_of_the_vocabulary_give_the_loss_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_module, "BUFFER_ELEMENTS", 5 * PADDED)
    logits, labels = sample(torch.bfloat16)
    expected, gradient = plain_loss(logits, labels)
    size = 4
    shared: dict[Any, Any] = {"barrier": threading.Barrier(size)}
    found: dict[int, Any] = {}

    def work(rank: int) -> None:
        width = PADDED // size
        mine = logits[..., rank * width : (rank + 1) * width].detach().clone().requires_grad_(True)
        loss = VocabularyParallelLoss(VOCABULARY, RanksAsThreads(rank, size, shared))(mine, labels)
        loss.backward()
        found[rank] = loss.detach(), mine.grad

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(found) == list(range(size))
    for rank in range(size):
        torch.testing.assert_close(found[rank][0], expected, rtol=1e-6, atol=0)
    whole = torch.cat([found[rank][1] for rank in range(size)], dim=-1)
    torch.testing.assert_close(whole, gradient, rtol=1e-2, atol=1e-8)
    assert torch.count_nonzero(whole[..., VOCABULARY:]) == 0
