"""HTML pages as tests read them."""

from __future__ import annotations

from html.parser import HTMLParser

VOID = frozenset({"meta", "line", "path", "circle"})
"""Elements of our pages that have no end tag."""


class Page(HTMLParser):
    """Every element of a page with its attributes and its text, in order; fails where tags do not match."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str], list[str]]] = []
        self._open: list[tuple[str, dict[str, str], list[str]]] = []
        self.feed(text)
        assert not self._open

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = (tag, {name: value or "" for name, value in attributes}, [])
        self.elements.append(found)
        if tag not in VOID:
            self._open.append(found)

    def handle_endtag(self, tag: str) -> None:
        assert tag in VOID or self._open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        for _, _, texts in self._open[-1:]:
            texts.append(data)

    def texts(self, tag: str) -> list[str]:
        return ["".join(texts) for name, _, texts in self.elements if name == tag]

    @property
    def links(self) -> list[str]:
        """What the page loads or leads to."""
        return [given[name] for _, given, _ in self.elements for name in ("href", "src") if name in given]
