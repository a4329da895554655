"""Who called at the ports of an attempt and did not have its token: the counts that their owners have recorded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bigsci_launch.runs.layout import AttemptDir, read_record
from bigsci_launch.units import ago


@dataclass(frozen=True, slots=True)
class Strangers:
    """How many connections were sent away by the controller of `survive`, and by the node check. None: it did not
    listen, or recorded none. `newest_host` called last at the controller, at `newest_time` (seconds since the epoch).
    """

    survive: int | None = None
    node_check: int | None = None
    newest_host: str | None = None
    newest_time: float | None = None

    @property
    def number(self) -> int:
        return (self.survive or 0) + (self.node_check or 0)


NO_STRANGERS = Strangers()


def read_strangers(attempt: AttemptDir) -> Strangers:
    """Return the counts of an attempt. A file that is missing or damaged counts as none."""
    controller, check = read_record(attempt.strangers), read_record(attempt.check_result)
    host, moment = controller.get("newest_host"), controller.get("newest_time")
    return Strangers(
        _count(controller.get("count")),
        _count(check.get("strangers")),
        host if isinstance(host, str) else None,
        float(moment) if isinstance(moment, (int, float)) else None,
    )


def _count(value: object) -> int | None:
    return value if type(value) is int and value >= 0 else None


def stranger_facts(found: Strangers, asked: float) -> list[tuple[str, str]]:
    """Return a line about strangers; nothing if none has called."""
    if not found.number:
        return []
    places = (("survive", found.survive), ("the node check", found.node_check))
    text = ", ".join(f"{count} at the port of {place}" for place, count in places if count)
    if found.newest_host is not None and found.newest_time is not None:
        text += f", the newest {ago(found.newest_time, asked)} from {found.newest_host}"
    return [("strangers", f"{text}: sent away")]


def strangers_document(found: Strangers) -> dict[str, Any]:
    """Return the part of the JSON document of `bsl status` that is about strangers."""
    newest = None
    if found.newest_host is not None:
        newest = {"host": found.newest_host, "time": found.newest_time}
    return {"survive": found.survive, "node_check": found.node_check, "newest": newest}
