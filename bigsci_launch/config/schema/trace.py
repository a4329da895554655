"""Which calls the ranks of a run trace."""

from __future__ import annotations

from pydantic import Field, PositiveInt, model_validator

from bigsci_launch.config.schema.section import Section
from bigsci_launch.config.schema.values import TracedCall, TracedName


class TraceSection(Section):
    """Which calls every rank traces. `bsl trace on` and `off` change it while the run runs."""

    include: list[TracedName] = Field(min_length=1)
    """Packages and modules whose calls are traced, such as `megatron` or `my_model.attention`; `__main__` is the
    program itself. Modules are known by their full names, so two files of the same name are two modules."""

    from_step: PositiveInt | None = None
    """The step at which the trace begins; default: at the start of the program."""

    from_call: TracedCall | None = None
    """The function at whose first call the trace begins, as `MODULE:FUNCTION`; default: at the start of the program."""

    @model_validator(mode="after")
    def _begins_once(self) -> TraceSection:
        if self.from_step is not None and self.from_call is not None:
            raise ValueError("from_step and from_call exclude each other: name one")
        return self
