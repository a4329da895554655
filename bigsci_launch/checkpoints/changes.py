"""What has changed when a run resumes: its settings, its data, the run that saved. Two records are compared.

Each change has a severity. `stop`: the run would continue as another one, so it is refused unless the user accepts it.
`name`: it is changed on purpose; it is reported, and the run continues. `unknown`: the checkpoint does not hold it (an
older version saved it), so it may differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from bigsci_launch.checkpoints.folder import CheckpointRecord
from bigsci_launch.errors import CheckpointError, RunDirError
from bigsci_launch.runs.layout import AttemptDir, RunDir, read_json, write_json

SCHEMA_VERSION = 1

ChangeSeverity = Literal["stop", "name", "unknown"]
DataLikeness = Literal["same", "grown", "other", "unknown"]

_STOPPING = {
    "run.seed": "another order of the data and other dropout",
    "model.layernorm_epsilon": "the same weights compute another function",
    "data.held_out": "other samples are trained on",
}
"""Settings that make a run another one, and what each changes."""

_REORDERING = {"run.seed", "data.held_out"}
"""Settings whose change explains another order of the data."""

_NAMED = (
    "model.dropout",
    "training.global_batch_size",
    "training.micro_batch_size",
    "training.precision",
    "training.rampup",
    "optimizer.learning_rate",
    "optimizer.min_learning_rate",
    "optimizer.warmup_steps",
    "optimizer.decay_steps",
    "optimizer.betas",
    "optimizer.epsilon",
    "optimizer.weight_decay",
    "optimizer.clip_grad",
)
"""Settings that are often changed between attempts. `training.steps` counts only as the end of the decay."""

DATA_KEY = "data"
ORDER_KEY = "data.order"
SEEN_BY_RANKS = frozenset((DATA_KEY, ORDER_KEY))
"""Changes that perhaps only the ranks see."""


@dataclass(frozen=True, slots=True)
class RunChange:
    """Something that differs from when the checkpoint was saved, or is not known of it. `text` is a whole sentence."""

    key: str
    saved: Any
    now: Any
    severity: ChangeSeverity
    text: str

    @property
    def document(self) -> dict[str, Any]:
        return {
            "key": self.key,
            "saved": self.saved,
            "now": self.now,
            "severity": self.severity,
            "text": self.text,
        }


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Contents of `accepted.json`: the keys whose change the user accepted for an attempt, or all of them."""

    keys: tuple[str, ...] = ()
    everything: bool = False

    def covers(self, change: RunChange) -> bool:
        return self.everything or change.key in self.keys


NOTHING_ACCEPTED = Acceptance()


def find_changes(
    saved: CheckpointRecord,
    run: CheckpointRecord,
    *,
    is_own: bool,
    likeness: DataLikeness | None,
    is_order_kept: bool | None = None,
) -> list[RunChange]:
    """Return what differs between the run that saved a checkpoint and `run`, which resumes from it.

    `is_own` says whether the checkpoint lies in the run's own folder; another one is loaded because the run file names
    it. `likeness` is how the run's data relates to the saved fingerprint, and `is_order_kept` whether the run draws the
    same sample at the place of the checkpoint; None if that was not checked.
    """
    changes = [
        *_other_run(saved, run, is_own),
        *_other_health(saved),
        *_other_settings(saved.config, run.config),
        *_other_data(saved, run, likeness),
    ]
    if likeness == "same" and is_order_kept is False and not {each.key for each in changes} & _REORDERING:
        text = "data order: at the checkpoint's position, this run draws a different sample than the run that saved it"
        changes.append(RunChange(ORDER_KEY, None, None, "stop", text))
    rank = {"stop": 0, "name": 1, "unknown": 2}
    return sorted(changes, key=lambda change: rank[change.severity])


def _other_run(saved: CheckpointRecord, run: CheckpointRecord, is_own: bool) -> Iterator[RunChange]:
    if saved.run_id is None or run.run_id is None:
        whose = "the checkpoint does not name its run" if saved.run_id is None else "this run has no run_id"
        yield RunChange("run_id", saved.run_id, run.run_id, "unknown", f"run_id: {whose}, so this may be another run")
    elif saved.run_id != run.run_id:
        is_asked = not is_own or saved.converted_from is not None
        where = "which the run file names" if is_asked else "though it is in this run's folder"
        text = f"run_id: the checkpoint belongs to another run ({_name_of(saved)}), {where}"
        yield RunChange("run_id", saved.run_id, run.run_id, "name" if is_asked else "stop", text)


def _name_of(record: CheckpointRecord) -> str:
    section = record.config.get("run")
    name = section.get("name") if isinstance(section, Mapping) else None
    return str(name) if name else "name unknown"


def _other_health(saved: CheckpointRecord) -> Iterator[RunChange]:
    if saved.passed is False:
        found = "; ".join(str(each) for each in (saved.health or {}).get("findings") or ()) or "no details recorded"
        yield RunChange("health", False, None, "stop", f"health: the checkpoint failed the guards' checks: {found}")
    elif saved.passed is None:
        text = "health: unknown whether it is sound: the guards did not check the step after which it was saved"
        yield RunChange("health", None, None, "unknown", text)


def _other_settings(saved: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[RunChange]:
    if not saved:
        text = "settings: not recorded in the checkpoint"
        yield RunChange("settings", None, None, "unknown", text)
        return
    for key in (*_STOPPING, *_NAMED):
        is_known, before = _setting(saved, key)
        after = _setting(now, key)[1]
        if not is_known:
            text = f"{key}: not recorded in the checkpoint; {_shown(after)} now"
            yield RunChange(key, None, after, "unknown", text)
        elif before != after:
            effect = f" ({_STOPPING[key]})" if key in _STOPPING else ""
            text = f"{key}: {_shown(before)} -> {_shown(after)}{effect}"
            yield RunChange(key, before, after, "stop" if effect else "name", text)


def _setting(config: Mapping[str, Any], key: str) -> tuple[bool, Any]:
    """Return whether a configuration holds `key`, and the value that it stands for."""
    section, _, name = key.partition(".")
    values = config.get(section)
    if not isinstance(values, Mapping) or name not in values:
        return False, None
    value = values[name]
    if key == "optimizer.decay_steps" and value is None:
        return _setting(config, "training.steps")
    return True, value


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return " ".join(f"{key} {item}" for key, item in value.items())
    return "none" if value is None else str(value)


def _other_data(saved: CheckpointRecord, run: CheckpointRecord, likeness: DataLikeness | None) -> Iterator[RunChange]:
    key = "data.prefix"
    (_, before), (_, after) = _setting(saved.config, key), _setting(run.config, key)
    is_moved = before is not None and before != after
    moved = f"{key}: {before} -> {after}" if is_moved else f"{key}: {after}"
    if likeness == "other":
        text = f"{moved}: not the data or the tokenizer that the checkpoint was trained with"
        yield RunChange(DATA_KEY, before, after, "stop", text)
    elif likeness == "grown":
        text = f"{moved}: the dataset has grown, so the samples still to come are drawn in another order"
        yield RunChange(DATA_KEY, before, after, "name", text)
    elif likeness == "same" and is_moved:
        yield RunChange(DATA_KEY, before, after, "name", f"{moved}: the same data in another place")
    elif saved.data is None or likeness == "unknown":
        text = f"{moved}: the checkpoint does not record what data it was trained with"
        yield RunChange(DATA_KEY, before, after, "stop" if is_moved else "unknown", text)
    elif likeness is None and is_moved:
        yield RunChange(DATA_KEY, before, after, "name", f"{moved}: the ranks compare the data when they start")


def require_accepted(name: str, changes: Sequence[RunChange], accepted: Acceptance) -> None:
    """Check that the run may resume from checkpoint `name` in spite of `changes`.

    Raises:
        CheckpointError: a change makes it another run, and the user has not accepted it.
    """
    refused = [change.text for change in changes if change.severity == "stop" and not accepted.covers(change)]
    if refused:
        raise CheckpointError(
            f"{name}: this run would not continue the one that saved it: {'; '.join(refused)}",
            hint="set it back or choose another checkpoint; `bsl submit --force` accepts it and records that",
        )


def change_lines(name: str, changes: Sequence[RunChange], accepted: Acceptance) -> list[str]:
    """Return the changes as lines of text; what is unknown about checkpoint `name` shares one."""
    lines = []
    for change in changes:
        if change.severity != "unknown":
            mark = ", accepted with --force" if change.severity == "stop" and accepted.covers(change) else ""
            lines.append(f"changed since {name}{mark}: {change.text}")
    unknown = [change.text for change in changes if change.severity == "unknown"]
    return [*lines, *([f"unknown about {name}: {'; '.join(unknown)}"] if unknown else [])]


def read_run_id(run: RunDir) -> str | None:
    """Return the id in `run.json`, or None if the run has none."""
    try:
        document = read_json(run.record)
    except RunDirError:
        return None
    found = document.get("run_id") if isinstance(document, dict) else None
    return str(found) if found else None


def write_accepted(attempt: AttemptDir, accepted: Acceptance) -> None:
    """Record for an attempt, and its requeues, what the user accepts."""
    write_json(attempt.accepted, {"schema_version": SCHEMA_VERSION, **asdict(accepted)})


def read_accepted(attempt: AttemptDir) -> Acceptance:
    """Return what the user accepted for an attempt; nothing if there is no record of it.

    Raises:
        RunDirError: there is one, and it cannot be read.
    """
    if not attempt.accepted.exists():
        return NOTHING_ACCEPTED
    document = read_json(attempt.accepted)
    try:
        return Acceptance(tuple(str(key) for key in document["keys"]), bool(document["everything"]))
    except (KeyError, TypeError) as error:
        raise RunDirError(f"{attempt.accepted}: not a record of what was accepted ({error!r})") from error
