"""Which calls the ranks of an attempt trace: `trace.json`, which each rank reads at its start and every ten seconds."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from pathlib import Path

from bigsci_launch.config.schema.values import TRACED_CALL, TRACED_NAME
from bigsci_launch.errors import ConfigError, RunDirError
from bigsci_launch.runs.attempts import query_attempt
from bigsci_launch.runs.layout import AttemptDir, rank_files, read_json, write_json


@dataclass(frozen=True, slots=True)
class TraceWish:
    """`include` names packages and modules; nothing is traced if it is empty. The trace begins at once, when step
    `from_step` is reached, or when `from_call` (`MODULE:FUNCTION`) is called first."""

    include: tuple[str, ...]
    from_step: int | None = None
    from_call: str | None = None


def write_trace_wish(file: Path, wish: TraceWish) -> None:
    """Write the wish to `file` in one piece.

    Raises:
        OSError: it cannot be written.
    """
    document = {
        "schema_version": 1,
        "include": list(wish.include),
        "from_step": wish.from_step,
        "from_call": wish.from_call,
        "written": time.time(),
    }
    write_json(file, document)


NO_TRACE = TraceWish(())


def parse_wish(include: str, from_step: int | None, from_call: str | None) -> TraceWish:
    """Return the wish that options of the command line mean.

    Raises:
        ConfigError: a name is none, or two beginnings are named.
    """
    names = tuple(name.strip() for name in include.split(",") if name.strip())
    if wrong := [name for name in names if not re.fullmatch(TRACED_NAME, name)]:
        raise ConfigError(f"--include: {wrong[0]!r} is no name of a package", hint="for example: --include my_package")
    if not names:
        raise ConfigError("--include: no package is named", hint="for example: --include my_package,__main__")
    if from_call is not None and not re.fullmatch(TRACED_CALL, from_call):
        raise ConfigError(
            f"--from-call: {from_call!r} is no function", hint="write MODULE:FUNCTION, such as __main__:train_step"
        )
    if from_step is not None and from_call is not None:
        raise ConfigError("--from-step and --from-call exclude each other", hint="name one")
    return TraceWish(names, from_step, from_call)


def ask_ranks(attempt: AttemptDir, wish: TraceWish) -> None:
    """Write the wish for the ranks of a running attempt.

    Raises:
        RunDirError: the attempt has ended, or its ranks keep no rings and look for no wish.
    """
    run = attempt.path.parent.parent.name
    if query_attempt(attempt).state.is_over:
        raise RunDirError(f"run {run} has ended", hint=f"`bsl trace last {run}` shows what its ranks have left")
    if (why := _why_deaf(attempt)) is not None:
        raise RunDirError(f"the ranks of {run} keep no rings: {why}", hint="set monitor.ring to auto, and submit again")
    try:
        write_trace_wish(attempt.trace, wish)
    except OSError as error:
        raise RunDirError(f"{attempt.trace}: {(error.strerror or str(error)).lower()}") from error


def _why_deaf(attempt: AttemptDir) -> str | None:
    """Return why no rank looks for a wish; None if one may."""
    records = [read_json(file) for file in rank_files(attempt.pids, ".json").values()]
    if not records or any(record.get("rings") for record in records):
        return None
    return str(records[0].get("why_no_rings"))
