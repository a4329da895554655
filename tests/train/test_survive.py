"""`survive`: ranks are lost in all kinds of ways, and the run continues with the same numbers."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bigsci_launch.checkpoints.folder import CheckpointsDir, digests_path
from bigsci_launch.cli.main import bsl
from bigsci_launch.file_names import checkpoint_tag
from bigsci_launch.runs.layout import RunDir
from tests.support.ports import find_port
from tests.support.texts import has_parts

from .conftest import Attempt, Start, losses
from .generations import Generations
from .rank_processes import StartRank
from .test_micro_batch_auto import START, Shortage, remember, run_at
from .test_micro_batch_auto import sections as short_of_memory

pytestmark = pytest.mark.torch

STEPS = 12
BF16: dict[str, Any] = {
    "model": {"dropout": 0.1},
    "training": {"steps": STEPS, "precision": "bf16"},
    "checkpoint": {"save_interval": 6},
    "monitor": {"eval_interval": 4},
}
Lead = Callable[..., Generations]


def data_of(dataset: Path) -> dict[str, Any]:
    return {"prefix": str(dataset), "held_out": 0.1}


@pytest.fixture
def lead(start_rank: StartRank, dataset: Path, tmp_path: Path) -> Iterator[Lead]:
    """`lead("pp=2,dp=2", {1: "optimizer:3:die"}, training={...})` begins a run; see `programs/slot.py`."""
    led: list[Generations] = []

    def begin(
        topology: str,
        suffering: Mapping[int, str] | None = None,
        nodes: Sequence[str] | None = None,
        **sections: Any,
    ) -> Generations:
        sections["data"] = data_of(dataset)
        found = Generations(start_rank, tmp_path / f"led{len(led)}", dataset, topology, **sections)
        led.append(found)
        found.start(found.topology.world_size, suffering)
        found.begin(nodes=nodes)
        return found

    yield begin
    for each in led:
        each.close()


@pytest.fixture(scope="module")
def undisturbed(finish: Start, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Attempt:
    return finish(tmp_path_factory.mktemp("undisturbed") / "run", "pp=2,dp=2", **BF16, data=data_of(dataset))


def require_same(run: Generations, undisturbed: Attempt, step: int = STEPS) -> None:
    """Check that losses, samples, evaluations and the whole last checkpoint are those of the undisturbed run."""
    attempt = run.attempt
    assert losses(attempt) == losses(undisturbed), run.story()
    assert consumed(attempt) == consumed(undisturbed)
    assert evaluations(attempt) == evaluations(undisturbed)
    saved, wanted = (each.run.checkpoints / checkpoint_tag(step) for each in (attempt, undisturbed))
    compared = CliRunner().invoke(bsl, ["diff-weights", str(saved), str(wanted)])
    assert compared.exit_code == 0, compared.output
    for rank in range(len(attempt.processes)):
        found, expected = (json.loads(digests_path(folder, rank).read_text()) for folder in (saved, wanted))
        for key in ("tensors", "optimizer", "random"):
            assert found[key] == expected[key], (rank, key)


def consumed(attempt: Attempt) -> dict[int, int]:
    return {step: record["consumed_samples"] for step, record in attempt.steps().items()}


def evaluations(attempt: Attempt) -> dict[int, str]:
    ranks = range(len(attempt.processes))
    found = [record for rank in ranks for record in attempt.events(rank, "evaluation")]
    return {record["step"]: record["loss_hex"] for record in found}


def test_killed_ranks_are_replaced_and_nothing_else_changes(lead: Lead, undisturbed: Attempt) -> None:
    run = lead("pp=2,dp=2", {3: "optimizer:8:die"}, **BF16)
    run.lead({0: "words:4:leave"})
    assert (run.number, run.stuck) == (2, [])
    require_same(run, undisturbed)


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "fate",
    [
        *("step:1:die", "optimizer:1:die", "words:1:die", "step:5:die", "optimizer:10:die", "optimizer:11:die"),
        *("words:5:die", "copy:3:die", "save:1:die", "save:2:die", "commit:1:die", "evaluation:1:die"),
        *("words:6:raise", "optimizer:9:exit", "optimizer:9:leave", "joining:1:die", "meeting:1:die"),
    ],
)
def test_any_rank_may_be_lost_at_any_moment(fate: str, rank: int, lead: Lead, undisturbed: Attempt) -> None:
    run = lead("pp=2,dp=2", {rank: fate}, **BF16)
    run.lead()
    assert run.number >= 1, run.story()
    assert not run.stuck, run.story()
    require_same(run, undisturbed)


@pytest.mark.long  # test_background_saves.py loses a rank in such a save without `survive`
@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("fate", ["save:1:die", "part:1:die", "step:7:die"])
def test_a_rank_may_be_lost_while_it_saves_in_the_background(
    fate: str, rank: int, lead: Lead, undisturbed: Attempt
) -> None:
    run = lead("pp=2,dp=2", {rank: fate}, **{**BF16, "checkpoint": {"save_interval": 6, "background": True}})
    run.lead()
    assert run.number >= 1 and not run.stuck, run.story()
    require_same(run, undisturbed)
    assert not CheckpointsDir(run.run.checkpoints).stagings()


@pytest.mark.parametrize("rank", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_rank_may_be_lost_while_its_gradients_are_on_their_way(rank: int, lead: Lead, undisturbed: Attempt) -> None:
    run = lead("pp=2,dp=2", {rank: "sent:5:die"}, **{**BF16, "parallelism": {"overlap": ["data"]}})
    run.lead()
    assert run.number >= 1 and not run.stuck, run.story()
    require_same(run, undisturbed)


@pytest.mark.long
@pytest.mark.parametrize("second", ["joining:1:die", "meeting:1:die", "fetching:1:die", "restored:1:die", "step:1:die"])
@pytest.mark.parametrize("rank", [0, 3])
def test_a_second_rank_may_be_lost_during_recovery(second: str, rank: int, lead: Lead, undisturbed: Attempt) -> None:
    run = lead("pp=2,dp=2", {rank: "optimizer:9:die"}, **BF16)
    run.lead({0: second})
    assert run.number == 2, run.story()
    require_same(run, undisturbed)


def restored(run: Generations) -> list[dict[str, Any]]:
    """What the ranks of the present generation have said of the state they began with."""
    return [word for slot in run.members for word in slot.said("restored", run.number)]


def test_a_lost_pair_of_buddies_costs_the_steps_since_the_checkpoint(lead: Lead, undisturbed: Attempt) -> None:
    run = lead("pp=2,dp=2", **BF16)
    run.until_step(8)
    run.kill(2, 3)
    run.lead()
    assert run.number == 1
    for word in restored(run):
        assert (word["source"], word["step"]) == ("checkpoint", 6)
        assert word["path"].endswith(checkpoint_tag(6))
        assert has_parts(word["why"], "no rank holds", "decay of pp1 tp0")
    require_same(run, undisturbed)


@pytest.mark.long
def test_without_a_checkpoint_a_lost_pair_begins_again(lead: Lead, undisturbed: Attempt) -> None:
    run = lead("pp=2,dp=2", **{**BF16, "checkpoint": {"save_interval": STEPS}})
    run.until_step(4)
    run.kill(0, 1)
    run.lead()
    assert {(word["source"], word["step"], word["path"]) for word in restored(run)} == {("start", 0, None)}
    assert all(word["why"] for word in restored(run))
    assert losses(run.attempt) == losses(undisturbed)


@pytest.mark.long
def test_buddies_on_other_nodes_survive_the_loss_of_a_node(lead: Lead, undisturbed: Attempt) -> None:
    run = lead("pp=2,dp=2", nodes=["n0", "n0", "n1", "n1"], **BF16)
    run.until_step(8)
    run.kill(2, 3)
    run.lead()
    assert {word["source"] for word in restored(run)} == {"memory", "buddies"}
    require_same(run, undisturbed)


FP32: dict[str, Any] = {"training": {"steps": STEPS}, "checkpoint": {"save_interval": 6}}


@pytest.mark.long
@pytest.mark.parametrize("topology", ["pp=2,dp=2", "tp=2,dp=2", "pp=2,dp=3"])
def test_fewer_and_more_replicas_train_on_as_closely_as_floating_point_allows(
    topology: str, lead: Lead, finish: Start, dataset: Path, tmp_path: Path
) -> None:
    sizes = {"training": {"steps": STEPS, "global_batch_size": 12}, "checkpoint": {"save_interval": 6}}
    straight = finish(tmp_path / "straight", topology, **sizes, data=data_of(dataset))
    run = lead(topology, **sizes)
    run.until_step(3)
    run.kill(1)
    less = topology.replace("dp=2", "dp=1").replace("dp=3", "dp=2")
    run.end()
    run.begin(less)
    run.until_step(8)
    assert {word["source"] for word in restored(run)} <= {"memory", "buddies"}
    run.end()
    run.start(run.topology.world_size + 2 - len(run.slots))
    run.begin(topology)
    run.lead()
    assert {word["source"] for word in restored(run)} <= {"memory", "buddies"}
    found, wanted = losses(run.attempt), losses(straight)
    assert found.keys() == wanted.keys()
    assert consumed(run.attempt) == consumed(straight)
    for step, value in wanted.items():
        assert float.fromhex(found[step]) == pytest.approx(float.fromhex(value), rel=1e-6), step


@pytest.mark.long
def test_fewer_replicas_cannot_load_a_checkpoint_of_more_and_say_what_to_do(lead: Lead) -> None:
    run = lead("pp=2,dp=2", **FP32)
    run.until_step(8)
    run.kill(2, 3)
    run.end()
    run.begin("pp=2,dp=1")
    codes = run.finish()
    assert codes == [4, 4], run.story()
    for slot in run.members:
        (word,) = slot.said("final")
        assert has_parts(word["text"], "no rank holds", "decay of pp1 tp0")
        assert "bsl checkpoint convert" in slot.log.read_text()


@pytest.mark.long
def test_a_rank_that_does_not_leave_is_killed_and_its_state_comes_from_its_buddy(
    lead: Lead, undisturbed: Attempt
) -> None:
    run = lead("pp=2,dp=2", {1: "optimizer:9:stop"}, **BF16)
    run.until(lambda: Path(f"/proc/{run.rank(1).process.pid}/stat").read_text().split(")")[1].split()[0] == "T")
    assert run.end() == [1]
    run.start(1)
    run.begin()
    run.lead()
    require_same(run, undisturbed)


@pytest.mark.long
def test_an_error_of_the_run_itself_is_final(lead: Lead) -> None:
    run = lead("pp=2,dp=2", **BF16, faults=[{"kind": "tied_norm", "step": 1}])
    codes = run.finish()
    assert all(code > 1 for code in codes), run.story()
    assert all(slot.said("final") for slot in run.members)


@pytest.mark.long
def test_copies_that_differ_are_not_restored(lead: Lead, undisturbed: Attempt) -> None:
    run = lead("pp=2,dp=2", {1: "manifest:2:damage"}, **BF16)
    run.until_step(8)
    run.kill(3)
    run.lead()
    for word in restored(run):
        assert (word["source"], word["step"]) == ("checkpoint", 6)
        assert has_parts(word["why"], "copies", "decay of pp0 tp0")
    require_same(run, undisturbed)


RAMP = {"global_batch_size": 24, "rampup": {"start": 8, "increment": 8, "samples": 60}}


@pytest.mark.long
@pytest.mark.parametrize(
    ("topology", "fate"),
    [
        *(("tp=2,pp=2,dp=2", {5: "optimizer:5:die"}), ("dp=4", {2: "words:7:die"}), ("pp=3", {1: "step:6:die"})),
        *(("tp=2", {1: "optimizer:4:raise"}), ("tp=2,dp=2", {0: "optimizer:1:die", 3: "optimizer:1:die"})),
    ],
)
def test_other_topologies_and_a_ramp_of_the_batch_size(
    topology: str, fate: Mapping[int, str], lead: Lead, finish: Start, dataset: Path, tmp_path: Path
) -> None:
    sections = {**BF16, "training": {**BF16["training"], **RAMP}}
    straight = finish(tmp_path / "straight", topology, **sections, data=data_of(dataset))
    run = lead(topology, fate, **sections)
    run.lead()
    require_same(run, straight)


@pytest.mark.long
def test_a_process_does_not_grow_with_the_generations(lead: Lead) -> None:
    """An engine that is not freed keeps its groups, each with a thread and sockets, and the memory of the device."""
    run = lead("pp=2,dp=2", **{**BF16, "training": {**BF16["training"], "steps": 1000}})
    sizes = []
    for _ in range(4):
        run.until(lambda: bool(run.rank(1).said("stepped", run.number)))
        process = Path(f"/proc/{run.rank(1).process.pid}")
        status = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
        sizes.append((int(status["Threads"]), len(list((process / "fd").iterdir()))))
        run.replace(2)
    assert len({threads for threads, _ in sizes[1:]}) == 1, sizes
    assert len({files for _, files in sizes[1:]}) == 1, sizes


@pytest.mark.long
def test_snapshots_may_be_further_apart(lead: Lead, undisturbed: Attempt) -> None:
    run = lead("pp=2,dp=2", {1: "optimizer:9:die"}, **BF16, survive={"snapshot_steps": 3})
    run.lead()
    assert {word["step"] for word in restored(run)} == {6}
    require_same(run, undisturbed)


@pytest.mark.long
def test_a_rank_ends_with_its_agent(lead: Lead) -> None:
    run = lead("pp=2,dp=2", **BF16)
    run.until_step(2)
    run.rank(1).hang_up()
    assert run.rank(1).process.wait(180) == 1
    run.start(1)
    spare = run.slots[-1]
    run.until(lambda: bool(spare.said("warm")))
    spare.hang_up()
    assert spare.process.wait(180) == 1


def test_what_gloo_forgets_to_fail_is_given_up(start_rank: StartRank, tmp_path: Path) -> None:
    """Half of a message was on its way when its receiver died: gloo alone waits for its time-out."""
    assert "GivenUpError" in outcome(start_rank, tmp_path, "message")


@pytest.mark.long
def test_a_collective_whose_peer_died_half_way_ends(start_rank: StartRank, tmp_path: Path) -> None:
    assert "Error after" in outcome(start_rank, tmp_path, "collective")


def outcome(start_rank: StartRank, folder: Path, kind: str) -> str:
    program = [str(Path(__file__).parent / "programs" / "forgotten_wait.py"), kind]
    port = find_port()
    both = [
        start_rank(
            program,
            {**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
            folder / f"{rank}.log",
        )
        for rank in range(2)
    ]
    try:
        assert both[0].wait(180) == 0, (folder / "0.log").read_text()
    finally:
        for process in both:
            process.kill()
    return (folder / "0.log").read_text()


@pytest.mark.parametrize(
    ("place", "fate"),
    [
        ("optimizer", {}),
        pytest.param("gather", {}, marks=pytest.mark.long),
        pytest.param("norm", {}, marks=pytest.mark.long),
        pytest.param("backward", {3: "optimizer:3:die"}, marks=pytest.mark.long),
        pytest.param("forward", {0: "step:3:die"}, marks=pytest.mark.long),
        pytest.param("backward", {1: "finishing:1:memory"}, marks=pytest.mark.long),
    ],
)
def test_micro_batches_get_smaller_in_a_run_that_survives(
    place: str, fate: Mapping[int, str], lead: Lead, finish: Start, dataset: Path, tmp_path: Path
) -> None:
    """Where peers cannot be told of a shortage, the next generation takes a smaller size; and ranks may die as well."""
    topology, sections = "pp=2,dp=2", short_of_memory(Shortage(place, 1), precision="bf16")
    remember(RunDir(tmp_path / "led0"), topology, dataset, sections)
    run = lead(topology, fate, **sections)
    run.lead()
    assert run.number >= 1, run.story()
    used = {number: step["micro_batch_size"] for number, step in run.attempt.steps().items()}
    assert (used[1], used[4]) == (START, 1), used
    history = [(number - 1, size) for number, size in used.items() if used.get(number - 1) != size]
    attempts = run_at(history, "bf16")
    fixed = [finish(tmp_path / "fixed", topology, **{**each, "data": data_of(dataset)}) for _, each in attempts]
    assert losses(run.attempt) == {step: loss for each in fixed for step, loss in losses(each).items()}
