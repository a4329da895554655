"""The keys of a `signature.yaml`: a known hang, what it looks like, why it happens and what ends it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, WithJsonSchema, model_validator

from bigsci_launch.config.schema.section import Section
from bigsci_launch.spy.evidence.code_schema import ClassId, Pattern
from bigsci_launch.spy.taxonomy import State

MAX_SENTENCE = 280
"""Longest explanation or remedy that fits on two lines of the report, in characters."""


# How it is written in a file, and in the reference of its keys.
StateName = Annotated[State, WithJsonSchema({"enum": [state.value for state in State]})]
Sentence = Annotated[str, Field(min_length=1, max_length=MAX_SENTENCE)]


class RankCondition(Section):
    """What some ranks show. Every key that is given must be true of the same rank. A pattern is a regular
    expression (Python's `re`), found anywhere in the text unless it begins with `^` or ends with `$`."""

    who: Literal["suspects", "some", "most", "all"] = "suspects"
    """Which ranks must show it: `suspects`: all that the verdict accuses, and there is one; `some`: at least one rank;
    `most`: more than half; `all`. Ranks that could not be read do not count for `most` and `all`."""

    stack: Annotated[tuple[Pattern, ...], Field(min_length=1)] | None = None
    """Patterns of calls of any one thread, innermost first, other calls may be between them. The text of a call is
    `FUNCTION FILE`, as in `_try_get_data /venv/torch/utils/data/dataloader.py`; a method is named without its class."""

    without: Pattern | None = None
    """Pattern of a call that none of its threads is in."""

    state: Annotated[tuple[Literal["R", "S", "D", "T", "t", "Z", "I"], ...], Field(min_length=1)] | None = None
    """The kernel's letter for the process, one of these: R runs, S sleeps, D sleeps and cannot be woken, T stopped,
    t stopped by a debugger, Z ended."""

    wchan: Pattern | None = None
    """Pattern of the kernel function in which the process sleeps: `^locks_lock_inode_wait$`."""

    call: Pattern | None = None
    """Pattern of its system call with the file behind it: `write on fd 1 (pipe:[4711])`."""

    child: Pattern | None = None
    """Pattern of one of its child processes, `NAME STATE WCHAN`: `pt_data_worker T do_signal_stop`."""

    writing: bool | None = None
    """Whether it wrote bytes between the samples, to any file."""

    error: Pattern | None = None
    """Pattern of the exception that it recorded, or of the first traceback in its log: `TYPE: MESSAGE at FUNCTION
    (FILE:LINE)`."""

    exit: Pattern | None = None
    """Pattern of how it ended: `killed by SIGKILL`, `exit code 1`, `gone` without a record."""

    @model_validator(mode="after")
    def _says_something(self) -> RankCondition:
        if not self.model_fields_set - {"who"}:
            raise ValueError("must list what these ranks show: stack, without, state, wchan, call, ...")
        return self


class When(Section):
    """The pattern of a hang. Everything that is given must be true."""

    states: Annotated[tuple[StateName, ...], Field(min_length=1)] = (State.HANG,)
    """States of the verdict."""

    classes: Annotated[tuple[ClassId, ...], Field(min_length=1)] | None = None
    """Classes of the verdict (`H01` to `H107`), one of these."""

    ranks: tuple[RankCondition, ...] = ()
    """What ranks show: a list, every entry must be true."""

    @model_validator(mode="after")
    def _says_something(self) -> When:
        if not self.classes and not self.ranks:
            raise ValueError("must name classes or list what ranks show: states alone would match almost anything")
        return self


class SignatureFile(Section):
    """The file `signature.yaml` in a folder of its own, whose name is the signature's."""

    explanation: Sentence
    """What happened, in one or two lines of the report."""

    remedy: Sentence
    """What to do about it, now and for good."""

    source: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=1)]
    """Where it is known from: an issue, a chronicle, a class of `bsl hang-lab`."""

    when: When
    """Required. What it looks like."""
