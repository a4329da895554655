"""The schema for editors and the manual agree with what the loader accepts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bigsci_launch.config.problems import sections
from bigsci_launch.config.reference import json_schema
from bigsci_launch.config.schema.run import RunConfig
from bigsci_launch.config.schema.site import SiteConfig

MANUAL = (Path(__file__).parents[3] / "docs" / "reference" / "config.md").read_text(encoding="utf-8")


def every_mapping(schema: Any) -> list[dict[str, Any]]:
    below = schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ()
    found = [mapping for part in below for mapping in every_mapping(part)]
    return [schema, *found] if isinstance(schema, dict) else found


@pytest.mark.parametrize("name", ["run", "site"])
def test_the_schema_keeps_to_draft_7(name: Any) -> None:
    schema = json_schema(name)
    assert schema["$schema"].startswith("http://json-schema.org/draft-07/")
    later = {"$defs", "prefixItems", "unevaluatedProperties", "dependentRequired", "$dynamicRef"}
    for mapping in every_mapping(schema):
        assert not later & set(mapping)
        assert "$ref" not in mapping or mapping["$ref"].removeprefix("#/definitions/") in schema["definitions"]


def test_a_run_file_needs_its_required_keys_only_when_it_extends_nothing() -> None:
    schema = json_schema("run")
    assert schema["if"] == {"required": ["extends"]}
    assert schema["else"]["required"] == ["run"], "other sections only describe a training: another program needs none"
    assert schema["else"]["properties"]["data"] == {"required": ["prefix"]}
    assert "required" not in schema and "required" not in schema["definitions"]["ModelSection"]
    assert schema["definitions"]["FaultSpec"]["required"] == ["kind", "step"]


@pytest.mark.parametrize("model", [RunConfig, SiteConfig])
def test_every_key_has_a_description_and_stands_in_the_manual(model: Any) -> None:
    for path, section in [((), model), *sections(model)]:
        for field_name, field in section.model_fields.items():
            name = field.alias or field_name
            if (*path, name) not in dict(sections(model)):
                assert field.description, f"{path} {name}"
                assert f"{name}` |" in MANUAL, f"{path} {name}"
                assert " ".join(field.description.split()).replace("|", "\\|") in MANUAL


def test_the_manual_shows_types_limits_and_defaults() -> None:
    lines = MANUAL.splitlines()
    for expected in (
        "| `run.name` | text | required | ",
        "| `model.dropout` | number >= 0 and < 1 | `0.0` | ",
        "| `training.precision` | `fp32` or `bf16` or `fp16` or `fp8` | `bf16` | ",
        "| `training.rampup.start` | whole number > 0 | required | ",
        "| `optimizer.betas` | list of: number >= 0 and < 1 | `[0.9, 0.95]` | ",
        "| `env.NAME.reason` | text or `null` |  | ",
        "| `faults[].step` | whole number > 0 | required | ",
        "| `partitions.NAME.max_time` | text or `null` |  | ",
    ):
        assert sum(line.startswith(expected) for line in lines) == 1, expected
    assert json.dumps(json_schema("run")) == json.dumps(json_schema("run"))
