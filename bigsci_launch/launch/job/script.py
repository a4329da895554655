"""Renders the job script: the header from the request's options, the body from a template.

An unknown name in a template is an error (StrictUndefined), and every value goes through `sh`.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from bigsci_launch.content import packaged
from bigsci_launch.launch.job.options import Option
from bigsci_launch.launch.job.request import JobRequest

TEMPLATES = {"slurm": "slurm.sbatch.j2", "local": "local.sbatch.j2"}


def render_script(request: JobRequest, templates: Path | None = None) -> str:
    """Return the whole script of `request`. `templates` is the folder of templates; default: the packaged ones."""
    folder = templates or packaged("slurm", "templates")
    template = template_environment(folder).get_template(TEMPLATES[request.scheduler])
    return template.render(request=request, header=header_lines(request.options))


def template_environment(folder: Path) -> Environment:
    """Return the Jinja2 environment for our templates: a misspelt name is an error, and text is not escaped for
    HTML."""
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
    """Return `value` as one shell word."""
    return shlex.quote(str(value))


def quote_words(values: tuple[str, ...]) -> str:
    """Return `values` as shell words."""
    return shlex.join(values)


def comment_lines(text: str) -> str:
    """Return `text` as shell comment lines, whatever it contains."""
    return "\n".join(f"# {line}".rstrip() for line in text.splitlines() if line.strip()) or "#"


def option_word(option: Option) -> str:
    """Return `--name=value` as one shell word. Commas are quoted for the reader: an array has blanks between words."""
    text = option_text(option)
    return f"'{text}'" if "," in text and quote(text) == text else quote(text)


def option_text(option: Option) -> str:
    """Return `--name=value` or `--name`, unquoted."""
    return f"--{option.name}" if option.value is None else f"--{option.name}={option.value}"


def header_lines(options: tuple[Option, ...]) -> str:
    """Return the `#SBATCH` lines, each below its reason."""
    lines: list[str] = []
    for option in options:
        if option.reason:
            lines.append(comment_lines(option.reason))
        value = "" if option.value is None else f"={quote_directive(option.value)}"
        lines.append(f"#SBATCH --{option.name}{value}")
    return "\n".join(lines)


def quote_directive(value: str) -> str:
    """Return `value` quoted for a `#SBATCH` line, where sbatch's rules apply, not the shell's.

    Raises:
        ValueError: it contains a line break or another control character, which cannot be quoted.
    """
    if not value.isprintable():
        raise ValueError(f"{value!r} cannot be written into a #SBATCH line")
    if shlex.quote(value) == value:
        return value
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
