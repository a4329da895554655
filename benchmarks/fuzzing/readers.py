"""Every reader of foreign input: what it is given, how its command calls it, and what must hold then."""

from __future__ import annotations

import functools
import io
import json
import os
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from click.testing import CliRunner

from bigsci_launch.cli.main import bsl
from bigsci_launch.config.load import load_run
from bigsci_launch.config.site import read_site
from bigsci_launch.endings.words import read_words, table_of
from bigsci_launch.entries import read_entries
from bigsci_launch.errors import BslError
from bigsci_launch.scheduler import slurm
from bigsci_launch.scheduler.command import Completed
from bigsci_launch.scheduler.hostlist import compress_hostlist, expand_hostlist
from bigsci_launch.scheduler.job import parse_elapsed, parse_time
from bigsci_launch.scheduler.job_ids import is_job_id
from bigsci_launch.scheduler.reservations import parse_reservation
from bigsci_launch.spy import answer
from bigsci_launch.spy.evidence.bundle import Bundle, damage_named
from bigsci_launch.spy.evidence.known_code import read_known_code
from bigsci_launch.spy.inputs.gather import open_evidence
from bigsci_launch.spy.known.library import read_library
from bigsci_launch.spy.show.document import to_document
from bigsci_launch.spy.show.page import render_page
from bigsci_launch.spy.show.report import to_lines, to_text
from bigsci_launch.step_lines import own_form, parse_steps
from bigsci_launch.topology import Topology, compress_ranks
from bigsci_launch.topology.ranks import expand_ranks
from bigsci_launch.why.answer import Why, why_document, why_lines
from bigsci_launch.why.find import why_logs
from fuzzing import seeds
from fuzzing.seeds import Files

LARGEST_NUMBER = 6
"""Digits of the largest number that is taken for a rank."""
MOST_SEARCHED = 1 << 25
MOST_LINES = 48
LONGEST_PATTERN = 1000
"""Of `monitor.step_line`."""


class Broken(AssertionError):
    """What must hold of any answer does not hold."""


@dataclass(frozen=True)
class Reader:
    """`read` gets a folder with the damaged files of one of `seeds`. It may raise one of the project's own errors."""

    name: str
    seeds: tuple[Files, ...]
    read: Callable[[Path], object]
    own_errors: tuple[type[Exception], ...] = field(default=(BslError,))


READ_ONCE = functools.cache(read_library)
"""The signatures: reading them takes longer than all else, and they are not what is damaged."""


def spy(folder: Path) -> None:
    bundle = open_evidence([folder])
    with damage_named(folder):
        judged(bundle)


def judged(bundle: Bundle) -> None:
    """What `bsl spy` makes of a bundle: the verdict, and every way to show it."""
    with patch.object(answer, "read_library", READ_ONCE):
        judgment = answer.answer_from(bundle)
    held = {int(rank["rank"]) for node in bundle.nodes for rank in node["ranks"]}
    held |= {int(each["rank"]) for each in bundle.collection.get("expected") or []}
    found, evidence = judgment.conclusion, judgment.evidence
    accused = {each.rank for one in (found, found.if_hang) if one for each in one.suspects}
    if not accused <= held:
        raise Broken(f"accuses ranks {sorted(accused - held)[:3]}, which no file holds")
    text = to_text(to_lines(evidence, found))
    if len(text.splitlines()) > MOST_LINES:
        raise Broken(f"{len(text.splitlines())} lines for an answer")
    printable(text)
    document = json.dumps(to_document(evidence, found))
    if len(document) < 1 << 16:
        render_page(evidence, found, None)


def printable(text: str) -> None:
    """Require text that a terminal can be given: nothing in it moves the cursor or ends a line where none is due."""
    with suppress(UnicodeEncodeError):
        text.encode()
        return
    raise Broken("the answer cannot be encoded")


def why(folder: Path) -> None:
    found = why_logs([folder])
    answered(found)
    known = {int(number) for number in numbers_in(folder)}
    spans = max(known, default=-1)
    if any(rank not in known and not rank <= spans for rank in (*found.culprit.ranks, *found.culprit.tasks)):
        raise Broken(f"names {found.first}, which no file holds")


def answered(found: Why) -> None:
    printable("\n".join(why_lines(found)))
    json.dumps(why_document(found), allow_nan=False)
    if not found.sentence or not found.first:
        raise Broken("the answer has an empty field")


def numbers_in(folder: Path) -> Iterable[str]:
    for path in folder.rglob("*"):
        yield from re.findall(r"\d{1,6}", path.name)
        if path.is_file() and not path.is_symlink() and path.stat().st_size < MOST_SEARCHED:
            text = path.read_bytes().decode("utf-8", "replace")
            yield from (each for each in re.findall(r"\d+", text) if len(each) <= LARGEST_NUMBER)


def steps(folder: Path) -> None:
    for path in folder.iterdir():
        text = path.read_bytes().decode("utf-8", "replace")
        found = [step for step, _ in parse_steps(text)]
        if any(step < 0 for step in found):
            raise Broken("a step below 0")
        with suppress(ValueError):
            list(parse_steps(text[:4000], (own_form(text.partition("\n")[0][:LONGEST_PATTERN]),)))


def knowledge(folder: Path) -> None:
    """Tables of words, forms of steps, known code and signatures on $BSL_PATH."""
    os.environ["BSL_PATH"] = str(folder)
    try:
        read_known_code()
        read_library()
        with suppress(BslError):
            table_of(read_entries("endings")).find("RuntimeError: CUDA out of memory. rank 3 on n1")
        list(parse_steps("iteration 3/ 10 | lm loss: 3.1 | step: 4 loss: 2\n"))
    finally:
        del os.environ["BSL_PATH"]
        read_words.cache_clear()


def run_file(folder: Path) -> None:
    """A run file, what it extends, and the description of its site."""
    os.environ["BSL_PATH"] = str(folder)
    try:
        for path in folder.glob("*.yaml"):
            load_run(path)
        for site in folder.glob("sites/*.yaml"):
            read_site(site)
    finally:
        del os.environ["BSL_PATH"]


def names(folder: Path) -> None:
    """Topologies, lists of ranks and of hosts, job IDs and times, as people type them and as Slurm prints them."""
    text = (folder / "name").read_bytes().decode("utf-8", "surrogateescape")
    is_job_id(text)
    parse_time(text)
    parse_elapsed(text)
    with suppress(ValueError):
        str(Topology.parse(text))
    with suppress(ValueError):
        compress_ranks(expand_ranks(text))
    with suppress(ValueError):
        compress_hostlist(expand_hostlist(text))


def slurm_text(folder: Path) -> None:
    """What squeue, sacct, scontrol and sinfo print."""
    said = {path.name: path.read_bytes().decode("utf-8", "replace") for path in folder.iterdir()}

    def run(argv: list[str], **_: Any) -> Completed:
        return Completed(tuple(argv), 0, said.get(argv[0], ""), "")

    before, slurm.run_slurm = slurm.run_slurm, run  # type: ignore[assignment]
    try:
        slurm.query_jobs(["12", "13_2", "14+0", "14"])
        for call in (lambda: slurm.query_job("12"), lambda: slurm.queued_scripts(0), lambda: slurm.query_outputs("12"),
                     lambda: slurm.query_nodes("n[0-3]"), lambda: slurm.partition_nodes(None),
                     lambda: slurm.query_canceller("12"), lambda: slurm.query_addresses(["n0"])):  # fmt: skip
            with suppress(BslError):
                call()
        for line in said.get("scontrol", "").splitlines():
            parse_reservation(line)
    finally:
        slurm.run_slurm = before


def run_folder(folder: Path) -> None:
    """The records of a run whose files are damaged, as `status`, `why`, `spy` and `list` read them."""
    for words in (["status", str(folder), "--json"], ["why", str(folder)], ["spy", str(folder)]):
        done = CliRunner().invoke(bsl, words)
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        printable(done.output)


EXIT = {
    "reason": "crashed", "exit_code": 1, "started": 1.0, "ended": 9.0, "job_id": "12", "evidence": ["a", "b"],
    "first_failure": {"rank": 2, "node": "n1", "error": "ValueError: 3", "signal": None, "step": 3, "time": 5.0,
                      "coordinate": {"pp": 0, "tp": 0, "dp": 2}, "last_words": "x", "code": 1, "host": "h"},
    "suspects": [], "collectives": [], "cause": None, "spy_bundle": None, "failed": [2],
}  # fmt: skip
ATTEMPT = "attempts/0001"
RUN: Files = {
    "run.json": {"schema_version": 1, "name": "demo", "created": 1.0},
    f"{ATTEMPT}/job.json": {"schema_version": 1, "scheduler": "slurm", "submitted": 1.0, "job_id": "12",
                            "launcher": None, "total_steps": 10, "cluster": "c", "requeue": True, "said": ["x"]},
    f"{ATTEMPT}/exit.json": EXIT,
    f"{ATTEMPT}/job.out": b"srun: error: n1: task 2: Exited with exit code 1\nbsl: rank 2 ended\n",
    f"{ATTEMPT}/logs/rank-0002.log": b"2026-11-21T01:02:03.000000Z iteration 3/ 10 | lm loss: 3.1\nValueError: 3\n",
    f"{ATTEMPT}/exits/rank-0002.json": {"rank": 2, "node": "n1", "code": 1, "signal": None, "time": 5.0},
    f"{ATTEMPT}/errors/rank-0002.json": {"rank": 2, "node": "n1", "type": "ValueError", "message": "3", "time": 4.0,
                                         "traceback": "Traceback", "step": 3},
    f"{ATTEMPT}/pids/rank-0002.json": {"rank": 2, "node": "n1", "host": "h", "pid": 9, "start_ticks": 3},
    f"{ATTEMPT}/events/rank-0002.jsonl": b'{"kind": "heartbeat", "time": 2.0, "step": 3, "phase": "step"}\n',
    f"{ATTEMPT}/rings/rank-0002.ring": b"BSLRING1" + bytes(3000),
    f"{ATTEMPT}/config.yaml": b"run: {name: demo}\n",
}  # fmt: skip


def logs() -> tuple[Files, ...]:
    found: list[Files] = [{"job.out": text} for text in seeds.examples("endings")]
    found += [{f"rank-{rank}.log": text for rank, text in enumerate(seeds.examples("endings")[:6])}]
    found += [{"attempt_0/2/error.json": seeds.ELASTIC, "attempt_0/2/stderr.log": b"RuntimeError: Connection closed\n"}]
    return tuple(found)


def tables() -> tuple[Files, ...]:
    folders = (("endings", "*.ini"), ("step_lines", "*.ini"), ("known", "*.yaml"))
    found: list[Files] = [
        {f"{folder}/ours{pattern[1:]}": text}
        for folder, pattern in folders
        for text in seeds.texts_in(f"diagnostics/{folder}", pattern)
    ]
    signatures = seeds.texts_in("diagnostics/signatures", "*/signature.yaml")
    return (*found, *({"signatures/ours/signature.yaml": text} for text in signatures))


def run_files() -> tuple[Files, ...]:
    groups = (("demo.yaml",), ("bloom-176b.yaml",), ("minicluster.yaml", "demo.yaml"))
    found = [{name: (seeds.ROOT / "configs" / name).read_bytes() for name in group} for group in groups]
    sites = seeds.texts_in("slurm/sites", "*.yaml")
    local = {**found[0], "sites/local.yaml": (seeds.ROOT / "slurm" / "sites" / "local.yaml").read_bytes()}
    return (*found, local, *({"sites/ours.yaml": site} for site in sites))


READERS = (
    Reader("stacks, in all layouts", seeds.STACKS, spy),
    Reader("dumps of torch's flight recorder", seeds.RECORDERS, spy),
    Reader("NCCL: RAS in JSON and text, Inspector", seeds.NCCL, spy),
    Reader("bundles of `bsl spy`", tuple(seeds.bundles()), spy),
    Reader("`bsl why`: logs and error files", logs(), why),
    Reader("lines of steps, forms for them", tuple({"a.log": each} for each in seeds.examples("step_lines")), steps),
    Reader("knowledge on $BSL_PATH", tables(), knowledge),
    Reader("run files", run_files(), run_file),
    Reader("topologies, ranks, hosts, job IDs, times", tuple({"name": name} for name in seeds.NAMES), names),
    Reader("squeue, sacct, scontrol, sinfo",
           ({"squeue": seeds.SQUEUE, "sacct": seeds.SQUEUE, "scontrol": seeds.SCONTROL, "sinfo": seeds.NODES},
            {"squeue": b"", "sacct": seeds.SQUEUE, "scontrol": seeds.RESERVATION, "sinfo": b"debug* n0\n"}),
           slurm_text),
    Reader("records of a run", (RUN,), run_folder),
)  # fmt: skip


def write(folder: Path, files: Files, damage: Callable[[str, Any], bytes]) -> None:
    """Write the files of a seed, each as `damage` returns it."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(damage(name, content))


def as_bytes(content: Any) -> bytes:
    """A content as it is in a sound file."""
    if isinstance(content, seeds.Pickled):
        return content.dumped(content.document)
    if isinstance(content, bytes):
        return content
    stream = io.StringIO()
    json.dump(content, stream)
    return stream.getvalue().encode("utf-8", "surrogatepass")
