"""`training.micro_batch_size: auto` on real ranks: whichever rank runs out of memory, and wherever, all ranks take a
smaller size together, and train on the same samples as a run that was started with it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from bigsci_launch.checkpoints.folder import digests_path
from bigsci_launch.checkpoints.found_size import FoundSize, read_found_size, write_found_size
from bigsci_launch.file_names import checkpoint_tag
from bigsci_launch.runs.layout import RunDir
from bigsci_launch.topology import Topology
from bigsci_launch.train.microbatch.automatic import fingerprint
from tests.support.texts import has_parts

from .conftest import Attempt, Scenario, Start, make_config

pytestmark = pytest.mark.torch

STEPS = 4
LATE = 3
START = 4
"""The largest size that fits at first, so that a step has several micro-batches."""
LIMIT_S = 5.0
"""How long a step may take in which a rank runs out of memory, with everything that is tried and done again."""
Train = Callable[..., dict[str, Attempt]]


@dataclass(frozen=True)
class Shortage:
    """A rank that runs out of memory at a place, from a step on, with micro-batches above a size."""

    place: str
    rank: int
    step: int = LATE
    above: int = 1
    call: int = 1

    @property
    def name(self) -> str:
        return f"{self.place}-{self.rank}-{self.step}"

    @property
    def fault(self) -> dict[str, Any]:
        return {"kind": "out_of_memory", **vars(self)}


def sections(*shortages: Shortage, precision: str = "fp32", **more: Any) -> dict[str, Any]:
    return {
        "model": {"dropout": 0.1},
        "training": {"steps": STEPS, "micro_batch_size": "auto", "precision": precision, **more.pop("training", {})},
        "checkpoint": {"save_interval": STEPS},
        "guards": {"interval": 2},
        "faults": [each.fault for each in shortages],
        **more,
    }


def found(attempt: Attempt) -> FoundSize:
    size = read_found_size(attempt.run)
    assert size is not None
    return size


def sizes(attempt: Attempt) -> tuple[tuple[int, int], ...]:
    """Return after which steps the run has taken which sizes."""
    changes = dict[int, int]()
    for each in found(attempt).history:
        changes[each.step] = each.size
    return tuple(changes.items())


def run_at(history: Sequence[tuple[int, int]], precision: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the attempts of a run that had these sizes from the beginning, as the run file says."""
    ends = [step for step, _ in history[1:]] + [None]
    attempts = []
    for (start, size), end in zip(history, ends, strict=True):
        training = {"micro_batch_size": size, "stop_after_steps": None if end is None else end - start}
        attempts.append((name_of(history), sections(precision=precision, training=training)))
    return attempts


def name_of(history: Sequence[tuple[int, int]]) -> str:
    return "fixed-" + "-".join(f"{step}.{size}" for step, size in history)


def require_same(attempt: Attempt, fixed: Sequence[Attempt], steps: Sequence[int] = tuple(range(1, STEPS + 1))) -> None:
    """Check that losses, samples and the last checkpoint are those of the run with fixed sizes."""
    wanted_steps = {number: step for each in fixed for number, step in each.steps().items()}
    mine = attempt.steps()
    for key in ("loss_hex", "consumed_samples", "micro_batch_size"):
        assert [mine[number][key] for number in steps] == [wanted_steps[number][key] for number in steps], key
    saved, wanted = (each.run.checkpoints / checkpoint_tag(STEPS) for each in (attempt, fixed[-1]))
    for rank in range(len(attempt.processes)):
        mine, theirs = (json.loads(digests_path(folder, rank).read_text()) for folder in (saved, wanted))
        for key in ("tensors", "optimizer", "random"):
            assert mine[key] == theirs[key], (rank, key)


@pytest.fixture
def train_auto(train_several: Train, dataset: Path) -> Train:
    """Like `train_several`, but each run remembers to begin with `START`: what a search finds depends on the time."""

    def train(folder: Path, topology: str, scenarios: Sequence[Scenario], **more: Any) -> dict[str, Attempt]:
        for name, parts in scenarios:
            remember(RunDir(folder / name), topology, dataset, parts)
        return train_several(folder, topology, scenarios, **more)

    return train


def remember(run: RunDir, topology: str, dataset: Path, parts: dict[str, Any]) -> None:
    if not run.micro_batch.exists():
        shape = Topology.parse(topology)
        write_found_size(run, FoundSize(START, START, fingerprint(make_config(shape, dataset, parts), shape)))


def require_agreed(
    train_auto: Train, train_several: Train, folder: Path, topology: str, precision: str, cases: Sequence[Shortage]
) -> None:
    """Run all cases, and compare each with a run that had its sizes from the beginning."""
    named = [(each.name, sections(each, precision=precision)) for each in cases]
    attempts = train_auto(folder, topology, named)
    for each in cases:
        attempt = attempts[each.name]
        assert set(attempt.steps()) == set(range(1, STEPS + 1)), (each, attempt.error(0))
        assert sizes(attempt) == ((0, START), (each.step - 1, 1)), (each, found(attempt))
        assert max(step["seconds"] for step in attempt.steps().values()) < LIMIT_S, each
    histories = sorted({sizes(attempts[each.name]) for each in cases})
    scenarios = [one for each in histories for one in run_at(each, precision)]
    fixed = train_several(folder / "fixed", topology, scenarios)
    for each in cases:
        name = name_of(sizes(attempts[each.name]))
        require_same(attempts[each.name], [fixed[name], fixed[f"{name}+"]])


def test_all_ranks_agree_after_one_has_run_out_of_memory(
    train_auto: Train, train_several: Train, tmp_path: Path
) -> None:
    """In a pass, on the way between stages, and in a reduction; every place on every rank is in the long tier."""
    cases = [
        Shortage("collective", 1, call=4),
        Shortage("receive_gradient", 0),
        Shortage("tied_reduction", 3),
    ]
    require_agreed(train_auto, train_several, tmp_path, "tp=2,pp=2", "fp32", cases)


def test_all_replicas_agree(train_auto: Train, train_several: Train, tmp_path: Path) -> None:
    cases = [Shortage("reduction", 1, step=2), Shortage("accumulation", 0, step=2)]
    require_agreed(train_auto, train_several, tmp_path, "dp=2", "bf16", cases)


def everywhere(topology: str) -> list[Shortage]:
    """Return a shortage at every place of a step where a rank of the topology comes by, on every rank."""
    shape = Topology.parse(topology)
    cases = []
    for rank in range(shape.world_size):
        stage = shape.coordinate(rank).pp_rank
        is_first, is_last = stage == 0, stage == shape.pp - 1
        places = {
            **dict.fromkeys(("forward", "backward", "accumulation", "tied_reduction", "reduction"), True),
            "collective": shape.tp > 1,
            "load": is_first or is_last,
            "loss": is_last,
            "receive_activation": not is_first,
            "receive_gradient": not is_last,
        }
        cases += [Shortage(place, rank, call=1 + rank % 2) for place, comes_by in places.items() if comes_by]
    in_step = ("tied_reduction", "reduction")
    return [replace(each, call=1) if each.place in in_step else each for each in cases]


@pytest.mark.long
@pytest.mark.parametrize(
    ("topology", "precision"), [("tp=2,pp=2", "fp32"), ("pp=2,dp=2", "bf16"), ("pp=3", "bf16"), ("tp=2,dp=2", "fp32")]
)
def test_every_rank_may_run_out_at_every_place(
    topology: str, precision: str, train_auto: Train, train_several: Train, tmp_path: Path
) -> None:
    require_agreed(train_auto, train_several, tmp_path, topology, precision, everywhere(topology))


@pytest.mark.long
def test_every_one_of_eight_ranks_may_run_out_at_every_place(
    train_auto: Train, train_several: Train, tmp_path: Path
) -> None:
    cases = everywhere("tp=2,pp=2,dp=2")
    for first in range(0, len(cases), 12):
        part = cases[first : first + 12]
        require_agreed(train_auto, train_several, tmp_path / str(first), "tp=2,pp=2,dp=2", "bf16", part)


@pytest.mark.long
@pytest.mark.parametrize(
    "shortage",
    [
        pytest.param(Shortage("load", 1), id="before a forward pass whose collectives the peers have entered"),
        pytest.param(Shortage("receive_gradient", 1), id="before a backward pass"),
        pytest.param(Shortage("accumulation", 1), id="after the last collective of a backward pass"),
        pytest.param(
            Shortage("collective", 1, call=2), id="after the allocation for a collective, before the collective"
        ),
    ],
)
def test_the_four_deadlocks_of_automatic_micro_batches_elsewhere_do_not_occur(
    shortage: Shortage, train_auto: Train, train_several: Train, tmp_path: Path
) -> None:
    """Composer (pull request 3510) found these four in FSDP: one rank votes while its peers are in a collective."""
    require_agreed(train_auto, train_several, tmp_path, "tp=2,pp=2", "fp32", [shortage])


@pytest.mark.long
def test_two_ranks_may_run_out_in_different_places_of_one_step(
    train_auto: Train, train_several: Train, tmp_path: Path
) -> None:
    one, other = Shortage("forward", 1, call=3), Shortage("backward", 2)
    runs = train_auto(tmp_path, "tp=2,pp=2", [("run", sections(one, other))])
    history = sizes(runs["run"])
    assert history[-1] == (LATE - 1, 1)
    words = [each.words for each in found(runs["run"]).history]
    assert any("rank 1 in ForwardPass" in each and "rank 2 in BackwardPass" in each for each in words), words
    fixed = train_several(tmp_path / "fixed", "tp=2,pp=2", run_at(history, "fp32"))
    require_same(runs["run"], list(fixed.values()))


@pytest.mark.long
def test_eight_ranks_agree(train_auto: Train, train_several: Train, tmp_path: Path) -> None:
    cases = [Shortage("collective", 5, call=3), Shortage("backward", 6), Shortage("reduction", 2)]
    require_agreed(train_auto, train_several, tmp_path, "tp=2,pp=2,dp=2", "fp32", cases)


def test_an_evaluation_has_a_size_of_its_own(
    train_auto: Train, train_several: Train, tmp_path: Path, dataset: Path
) -> None:
    more = {"data": {"prefix": str(dataset), "held_out": 0.1}, "monitor": {"eval_interval": 2, "eval_batches": 2}}
    early, late = Shortage("evaluation", 3, step=1, above=2), Shortage("evaluation", 2, step=4, call=2)
    runs = train_auto(tmp_path, "tp=2,pp=2", [(each.name, sections(each, **more)) for each in (early, late)])
    fixed = train_several(
        tmp_path / "fixed", "tp=2,pp=2", [("run", sections(**more, training={"micro_batch_size": 2}))]
    )["run"]
    for shortage, size in ((early, 2), (late, 1)):
        attempt = runs[shortage.name]
        assert found(attempt).evaluation_size == size < found(attempt).size == START
        losses, wanted = ([each["loss"] for each in evaluations(run)] for run in (attempt, fixed))
        assert losses == pytest.approx(wanted, rel=1e-3)
        assert set(attempt.steps()) == set(range(1, STEPS + 1)), attempt.logs()


def evaluations(attempt: Attempt) -> list[dict[str, Any]]:
    return attempt.events(len(attempt.processes) - 1, "evaluation")


def test_a_file_of_a_checkpoint_is_written_again(train_several: Train, tmp_path: Path) -> None:
    runs = train_several(tmp_path, "pp=2,dp=2", [("run", sections(Shortage("save", 2, step=STEPS)))])
    assert runs["run"].events(2, "save")
    assert (runs["run"].run.checkpoints / checkpoint_tag(STEPS) / "checkpoint.json").is_file()


def test_the_size_is_remembered_until_its_fingerprint_changes(train_several: Train, tmp_path: Path) -> None:
    half = sections(training={"stop_after_steps": 2})
    again = sections()
    runs = train_several(tmp_path, "tp=2,pp=2", [("run", half), ("run", again)])
    history = found(runs["run"]).history
    assert [each.why for each in history] == ["found", "remembered"]
    assert len(runs["run+"].events(0, "trial")) == 1
    fixed = train_several(
        tmp_path / "fixed", "tp=2,pp=2", [("run", sections(training={"micro_batch_size": history[0].size}))]
    )
    require_same(runs["run+"], [fixed["run"]], steps=(3, 4))
    other = {"steps": STEPS + 1, "activation_checkpointing": True}
    runs = train_several(tmp_path, "tp=2,pp=2", [("run", sections(training=other))])
    assert found(runs["run"]).history[-1].why == "found"


@pytest.mark.long
def test_a_ramp_has_whole_micro_batches(train_several: Train, tmp_path: Path) -> None:
    ramp = {"rampup": {"start": 4, "increment": 4, "samples": 24}}
    runs = train_several(tmp_path, "pp=2,dp=2", [("run", sections(training=ramp))])
    size = found(runs["run"]).size
    assert size in (1, 2)
    fixed = train_several(
        tmp_path / "fixed", "pp=2,dp=2", [("run", sections(training={**ramp, "micro_batch_size": size}))]
    )
    require_same(runs["run"], [fixed["run"]])


def test_a_rank_that_thrashes_for_two_steps_gets_smaller_micro_batches_and_no_step_is_done_twice(
    train_auto: Train, train_several: Train, tmp_path: Path
) -> None:
    runs = train_auto(tmp_path, "tp=2,pp=2", [("run", sections())], module="thrashing")
    assert [(each.step, each.size, each.why) for each in found(runs["run"]).history] == [
        (0, START, "remembered"),
        (2, 2, "thrash"),
    ]
    fixed = train_several(tmp_path / "fixed", "tp=2,pp=2", run_at(sizes(runs["run"]), "fp32"))
    require_same(runs["run"], list(fixed.values()))


@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.long), LATE])
def test_where_nothing_fits_every_rank_says_so(step: int, train_several: Train, tmp_path: Path) -> None:
    runs = train_several(tmp_path, "tp=2,pp=2", [("run", sections(Shortage("backward", 1, step=step, above=0)))])
    errors = [runs["run"].error(rank) for rank in range(4)]
    for error in errors:
        assert error is not None
        assert error["type"] == "MemoryShortageError"
        assert has_parts(error["message"], "not even 1", "rank 1 in BackwardPass", "expected to need")
    assert not any(each.startswith("global_step") for each in map(str, runs["run"].run.checkpoints.glob("*")))


@pytest.mark.long
def test_a_first_step_that_one_rank_cannot_apply_leaves_nothing_behind(
    start: Start, finish: Start, tmp_path: Path, dataset: Path
) -> None:
    """Composer's optimizer allocates its moments in the first step; ranks then trained on from unequal weights."""
    first = sections(Shortage("optimizer", 2, step=1))
    remember(RunDir(tmp_path / "run"), "pp=2,dp=2", dataset, first)
    for size in (2, 1):
        attempt = start(tmp_path / "run", "pp=2,dp=2", **first)
        assert all(attempt.wait(180))
        assert found(attempt).size == size
        assert not attempt.run.checkpoints.exists()
    run = finish(tmp_path / "run", "pp=2,dp=2", **first)
    fixed = finish(tmp_path / "fixed", "pp=2,dp=2", **sections(training={"micro_batch_size": 1}))
    require_same(run, [fixed])


@pytest.mark.parametrize(
    "place",
    [pytest.param("norm", marks=pytest.mark.long), "optimizer", pytest.param("gather", marks=pytest.mark.long)],
)
def test_what_cannot_be_discarded_ends_the_attempt_and_the_next_one_takes_a_smaller_size(
    place: str, start: Start, tmp_path: Path, dataset: Path
) -> None:
    late = sections(Shortage(place, 2))
    late["checkpoint"] = {"save_interval": 2}
    remember(RunDir(tmp_path / "run"), "pp=2,dp=2", dataset, late)
    attempt, ended = start(tmp_path / "run", "pp=2,dp=2", **late), 0
    while any(attempt.wait(180)):
        error, (*_, before) = attempt.error(2), attempt.events(0, "micro_batch")
        assert error is not None
        assert (error["type"], error["step"]) == ("OutOfMemoryError", LATE), error["traceback"]
        smaller = found(attempt).size
        assert f"of {smaller}, not {before['size']}" in error["message"]
        attempt, ended = start(tmp_path / "run", "pp=2,dp=2", **late), ended + 1
    assert ended == 2, "4 -> 2 -> 1"
    assert [step["micro_batch_size"] for step in attempt.steps().values()] == [1, 1], "it continues after step 2"


def test_an_engine_that_does_not_fit_says_what_it_needs(start: Start, tmp_path: Path) -> None:
    attempt = start(tmp_path / "run", "dp=2", **sections(Shortage("build", 1)))
    assert attempt.processes[1].wait(180)
    error = attempt.error(1)
    assert error is not None
    assert "expected to need" in error["message"]
