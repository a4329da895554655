"""Every kind of object that torch writes: equal if another process saves it again, and named after any change."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from .zoo import CONTAINERS, KINDS, RAMP, save, tied, write_all

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[4]


@pytest.fixture(scope="module")
def saved_twice(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two folders with every kind in each container, written by two processes that hash text differently."""
    here, there = tmp_path_factory.mktemp("here"), tmp_path_factory.mktemp("there")
    write_all(here)
    code = f"from pathlib import Path; from {__package__}.zoo import write_all; write_all(Path({str(there)!r}))"
    environment = {**os.environ, "PYTHONHASHSEED": "4711", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, env=environment, timeout=120)
    return here, there


@pytest.mark.slow
@pytest.mark.parametrize("container", CONTAINERS)
def test_every_kind_saved_by_another_process_is_equal(
    saved_twice: tuple[Path, Path], diff: Callable[..., Any], container: str
) -> None:
    answer = diff(*(folder / f"same-{container}.pt" for folder in saved_twice))
    assert answer.code == 0, answer.text


def test_the_container_changes_nothing(saved_twice: tuple[Path, Path], diff: Callable[..., Any]) -> None:
    answer = diff(*(saved_twice[0] / f"same-{container}.pt" for container in CONTAINERS))
    assert answer.code == 0, answer.text


@pytest.mark.parametrize("container", CONTAINERS)
def test_any_change_is_named(saved_twice: tuple[Path, Path], diff: Callable[..., Any], container: str) -> None:
    answer = diff(*(saved_twice[0] / f"{name}-{container}.pt" for name in ("same", "changed")), "--json")
    assert answer.code == 1, answer.text
    document = answer.document
    assert not document["not_read"] and not document["unreadable"]
    found = [entry["tensor"] for entry in document["different"]] + [entry["value"] for entry in document["values"]]
    unseen = [kind for kind in KINDS if not any(name_is_of(name, kind) for name in found)]
    assert not unseen


def test_views_and_copies_of_one_content_are_equal(tmp_path: Path, diff: Callable[..., Any]) -> None:
    """Tied, expanded and transposed tensors against copies of their own."""
    views = {"tied": tied(), "expanded": RAMP[:1].expand(4, 6), "turned": RAMP.t(), "zero": torch.ones(()).expand(2, 0)}
    copies = {
        "tied": {name: {key: value.clone() for key, value in part.items()} for name, part in tied().items()},
        "expanded": RAMP[:1].repeat(4, 1),
        "turned": RAMP.t().contiguous(),
        "zero": torch.ones(2, 0),
    }
    paths = [save(tree, tmp_path / f"{name}.pt") for name, tree in (("views", views), ("copies", copies))]
    answer = diff(*paths)
    assert answer.code == 0, answer.text
    for name in ("expanded", "turned"):
        changed = {**copies, name: copies[name] + (copies[name] == 3)}
        assert diff(paths[0], save(changed, tmp_path / "changed.pt")).code == 1


def name_is_of(name: str, kind: str) -> bool:
    """Whether an entry's name is a kind's own, or that of one of its parts."""
    return name == kind or name.startswith((f"{kind}.", f"[{kind!r}]"))
