"""Content that comes with the package, read without its schema: what it says is what the schema would read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from bigsci_launch.config.problems import read_valid
from bigsci_launch.content import packaged
from bigsci_launch.spy.evidence.code_schema import KnownCodeFile
from bigsci_launch.spy.evidence.trusted import TrustedSection, read_trusted
from bigsci_launch.spy.known.schema import SignatureFile

FILES: list[tuple[type[BaseModel], Path]] = [
    *((KnownCodeFile, path) for path in sorted(packaged("diagnostics", "known").glob("*.yaml"))),
    *((SignatureFile, path) for path in sorted(packaged("diagnostics", "signatures").glob("*/signature.yaml"))),
]


def said(content: Any) -> Any:
    """What a model says, and which keys its file gives."""
    if isinstance(content, BaseModel):
        keys = type(content).model_fields
        return {**{key: said(getattr(content, key)) for key in keys}, "given": content.model_fields_set}
    return tuple(map(said, content)) if isinstance(content, tuple) else content


def said_by(trusted: Any, like: Any) -> Any:
    """The same, by the attributes that a model has in that place."""
    if isinstance(trusted, TrustedSection):
        return {key: said_by(getattr(trusted, key), like[key]) for key in like if key != "given"} | {
            "given": trusted.model_fields_set
        }
    return tuple(map(said_by, trusted, like)) if isinstance(trusted, tuple) else trusted


@pytest.mark.parametrize(("schema", "path"), FILES, ids=lambda each: each.parent.name if isinstance(each, Path) else "")
def test_it_says_what_the_schema_reads(schema: type[BaseModel], path: Path) -> None:
    expected = said(read_valid(schema, path))
    assert said_by(read_trusted(path), expected) == expected


@pytest.mark.parametrize(("schema", "path"), [FILES[0], FILES[-1]], ids=["known", "signature"])
def test_a_key_that_no_schema_has_is_an_error(schema: type[BaseModel], path: Path) -> None:
    trusted = read_trusted(path)
    assert all(hasattr(trusted, key) for key in schema.model_fields)
    with pytest.raises(AttributeError, match="no content of the package has a key 'wrapers'"):
        _ = trusted.wrapers


def test_a_verdict_loads_no_schema() -> None:
    loads = "import sys, bigsci_launch.spy.answer as answer; answer.read_library(); sys.exit('pydantic' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", loads], check=False).returncode == 0
