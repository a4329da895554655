"""Every terminal session of the manual runs as written there; and the comparison itself can fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

LINES = """\
rank 5 (vm, dp0 pp1 tp1) left out all_reduce number 176 of the tensor-parallel group (ranks 4-5)
state    RUNNING, according to launcher
step     3/20, 0.357 s per step, loss 6.18497
slowest  rank 7 (dp1 pp1 tp1) on vm: newest heartbeat 6.9 s ago, in step at step 4
11-21 02:46:21.578 [vm rank 4 dp0 pp1 tp0]  saved global_step20
"""


def test_command(session: Any, index: int, rehearsals: Any, request: pytest.FixtureRequest) -> None:
    if session.needs & {"torch", "tutorial"}:
        pytest.importorskip("deepspeed")
    if "slurm" in session.needs:
        request.getfixturevalue("slurm_packages")
    command, outcomes = session.commands[index], rehearsals.outcome_of(session)
    place = f"{session.page.name}:{command.line}: $ {command.text}"
    assert index < len(outcomes), f"{place}\nwas not reached: a command above it failed or did not end"
    outcome = outcomes[index]
    assert rehearsals.is_as_expected(command.expected, outcome.printed), (
        f"{place}\nthe page says:\n{chr(10).join(command.expected)}\n\nit printed:\n{outcome.printed}"
    )
    following = session.commands[index + 1].text if index + 1 < len(session.commands) else ""
    assert outcome.status == 0 or following == "echo $?", f"{place}\nexit status {outcome.status}:\n{outcome.printed}"


@pytest.mark.parametrize(
    ("written", "printed"),
    [
        ("rank 5", "rank 4"),
        ("RUNNING", "COMPLETED"),
        ("3/20", "3/21"),
        ("global_step20\n", "global_step20\nand more\n"),
        ("state    RUNNING, according to launcher\n", ""),
    ],
)
def test_another_word_rank_or_line_is_noticed(compare: Callable[[str, str], bool], written: str, printed: str) -> None:
    assert compare(LINES, LINES)
    assert not compare(LINES, LINES.replace(written, printed))


@pytest.mark.parametrize(
    ("written", "printed"),
    [("6.9 s ago", "2 min 51 s ago"), ("0.357", "1e-05"), ("11-21 02:46:21.578", "01-02 13:14:15.000"), ("  ", " ")],
)
def test_measurements_may_differ(compare: Callable[[str, str], bool], written: str, printed: str) -> None:
    assert compare(LINES, LINES.replace(written, printed))


def test_dots_stand_for_text_and_for_lines(compare: Callable[[str, str], bool]) -> None:
    assert compare("rank 5 ... (ranks 4-5)\n...\n11-21 02:46:21.578 ... saved ...", LINES)
    assert not compare("rank 5 ... (ranks 4-5)\n11-21 02:46:21.578 ... saved ...", LINES)
