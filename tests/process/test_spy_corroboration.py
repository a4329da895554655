"""What `bsl spy` finds in real hangs besides stacks: lock holders, logs, dead connections, transferred bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from bigsci_launch.hang_lab.judgement import judge, read_verdict
from bigsci_launch.hang_lab.needs import missing_need
from bigsci_launch.hang_lab.nursery import Nursery
from bigsci_launch.hang_lab.runner import Trial, reproduce
from bigsci_launch.hang_lab.spying import spy
from bigsci_launch.hang_lab.zoo import find_reproduction
from tests.support.texts import has_parts

pytestmark = pytest.mark.torch
Look = Callable[[str, int], dict[str, Any]]


@pytest.fixture
def look(nursery: Nursery) -> Look:
    """`look("H41", 1)` returns the verdict on four ranks with this culprit, and checks that it is right."""

    def ask(name: str, culprit: int) -> dict[str, Any]:
        reproduction = find_reproduction(name)
        if reason := missing_need(reproduction):
            pytest.skip(f"{name} {reason}")
        with reproduce(Trial(reproduction, 4, culprit), nursery=nursery) as standing:
            document = spy(standing.run.path)
            judgement = judge(read_verdict(document), reproduction, culprit, standing.topology)
            assert judgement.is_right, document
        found: dict[str, Any] = document["verdict"]
        return found

    return ask


def test_the_holder_of_a_file_lock(look: Look) -> None:
    verdict = look("H41", 0)
    assert "index_cache.lock is held " in verdict["evidence"][0]
    assert verdict["look_first"][0]["rank"] == 0


def test_an_exception_in_the_log_says_why_a_rank_left(look: Look) -> None:
    """The rank waits in a barrier as if nothing had happened; only its log shows the exception."""
    verdict = look("H65", 3)
    assert verdict["class"] == "H47"
    assert has_parts(verdict["evidence"][0], "OSError: [Errno 28] ", " write_shard (kernel.py:")


def test_a_lock_file_for_which_nobody_works(look: Look) -> None:
    verdict = look("H40", 1)
    assert "left over" in verdict["evidence"][0]
    assert any("torch_extensions" in command for command in verdict["next"])


def test_bytes_that_nobody_acknowledges(look: Look) -> None:
    verdict = look("H80", 0)
    assert "network" in verdict["claim"] and "ranks 0-1" in verdict["claim"]
    assert sorted(side["ranks"] for side in verdict["sides"]) == [[0, 1], [2, 3]]


def test_a_child_that_computes_is_no_hang(look: Look) -> None:
    verdict = look("H50", 2)
    assert verdict["state"] == "slow"
    assert "(cc1plus), which computes" in verdict["claim"]
