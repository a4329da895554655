"""Arranges a rehearsal: from a run file to everything that its attempts are started with. Writes nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from bigsci_launch.config.load import LoadedRun
from bigsci_launch.errors import ConfigError, Problem
from bigsci_launch.launch.notes import notes
from bigsci_launch.launch.prepare import Prepared, prepare
from bigsci_launch.launch.report import remark_lines
from bigsci_launch.launch.submit import submit
from bigsci_launch.rehearse.attempt import RunningAttempt
from bigsci_launch.rehearse.limits import RehearsalLimits
from bigsci_launch.rehearse.reduce import (
    ConfigChange,
    Original,
    find_changes,
    lost_axes,
    saved_elsewhere,
)
from bigsci_launch.runs.rehearsals import RehearsalDir, next_rehearsal

MEMORY = "memory"
"""The planner's rule on whether a setup fits. Its other remarks are about the length of a real run."""


@dataclass(frozen=True, slots=True)
class Arrangement:
    """A rehearsal that is ready to be played. `prepared` is its first attempt."""

    path: Path
    overrides: tuple[str, ...]
    working_directory: Path
    python: str
    is_local: bool
    loaded: LoadedRun
    original: Original
    changes: tuple[ConfigChange, ...]
    folder: RehearsalDir
    prepared: Prepared
    limits: RehearsalLimits

    @property
    def unchecked(self) -> tuple[str, ...]:
        """What no rehearsal of this size can show."""
        return tuple(lost_axes(self.loaded.config, self.prepared.loaded.config))

    @property
    def has_evaluation(self) -> bool:
        config = self.prepared.loaded.config
        return config.monitor.eval_interval is not None and config.describes("data") and config.data.held_out > 0

    def remarks(self) -> list[str]:
        """Return what the user should know before it starts."""
        is_local = self.prepared.request.scheduler == "local"
        findings = self.prepared.findings
        found = remark_lines([finding for finding in findings if finding.is_error or finding.rule == MEMORY])
        found += notes(self.prepared.loaded, is_local=is_local)
        if not self.loaded.config.run.starts_trainer:
            found.append(
                "warning: run.command is used unchanged: files that the program writes outside $BSL_RUN_DIR are those "
                "of the run, and its own options still describe the whole run"
            )
        return found

    def start(self, command: Sequence[str]) -> RunningAttempt:
        """Submit the next attempt, as `bsl submit` does.

        Raises:
            BslError: the checkpoint to resume from is damaged, or the scheduler refuses.
        """
        prepared = self._prepare()
        return RunningAttempt(submit(prepared.loaded, prepared.request, command))

    def _prepare(self) -> Prepared:
        return prepare(
            self.path,
            (*self.overrides, *(change.override for change in self.changes)),
            working_directory=self.working_directory,
            python=self.python,
            local=self.is_local,
        )

    def forget(self) -> None:
        """Remove the folder of a rehearsal that left nothing behind."""
        with suppress(OSError):
            for folder in (self.folder.path, *self.folder.path.parents[:2]):
                folder.rmdir()


def arrange(
    path: Path, overrides: Sequence[str], *, working_directory: Path, python: str, local: bool, pending_s: float
) -> Arrangement:
    """Return the rehearsal of the run in the file at `path`, which waits at most `pending_s` seconds for nodes.

    Raises:
        ConfigError: the run file is wrong or does not describe the training, or its program would write into the
            checkpoints of the run.
    """

    def prepared_with(more: Sequence[str]) -> Prepared:
        return prepare(path, (*overrides, *more), working_directory=working_directory, python=python, local=local)

    whole = prepared_with(())
    config = whole.loaded.config
    folder = next_rehearsal((working_directory / config.run.root).resolve(), config.run.name)
    _require_own_checkpoints(whole.loaded, folder)
    layers = whole.setup.layers_per_stage if whole.setup is not None and config.run.starts_trainer else ()
    site = whole.loaded.site
    original = Original(config, site.config.ranks_per_node, site.is_local, layers)
    changes, prepared = _fit(original, str(folder.path), prepared_with, _memory_findings(whole))
    return Arrangement(
        path=path,
        overrides=tuple(overrides),
        working_directory=working_directory,
        python=python,
        is_local=local,
        loaded=whole.loaded,
        original=original,
        changes=changes,
        folder=folder,
        prepared=prepared,
        limits=RehearsalLimits.of_config(config, pending_s=pending_s),
    )


def _fit(
    original: Original, root: str, prepared_with: Callable[[Sequence[str]], Prepared], tolerated: set[str]
) -> tuple[tuple[ConfigChange, ...], Prepared]:
    """Return the changes and the rehearsal with as many layers as the planner thinks fit into memory.

    Findings about the run itself are `tolerated`.
    """
    most = max(original.layers, default=1)
    for fewer in range(most):
        changes = find_changes(original, root=root, fewer_layers=fewer)
        prepared = prepared_with([change.override for change in changes])
        if _memory_findings(prepared) <= tolerated:
            break
    return changes, prepared


def _memory_findings(prepared: Prepared) -> set[str]:
    """Return the severities of the planner's findings about memory: `warning` if it is tight, `error` if too small."""
    return {finding.severity for finding in prepared.findings if finding.rule == MEMORY}


def _require_own_checkpoints(loaded: LoadedRun, folder: RehearsalDir) -> None:
    command = loaded.config.run.command or ()
    if found := saved_elsewhere(command, str(folder.path)):
        text = f"{found[0]}: the rehearsal would write into the checkpoints of the run"
        raise ConfigError(
            f"run.command: {text}",
            problems=[Problem(loaded.origins.get("run.command.0", ""), "run.command", text)],
            hint="let the program save below $BSL_RUN_DIR, or give another command with --set 'run.command=[...]'",
        )
