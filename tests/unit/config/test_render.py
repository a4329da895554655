"""Written YAML is read back as the same values, by our reader and by a plain one."""

from __future__ import annotations

from typing import Any

import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from bigsci_launch.config.document import parse_document
from bigsci_launch.config.render import render_yaml

TEXT = st.text(alphabet=st.characters(exclude_characters="\0", exclude_categories=["Cs"]))
SCALAR = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT
FLAT = st.dictionaries(TEXT.filter(lambda key: key != "<<"), SCALAR | st.lists(SCALAR, max_size=3), max_size=3)
DATA = st.dictionaries(st.sampled_from("abcd"), FLAT | st.lists(FLAT.filter(bool), max_size=3) | SCALAR, min_size=1)


@given(DATA)
@example({"a": "20:00:00", "b": "010", "c": "6e-5", "d": "true"})
@example({"a": "", "b": "~", "c": "...", "d": "---"})
@example({"a": "a: b # c", "b": "- x", "c": "\u2028\ufeff\x85\x7f\u00a0", "d": " \t\r\n"})
@example({"a": {"": 1e16, "x y": -0.0, "null": 5e-324, "1": 10**30}})
@example({"a": "\U0001f600 caf\u00e9", "b": ".5", "c": ".demo/x", "d": "-"})
def test_what_is_written_is_read_back(data: dict[str, Any]) -> None:
    text = render_yaml(data)
    read = parse_document(text, "f").plain()
    assert read == data
    assert repr(read) == repr(data)


def test_plain_pyyaml_reads_our_text_as_text() -> None:
    data = {"time": "20:00:00", "octal": "010", "word": "yes", "date": "2022-03-11", "path": ".demo/corpus"}
    assert yaml.safe_load(render_yaml(data)) == data


@given(st.floats(allow_nan=False, allow_infinity=False))
@example(1e-05)
@example(-1e22)
@example(5e-324)
def test_plain_pyyaml_reads_our_floats_as_floats(number: float) -> None:
    read = yaml.safe_load(render_yaml({"a": number, "b": [number]}))
    assert repr(read) == repr({"a": number, "b": [number]})


def test_remarks_stand_behind_values_and_change_none() -> None:
    data = {"a": {"b": [1, 2], "c": "x # y"}, "f": [{"k": 1}]}
    text = render_yaml(data, lambda path: ".".join(map(str, path)))
    assert parse_document(text, "f").plain() == data
    assert [line.split("  # ")[1] for line in text.splitlines() if "  # " in line] == ["a.b", "a.c", "f.0.k"]
