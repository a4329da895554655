"""`Survivor`: a plain loop loses ranks, and continues with the same numbers."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d

from bigsci_launch.errors import BslError
from bigsci_launch.recover.holding import StateVersion
from bigsci_launch.train.survive.forget import forget_groups
from bigsci_launch.train.survive.objects import KeptObjects
from bigsci_launch.train.survivor import Survivor
from tests.support.texts import has_parts

from .generations import Generations
from .rank_processes import StartRank

pytestmark = pytest.mark.torch

ROOT = Path(__file__).parents[2]
LOOPS = ROOT / "benchmarks" / "surviving"
STEPS = 40
Lead = Callable[..., Generations]


@pytest.fixture(scope="module")
def lead(start_rank: StartRank, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lead]:
    """`lead({1: "loop-step:4:die"})` begins the example on three ranks; see `programs/slot.py`."""
    led: list[Generations] = []

    def begin(suffering: Mapping[int, str] | None = None) -> Generations:
        found = Generations(start_rank, tmp_path_factory.mktemp("led"), dataset, "dp=3")
        led.append(found)
        found.start(3, suffering)
        found.begin()
        return found

    os.environ["LOOP"] = str(LOOPS / "ddp.py")
    yield begin
    del os.environ["LOOP"]
    for each in led:
        each.close()


@pytest.fixture(scope="module")
def undisturbed(lead: Lead) -> dict[int, float]:
    run = lead()
    run.lead()
    return losses(run)


def losses(run: Generations) -> dict[int, float]:
    """Return the loss of each step, as whoever was rank 0 has printed it, and check that none was done twice."""
    logs = "\n".join(path.read_text() for path in run.folder.path.glob("p*.log"))
    printed = [(int(step), float(loss)) for step, loss in re.findall(r"^step (\d+) loss (\S+)$", logs, re.MULTILINE)]
    assert sorted(step for step, _ in printed) == list(range(1, STEPS + 1)), run.story()
    return dict(printed)


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
    run.begin("dp=2")
    run.until(lambda: run.step() > 0)
    run.start(1)
    run.end()
    run.begin("dp=3")
    run.lead()
    assert losses(run) == pytest.approx(undisturbed, rel=1e-5), run.story()
    worlds = [record["topology"]["dp"] for record in run.attempt.events(0, "generation")]
    assert worlds == [3, 2, 3]
    assert {source for _, source in restored(run)[1:]} <= {"memory", "replicas"}


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


def test_the_example_changes_fifteen_lines_at_most() -> None:
    plain, surviving = ((LOOPS / name).read_text().splitlines() for name in ("plain.py", "ddp.py"))
    changed = [line for line in difflib.ndiff(plain, surviving) if line.startswith("+ ") and line[2:].strip()]
    assert len(changed) <= 15, "\n".join(changed)
    assert (LOOPS / "ddp.py").read_text() in (ROOT / "docs" / "how-to" / "survivor.md").read_text()


class Sharded(nn.Module):
    """As DeepSpeed's ZeRO marks parameters that are cut."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.weight.ds_id = 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("wrong", [Sharded(), torch.optim.SGD(Sharded().parameters()), object()])
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
