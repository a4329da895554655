"""The frame of every HTML page that `bsl` writes: a self-contained file, light and dark."""

from __future__ import annotations

from datetime import datetime, timezone
from html import escape
from pathlib import Path

from bigsci_launch import __version__
from bigsci_launch.errors import BslError
from bigsci_launch.typed_path import write_typed

# A browser that honours this policy makes no network request, whatever job text the page contains.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
_STYLE = """
:root { color-scheme: light dark; --ink: #1c2126; --soft: #5c6770; --line: #d5dade; --paper: #ffffff; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e7eaec; --soft: #9aa5ad; --line: #3a434a; --paper: #15191c; }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 76rem;
  margin: 2rem auto; padding: 0 1.25rem; }
h1 { font-size: 1.4rem; margin: 0 0 .25rem; } h2 { font-size: 1.05rem; margin: 2rem 0 .4rem; }
p { margin: .3rem 0; } .soft { color: var(--soft); }
"""


def made_now() -> str:
    """Return `bsl 0.2.0, 2026-11-26 01:30 UTC`: what wrote a page, and when."""
    return f"bsl {__version__}, {datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC"


def render_page(title: str, style: str, body: str) -> str:
    """Return the page around `body`, which is markup; `style` follows the style that all pages share."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}{style}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def write_page(path: Path, page: str) -> None:
    """Write `page` to `path`, whole or not at all.

    Raises:
        BslError: the file cannot be written.
    """
    try:
        path.parent.stat()  # a mistyped folder is an error, and not made
        write_typed(path, page)
    except OSError as error:
        raise BslError(f"{path}: {(error.strerror or str(error)).lower()}") from error
