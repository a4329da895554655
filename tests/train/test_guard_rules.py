"""Each guard fires at its defect: rules on plain tensors, and checks on real ranks just after something broke."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("deepspeed")
pytestmark = pytest.mark.torch

from torch import nn  # noqa: E402

from bigsci_launch.config.schema.run import OptimizerSection  # noqa: E402
from bigsci_launch.runs.attempts import JobRecord, write_job  # noqa: E402
from bigsci_launch.runs.ending.reason import SeenEnd, describe  # noqa: E402
from bigsci_launch.runs.layout import write_json  # noqa: E402
from bigsci_launch.topology import Topology  # noqa: E402
from tests.support.texts import CheckText, has_parts  # noqa: E402
from tests.support.tiers import with_long  # noqa: E402

OPTIMIZER = OptimizerSection(betas=[0.9, 0.95], epsilon=1e-8, weight_decay=0.1)


def masters(dtype: Any) -> list[Any]:
    from bigsci_launch.train.guards.engine.state import OptimizerPartition

    master = torch.linspace(-1, 1, 12)
    return [OptimizerPartition("decay", master.to(dtype, copy=True), master, {"one": (0, 4), "two": (4, 6)})]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_weights_must_be_their_rounded_masters(dtype: Any) -> None:
    from bigsci_launch.train.guards.engine.state import find_masters_apart

    assert list(find_masters_apart(masters(dtype), 3)) == []
    parts = masters(dtype)
    parts[0].weights.view(torch.int32 if dtype == torch.float32 else torch.int16)[5] ^= 1
    (found,) = find_masters_apart(parts, 3)
    assert (found.check, found.tensor, found.ranks) == ("masters", "two", (3,))
    assert found.text.startswith("1 of 6 ")


def test_the_norm_that_clips_must_be_the_independent_one() -> None:
    from bigsci_launch.train.guards.engine.gradients import find_wrong_norm

    assert list(find_wrong_norm(1.0, 1.00005, 0)) == []
    assert list(find_wrong_norm(float("inf"), float("nan"), 0)) == []
    # Under pipeline parallelism DeepSpeed's fp32 norm counts the tied gradient twice: 7 % too much.
    for used in (1.0712, 0.9, float("nan"), float("inf")):
        (found,) = find_wrong_norm(1.0, used, 2)
        assert (found.check, found.ranks) == ("gradient norm", (2,))
        assert has_parts(found.text, f"{used:.6g}") and found.text.endswith(" 1")


def test_what_32_bits_lose_in_summing_is_no_violation() -> None:
    """On a CPU torch sums almost sequentially, so the sum over 4 M gradients of 1e-3 is 0.3 % off."""
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer

    from bigsci_launch.train.guards.engine.gradients import find_wrong_norm, lost_in_summing

    gradient = torch.full((1 << 22,), 1e-3)
    exact = float(torch.linalg.vector_norm(gradient, dtype=torch.float64))
    used = float(gradient.norm())
    optimizer = BF16_Optimizer.__new__(BF16_Optimizer)
    optimizer.get_grads_for_norm = lambda: ([gradient], {})
    lost = lost_in_summing(optimizer)
    assert lost == pytest.approx(abs(exact**2 - used**2))
    assert list(find_wrong_norm(exact, used, 0)) or used == pytest.approx(exact, rel=1e-4)
    assert list(find_wrong_norm(exact, used, 0, lost / (2 * exact))) == []
    assert list(find_wrong_norm(exact, 1.01 * exact, 0, 1e-3 * exact))


def grouped(**changes: Any) -> tuple[nn.Module, Any]:
    """Return a matrix and a bias in their right groups, with `changes` to the settings of a group."""
    module = nn.Linear(3, 2)
    settings = {"name": "decay", "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-8}
    decay, rest = {**settings, **changes}, {**settings, "name": "no_decay", "weight_decay": 0.0}
    return module, SimpleNamespace(param_groups=[decay, rest], bit16_groups=[[module.weight], [module.bias]])


def group_findings(module: nn.Module, optimizer: Any) -> list[tuple[str, str]]:
    from bigsci_launch.train.guards.engine.state import find_wrong_groups

    return [(found.tensor, found.text) for found in find_wrong_groups(module, optimizer, OPTIMIZER, 0)]


def test_every_parameter_must_be_in_its_group_with_its_settings(check_text: CheckText) -> None:
    assert group_findings(*grouped()) == []
    module, optimizer = grouped()
    optimizer.bit16_groups[1] = []
    changes: tuple[dict[str, Any], ...] = ({"weight_decay": 0.0}, {"betas": (0.9, 0.5)}, {"eps": 1e-6})
    wrong = [*(grouped(**change) for change in changes), (module, optimizer)]
    check_text(*(f"{tensor}: {text}" for each in wrong for tensor, text in group_findings(*each)))
    module, optimizer = grouped()
    optimizer.bit16_groups.reverse()
    assert [tensor for tensor, _ in group_findings(module, optimizer)] == ["bias", "weight"]


def test_a_load_must_bring_back_what_was_saved(check_text: CheckText) -> None:
    from bigsci_launch.train.guards.engine.state import find_wrong_load

    saved: dict[str, Any] = {
        "tensors": {"a": ["F32", [1], "11"]},
        "optimizer": {"decay.master": "22", "decay.step": 3},
        "random": "33",
    }
    assert list(find_wrong_load(saved, {**saved, "step": 3, "random_device": "44"}, 1)) == []
    assert list(find_wrong_load({**saved, "random_device": "44"}, saved, 1)) == []

    changes: tuple[dict[str, Any], ...] = (
        {"tensors": {"a": ["F32", [1], "12"]}},
        {"tensors": {}},
        {"tensors": {**saved["tensors"], "b": []}},
        {"optimizer": {**saved["optimizer"], "decay.step": 0}},
        {"optimizer": {**saved["optimizer"], "decay.master": "0"}},
        {"random": "34"},
    )
    found = [each for change in changes for each in find_wrong_load(saved, {**saved, **change}, 1)]
    check_text(*(f"{each.tensor}: {each.text}" for each in found))


def test_copies_are_known_by_what_they_are() -> None:
    from bigsci_launch.train.guards.engine.state import watched_weights
    from bigsci_launch.train.guards.places import Places

    module = nn.Module()
    module.tied_modules = nn.ModuleDict({"embedding": nn.Linear(2, 2, bias=False)})
    module.tied_modules["embedding"].weight.model_parallel = True
    module.norm = nn.LayerNorm(2)
    found = watched_weights(module, Places.of_topology(Topology(tp=2, pp=2, dp=2), 5))
    tp, pp, dp = ("tp", (4, 5)), ("pp", (1, 5)), ("dp", (5, 7))
    assert {watched.name: watched.copies for watched in found} == {
        "tied_modules.embedding.weight": (dp, pp),
        "norm.weight": (dp, tp),
        "norm.bias": (dp, tp),
    }


@pytest.fixture(scope="module")
def broken(train_several: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Runs on two replicas, each broken just before the guards check step 3."""

    scenarios = [
        scenario("healthy", 1),
        scenario("weight", 1),
        scenario("master", 1),
        scenario("norm", 1),
        # Steps 3 and 4 are not checked; the check before the save after step 3 stops it.
        scenario("weight-before-a-save", 100, stop_after_steps=3),
        scenario("settings-before-a-save", 100, stop_after_steps=3),
    ]
    return train_several(tmp_path_factory.mktemp("broken"), "dp=2", scenarios, "broken_at_check")


def scenario(name: str, interval: int, **training: Any) -> tuple[str, dict[str, Any]]:
    sections = {"run": {"name": name}, "training": {"steps": 5, "precision": "bf16", **training}}
    return name, {**sections, "guards": {"interval": interval}}


def ended(attempt: Any, world_size: int) -> dict[str, Any]:
    """Record why an attempt ended, as the job script does, and return what `bsl status --json` says of it."""
    write_json(attempt.run.record, {"name": attempt.run.path.name, "topology": {"dp": world_size}})
    write_job(attempt.folder, JobRecord("slurm", 10.0, job_id="1", total_steps=5))
    write_json(attempt.folder.exit, describe(SeenEnd(attempt.folder, world_size, 10.0, exit_code=1)))
    argv = [sys.executable, "-m", "bigsci_launch", "status", str(attempt.run.path), "--json"]
    found: dict[str, Any] = json.loads(subprocess.run(argv, check=True, capture_output=True).stdout)
    return found


@pytest.fixture(scope="module")
def of_four(train_several: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Runs on four replicas, of which another one is broken in each."""
    scenarios = [scenario(f"weight-of-rank-{rank}", 1) for rank in range(4)]
    further = [f"weight-of-rank-{rank}" for rank in (0, 1, 3)]
    return train_several(tmp_path_factory.mktemp("four"), "dp=4", scenarios, "broken_at_check", further=further)


@pytest.mark.parametrize("rank", with_long(range(4), (0, 1, 3)))
def test_the_corrupt_one_of_four_replicas_is_accused_everywhere(rank: int, of_four: Any) -> None:
    attempt = of_four[f"weight-of-rank-{rank}"]
    errors = [attempt.error(each) for each in range(4)]
    assert {error["type"] for error in errors} == {"GuardError"}
    assert [error["accused"] for error in errors] == [[rank]] * 4
    (event, *_) = attempt.events(0, "guard")
    assert (event["check"], event["accused"]) == ("data-parallel copies", [rank])
    status = ended(attempt, 4)
    assert (status["exit"]["reason"], status["exit"]["first_failure"]["rank"]) == ("crashed", rank)


APART = "step 3: data-parallel copies: tied_modules.embedding.weight on ranks 0-1: "
FOUND = {
    "weight": APART,
    "master": "step 3: masters: ",
    "norm": "step 3: gradient norm: all gradients on ranks 0-1: ",
    "weight-before-a-save": APART,
    "settings-before-a-save": "step 3: optimizer groups: tied_modules.embedding.weight on ranks 0-1: betas ",
}


@pytest.mark.parametrize("name", FOUND)
def test_real_ranks_stop_at_the_look(broken: Any, name: str) -> None:
    assert broken["healthy"].error(0) is None
    for rank in (0, 1):
        error = broken[name].error(rank)
        assert error is not None and error["type"] == "GuardError", error
        assert error["message"].startswith(FOUND[name])
    if name == "master":
        assert "on rank 1 (dp1 pp0 tp0): 1 of " in broken[name].error(0)["message"]


def test_of_two_replicas_that_differ_none_is_accused(broken: Any) -> None:
    assert (broken["weight"].error(0)["accused"], broken["weight"].error(0)["suspects"]) == ([], [0, 1])
    found = ended(broken["weight"], 2)["exit"]
    assert (found["first_failure"], [each["rank"] for each in found["suspects"]]) == (None, [0, 1])
    assert ended(broken["master"], 2)["exit"]["first_failure"]["rank"] == 1


@pytest.mark.parametrize("name", ["weight-before-a-save", "settings-before-a-save"])
def test_nothing_is_saved_then(broken: Any, name: str) -> None:
    assert sorted(broken[name].steps()) == [1, 2, 3]
    assert not list(broken[name].run.checkpoints.glob("global_step*"))
