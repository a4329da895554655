"""Types of values that several sections share."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from bigsci_launch.config.schema.section import Section
from bigsci_launch.units import format_slurm_duration, parse_slurm_duration


def _slurm_duration(value: Any) -> Any:
    if isinstance(value, str):
        seconds = parse_slurm_duration(value)
        if seconds == 0:
            raise ValueError("to Slurm, zero means no limit at all: write a limit")
        return format_slurm_duration(seconds)
    if isinstance(value, int) and not isinstance(value, bool):
        raise ValueError("a bare number is ambiguous: write HH:MM:SS or D-HH:MM:SS")
    return value


SlurmDuration = Annotated[str, BeforeValidator(_slurm_duration)]
# One word of an sbatch header line. A space or a newline in it would start another option.
Word = Annotated[str, Field(pattern=r"^\S+$")]
Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]
EnvironmentName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
TRACED_NAME = r"^[A-Za-z_]\w*(\.\w+)*$"
"""The name of a package or a module."""
TRACED_CALL = r"^[\w.]+:[\w.<>]+$"
"""`MODULE:FUNCTION`."""
TracedName = Annotated[str, Field(pattern=TRACED_NAME)]
TracedCall = Annotated[str, Field(pattern=TRACED_CALL)]
RunName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]


def or_numbers(schema: dict[str, Any]) -> None:
    """Let the JSON Schema of a text accept a number and a boolean. Loading makes texts of such, before validation."""
    schema["anyOf"] = [{"type": name} for name in ("string", "number", "boolean", "null")]


class EnvironmentVariable(Section):
    """A variable of the ranks' environment. It needs either `value` or `from`. In a run file, `NAME: 8` is short for
    `NAME: {value: "8"}`."""

    value: Annotated[str | None, Field(json_schema_extra=or_numbers)] = None
    """The value; of a number, the text. It is quoted, so the shell does not expand it. The run directory stores it for
    you and your group."""

    source: Literal["environment"] | None = Field(default=None, alias="from")
    """`environment`: the value is that of the variable of the same name where `bsl submit` is called, and nothing of it
    is stored in the run directory. For passwords and tokens. Slurm keeps it with the job, also for a requeue."""

    reason: str | None = None
    """Why it is set. The job script has this as a comment above the export."""

    @model_validator(mode="after")
    def _has_one_origin(self) -> EnvironmentVariable:
        if (self.value is None) == (self.source is None):
            raise ValueError("needs either value or `from: environment`; null removes the value of a weaker layer")
        return self

    @model_serializer(mode="wrap")
    def _as_written(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Only what is given, by the name that a file has for it."""
        known = {"from" if key == "source" else key: value for key, value in serialize(self).items()}
        return {key: value for key, value in known.items() if value is not None}


def or_bare_values(schema: dict[str, Any]) -> None:
    """Let the JSON Schema of variables accept the value alone. Loading makes sections of such, before validation."""
    for by_name in (schema, *([schema["patternProperties"]] if "patternProperties" in schema else [])):
        for key, variable in by_name.items():
            if isinstance(variable, dict) and "$ref" in variable:
                by_name[key] = {"anyOf": [{"type": ["string", "number", "boolean"]}, variable]}
