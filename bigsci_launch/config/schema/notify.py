"""The section `monitor.notify` of a run file."""

from __future__ import annotations

from bigsci_launch.config.schema.section import Section


class NotifySection(Section):
    """Where the watchers of a run send messages about what they find and do. Each configured way gets every message;
    `bsl notify RUN` tries them."""

    command: list[str] | None = None
    """A program that is started for each message, on the machine of the watcher. It reads the message as text on its
    standard input; BSL_SUBJECT holds it in one line, and BSL_MESSAGE all of it as JSON. No shell expands its arguments:
    `[sh, -c, 'mail -s "$BSL_SUBJECT" alice@example.org']`. It is killed after 30 s."""

    webhook: str | None = None
    """A URL to which `{"text": ...}` and further fields are posted as JSON, as Slack and Mattermost take it. It is a
    secret, and the run directory stores it: `webhook_variable` is better."""

    webhook_variable: str | None = None
    """Name of the environment variable that holds such a URL, where `bsl submit` and `bsl watch` are called."""
