"""Replays incidents and healthy runs for `bsl watch`, as files that grow, with a simulated clock.

    python benchmarks/watch_replays.py [--page docs/measurements/watch-replays.md] [--held-out]

The logs and records are real files in the formats that trainers write. The readers and the judge of `bsl watch` read
them every 30 simulated seconds. Two things are counted for each incident, from its onset: when the watcher doubts the
silence, which is when it looks at the ranks with `bsl spy`, and when it is a finding by the clock or by the values.

Lines of BLOOM's steps are as published where an incident is about their values. Elsewhere they are drawn from measured
noise (`watching/noise.py`). `--held-out` also runs what nothing was tuned to, and is meant to be run once per version.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from watching.held_out import PUBLISHED, SEEDS, Published
from watching.incidents import INCIDENTS, Incident
from watching.normal import NORMAL, Normal, hours
from watching.simulation import Seen, replay

KINDS = {
    "bloom": "steps of 105 s, an evaluation of 12 min every 100, a save every 20",
    "small": "steps of 2 s, an evaluation of 60 s every 1000, a save every 500",
    "heartbeats": "8 ranks with heartbeats, steps of 10 s, an evaluation every 200, a save every 100",
}
NOISES = (1.0, 3.0)
TUNED_ON = range(8)
HOURS = 10
MARKS = {"replays": "<!-- {}replays -->", "held-out": "<!-- {}held-out -->"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", type=Path, help="write the tables into this page, between its marks")
    parser.add_argument("--held-out", action="store_true", help="also run what nothing was tuned to")
    options = parser.parse_args()
    begun = time.monotonic()
    tables = {"replays": "\n\n".join((incident_table(), normal_table(), hours_table(TUNED_ON)))}
    if options.held_out:
        tables["held-out"] = "\n\n".join((published_table(), hours_table(SEEDS)))
    for name, text in tables.items():
        print(f"{text}\n")
        if options.page:
            put(options.page, name, text)
    print(f"{time.monotonic() - begun:.0f} s")


def put(page: Path, name: str, text: str) -> None:
    """Replace what is between the marks of a page."""
    begin, end = MARKS[name].format(""), MARKS[name].format("/")
    before, _, rest = page.read_text(encoding="utf-8").partition(begin)
    page.write_text(f"{before}{begin}\n\n{text}\n\n{end}{rest.partition(end)[2]}", encoding="utf-8")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(line_of(row) for row in lines)


def line_of(row: Sequence[str]) -> str:
    """Return a row of a table of the page."""
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"


def incident_table() -> str:
    head = ("#", "what happens", "seen by", "doubted after", "finding after", "what is said")
    return table(head, [incident_row(incident, replay(incident.make())) for incident in INCIDENTS])


def incident_row(incident: Incident, seen: Seen) -> Sequence[str]:
    doubted, (found, sentence) = seen.delay(seen.looks), finding(incident.wanted, seen)
    number = "-" if incident.number == "own" else incident.number
    early = " (**and something before it**)" if seen.is_early else ""
    return (number, incident.what, incident.source, seconds(doubted), f"{seconds(found)}{early}", sentence)


def finding(wanted: str, seen: Seen) -> tuple[float | None, str]:
    """Return after how many seconds what is wanted was said, and the sentence."""
    onset = seen.tale.onset or 0.0
    if wanted == "stall":
        found = [(when, silence.sentence) for when, silence in seen.stalls]
    elif wanted == "blind":
        found = [(when, trouble.rpartition("/")[2]) for when, trouble in seen.troubles]
        if seen.stalls:
            return None, "**a stall was said of what it could not see**"
    else:
        found = [(when, noticed.sentence) for when, noticed in seen.noticed if noticed.kind == wanted]
    first = next((each for each in found if each[0] >= onset), None)
    return (first[0] - onset, first[1]) if first else (None, "")


def seconds(found: float | None) -> str:
    return "-" if found is None else f"{found:.0f} s"


def normal_table() -> str:
    head = ("healthy run", "simulated", "false findings", "doubts")
    return table(head, [normal_row(normal, replay(normal.make())) for normal in NORMAL])


def normal_row(normal: Normal, seen: Seen) -> Sequence[str]:
    length = (seen.tale.until - seen.tale.comes) / 3600
    return (normal.what, f"{length:.1f} h", str(seen.num_alarms), str(len(seen.looks)))


def hours_table(seeds: range) -> str:
    head = (f"{HOURS} h of healthy steps", "noise", "seeds", "steps in all", "false findings", "doubts")
    return table(head, [hours_row(kind, noise, seeds) for kind in KINDS for noise in NOISES])


def hours_row(kind: str, noise: float, seeds: range) -> Sequence[str]:
    runs = [replay(hours(seed, kind, noise)) for seed in seeds]
    told = '"kind": "step"' if kind == "heartbeats" else "elapsed time per iteration"
    num_steps = sum(told in event.text for seen in runs for event in seen.tale.events)
    alarms, looks = (sum(values) for values in zip(*((seen.num_alarms, len(seen.looks)) for seen in runs), strict=True))
    numbers = f"{seeds.start} to {seeds.stop - 1}"
    return (KINDS[kind], f"x {noise:g}", numbers, str(num_steps), str(alarms), str(looks))


def published_table() -> str:
    head = ("published log", "its lines", "steps read", "noticed", "of its silence after the last line")
    return table(head, [published_row(published, replay(published.make())) for published in PUBLISHED])


def published_row(published: Published, seen: Seen) -> Sequence[str]:
    kinds = sorted({noticed.kind for _, noticed in seen.noticed})
    silence = f"doubted after {seconds(seen.delay(seen.looks))}, a stall after {seconds(seen.delay(seen.stalls))}"
    early = "; **a stall was said before**" if any(when < (seen.tale.onset or 0) for when, _ in seen.stalls) else ""
    read = f"{seen.num_steps} of {published.num_steps}"
    return (published.source, published.what, read, ", ".join(kinds) or "nothing", silence + early)


if __name__ == "__main__":
    main()
