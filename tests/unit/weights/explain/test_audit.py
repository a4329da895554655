"""`bsl diff-weights --audit`: each defect in a checkpoint with known values, and nothing for a sound checkpoint."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from bigsci_launch.weights.explain.causes import cause_of_constant
from bigsci_launch.weights.explain.health import is_exempt_by_name
from bigsci_launch.weights.match.sharding import ShardingHints, is_replicated
from tests.support.texts import has_parts

TIED = "tied_modules.embed.weight"


def audit(diff: Any, folder: Path) -> tuple[int, dict[str, str], dict[str, Any]]:
    answer = diff("--audit", folder, "--json")
    document = answer.document
    return answer.code, {finding["pattern"]: finding["claim"] for finding in document["findings"]}, document


def set_apart(checkpoint: Any, name: str, change: Callable[[dict[str, torch.Tensor]], None], **where: int) -> None:
    """Change one parameter on every rank of a stage or a tp rank."""
    for (pp, tp), params in checkpoint.state.items():
        if name in params and all({"pp": pp, "tp": tp}[axis] == index for axis, index in where.items()):
            change(params[name])


@pytest.mark.parametrize("topology", [(1, 1, 1), (2, 2, 2), (1, 2, 3), (2, 1, 2)])
def test_a_healthy_checkpoint_has_no_finding(
    tmp_path: Path, tiny: Any, diff: Any, topology: tuple[int, int, int]
) -> None:
    tiny(*topology).write(tmp_path)
    code, findings, document = audit(diff, tmp_path)
    assert (code, findings, document["different"]) == (0, {}, [])
    assert document["compared"] > 10


Roles = dict[str, torch.Tensor]


def other_gradients(roles: Roles) -> None:
    roles["fp32"] += 0.1
    roles["exp_avg"].normal_(generator=torch.Generator().manual_seed(99))


def unclipped(roles: Roles, squared: float) -> None:
    roles["fp32"] += 0.1
    roles["exp_avg"] *= 3 + 0.5 * torch.rand(roles["exp_avg"].shape, generator=torch.Generator().manual_seed(1))
    roles["exp_avg_sq"] *= squared


def halved(roles: Roles) -> None:
    roles["fp32"] += 0.1
    roles["exp_avg"] /= 2
    roles["exp_avg_sq"] /= 4


def drifted(roles: Roles) -> None:
    for value in roles.values():
        value += 0.5


APART: dict[str, tuple[str, Callable[[Roles], object]]] = {
    "other gradients": ("tied copies apart: not reduced", other_gradients),
    "not clipped": ("tied copies apart: clipped on one side", partial(unclipped, squared=10)),
    "not clipped, at first": ("tied copies apart: clipped on one side", partial(unclipped, squared=180)),
    "one factor at all steps": ("tied copies apart: scaled", halved),
    "masters alone": ("tied copies apart: set apart", lambda roles: roles["fp32"].add_(1)),
    "replicas": ("tp replicas apart: not reduced", drifted),
}


@pytest.mark.parametrize("how", APART)
def test_copies_that_moved_apart(tmp_path: Path, tiny: Any, diff: Any, check_text: Any, how: str) -> None:
    pattern, change = APART[how]
    names, axis = ({TIED}, "pp") if pattern.startswith("tied") else ({"1.ln.weight", "2.down.bias"}, "tp")
    checkpoint = tiny()
    for name in names:
        set_apart(checkpoint, name, change, **{axis: 1})
    checkpoint.write(tmp_path)
    code, findings, document = audit(diff, tmp_path)
    assert (code, list(findings)) == (1, [pattern])
    assert {(entry["tensor"], entry["coordinate"][axis]) for entry in document["different"]} == {(n, 1) for n in names}
    assert f"{'tied copies' if axis == 'pp' else 'tp replicas'}" in {e["relation"] for e in document["different"]}
    check_text(*findings.values())


@pytest.mark.parametrize("decay", [0.1, 0.0])
def test_a_passenger_of_the_tied_module(tmp_path: Path, tiny: Any, diff: Any, check_text: Any, decay: float) -> None:
    name = "tied_modules.embed.norm.weight"
    checkpoint = tiny(weight_decay_of_norms=decay)
    left = math.prod([1 - 1e-3 * decay] * 20)
    for (pp, _), params in checkpoint.state.items():
        trained = {role: torch.arange(8) / 9 + 1 for role in ("fp32", "exp_avg", "exp_avg_sq")}
        idle = {"fp32": torch.full((8,), left), "exp_avg": torch.zeros(8), "exp_avg_sq": torch.zeros(8)}
        params[name] = trained if pp == 0 else idle
    shapes = checkpoint.shapes
    checkpoint.shapes = lambda pp: {**shapes(pp), name: (8,)}
    for tp in range(1, checkpoint.tp):
        checkpoint.state[0, tp][name] = checkpoint.state[0, 0][name]
    checkpoint.write(tmp_path)
    _, findings, _ = audit(diff, tmp_path)
    check_text(findings["untied passenger"])


def test_a_weight_that_is_not_its_rounded_master(tmp_path: Path, tiny: Any, diff: Any) -> None:
    checkpoint = tiny()
    weight = checkpoint.state[1, 0]["2.up.weight"]["fp32"].bfloat16()
    weight.view(torch.int16)[0, 0] += 1
    checkpoint.layers[2, 0, "up.weight"] = weight
    checkpoint.write(tmp_path)
    _, findings, document = audit(diff, tmp_path)
    ((pattern, claim),) = findings.items()
    assert (pattern, claim.partition(" ")[0]) == ("16-bit and its master apart", "2.up.weight")
    (entry,) = document["different"]
    assert (entry["max_ulp"], entry["fraction"], entry["coordinate"]) == (1, 1 / 128, {"pp": 1, "tp": 0, "dp": None})


def test_a_lost_optimizer_step(tmp_path: Path, tiny: Any, diff: Any, check_text: Any) -> None:
    tiny(optimizer_step=3.0).write(tmp_path)
    check_text(audit(diff, tmp_path)[1]["optimizer step restarted"])


def test_a_norm_in_the_weight_decay_group(tmp_path: Path, tiny: Any, diff: Any, check_text: Any) -> None:
    class Misgrouped(tiny):  # type: ignore[misc, valid-type]
        def _groups(self, params: dict[str, Any]) -> list[list[str]]:
            decayed, plain = super()._groups(params)
            wrong = [name for name in plain if name == "2.ln.weight"]
            return [[*decayed, *wrong], [name for name in plain if name not in wrong]]

    Misgrouped().write(tmp_path)
    check_text(audit(diff, tmp_path)[1]["norm in the weight-decay group"])


def test_decay_for_all_is_a_choice(tmp_path: Path, tiny: Any, diff: Any) -> None:
    tiny(weight_decay_of_norms=0.1).write(tmp_path)
    assert audit(diff, tmp_path)[0] == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_none(tmp_path: Path, tiny: Any, diff: Any, value: float) -> None:
    checkpoint = tiny()
    checkpoint.state[0, 1]["1.up.bias"]["exp_avg"][3] = value
    checkpoint.write(tmp_path)
    code, findings, _ = audit(diff, tmp_path)
    assert code == 1
    assert has_parts(findings["NaN"], "1.up.bias exp_avg", " 1 ", "pp0 tp1")


@pytest.mark.parametrize(
    "victim", ["bf16_zero_pp_rank_1_mp_rank_03_optim_states.pt", "layer_02-model_01-model_states.pt"]
)
def test_one_corrupted_byte(tmp_path: Path, tiny: Any, diff: Any, victim: str) -> None:
    folder = tiny().write(tmp_path / "a")
    tiny().write(tmp_path / "b")
    path = tmp_path / "b/global_step20" / victim
    raw = bytearray(path.read_bytes())
    where = raw.find(b"data/1") if "optim" in victim else raw.find(b"data/2")
    at = raw.find(b"FB", where)
    start = at if at > 0 else where
    # The numbers follow the record's header and padding: flip one bit well inside the record.
    length = int.from_bytes(raw[start + 2 : start + 4], "little") if at > 0 else 0
    raw[start + 4 + length + 8] ^= 0x40
    path.write_bytes(raw)
    code, findings, _ = audit(diff, tmp_path / "b")
    assert code == 1
    assert victim in findings["corrupted bytes"]
    document = diff(folder, tmp_path / "b", "--json").document
    (entry,) = document["different"]
    assert entry["likely"] == "corrupted byte"
    assert document["findings"][0]["pattern"] == "corrupted byte"


def test_copies_over_dp_and_pp_in_dumps(tmp_path: Path, diff: Any, save_arrays: Any) -> None:
    for rank in range(8):
        pp, dp, tp = rank // 4, rank // 2 % 2, rank % 2
        weights = {TIED: torch.full((4, 4), float(tp)), f"{pp + 1}.ln.weight": torch.ones(4), "x": torch.ones(3)}
        if (pp, dp, tp) == (1, 1, 0):
            weights["x"][1] = 5
        if pp == 1:
            weights[TIED][0] += 1
        metadata = {"pp": str(pp), "tp": str(tp), "dp": str(dp)}
        save_arrays(tmp_path / f"rank-{rank:04d}.safetensors", weights, metadata)
    code, findings, _ = audit(diff, tmp_path)
    assert code == 1
    assert findings["dp replicas apart"].startswith("x (dp0") or "x (" in findings["dp replicas apart"]
    assert findings["tied copies apart"].startswith(f"{TIED}")


def test_a_damaged_checkpoint_is_audited_as_far_as_it_goes(tmp_path: Path, tiny: Any, diff: Any) -> None:
    folder = tiny().write(tmp_path)
    (folder / "layer_01-model_00-model_states.pt").write_bytes(b"PK\x03\x04")
    answer = diff("--audit", tmp_path)
    assert answer.code == 4
    assert "layer_01-model_00-model_states.pt" in answer.text


@pytest.mark.parametrize(
    ("name", "is_whole"),
    [
        ("3.input_layernorm.weight", True),
        ("3.ln1.bias", True),
        ("3.self_attention.dense.bias", True),
        ("3.mlp.dense_4h_to_h.bias", True),
        ("3.mlp.dense_h_to_4h.bias", False),
        ("3.attention.output.bias", True),
        ("3.attention.qkv.bias", False),
        ("3.attention.output.weight", False),
        ("1.position_embeddings.weight", True),
        ("tied_modules.embed.weight", False),
        ("3.mlp.up.bias", False),
        ("3.mlp.down.bias", True),
    ],
)
def test_what_every_tp_rank_holds_whole(name: str, is_whole: bool) -> None:
    shape = (8,) if name.endswith("bias") or "norm" in name or "ln" in name else (8, 8)
    assert is_replicated(name, [shape, shape], ShardingHints()) is is_whole
    assert not is_replicated(name, [shape, (4, 4)], ShardingHints())
    assert is_replicated(name, [shape, shape], ShardingHints(replicated=(".*",)))
    assert not is_replicated(name, [shape, shape], ShardingHints(replicated=("nothing",)))


def test_names_that_decay_spares() -> None:
    spared = ["1.ln.weight", "2.input_layernorm.weight", "3.up.bias", "5.norm.weight"]
    assert all(map(is_exempt_by_name, spared))
    assert not any(map(is_exempt_by_name, ["1.up.weight", "tied_modules.embed.weight"]))


def test_an_audit_lists_what_it_does_not_read(tmp_path: Path, diff: Any) -> None:
    torch.save({"w": torch.zeros(3)}, tmp_path / "sound.pt")
    with zipfile.ZipFile(tmp_path / "sound.pt") as sound, zipfile.ZipFile(tmp_path / "w.pt", "w") as made:
        for info in sound.infolist():
            data = sound.read(info)
            # A second entry that refers to something outside the file, as other frameworks' own savers do.
            made.writestr(
                info.filename,
                data[:-1] + b"X\x04\x00\x00\x00pastX\x04\x00\x00\x00disk\x85Qs."
                if info.filename.endswith("data.pkl")
                else data,
            )
    answer = diff("--audit", tmp_path / "w.pt", "--json")
    assert answer.code == 4
    assert [(entry["entry"], entry["type"]) for entry in answer.document["not_read"]] == [("past", "a reference")]


@pytest.mark.parametrize("constant", [1.01, -0.5])
def test_weight_decay_only_shrinks(tmp_path: Path, tiny: Any, diff: Any, check_text: Any, constant: float) -> None:
    name = "tied_modules.embed.norm.weight"
    checkpoint = tiny(tp=1, weight_decay_of_norms=0.1)
    for (pp, _), params in checkpoint.state.items():
        idle = {"fp32": torch.full((8,), constant), "exp_avg": torch.zeros(8), "exp_avg_sq": torch.zeros(8)}
        params[name] = {role: torch.arange(8) / 9 + 1 for role in idle} if pp == 0 else idle
    shapes = checkpoint.shapes
    checkpoint.shapes = lambda pp: {**shapes(pp), name: (8,)}
    checkpoint.write(tmp_path)
    check_text(audit(diff, tmp_path)[1]["untied passenger"])


@pytest.mark.parametrize(
    ("constant", "cause"),
    [
        (1.0, "never trained"),
        (0.98, "decay only"),
        (1.01, "set apart"),
        (-0.98, "set apart"),
        (math.nan, "set apart"),
    ],
)
def test_a_constant_whose_moments_are_not_known(constant: float, cause: str) -> None:
    assert cause_of_constant("pp1", constant).name == cause
