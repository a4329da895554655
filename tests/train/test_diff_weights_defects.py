"""`bsl diff-weights` on checkpoints and dumps that DeepSpeed wrote, healthy and with one defect at a time."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bigsci_launch.cli.main import bsl

from .rank_processes import StartRank

pytestmark = pytest.mark.torch
PROGRAM = Path(__file__).parent / "programs" / "defects.py"
AFTER, BEFORE = "dumps/step-000012-after", "dumps/step-000013-before"


def run_ranks(start_rank: StartRank, out: Path, world_size: int, tp: int, *scenarios: str) -> Path:
    """Run the program on local ranks and return its output folder; show a rank's log if it fails."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    command = [str(PROGRAM), str(out), str(tp), *scenarios]
    ranks = []
    for rank in range(world_size):
        environment = {**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        ranks.append(start_rank(command, environment, out / f"rank-{rank}.log"))
    try:
        codes = [rank.wait(240) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    tails = [(out / f"rank-{rank}.log").read_text()[-2000:] for rank, code in enumerate(codes) if code]
    assert not tails, "\n".join(tails)
    return out


@pytest.fixture(scope="module")
def two_stages(start_rank: StartRank, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two stages (pp2), with every defect of the tied embedding."""
    return run_ranks(start_rank, tmp_path_factory.mktemp("two"), 2, 1, "healthy", "B1", "B2", "B3", "B4")


@pytest.fixture(scope="module")
def two_tp(start_rank: StartRank, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four ranks (pp 2 x tp 2), with the defects of tp replicas."""
    return run_ranks(start_rank, tmp_path_factory.mktemp("tp"), 4, 2, "healthy", "B5", "B6")


def diff(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(bsl, ["diff-weights", *map(str, arguments)], catch_exceptions=False)
    return result.exit_code, result.stdout


def document(*arguments: object) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(diff(*arguments, "--json")[1])
    return found


@pytest.mark.parametrize("scenario", ["healthy", "B2"])
def test_a_resume_that_is_exact_is_called_equal(two_stages: Path, scenario: str) -> None:
    found = document(two_stages / scenario / "continued", two_stages / scenario / "resumed")
    assert found["equal"] and found["compared"] > 0
    if scenario == "healthy":
        assert diff(two_stages / scenario / AFTER, two_stages / scenario / BEFORE)[0] == 0


def test_another_step_differs_nearly_everywhere(two_stages: Path) -> None:
    found = document(two_stages / "healthy/checkpoints", two_stages / "healthy/continued")
    assert len(found["different"]) > 0.9 * found["compared"]


@pytest.mark.parametrize("defect", ["B1", "B4"])
def test_the_tied_copy_of_the_last_stage_is_named(two_stages: Path, defect: str) -> None:
    found = document(two_stages / defect / AFTER, two_stages / defect / BEFORE)
    (entry,) = found["different"]
    assert (entry["tensor"], entry["coordinate"]["pp"]) == ("tied_modules.embed.weight", 1)
    assert entry["fraction"] > 0.9


def test_the_norm_that_load_resets_is_named(two_stages: Path) -> None:
    findings = document(two_stages / "B3" / AFTER, two_stages / "B3" / BEFORE)["findings"]
    (reset,) = [finding for finding in findings if finding["pattern"] == "reset to default"]
    assert reset["tensors"] == ["tied_modules.embed.norm.weight"]
    assert "0.9883" in reset["claim"] and "weight decay" in reset["claim"]


@pytest.mark.parametrize("scenario", ["healthy", "B5"])
def test_drift_over_tp_is_told_and_no_difference_between_two_sides(two_tp: Path, scenario: str) -> None:
    assert diff(two_tp / scenario / AFTER, two_tp / scenario / BEFORE)[0] == 0
    assert diff(two_tp / scenario / "continued", two_tp / scenario / "resumed")[0] == 0
    findings = document(two_tp / scenario / AFTER, two_tp / scenario / BEFORE)["findings"]
    assert bool(findings) == (scenario == "B5")


@pytest.mark.parametrize("scenario", ["healthy", "B1", "B2", "B3", "B4"])
def test_an_audit_names_the_cause_from_one_checkpoint(two_stages: Path, scenario: str) -> None:
    found = document("--audit", two_stages / scenario / "checkpoints")
    tensors = {finding["pattern"]: finding["tensors"] for finding in found["findings"]}
    weight, norm, bias = (f"tied_modules.embed.{name}" for name in ("weight", "norm.weight", "norm.bias"))
    expected = {
        "healthy": {},
        "B1": {"tied copies apart: not reduced": [weight]},
        "B2": {"untied passenger": [norm, bias]},
        "B3": {"untied passenger": [bias], "norm in the weight-decay group": [norm]},
        "B4": {"tied copies apart: clipped on one side": [weight]},
    }
    assert tensors == expected[scenario]
    assert found["equal"] == (scenario == "healthy")
    assert {entry["coordinate"]["pp"] for entry in found["different"]} == (set() if scenario == "healthy" else {1})


def test_an_audit_tells_how_far_weight_decay_alone_goes(two_stages: Path) -> None:
    claims = [finding["claim"] for finding in document("--audit", two_stages / "B3/checkpoints")["findings"]]
    assert any("0.9881" in claim and "^ 12" in claim for claim in claims)


def test_an_audit_finds_replicas_that_drift_over_tp(two_tp: Path) -> None:
    assert diff("--audit", two_tp / "healthy/checkpoints")[0] == 0
    found = document("--audit", two_tp / "B5/checkpoints")
    (finding,) = found["findings"]
    assert finding["pattern"].endswith(": not reduced")
    assert {coordinate["tp"] for coordinate in finding["coordinates"]} == {1}
    assert "4.ln.weight" in finding["tensors"]
    from_dumps = document("--audit", two_tp / "B5" / AFTER)
    assert "tp replicas apart" in from_dumps["findings"][0]["pattern"]


def test_gradients_divided_by_tp_show_against_a_healthy_run(two_tp: Path) -> None:
    """AdamW hides the scale of gradients from the weights, so a single checkpoint cannot show it."""
    assert diff("--audit", two_tp / "B6/checkpoints")[0] == 0
    assert diff(two_tp / "B6/continued", two_tp / "B6/resumed")[0] == 0
    findings = document(two_tp / "healthy/checkpoints", two_tp / "B6/checkpoints")["findings"]
    (scaled,) = [finding for finding in findings if finding["pattern"] == "gradients scaled"]
    assert " 1/2 " in scaled["claim"]
    assert {name for name in scaled["tensors"] if name.endswith("exp_avg")} == {
        f"{layer}.{replica} exp_avg" for layer in range(1, 5) for replica in ("ln.weight", "ln.bias", "down.bias")
    }


def test_dumps_and_both_sides_tell_of_the_tied_copies(two_stages: Path) -> None:
    for defect, cause in (("B1", "not reduced"), ("B4", "clipped on one side")):
        (finding,) = document(two_stages / defect / AFTER, two_stages / defect / BEFORE)["findings"]
        assert finding["pattern"] == f"tied copies apart: {cause}"
        cause, _, other_side = finding["claim"].rpartition(";")
        assert "global_step12" in cause and " in B " in other_side
    patterns = {f["pattern"] for f in document(two_stages / "B4/continued", two_stages / "B4/resumed")["findings"]}
    assert any("clipped" in pattern for pattern in patterns)


def test_the_seam_of_real_logs(two_stages: Path, tmp_path: Path) -> None:
    jumps = {}
    for scenario in ("healthy", "B1", "B3", "B4"):
        folder = two_stages / scenario
        whole = tmp_path / f"{scenario}.log"
        whole.write_text((folder / "first.log").read_text() + (folder / "continued.log").read_text())
        seam = document("--seam", whole, folder / "resumed.log")["seam"]
        assert (seam["step"], seam["overlapping_steps"]) == (13, 3)
        jumps[scenario] = seam["jump"]
    assert jumps["healthy"] == jumps["B3"] == 0
    assert jumps["B1"] > jumps["B4"] > 0


def test_a_universal_checkpoint_equals_its_origin(two_tp: Path, tmp_path: Path) -> None:
    origin = two_tp / "healthy/checkpoints/global_step12"
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--input_folder", str(origin)]
    command += ["--output_folder", str(tmp_path / "u"), "--num_extract_workers", "1", "--num_merge_workers", "1"]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    for sides in ((origin, tmp_path / "u"), (tmp_path / "u", origin)):
        code, text = diff(*sides)
        assert code == 0, text
    assert document(origin, tmp_path / "u")["compared"] >= 3 * 25
    damaged = tmp_path / "u/zero/2.down.weight/fp32.pt"
    damaged.write_bytes(damaged.read_bytes()[:-30])
    code, text = diff(origin, tmp_path / "u")
    assert code == 4
    assert f"could not read {damaged}" in text


def test_a_corrupted_byte_in_a_shard_is_named_in_both_uses(
    two_stages: Path, tmp_path: Path, copy_tree: Callable[[Path, Path], None]
) -> None:
    healthy = two_stages / "healthy/checkpoints"
    copy_tree(healthy, tmp_path / "b")
    victim = next((tmp_path / "b/global_step12").glob("bf16_zero*mp_rank_01*"))
    raw = bytearray(victim.read_bytes())
    raw[len(raw) // 2] ^= 0x10
    victim.write_bytes(raw)
    (entry,) = document(healthy, tmp_path / "b")["different"]
    assert (entry["likely"], entry["coordinate"]) == ("corrupted byte", {"pp": 1, "tp": 0, "dp": 0})
    (finding,) = [f for f in document("--audit", tmp_path / "b")["findings"] if f["pattern"] == "corrupted bytes"]
    assert victim.name in finding["claim"]


@pytest.mark.parametrize("damage", ["truncated", "missing"])
def test_a_damaged_checkpoint_is_named(
    two_stages: Path, tmp_path: Path, damage: str, copy_tree: Callable[[Path, Path], None]
) -> None:
    copy_tree(two_stages / "healthy/checkpoints", tmp_path / "b")
    victim = tmp_path / "b/global_step12/layer_02-model_00-model_states.pt"
    if damage == "missing":
        victim.unlink()
    else:
        victim.write_bytes(victim.read_bytes()[:-100])
    code, text = diff(two_stages / "healthy/checkpoints", tmp_path / "b")
    assert code == 4
    assert f"could not read {victim}: {damage}" in text


@pytest.fixture
def copy_tree() -> Callable[[Path, Path], None]:
    import shutil

    def copy(source: Path, target: Path) -> None:
        shutil.copytree(source, target)

    return copy
