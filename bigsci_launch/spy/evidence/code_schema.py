"""The keys of a file `known/NAME.yaml`: what frames of one library, and functions of the kernel, mean."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema, model_validator

from bigsci_launch.config.schema.section import Section
from bigsci_launch.spy.taxonomy import HangClass


def _compile(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"not a regular expression: {error}") from error
    return text


def _bare(text: str) -> str:
    if "." in text:
        raise ValueError("must be the bare name, without its class")
    return text


ListedText = Annotated[str, Field(min_length=1)]
ClassId = Annotated[HangClass, BeforeValidator(HangClass.parse), WithJsonSchema({"type": "string"})]
Pattern = Annotated[ListedText, AfterValidator(_compile)]
FunctionName = Annotated[ListedText, AfterValidator(_bare)]
FunctionNames = Annotated[tuple[FunctionName, ...], Field(min_length=1)]
Calls = dict[ListedText, FunctionNames]
KernelKind = Literal["lock", "map_lock", "page_fault", "daemon", "poll", "sleep"]


class CommunicationEntry(Section):
    """Functions that communicate: while a thread is in one, it waits for other ranks."""

    file: ListedText
    """Required. The file that they are in."""

    functions: FunctionNames
    """Required. Their names."""

    operation: ListedText | None = None
    """What they do, by torch's name for it. Without it, each function has the name of its operation."""

    kind: Literal["collective", "point-to-point", "set-up"] = "collective"
    """`point-to-point` has one partner; `set-up` makes a group, for which its ranks wait, too."""


class ScopeEntry(Section):
    """Functions that communicate over a known group. The first entry that fits a frame counts."""

    file: ListedText
    """Required. The file that they are in."""

    functions: FunctionNames
    """Required. Their names; `"*"` is every function of the file."""

    scope: ListedText
    """Required. Axes such as `tp` or `dp-cp`, or `model`, `tied`, `next stage`, `previous stage`."""

    operation: ListedText | None = None
    """The communication that this is true of; without it, any."""


class KernelWaitEntry(Section):
    """A wait that the kernel function alone identifies."""

    hang_class: ClassId
    """Required. The class of a hang in it."""

    words: ListedText
    """Required. Completes the sentence `rank 3 ...`."""

    kernel: Annotated[tuple[ListedText, ...], Field(min_length=1)]
    """Required. Beginnings of the names of kernel functions."""


class WaitEntry(Section):
    """A known place in which a process waits outside any communication: in kernel functions, or in calls."""

    hang_class: ClassId
    """Required. The class of a hang in it."""

    words: ListedText
    """Required. Completes the sentence `rank 3 ...`."""

    order: int
    """Required. Waits are tried in ascending order over all files, and the first that fits counts."""

    kernel: tuple[ListedText, ...] = ()
    """Beginnings of the names of kernel functions."""

    calls: Calls = {}
    """Functions, by file."""

    @model_validator(mode="after")
    def _says_where(self) -> WaitEntry:
        if bool(self.kernel) == bool(self.calls):
            raise ValueError("must have either kernel or calls")
        return self


class PhaseEntry(Section):
    """Work for which others may be meant to wait: saving, evaluating, preparing data, compiling."""

    hang_class: ClassId
    """Required. The class of a job that waits for it."""

    calls: Calls = {}
    """Functions that do it, by file."""

    names: Pattern | None = None
    """Pattern of typical names of such functions in users' own programs, upper or lower case. It is tried after the
    calls of all files."""

    @model_validator(mode="after")
    def _says_where(self) -> PhaseEntry:
        if bool(self.names) == bool(self.calls):
            raise ValueError("must have either calls or names")
        return self


class KnownCodeFile(Section):
    """What frames mean.

    A function is named without its class; `"*"` is every function of a file. A file is the end of a path, whole names
    only (`torch/autograd/graph.py`). One that ends in `/` is a folder anywhere in a path, and one that begins with `<`
    is the beginning of a name that is no path (`<frozen `). A `*` in a file stands for any letters but `/`, and a lone
    `"*"` for every file.
    """

    sources: Annotated[tuple[ListedText, ...], Field(min_length=1)]
    """Required. The versions that were read, and where."""

    wrappers: tuple[ListedText, ...] = ()
    """Files whose functions only pass calls on."""

    idle: Calls = {}
    """Innermost calls of a thread that waits for another thread of its process, or for a task."""

    process_groups: bool = False
    """Whether all that it lists under `communications` and `may_communicate` goes over torch's process groups."""

    communications: tuple[CommunicationEntry, ...] = ()
    """Functions that communicate."""

    scopes: tuple[ScopeEntry, ...] = ()
    """Functions that communicate over a known group."""

    may_communicate: Calls = {}
    """Functions that call native or compiled code which communicates, or waits for it, without a Python frame of its
    own. This is asked of the innermost frame of a thread, wrappers left out: whatever calls Python again has a frame
    below it."""

    backward_engines: Calls = {}
    """Functions that wait for a backward pass. It runs in threads of native code, which may call Python again."""

    local_libraries: tuple[ListedText, ...] = ()
    """Compiled libraries in which nothing waits for other ranks."""

    python_libraries: tuple[ListedText, ...] = ()
    """Compiled parts of Python, from which it calls native code. Nothing in them waits for other ranks either."""

    shared_locks: Calls = {}
    """Calls that wait for a lock, a semaphore or an event that several processes share. Another rank may hold it."""

    waits: tuple[WaitEntry, ...] = ()
    """Known places in which a process waits outside any communication."""

    kernel_waits: tuple[KernelWaitEntry, ...] = ()
    """Waits that the kernel function alone identifies."""

    kernel_functions: dict[KernelKind, tuple[ListedText, ...]] = {}
    """Beginnings of the names of kernel functions, by what a thread waits for in them."""

    phases: tuple[PhaseEntry, ...] = ()
    """Work for which others may be meant to wait."""

    meant_barriers: Calls = {}
    """Functions with a barrier that is there so that one rank may work while all others wait."""

    no_phase: Calls = {}
    """Functions whose names only sound like such work."""

    signal_handler_names: tuple[Pattern, ...] = ()
    """Patterns of typical names of signal handlers, upper or lower case."""

    signal_handlers: Calls = {}
    """Functions that are signal handlers, whatever their names."""

    no_signal_handlers: Calls = {}
    """Functions whose names only sound like signal handlers."""

    norms: Calls = {}
    """Functions that communicate once for each parameter group of the optimizer."""

    store: Calls = {}
    """Functions in which a rank connects to the store of the rendezvous."""

    joining: Calls = {}
    """Functions in which ranks look for each other at the start."""

    shutdown: Calls = {}
    """Functions in which the interpreter waits for its threads before it exits."""

    servers: Calls = {}
    """Functions that wait for requests or tasks: nothing is wrong with a thread that stays in one."""

    starts_of_children: Calls = {}
    """The outermost own function of a process that was forked: what is outside it belongs to the parent."""

    child_files: tuple[ListedText, ...] = ()
    """Files in which a thread may wait for a process below its own."""

    data_loader_files: tuple[ListedText, ...] = ()
    """Files of data loaders with worker processes."""

    data_fetching_files: tuple[ListedText, ...] = ()
    """Files in which a worker of a data loader reads samples, and does not wait to be asked for them."""

    plumbing: tuple[ListedText, ...] = ()
    """Files that wait on behalf of their callers: queues, locks, connections. Their callers show the purpose."""
