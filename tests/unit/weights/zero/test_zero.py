"""Checkpoints of stages 0 to 3 of ZeRO, written by DeepSpeed: see write_checkpoints.py."""

from __future__ import annotations

import itertools
import math
import shutil
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.slow

ARCHIVE = Path(__file__).with_name("checkpoints.tar.xz")
STEP = "global_step2"
ROLES = ("fp32", "exp_avg", "exp_avg_sq")
Edit = Callable[[dict[str, Any]], object]


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("written")
    with tarfile.open(ARCHIVE) as packed:
        packed.extractall(folder, filter="data")
    return folder


@pytest.fixture
def edited(written: Path, tmp_path: Path) -> Callable[[str, str, Edit], Path]:
    """`edited("stage2", "mp_rank_00_*", edit)`: a copy of a checkpoint, in which one file's object is edited."""

    def copy(name: str, pattern: str, edit: Edit) -> Path:
        folder = tmp_path / name
        shutil.copytree(written / name, folder, dirs_exist_ok=True)
        (path,) = (folder / STEP).glob(pattern)
        state = torch.load(path, weights_only=False)
        edit(state)
        torch.save(state, path)
        return folder

    return copy


def moved(tensor: torch.Tensor, index: int = 0) -> None:
    with torch.no_grad():
        tensor.view(-1)[index] += 1


# Two checkpoints of one state, and how many tensors are at least compared.
SAME = [
    *(("stage2", other, 31) for other in ("stage1", "stage2-of4", "stage3", "stage3-of4", "stage2-universal")),
    *(("stage3", other, 25) for other in ("stage1", "stage3-of4", "stage2-universal", "stage3-universal")),
    *((name, other, 9) for name in ("stage1", "stage2-of4", "stage3-of4") for other in ("stage2-fp32", "stage2-safe")),
    ("stage2-universal", "stage3-universal", 30),
    ("stage2", "stage0", 17),
    ("experts2", "experts4", 90),
]


@pytest.mark.parametrize(("a", "b", "least"), SAME)
def test_one_state_is_equal_however_it_is_cut(written: Path, diff: Any, a: str, b: str, least: int) -> None:
    for sides in ((a, b), (b, a)):
        answer = diff(*(written / side for side in sides), "--json")
        found = answer.document
        assert (answer.code, found["equal"], found["different"], found["values"]) == (0, True, [], [])
        assert found["compared"] >= least
        has_state = not any(side.endswith(("fp32", "safe")) for side in sides)
        assert (found["values_compared"] >= 15) == has_state


@pytest.mark.parametrize("name", ["stage0", "stage1", "stage2", "stage3", "groups2", "groups3", "experts2", "experts4"])
def test_a_checkpoint_is_equal_to_itself_and_passes_its_audit(written: Path, diff: Any, name: str) -> None:
    answer = diff(written / name, written / name)
    assert (answer.code, "not compared" in answer.text) == (0, False), answer.text
    assert diff("--audit", written / name).code == 0


def place_of_piece(name: str, rank: int) -> tuple[str, tuple[int, ...], int, int]:
    """Return a parameter that a rank has in stage 2 or 3, its shape, the element's place in the shard, and in it."""
    shapes = {
        "embed.weight": (5, 3),
        "up.weight": (7, 3),
        "up.bias": (7,),
        "norm.weight": (7,),
        "norm.bias": (7,),
        "down.weight": (3, 7),
        "head.weight": (5, 3),
    }
    num_ranks = 4 if "of4" in name else 2
    if name.startswith("stage3"):
        start = math.ceil(15 / num_ranks)
        width = math.ceil(21 / num_ranks)
        return "up.weight", shapes["up.weight"], start, rank * width
    # 93 elements, padded to a multiple of twice the number of ranks: the first element of the rank's shard.
    part = math.ceil(93 / (2 * num_ranks)) * 2
    first, begin = rank * part, 0
    for parameter, shape in shapes.items():
        size = math.prod(shape)
        if begin <= first < begin + size:
            return parameter, shape, 0, first - begin
        begin += size
    raise AssertionError(first)


def shards() -> Iterator[Any]:
    """Yield every role on every rank of two stages; one role on each rank is of this tier."""
    for rank, role in itertools.product(range(4), ROLES):
        marks = [] if role == ROLES[rank % len(ROLES)] else [pytest.mark.long]
        yield from (pytest.param(name, rank, role, marks=marks) for name in ("stage2-of4", "stage3-of4"))


@pytest.mark.parametrize(("name", "rank", "role"), list(shards()))
def test_one_element_of_any_shard_is_named(
    written: Path, edited: Any, diff: Any, name: str, rank: int, role: str
) -> None:
    parameter, shape, at, index = place_of_piece(name, rank)

    def edit(shard: dict[str, Any]) -> None:
        moved(masters(shard)[0] if role == "fp32" else states(shard)[0][role], at)

    changed = edited(name, f"zero_pp_rank_{rank}_*_optim_states.pt", edit)
    for other in (name, "stage1", "stage3", "stage3-universal"):
        answer = diff(changed, written / other, "--json")
        found = {(entry["tensor"], entry["role"]): entry for entry in answer.document["different"]}
        assert answer.code == 1
        assert (parameter, role) in found
        # A weight in fp32 is compared with the master of stage 3.
        assert found.keys() <= {(parameter, role), (parameter, "weight")}
        is_cut_alike = other == name
        expected = [0] if is_cut_alike else [int(i) for i in torch.unravel_index(torch.tensor(index), shape)]
        assert found[parameter, role]["worst_at"] == expected


def test_one_element_of_a_shard_is_named_against_a_state_dict(written: Path, edited: Any, diff: Any) -> None:
    for name in ("stage2-of4", "stage3"):
        changed = edited(
            name,
            "zero_pp_rank_1_*_optim_states.pt",
            lambda shard: moved(masters(shard)[0]),
        )
        for other in ("stage2-fp32", "stage2-safe"):
            answer = diff(changed, written / other, "--json")
            assert answer.code == 1
            assert len({entry["tensor"] for entry in answer.document["different"]}) == 1


VALUES: dict[str, tuple[str, str, Edit]] = {
    "lr": (
        "*rank_1_*_optim_states.pt",
        "optimizer.param_groups.0.lr",
        lambda shard: options(shard)[0].update(lr=0.5),
    ),
    "betas": (
        "*rank_1_*_optim_states.pt",
        "optimizer.param_groups.0.betas.1",
        lambda shard: options(shard)[0].update(betas=(0.9, 0.95)),
    ),
    "loss scale": (
        "*rank_0_*_optim_states.pt",
        "zero.loss_scaler.cur_scale",
        lambda shard: setattr(shard["optimizer_state_dict"]["loss_scaler"], "cur_scale", 2.0),
    ),
    "step": ("*rank_1_*_optim_states.pt", "optimizer.step", lambda shard: moved(states(shard)[0]["step"])),
    "scheduler": (
        "*mp_rank_00_model_states.pt",
        "lr_scheduler.last_batch_iteration",
        lambda states: states["lr_scheduler"].update(last_batch_iteration=7),
    ),
    "global steps": ("*mp_rank_00_model_states.pt", "global_steps", lambda states: states.update(global_steps=3)),
    "client state": ("*mp_rank_00_model_states.pt", "epoch", lambda states: states.update(epoch=4)),
    "random state": ("*mp_rank_00_model_states.pt", "rng", lambda states: states.update(rng=states["rng"] + 1)),
    "lost scheduler": (
        "*mp_rank_00_model_states.pt",
        "lr_scheduler.last_batch_iteration",
        lambda states: states.update(lr_scheduler=None),
    ),
}


def masters(shard: dict[str, Any]) -> Any:
    state = shard["optimizer_state_dict"]
    return state.get("fp32_flat_groups") or state["single_partition_of_fp32_groups"]


def options(shard: dict[str, Any]) -> Any:
    return base(shard)["param_groups"]


def states(shard: dict[str, Any]) -> Any:
    return base(shard)["state"]


def base(shard: dict[str, Any]) -> Any:
    state = shard["optimizer_state_dict"]
    return state.get("base_optimizer_state") or state["optimizer_state_dict"]


@pytest.mark.parametrize("what", VALUES)
def test_a_value_that_differs_is_named(written: Path, edited: Any, diff: Any, what: str) -> None:
    pattern, name, edit = VALUES[what]
    changed = edited("stage2", pattern, edit)
    for other in ("stage2", "stage2-of4", "stage3"):
        answer = diff(changed, written / other, "--json")
        found = answer.document
        named = [entry["value"] for entry in found["values"]] + [entry["tensor"] for entry in found["different"]]
        assert answer.code == 1
        assert any(text.endswith(name.partition(".")[2] or name) for text in named), named


def test_what_differs_and_is_no_part_of_the_state_is_noted(
    written: Path, edited: Any, diff: Any, check_text: Any
) -> None:
    def fill_padding(shard: dict[str, Any]) -> None:
        with torch.no_grad():
            # `embed.weight` has 15 elements: the second half of 8 ends with one element of padding.
            shard["optimizer_state_dict"]["fp32_flat_groups"][0][7] = math.nan

    changed = edited("stage3", "zero_pp_rank_1_*_optim_states.pt", fill_padding)
    padding = diff(changed, written / "stage3", "--json")
    assert diff("--audit", changed).code == 0
    changed = edited("stage1", "mp_rank_00_model_states.pt", lambda states: states.update(ds_version="0.1"))
    version = diff(written / "stage1", changed, "--json")
    assert (padding.code, version.code) == (0, 0)
    check_text(*padding.document["notes"], *version.document["notes"])


def test_what_is_frozen_or_tied_is_compared(written: Path, edited: Any, diff: Any) -> None:
    found = diff(written / "groups3", written / "groups3-fp32", "--json").document
    # zero_to_fp32 converts frozen 16-bit parameters too.
    assert [(entry["tensor"], entry["kind"], entry["max_abs"]) for entry in found["different"]] == [
        ("up.weight", "dtype", 0.0)
    ]
    changed = edited("groups3", "*rank_1_*_model_states.pt", lambda s: moved(s["frozen_param_fragments"]["up.weight"]))
    for other in ("groups3", "groups2"):
        found = diff(changed, written / other, "--json", "--include", "up.weight").document
        assert {entry["tensor"] for entry in found["different"]} == {"up.weight"}
    changed = edited("groups3", "*rank_0_*_optim_states.pt", lambda shard: moved(masters(shard)[0]))
    found = diff(changed, written / "groups3-fp32", "--json").document
    assert {entry["tensor"] for entry in found["different"]} >= {"embed.weight", "head.weight"}


def test_experts_have_their_names_in_the_whole_model(written: Path, edited: Any, diff: Any) -> None:
    def edit(shard: dict[str, Any]) -> None:
        moved(masters(shard)[1])

    changed = edited("experts2", "*zero_pp_rank_1_*_optim_states.pt", edit)
    for other in ("experts2", "experts4"):
        (entry,) = diff(changed, written / other, "--json").document["different"]
        assert (entry["tensor"], entry["role"]) == (
            "moe.deepspeed_moe.experts.deepspeed_experts.2.0.weight",
            "fp32",
        )
    (changed / STEP / "layer_0_expert_3_mp_rank_00_model_states.pt").unlink()
    answer = diff(changed, written / "experts2")
    assert (answer.code, "layer_0_expert_3_mp_rank_00_model_states.pt: missing" in answer.text) == (4, True)


@pytest.mark.parametrize(
    ("name", "other"), [("stage2-of4", "stage2"), ("stage3-of4", "stage3"), ("stage3", "stage2-safe")]
)
def test_a_missing_shard_is_named_and_nothing_else(
    written: Path, tmp_path: Path, diff: Any, name: str, other: str
) -> None:
    shutil.copytree(written / name, tmp_path / "a")
    (lost,) = (tmp_path / "a" / STEP).glob("*zero_pp_rank_1_*_optim_states.pt")
    lost.unlink()
    answer = diff(tmp_path / "a", written / other, "--json")
    assert answer.code == 4
    assert [Path(item["file"]).name for item in answer.document["unreadable"]] == [lost.name]
    assert answer.document["different"] == []


def test_files_of_a_lost_rank_are_named(written: Path, tmp_path: Path, diff: Any) -> None:
    shutil.copytree(written / "stage3", tmp_path / "a")
    (tmp_path / "a" / STEP / "zero_pp_rank_1_mp_rank_00_model_states.pt").unlink()
    answer = diff("--audit", tmp_path / "a")
    assert answer.code == 4
    assert "zero_pp_rank_1_mp_rank_00_model_states.pt: missing" in answer.text and "tp=1,pp=1,dp=2" in answer.text


def test_shards_of_another_number_of_ranks_are_named(written: Path, tmp_path: Path, diff: Any) -> None:
    for number, (name, other) in enumerate([("stage2", "stage2-of4"), ("stage3", "stage3-of4")]):
        folder = tmp_path / str(number)
        shutil.copytree(written / other, folder)
        shutil.copytree(written / name, folder, dirs_exist_ok=True)
        answer = diff(folder, written / name, "--json")
        left_over = {Path(item["file"]).name for item in answer.document["unreadable"]}
        assert left_over >= {f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (2, 3)}
        shutil.copyfile(
            written / other / STEP / "zero_pp_rank_1_mp_rank_00_optim_states.pt",
            folder / STEP / "zero_pp_rank_1_mp_rank_00_optim_states.pt",
        )
        found = diff("--audit", folder, "--json").document
        whys = {Path(item["file"]).name: item["why"] for item in found["unreadable"]}
        why = whys["zero_pp_rank_1_mp_rank_00_optim_states.pt"]
        assert "4 ranks" in why and why.endswith(" 2")


def test_an_audit_names_shards_of_another_step(edited: Any, diff: Any, check_text: Any) -> None:
    changed = edited("stage2", "*rank_1_*_optim_states.pt", lambda shard: moved(states(shard)[0]["step"]))
    (finding,) = diff("--audit", changed, "--json").document["findings"]
    assert finding["pattern"] == "shard of another step"
    claim = finding["claim"]
    changed = edited("stage3", "*rank_1_*_model_states.pt", lambda states: states.update(global_steps=1))
    (finding,) = diff("--audit", changed, "--json").document["findings"]
    check_text(claim, finding["claim"])


def test_an_audit_compares_weights_with_their_masters(edited: Any, diff: Any) -> None:
    changed = edited("groups2", "mp_rank_00_model_states.pt", lambda states: moved(states["module"]["down.weight"]))
    document = diff("--audit", changed, "--json").document
    assert [(entry["tensor"], entry["relation"]) for entry in document["different"]] == [
        ("down.weight", "16-bit and its master")
    ]


def test_an_audit_finds_what_is_not_finite(edited: Any, diff: Any) -> None:
    def edit(shard: dict[str, Any]) -> None:
        shard["optimizer_state_dict"]["fp32_flat_groups"][0].data[0] = math.inf

    (finding,) = diff("--audit", edited("stage3", "*rank_1_*_optim_states.pt", edit), "--json").document["findings"]
    assert finding["claim"].startswith("embed.weight fp32 contains 1 NaN or infinite")


def test_replicas_of_buffers_are_audited(edited: Any, diff: Any) -> None:
    changed = edited("stage3", "*rank_1_*_model_states.pt", lambda states: moved(states["module"]["scale"]))
    document = diff("--audit", changed, "--json").document
    assert [(entry["tensor"], entry["relation"]) for entry in document["different"]] == [("scale", "dp replicas")]


def test_random_states_of_ranks_that_the_other_side_lacks_are_noted(
    written: Path, tmp_path: Path, diff: Any, check_text: Any
) -> None:
    for name, num_ranks in (("stage2", 2), ("stage2-of4", 4)):
        shutil.copytree(written / name, tmp_path / name)
        for rank in range(num_ranks):
            torch.save({"torch": torch.arange(rank, rank + 4)}, tmp_path / name / STEP / f"rng_rank_{rank:04d}.pt")
    answer = diff(tmp_path / "stage2", tmp_path / "stage2-of4", "--json")
    assert answer.code == 0, answer.text
    check_text(*(note for note in answer.document["notes"] if "rank" in note))
