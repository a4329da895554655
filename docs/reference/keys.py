"""The manual of keys as Markdown, from the docstrings in the schemas of files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from bigsci_launch.config.problems import sections
from bigsci_launch.config.reference import Schema, draft_7, json_schema
from bigsci_launch.config.schema.run import RunConfig
from bigsci_launch.config.schema.site import SiteConfig

INTRODUCTION = """# Keys of run files and site files

A key that is left out has the default shown; a required key has none. Values come from layers, weakest first: defaults,
the site, the file that `extends` names, the file itself, `--set key=value`. `bsl config show FILE` shows the origin of
each value. YAML is read by the rules of version 1.2: only `true` and `false` are booleans, and `20:00:00` is text.
"""


def config_reference() -> str:
    """Return Markdown with every key of a run file and of a site file, its type, default and meaning."""
    run, site = json_schema("run"), json_schema("site")
    parts = [INTRODUCTION, "## The run file\n", _sentence(run)]
    parts += _table("", {"properties": {"extends": run["properties"]["extends"]}}, run, frozenset())
    parts += _chapters(RunConfig, run, frozenset(run["else"]["required"]), run["else"]["properties"])
    parts += ["## The site file\n", _sentence(site)]
    parts += _table("", site, site, frozenset(site["required"]))
    parts += _chapters(SiteConfig, site, frozenset(), {})
    return "\n".join(parts)


def keys_reference(model: type[BaseModel]) -> str:
    """Return Markdown with every key of a file that `model` describes, section by section."""
    schema = draft_7(model)
    parts = [_sentence(schema), *_table("", schema, schema, frozenset(schema["required"]))]
    return "\n".join([*parts, *_chapters(model, schema, frozenset(schema["required"]), {})])


def _chapters(model: type[BaseModel], root: Schema, required: frozenset[str], demanded: Schema) -> Iterator[str]:
    """Yield a chapter for every section below `model`, whose schema is `root`, depth first."""
    for path, section in sections(model):
        shown = "".join(_step(root, path, index) for index in range(len(path)))
        definition = root["definitions"][section.__name__]
        needs = demanded.get(path[0], {}).get("required") if len(path) == 1 else None
        note = " Required." if shown in required else ""
        yield f"### `{shown}`\n"
        yield _sentence(definition).rstrip() + note + "\n"
        yield from _table(f"{shown}.", definition, root, frozenset(needs or definition.get("required", ())))


def _step(root: Schema, path: tuple[str, ...], index: int) -> str:
    """Return one step of a section's name: `.rampup`, with `[]` after a list and `.NAME` after free names."""
    properties = root["properties"]
    for step in path[:index]:
        properties = root["definitions"][_reference(properties[step])]["properties"]
    name, field = path[index], properties[path[index]]
    ending = "[]" if field.get("type") == "array" else ".NAME" if field.get("type") == "object" else ""
    return f"{'.' if index else ''}{name}{ending}"


def _reference(schema: Schema) -> str:
    """Return the name of the definition that `schema` refers to, or an empty text if it refers to none."""
    if "$ref" in schema:
        return str(schema["$ref"]).rsplit("/", 1)[-1]
    below = [*schema.get("anyOf", ()), *schema.get("patternProperties", {}).values()]
    below += [schema[key] for key in ("items", "additionalProperties") if isinstance(schema.get(key), dict)]
    return next((found for part in below if (found := _reference(part))), "")


def _table(prefix: str, section: Schema, root: Schema, required: frozenset[str]) -> Iterator[str]:
    """Yield a table of the section's own keys; keys that are sections have their own chapters."""
    rows = []
    for name, field in section["properties"].items():
        if _reference(field):
            continue
        default = "required" if name in required else _value(field.get("default"))
        rows.append(f"| `{prefix}{name}` | {_type(field, root)} | {default} | {_cell(field.get('description', ''))} |")
    if rows:
        yield "\n".join(["| key | value | default | meaning |", "|---|---|---|---|", *rows, ""])


def _type(schema: Schema, root: Schema) -> str:
    """Return the type of a value in words, with its limits."""
    if "anyOf" in schema:
        return " or ".join(_type(part, root) for part in schema["anyOf"])
    if "const" in schema:
        return f"`{schema['const']}`"
    if "enum" in schema:
        return " or ".join(f"`{value}`" for value in schema["enum"])
    if schema.get("type") == "array":
        return f"list of: {_type(schema['items'], root)}"
    values = schema.get("additionalProperties")
    if isinstance(values, dict) and values.get("type") == "array":
        return f"names, each with a {_type(values, root)}"
    words = {"integer": "whole number", "number": "number", "boolean": "`true` or `false`", "null": "`null`"}
    limits = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    shown = " and ".join(f"{sign} {schema[key]:g}" for key, sign in limits.items() if key in schema)
    return f"{words.get(schema.get('type', ''), 'text')} {shown}".strip()


def _value(value: Any) -> str:
    return "" if value is None else f"`{json.dumps(value)}`" if not isinstance(value, str) else f"`{_cell(value)}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _sentence(schema: Schema) -> str:
    return " ".join(schema.get("description", "").split()) + "\n"
