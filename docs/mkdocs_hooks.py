"""Lets MkDocs read pages that are written for GitHub: fences with further words, links to files outside this folder."""

from __future__ import annotations

import posixpath
import re
from typing import Any

FENCE = re.compile(r"^```(?P<language>\w+)[^\n`]*$", re.MULTILINE)
CODE = re.compile(r"^```.*?^```\s*$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)")
PIPE_IN_CODE = re.compile(r"`[^`\n]*`")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Return a page as Python-Markdown understands it."""
    folder = posixpath.dirname(page.file.src_uri)
    kept: list[str] = []
    for prose, code in halves(markdown):
        kept += [in_site(prose, folder), FENCE.sub(r"```\g<language>", code)]
    return "".join(kept)


def halves(markdown: str) -> list[tuple[str, str]]:
    """Cut a page into prose and the fenced block that follows it."""
    cuts, start = [], 0
    for block in CODE.finditer(markdown):
        cuts.append((markdown[start : block.start()], block[0]))
        start = block.end()
    return [*cuts, (markdown[start:], "")]


def in_site(prose: str, folder: str) -> str:
    """Keep the text of links that leave the manual, and pipes in the code of tables."""

    def link(found: re.Match[str]) -> str:
        target = found["target"]
        leaves = "://" not in target and posixpath.normpath(posixpath.join(folder, target)).startswith("..")
        return found["text"] if leaves else found[0]

    lines = LINK.sub(link, prose).splitlines(keepends=True)
    return "".join(without_escapes(line) if line.startswith("|") else line for line in lines)


def without_escapes(row: str) -> str:
    """Return a row of a table with plain pipes in its code. GitHub needs the escapes, Python-Markdown shows them."""
    return PIPE_IN_CODE.sub(lambda code: code[0].replace("\\|", "|"), row)
