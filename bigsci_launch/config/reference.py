"""The JSON Schema of run files and site files, for editors, generated from the docstrings in `schema`."""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import BaseModel

from bigsci_launch.config.problems import sections
from bigsci_launch.config.schema.run import RunConfig
from bigsci_launch.config.schema.section import DESCRIBING
from bigsci_launch.config.schema.site import SiteConfig

SchemaName = Literal["run", "site"]
Schema = dict[str, Any]

EXTENDS = "Path of one run file, relative to this one. Its values apply to keys that this file leaves out."


def json_schema(name: SchemaName) -> Schema:
    """Return the JSON Schema (draft 7) of a run file or a site file, for editors.

    A run file that extends another may leave out what the other has, so the schema requires keys only if `extends` is
    absent.
    """
    schema = draft_7(RunConfig if name == "run" else SiteConfig)
    if name == "run":
        _allow_extends(schema)
    return {"$schema": "http://json-schema.org/draft-07/schema#", "title": f"bsl {name} file", **schema}


def json_schema_text(name: SchemaName) -> str:
    """Return the text of `configs/schema/NAME.schema.json`."""
    return json.dumps(json_schema(name), indent=2) + "\n"


def draft_7(model: type[BaseModel]) -> Schema:
    """Return the JSON Schema of a section without pydantic's titles; its definitions are in `definitions`."""
    schema = model.model_json_schema(ref_template="#/definitions/{model}")
    schema["definitions"] = schema.pop("$defs", {})
    return dict(_without_titles(schema))


def _without_titles(schema: Any) -> Any:
    """Return `schema` without pydantic's titles, which only repeat the names of keys."""
    if isinstance(schema, list):
        return [_without_titles(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: _without_titles(value) for key, value in schema.items() if not (key == "title" and isinstance(value, str))
    }


def _allow_extends(schema: Schema) -> None:
    schema["properties"] = {"extends": {"type": "string", "description": EXTENDS}, **schema["properties"]}
    demanded = {}
    for path, section in sections(RunConfig):
        required = schema["definitions"][section.__name__].get("required")
        if required and len(path) == 1 and path[0] in (*schema["required"], *DESCRIBING):
            demanded[path[0]] = {"required": schema["definitions"][section.__name__].pop("required")}
    schema["if"] = {"required": ["extends"]}
    schema["else"] = {"required": schema.pop("required"), "properties": demanded}
