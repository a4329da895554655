"""The ways of a message to people: a program that is started for it, and a URL to which it is posted.

No error quotes a URL: anyone with that of a webhook can post to it.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import tempfile
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any
from urllib.parse import urlsplit

from bigsci_launch.config.load import load_resolved
from bigsci_launch.config.schema.notify import NotifySection
from bigsci_launch.errors import BslError
from bigsci_launch.runs.layout import AttemptDir
from bigsci_launch.runs.watching.outbox import Notice
from bigsci_launch.watch.notify.message import document, subject, text

COMMAND_LIMIT_S = 30.0
ANSWER_LIMIT_S = 10.0
"""How long a server may take for each part of its answer."""
MOST_SAID = 160
_URL = re.compile(r"\w+://\S+")


class NotificationFailed(Exception):
    """A message could not be delivered. The text is the reason, without any address."""


@dataclass(frozen=True, slots=True)
class CommandWay:
    """A program that is started for each message."""

    words: tuple[str, ...]
    name: str = "command"

    def send(self, notice: Notice) -> str:
        """Start the program and return the result. Raises NotificationFailed."""
        return run_command(self.words, notice)


@dataclass(frozen=True, slots=True)
class WebhookWay:
    """A URL to which messages are posted; None if the variable that should hold it is not set here."""

    url: str | None
    variable: str | None = None
    name: str = "webhook"

    def __repr__(self) -> str:
        return "WebhookWay(...)"

    def send(self, notice: Notice) -> str:
        """Post the message and return the result. Raises NotificationFailed."""
        if not self.url:
            raise NotificationFailed(f"{self.variable} is not set in this environment")
        return post(self.url, document(notice))


Way = CommandWay | WebhookWay


def read_ways(attempt: AttemptDir) -> tuple[Way, ...]:
    """Return the ways of the attempt's run file; none if it names none, cannot be read, or is another user's: the
    program that it names would run as the user who watches."""
    try:
        if attempt.path.stat().st_uid != os.geteuid():
            return ()
        notify = load_resolved(attempt.config).monitor.notify
    except (BslError, OSError):
        return ()
    return ways_of(notify) if notify is not None else ()


def ways_of(notify: NotifySection) -> tuple[Way, ...]:
    """Return the ways of a run file, with the webhook's URL as the environment has it."""
    found: list[Way] = [CommandWay(tuple(notify.command))] if notify.command else []
    if notify.webhook:
        found.append(WebhookWay(notify.webhook))
    elif notify.webhook_variable:
        found.append(WebhookWay(os.environ.get(notify.webhook_variable), notify.webhook_variable))
    return tuple(found)


def run_command(words: Sequence[str], notice: Notice, limit_s: float = COMMAND_LIMIT_S) -> str:
    """Start a program with the message on its standard input, and return when it has ended well.

    Its output goes to a file: a process that it leaves behind may keep a pipe open for ever.

    Raises:
        NotificationFailed: it cannot be started, it fails, or it is killed after `limit_s`.
    """
    variables = {"BSL_SUBJECT": subject(notice), "BSL_MESSAGE": json.dumps(document(notice))}
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as said:
        given.write(f"{text(notice)}\n".encode())
        given.seek(0)
        try:
            process = subprocess.Popen(
                list(words),
                stdin=given,
                stdout=said,
                stderr=said,
                env={**os.environ, **variables},
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            raise NotificationFailed(f"{words[0]}: {getattr(error, 'strerror', None) or error}") from error
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise NotificationFailed(f"{words[0]} was killed after {limit_s:g} s{_last_line(said)}") from None
        finally:
            _kill_group(process)
        if code:
            how = f"exit code {code}" if code > 0 else signal.Signals(-code).name
            raise NotificationFailed(f"{words[0]}: {how}{_last_line(said)}")
    return "it ended with exit code 0"


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill the program if it still runs, with what it has started."""
    if process.poll() is None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _last_line(said: IO[bytes]) -> str:
    said.seek(0, os.SEEK_END)
    said.seek(max(0, said.tell() - 4096))
    lines = [line.strip() for line in said.read().decode("utf-8", "replace").splitlines() if line.strip()]
    return f": {_harmless(lines[-1])}" if lines else ""


def _harmless(said: str) -> str:
    """Return what a program or a server said, without addresses and control characters."""
    plain = "".join(letter if letter.isprintable() else " " for letter in _URL.sub("<address>", said))
    return plain[:MOST_SAID].strip()


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A POST that is redirected would arrive as a GET without the message, and be answered with 200."""

    def redirect_request(self, *_: Any) -> None:
        return None


def post(url: str, message: dict[str, Any], limit_s: float = ANSWER_LIMIT_S) -> str:
    """Post a message as JSON, through the proxies of the environment, and return the server's answer.

    Raises:
        NotificationFailed: there is no connection, no answer in time, or an answer other than 2xx.
    """
    try:
        host = urlsplit(url).hostname or "the webhook's host"
        request = urllib.request.Request(
            url,
            data=json.dumps(message).encode(),
            headers={"Content-Type": "application/json", "User-Agent": "bsl"},
            method="POST",
        )
        with urllib.request.build_opener(_NoRedirect).open(request, timeout=limit_s) as answer:
            answer.read(4096)
            return f"{host} answered {answer.status}"
    except urllib.error.HTTPError as error:
        with error:
            raise NotificationFailed(_refused(host, url, error)) from None
    except (urllib.error.URLError, OSError, http.client.HTTPException) as error:
        raise NotificationFailed(f"{host}: {_why(error, limit_s)}") from None
    except ValueError:
        raise NotificationFailed("the webhook's address is not a URL") from None


def _refused(host: str, url: str, error: urllib.error.HTTPError) -> str:
    if 300 <= error.code < 400:
        return f"{host} answered {error.code}: redirects are not followed; use the new address"
    try:
        said = error.read(4096).decode("utf-8", "replace").strip()
    except (OSError, http.client.HTTPException):
        said = ""
    # Some servers repeat the path, which is the secret, and others answer with a page.
    secrets = [part for part in re.split(r"[/?&=]", url.partition("://")[2].partition("/")[2]) if len(part) > 3]
    is_short = said and len(said) <= MOST_SAID and "\n" not in said and not any(part in said for part in secrets)
    why = _harmless(said) if is_short else str(error.reason)
    return f"{host} answered {error.code}: {why}"


def _why(error: Exception, limit_s: float) -> str:
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(reason, TimeoutError):
        return f"no answer within {limit_s:g} s"
    if isinstance(reason, http.client.InvalidURL):
        return "the webhook's address is not a URL"
    if isinstance(reason, http.client.RemoteDisconnected):
        return "the connection was closed without an answer"
    if isinstance(reason, http.client.HTTPException):
        return "the answer is not HTTP"
    if isinstance(reason, OSError) and reason.strerror:
        return reason.strerror
    return _harmless(str(reason)) or type(reason).__name__
