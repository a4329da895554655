"""What is known about the output of other programs: folders of INI files in `diagnostics/`, a file for each program.

The program of a job script reads them from its own archive, with the standard library alone: so they are not YAML.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bigsci_launch.errors import ConfigError
from bigsci_launch.safe_files import read_file

LONGEST_REASON = 300
"""Characters of an error about a file, which quotes its lines."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One section of a file: `file` is its path or name, for messages."""

    file: str
    name: str
    fields: Mapping[str, str]


def read_entries(folder: str) -> list[Entry]:
    """Return the sections of all files in `folder`, by the names of the files and in their order.

    Files in a folder of that name on `$BSL_PATH` come first, so that they may recognise a line before ours do.

    Raises:
        ConfigError: a file is no INI file.
    """
    return [entry for name, text in entry_files(folder) for entry in parse_entries(text, name)]


def entry_files(folder: str) -> list[tuple[str, str]]:
    """Return name and text of each file in `folder`; in the program of a job script, those of its archive.

    Raises:
        ConfigError: a file cannot be read.
    """
    from bigsci_launch.content import knowledge_files  # most starts of that program do not need it

    return [(str(file), _text(file)) for file in knowledge_files(folder, ".ini")]


def _text(file: Any) -> str:
    try:
        content = read_file(file, follow=True) if isinstance(file, Path) else file.read_bytes()
        return str(content, "utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error


def parse_entries(text: str, file: str) -> Iterator[Entry]:
    """Yield the sections of one file. Values are as written: no interpolation, and lines may continue when indented."""
    import configparser

    parser = configparser.RawConfigParser(default_section="", delimiters=("=",), comment_prefixes=("#",), strict=True)
    parser.optionxform = str  # type: ignore[assignment, method-assign]  # names as written
    try:
        parser.read_file(io.StringIO(text), file)
    except (configparser.Error, ValueError) as error:
        raise ConfigError(f"{file} is no INI file: {' '.join(str(error).split())[:LONGEST_REASON]}") from error
    for name in parser.sections():
        yield Entry(file, name, dict(parser[name]))
