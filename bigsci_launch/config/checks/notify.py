"""Rules about `monitor.notify`. No finding quotes the URL of a webhook, since the URL suffices to post to it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from bigsci_launch.config.finding import Finding
from bigsci_launch.config.schema.program import is_shell
from bigsci_launch.config.schema.run import RunConfig
from bigsci_launch.config.site import Site

KEY = "monitor.notify"
COMMAND, WEBHOOK, VARIABLE = f"{KEY}.command", f"{KEY}.webhook", f"{KEY}.webhook_variable"
_URL = re.compile(r"https?://[^\s/?#]+[^\s]*")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_UNEXPANDED = re.compile(r"\$\{?BSL_")


def check_notify(config: RunConfig, _site: Site) -> Iterator[Finding]:
    """Messages have a way to go, and each way can work."""
    notify = config.monitor.notify
    if notify is None:
        return
    if notify.command is not None:
        yield from _check_command(notify.command)
    if notify.webhook is not None:
        yield from _check_webhook(notify.webhook)
    if notify.webhook_variable is not None and not _NAME.fullmatch(notify.webhook_variable):
        text = "must be the name of an environment variable; the URL itself goes into the variable"
        yield Finding("notify", "error", (VARIABLE,), text)
    if notify.webhook is not None and notify.webhook_variable is not None:
        yield Finding("notify", "error", (WEBHOOK, VARIABLE), "exclude each other: give one")
    if notify.command is None and notify.webhook is None and notify.webhook_variable is None:
        yield Finding("notify", "error", (KEY,), "has no recipient: set command, webhook or webhook_variable")


def _check_command(words: Sequence[str]) -> Iterator[Finding]:
    program = words[0] if words else ""
    if not program.strip():
        yield Finding("notify", "error", (COMMAND,), "must begin with a program, such as [sh, -c, '...']")
    elif "/" in program and not program.startswith("/"):
        text = f"{program} is relative, but watchers run in other folders: write an absolute path"
        yield Finding("notify", "error", (COMMAND,), text)
    elif not is_shell(program) and any(_UNEXPANDED.search(word) for word in words):
        text = "no shell expands its arguments: write [sh, -c, '...'] around a line that uses $BSL_SUBJECT"
        yield Finding("notify", "warning", (COMMAND,), text)


def _check_webhook(url: str) -> Iterator[Finding]:
    if not _URL.fullmatch(url):
        yield Finding("notify", "error", (WEBHOOK,), "must be a URL that begins with https:// or http://")
        return
    text = (
        "its value will be stored in the run directory, where your group may read it and post in your name; "
        "put it into an environment variable, and name that in webhook_variable"
    )
    yield Finding("notify", "warning", (WEBHOOK, VARIABLE), text)
