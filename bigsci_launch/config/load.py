"""Reads a run file: merges its layers, checks every value, and remembers where each one came from.

The layers are, weakest first: defaults, the site, the chain of `extends` parents, the file, `--set`. All problems are
collected into one `ConfigError`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from bigsci_launch.config.check import check_run
from bigsci_launch.config.checks.site_file import check_site_file
from bigsci_launch.config.document import (
    KeyPath,
    Node,
    at_one_place,
    dotted,
    leaves,
    moved,
    overlay,
    parse_document,
    parse_key,
    read_document,
)
from bigsci_launch.config.finding import Finding
from bigsci_launch.config.problems import section_in, validate
from bigsci_launch.config.render import render_yaml
from bigsci_launch.config.schema.program import script_at, starts_trainer
from bigsci_launch.config.schema.run import RunConfig
from bigsci_launch.config.schema.section import DESCRIBING
from bigsci_launch.config.site import Layout, Site, is_path, load_site, site_layer
from bigsci_launch.errors import ConfigError, Problem

DEFAULT, OVERRIDE, COMPUTED, ARGUMENTS = "default", "--set", "computed", "--"
HINT = "`bsl config schema` shows every key; docs/reference/config.md explains them"

_PLACE = re.compile(r"(?P<file>.+):(?P<line>\d+):(?P<column>\d+)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class LoadedRun:
    """A resolved run file. `origins` maps each leaf (`optimizer.betas.0`) to where its value came from:
    `file:line:column`, `--set`, `--` (an argument), `site NAME`, `default` or `computed`."""

    path: Path
    config: RunConfig
    site: Site
    layout: Layout
    origins: dict[str, str]
    warnings: tuple[Finding, ...]


def load_run(path: Path, overrides: Sequence[str] = (), arguments: Sequence[str] = ()) -> LoadedRun:
    """Return the run in the file at `path` with `overrides` (`section.key=value`, the value in YAML) applied.

    Its config is complete: `data_parallel_size` and the site's values are filled in, and `arguments` are those of
    `run.command`, after its own.

    Raises:
        ConfigError: lists every problem of the file, its parents, its site and the overrides.
    """
    return _checked(path, *resolve_run(path, overrides, arguments))


def resolve_run(
    path: Path, overrides: Sequence[str] = (), arguments: Sequence[str] = ()
) -> tuple[RunConfig, Site, Node]:
    """Return the run in the file at `path`, its site, and the places of its values. Applies no rules across sections.

    Raises:
        ConfigError: lists every problem of a single value.
    """
    written = read_chain(path)
    defaults = _defaults(_override(written, overrides)[0])
    site, problems, hint = _site_of(_override(overlay(defaults, written), overrides)[0], path)
    lower = overlay(defaults, site_layer(site)) if site else defaults
    merged, unusable = _override(overlay(lower, written), overrides)
    tree = _with_arguments(_with_whole_variables(merged), path, arguments)
    config, invalid = validate(RunConfig, tree)
    problems = [_placed(problem, written) for problem in (*problems, *unusable, *invalid)]
    if config is None or site is None or problems:
        raise _refuse(path, problems, hint)
    return config, site, tree


def _defaults(written: Node) -> Node:
    """Return the weakest layer. A section that only describes a training has its defaults if `bsl train` is started, or
    if some of it is written; otherwise it is null."""
    layer = default_layer(RunConfig)
    command = written.at(("run", "command"))
    words = command.plain() if command is not None else None
    is_list = isinstance(words, list) and all(isinstance(word, str) for word in words)
    needs_all = not is_list or starts_trainer(words)
    sections = {
        name: default_layer(section)
        for name, field in RunConfig.model_fields.items()
        if name in DESCRIBING and (section := section_in(field.annotation)) is not None
        if needs_all or _is_written(written, name)
    }
    return overlay(layer, Node(sections, DEFAULT))


def _with_whole_variables(tree: Node) -> Node:
    """Return `tree` with the section of each variable: `env: {NAME: 8}` is short for `env: {NAME: {value: "8"}}`. A
    number is text in an environment, as it was written."""
    variables = tree.at(("env",))
    if variables is None or not isinstance(variables.value, dict) or not isinstance(tree.value, dict):
        return tree
    whole = {name: _whole_variable(node) for name, node in variables.value.items()}
    return Node({**tree.value, "env": Node(whole, variables.where)}, tree.where)


def _with_arguments(tree: Node, path: Path, arguments: Sequence[str]) -> Node:
    """Return `tree` with further arguments of the program that every rank runs.

    Raises:
        ConfigError: there is no program, or it is a line of a shell, which takes no arguments.
    """
    if not arguments:
        return tree
    command, words = tree.at(("run", "command")), shlex.join(arguments)
    if command is None or not isinstance(command.value, list):
        raise _refuse(
            path, [Problem(str(path), "run.command", f"is not set, and takes no arguments (got {words})")], HINT
        )
    if script_at(command.plain()) is not None:
        hint = f"put them into the file: --set 'run.command=[...]' replaces the whole command (got {words})"
        raise _refuse(
            path, [Problem(command.where, "run.command", "is a line of a shell, which takes no arguments")], hint
        )
    longer = Node([*command.value, *(Node(word, ARGUMENTS) for word in arguments)], command.where)
    return overlay(tree, Node({"run": Node({"command": longer}, ARGUMENTS)}, ARGUMENTS))


def _whole_variable(node: Node) -> Node:
    if node.value is None or isinstance(node.value, list):
        return node
    entries = node.value if isinstance(node.value, dict) else {"value": node}
    return Node({key: _as_text(child) if key == "value" else child for key, child in entries.items()}, node.where)


def _as_text(node: Node) -> Node:
    if node.value is None or isinstance(node.value, (dict, list)):
        return node
    return Node(node.text or node.value, node.where)


def _is_written(tree: Node, section: str) -> bool:
    node = tree.at((section,))
    return node is not None and node.value is not None


def _checked(path: Path, config: RunConfig, site: Site, tree: Node) -> LoadedRun:
    """Return the loaded run if the rules across sections hold."""
    findings = [*check_run(config, site), *check_site_file(site, path, config.slurm.site)]
    errors = [_problem_of(finding, tree) for finding in findings if finding.is_error]
    if errors:
        raise _refuse(path, errors, "`bsl config show FILE` shows every value and where it comes from")
    layout = site.layout(config)
    complete = _with_data_parallel_size(config, layout.topology.dp)
    warnings = tuple(finding for finding in findings if finding.severity == "warning")
    return LoadedRun(path, complete, site, layout, origins_of(complete, tree), warnings)


def read_chain(path: Path, children: tuple[Path, ...] = ()) -> Node:
    """Return the contents of the file at `path` merged over those of the files that it extends.

    Raises:
        ConfigError: a file of the chain cannot be read, or the chain is circular.
    """
    root = read_document(path)
    assert isinstance(root.value, dict)
    extends = root.value.get("extends")
    own = Node({key: node for key, node in root.value.items() if key != "extends"}, root.where)
    if extends is None:
        return own
    if not isinstance(extends.value, str):
        raise _single(extends.where, "extends", "must be the path of one run file")
    parent = path.parent / extends.value
    if not parent.is_file():
        raise _single(extends.where, "extends", f"no such file: {parent}")
    chain = (*children, path.resolve())
    if parent.resolve() in chain:
        names = " -> ".join(str(each.name) for each in (*chain, parent))
        raise _single(extends.where, "extends", f"the files extend each other in a circle: {names}")
    return overlay(read_chain(parent, chain), own)


def default_layer(model: type[BaseModel]) -> Node:
    """Return every default of `model` as the weakest layer; required keys are absent."""
    entries = {}
    for name, field in model.model_fields.items():
        section = section_in(field.annotation)
        if field.is_required() and section is not None:
            entries[name] = default_layer(section)
        elif not field.is_required():
            value = field.get_default(call_default_factory=True)
            entries[name] = at_one_place(
                value.model_dump(mode="json") if isinstance(value, BaseModel) else value, DEFAULT
            )
    return Node(entries, DEFAULT)


def origins_of(config: RunConfig, tree: Node) -> dict[str, str]:
    """Return the place in `tree` of every leaf of `config`."""
    data = config.model_dump(mode="json")
    return {dotted(path): _origin(tree, path, value) for path, value in leaves(data)}


def _origin(tree: Node, path: KeyPath, value: Any) -> str:
    """Return the place of one leaf: `default` if it is inside a default list or null, `computed` if it replaced a
    null. A number that is short for a section is the place of everything in it."""
    node = tree.at(path)
    if node is None:
        above = tree.nearest(path)
        return above.where if isinstance(above.value, int) else DEFAULT
    return COMPUTED if node.value is None and value is not None else node.where


def dump_resolved(config: RunConfig) -> str:
    """Return the whole config as YAML text, which `load_resolved` reads back."""
    return render_yaml(config.model_dump(mode="json"))


def load_resolved(path: Path) -> RunConfig:
    """Return the config in a file that `dump_resolved` wrote. Applies no layers, no site and no rules.

    Raises:
        ConfigError: the file cannot be read, or is not a complete config.
    """
    config, problems = validate(RunConfig, read_document(path))
    if config is None:
        raise _refuse(path, problems, "the file was written by `bsl submit`; submit the run again")
    return config


def _override(tree: Node, overrides: Sequence[str]) -> tuple[Node, list[Problem]]:
    """Return `tree` with each `key=value` applied in order, and the problems of those that could not be."""
    problems: list[Problem] = []
    for argument in overrides:
        try:
            key, value = _parse_override(argument)
            tree = _put(tree, key, value)
        except ConfigError as error:
            problems += [Problem(OVERRIDE, argument, problem.text) for problem in error.problems]
        except ValueError as error:
            problems.append(Problem(OVERRIDE, argument, str(error)))
    return tree, problems


def _parse_override(argument: str) -> tuple[list[str], Node]:
    key, equals, text = argument.partition("=")
    if not equals or not re.fullmatch(r"\w+(\.\w+)*", key):
        raise ValueError("is not section.key=value")
    if key == "extends":
        raise ValueError("only a file can extend another")
    return key.split("."), moved(parse_document(text, OVERRIDE), OVERRIDE)


def _put(node: Node | None, path: list[str], value: Node) -> Node:
    """Return `node` with `value` at `path`. Creates what is missing on the way; a list grows by one item at most."""
    if not path:
        return value
    step, rest = path[0], path[1:]
    where = node.where if node else OVERRIDE
    inside = node.value if node and node.value is not None else [] if step.isdecimal() else {}
    if isinstance(inside, dict):
        return Node({**inside, step: _put(inside.get(step), rest, value)}, where)
    if not isinstance(inside, list):
        raise ValueError(f"a single value has no keys below it ({step})")
    if not step.isdecimal() or int(step) > len(inside):
        raise ValueError(f"the list has {len(inside)} items; {step} is neither one of them nor the next")
    at = int(step)
    return Node([*inside[:at], _put(inside[at] if at < len(inside) else None, rest, value), *inside[at + 1 :]], where)


def _site_of(tree: Node, path: Path) -> tuple[Site | None, Sequence[Problem], str]:
    """Return the site that the run names or its problems, and a hint for the reader.

    Validation reports a name that is not text, because its message is better.
    """
    node = tree.nearest(("slurm", "site"))
    if not isinstance(node.value, str):
        return None, (), HINT
    place = _PLACE.fullmatch(node.where)
    folder = path.parent if not is_path(node.value) else Path(place["file"]).parent if place else Path()
    try:
        return load_site(node.value, folder), (), HINT
    except ConfigError as error:
        problems = error.problems or (Problem(node.where, "slurm.site", error.message),)
        return None, problems, error.hint or HINT


def _with_data_parallel_size(config: RunConfig, dp: int) -> RunConfig:
    parallelism = config.parallelism.model_copy(update={"data_parallel_size": dp})
    return config.model_copy(update={"parallelism": parallelism})


def _problem_of(finding: Finding, tree: Node) -> Problem:
    """Return a finding as a problem at the first of its keys that was written."""
    nodes = [tree.at(parse_key(key)) for key in finding.keys]
    written = [node.where for node in nodes if node and (node.where == OVERRIDE or _PLACE.fullmatch(node.where))]
    return finding.at(written[0] if written else tree.where)


def _placed(problem: Problem, written: Node) -> Problem:
    """Return `problem`, at the file as a whole if its key was not written."""
    return replace(problem, where=written.where) if problem.where == DEFAULT else problem


def _refuse(path: Path, problems: Sequence[Problem], hint: str) -> ConfigError:
    ordered = sorted(problems, key=_reading_order)
    return ConfigError(f"{path}: {len(ordered)} problem{'s'[: len(ordered) > 1]}", problems=ordered, hint=hint)


def _reading_order(problem: Problem) -> tuple[str, int, int]:
    place = _PLACE.fullmatch(problem.where)
    return (place["file"], int(place["line"]), int(place["column"])) if place else (problem.where, 0, 0)


def _single(where: str, key: str, text: str) -> ConfigError:
    return ConfigError(f"{where}: {key}: {text}", problems=[Problem(where, key, text)])
