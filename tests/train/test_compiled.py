"""Compiled layers: the losses of eager ones, one compilation for all layers, and what guards see of them."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from bigsci_launch.errors import BslError  # noqa: E402
from bigsci_launch.train.device import compiler  # noqa: E402
from bigsci_launch.train.guards.engine.layers import LayerWatch  # noqa: E402
from bigsci_launch.train.parallel import compiled  # noqa: E402
from bigsci_launch.train.parallel.initial_weights import Draw  # noqa: E402
from bigsci_launch.train.parallel.model import GptSizes, SelfAttention, TransformerLayer  # noqa: E402
from bigsci_launch.train.parallel.positions import alibi_blocks  # noqa: E402
from bigsci_launch.train.parallel.tensor import TensorParallel  # noqa: E402

from .generations import Generations  # noqa: E402
from .rank_processes import StartRank  # noqa: E402
from .test_resume import losses  # noqa: E402

SIZES = GptSizes(
    num_layers=3,
    hidden=32,
    heads=4,
    ffn_hidden=64,
    length=128,
    vocab=300,
    padded_vocab_size=512,
    dropout=0.2,
    epsilon=1e-5,
    std=0.2,
    positions="alibi",
)
# Half as many micro-batches as elsewhere: their calls are what takes time.
EAGER = {"steps": 4, "precision": "bf16", "micro_batch_size": 4}
COMPILED = {**EAGER, "compile": True}
HALF = {**COMPILED, "stop_after_steps": 2}
MODEL = {"dropout": 0.1, "positions": "rotary"}


@pytest.fixture(scope="module")
def runs(train_several: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return train_several(
        tmp_path_factory.mktemp("runs"),
        "tp=2",
        [
            ("eager", {"model": MODEL, "training": EAGER}),
            ("compiled", {"model": MODEL, "training": COMPILED}),
            ("halves", {"model": MODEL, "training": HALF}),
            ("halves", {"model": MODEL, "training": HALF}),
            ("recomputed", {"model": MODEL, "training": {**COMPILED, "activation_checkpointing": True}}),
            ("selective", {"model": MODEL, "training": {**EAGER, "activation_checkpointing": "selective"}}),
            ("auto", {"training": {**COMPILED, "micro_batch_size": "auto"}}),
            ("defect", {"training": COMPILED, "faults": [{"kind": "unreduced_tp_gradients", "step": 3}]}),
        ],
        module="traced",
        further=("recomputed", "selective", "auto"),
    )


def graphs(attempt: Any, number: int) -> list[int]:
    """Return how many graphs each run of one start of the ranks has made."""
    log = attempt.run.path.parent / f"ranks/attempts/{number:04d}/logs/rank-0000.log"
    return [int(each) for each in re.findall(r"^graphs: (\d+)$", log.read_text(), re.MULTILINE)]


def test_losses_are_those_of_eager_layers_within_rounding(runs: Any) -> None:
    """Also the random numbers of dropout: the first loss is the same to the last bit."""
    eager, mine = losses(runs["eager"]), losses(runs["compiled"])
    assert mine[1] == eager[1]
    assert [float.fromhex(each) for each in mine.values()] == pytest.approx(
        [float.fromhex(each) for each in eager.values()], rel=1e-3
    )


def test_a_resumed_run_has_the_losses_of_an_undisturbed_one_to_the_last_bit(runs: Any) -> None:
    """Though the first steps after a start are checked, and those of the other run were not."""
    assert sorted(losses(runs["halves+"])) == [3, 4]
    assert losses(runs["halves"]) | losses(runs["halves+"]) == losses(runs["compiled"])


@pytest.mark.long  # test_layers.py holds this for layers that are recomputed in part, and test_parity.py for eager ones
def test_recomputed_layers_have_the_same_losses_and_graphs(runs: Any) -> None:
    assert losses(runs["recomputed"]) == losses(runs["compiled"])
    assert losses(runs["selective"]) == losses(runs["eager"])
    assert graphs(runs["recomputed"], 2) == [3, 0, 3]


def test_all_layers_share_one_graph_with_the_sums_over_ranks_inside(runs: Any) -> None:
    """A part that cannot be traced would be an error. The loss has two graphs more; the defect replaces the sums over
    ranks, so the graph of the layers is another one."""
    assert graphs(runs["eager"], 1) == [0, 3, 3, 3, 4]


@pytest.mark.long
def test_a_size_of_micro_batches_is_found(runs: Any) -> None:
    assert runs["auto"].error(0) is None and sorted(losses(runs["auto"])) == [1, 2, 3, 4]


@pytest.mark.long
def test_the_next_generation_computes_what_the_lost_one_would_have(
    runs: Any, start_rank: StartRank, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its groups are others, and compiled code of the lost one is not used."""
    monkeypatch.setenv("TRACED", "1")
    run = Generations(start_rank, tmp_path / "led", dataset, "tp=2", model=MODEL, training=COMPILED)
    try:
        run.start(2, {1: "optimizer:2:raise"})
        run.begin()
        run.lead()
        assert run.number == 1
        assert losses(run.attempt) == losses(runs["compiled"])
    finally:
        run.close()


def test_guards_find_a_defect_of_all_layers(runs: Any) -> None:
    step, message = runs["defect"].stopped()
    assert step == 3 and "replicated gradients" in message


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setattr(compiler, "BACKEND", "aot_eager")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    yield
    torch._dynamo.reset()


def stage(ranks: TensorParallel | None = None) -> Any:
    place = ranks or TensorParallel(0, 1, None)
    return torch.nn.Sequential(*(TransformerLayer(SIZES, Draw(7, f"{n}"), place) for n in range(3)))


def trained(module: Any) -> list[Any]:
    torch.manual_seed(1)
    module.zero_grad()
    module(torch.randn(2, 128, 32)).square().mean().backward()
    return [torch.rand(1), *(each.grad.clone() for each in module.parameters())]


@pytest.mark.filterwarnings("ignore")
def test_a_checked_step_computes_some_layers_again_and_changes_nothing(traced: None) -> None:
    module = stage()
    compiled.compile_layers(module, by_rule=False)
    engine: Any = SimpleNamespace(module=module, micro_batches=1)
    watch = LayerWatch(engine, lambda look: look())
    names = {name for name, _ in module.named_parameters()}
    plain, seen = trained(module), set[str]()
    for step in range(12):
        if seen == names:
            break
        watch.again.step, watch.is_armed = step, True
        assert all(map(torch.equal, trained(module), plain))
        assert not list(watch.findings(0, lambda name: True))
        due = {name for name in names if watch.again.sees(name)}
        seen |= due
        for parameter in module.parameters():
            parameter.grad *= 1.5
        found = [each.tensor for each in watch.findings(0, lambda name: True)]
        assert sorted(found) == sorted(name for name in due if name.endswith("weight") and "norm" not in name)
        assert len(found) == 4
        watch.clear()
        watch.is_armed = False
    assert seen == names


@pytest.mark.filterwarnings("ignore")
def test_compiled_code_holds_no_group(traced: None) -> None:
    class Counted(TensorParallel):
        num_sums = 0

        def all_reduce(self, tensor: Any, operation: Any = None) -> None:
            self.num_sums += 1

    first = Counted(0, 2, None)
    module = stage(first)
    compiled.compile_layers(module, by_rule=False)
    trained(module)
    assert first.num_sums == 12
    gone = weakref.ref(first)
    del module, first
    gc.collect()
    assert gone() is None
    second = Counted(0, 2, None)
    module = stage(second)
    compiled.compile_layers(module, by_rule=False)
    trained(module)
    assert second.num_sums == 12


@pytest.mark.filterwarnings("ignore")
def test_a_layer_that_cannot_be_compiled_is_an_error_with_its_cause(
    traced: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(graph: Any, inputs: Any) -> Any:
        raise FileNotFoundError("no gcc")

    monkeypatch.setattr(compiler, "BACKEND", broken)
    module = stage()
    compiled.compile_layers(module, by_rule=False)
    with pytest.raises(BslError, match=r"training\.compile.*FileNotFoundError: no gcc") as raised:
        trained(module)
    assert "training.compile: false" in (raised.value.hint or "")


@pytest.mark.filterwarnings("ignore")
def test_alibi_needs_no_matrix_of_biases() -> None:
    """Torch has the backward pass of this kernel for GPUs alone."""
    attention = SelfAttention(SIZES, Draw(1, "attention"), TensorParallel(0, 1, None)).bfloat16()
    x = torch.randn(2, 128, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    blocks = alibi_blocks(attention.slopes, 128, x.device)
    assert sum(each.numel() for each in (blocks[0], blocks[1].kv_indices, blocks[1].kv_num_blocks)) < 10
    with torch.no_grad():
        exact = attention.float()(x.float(), attention.tables(x.float()))
        attention.bfloat16()
        for tables in (attention.tables(x), blocks):
            apart = (attention(x, tables).float() - exact).norm() / exact.norm()
            assert apart < 0.01


def test_compiled_code_is_kept_where_others_cannot_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setattr(compiler.tempfile, "gettempdir", lambda: str(tmp_path))
    folder = compiler.keep_compiled_code()
    assert folder.parent == tmp_path and folder.stat().st_mode & 0o777 == 0o700
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    assert compiler.keep_compiled_code() == folder and not caplog.records
    for spoil in (lambda: folder.chmod(0o777), lambda: (folder.rmdir(), folder.symlink_to(tmp_path))):
        spoil()
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
        other = compiler.keep_compiled_code()
        assert other != folder and other.stat().st_mode & 0o777 == 0o700
        assert str(folder) in caplog.records[-1].message
        other.rmdir()
