"""What was said of a defect, and whether that is right. `look` reads the files of a run; `judge` is pure."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bigsci_launch.checkpoints.folder import CheckpointsDir
from bigsci_launch.runs.layout import AttemptDir, read_json
from bigsci_launch.topology import Topology
from silent.case import Case, Finding, Row, Seen, Truth
from silent.cases_restart import BASES, HALF
from silent.field import Made, crash_text, has_ended, records, world_size

REMARKS = ("skipped", "changed")
ORDINARY = re.compile(r"^(resumes from|config |run |attempt )")
SENTENCE = re.compile(r"(?:step \d+: )?(?P<check>[^:]+): (?P<tensor>.*?)(?: on (?P<where>ranks? [\d,\- and]+).*)?$")
LENGTH = 220


def look(case: Case, made: Made, reference: AttemptDir | None, ordinary: Sequence[str] = ()) -> Seen:
    """Return what an attempt left; `ordinary` are the lines that `bsl submit` prints of an attempt without a defect."""
    printed = [Finding(None, "submit", "", None, line) for line in told(case, made, ordinary)]
    if made.attempt is None:
        refusal = Finding(None, "submit", "", None, made.refusal)
        return Seen("refused", findings=(refusal,), message=f"bsl submit: {made.refusal}")
    attempt, start = made.attempt, HALF if case.base else 0
    size = world_size(attempt)
    topology = Topology.parse(BASES[case.base][0] if case.base else case.shape)
    found = [finding for record in records(attempt) for finding in findings_of(record, topology)]
    error = next((read_json(path) for rank in range(size) if (path := attempt.error_file(rank)).exists()), None)
    ended, stopped_at, message = "finished", None, ""
    if error is not None:
        stopped_at, message = int(error["step"]), f"{error['type']}: {error['message']}"
        ended = "refused" if stopped_at <= start else "stopped"
        if not any(each.step == stopped_at and each.check not in REMARKS for each in found):
            found.append(finding_of_error(error))
    elif not has_ended(attempt, size):
        message = crash_text(attempt)
        ended = "crashed" if message else "hung"
    return Seen(
        ended,
        stopped_at,
        (*printed, *found),
        tuple(sorted({record["step"] for record in records(attempt) if record["kind"] == "save"})),
        latest_step(attempt.path.parent.parent),
        largest_jump(attempt, reference),
        message,
    )


def told(case: Case, made: Made, ordinary: Sequence[str]) -> Iterator[str]:
    known = {without_name(line, "") for line in ordinary}
    for line in made.printed.splitlines():
        if line.strip() and not ORDINARY.match(line) and without_name(line, case.name) not in known:
            yield line.strip()


def without_name(line: str, name: str) -> str:
    return re.sub(r"\S*/\S*", "PATH", line.replace(name, "RUN") if name else line)


def findings_of(record: dict[str, Any], topology: Topology) -> Iterator[Finding]:
    """Yield what an event says of a defect."""
    kind = record["kind"]
    if kind == "guard":
        places = [tuple(each.items()) for each in record["coordinates"]]
        ranks = tuple(
            rank for rank in range(topology.world_size) if tuple(topology.coordinate(rank).as_dict().items()) in places
        )
        yield Finding(record["step"], record["check"], record["tensor"], ranks, record["text"])
    elif kind in REMARKS:
        fields = {key: value for key, value in record.items() if key not in ("kind", "time", "mono", "step")}
        ranks = (fields["rank"],) if isinstance(fields.get("rank"), int) else None
        yield Finding(record["step"], kind, str(fields.get("tensor", "")), ranks, json.dumps(fields))


def finding_of_error(error: dict[str, Any]) -> Finding:
    """Return the finding in the words of an error."""
    match = SENTENCE.match(error["message"])
    if match is None:
        return Finding(error["step"], error["type"], "", None, error["message"])
    ranks = tuple(named_ranks(match["where"])) if match["where"] else None
    return Finding(error["step"], f"{match['check']} ({error['type']})", match["tensor"], ranks, error["message"])


def named_ranks(words: str) -> Iterator[int]:
    """Yield the ranks of `ranks 0-1, 3`."""
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", words):
        yield from range(int(first), int(last or first) + 1)


def latest_step(run: Path) -> int | None:
    checkpoints = CheckpointsDir(run / "checkpoints")
    if not checkpoints.latest.exists():
        return None
    record = checkpoints.folder(checkpoints.latest.read_text().strip()) / "checkpoint.json"
    # The name, not the record: an injected defect may have changed the record.
    return int(re.sub(r"\D", "", record.parent.name))


def largest_jump(attempt: AttemptDir, reference: AttemptDir | None) -> float | None:
    if reference is None:
        return None
    mine, other = losses(attempt), losses(reference)
    apart = [mine[step] - other[step] for step in mine.keys() & other.keys()]
    if any(math.isnan(each) for each in apart):
        return math.nan
    return max(apart, key=abs, default=None)


def losses(attempt: AttemptDir) -> dict[int, float]:
    return {record["step"]: record["loss"] for record in records(attempt) if record["kind"] == "step"}


# --- judge


def judge(case: Case, seen: Seen) -> Row:
    """Return the row of a case."""
    about = relevant(case, seen)
    verdict = verdict_of(case, seen, about)
    cause = cause_of(case.truth, about)
    is_newer = seen.latest is not None and seen.latest >= max(1, case.at)
    tainted = case.truth.wanted == "stop" and case.truth.is_saved and is_newer
    said = seen.message or "; ".join(each.text for each in about[:2])
    right = is_right(case, verdict, cause, tainted)
    return Row(case.name, verdict, cause, tainted, right, short(said), seen.jump)


def relevant(case: Case, seen: Seen) -> list[Finding]:
    """Return the findings that may be about the defect: those of the step that was stopped, else all of them; of the
    lines of `bsl submit` those that speak of it."""
    if seen.ended == "stopped":
        same = [each for each in seen.findings if each.step == seen.stopped_at]
        return [each for each in same if each.check not in REMARKS] or same or list(seen.findings)
    spoken = re.compile(case.truth.words)
    return [
        each for each in seen.findings if each.step is not None or each.check != "submit" or spoken.search(each.text)
    ]


def verdict_of(case: Case, seen: Seen, about: Sequence[Finding]) -> str:
    if seen.ended in ("crashed", "hung"):
        return seen.ended
    if seen.ended == "refused":
        return "refused" if seen.stopped_at is None else "refused at load"
    if seen.ended == "finished":
        return "named" if about else "silent"
    assert seen.stopped_at is not None
    late = seen.stopped_at - case.at
    if late < 0:
        return f"{-late} steps too early"
    if case.truth.is_saved and any(case.at <= step < seen.stopped_at for step in seen.saved):
        return f"after a save, {late} late"
    return "in its step" if late == 0 else f"{late} late, before a save"


def cause_of(truth: Truth, about: Sequence[Finding]) -> str:
    """Return whether what comes first names the defect: `right`, `wrong`, or `-` if nothing was said."""
    if not about:
        return "-"
    if truth.wanted == "anything":
        return "-"
    candidates = about[:1] if truth.wanted == "stop" else about
    return "right" if any(is_named(truth, each) for each in candidates) else "wrong"


def is_named(truth: Truth, finding: Finding) -> bool:
    is_blamed = truth.ranks is None or finding.ranks is None or set(finding.ranks) <= set(truth.ranks)
    is_refusal = finding.check == "submit"
    words = f"{finding.check}: {finding.tensor}: {finding.text}"
    return bool(
        is_blamed
        and (is_refusal or re.search(truth.check, finding.check, re.IGNORECASE))
        and (is_refusal or re.search(truth.tensor, finding.tensor or "-"))
        and re.search(truth.words, words, re.IGNORECASE)
    )


def is_right(case: Case, verdict: str, cause: str, tainted: bool) -> bool:
    wanted = case.truth.wanted
    if wanted == "anything":
        return verdict not in ("crashed", "hung")
    if wanted == "nothing":
        return verdict == "silent"
    if wanted == "name":
        return verdict == "named" and cause == "right"
    late = re.match(r"(\d+) late, before a save", verdict)
    is_every_step = case.sections.get("guards", {}).get("interval", 1) == 1
    in_time = not late or not is_every_step or int(late[1]) <= case.truth.late
    is_found = verdict in ("refused", "refused at load", "in its step") or late is not None
    return is_found and in_time and cause == "right" and not tainted


def short(words: str) -> str:
    words = re.sub(r"/\S*/", ".../", " ".join(words.split())).replace("|", "/")
    return words if len(words) <= LENGTH else words[: LENGTH - 3] + "..."
