"""The JSON documents match the manual: every field has a meaning, and every meaning has its field."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from bigsci_launch.cli.main import bsl

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs" / "reference"))
meanings = importlib.import_module("meanings")
sys.path.pop(0)

ON_A_RUN = (
    """--version > /dev/null; test -d runs/seen || bsl submit configs/demo.yaml --local --set run.name=seen"""
    """ --set 'run.command=["false"]' --set 'monitor.notify.command=["true"]' > /dev/null; bsl """
)
ALONE = {
    "bsl submit --dry-run --json": ["submit configs/minicluster.yaml --dry-run --json"],
    "bsl list --json": ["list --json"],
    "bsl why --json": [
        "config sites > /dev/null; echo 'srun: error: n1: task 3: Out Of Memory' > job.out; bsl why job.out --json",
        """submit configs/demo.yaml --local --set run.name=ended"""
        """ --set 'run.command=["sh", "-c", "echo CUDA error: out of memory; exit 1"]' > /dev/null;"""
        """ bsl why ended --json""",
    ],
    "bsl slow --json": [ON_A_RUN + "slow seen --json"],
    "bsl rehearse --json": ["""rehearse configs/demo.yaml --set 'run.command=["true"]' --json"""],
    "bsl config check --json": [
        "config check configs/demo.yaml --json",
        "config check configs/demo.yaml --set training.steps=x --json",
        "config check configs/bloom-176b.yaml --set data.prefix=null --json",
    ],
    "bsl config show --json": ["config show configs/demo.yaml --json"],
    "bsl config sites --json": ["config sites --json"],
    "bsl plan --json": ["plan configs/bloom-176b.yaml --top 1 --json"],
    "bsl plan --survive --json": [
        "plan configs/bloom-176b.yaml --lose node3,node9 --trace benchmarks/rows/gcp-a2-trace.csv --json"
    ],
    "bsl plan score --json": [
        "plan predict benchmarks/rows/chronicle.csv --calibration slurm/calibrations/jean-zay-a100.json -o p.csv"
        " > /dev/null; bsl plan score p.csv --json"
    ],
    "bsl hang-lab list --json": ["hang-lab list --json"],
    "bsl plan check --json": ["plan check configs/bloom-176b.yaml --json"],
    "bsl cluster status --json": ["cluster status --json"],
    "bsl notify --json": [ON_A_RUN + "notify seen --json"],
    "bsl control --json": [ON_A_RUN + "--version > /dev/null; touch runs/seen/control/save; bsl control seen --json"],
    "bsl watch --json": [ON_A_RUN + "watch seen --once --json"],
    "bsl nodes list --json": ["nodes add n1 --reason hot > /dev/null; bsl nodes list --json"],
    "bsl data prepare --json": ["data prepare configs --output corpus --vocab-size 300 --json"],
}
AFTER_TUTORIAL = {
    "bsl submit --json": [
        """submit configs/demo.yaml --local --set run.name=fine --set 'run.command=["true"]' --json""",
        """submit configs/demo.yaml --local --set run.name=poor --set 'run.command=["false"]' --json""",
    ],
    "bsl status --json": ["status demo --json", "status hangs --json"],
    "bsl list --json": ["list --json"],
    "bsl logs --json": ["logs demo -n 1 --json"],
    "bsl checkpoint list --json": ["checkpoint list demo --json"],
    "bsl checkpoint verify --json": ["checkpoint verify demo --json"],
    "bsl spy --json": ["spy --bundle $(ls -d runs/hangs/spy/* | head -1) --json --why"],
    "bsl trace last --json": ["trace last hangs --json"],
    "bsl diff-weights --json": [
        "diff-weights runs/demo/checkpoints/global_step10 runs/demo/checkpoints/global_step20 --json"
    ],
}
ON_SLURM = {"bsl nodes check --json", "bsl nodes bisect --json", "bsl hang-lab run --json"}
"""Checked where a cluster runs: tests/slurm/test_nodes.py and test_hang_lab.py."""


def differences(document: Any, fields: dict[str, str], path: str = "") -> Iterator[str]:
    """Yield the fields of a document without a meaning, and the meanings whose field is missing."""
    if isinstance(document, list):
        for entry in document:
            yield from differences(entry, fields, f"{path}[]")
    elif isinstance(document, dict):
        name = path.removesuffix("[]")
        meaning = next((fields[known] for known in (path, name, f"{name}?") if known in fields), "")
        named = re.match(r"\{([^}]*)\}|list of \{([^}]*)\}", meaning)
        children = [known for known in fields if re.fullmatch(rf"{re.escape(path)}\.?[^.[\]]+(\[\].*|\..*)?", known)]
        if named:
            names = {name.strip() for name in (named[1] or named[2]).split(",")}
            yield from (f"{path}.{name}" for name in names ^ set(document))
        elif children:
            start = f"{path}." if path else ""
            wanted = {re.split(r"[.\[]", known.removeprefix(start))[0] for known in children}
            optional = {name.rstrip("?") for name in wanted if name.endswith("?")}
            yield from (f"{start}{name}" for name in (wanted - {f"{name}?" for name in optional}) - set(document))
            yield from (f"{start}{name}" for name in set(document) - wanted - optional)
            for name, value in document.items():
                yield from differences(value, fields, f"{start}{name}")


def test_the_comparison_notices() -> None:
    fields = {
        "a": "x",
        "b.c": "x",
        "d[].e": "x",
        "f": "list of {g, h}",
        "i": "names depend on the run",
        "j?": "x",
        "k?": "list of {l}",
    }
    good = {"a": 1, "b": {"c": 2}, "d": [{"e": 1}], "f": [{"g": 1, "h": 2}], "i": {"any": 1}}
    assert not list(differences(good, fields))
    assert not list(differences({**good, "j": 1, "k": [{"l": 1}]}, fields))
    assert list(differences({**good, "k": [{"m": 1}]}, fields)) in (["k[].l", "k[].m"], ["k[].m", "k[].l"])
    assert list(differences({**good, "z": 1}, fields)) == ["z"]
    assert list(differences({**good, "b": {}}, fields)) == ["b.c"]
    assert list(differences({**good, "d": [{"e": 1, "q": 1}]}, fields)) == ["d[].q"]
    assert list(differences({**good, "f": [{"g": 1}]}, fields)) == ["f[].h"]


def cases(table: dict[str, list[str]]) -> list[Any]:
    return [
        pytest.param(name, words, id=words.rpartition("bsl ")[2])
        for name, commands in table.items()
        for words in commands
    ]


@pytest.mark.parametrize(("name", "words"), cases(ALONE))
def test_documents(name: str, words: str, print_alone: Callable[[str], str]) -> None:
    check(name, print_alone(words))


@pytest.mark.torch
@pytest.mark.timeout(540)
@pytest.mark.parametrize(("name", "words"), cases(AFTER_TUTORIAL))
def test_documents_of_runs(name: str, words: str, print_after_tutorial: Callable[[str], str]) -> None:
    check(name, print_after_tutorial(words))


def check(name: str, printed: str) -> None:
    assert not list(differences(json.loads(printed), meanings.fields_of(name)))


def reporting(command: click.Command = bsl, path: str = "bsl") -> Iterator[str]:
    """Yield the commands that have `--json`, as they are typed."""
    if any("--json" in parameter.opts for parameter in command.params):
        yield f"{path.removesuffix(' search')} --json"  # `bsl plan CONFIG` is `bsl plan search CONFIG`
    if isinstance(command, click.Group):
        for name, below in command.commands.items():
            yield from reporting(below, f"{path} {name}")


def test_every_command_that_reports_is_described_and_checked() -> None:
    assert set(meanings.DOCUMENTS) == {*reporting(), "bsl submit --dry-run --json", "bsl plan --survive --json"}
    assert set(meanings.DOCUMENTS) == {*ALONE, *AFTER_TUTORIAL, *ON_SLURM}
