"""Writes docs/explanation/hang-confusion.md from the rows of hang_confusion.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from bigsci_launch.hang_lab.catalogue import class_order, find_reproduction
from bigsci_launch.hang_lab.judgement import Judgement
from bigsci_launch.hang_lab.zoo import NOT_REPRODUCED
from bigsci_launch.topology import Topology
from bigsci_launch.topology.words import name_ranks

Row = dict[str, Any]
PREPARATIONS = {"prepared": "torch's recorder", "rings": "rings", "unprepared": "nothing"}
"""What ranks offer to `bsl spy` besides their stacks and /proc."""

HEAD = """# Verdicts on every hang that can be reproduced

`bsl hang-lab` reproduces hangs on purpose, so the truth is known. This page lists the verdict of `bsl spy` on each, and
what PyTorch's own tools say about the same processes. It was written by

```bash
python benchmarks/hang_confusion.py {arguments}
```

A *wrong accusation* names a rank that has done nothing wrong. A *false alarm* reports a hang that does not exist.
Neither must ever happen, because somebody acts on it. *Unknown* and *nobody named* are honest answers, and they are
counted.
"""
PEERS_FROM = """
The peers' answers are from an earlier series of the same reproductions (`--peers-from`), because their input does not
depend on `bsl spy`. The machine had other work during both series, so not every trial has answers from peers.
"""
COLUMNS = """
Numbers in brackets count runs (numbers of ranks x places of the culprit). A verdict that is not right is in italics.
`(stacks)` marks runs without recorded collectives: `bsl spy` has only stacks and /proc. torchfrtrace gets a table of
groups, because it crashes on gloo without one; its first finding counts. DETAIL is `TORCH_DISTRIBUTED_DEBUG=DETAIL` in
a separate run whose collectives time out after 5 s. If it shows two sides that contradict each other, either may be the
culprit. `+` means that the right ranks are named, `-` that an innocent rank is named, and no mark that none is.
"""


HARMFUL = (Judgement.WRONG_ACCUSATION, Judgement.FALSE_ALARM)


def write_page(path: Path, rows: Sequence[Row], arguments: Sequence[str]) -> None:
    """Write the page for `rows`."""
    peers = [PEERS_FROM] if "--peers-from" in arguments else []
    parts = [HEAD.format(arguments=" ".join(shown_arguments(arguments))), *peers, *totals(rows), COLUMNS, *table(rows),
             *misses(rows), *absent()]  # fmt: skip
    lines = ("\n" * part.startswith("## ") + part.rstrip("\n") for part in parts)
    path.write_text("\n".join(lines) + "\n")


def shown_arguments(arguments: Sequence[str]) -> list[str]:
    """Return the arguments without the folders of the person who ran it."""
    return [Path(argument).name if argument.startswith("/") else argument for argument in arguments]


def totals(rows: Sequence[Row]) -> list[str]:
    counts = Counter(row["judgement"] for row in rows)
    harm = (f"{counts[one.value]} {one.value}{'s' if counts[one.value] != 1 else ''}" for one in HARMFUL)
    of_all = f"in {len(rows)} runs of {len({row['name'] for row in rows})} reproductions."
    lines = ["## In numbers", "", f"**{', '.join(harm)}** {of_all}", ""]
    lines += ["| of `bsl spy` | right | of |", "|---|---:|---:|"]
    lines += [f"| {words} | {sum(answers)} | {len(answers)} |" for words, answers in figures(rows).items()]
    lines += ["", "| its verdict as a whole | runs |", "|---|---:|"]
    lines += [f"| {judgement.value} | {counts[judgement.value]} |" for judgement in Judgement]
    peers = {"torchfrtrace": "torchfrtrace", "detail": "DETAIL"}
    asked = {words: [row for row in rows if key in row] for key, words in peers.items()}
    if any(asked.values()):
        lines += ["", "| peer | runs | names nobody | right | names an innocent rank |", "|---|---:|---:|---:|---:|"]
    for key, words in peers.items():
        marks = Counter(peer_mark(row, key) for row in asked[words])
        if asked[words]:
            lines.append(f"| {words} | {len(asked[words])} | {marks['']} | {marks['+']} | {marks['-']} |")
    return lines


def figures(rows: Sequence[Row]) -> dict[str, list[bool]]:
    """Return what each verdict got right, by itself: state, accused ranks, exact class, and whom to look at first.

    Ranks count where somebody must be accused, classes where one must be named, the first look where ranks are guilty.
    """
    found: dict[str, list[bool]] = {}
    for name in ("the state", "the accused ranks", "the exact class", "first to look at"):
        found[name] = []
    for row in rows:
        reproduction, verdict = find_reproduction(row["name"]), row["verdict"]
        guilty = reproduction.suspects(row["culprit"], Topology.parse(row["topology"]))
        found["the state"].append(verdict["state"] in {state.value for state in reproduction.states})
        if reproduction.must_accuse:
            found["the accused ranks"].append(set(verdict["suspects"]) == guilty)
        if None not in reproduction.classes:
            found["the exact class"].append(verdict["class"] == str(reproduction.classes[0]))
        if guilty and reproduction.is_hang:
            found["first to look at"].append(set(verdict["look_first"][:1]) <= guilty and bool(verdict["look_first"]))
    return found


def table(rows: Sequence[Row]) -> list[str]:
    lines = ["## Each class", "", "| class | what | right answer | `bsl spy` | torchfrtrace | DETAIL |",
             "|---|---|---|---|---|---|"]  # fmt: skip
    names = sorted({row["name"] for row in rows}, key=class_order)
    for name in names:
        for is_prepared in (True, False):
            of_class = [row for row in rows if row["name"] == name and row["is_prepared"] is is_prepared]
            if of_class:
                lines.append(table_row(name, is_prepared, of_class))
    return lines


def table_row(name: str, is_prepared: bool, rows: Sequence[Row]) -> str:
    reproduction = find_reproduction(name)
    answer = f"{reproduction.states[0].value} {reproduction.classes[0]}"
    cells = (name if is_prepared else f"{name} (stacks)", reproduction.title, answer, said(rows),
             peers_said(rows, "torchfrtrace"), peers_said(rows, "detail"))  # fmt: skip
    return f"| {' | '.join(cells)} |"


def said(rows: Sequence[Row]) -> str:
    """Return the verdicts, most frequent first, in italics if they are not right, in bold if they are harmful."""
    counts = Counter(
        (f"{row['verdict']['state']} {row['verdict']['class'] or '-'}", Judgement(row["judgement"])) for row in rows
    )
    marked = ((f"{words} ({count})", judgement) for (words, judgement), count in counts.most_common())
    return ", ".join(f"{mark(judgement)}{words}{mark(judgement)}" for words, judgement in marked)


def mark(judgement: Judgement) -> str:
    return "" if judgement.is_right else "**" if judgement.is_harmful else "*"


def peers_said(rows: Sequence[Row], peer: str) -> str:
    counts = Counter(f"{row[peer]['says']}{peer_mark(row, peer)}" for row in rows if peer in row)
    return ", ".join(f"{words} ({count})" for words, count in counts.most_common())


def peer_mark(row: Row, peer: str) -> str:
    """Return `+` if the ranks that `peer` names are right, `-` if one is innocent, and nothing if it names none."""
    named = set(row[peer]["named"])
    if not named:
        return ""
    allowed = find_reproduction(row["name"]).suspects(row["culprit"], Topology.parse(row["topology"]))
    is_right = bool(named & allowed) if row[peer]["is_two_sided"] else named <= allowed
    return "+" if is_right else "-"


def misses(rows: Iterable[Row]) -> list[str]:
    """Return every run whose verdict is not right, in full."""
    lines = ["## Every verdict that is not right", ""]
    wrong = [row for row in rows if row["judgement"] != "right"]
    for row in sorted(wrong, key=lambda row: class_order(row["name"])):
        verdict = row["verdict"]
        named = f"names {name_ranks(verdict['suspects'])}" if verdict["suspects"] else "names nobody"
        told = "" if row["is_prepared"] else ", stacks only"
        said = f"{verdict['state']} {verdict['class'] or '-'}, {named}"
        where = f"{row['name']} {row['topology']} culprit {row['culprit']}{told}"
        lines.append(f"- {where}: {row['judgement']}: {said}; expected {row['expected']}")
    return [*lines, *(["None."] if not wrong else [])]


def absent() -> list[str]:
    lines = ["## Not reproduced", "", "| class | what | why not |", "|---|---|---|"]
    return [*lines, *(f"| {one.hang_class} | {one.hang_class.title} | {one.reason} |" for one in NOT_REPRODUCED)]
