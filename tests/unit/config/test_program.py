"""Which program `run.command` starts."""

from __future__ import annotations

import pytest

from bigsci_launch.config.schema.program import starts_trainer

MODULE = ("python", "-m", "bigsci_launch.train")


@pytest.mark.parametrize(
    "command",
    [
        None,
        MODULE,
        ("nice", *MODULE),
        ("numactl", "--localalloc", "/opt/venv/bin/bsl", "train"),
        ("nsys", "profile", "-o", "report", *MODULE),
        ("./bind.sh", *MODULE),
        ("bash", "-c", "ulimit -c 0; exec python -m bigsci_launch.train"),
        ("bash", "-lc", 'exec "$PYTHON" -m bigsci_launch.train \'half a quote'),
    ],
)
def test_a_wrapped_trainer_is_recognised(command: tuple[str, ...] | None) -> None:
    assert starts_trainer(command)


@pytest.mark.parametrize(
    "command",
    [
        ("python", "train.py"),
        ("python", "-m", "bigsci_launch.trainer"),
        ("python", "bigsci_launch.train"),
        ("my-bsl", "train"),
        ("bsl", "status", "train"),
        ("echo", "python -m bigsci_launch.train"),
        ("torchrun", "-m", "megatron.train"),
    ],
)
def test_another_program_is_not(command: tuple[str, ...]) -> None:
    assert not starts_trainer(command)
