"""Names of files and folders that one room writes and another finds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigsci_launch.file_names import (
    checkpoint_tag,
    digests_name,
    dump_name,
    is_digests_name,
    moment_of_dump,
    rank_name,
    rank_of_name,
    step_of_tag,
    steps_done_at_dump,
)

NUMBERS = st.integers(0, 10**8)


def test_names() -> None:
    assert checkpoint_tag(20) == "global_step20"
    assert dump_name(5, "before") == "step-000005-before"
    assert (rank_name(3), rank_name(12345)) == ("rank-0003", "rank-12345")
    assert digests_name(3) == "rank-0003.digests.json"


@given(NUMBERS, st.sampled_from(["before", "after"]))
def test_every_name_is_read_as_it_was_written(number: int, when: str) -> None:
    assert step_of_tag(checkpoint_tag(number)) == number
    assert moment_of_dump(dump_name(number, when)) == (number, when)
    assert steps_done_at_dump(dump_name(number, when)) == number - (when == "before")
    assert rank_of_name(rank_name(number)) == number
    assert is_digests_name(digests_name(number))


@pytest.mark.parametrize(
    "name",
    ["", "20", "global_step", "global_step20 ", "global_step\u00b2", "global_step20_universal", "rank-",
     "rank-0003.json", ".rank-0003", "step-000005", "step-000005-during", "rank-x.digests.json", ".digests.json"],
)  # fmt: skip
def test_another_name_is_none_of_them(name: str) -> None:
    assert step_of_tag(name) is moment_of_dump(name) is steps_done_at_dump(name) is rank_of_name(name) is None
    assert not is_digests_name(name)
