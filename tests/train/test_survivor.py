"""`Survivor`: a plain loop loses ranks, and continues with the same numbers."""

from __future__ import annotations

import difflib
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.futures import Future

from bigsci_launch.errors import BslError
from bigsci_launch.recover.holding import StateVersion
from bigsci_launch.train.survive.forget import forget_groups
from bigsci_launch.train.survive.objects import KeptObjects, TensorForm
from bigsci_launch.train.survive.reducer import Reductions
from bigsci_launch.train.survive.sharded import rows_of
from bigsci_launch.train.survive.waits import SLICE_S, GivenUpError, Waits
from bigsci_launch.train.survivor import Survivor
from tests.support.texts import has_parts

from .generations import Generations
from .rank_processes import StartRank

pytestmark = pytest.mark.torch

ROOT = Path(__file__).parents[2]
LOOPS = ROOT / "benchmarks" / "surviving"
PROGRAMS = Path(__file__).parent / "programs"
STEPS = 40
Lead = Callable[..., Generations]


@pytest.fixture(scope="module")
def lead(start_rank: StartRank, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lead]:
    """`lead({1: "loop-step:4:die"})` begins the example on three ranks; see `programs/slot.py`."""
    led: list[Generations] = []

    def begin(suffering: Mapping[int, str] | None = None, loop: Path = LOOPS / "ddp.py", ranks: int = 3) -> Generations:
        found = Generations(start_rank, tmp_path_factory.mktemp("led"), dataset, f"dp={ranks}", loop)
        led.append(found)
        found.start(ranks, suffering)
        found.begin()
        return found

    yield begin
    for each in led:
        each.close()


@pytest.fixture(scope="module")
def undisturbed(lead: Lead) -> dict[int, float]:
    run = lead()
    run.lead()
    return losses(run)


def printed(run: Generations) -> list[tuple[int, float]]:
    """Return the steps with their losses, as whoever was rank 0 has printed them."""
    logs = "\n".join(path.read_text() for path in run.folder.path.glob("p*.log"))
    return [(int(step), float(loss)) for step, loss in re.findall(r"^step (\d+) loss (\S+)$", logs, re.MULTILINE)]


def losses(run: Generations) -> dict[int, float]:
    """Return the loss of each step, and check that none was done twice."""
    assert sorted(step for step, _ in printed(run)) == list(range(1, STEPS + 1)), run.story()
    return dict(printed(run))


def restored(run: Generations) -> list[tuple[int, str]]:
    """Return the step with which each generation began, and where the state came from, as rank 0 has recorded it."""
    return [(each["restored_step"], each["source"]) for each in run.attempt.events(0, "restored")]


def test_ranks_are_lost_at_any_moment_and_replaced(lead: Lead, undisturbed: dict[int, float]) -> None:
    """In a step, in the update, after it, by an exception; and another one while the state is restored."""
    run = lead({0: "loop-step:4:die", 1: "loop-commit:9:die", 2: "loop-update:14:raise"})
    run.lead({}, {0: "loop-holding:1:die"})
    assert losses(run) == pytest.approx(undisturbed, rel=1e-6), run.story()
    assert (run.number, run.stuck) == (4, []), run.story()
    assert {source for _, source in restored(run)[1:]} <= {"memory", "replicas"}


def test_fewer_ranks_do_the_same_steps_and_a_new_one_joins(lead: Lead, undisturbed: dict[int, float]) -> None:
    run = lead()
    run.until(lambda: run.step() > 0)
    run.kill(2)
    run.end()
    run.fill_up("dp=2")
    run.until(lambda: run.step() > 0)
    run.end()
    run.fill_up("dp=3")
    run.lead()
    assert losses(run) == pytest.approx(undisturbed, rel=1e-5), run.story()
    worlds = [record["topology"]["dp"] for record in run.attempt.events(0, "generation")]
    assert worlds == [3, 2, 3]
    assert {source for _, source in restored(run)[1:]} <= {"memory", "replicas"}


SHARDED = LOOPS / "fsdp2.py"


@pytest.fixture(scope="module")
def undisturbed_shards(lead: Lead) -> dict[int, float]:
    run = lead(loop=SHARDED)
    run.lead()
    return losses(run)


def test_parts_of_lost_ranks_come_from_buddies(lead: Lead, undisturbed_shards: dict[int, float]) -> None:
    """As for replicas. A step whose parts had not arrived at the buddies is done again, with the same loss."""
    run = lead({0: "loop-step:4:die", 1: "loop-commit:9:die", 2: "loop-update:14:raise"}, SHARDED)
    run.lead({}, {0: "loop-manifest:1:die"})
    assert {step for step, _ in printed(run)} == set(range(1, STEPS + 1)), run.story()
    assert all(loss == pytest.approx(undisturbed_shards[step], rel=1e-6) for step, loss in printed(run)), run.story()
    assert (run.number, run.stuck) == (4, []), run.story()
    assert "buddies" in {source for _, source in restored(run)[1:]} <= {"memory", "buddies"}


def test_fewer_ranks_cut_the_same_parameters_again(lead: Lead, undisturbed_shards: dict[int, float]) -> None:
    run = lead(loop=SHARDED)
    run.until(lambda: run.step() > 0)
    run.kill(2)
    run.end()
    run.fill_up("dp=2")
    run.until(lambda: run.step() > 0)
    run.end()
    run.fill_up("dp=3")
    run.lead()
    assert all(loss == pytest.approx(undisturbed_shards[step], rel=1e-5) for step, loss in printed(run)), run.story()
    # Rank 0 has more rows when ranks are fewer.
    assert [source for _, source in restored(run)[1:]] == ["buddies", "memory"]


def test_parts_that_no_rank_holds_are_lost_aloud(lead: Lead, undisturbed_shards: dict[int, float]) -> None:
    """A rank and its buddy die together: without a checkpoint, the run begins again, and says why."""
    run = lead(loop=SHARDED)
    run.until(lambda: run.step() > 0)
    run.replace(0, 1)
    run.lead()
    assert restored(run)[1] == (0, "start")
    assert "no rank holds" in run.attempt.events(0, "restored")[1]["why"]
    assert dict(printed(run)) == pytest.approx(undisturbed_shards, rel=1e-6)


def test_parameters_that_are_cut_by_columns_are_refused() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        weight = distribute_tensor(torch.zeros(2, 2), init_device_mesh("cpu", (1,)), [Shard(1)])
        with pytest.raises(BslError) as raised:
            rows_of(weight, TensorForm(0, (2, 2), torch.float32, is_cut=True), "model.weight")
    finally:
        forget_groups()
    assert has_parts(raised.value.message, "model.weight")


def test_parts_come_from_the_other_replica(lead: Lead) -> None:
    """HSDP: two ranks at once, which hold different parts. No copies are sent during steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REPLICAS", "2")
        sound = lead(loop=SHARDED, ranks=4)
        sound.lead()
        run = lead(loop=SHARDED, ranks=4)
        run.until(lambda: run.step() > 0)
        run.replace(1, 2)
        run.lead()
    assert dict(printed(run)) == pytest.approx(losses(sound), rel=1e-6), run.story()
    assert [run.attempt.events(rank, "restored")[-1]["source"] for rank in (1, 2)] == ["replicas"] * 2


def test_a_loop_with_accelerate_is_left_and_called_again(lead: Lead, undisturbed: dict[int, float]) -> None:
    run = lead({0: "loop-step:4:die", 1: "loop-commit:9:die"}, LOOPS / "with_accelerate.py")
    run.lead()
    assert losses(run) == pytest.approx(undisturbed, rel=1e-6), run.story()
    assert (run.number, run.stuck) == (2, []), run.story()


ZERO = LOOPS / "with_deepspeed.py"


@pytest.mark.parametrize("stage", ["1", pytest.param("2", marks=pytest.mark.long), "3"])
def test_partitions_of_lost_ranks_come_from_buddies_and_are_cut_again(
    lead: Lead, undisturbed: dict[int, float], stage: str
) -> None:
    """DeepSpeed: a rank dies, two do the steps, and a new one joins. Stages 1 and 2 cut groups, 3 each parameter."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STAGE", stage)
        run = lead({1: "loop-commit:9:die"}, ZERO)
        run.until(lambda: bool(run._gone()))
        run.kill(1)
        assert run.end() == [], run.story()
        run.fill_up("dp=2")
        run.until(lambda: run.step() > 0)
        run.end()
        run.fill_up("dp=3")
        run.lead()
    assert all(loss == pytest.approx(undisturbed[step], rel=1e-5) for step, loss in printed(run)), run.story()
    assert [source for _, source in restored(run)[1:]] == ["buddies", "memory"], run.story()
    assert run.stuck == []


@pytest.mark.long
@pytest.mark.parametrize("stage", ["1", "3"])
def test_partitions_are_lost_at_any_moment(lead: Lead, undisturbed: dict[int, float], stage: str) -> None:
    """The test above holds that they come back."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STAGE", stage)
        run = lead({0: "loop-step:4:die", 1: "loop-commit:9:die", 2: "loop-update:14:raise"}, ZERO)
        run.lead({}, {0: "loop-manifest:1:die"})
    assert {step for step, _ in printed(run)} == set(range(1, STEPS + 1)), run.story()
    assert all(loss == pytest.approx(undisturbed[step], rel=1e-6) for step, loss in printed(run)), run.story()
    assert (run.number, run.stuck) == (4, []), run.story()


def test_an_engine_whose_state_is_not_known_is_refused_before_the_first_step(lead: Lead) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STAGE", "0")
        run = lead(loop=ZERO, ranks=2)
        run.until(lambda: all(slot.said("final") for slot in run.members))
    assert has_parts(run.rank(0).said("final")[0]["text"], "engine", "stage 0"), run.story()
    assert printed(run) == []


def test_a_rank_leaves_a_reduction_that_gloo_has_forgotten(lead: Lead) -> None:
    """gloo never reports a message that was partly there when its connection broke, and the reducer waits in C++."""
    run = lead(loop=PROGRAMS / "forgetting_loop.py", ranks=2)
    run.until(lambda: "waits" in run.rank(0).log.read_text())
    assert run.end() == [], run.story()
    run.begin()
    run.lead()
    assert restored(run)[1:] == [(1, "memory")]


@pytest.mark.parametrize("forming", ["store", "group"])
def test_a_rank_leaves_a_group_to_which_a_peer_never_comes(lead: Lead, forming: str) -> None:
    """There is no connection yet that could be shut down."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FORMING", forming)
        run = lead(loop=PROGRAMS / "half_formed_loop.py", ranks=2)
        run.until(lambda: "waits" in run.rank(0).log.read_text())
        time.sleep(1)
        run.kill(1)
        assert run.end() == [], run.story()
        run.fill_up("dp=2")
        run.lead()
    assert restored(run) == [(0, "start")]


def test_a_reduction_ends_with_its_result_or_error_or_is_given_up() -> None:
    reductions = Reductions(Waits(lambda: True))
    works: list[Future[torch.Tensor]] = [Future() for _ in range(3)]
    ends = [reductions.follow(work) for work in works]
    works[0].set_result(torch.ones(1))
    works[1].set_exception(ValueError("a peer is gone"))
    reductions.give_up()
    assert [end.done() for end in ends] == [True, True, False]
    time.sleep(SLICE_S)
    reductions.give_up()
    works[2].set_result(torch.ones(1))
    assert ends[0].wait().item() == 1
    for end, error in ((ends[1], "a peer is gone"), (ends[2], "gloo")):
        with pytest.raises(Exception, match=error):
            end.wait()


def test_a_call_of_torch_that_waits_is_given_up() -> None:
    waits = Waits(lambda: True)
    with waits.for_gloo(), pytest.raises(GivenUpError):
        waits.endable(threading.Event().wait)()
    assert waits.endable(abs)(-2) == 2


def test_a_process_whose_groups_were_never_formed_meets_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch has named the group before it fails, and would name the next one differently than a new process does."""
    seen: list[str] = []

    def fail(*arguments: Any, **_more: Any) -> None:
        seen.append(str(arguments[5]))
        raise RuntimeError("a peer is gone")

    monkeypatch.setattr(distributed_c10d, "_new_process_group_helper", fail)
    for _ in range(2):
        with pytest.raises(RuntimeError):
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=2)
        forget_groups()
    assert seen[0] == seen[1]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("plain", "ddp"),
        ("plain_accelerate", "with_accelerate"),
        ("plain_deepspeed", "with_deepspeed"),
        ("plain_fsdp2", "fsdp2"),
    ],
)
def test_the_examples_change_fifteen_lines_at_most(before: str, after: str) -> None:
    plain, surviving = ((LOOPS / f"{name}.py").read_text().splitlines() for name in (before, after))
    changed = [line for line in difflib.ndiff(plain, surviving) if line.startswith("+ ") and line[2:].strip()]
    assert len(changed) <= 15, "\n".join(changed)


def test_the_example_is_in_the_manual() -> None:
    assert (LOOPS / "ddp.py").read_text() in (ROOT / "docs" / "how-to" / "survivor.md").read_text()


class MarkedAsCut(nn.Module):
    """As DeepSpeed's ZeRO marks parameters that are cut."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.weight.ds_id = 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("wrong", [MarkedAsCut(), torch.optim.SGD(MarkedAsCut().parameters()), object()])
def test_what_is_not_whole_on_each_rank_is_refused(wrong: Any) -> None:
    with pytest.raises(BslError) as raised:
        KeptObjects({"thing": wrong})
    assert has_parts(raised.value.message, "thing")


def test_state_changes_in_the_update_only() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept = KeptObjects({"model": model, "optimizer": optimizer})
    with pytest.raises(BslError):
        optimizer.step()
    kept.begin_update()
    optimizer.step()
    assert kept.holding() == []
    kept.commit(StateVersion(1, 0))
    assert [each.version for each in kept.holding()] == [StateVersion(1, 0)]


def test_weights_that_were_replaced_between_generations_are_refused() -> None:
    model = nn.Linear(2, 1)
    before = KeptObjects({"model": model})
    before.commit(StateVersion(3, 0))
    before.rest()
    with torch.no_grad():
        model.weight += 1
    with pytest.raises(BslError) as raised:
        KeptObjects({"model": model}).adopt(before)
    assert has_parts(raised.value.message, "model")


def test_statistics_of_an_unfinished_step_are_undone() -> None:
    model = nn.BatchNorm1d(2)
    kept = KeptObjects({"model": model})
    model(torch.randn(4, 2))
    kept.commit(StateVersion(1, 0))
    wanted = {name: each.clone() for name, each in model.named_buffers()}
    model(torch.randn(4, 2))
    kept.rest()
    assert all(torch.equal(each, wanted[name]) for name, each in model.named_buffers())


@pytest.mark.parametrize("sizes", [(24, 5), (2, 4), (8, 0)])
def test_micro_batches_fill_the_global_batch(sizes: tuple[int, int]) -> None:
    with pytest.raises(BslError):
        Survivor(global_batch=sizes[0], micro_batch=sizes[1])


def test_a_program_whose_ranks_do_not_stay_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BSL_GENERATION", "0")
    with pytest.raises(BslError):
        Survivor(global_batch=2, micro_batch=1).run(lambda _: None)
