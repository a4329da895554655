"""What a watcher that may act does: it ends the ranks of a hang, and pins the checkpoints around a spike.

Each act is claimed first, so that no other watcher repeats it, and written to the ledger before it is done. Where that
cannot be written, nothing is done.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from bigsci_launch.checkpoints.folder import CheckpointsDir
from bigsci_launch.checkpoints.verify import pin_path
from bigsci_launch.errors import BslError
from bigsci_launch.file_names import checkpoint_tag, step_of_tag
from bigsci_launch.runs.layout import AttemptDir, RunDir
from bigsci_launch.runs.watching.ended import EndedBy, write_ended_by
from bigsci_launch.runs.watching.ledger import Act, RunFinding, claim, claimed_at, read_acts, record_act
from bigsci_launch.watch.act.jobs import END_GRACE_S

MOST_TURNS = 3
DIED_S = 120.0
"""A watcher that has claimed an act, and has not recorded its result for so long, has died."""


def end_hang(
    run: RunDir, attempt: AttemptDir, who: str, finding: RunFinding, nodes: tuple[str, ...], end: Callable[[], str]
) -> str:
    """End the ranks of a hang, once, so that the job script reports why and the chain continues. Return the result;
    empty if another watcher has done it, or is at it. `end` ends them, and returns what it did."""
    key = _take_turn(run, attempt, who)
    if not key:
        return ""
    act = Act(key, "end_ranks", who, finding.sentence, "begun", attempt=attempt.name, step=finding.step)
    record_act(run, act)
    continues = EndedBy("end_ranks", who, finding.sentence, True, finding.step, finding.bundle, nodes)
    write_ended_by(attempt, continues)
    try:
        words = end()
    except BslError as error:
        attempt.ended_by.unlink(missing_ok=True)
        record_act(run, replace(act, state="failed", words=error.message))
        return f"the ranks could not be ended: {error.message}"
    record_act(run, replace(act, state="done", words=words))
    if nodes:
        left_out = Act(f"leave_out:{attempt.name}", "leave_out", who, finding.sentence, "done", ", ".join(nodes))
        record_act(run, replace(left_out, attempt=attempt.name))
    return words


def _take_turn(run: RunDir, attempt: AttemptDir, who: str) -> str:
    """Return the key of this act if it is this watcher's to do; empty if another has done it, or is at it.

    A watcher that died after it had claimed the act, and before it recorded its result, is followed by another.
    """
    states: dict[str, str] = {}
    for act in read_acts(run):
        states[act.key] = act.state
    for number in range(1, MOST_TURNS + 1):
        key = f"end_ranks:{attempt.name}:{number}"
        if claim(run, key, who):
            return key
        if states.get(key) == "done" or time.time() - claimed_at(run, key) < DIED_S:
            return ""
    return ""


def finish_end(run: RunDir, attempt: AttemptDir, kill: Callable[[], str], now: float) -> str:
    """Kill ranks that a watcher has asked to end and that still run, once. Return what was done; empty if nothing.

    `now` is seconds since the epoch. It is called while the job runs, also by a watcher that was started since.
    """
    acts = [act for act in read_acts(run) if act.what == "end_ranks" and act.attempt == attempt.name]
    told = [act for act in acts if act.state == "done"]
    if len(told) != 1 or now - told[0].time < END_GRACE_S:
        return ""
    words = kill()
    record_act(run, replace(told[0], words=words, time=now))
    return words


def pin_around(run: RunDir, who: str, finding: RunFinding) -> list[str]:
    """Pin the newest checkpoint before a spike, and the first after it once there is one. Return what was done."""
    assert finding.step is not None
    folder = CheckpointsDir(run.checkpoints)
    steps = [step for tag in folder.tags() if (step := step_of_tag(tag)) is not None]
    before = [step for step in steps if step < finding.step][-1:]
    after = [step for step in steps if step >= finding.step][:1]
    done = []
    pinned = {act.key for act in read_acts(run) if act.what == "pin"}
    for side, step in (*(("before", step) for step in before), *(("after", step) for step in after)):
        key = f"pin:{finding.key}:{side}"
        if key in pinned or not claim(run, key, who):
            continue
        act = Act(key, "pin", who, finding.sentence, "begun", attempt=finding.attempt, step=step)
        record_act(run, act)
        try:
            pin_path(folder.folder(checkpoint_tag(step))).touch()
        except OSError as error:
            record_act(run, replace(act, state="failed", words=str(error.strerror or error)))
            continue
        record_act(run, replace(act, state="done", words=f"{checkpoint_tag(step)} is pinned"))
        done.append(f"{checkpoint_tag(step)} is pinned, the checkpoint {side} the spike")
    return done
