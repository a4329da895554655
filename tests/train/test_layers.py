"""Layers, initial weights, random states and the optimizer, in one process."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from torch.nn import functional  # noqa: E402

from bigsci_launch.config.schema.run import OptimizerSection  # noqa: E402
from bigsci_launch.topology import Coordinate, Topology  # noqa: E402
from bigsci_launch.train.parallel import initial_weights, selective  # noqa: E402
from bigsci_launch.train.parallel.initial_weights import BLOCK_ROWS, Draw  # noqa: E402
from bigsci_launch.train.parallel.loss import VocabularyParallelLoss  # noqa: E402
from bigsci_launch.train.parallel.model import GptSizes, TransformerLayer, VocabularyEmbedding  # noqa: E402
from bigsci_launch.train.parallel.optimizer import apply_settings, choose_kernel, make_optimizer  # noqa: E402
from bigsci_launch.train.parallel.tensor import RowParallelLinear, TensorParallel  # noqa: E402
from bigsci_launch.train.rank.rng import (  # noqa: E402
    capture_generators,
    restore_generators,
    seed_generators,
    split_states,
)

from .conftest import make_config  # noqa: E402

SIZES = GptSizes(
    num_layers=2,
    hidden=16,
    heads=4,
    ffn_hidden=64,
    length=8,
    vocab=300,
    padded_vocab_size=512,
    dropout=0.0,
    epsilon=1e-5,
    std=0.02,
)


def rank_of(rank: int, size: int) -> TensorParallel:
    """Return the place of a rank whose layers are built but not run."""
    return TensorParallel(rank, size, None)


@pytest.mark.parametrize("shape", [(2 * BLOCK_ROWS, 12), (BLOCK_ROWS + 100, 8), (40, 6)])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_slices_of_initial_weights_make_the_whole(shape: tuple[int, int], size: int) -> None:
    draw = Draw(7, "layer")
    whole = draw.normal("weight", shape, 0.5)
    rows = [draw.normal("weight", shape, 0.5, rows=rank_of(rank, size).part(shape[0])) for rank in range(size)]
    assert torch.equal(torch.cat(rows), whole)
    if shape[1] % size == 0:
        parts = [rank_of(rank, size).part(shape[1]) for rank in range(size)]
        columns = [draw.normal("weight", shape, 0.5, columns=part) for part in parts]
        assert torch.equal(torch.cat(columns, dim=1), whole)


def test_threads_draw_what_one_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = (5 * BLOCK_ROWS + 3, 40)
    together = Draw(7, "layer").normal("weight", shape, 0.5, num_drawn_rows=shape[0] - 2)
    monkeypatch.setattr(initial_weights, "MOST_THREADS", 1)
    assert torch.equal(together, Draw(7, "layer").normal("weight", shape, 0.5, num_drawn_rows=shape[0] - 2))


def test_initial_weights_differ_by_name_and_seed_and_have_their_spread() -> None:
    whole = Draw(7, "layer").normal("weight", (600, 50), 0.5)
    assert whole.std() == pytest.approx(0.5, rel=0.02)
    assert abs(whole.mean()) < 0.01
    assert not torch.equal(whole, Draw(8, "layer").normal("weight", (600, 50), 0.5))
    assert not torch.equal(whole, Draw(7, "other").normal("weight", (600, 50), 0.5))
    assert not torch.equal(whole[:BLOCK_ROWS], whole[BLOCK_ROWS : 2 * BLOCK_ROWS])


def test_padding_rows_are_zero_and_do_not_change_the_others() -> None:
    draw = Draw(7, "embedding")
    small = VocabularyEmbedding(SIZES, draw, rank_of(0, 1)).weight
    assert torch.count_nonzero(small[300:]) == 0
    assert torch.count_nonzero(small[:300]) == 300 * 16
    unpadded = draw.normal("weight", (300, 16), 0.02)
    assert torch.equal(small[:300], unpadded)


def test_loss_is_the_cross_entropy_of_the_unpadded_vocabulary() -> None:
    torch.manual_seed(0)
    logits = torch.randn(2, 8, 512, requires_grad=True)
    labels = torch.randint(0, 300, (2, 8))
    loss = VocabularyParallelLoss(300, rank_of(0, 1))(logits, labels)
    loss.backward()
    assert logits.grad is not None
    mine, logits.grad = logits.grad, None
    expected = functional.cross_entropy(logits[..., :300].reshape(-1, 300), labels.reshape(-1))
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    torch.testing.assert_close(mine, logits.grad, rtol=1e-5, atol=1e-8)
    assert torch.count_nonzero(mine[..., 300:]) == 0


@pytest.mark.parametrize(
    ("choices", "kept"),
    [({}, (32, 20)), ({"activation": "swiglu", "norm": "rmsnorm", "positions": "rotary", "biases": False}, (67, 28))],
)
def test_selective_recomputation_keeps_products_and_changes_no_bit(
    choices: dict[str, Any], kept: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes that a bf16 layer keeps for each token and element of its width."""
    layer = TransformerLayer(replace(SIZES, hidden=64, ffn_hidden=256, **choices), Draw(7, "layer"), rank_of(0, 1))
    layer.bfloat16()
    x = torch.randn(4, 64, 64, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
    found: dict[bool, list[Any]] = {}
    for layer.is_selective in (False, True):
        held = Held(layer)
        monkeypatch.setattr(selective, "selective_contexts", held.contexts)
        layer.zero_grad()
        x.grad = None
        with torch.autograd.graph.saved_tensors_hooks(held.keep, lambda tensor: tensor):
            output = layer(x)
        assert round(held.num_bytes / x.numel()) == kept[layer.is_selective]
        output.square().mean().backward()
        found[layer.is_selective] = [output, x.grad, *(each.grad for each in layer.parameters())]
    assert all(map(torch.equal, found[False], found[True]))


class Held:
    """Counts the bytes that the backward pass of a layer needs, apart from its weights."""

    def __init__(self, layer: Any) -> None:
        self._weights = {each.untyped_storage().data_ptr() for each in layer.parameters()}
        self._sizes: dict[int, int] = {}
        self._kept: list[Any] = []

    def keep(self, tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._weights:
            self._sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    def contexts(self) -> Any:
        """Note what the pass keeps that computes nothing again."""
        forward, _ = contexts = torch.utils.checkpoint.create_selective_checkpoint_contexts(selective._Policy())
        self._kept.append(forward.storage)
        return contexts

    @property
    def num_bytes(self) -> int:
        for leaf in torch.utils._pytree.tree_leaves([list(each.values()) for each in self._kept]):
            tensor = getattr(leaf, "val", leaf)
            if isinstance(tensor, torch.Tensor):
                self.keep(tensor)
        return sum(self._sizes.values())


def test_attention_is_causal() -> None:
    layer = TransformerLayer(SIZES, Draw(7, "layer"), rank_of(0, 1))
    x = torch.randn(1, 8, 16)
    changed = x.clone()
    changed[0, 5:] += 1.0
    before, after = layer(x), layer(changed)
    assert torch.equal(before[0, :5], after[0, :5])
    assert not torch.equal(before[0, 5:], after[0, 5:])


def test_random_states_come_back() -> None:
    seed_generators(3, Coordinate.at(dp=1))
    state = capture_generators()

    def draws() -> tuple[Any, ...]:
        return torch.rand(3).tolist(), random.random(), np.random.rand(), np.random.standard_normal()

    first = draws()
    assert draws() != first
    restore_generators(state)
    assert draws() == first


def test_random_states_of_the_other_kind_of_device_are_left_out_in_words() -> None:
    """A GPU's state cannot be used on a CPU; the states of the host come back all the same."""
    state = {**capture_generators(), "cuda": torch.zeros(16, dtype=torch.uint8)}
    first = torch.rand(3).tolist()
    assert "dropout" in (restore_generators(state) or "")
    assert torch.rand(3).tolist() == first
    host, device = split_states(state)
    assert sorted(host) == ["numpy", "python", "torch"]
    assert torch.equal(device, state["cuda"])
    assert split_states(capture_generators())[1] is None
    assert restore_generators(capture_generators()) is None


def test_seeds_differ_by_stage_and_replica_but_not_by_tensor_rank() -> None:
    def first_draw(pp: int, dp: int, tp: int) -> float:
        seed_generators(3, Coordinate.at(dp=dp, pp=pp, tp=tp))
        return float(torch.rand(()))

    assert first_draw(0, 0, 0) == first_draw(0, 0, 1)
    assert len({first_draw(pp, dp, 0) for pp in range(2) for dp in range(2)}) == 4


def test_matrices_decay_and_vectors_do_not() -> None:
    layer = TransformerLayer(SIZES, Draw(7, "layer"), rank_of(0, 1))
    optimizer = make_optimizer(layer, OptimizerSection(weight_decay=0.3, betas=[0.8, 0.9]))
    decay, no_decay = optimizer.param_groups
    assert (decay["weight_decay"], no_decay["weight_decay"]) == (0.3, 0.0)
    assert {parameter.ndim for parameter in decay["params"]} == {2}
    assert {parameter.ndim for parameter in no_decay["params"]} == {1}
    assert len(decay["params"]) + len(no_decay["params"]) == len(list(layer.parameters()))
    apply_settings(optimizer.param_groups, OptimizerSection(weight_decay=0.1))
    assert (decay["weight_decay"], no_decay["weight_decay"], decay["betas"]) == (0.1, 0.0, (0.9, 0.95))


def test_the_optimizer_steps_as_torchs_own() -> None:
    """It only leaves out the hooks for the compiler."""
    torch.manual_seed(1)
    ours, theirs = (torch.nn.Linear(5, 3) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    config = OptimizerSection(learning_rate=0.01, weight_decay=0.3, betas=[0.9, 0.95])
    mine = make_optimizer(ours, config)
    reference = torch.optim.AdamW(
        [{"params": [theirs.weight], "weight_decay": 0.3}, {"params": [theirs.bias], "weight_decay": 0.0}],
        lr=0.01,
        betas=(0.9, 0.95),
        eps=config.epsilon,
    )
    for _ in range(3):
        x = torch.randn(4, 5)
        for module, optimizer in ((ours, mine), (theirs, reference)):
            optimizer.zero_grad()
            module(x).square().sum().backward()
            optimizer.step()
    assert torch.equal(ours.weight, theirs.weight)
    assert torch.equal(ours.bias, theirs.bias)


def test_a_state_saved_with_one_kernel_of_adamw_is_loaded_with_the_other() -> None:
    """`fused` also runs on a CPU; torch takes the choice from the loaded state unless it is made again."""

    def trained(layer: Any, optimizer: Any, num_steps: int) -> Any:
        for step in range(num_steps):
            optimizer.zero_grad()
            layer(torch.full((2, 5), 1.0 + step)).square().sum().backward()
            optimizer.step()
        return optimizer

    def fresh(*, fused: bool) -> Any:
        torch.manual_seed(1)
        layer = torch.nn.Linear(5, 3)
        optimizer = make_optimizer(layer, OptimizerSection(learning_rate=0.01))
        choose_kernel(optimizer, fused=fused)
        return layer, optimizer

    for saves_fused in (False, True):
        source, saved = fresh(fused=saves_fused)
        trained(source, saved, 3)
        layer, optimizer = fresh(fused=not saves_fused)
        layer.load_state_dict(source.state_dict())
        optimizer.load_state_dict(copy.deepcopy(saved.state_dict()))
        assert optimizer.param_groups[0]["fused"] is saves_fused
        choose_kernel(optimizer, fused=not saves_fused)
        assert [group["fused"] for group in optimizer.param_groups] == [not saves_fused] * 2
        trained(layer, optimizer, 2)
        trained(source, saved, 2)
        torch.testing.assert_close(layer.weight, source.weight, rtol=1e-5, atol=1e-7)
        assert [float(state["step"]) for state in optimizer.state.values()] == [5.0, 5.0]


def test_deepspeeds_timer_does_not_synchronize_the_device_before_each_micro_batch(tmp_path: Path) -> None:
    from deepspeed.utils.config import get_timers_config

    from bigsci_launch.train.parallel.pipeline import engine_settings

    config = make_config(Topology(tp=1, pp=1, dp=1), tmp_path / "tokens", {})
    settings = engine_settings(config, Topology(tp=1, pp=1, dp=1), 16)
    assert get_timers_config({}).enabled
    assert not get_timers_config(settings).enabled


def test_the_bias_of_a_row_parallel_layer_is_added_once_whatever_the_number_of_ranks() -> None:
    layer = RowParallelLinear(6, 4, 0.5, Draw(7, "layer"), rank_of(0, 1))
    torch.nn.init.normal_(layer.bias)
    x = torch.randn(3, 6)
    torch.testing.assert_close(layer(x), functional.linear(x, layer.weight) + layer.bias)
