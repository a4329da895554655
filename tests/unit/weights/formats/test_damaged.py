"""Files that were damaged at random: never a traceback, and never equal unless a library reads the same from both."""

from __future__ import annotations

import json
import warnings
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bigsci_launch.cli.main import bsl

from .hostile_files import DIGESTS

TREE = {
    "model": OrderedDict(w=torch.arange(6.0).reshape(2, 3), b=torch.ones(2, dtype=torch.bfloat16)),
    "optimizer": {"state": {0: {"step": 3, "exp_avg": torch.full((2, 3), 0.5)}}, "lr": 0.1},
}
PRINTED = f"w={torch.nn.Parameter(torch.arange(6.0).reshape(2, 3))}\nb={torch.ones(2)}\n"


def write_torch(path: Path, *, is_zip: bool) -> None:
    torch.save(TREE, path, _use_new_zipfile_serialization=is_zip)


WRITERS: dict[str, Callable[[Path], object]] = {
    "zip.pt": lambda path: write_torch(path, is_zip=True),
    "legacy.pt": lambda path: write_torch(path, is_zip=False),
    "w.safetensors": lambda path: safetensors.torch.save_file(dict(TREE["model"]), path, {"format": "pt"}),
    "rank-0000.digests.json": lambda path: path.write_text(json.dumps(DIGESTS)),
    "printed.txt": lambda path: path.write_text(PRINTED),
}


def loaded(path: Path) -> Any:
    """Return what a library reads from a file; None if it cannot read it, or if there is no library."""
    try:
        if path.suffix == ".pt":
            return torch.load(path, weights_only=True)
        if path.suffix == ".safetensors":
            return safetensors.torch.load_file(path)
        return json.loads(path.read_bytes())["tensors"] if path.suffix == ".json" else None
    except Exception:
        return None


def are_same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(are_same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(are_same, a, b))
    return bool(a == b)


@st.composite
def damages(draw: st.DrawFn) -> Callable[[bytes], bytes]:
    """Flip bits, overwrite, cut, insert or repeat bytes, up to three times. Places count from either end."""
    steps = draw(
        st.lists(
            st.tuples(
                st.sampled_from(["flip", "set", "cut", "insert", "repeat", "truncate"]),
                st.one_of(st.integers(0, 1 << 12), st.integers(-(1 << 9), -1)),
                st.binary(min_size=1, max_size=8),
                st.integers(1, 64),
            ),
            min_size=1,
            max_size=3,
        )
    )

    def damage(data: bytes) -> bytes:
        for kind, place, new, length in steps:
            at = place % max(1, len(data))
            piece = data[at : at + length]
            data = {
                "flip": data[:at] + bytes([data[at] ^ (1 << length % 8)] if data else []) + data[at + 1 :],
                "set": data[:at] + new + data[at + len(new) :],
                "cut": data[:at] + data[at + length :],
                "insert": data[:at] + new + data[at:],
                "repeat": data[:at] + piece + data[at:],
                "truncate": data[:at],
            }[kind]
        return data

    return damage


@pytest.mark.slow
@pytest.mark.parametrize("name", WRITERS)
@given(damage=damages())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_damaged_file_is_never_wrongly_equal(tmp_path: Path, name: str, damage: Callable[[bytes], bytes]) -> None:
    good, bad = tmp_path / "good" / name, tmp_path / "bad" / name
    for path in (good, bad):
        path.parent.mkdir(exist_ok=True)
    if not good.exists():
        WRITERS[name](good)
    bad.write_bytes(damage(good.read_bytes()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        answer = CliRunner().invoke(bsl, ["diff-weights", str(good.parent), str(bad.parent)], catch_exceptions=False)
        assert answer.exit_code in (0, 1, 4), answer.output
        if answer.exit_code == 0 and (found := loaded(bad)) is not None:
            expected = loaded(good)
            if "compared without" in answer.output:  # a wrapper's name may differ, if the answer names it
                expected, found = list(expected.values()), list(found.values())
            assert are_same(expected, found), answer.output
