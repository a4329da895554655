"""`bsl diff-weights --audit` of folders that torch.distributed.checkpoint wrote."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.support.texts import has_parts

pytestmark = pytest.mark.filterwarnings("ignore")
NAMES = ("0.weight", "0.bias", "2.weight")


def write(folder: Path, steps: dict[str, Any] | None = None, **more: Any) -> Path:
    """Save the weights and moments of three parameters; each has made 10 steps, but for those in `steps`."""
    generator = torch.Generator().manual_seed(1)
    taken = {name: torch.tensor(10.0) for name in NAMES} | (steps or {})
    state = {
        "model": {name: torch.randn(6, 4, generator=generator) for name in NAMES},
        "optimizer": {
            "state": {name: {"exp_avg": torch.randn(6, 4, generator=generator), "step": taken[name]} for name in NAMES},
            "param_groups": [{"lr": 0.1, "params": list(NAMES)}],
        },
        "train_state": {"step": torch.tensor(12)},
        "seed": 7,
        **more,
    }
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder, sync_files=False), no_dist=True)
    return folder


def place_of(folder: Path, name: str) -> Any:
    """Return the entry of the metadata that says where a tensor or an object is."""
    listed = pickle.loads((folder / ".metadata").read_bytes()).storage_data
    return next(info for index, info in listed.items() if index.fqn == name)


def flip(folder: Path, name: str, value: bytes) -> None:
    """Flip one bit of the bytes `value` of an entry."""
    info = place_of(folder, name)
    path = folder / info.relative_path
    raw = bytearray(path.read_bytes())
    raw[raw.index(value, info.offset, info.offset + info.length) + 1] ^= 4
    path.write_bytes(raw)


def findings(diff: Any, folder: Path) -> tuple[int, list[str]]:
    answer = diff("--audit", folder, "--json")
    return answer.code, [finding["claim"] for finding in answer.document["findings"]]


def test_a_sound_checkpoint_has_no_finding(tmp_path: Path, diff: Any) -> None:
    assert findings(diff, write(tmp_path / "a")) == (0, [])
    assert diff("--audit", tmp_path / "a").code == 0


def test_bytes_that_do_not_match_their_checksum(tmp_path: Path, diff: Any) -> None:
    folder = write(tmp_path / "a", history=[torch.full((5,), 1.5), torch.full((5,), 2.5)])
    weight = torch.load(open_entry(folder, "model.0.weight"))
    flip(folder, "model.0.weight", weight.numpy().tobytes())
    flip(folder, "history.1", torch.full((5,), 2.5).numpy().tobytes())
    code, (claim,) = findings(diff, folder)
    assert code == 1
    assert has_parts(claim, "__0_0.distcp", "model.0.weight", "history.1")


def open_entry(folder: Path, name: str) -> Any:
    info = place_of(folder, name)
    return io.BytesIO((folder / info.relative_path).read_bytes()[info.offset : info.offset + info.length])


def test_a_checkpoint_without_checksums_is_not_corrupted(tmp_path: Path, diff: Any) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        folder = write(tmp_path / "a")
    finally:
        torch.serialization.set_crc32_options(True)
    assert findings(diff, folder) == (0, [])


def test_files_that_no_entry_uses_are_named_and_are_no_fault(tmp_path: Path, diff: Any) -> None:
    folder = write(tmp_path / "a")
    for name in ("__1_0.distcp", "__2_0.distcp", "__3.metadata"):
        (folder / name).write_bytes(b"of an earlier save with more ranks")
    code, (claim,) = findings(diff, folder)
    assert code == 0
    assert claim.startswith("__1_0.distcp, __2_0.distcp, __3.metadata ")


@pytest.mark.parametrize(
    "steps",
    [
        {"0.bias": torch.tensor(3.0)},
        {"0.bias": torch.tensor(11.0)},
        {"0.bias": 3, "0.weight": 10, "2.weight": 10},
    ],
    ids=["behind", "ahead", "plain numbers"],
)
def test_a_step_that_is_not_that_of_the_other_parameters(
    tmp_path: Path, diff: Any, check_text: Any, steps: dict[str, Any]
) -> None:
    code, claims = findings(diff, write(tmp_path / "a", steps))
    assert code == 1
    check_text(*claims)


def of_steps(folder: Path, steps: dict[str, float]) -> Path:
    """Save nothing but the steps of parameters."""
    state = {"optimizer": {"state": {name: {"step": torch.tensor(step)} for name, step in steps.items()}}}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder, sync_files=False), no_dist=True)
    return folder


def experts(*steps: float, of: str = "layers.0.moe.experts") -> dict[str, float]:
    return {f"{of}.{index}.{name}": step for index, step in enumerate(steps) for name in ("w1", "w2")}


def test_experts_without_a_token_are_named_and_are_no_fault(tmp_path: Path, diff: Any, check_text: Any) -> None:
    folder = of_steps(tmp_path / "a", {"norm": 10.0, **experts(7.0, 7.0, 9.0, 10.0)})
    code, (claim,) = findings(diff, folder)
    assert code == 0
    check_text(claim)


@pytest.mark.parametrize(
    "steps",
    [
        {**experts(7.0), "norm": 10.0, "other": 10.0, "router": 7.0},
        {**experts(11.0), "norm": 10.0},
        {**experts(10.0, 10.0), "layers.0.moe.experts.0.w2": 3.0, "norm": 10.0},
        {**experts(3.0, of="mlp.shared_experts"), "norm": 10.0, "w": 10.0, "v": 10.0},
        {"moe.experts.w1": 3.0, "norm": 10.0, "w": 10.0},
    ],
    ids=["not an expert", "ahead", "half an expert", "shared experts", "all experts in one"],
)
def test_other_odd_steps_next_to_experts_are_faults(
    tmp_path: Path, diff: Any, check_text: Any, steps: dict[str, float]
) -> None:
    code, claims = findings(diff, of_steps(tmp_path / "a", steps))
    assert code == 1
    check_text(*claims)


def test_steps_that_are_left_out_are_not_compared(tmp_path: Path, diff: Any) -> None:
    folder = write(tmp_path / "a", {"0.bias": torch.tensor(3.0), "2.weight": 4})
    assert diff("--audit", folder).code == 1
    assert diff("--audit", folder, "--exclude", r"\.(0\.bias|2\.weight)\.step$").code == 0


@pytest.mark.parametrize(
    ("damage", "part"),
    [
        (lambda folder: (folder / "__0_0.distcp").unlink(), "__0_0.distcp: missing"),
        (lambda folder: (folder / "__0_0.distcp").write_bytes(b""), "__0_0.distcp"),
        (lambda folder: (folder / ".metadata").unlink(), ".metadata: missing"),
        (lambda folder: drop_chunk(folder), "24 of its 24"),
    ],
    ids=["missing file", "short file", "no metadata", "hole"],
)
def test_what_is_not_read_is_listed(tmp_path: Path, diff: Any, damage: Callable[[Path], Any], part: str) -> None:
    folder = write(tmp_path / "a")
    damage(folder)
    answer = diff("--audit", folder)
    assert (answer.code, part in answer.text) == (4, True), answer.text


def drop_chunk(folder: Path) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.state_dict_metadata["model.0.weight"].chunks.clear()
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
