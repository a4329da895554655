"""Weights as torch prints them: what is read equals what was printed, and little is claimed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bigsci_launch.weights.files.sources import Source
from bigsci_launch.weights.files.tensors import Place
from bigsci_launch.weights.formats.text_dump import printed_elements, read_text_dump

TIED = "module.tied_modules.embed.word_embeddings"
# The diff that showed BLOOM's engineers their two bugs: side a and side b, as printed.
SIDE_A = f"""{TIED}.weight=Parameter containing:
tensor([[-3.1090e-04,  4.6082e-03, -2.3499e-03,  ..., -1.1292e-02,
          2.1667e-03, -2.7313e-03],
        [-1.1353e-02,  9.9487e-03, -1.9684e-03,  ..., -5.4550e-04,
         -2.3460e-04,  4.2114e-03],
        [ 3.2806e-03, -3.4332e-04, -5.5847e-03,  ...,  7.6294e-03,
          1.7853e-03,  2.5868e-05],
        ...,
        [ 1.6098e-03,  4.1809e-03, -2.4567e-03,  ..., -4.6692e-03,
         -4.5776e-03,  1.7090e-03],
        [ 5.7373e-03,  3.5858e-03, -1.7471e-03,  ...,  2.3041e-03,
         -6.4392e-03,  1.0223e-03],
        [-1.6937e-03, -1.4038e-02,  2.1057e-03,  ..., -3.6011e-03,
          1.3275e-03, -5.8594e-03]], device='cuda:1', dtype=torch.bfloat16,
       requires_grad=True)
{TIED}.norm.weight=Parameter containing:
tensor([0.9961, 0.9961, 0.9961,  ..., 0.9961, 0.9961, 0.9961], device='cuda:1',
       dtype=torch.bfloat16, requires_grad=True)
{TIED}.norm.bias=Parameter containing:
tensor([0., 0., 0.,  ..., 0., 0., 0.], device='cuda:1', dtype=torch.bfloat16,
       requires_grad=True)
"""
SIDE_B = f"""{TIED}.weight=Parameter containing:
tensor([[-0.0006,  0.0046, -0.0024,  ..., -0.0114,  0.0014, -0.0030],
        [-0.0109,  0.0096, -0.0020,  ..., -0.0005, -0.0001,  0.0041],
        [ 0.0027, -0.0004, -0.0056,  ...,  0.0070,  0.0017,  0.0003],
        ...,
        [ 0.0018,  0.0039, -0.0026,  ..., -0.0051, -0.0043,  0.0016],
        [ 0.0051,  0.0039, -0.0015,  ...,  0.0027, -0.0063,  0.0008],
        [-0.0018, -0.0142,  0.0021,  ..., -0.0035,  0.0015, -0.0060]],
       device='cuda:1', dtype=torch.bfloat16, requires_grad=True)
{TIED}.norm.weight=Parameter containing:
tensor([1., 1., 1.,  ..., 1., 1., 1.], device='cuda:1', dtype=torch.bfloat16,
       requires_grad=True)
{TIED}.norm.bias=Parameter containing:
tensor([0., 0., 0.,  ..., 0., 0., 0.], device='cuda:1', dtype=torch.bfloat16,
       requires_grad=True)
"""
BLOCK = "module.5.input_layernorm.weight=Parameter containing:\ntensor([1., 1.], requires_grad=True)\n"


def dump(folder: Path, side: str, step: int, when: str, last_stage: str) -> None:
    """48 ranks of pp 12, tp 2, dp 2: the last stage holds `last_stage`, the others a block."""
    folder.mkdir(exist_ok=True)
    for rank in range(48):
        pp, dp, tp = rank // 4, rank // 2 % 2, rank % 2
        name = f"debug-{step}-pp{pp}-tp{tp}-dp{dp}-global{rank}-{when}-iteration-{3770 + rank}{side}.txt"
        (folder / name).write_text(last_stage if pp == 11 else BLOCK)


def test_the_dumps_of_the_story_give_its_finding(tmp_path: Path, diff: Any, check_text: Any) -> None:
    for step, when in ((804, "before"), (804, "after"), (805, "before"), (805, "after")):
        dump(tmp_path / "a", "1", step, when, SIDE_A if step == 805 else SIDE_B)
    for step, when in ((806, "before"), (806, "after"), (807, "before")):
        dump(tmp_path / "b", "2", step, when, SIDE_B if when == "before" else SIDE_A)
    answer = diff(tmp_path / "a", tmp_path / "b")
    assert answer.code == 1
    check_text(answer.text)


@pytest.mark.slow
@given(
    shape=st.lists(st.integers(1, 40), min_size=1, max_size=3).map(tuple),
    scale=st.sampled_from([1.0, 1e-6, 1e5]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int64]),
    data=st.data(),
)
def test_what_torch_prints_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, shape: tuple[int, ...], scale: float, dtype: torch.dtype, data: Any
) -> None:
    seed = data.draw(st.integers(0, 1000))
    value = (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale * 50).to(dtype)
    path = tmp_path_factory.mktemp("text") / "debug-1-pp0-tp0-dp0-after.txt"
    path.write_text(f"module.w={value}\nmodule.v={torch.nn.Parameter(torch.ones(3))}\n")
    w, v = read_text_dump(Source(path, "", "text", Place(0, 0, 0))).tensors
    assert (w.name, v.name, len(printed_elements(v))) == ("w", "v", 3)
    shown = printed_elements(w)
    assert shown
    for element in shown:
        assert abs(float(value[element.index]) - element.value) <= element.slack * (1 + 1e-6) + 1e-12 * abs(
            element.value
        )


def test_text_against_bytes_at_the_printed_precision(
    tmp_path: Path, diff: Any, save_arrays: Callable[..., Path]
) -> None:
    weights = {"w": torch.randn(50, 60), "norm.weight": torch.ones(2000)}
    text = "".join(f"module.{name}={torch.nn.Parameter(value)}\n" for name, value in weights.items())
    (tmp_path / "a").mkdir()
    (tmp_path / "a/debug-5-pp0-tp0-dp0-global0-after-iteration-1.txt").write_text(text)
    at = {"pp": "0", "tp": "0", "dp": "0"}
    save_arrays(tmp_path / "b/rank-0000.safetensors", weights, at)
    answer = diff(tmp_path / "a", tmp_path / "b")
    assert answer.code == 0, answer.text
    weights["w"][25, 30] += 1
    save_arrays(tmp_path / "b/rank-0000.safetensors", weights, at)
    assert diff(tmp_path / "a", tmp_path / "b").code == 0, "torch does not print the middle of a tensor"
    weights["w"][-1, -1] += 1
    save_arrays(tmp_path / "b/rank-0000.safetensors", weights, at)
    (entry,) = diff(tmp_path / "a", tmp_path / "b", "--json").document["different"]
    assert (entry["tensor"], entry["max_abs"], entry["fraction"]) == ("w", pytest.approx(1, abs=1e-3), 1 / 36)
    weights["w"] = weights["w"][:, :40]
    save_arrays(tmp_path / "b/rank-0000.safetensors", {"w": weights["w"][:2, :2].clone()}, at)
    kinds = {entry["kind"] for entry in diff(tmp_path / "a", tmp_path / "b", "--json").document["different"]}
    assert kinds == {"shape", "missing"}


def test_an_unreadable_text_is_named(tmp_path: Path, diff: Any) -> None:
    dump(tmp_path / "a", "1", 5, "after", SIDE_A)
    dump(tmp_path / "b", "2", 6, "before", SIDE_A)
    broken = next((tmp_path / "b").glob("*pp3-tp1-dp0*"))
    broken.write_text("module.w=Parameter containing:\ntensor([[1., 2.],\n        [3., ")
    (unread,) = diff(tmp_path / "a", tmp_path / "b", "--json").document["unreadable"]
    assert (unread["file"], "truncated" in unread["why"], " w " in unread["why"]) == (str(broken), True, True)


def test_a_dump_that_was_cut_to_nothing_is_unreadable(tmp_path: Path, diff: Any) -> None:
    """Its name says that it was a dump; a text of another name is none."""
    dump(tmp_path / "a", "1", 5, "after", SIDE_A)
    dump(tmp_path / "b", "2", 6, "before", SIDE_A)
    for name in ("notes.txt", "log-pp0-tp0.txt"):
        (tmp_path / "b" / name).write_text("")
    answer = diff(tmp_path / "a", tmp_path / "b")
    assert (answer.code, "log-pp0-tp0.txt" in answer.text, "notes.txt" in answer.text) == (0, True, True)
    broken = next((tmp_path / "b").glob("*pp3-tp1-dp0*"))
    for left in ("", "mod"):
        broken.write_text(left)
        for first, second in (("a", "b"), ("b", "a")):
            document = diff(tmp_path / first, tmp_path / second, "--json").document
            assert [item["file"] for item in document["unreadable"]] == [str(broken)]
            assert "missing" not in {entry["kind"] for entry in document["different"]}
