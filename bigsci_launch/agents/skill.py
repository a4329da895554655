"""The text that teaches an agent how to work with `bsl`: SKILL.md, next to this module."""

from __future__ import annotations

from importlib.resources import files


def skill_text() -> str:
    """Return it without the line end at its end."""
    return files("bigsci_launch.agents").joinpath("SKILL.md").read_text(encoding="utf-8").rstrip("\n")
