"""Patterns in the differences of two sides, each on values that have it and on values that nearly do."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bigsci_launch import __version__
from bigsci_launch.units import format_percent
from bigsci_launch.weights.compare.places import describe_places
from bigsci_launch.weights.files.tensors import Place
from bigsci_launch.weights.show.page import heat_map


def likely(diff: Any, a: Path, b: Path) -> dict[str, str | None]:
    return {entry["tensor"]: entry["likely"] for entry in diff(a, b, "--json").document["different"]}


def test_a_scaling_is_told_from_a_drift(tmp_path: Path, diff: Any, save_arrays: Any) -> None:
    base = torch.randn(500, generator=torch.Generator().manual_seed(0))
    noise = torch.randn(500, generator=torch.Generator().manual_seed(1))
    young_norm = 1 + 0.001 * base
    a = {name: base.bfloat16() for name in ("half", "minus", "drift", "nearly")} | {"trained": young_norm}
    b = {
        "half": (base * 0.5).bfloat16(),
        "minus": (base * -3).bfloat16(),
        "drift": (base * 0.5 + 0.1 * noise).bfloat16(),
        "nearly": (base * 1.005).bfloat16(),
        "trained": young_norm + 0.006 + 0.0003 * noise,
    }
    found = likely(diff, save_arrays(tmp_path / "a.safetensors", a), save_arrays(tmp_path / "b.safetensors", b))
    scaled = {"half": "scaled by a constant", "minus": "scaled by a constant"}
    assert found == {**scaled, "drift": None, "nearly": None, "trained": None}


@pytest.mark.parametrize("factor", [0.5, 0.25, 4.0])
def test_gradients_scaled_by_a_tp_size_are_named(
    tmp_path: Path, tiny: Any, diff: Any, check_text: Any, factor: float
) -> None:
    tiny().write(tmp_path / "a")
    scaled = tiny()
    generator = torch.Generator().manual_seed(5)
    for params in scaled.state.values():
        for name, roles in params.items():
            if ".ln." in name:
                roles["exp_avg"] *= factor
                roles["exp_avg"] += 0.1 * factor * torch.randn(roles["exp_avg"].shape, generator=generator)
                roles["exp_avg_sq"] *= factor**2 * 1.05
                roles["fp32"] += 0.01 * torch.randn(roles["fp32"].shape, generator=generator)
    scaled.write(tmp_path / "b")
    document = diff(tmp_path / "a", tmp_path / "b", "--json").document
    check_text(*(finding["claim"] for finding in document["findings"] if finding["pattern"] == "gradients scaled"))


def test_a_random_state_that_differs_is_named(tmp_path: Path, tiny: Any, diff: Any) -> None:
    for side in "ab":
        folder = tiny().write(tmp_path / side)
        torch.save({"torch": torch.arange(16, dtype=torch.uint8) + (side == "b")}, folder / "rng_rank_0003.pt")
    answer = diff(tmp_path / "a", tmp_path / "b", "--json")
    (finding,) = answer.document["findings"]
    assert (answer.code, finding["pattern"], finding["tensors"]) == (1, "random state differs", ["rng_rank_0003.torch"])


def test_tied_copies_are_looked_at_inside_each_side(
    tmp_path: Path, diff: Any, save_arrays: Any, check_text: Any
) -> None:
    name = "tied_modules.embed.weight"
    base = np.random.default_rng(0).standard_normal((4, 4)).astype(np.float32)
    for rank in range(4):
        at = {"pp": str(rank // 2), "tp": str(rank % 2), "dp": "0"}
        drifted = base + (0.1 if rank >= 2 else 0)
        save_arrays(tmp_path / f"a/rank-{rank:04d}.safetensors", {name: drifted.astype(np.float32)}, at)
        save_arrays(tmp_path / f"b/rank-{rank:04d}.safetensors", {name: base}, at)
    document = diff(tmp_path / "a", tmp_path / "b", "--json").document
    assert {entry["likely"] for entry in document["different"]} == {"tied copies apart"}
    (finding,) = document["findings"]
    assert (finding["tensors"], {place["pp"] for place in finding["coordinates"]}) == ([name], {1})
    check_text(finding["claim"])


AXES = st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3))


@given(sizes=AXES, data=st.data())
def test_places_in_words_are_exact(sizes: tuple[int, int, int], data: st.DataObject) -> None:
    """A pattern over a product of axes names the product, and no other pattern does."""
    everywhere = {Place(pp, tp, dp) for pp in range(sizes[0]) for tp in range(sizes[1]) for dp in range(sizes[2])}
    chosen = set(data.draw(st.lists(st.sampled_from(sorted(everywhere, key=str)), min_size=1)))
    text = describe_places(chosen, everywhere, everywhere)
    spans = [{getattr(place, axis) for place in chosen} for axis in ("pp", "tp", "dp")]
    is_product = len(chosen) == len(spans[0]) * len(spans[1]) * len(spans[2])
    if not is_product:
        assert "dp" in text and "every" not in text
    for axis, size, span in zip(("pp", "tp", "dp"), sizes, spans, strict=True):
        if is_product and size > 1 and len(span) < size:
            assert f"{axis}{min(span)}" in text
        if is_product and size == 1:
            assert f"{axis}0" not in text


@pytest.mark.parametrize(("fraction", "text"), [(0, "0 %"), (1, "100 %"), (0.9999999, "99.9 %"), (0.31, "31 %")])
def test_shares_never_round_to_nothing_or_all(fraction: float, text: str) -> None:
    assert format_percent(fraction) == text


def test_a_page_has_the_map_and_needs_nothing_else(tmp_path: Path, tiny: Any, diff: Any) -> None:
    tiny().write(tmp_path / "a")
    other = tiny()
    other.state[1, 1]["2.up.weight"]["fp32"] += 1
    other.write(tmp_path / "b")
    page = tmp_path / "page.html"
    assert diff(tmp_path / "a", tmp_path / "b", "--html", page).code == 1
    text = page.read_text()
    assert f"A: {tmp_path}/a<br>B: {tmp_path}/b" in text
    assert f"bsl {__version__}, {time.strftime('%Y-%m-%d', time.gmtime())}" in text
    assert "<html" in text
    assert "://" not in text.replace("http://www.w3.org", "")
    assert "<script" not in text
    assert text.count('class="none"') == 3
    assert 'title="2.up.weight"' in text
    assert "2.up.weight fp32" in text
    refused = diff(tmp_path / "a", tmp_path / "b", "--html", tmp_path / "nowhere/page.html")
    assert (refused.code, "nowhere/page.html" in refused.talk) == (1, True)
    assert "154 tensors compared" in refused.text  # the answer is not lost


def test_the_map_counts_names_over_dp(tmp_path: Path, diff: Any, save_arrays: Any) -> None:
    from bigsci_launch.weights.compare.compare import compare_weights
    from bigsci_launch.weights.locate.locate import open_weights

    for rank in range(4):
        at = {"pp": str(rank // 2), "tp": "0", "dp": str(rank % 2)}
        for side in "ab":
            values = {"w": np.full(3, float(side == "b" and rank == 3)), "v": np.zeros(2)}
            save_arrays(tmp_path / side / f"rank-{rank:04d}.safetensors", values, at)
    found = compare_weights(open_weights(tmp_path / "a"), open_weights(tmp_path / "b"))
    tps, rows = heat_map(found)
    cells = [[(cell.held, cell.differing, cell.percent) for cell in row if cell] for _, row in rows]
    assert (tps, cells) == ([0], [[(2, 0, 0)], [(2, 1, 50)]])


@pytest.mark.parametrize(
    "arguments", [[], ["x"], ["--audit", "x", "y", "z"]], ids=["nothing", "one side", "an audit of three"]
)
def test_what_cannot_be_meant_is_a_usage_error(diff: Any, arguments: list[str], check_text: Any) -> None:
    answer = diff(*arguments)
    assert answer.code == 2
    check_text(answer.talk)
