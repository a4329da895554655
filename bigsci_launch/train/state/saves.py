"""When a save is tried again that the disk has refused, and what is recorded of it.

The state is in memory, so training continues: a save is tried again after a pause that grows, and when the next one is
due anyway. Where no step follows, it is tried again for a bounded time, and then the run ends.
"""

from __future__ import annotations

import errno
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from deepspeed.runtime.pipe.engine import PipelineEngine

from bigsci_launch.checkpoints.folder import CheckpointsDir, record_path
from bigsci_launch.errors import SaveError
from bigsci_launch.file_names import checkpoint_tag, step_of_tag
from bigsci_launch.topology.naming import name_ranks
from bigsci_launch.train.rank.collective import gather, on_first_rank
from bigsci_launch.train.rank.stop import StopFlag, wait_for_writers
from bigsci_launch.train.state.background import BackgroundSave, num_bytes_held
from bigsci_launch.train.state.checkpoint import describe
from bigsci_launch.train.state.host_copies import HostMemory
from bigsci_launch.train.steps.companion import Companion, RankSetup, TrainingProgress
from bigsci_launch.units import format_age

PAUSES_S = (30.0, 60.0, 120.0, 300.0)
"""From a refusal to the next try while training continues; the last one repeats."""
END_PAUSES_S = (1.0, 2.0, 4.0, 8.0, 15.0)
"""The same where no step follows."""
STOP_S = 20.0
"""How long a run tries that was asked to stop. The job script asks two steps, two saves and a minute before the limit:
this leaves time for one more step and one more save."""
FINISH_S = 300.0
"""How long a run tries that is finished."""
_LOOK_S = 0.2


@dataclass(frozen=True, slots=True)
class Newest:
    """The step of the newest checkpoint, 0 if there is none, None if that is not known; and the same in words."""

    step: int | None
    words: str

    def lost_text(self, step: int) -> str:
        """Return which steps are lost if the state after `step` is."""
        if self.step is None:
            return "the steps since then are"
        return f"step {step} is" if self.step == step - 1 else f"steps {self.step + 1} to {step} are"


@dataclass(slots=True)
class _Pending:
    """A save in the background: its step, the request for it, and how long training has waited."""

    save: BackgroundSave
    step: int
    request: str | None
    stalled_s: float


class Saves:
    """The saves of a rank. Only rank 0 decides and records what is refused; the others follow."""

    def __init__(
        self,
        setup: RankSetup,
        engine: PipelineEngine,
        companions: Sequence[Companion],
        stop: StopFlag,
        save: Callable[..., Path],
    ) -> None:
        """`save` takes what `save_checkpoint` does."""
        self._setup, self._engine, self._companions, self._stop = setup, engine, companions, stop
        self._save = save
        self._is_first, self._report = setup.identity.rank == 0, setup.report
        self._checkpoints = CheckpointsDir(setup.identity.run.checkpoints)
        self._memory = HostMemory(num_bytes_held(engine)) if setup.config.checkpoint.background else None
        self._pending: _Pending | None = None
        if self._memory is not None:
            engine.optimizer.optimizer.register_step_pre_hook(lambda *_: self._wait_for_copies())
        self._since: int | None = None
        self._tries = 0
        self._due = math.inf
        self._is_last = False
        self._end: float | None = None

    @property
    def is_due(self) -> bool:
        """Whether a save that was refused must be tried again now. Only the answer of rank 0 counts."""
        return time.monotonic() >= self._due

    def is_saved(self, step: int) -> bool:
        """Whether the state after `step` is saved; a collective call."""
        return on_first_rank(lambda: record_path(self._checkpoints.folder(checkpoint_tag(step))).is_file())

    @property
    def has_news(self) -> bool:
        """Whether all ranks must hear from this one of a save in the background, so that they `settle` it."""
        return self._pending is not None and self._pending.save.has_news

    def settle(self) -> None:
        """Wait for the end of a save in the background, if there is one, and record it; a collective call."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            folder, seconds = pending.save.settle()
        except SaveError as error:
            self._refused(error.with_traceback(None), pending.step, pending.request, is_last=False)
            return
        self._worked(pending.step, pending.request, folder, seconds, stalled_s=pending.stalled_s)

    def close(self) -> None:
        """Training has ended. If it has failed, a save in the background ends by itself."""
        if self._pending is not None:
            self._pending.save.end_with_training()

    def _wait_for_copies(self) -> None:
        """Wait until the state may change."""
        if self._pending is not None:
            started = time.monotonic()
            self._pending.save.wait_for_copies()
            self._pending.stalled_s += time.monotonic() - started

    def save(self, progress: TrainingProgress, request: str | None, *, is_last: bool, stops: bool) -> None:
        """Save. What the disk refuses is tried again: in a later step, or at once if none follows. A collective call.

        If a save in the background has not ended, this waits for it: a disk that is too slow for `save_interval` shows
        in the steps, and loses no checkpoint. Where no step follows, nothing is done in the background.

        Raises:
            SaveError: no step follows, and no try has worked. All ranks raise it.
        """
        while (error := self._try(progress, request, is_last=is_last)) is not None:
            self._refused(error, progress.step, request, is_last=is_last)
            if not is_last:
                return
            self._wait_between(error, progress.step, stops=stops)

    def _try(self, progress: TrainingProgress, request: str | None, *, is_last: bool) -> SaveError | None:
        """Save, or begin to, or return what the disk refuses; on all ranks alike."""
        setup, memory = self._setup, None if is_last else self._memory
        setup.report.phase("save" if memory is None or self._pending is not None else "copy")
        started = time.monotonic()
        self.settle()
        waited = time.monotonic() - started
        for each in self._companions:
            each.before_save(progress.step)
        started = time.monotonic()
        record = describe(setup.config, setup.topology, progress, setup.identity.run)
        for each in self._companions:
            record = replace(record, **each.record(progress))
        if self._memory is not None:
            wait_for_writers()  # of an earlier generation
            gather(None)
        save = self._engine, setup.identity, record, setup.coordinate, setup.config.checkpoint.keep_last
        try:
            if memory is not None:
                self._pending = _Pending(BackgroundSave(*save, memory), progress.step, request, waited)
                self._pending.stalled_s += time.monotonic() - started
                self._due = math.inf
                return None
            folder = self._save(*save)
        except SaveError as error:
            return error.with_traceback(None)
        self._worked(progress.step, request, folder, time.monotonic() - started)
        return None

    def _worked(self, step: int, request: str | None, folder: Path, seconds: float, **fields: float) -> None:
        more = ({"request": request} if request else {}) | (
            {} if self._since is None else {"refused_since": self._since}
        )
        self._since, self._tries, self._due = None, 0, math.inf
        for each in self._companions:
            each.after_save(step)
        self._report.event("save", step=step, path=str(folder), seconds=seconds, **fields, **more)
        if self._setup.tells:
            stalled = f"; training waited {fields['stalled_s']:.2f} s" if fields else ""
            print(f"saved {folder} in {seconds:.2f} s{stalled}", flush=True)

    def _refused(self, error: SaveError, step: int, request: str | None, *, is_last: bool) -> None:
        """Note, say and record that a save was refused. `is_last`: no step follows."""
        self._since = step if self._since is None else self._since
        if is_last and not self._is_last:
            self._is_last, self._tries = True, 0
        pauses = END_PAUSES_S if is_last else PAUSES_S
        pause_s = pauses[min(self._tries, len(pauses) - 1)]
        self._tries += 1
        self._due = time.monotonic() + pause_s
        if not self._is_first:
            return
        newest = find_newest(self._checkpoints)
        self._report.event(
            "save_refused",
            step=step,
            refused_since=self._since,
            newest=newest.step or None,
            path=error.path,
            errno=errno.errorcode.get(error.number) if error.number is not None else None,
            text=error.message,
            hint=error.hint,
            ranks=list(error.ranks),
            node=error.node,
            retry_s=pause_s,
            **({"request": request} if request else {}),
        )
        print(
            f"not saved after step {step}: {_who(error)}: {error.message}; {newest.words}; "
            f"tried again in {format_age(pause_s)}: {error.hint}",
            flush=True,
        )

    def _wait_between(self, error: SaveError, step: int, *, stops: bool) -> None:
        """Wait before another try where no step follows; a collective call.

        Raises:
            SaveError: the time for that is over. It says what is lost.
        """
        final = on_first_rank(lambda: self._wait(error, step, stops=stops))
        if final is not None:
            raise final

    def _wait(self, error: SaveError, step: int, *, stops: bool) -> SaveError | None:
        if self._end is None:
            self._end = time.monotonic() + (STOP_S if stops else FINISH_S)
        while (now := time.monotonic()) < self._due:
            if self._stop.is_raised:
                self._end = min(self._end, now + STOP_S)
            if now >= self._end:
                return self._final(error, step)
            time.sleep(_LOOK_S)
        return None

    def _final(self, error: SaveError, step: int) -> SaveError:
        newest = find_newest(self._checkpoints)
        words = f"{_who(error)}: {error.message}; {newest.words}: {newest.lost_text(step)} lost"
        return SaveError(words, hint=f"{error.hint}, and submit the run again", path=error.path, number=error.number)


def find_newest(checkpoints: CheckpointsDir) -> Newest:
    try:
        step = step_of_tag(checkpoints.read_latest())
    except FileNotFoundError:
        return Newest(0, "there is no checkpoint")
    except OSError as error:
        return Newest(None, f"newest checkpoint unknown ({error})")
    if step is None:
        return Newest(None, "newest checkpoint unknown")
    return Newest(step, f"the newest checkpoint is of step {step}")


def _who(error: SaveError) -> str:
    return f"{name_ranks(error.ranks)} on {error.node}" if len(error.ranks) == 1 else name_ranks(error.ranks)
