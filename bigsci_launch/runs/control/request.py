"""What is asked of a run. The processes of an attempt read it in `requests/`, a file for each, which its owner writes.

Rank 0 of `bsl train` is asked to save and to stop, the controller of `survive` to fence a rank, and every rank to trace
its calls. A request is for the attempt that it names, and is granted once. People ask in `control/`: see `requests`.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Literal

from bigsci_launch.errors import RunDirError
from bigsci_launch.procfs import user_name
from bigsci_launch.runs.layout import AttemptDir, read_json, write_json
from bigsci_launch.runs.watching.places import names_in, require_own
from bigsci_launch.runs.watching.typed import typed
from bigsci_launch.safe_files import open_folder, parse_json, read_file_of

WITH_STEP = ("save", "exit", "restart")
"""Verbs that may wait for a step. Rank 0 of `bsl train` is asked for them, other programs get a signal."""
OF_CONTROLLER = ("fence", "begin_again")
"""What the controller of `survive` is asked: to kill the rank that holds up the others, or to begin again with all."""
TRACE = "trace"
MAX_BYTES = 64 * 1024
MOST_AT_ONCE = 100
"""Requests that are taken up at one look."""
_ASKED = re.compile(r"(?P<key>(?P<verb>[a-z_]{1,20})[A-Za-z0-9_.-]{0,60})\.json")


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked. `who` is a login name, or the name of a watcher. `attempt` is the attempt that is meant; None in a
    plain file of `control/`. `after_step` is the optimizer step after which it is due; None: the next one.

    `asked` is when it was written, in seconds since the epoch; in `control/`, by the clock of the file system. `wrong`
    says why it must be refused, and then there is no reason to read; None if nothing in the file speaks against it.
    """

    key: str
    verb: str
    who: str
    why: str
    after_step: int | None = None
    attempt: str | None = None
    asked: float = 0.0
    wrong: str | None = None
    generation: int | None = None
    """Of the controller: the generation that is meant, `rank` the one to kill, `failure` what it suffers from."""
    rank: int | None = None
    failure: Literal["hung", "stopped"] = "hung"
    others: tuple[int, ...] = ()
    """Further suspects: their agents kill those that do not leave."""
    include: tuple[str, ...] = ()
    """Of `trace`: packages and modules; nothing is traced if it is empty. The trace begins at once, when step
    `from_step` is reached, or when `from_call` (`MODULE:FUNCTION`) is called first."""
    from_step: int | None = None
    from_call: str | None = None

    def is_due(self, step: int) -> bool:
        """Whether it is due once `step` optimizer steps are done. One that comes late is due at once."""
        return self.after_step is None or step >= self.after_step


def put_request(attempt: AttemptDir, request: Request) -> None:
    """Ask the processes of an attempt. Raises OSError if it cannot be written."""
    write_json(attempt.requests / f"{request.key}.json", {"schema_version": 1, **asdict(request)})


def withdraw(attempt: AttemptDir, key: str) -> None:
    """Take a request back, if it is there."""
    (attempt.requests / f"{key}.json").unlink(missing_ok=True)


def read_requests(attempt: AttemptDir, verbs: Collection[str]) -> list[Request]:
    """Return what the processes of an attempt are asked with one of these verbs, oldest first.

    A file that is damaged, another's, or meant for another attempt has `wrong`.
    """
    found: list[Request | None] = []
    with suppress(OSError), open_folder(attempt.requests) as folder:
        owner = attempt.path.stat().st_uid
        require_own(os.fstat(folder), owner, attempt.requests)
        names = [match for match in map(_ASKED.fullmatch, sorted(names_in(folder))) if match and match["verb"] in verbs]
        found = [_asked(folder, match, attempt, owner) for match in names[:MOST_AT_ONCE]]
    return sorted(filter(None, found), key=lambda request: (request.asked, request.key))


def _asked(folder: int, match: re.Match[str], attempt: AttemptDir, owner: int) -> Request | None:
    """Return the request in a file; None if it has just been taken back."""
    try:
        content, found = read_file_of(match[0], MAX_BYTES, folder=folder)
        require_own(found, owner, attempt.requests / match[0])
        request = typed(Request, parse_json(content))
        _require_meant(request, match, attempt)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        return Request(match["key"], match["verb"], "", "", wrong=f"not a request: {error}")
    return request


def _require_meant(request: Request, match: re.Match[str], attempt: AttemptDir) -> None:
    if (request.key, request.verb) != (match["key"], match["verb"]):
        raise ValueError(f"its content is another request: {request.verb!r:.40}, key {request.key!r:.40}")
    if request.attempt != attempt.name:
        raise ValueError(f"it is for attempt {request.attempt!r:.40}")
    if request.verb in OF_CONTROLLER and request.generation is None:
        raise ValueError("it has no generation")
    if request.verb == "fence" and request.rank is None:
        raise ValueError("it has no rank")


def follow_requests(
    attempt: AttemptDir,
    verbs: Collection[str],
    every_s: float,
    until: threading.Event,
    tell: Callable[[list[Request]], None],
) -> None:
    """Call `tell` with what is asked whenever that has changed, until `until` is set.

    It is for a thread of its own, so that a file system that hangs stops nothing else.
    """
    known: list[Request] = []
    while True:
        found = read_requests(attempt, verbs)
        if found != known:
            tell(found)
            known = found
        if until.wait(every_s):
            return


def answer_request(attempt: AttemptDir, request: Request, refused: str | None, now: float) -> None:
    """Answer a request: `refused` is why it was not granted. The request is then closed."""
    answer = {"answered": now, "granted": refused is None, "refused": refused}
    write_json(attempt.answers / f"{request.key}.json", {**asdict(request), **answer})
    withdraw(attempt, request.key)


def read_answer(attempt: AttemptDir, key: str) -> Mapping[str, Any] | None:
    """Return what became of a request; None if it was not answered, or the answer cannot be read."""
    with suppress(RunDirError):
        document = read_json(attempt.answers / f"{key}.json")
        return document if isinstance(document, dict) else None
    return None


def trace_request(include: Iterable[str], from_step: int | None = None, from_call: str | None = None) -> Request:
    """Return the request to trace calls; without packages, to trace none. It holds for every start of an attempt."""
    packages, who = tuple(include), user_name(os.geteuid())
    return Request(TRACE, TRACE, who, "", asked=time.time(), include=packages, from_step=from_step, from_call=from_call)
