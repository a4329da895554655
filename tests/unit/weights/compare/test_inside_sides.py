"""What `bsl diff-weights A B` says about copies inside A and inside B, and about what a load lost some steps ago."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

TIED = "tied_modules.embed.weight"
STEP = 20


def write_dump(checkpoint: Any, folder: Path, save_arrays: Any) -> Path:
    """The 16-bit weights of every rank, as `bsl train` dumps them."""
    rank = 0
    for (pp, tp), params in checkpoint.state.items():
        for dp in range(checkpoint.dp):
            values = {name: roles["fp32"].bfloat16() for name, roles in params.items()}
            at = {"pp": str(pp), "tp": str(tp), "dp": str(dp)}
            save_arrays(folder / f"rank-{rank:04d}.safetensors", values, at)
            rank += 1
    return folder


def break_tied_copy(checkpoint: Any, *, gradients: str) -> None:
    """Let the last stage's copy drift, by gradients of its own or by the same ones, not clipped."""
    for (pp, tp), params in checkpoint.state.items():
        if pp == 1:
            roles = params[TIED]
            generator = torch.Generator().manual_seed(7 + tp)
            roles["fp32"] += 0.3
            if gradients == "own":
                roles["exp_avg"].normal_(generator=generator)
            else:
                roles["exp_avg"] *= 3 + torch.rand(roles["exp_avg"].shape, generator=generator)
                roles["exp_avg_sq"] *= 12


def break_replicas(checkpoint: Any) -> None:
    for (_, tp), params in checkpoint.state.items():
        for roles in (params.get("1.ln.weight"), params.get("2.ln.bias")):
            if tp == 1 and roles:
                roles["fp32"] += 0.5
                roles["exp_avg"].normal_(generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize(
    ("gradients", "pattern"),
    [("own", "tied copies apart: not reduced"), ("free", "tied copies apart: clipped on one side")],
)
def test_dumps_around_a_restart_name_the_cause_from_the_checkpoint_of_the_run(
    tmp_path: Path, tiny: Any, diff: Any, save_arrays: Any, check_text: Any, gradients: str, pattern: str
) -> None:
    first = tiny(step=STEP)
    break_tied_copy(first, gradients=gradients)
    a = write_dump(first, tmp_path / "run/dumps/step-000020-after", save_arrays)
    b = write_dump(tiny(step=STEP), tmp_path / "again/dumps/step-000021-before", save_arrays)
    assert "tied copies apart" in {finding["pattern"] for finding in diff(a, b, "--json").document["findings"]}
    first.write(tmp_path / "run/checkpoints")
    answer = diff(a, b, "--json")
    (both,) = [finding for finding in answer.document["findings"] if finding["pattern"] == pattern]
    assert both["tensors"] == [TIED] and {place["pp"] for place in both["coordinates"]} == {1}
    assert {entry["likely"] for entry in answer.document["different"]} == {pattern}
    alone = diff("--audit", a, "--json")
    (finding,) = alone.document["findings"]
    assert (alone.code, finding["pattern"]) == (1, pattern)
    check_text(both["claim"], finding["claim"])


def test_the_checkpoint_of_another_step_is_not_asked(tmp_path: Path, tiny: Any, diff: Any, save_arrays: Any) -> None:
    first = tiny(step=STEP)
    break_tied_copy(first, gradients="own")
    first.write(tmp_path / "run/checkpoints")
    a = write_dump(first, tmp_path / "run/dumps/step-000020-before", save_arrays)
    b = write_dump(tiny(step=STEP), tmp_path / "again/dumps/step-000020-before", save_arrays)
    assert {finding["pattern"] for finding in diff(a, b, "--json").document["findings"]} == {"tied copies apart"}


@pytest.mark.parametrize("layout", ["checkpoints", "dumps"])
def test_drift_over_tp_that_both_sides_share_is_told_and_no_difference(
    tmp_path: Path, tiny: Any, diff: Any, save_arrays: Any, check_text: Any, layout: str
) -> None:
    drifted = tiny(step=STEP)
    break_replicas(drifted)
    for side in "ab":
        if layout == "dumps":
            write_dump(drifted, tmp_path / side, save_arrays)
        else:
            drifted.write(tmp_path / side)
    answer = diff(tmp_path / "a", tmp_path / "b", "--json")
    assert (answer.code, answer.document["equal"], answer.document["different"]) == (0, True, [])
    (finding,) = answer.document["findings"]
    assert set(finding["tensors"]) == {"1.ln.weight", "2.ln.bias"}
    assert {place["tp"] for place in finding["coordinates"]} == {1}
    assert finding["pattern"] == "tp replicas apart" + ": not reduced" * (layout == "checkpoints")
    check_text(finding["claim"])


def test_drift_over_tp_in_one_side_is_told_of_that_side(tmp_path: Path, tiny: Any, diff: Any, check_text: Any) -> None:
    tiny().write(tmp_path / "a")
    drifted = tiny()
    break_replicas(drifted)
    drifted.write(tmp_path / "b")
    answer = diff(tmp_path / "a", tmp_path / "b", "--json")
    assert answer.code == 1
    (claim,) = [f["claim"] for f in answer.document["findings"] if f["pattern"] == "tp replicas apart: not reduced"]
    check_text(claim)


@pytest.mark.parametrize("steps", [(None, 4.0), (4.0, None)], ids=["in B", "in A"])
def test_an_optimizer_that_counts_anew_is_named_steps_later(
    tmp_path: Path, tiny: Any, diff: Any, check_text: Any, steps: tuple[float | None, float | None]
) -> None:
    for name, step in zip("ab", steps, strict=True):
        tiny(step=24, optimizer_step=step).write(tmp_path / name)
    answer = diff(tmp_path / "a", tmp_path / "b", "--json")
    (finding,) = [f for f in answer.document["findings"] if f["pattern"] == "optimizer step restarted"]
    check_text(finding["claim"])
    assert {entry["likely"] for entry in answer.document["different"]} == {"optimizer step restarted"}


def test_several_random_states_share_a_sentence(tmp_path: Path, tiny: Any, diff: Any, check_text: Any) -> None:
    for side in "ab":
        folder = tiny().write(tmp_path / side)
        for rank in range(2):
            torch.save({"torch": torch.arange(16, dtype=torch.uint8) + (side == "b")}, folder / f"rng_rank_{rank}.pt")
    (finding,) = diff(tmp_path / "a", tmp_path / "b", "--json").document["findings"]
    assert finding["tensors"] == ["rng_rank_0.torch", "rng_rank_1.torch"]
    check_text(finding["claim"])


def test_parameters_of_another_model_do_not_move_the_others(tmp_path: Path, tiny: Any, diff: Any) -> None:
    """ZeRO cuts flat shards at other places if a parameter is added: no other parameter is missing."""
    name = "tied_modules.embed.norm.weight"
    tiny().write(tmp_path / "a")
    more = tiny()
    for params in more.state.values():
        params[name] = {role: torch.ones(8) for role in ("fp32", "exp_avg", "exp_avg_sq")}
    shapes = more.shapes
    more.shapes = lambda pp: {**shapes(pp), name: (8,)}
    more.write(tmp_path / "b")
    different = diff(tmp_path / "a", tmp_path / "b", "--json").document["different"]
    assert {(entry["tensor"], entry["kind"]) for entry in different} == {(name, "extra")}
