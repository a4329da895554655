"""Writes docs/measurements/hang-confusion.md from the rows of hang_confusion.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from bigsci_launch.hang_lab.catalogue import class_order
from bigsci_launch.hang_lab.judgement import Judgement
from bigsci_launch.hang_lab.zoo import NOT_REPRODUCED, find_reproduction
from bigsci_launch.topology import Topology
from bigsci_launch.topology.naming import name_ranks

Row = dict[str, Any]
REMOVED = "rings removed"
PREPARATIONS = {
    "prepared": "with torch's recorder",
    "unprepared": "with nothing",
    REMOVED: "rings removed",
    "rings": "with rings",
}
"""What `bsl spy` has besides stacks and /proc, in the order of the columns."""
PEERS = {"torchfrtrace": "torchfrtrace", "detail": "DETAIL"}

HEAD = """# Verdicts on every hang that can be reproduced

`bsl hang-lab` reproduces hangs on purpose, so the truth is known. This page lists the verdict of `bsl spy` on each. It
was written by

```bash
python benchmarks/hang_confusion.py {arguments}
```

A *wrong accusation* names a rank that has done nothing wrong. A *false alarm* reports a hang that does not exist.
Neither must ever happen, because an engineer acts on it. *Unknown* and *no rank named* are honest answers, and they are
counted.

Each column is one way to prepare the ranks. *With torch's recorder*, they offer the collectives that torch recorded.
*With nothing*, `bsl spy` has only stacks and /proc. *With rings*, nothing was prepared either, but the ranks keep their
last calls, as those of every job of `bsl submit` do. *Rings removed* is the evidence of the same runs without the
rings: the difference is what they add.
"""
PEERS_FROM = """
The peers' answers are from an earlier series of the same reproductions (`--peers-from`), because their input does not
depend on `bsl spy`. The machine had other work during both series, so not every trial has answers from peers.
"""
LATER = """
Each look began as soon as the ranks stood still. A wait that has just begun may still end by itself, and then `bsl spy`
accuses no rank yet: it says `waiting`, and which rank to look at first. The same evidence was judged again as the
kernel would show it an hour later, when whoever did not run between the looks has slept on:
"""
COLUMNS = """
Numbers in brackets count runs (numbers of ranks x places of the culprit). The verdicts are those an hour later. A
verdict that is not right is in italics, one that does harm is in bold.
"""
PEER_COLUMNS = """
torchfrtrace gets a table of groups, because it crashes on gloo without one; its first finding counts. DETAIL is
`TORCH_DISTRIBUTED_DEBUG=DETAIL` in a separate run whose collectives time out after 5 s. If it shows two sides that
contradict each other, either may be the culprit. `+` means that the right ranks are named, `-` that an innocent rank is
named, and no mark that none is.
"""


HARMFUL = (Judgement.WRONG_ACCUSATION, Judgement.FALSE_ALARM)


def write_page(path: Path, rows: Sequence[Row], arguments: Sequence[str]) -> None:
    """Write the page for `rows`."""
    peers = [PEERS_FROM] if "--peers-from" in arguments else []
    later = [later_row(row) for row in rows]
    parts = [HEAD.format(arguments=" ".join(shown_arguments(arguments))), *peers, *totals(rows, later), *ran(rows),
             *table(later), *misses("## Every verdict that is not right", rows),
             *misses("## Every verdict that is not right an hour later", later), *absent()]  # fmt: skip
    lines = ("\n" * part.startswith("## ") + part.rstrip("\n") for part in parts)
    path.write_text("\n".join(lines) + "\n")


def later_row(row: Row) -> Row:
    """Return `row` with what its evidence would say an hour later; as it is if no evidence was kept."""
    return {**row, **row.get("later", {})}


def shown_arguments(arguments: Sequence[str]) -> list[str]:
    """Return the arguments without the folders of the person who ran it."""
    return [Path(argument).name if argument.startswith("/") else argument for argument in arguments]


def totals(rows: Sequence[Row], later: Sequence[Row]) -> list[str]:
    counts = Counter(row["judgement"] for row in (*rows, *later))
    runs = [row for row in rows if row["preparation"] != REMOVED]
    harm = (f"{counts[one.value]} {one.value}{'s' if counts[one.value] != 1 else ''}" for one in HARMFUL)
    of_all = f"in {len(runs)} runs of {len({row['name'] for row in rows})} reproductions."
    lines = [
        "## In numbers",
        "",
        f"**{', '.join(harm)}** {of_all}",
        "",
        *judgements(rows),
        LATER,
        "",
        *judgements(later),
    ]
    lines += ["", *figure_lines(later)]
    asked = {words: [row for row in rows if key in row] for key, words in PEERS.items()}
    if any(asked.values()):
        lines += ["", "| peer | runs | names no rank | right | names an innocent rank |", "|---|---:|---:|---:|---:|"]
    for key, words in PEERS.items():
        marks = Counter(peer_mark(row, key) for row in asked[words])
        if asked[words]:
            lines.append(f"| {words} | {len(asked[words])} | {marks['']} | {marks['+']} | {marks['-']} |")
    return lines


def by_preparation(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return the rows of each preparation that ran, in the order of the columns."""
    found = {each: [row for row in rows if row["preparation"] == each] for each in PREPARATIONS}
    return {each: of_one for each, of_one in found.items() if of_one}


def judgements(rows: Sequence[Row]) -> list[str]:
    columns = by_preparation(rows)
    counts = [Counter(row["judgement"] for row in of_one) for of_one in columns.values()]
    lines = head_of("`bsl spy` says", columns)
    for judgement in Judgement:
        lines.append(f"| {judgement.value} | {' | '.join(str(count[judgement.value]) for count in counts)} |")
    return [*lines, f"| runs | {' | '.join(str(len(of_one)) for of_one in columns.values())} |"]


def figure_lines(rows: Sequence[Row]) -> list[str]:
    columns = by_preparation(rows)
    found = [figures(of_one) for of_one in columns.values()]
    lines = head_of("right, each by itself", columns)
    for words in found[0]:
        lines.append(f"| {words} | {' | '.join(f'{sum(each[words])} of {len(each[words])}' for each in found)} |")
    return lines


def head_of(first: str, columns: Iterable[str]) -> list[str]:
    words = [PREPARATIONS[each] for each in columns]
    return [f"| {' | '.join([first, *words])} |", f"|---|{'---:|' * len(words)}"]


def ran(rows: Sequence[Row]) -> list[str]:
    """Return which ranks and places ran in each column."""
    lines = ["", "| | ranks | culprits | runs | reproductions |", "|---|---:|---|---:|---:|"]
    for preparation, of_one in by_preparation([row for row in rows if row["preparation"] != REMOVED]).items():
        for num_ranks in sorted({row["ranks"] for row in of_one}):
            here = [row for row in of_one if row["ranks"] == num_ranks]
            places = ", ".join(str(rank) for rank in sorted({row["culprit"] for row in here}))
            names = len({row["name"] for row in here})
            lines.append(f"| {PREPARATIONS[preparation]} | {num_ranks} | {places} | {len(here)} | {names} |")
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
    columns = by_preparation(rows)
    peers = {key: words for key, words in PEERS.items() if any(key in row for row in rows)}
    heads = ["class", "what", "right answer", *(PREPARATIONS[each] for each in columns), *peers.values()]
    lines = ["## Each class", COLUMNS, *([PEER_COLUMNS] if peers else []), "", f"| {' | '.join(heads)} |"]
    lines.append("|---" * len(heads) + "|")
    for name in sorted({row["name"] for row in rows}, key=class_order):
        reproduction = find_reproduction(name)
        answer = f"{reproduction.states[0].value} {reproduction.classes[0]}"
        cells = [name, reproduction.title, answer]
        cells += [said([row for row in of_one if row["name"] == name]) for of_one in columns.values()]
        cells += [peers_said([row for row in rows if row["name"] == name], key) for key in peers]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


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


def misses(head: str, rows: Iterable[Row]) -> list[str]:
    """Return every run whose verdict is not right, in full. One that comes too early is right as far as it goes."""
    lines = [head, ""]
    runs = [row for row in rows if row["preparation"] != REMOVED]
    wrong = [row for row in runs if not Judgement(row["judgement"]).is_right]
    for row in sorted(wrong, key=lambda row: (class_order(row["name"]), list(PREPARATIONS).index(row["preparation"]))):
        verdict = row["verdict"]
        named = f"names {name_ranks(verdict['suspects'])}" if verdict["suspects"] else "names no rank"
        said = f"{verdict['state']} {verdict['class'] or '-'}, {named}"
        where = f"{row['name']} {row['topology']} culprit {row['culprit']}, {PREPARATIONS[row['preparation']]}"
        lines.append(f"- {where}: {row['judgement']}: {said}; expected {row['expected']}")
    return [*lines, *(["None."] if not wrong else [])]


def absent() -> list[str]:
    lines = ["## Not reproduced", "", "| class | what | why not |", "|---|---|---|"]
    return [*lines, *(f"| {one.hang_class} | {one.hang_class.title} | {one.reason} |" for one in NOT_REPRODUCED)]
