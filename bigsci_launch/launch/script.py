"""The text of the job script: header from the request's options, body from a template.

A template can name nothing that does not exist (StrictUndefined), and every value goes through `sh`.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from bigsci_launch.content import packaged
from bigsci_launch.launch.request import JobRequest, Option

TEMPLATES = {"slurm": "slurm.sbatch.j2", "local": "local.sbatch.j2"}


def render_script(request: JobRequest, templates: Path | None = None) -> str:
    """The whole script of `request`. `templates` is the folder to take templates from; default: our own."""
    folder = templates or packaged("slurm", "templates")
    template = template_environment(folder).get_template(TEMPLATES[request.scheduler])
    return template.render(request=request, header=header_lines(request.options))


def template_environment(folder: Path) -> Environment:
    """Jinja2 as all our templates need it: a misspelt name is an error, text is for a shell and never for HTML."""
    environment = Environment(
        loader=FileSystemLoader(folder),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.filters.update(sh=quote, words=quote_words, comment=comment_lines, option=option_word)
    return environment


def quote(value: object) -> str:
    """`value` as one word of a shell."""
    return shlex.quote(str(value))


def quote_words(values: tuple[str, ...]) -> str:
    """`values` as words of a shell."""
    return shlex.join(values)


def comment_lines(text: str) -> str:
    """`text` as shell comment lines, whatever is in it."""
    return "\n".join(f"# {line}".rstrip() for line in text.splitlines() if line.strip()) or "#"


def option_word(option: Option) -> str:
    """`--name=value` as one word of a shell."""
    return quote(option_text(option))


def option_text(option: Option) -> str:
    """`--name=value` or `--name`, unquoted."""
    return f"--{option.name}" if option.value is None else f"--{option.name}={option.value}"


def header_lines(options: tuple[Option, ...]) -> str:
    """The `#SBATCH` lines, each with its reason above."""
    lines: list[str] = []
    for option in options:
        if option.reason:
            lines.append(comment_lines(option.reason))
        value = "" if option.value is None else f"={quote_directive(option.value)}"
        lines.append(f"#SBATCH --{option.name}{value}")
    return "\n".join(lines)


def quote_directive(value: str) -> str:
    """`value` as sbatch reads it in a `#SBATCH` line: its own rules, not the shell's.

    Raises:
        ValueError: a line break or another control character, which no quoting can carry.
    """
    if not value.isprintable():
        raise ValueError(f"{value!r} cannot be written into a #SBATCH line")
    if shlex.quote(value) == value:
        return value
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
