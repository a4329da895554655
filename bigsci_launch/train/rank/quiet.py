"""Keeps what libraries print out of the log of a run."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Iterator

log = logging.getLogger(__name__)


@contextlib.contextmanager
def talk_as_debug() -> Iterator[None]:
    """Send what libraries print inside the `with` block to the log at level DEBUG, line by line."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            yield
    finally:
        for line in filter(str.strip, printed.getvalue().splitlines()):
            log.debug("%s", line)
