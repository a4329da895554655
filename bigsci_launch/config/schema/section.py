"""The base of every section of a run file and a site file, and what a run file may do without.

Some sections only describe a training. A run of another program than `bsl train` may leave them out. They are then null
in the file, and `NotDescribed` for code that asks for them: an undescribed model is not computed with.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, WrapValidator

from bigsci_launch.errors import ConfigError

DESCRIBING = ("model", "training", "data")
"""The sections of a run file that only describe a training."""


class Section(BaseModel):
    """Base of every section: unknown keys are refused, values are frozen, field docstrings are descriptions."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class NotDescribed(ConfigError):
    """The run file leaves out a section that is needed here."""

    def __init__(self, section: str) -> None:
        super().__init__(
            f"the run file has no section `{section}`, which this needs",
            hint=f"only a run of another program may omit it; its keys: docs/reference/config.md#{section}",
        )


def _or_nothing(value: Any, validate: Callable[[Any], Any], info: ValidationInfo) -> Any:
    """Accept null unless the run starts `bsl train`. If `run` is wrong, that is problem enough."""
    run = info.data.get("run")
    return None if value is None and (run is None or not run.starts_trainer) else validate(value)


OR_NOTHING = WrapValidator(_or_nothing)
NOTHING: Any = Field(default=None, validate_default=True)
"""The default of a section that only describes a training. The type of the field is what code gets that asks for it."""
