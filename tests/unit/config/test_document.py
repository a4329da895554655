"""YAML is read as an editor shows it, and every problem has its place."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bigsci_launch.config.document import MAX_BYTES, Node, overlay, parse_document, read_document
from bigsci_launch.errors import ConfigError


def value(text: str) -> Any:
    return parse_document(f"key: {text}", "f").plain()["key"]


TEXTS = (
    "20:00:00 1-00:00:00 12:30 190:20:30.15 010 0o10 0x1F 9_765_625 +.inf .nan yes no NO on Off y 2022-03-11 = 1.2.3 e5"
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *((text, text) for text in TEXTS.split()),
        ("'4'", "4"),
        ('"true"', "true"),
        ("true", True),
        ("False", False),
        ("~", None),
        ("null", None),
        ("", None),
        ("0", 0),
        ("-12", -12),
        ("+7", 7),
        ("6e-5", 6e-05),
        ("6E+5", 600000.0),
        ("1e-4", 0.0001),
        ("1.", 1.0),
        (".5", 0.5),
        ("-0.5e3", -500.0),
        ("!!str 10", "10"),
    ],
)
def test_plain_scalars_are_what_they_look_like(text: str, expected: Any) -> None:
    read = value(text)
    assert read == expected
    assert type(read) is type(expected)


@given(st.text(alphabet="0123456789_.:-+eExo tnfalsuryTF~", min_size=1, max_size=8))
@example("1e400")
@example("-0")
def test_a_number_or_a_boolean_says_so_in_the_file(text: str) -> None:
    try:
        read = value(text)
    except ConfigError:
        return
    if isinstance(read, bool):
        assert text.strip() in ("true", "True", "TRUE", "false", "False", "FALSE")
    elif isinstance(read, (int, float)):
        assert read == float(text)
        assert not text.strip().lstrip("+-").startswith(("00", "01", "02", "03"))
    elif read is None:
        assert text.strip() in ("", "~", "null")


def problems_of(text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse_document(text, "f")
    return [str(problem) for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("text", "where", "words"),
    [
        ("a: 1\nb: 2\na: 3", "f:3:1", "f:1:1"),
        ("a:\n  b: 1\n  b: 2", "f:3:3", "b: "),
        ("a: 1\n\tb: 2", "f:2:1", "not YAML"),
        ("a: [1, 2\nb: 3", "f:2:2", "not YAML"),
        ("a: 'x", "f:1:6", "not YAML"),
        ("a: 1\n---\nb: 2", "f:2:1", "another document"),
        ("a: *b", "f:1:4", "undefined alias"),
        ("a: &x [*x]", "f:1:4", "contains itself"),
        ("1: a", "f:1:1", "(got 1)"),
        ("true: a", "f:1:1", "text"),
        ("? [a]\n: b", "f:1:3", "(got a list"),
        ("a: 1\n<<: {b: 1}", "f:2:1", "extends"),
        ("a: !!python/object/apply:os.system [ls]", "f:1:1", "not allowed"),
        ("a: !secret x", "f:1:1", "not allowed"),
        ("a: !!int '010'", "f:1:1", "not allowed"),
        ("a: !!bool yes", "f:1:1", "not allowed"),
        ("a: 1e999", "f:1:1", "too large"),
        ("a: " + "9" * 5000, "f:1:1", "too large"),
        ('a: "x\\0y"', "f:1:1", "NUL"),
        ('a: "\\ud800"', "f:1:1", "surrogate"),
        ("a: b\nc: x\x07y", "f:2:5", "U+0007"),
    ],
)
def test_what_is_refused_has_its_place(text: str, where: str, words: str) -> None:
    (problem,) = problems_of(text)
    assert problem.startswith(f"{where}: ")
    assert words in problem


def test_all_duplicates_are_named_at_once() -> None:
    assert len(problems_of("a: 1\na: 2\nb: 1\nb: 2\nc: !x y")) == 3


@pytest.mark.slow
def test_aliases_that_multiply_are_stopped() -> None:
    bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n"
    bomb += "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 10))
    assert "aliases" in problems_of(bomb)[0]


@pytest.mark.slow
def test_depth_without_end_is_an_error_and_not_a_crash() -> None:
    for depth, place in ((20000, "f"), (60, "f:1:53")):
        (problem,) = problems_of("a: " + "[" * depth + "]" * depth)
        assert problem.startswith(f"{place}: ")


def test_anchors_and_aliases_are_read() -> None:
    assert parse_document("a: &x {b: [1]}\nc: *x", "f").plain() == {"a": {"b": [1]}, "c": {"b": [1]}}


def test_an_entry_stands_where_its_key_does_and_an_item_where_it_begins() -> None:
    root = parse_document("a:\n  b: 1\n  c: [x, y]\n  d:\n    - e: 1\n", "f")
    places = [
        root.nearest(path).where for path in (("a",), ("a", "b"), ("a", "c", 1), ("a", "d", 0), ("a", "d", 0, "e"))
    ]
    assert places == ["f:1:1", "f:2:3", "f:3:10", "f:5:7", "f:5:7"]
    assert root.nearest(("a", "zz", "y")).where == "f:1:1"
    assert root.at(("a", "zz")) is None


def test_a_file_with_a_mark_of_byte_order_counts_columns_from_one(tmp_path: Path) -> None:
    path = tmp_path / "f.yaml"
    path.write_bytes(b"\xef\xbb\xbfa: 1\n")
    assert read_document(path) == Node({"a": Node(1, f"{path}:1:1")}, f"{path}:1:1")


def read_problem(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        read_document(path)
    assert caught.value.exit_code == 2
    (problem,) = caught.value.problems
    return str(problem)


def test_files_that_hold_no_mapping(tmp_path: Path) -> None:
    path = tmp_path / "f.yaml"
    for content, place, words in [
        (b"", "", "empty"),
        (b"# only\n\n", "", "empty"),
        (b"- a\n- b\n", ":1:1", "sections"),
        (b"\n  text\n", ":2:3", "sections"),
        (b"a: 1\nb: caf\xe9\n", ":2:7", "not UTF-8 text (byte 0xe9)"),
        ("a: 1".encode("utf-16"), ":1:1", "not UTF-8"),
        (b"\x7fELF\x01\x00", ":1:1", "U+007F"),
        (b"a" * (MAX_BYTES + 1), "", "configuration file"),
    ]:
        path.write_bytes(content)
        problem = read_problem(path)
        assert problem.startswith(f"{path}{place}: "), problem
        assert words in problem


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    assert "No such file" in read_problem(tmp_path / "none.yaml")
    assert "directory" in read_problem(tmp_path)
    assert "Not a directory" in read_problem(Path(__file__) / "x.yaml")
    loop = tmp_path / "loop.yaml"
    loop.symlink_to(loop)
    assert "cannot be read" in read_problem(loop)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission(tmp_path: Path) -> None:
    path = tmp_path / "f.yaml"
    path.write_text("a: 1")
    path.chmod(0)
    assert "Permission denied" in read_problem(path)


def test_a_device_without_end_is_not_read_to_its_end() -> None:
    assert "regular file" in read_problem(Path("/dev/zero"))


def test_overlay_merges_mappings_and_replaces_the_rest() -> None:
    lower = parse_document("a: {x: 1, y: [1, 2, 3]}\nb: 1\nn: {z: 1}", "low")
    upper = parse_document("a: {y: [4]}\nn: null\nb: {c: 2}", "up")
    merged = overlay(lower, upper)
    assert merged.plain() == {"a": {"x": 1, "y": [4]}, "b": {"c": 2}, "n": None}
    assert merged.nearest(("a", "x")).where == "low:1:5"
    assert merged.nearest(("a", "y", 0)).where == "up:1:9"
