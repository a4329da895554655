"""The launcher in `run.command`, such as torchrun: a program that starts ranks itself, and the program of these."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import dropwhile
from pathlib import PurePosixPath

from bigsci_launch.config.schema.program import script_at, split_script

# The option before the name of a module, of Python and of its launchers; these have a long one too.
_MODULE = "-m"
_PYTHON = re.compile(r"python[\d.]*")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
# What a line of a shell may have before its program. Only there a word such as `deepspeed` is sure to be the program.
_BEFORE_PROGRAM = ("exec", "time", "nohup", "env", "if", "then", "else", "do", "!", "{", "(")
_WRAPPERS = (
    *("numactl", "taskset", "nice", "ionice", "timeout", "stdbuf", "singularity", "apptainer", "nsys", "uv", "poetry"),
    *("conda", "mamba", "micromamba", "pixi"),
)
_ENDS_OF_PART = ("&&", "||", "|", "&", ";")


@dataclass(frozen=True, slots=True)
class _Kind:
    """A launcher: its words, the names of its module, and its options, without dashes and with `_` for `-` in them."""

    words: tuple[str, ...]
    modules: tuple[str, ...] = ()
    processes: tuple[str, ...] = ()
    """Options with the number of processes that one launcher starts."""
    machines: tuple[str, ...] = ()
    """Options with the number of machines over which those are distributed."""
    default: int | None = None
    """The number of processes without an option; None: it depends on the machine."""
    is_global: bool = False
    """Whether one launcher starts the ranks of all nodes."""
    joins_by: str = ""
    """The option without which a launcher joins no others; an empty text if that is not known."""


_TORCH = ("torch.distributed.run", "torch.distributed.launch", "torchrun")
_KINDS = (
    _Kind(("torchrun",), _TORCH, ("nproc_per_node",), default=1, joins_by="nnodes"),
    *(
        _Kind(words, ("accelerate.commands.launch",), ("num_processes",), ("num_machines",))
        for words in (("accelerate", "launch"), ("accelerate-launch",))
    ),
    _Kind(("deepspeed",), ("deepspeed.launcher.runner", "deepspeed.launcher.launch"), ("num_gpus",)),
    _Kind(("composer",), ("composer.cli.launcher",), ("n", "nproc")),
    *(
        _Kind((name,), (), ("np", "n"), is_global=True)
        for name in ("mpirun", "mpiexec", "mpiexec.hydra", "orterun", "horovodrun")
    ),
    _Kind(("srun",), (), ("n", "ntasks"), is_global=True),
)


@dataclass(frozen=True, slots=True)
class CommandLauncher:
    """A launcher in a command.

    `processes` is how many one launcher starts on its node; None if the command does not say. A launcher that
    `is_global` starts ranks on all nodes; one that `is_alone` joins no others, so its ranks are a world of their own.
    `program` is the command without it; empty if that is not known.
    """

    name: str
    processes: int | None
    is_global: bool
    is_alone: bool
    program: tuple[str, ...]
    says_processes: bool = False
    """Whether `processes` is written, and no default."""
    is_standalone: bool = False
    """Whether it joins no others even if its environment names them."""


def find_launcher(command: Sequence[str] | None) -> CommandLauncher | None:
    """Return the launcher that a command starts, or a line of a shell in it; None if it starts none that is known."""
    words = tuple(command or ())
    if (found := _launcher_in(words)) is not None:
        return found
    script = script_at(words)
    parts = _parts(words[script]) if script is not None else ()
    for part in parts:
        if (found := _launcher_in(part)) is not None:
            return replace(found, program=())
    return None


def _launcher_in(words: tuple[str, ...]) -> CommandLauncher | None:
    for at, word in enumerate(words):
        found = _kind_at(words, at)
        if found is not None:
            kind, after = found
            python = word if _PYTHON.fullmatch(_name(word)) else "python"
            begin, program = _program(words, after, python, kind)
            options = dict(_options(words[after:begin]))
            has_others = _has_others(words[after:begin])
            count = None if has_others and not options.keys() & set(kind.processes) else _count(options, kind)
            is_alone = bool(kind.joins_by) and kind.joins_by not in options and not has_others
            kept = (*words[:at], *program) if program else ()
            says = count is not None and bool(options.keys() & set(kind.processes))
            name = " ".join(kind.words)
            return CommandLauncher(name, count, kind.is_global, is_alone, kept, says, "standalone" in options)
        if _is_program(word):
            return None
    return None


def _kind_at(words: tuple[str, ...], at: int) -> tuple[_Kind, int] | None:
    """Return the launcher that begins with a word, and where its options begin."""
    name = _name(words[at])
    if _PYTHON.fullmatch(name):
        module = next((one for one in range(at + 1, len(words)) if not words[one].startswith("-")), None)
        is_module = module is not None and words[module - 1] == _MODULE
        kind = next((each for each in _KINDS if is_module and module and words[module] in each.modules), None)
        return (kind, module + 1) if kind is not None and module is not None else None
    for kind in _KINDS:
        end = at + len(kind.words)
        is_value = at > 0 and _needs_value(words[at - 1]) and _name(words[0]) not in _WRAPPERS
        if (name, *words[at + 1 : end]) == kind.words and not is_value:
            return kind, end
    return None


def _needs_value(word: str) -> bool:
    """Whether what follows a word may be its value: `--strategy deepspeed`."""
    return word.startswith("--") and "=" not in word and word != "--"


def _is_program(word: str) -> bool:
    return _PYTHON.fullmatch(_name(word)) is not None or word.endswith(".py")


def _program(words: tuple[str, ...], begin: int, python: str, kind: _Kind) -> tuple[int, tuple[str, ...]]:
    """Return where the program of a launcher begins, whose options are at `begin`, and its words without a launcher."""
    for at in range(begin, len(words)):
        if (inner := _kind_at(words, at)) is not None:
            return at, _program(words, inner[1], python, inner[0])[1]
        if _PYTHON.fullmatch(_name(words[at])):
            return at, words[at:]
        if words[at] in {_MODULE, "--module"} and not kind.is_global and at + 1 < len(words):
            return at, (python, _MODULE, *words[at + 1 :])
        if words[at].endswith(".py"):
            return at, (python, *words[at:])
    return len(words), ()


def _options(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    for word, following in zip(words, (*words, "")[1:], strict=True):
        if word.startswith("-"):
            name, equals, value = word.lstrip("-").partition("=")
            yield name.replace("-", "_"), value if equals else following


def _has_others(words: Sequence[str]) -> bool:
    """Whether there may be more options than are written: `torchrun $ARGS train.py`."""
    before = ("", *words)
    return any(word.startswith("$") and not before[at].startswith("-") for at, word in enumerate(words))


def _count(options: dict[str, str], kind: _Kind) -> int | None:
    texts = [options[name] for name in kind.processes if name in options]
    if not texts:
        return kind.default
    machines = [options[name] for name in kind.machines if name in options] or ["1"]
    if not (_is_number(texts[0]) and _is_number(machines[0])):
        return None
    return max(1, int(texts[0]) // max(1, int(machines[0])))


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 8


def _name(word: str) -> str:
    return PurePosixPath(word).name


def _parts(script: str) -> Iterator[tuple[str, ...]]:
    """Yield the simple commands of a script that begin with a program, or with one that starts another."""
    for line in script.replace("\\\n", " ").splitlines():
        part: list[str] = []
        for word in (*split_script(line), ";"):
            is_end = word in _ENDS_OF_PART
            if not is_end:
                part.append(word.removesuffix(";"))
            if is_end or word.endswith(";"):
                yield from _from_program(part)
                part = []


def _from_program(words: Sequence[str]) -> Iterator[tuple[str, ...]]:
    own = tuple(dropwhile(lambda word: word in _BEFORE_PROGRAM or bool(_ASSIGNMENT.fullmatch(word)), words))
    if own and (own[0] in _WRAPPERS or _kind_at(own, 0) is not None):
        yield own
