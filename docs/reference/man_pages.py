"""The man pages, from the same commands as `commands.md`: one for `bsl`, and one for each command with all below it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

import click

from bigsci_launch import __version__


def man_pages(bsl: click.Group) -> dict[str, str]:
    """Return the text of each man page, by file name."""
    found = {"man/bsl.1": _page("bsl", bsl, below=False)}
    for name, command in sorted(bsl.commands.items()):
        if not command.hidden:
            found[f"man/bsl-{name}.1"] = _page(f"bsl {name}", command, below=True)
    return found


def _page(path: str, command: click.Command, *, below: bool) -> str:
    name = path.replace(" ", "-")
    lines = [
        f'.TH "{name.upper()}" "1" "" "bsl {__version__}" "bigsci-launch"',
        *(".SH NAME", f"{_plain(name)} \\- {_plain(command.get_short_help_str(200).rstrip('.'))}"),
        *_sections(path, command, ".SH"),
    ]
    if isinstance(command, click.Group):
        known = [each for _, each in sorted(command.commands.items()) if not each.hidden]
        lines.append(".SH COMMANDS")
        for each in known:
            if below:
                lines += [f".SS {_plain(f'{path} {each.name}')}", *_sections(f"{path} {each.name}", each, ".PP\n.B")]
            else:
                lines += [".TP", f"\\fB{_plain(f'bsl-{each.name}')}\\fR(1)", _plain(each.get_short_help_str(200))]
    return "\n".join([*lines, ".SH SEE ALSO", "\\fBbsl\\fR(1); the manual in docs/ of bigsci\\-launch", ""])


def _sections(path: str, command: click.Command, title: str) -> Iterator[str]:
    context = click.Context(command, info_name=path, terminal_width=100)
    usage = " ".join(command.collect_usage_pieces(context))
    yield from (f"{title} SYNOPSIS", f".PP\n\\fB{_plain(path)}\\fR {_plain(usage)}")
    yield from (f"{title} DESCRIPTION", *_paragraphs(command.help or ""))
    records = [each for param in command.get_params(context) if (each := param.get_help_record(context)) and each[1]]
    if records:
        yield f"{title} OPTIONS"
        for option, text in records:
            yield from (".TP", f"\\fB{_plain(option)}\\fR", _plain(text))
    if command.epilog:
        yield from (f"{title} EXAMPLE", ".PP", _plain(command.epilog.removeprefix("Example: ")))


def _paragraphs(text: str) -> Iterator[str]:
    """Yield the paragraphs of a help text; one that begins with a backspace character keeps its lines."""
    for paragraph in re.split(r"\n\s*\n", inspect.cleandoc(text)):
        kept = paragraph.removeprefix("\b\n")
        if kept != paragraph:
            yield from (".PP\n.nf", *map(_plain, kept.splitlines()), ".fi")
        else:
            yield from (".PP", _plain(" ".join(paragraph.split())))


def _plain(text: str) -> str:
    """Return a text as roff prints it letter by letter."""
    shown = text.replace("\\", "\\e").replace("-", "\\-")
    return "\\&" + shown if shown[:1] in (".", "'") else shown
