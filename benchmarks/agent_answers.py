"""Asks `bsl mcp` about recorded hangs, and compares its answers with those of the command line.

    python benchmarks/agent_answers.py docs/measurements/agents.md --seconds 3600

One server, spoken to by the official client over stdio, is asked for the verdict on each recording of the hang lab
(tests/unit/spy/recordings/zoo). An answer agrees if its first two lines, the sentence and the state, are those that
`bsl spy --bundle` prints, and if every line of it is one of those. After --seconds, those that were not asked, which
are drawn by lot, are counted as such.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from mcp import Client
from mcp.client.stdio import StdioServerParameters

from bigsci_launch.agents.fit import MOST_TOKENS, count_tokens
from bigsci_launch.spy.answer import answer_from, store_evidence
from bigsci_launch.spy.evidence.bundle import Bundle

ROOT = Path(__file__).resolve().parents[1]
ZOO = ROOT / "tests" / "unit" / "spy" / "recordings" / "zoo"
BSL = Path(sys.executable).with_name("bsl")


@dataclass(frozen=True, slots=True)
class Asked:
    """What came of one recording."""

    name: str
    agrees: bool
    num_tokens: int
    num_left_out: int
    seconds: float
    command_s: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path)
    parser.add_argument("--seconds", type=float, default=3600.0)
    options = parser.parse_args()
    recordings = sorted(ZOO.glob("*.json"))
    random.Random(0).shuffle(recordings)
    rows = asyncio.run(ask_all(recordings, time.monotonic() + options.seconds))
    options.page.write_text(page_of(rows, len(recordings)))
    print(f"{sum(row.agrees for row in rows)} of {len(rows)} agree")


async def ask_all(recordings: list[Path], until: float) -> list[Asked]:
    server = StdioServerParameters(command=str(BSL), args=["mcp"], cwd=ROOT)
    with tempfile.TemporaryDirectory() as folder:
        async with Client(server) as client:
            return [await ask(client, stored(path, Path(folder))) for path in recordings if time.monotonic() < until]


def stored(recording: Path, folder: Path) -> Path:
    """Store a recording as `bsl spy` stores evidence."""
    document = json.loads(recording.read_text())
    bundle = Bundle(document["collection"], tuple(document["nodes"]))
    store_evidence(folder / recording.stem, bundle, answer_from(bundle))
    return folder / recording.stem


async def ask(client: Client, path: Path) -> Asked:
    began = time.monotonic()
    done = await client.call_tool("spy", {"bundle": str(path)})
    seconds = time.monotonic() - began
    text = done.content[0].text  # type: ignore[union-attr]
    began = time.monotonic()
    said = subprocess.run([BSL, "spy", "--bundle", path], capture_output=True, text=True, check=False).stdout
    command_s = time.monotonic() - began
    wanted = [line.rstrip() for line in said.splitlines() if line.strip()]
    _, meaning, *rest = text.split("\n")
    mark = re.search(r"DATA-[0-9a-f]{8}", meaning)
    assert mark is not None and text.split("\n")[0].endswith("exit code 0"), text
    data = rest[1 : rest.index(mark[0], 1)]
    whole = [re.sub(r" \.\.\. \(\d+ characters more\)$", "", line) for line in data]
    agrees = data[:2] == wanted[:2] and all(any(each.startswith(line) for each in wanted) for line in whole)
    return Asked(path.stem, agrees, count_tokens(text), len(wanted) - len(data), seconds, command_s)


def page_of(rows: list[Asked], num_recordings: int) -> str:
    tokens = sorted(row.num_tokens for row in rows)
    load = Path("/proc/loadavg").read_text().split()[0]
    facts = {
        "recordings that were asked about": f"{len(rows)} of {num_recordings}",
        "verdict and state are the command line's": f"{sum(row.agrees for row in rows)} of {len(rows)}",
        f"answers of at most {MOST_TOKENS} tokens": f"{sum(each <= MOST_TOKENS for each in tokens)} of {len(rows)}",
        "tokens of an answer, median and most": f"{statistics.median(tokens):.0f} and {tokens[-1]}",
        "answers with something left out": f"{sum(row.num_left_out > 0 for row in rows)} of {len(rows)}",
        "seconds of an answer, median": f"{statistics.median(row.seconds for row in rows):.2f}",
        "seconds of the same command, median": f"{statistics.median(row.command_s for row in rows):.2f}",
    }
    table = [f"| {name} | {value} |" for name, value in facts.items()]
    apart = [f"- {row.name}" for row in rows if not row.agrees]
    others = ["", "Answers that differ:", "", *apart] if apart else []
    head = (
        f"{time.strftime('%Y-%m-%d')}, by `benchmarks/agent_answers.py`, on 2 cores with a load of {float(load):.0f}. "
        "The official\nMCP client asked one `bsl mcp` for the verdict on each recording of the hang lab, over stdio. "
        "Tokens are counted by\n`agents/fit.py`, which counts rather too many: no vocabulary was used."
    )
    lines = ["# Answers to agents", "", head, "", "| what | result |", "|---|---|", *table, *others, ""]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
