"""Every kind of object that torch writes: equal if another process saves it again, and named after any change."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .zoo import CONTAINERS, KINDS, write_all

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


def name_is_of(name: str, kind: str) -> bool:
    """Whether an entry's name is a kind's own, or that of one of its parts."""
    return name == kind or name.startswith((f"{kind}.", f"[{kind!r}]"))
