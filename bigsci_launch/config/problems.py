"""Pydantic's errors in plain words: the place, the full key, the value given, and what was probably meant."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from bigsci_launch.config.document import KeyPath, Node, describe, dotted, read_document
from bigsci_launch.errors import ConfigError, Problem

Model = TypeVar("Model", bound=BaseModel)

_WORDS = {
    "missing": "the key is required",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "string_type": "must be text",
    "list_type": "must be a list, such as [1, 2]",
    "tuple_type": "must be a list, such as [1, 2]",
    "dict_type": "must be a section with keys below it",
    "model_type": "must be a section with keys below it",
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "literal_error": "must be {expected}",
    "enum": "must be {expected}",
    "too_short": "must have at least {min_length} items",
    "too_long": "must have at most {max_length} items",
    "string_pattern_mismatch": "does not match {pattern}",
}


def validate(model: type[Model], tree: Node) -> tuple[Model | None, list[Problem]]:
    """Return the model made from `tree`, or every problem that prevents it, each with its place.

    Uses strict JSON mode, because lax mode accepts `"4"` for a number and strict Python mode refuses a list for a
    tuple.
    """
    try:
        return model.model_validate_json(json.dumps(tree.plain())), []
    except ValidationError as error:
        details = [dict(detail) for detail in error.errors(include_url=False)]
    return None, [_problem(model, tree, detail) for detail in _without_alternatives(details)]


def read_valid(model: type[Model], path: Path) -> Model:
    """Return the model in the YAML file at `path`.

    Raises:
        ConfigError: the file cannot be read, or it is invalid; with all problems, each `file:line:column: key: text`.
    """
    content, problems = validate(model, read_document(path))
    if content is None:
        raise ConfigError(f"{path}: {len(problems)} problems", problems=problems)
    return content


# For a value that may be a word, a number or a boolean, pydantic appends to the key which of them it tried.
_ALTERNATIVE = re.compile(r"literal\[.*\]|constrained-\w+|bool")


def _without_alternatives(details: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the errors, with those about the alternatives of one value merged into one."""
    for loc, same in groupby(details, lambda detail: _without_alternative(detail["loc"])):
        first, *others = same
        if loc != first["loc"]:
            texts = [_text(first), *(_text(detail).removeprefix("must be ") for detail in others)]
            yield {**first, "loc": loc, "text": " or ".join(texts)}
            continue
        yield from (first, *others)


def _without_alternative(loc: KeyPath) -> KeyPath:
    return loc[:-1] if loc and _ALTERNATIVE.fullmatch(str(loc[-1])) else loc


def _text(detail: dict[str, Any]) -> str:
    return _WORDS.get(detail["type"], "").format_map(detail.get("ctx", {})) or _own_text(detail["msg"])


def _problem(model: type[BaseModel], tree: Node, detail: dict[str, Any]) -> Problem:
    loc: KeyPath = tuple(step for step in detail["loc"] if step != "[key]")
    where = tree.nearest(loc).where
    if detail["type"] == "extra_forbidden":
        return Problem(where, dotted(loc), f"unknown key{_meant(model, loc)}")
    text = detail.get("text") or _text(detail)
    if detail["type"] == "missing":
        return Problem(where, dotted(loc), text)
    given = loc[-1] if "[key]" in detail["loc"] else detail["input"]
    return Problem(where, dotted(loc), f"{text} (got {describe(given)}){_advice(detail['type'], given)}")


def _own_text(message: str) -> str:
    text = message.removeprefix("Value error, ")
    return text[:1].lower() + text[1:] if text.startswith("Input ") else text


def _advice(kind: str, given: Any) -> str:
    """Return how to write the value, if a habit from YAML 1.1 or Python is the likely cause."""
    if kind == "string_type" and isinstance(given, (int, float)):
        return "; write it in quotes"
    if not isinstance(given, str):
        return ""
    if kind == "bool_type" and given.lower() in ("yes", "no", "on", "off", "y", "n"):
        return f"; write {'true' if given.lower() in ('yes', 'on', 'y') else 'false'}"
    if kind in ("int_type", "float_type") and re.fullmatch(r"[0-9]+(_[0-9]+)+", given):
        return f"; write {given.replace('_', '')}"
    if kind in ("int_type", "float_type") and re.fullmatch(r"0[0-9]+", given):
        return "; a leading zero could mean octal: leave it out"
    if kind in ("int_type", "float_type") and re.fullmatch(r"[-+]?[0-9.]+([eE][-+]?[0-9]+)?", given):
        return "; write it without quotes"
    return ""


def _meant(model: type[BaseModel], loc: KeyPath) -> str:
    """Return the key that was probably meant: a near miss in the same section, its initials (`dp`), or the same key in
    another one. Otherwise, return the keys of the section."""
    unknown = str(loc[-1])
    section = section_at(model, loc[:-1])
    known = list(section.model_fields) if section else []
    near = closest(unknown, known) or next((key for key in known if _initials(key).startswith(unknown.lower())), None)
    if near:
        return f"; did you mean {dotted((*loc[:-1], near))}?"
    elsewhere = [dotted((*path, unknown)) for path, other in sections(model) if unknown in other.model_fields]
    if elsewhere:
        return f"; did you mean {' or '.join(elsewhere)}?"
    return f" (known: {', '.join(known)})" if known else ""


def _initials(key: str) -> str:
    return "".join(word[:1] for word in key.split("_"))


def closest(word: str, known: Iterable[str]) -> str | None:
    """Return the known word most similar to `word`, or None if none is similar."""
    found = difflib.get_close_matches(word.lower().replace("-", "_"), list(known), n=1, cutoff=0.6)
    return found[0] if found else None


def section_at(model: type[BaseModel], path: KeyPath) -> type[BaseModel] | None:
    """Return the section class at `path` below `model`, or None. Skips list indices and free names."""
    section: type[BaseModel] | None = model
    for step in path:
        field = section.model_fields.get(str(step)) if section else None
        if field is None:
            continue
        section = section_in(field.annotation)
    return section


def section_in(annotation: Any) -> type[BaseModel] | None:
    """Return the section class in `Section`, `Section | None`, `list[Section]` or `dict[str, Section]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in get_args(annotation) if (found := section_in(part))), None)


def sections(model: type[BaseModel], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], type[BaseModel]]]:
    """Yield every section class below `model` with its path, depth first; lists and free names add no step."""
    for name, field in model.model_fields.items():
        section = section_in(field.annotation)
        if section is not None:
            yield (*path, name), section
            yield from sections(section, (*path, name))
