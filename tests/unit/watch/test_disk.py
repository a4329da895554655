"""A watcher whose disk gives errors for a time looks again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from bigsci_launch.watch.rounds.until_over import look_and_show


def test_a_disk_that_gives_errors_for_a_time_does_not_end_the_watcher() -> None:
    looks = iter([OSError(5, "Input/output error"), OSError(116, "Stale file handle"), None])
    seen: list[Any] = []

    def tick() -> Any:
        error = next(looks)
        if error is not None:
            raise error
        return SimpleNamespace(is_over=True, goes_on=False, every_s=1.0)

    def say(text: str) -> None:
        seen.append(text)
        raise OSError(5, "the log is on the same disk")

    watcher = SimpleNamespace(tick=tick)
    answers = [look_and_show(watcher, lambda _: None, say) for _ in range(3)]  # type: ignore[arg-type]
    assert [answer is None for answer in answers] == [True, True, False]
    assert len(seen) == 2 and "Input/output error" in seen[0]
