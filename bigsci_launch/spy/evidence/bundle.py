"""Evidence on disk: plain JSON that the same engine can read again, on any machine, at any time.

BUNDLE/
  collection.json      what was asked, who was expected, which nodes did not answer, how ranks ended
  nodes/NODE.json      what the node agent reported, unchanged
  verdict.json         the answer of the version that collected it
  report.txt           the same as text

`may_lack_ranks`: files of other tools were read, which may not exist for every rank.
A node's document: {node, host, time, found_by, py_spy, problems, locks, others, ranks, ..}. Its `others` are processes
of the job that are no ranks: [{pid, comm, role, why}]; role: `launcher`, `helper`, `ended`, `unknown`. Its `locks` are
file locks for which a rank or a child of one waits, or which it holds against others: [{kind, mode, file, holder,
holder_comm, holder_state, path, waiters}], pids, 0 where the kernel does not know. A rank is {rank, pid, source, step,
world_size, age_s, samples}; `source` is what numbers it (numbering.py), `age_s` how many seconds ago it began. A
sample holds

  mono                                     seconds on the node's clock; null where only the order of the looks is known
  state, wchan, cpu_ticks, voluntary, ..   from the files that can always be read
  thread_times, run_delay_ns               nanoseconds on a CPU per thread; nanoseconds that threads waited for one
  major_faults                             pages that had to be fetched from a disk, so far
  blocked_threads                          threads except the main one in state D, T or t: [{tid, comm, state, wchan}]
  thread_waits                             {kernel function: threads except the main one that wait in it}
  children                                 processes below: [{pid, ppid, comm, state, wchan, cpu_ticks, stack}]; `stack`
                                           for the two that show most, if they run Python
  child_ticks                              {pid: CPU ticks so far} of these children, in later samples
  system_call                              {number, call}; for calls on a file {name, fd, target} too, and `socket`, an
                                           entry as in `sockets`, or `other_ends` of a pipe: [{pid, comm, state}]
  io                                       {rchar, wchar, read_bytes, write_bytes} so far
  file_bytes                               sum of the positions in files open for writing
  socket_bytes                             {sent, received}: bytes that the process has given to and taken from its
                                           established TCP connections; not for processes in another network namespace
  thread_idle_s                            {thread: seconds since it last ran}, in the last sample
  memory_events                            {cgroup, oom_kill, high, max}: counts of the step's control group
  sockets                                  {count, list: [{fd, local, remote, state, tx, rx, timer, retransmits}]}, TCP;
                                           busy ones first, zeros left out; timer: retransmit, zero window probe, ..
  connections                              {listening: {address: how many came in}, opened: {host: [port]}, devices}:
                                           all established TCP connections, by the end that listens; other open
                                           files in /dev
  stack, same_stack, why                   threads, or that they are those of the sample before, or why there are none
  recorder, recorder_why                   the collectives that torch recorded, or why there are none;
                                           `recorder_file`, if it came from a dump that torch had written
  native, native_why                       with --native: [{tid, name, frames}], frames as words, innermost first; or
                                           why there are none
  unread                                   {evidence: why it could not be read}

`collection.json` also holds what the run wrote about its ranks: `expected`, `exits`, `errors`, the first `tracebacks`
in the ends of logs {rank, time, type, message, place, source}, and `heartbeats` {rank, phase, step, time, first_step}.
`printed` is what ranks have printed during the look: {rank, lines, last, step}, the last line, and the last step in the
format of trainers.
`rings` are the copies of rings that ranks left when they ended: {rank, ring}, as in a sample. `is_over`: the job had
ended, so that no node was asked. `asked` is what the user named. `scheduler` runs commands in the job `job_id`.
`het_groups` is {node: component} if it is a heterogeneous one, and `py_spy` the one in PATH.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bigsci_launch.errors import CollectError, EvidenceError
from bigsci_launch.safe_files import read_json, write_file
from bigsci_launch.spy.evidence.ranks import Evidence, read_evidence
from bigsci_launch.topology import Topology

SCHEMA_VERSION = 1
LONGEST_REASON = 300
"""Characters of an error about a file: some quote all of it."""
FOLDER_MODE, FILE_MODE = 0o750, 0o640
"""Stacks, paths and names of hosts are for the owner and the group of the run; a stricter umask counts."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """The documents of one look at a job."""

    collection: Mapping[str, Any]
    nodes: tuple[Mapping[str, Any], ...]

    def evidence(self, topology: str | None = None) -> Evidence:
        """Return the evidence for the engine; `topology` replaces that of the bundle."""
        collection = {**self.collection, "topology": topology} if topology else dict(self.collection)
        if topology and (collection.get("nodes_silent") or collection.get("may_lack_ranks")):
            # Silent nodes and missing files do not show how many ranks they hold; the topology does.
            collection["world_size"] = Topology.parse(topology).world_size
        return read_evidence(collection, self.nodes)


@contextmanager
def damage_named(bundle: Path | None) -> Iterator[None]:
    """Make one sentence of what documents cause that are not as they are written, if they are from a `bundle`.

    Raises:
        EvidenceError: names the bundle.
    """
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        if bundle is None:
            raise
        raise EvidenceError(
            f"{bundle}: the evidence is damaged ({type(error).__name__}: {str(error)[:LONGEST_REASON]})",
            hint="look at the job again with `bsl spy RUN`; BSL_DEBUG=1 shows where this happened",
        ) from error


def write_bundle(folder: Path, bundle: Bundle, verdict: Mapping[str, Any], report: str) -> None:
    """Write everything under `folder`, about 5 KB per rank.

    Raises:
        CollectError: it cannot be written.
    """
    try:
        _clear(folder)
        folder.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        for made in (folder, folder / "nodes"):
            made.mkdir(mode=FOLDER_MODE, exist_ok=True)
        texts = {f"nodes/{node['node']}.json": _dump(node) for node in bundle.nodes}
        texts |= {"verdict.json": json.dumps(verdict, indent=2) + "\n", "report.txt": report + "\n"}
        # Last, and atomically: a folder with a collection is a whole bundle.
        texts["collection.json"] = _dump({"schema_version": SCHEMA_VERSION, **bundle.collection})
        mode = FILE_MODE & (folder / "nodes").stat().st_mode
        for name, text in texts.items():
            write_file(folder / name, text, mode)
    except OSError as error:
        raise CollectError(
            f"{folder}: the evidence cannot be stored: {error.strerror}", hint="choose another folder with --output DIR"
        ) from error


def _clear(folder: Path) -> None:
    """Remove an earlier bundle from `folder`: it must not answer for a node that is silent this time."""
    if (folder / "collection.json").is_file():
        (folder / "collection.json").unlink()
        for node in (folder / "nodes").glob("*.json"):
            node.unlink()


def _dump(document: Mapping[str, Any]) -> str:
    return json.dumps(document, separators=(",", ":")) + "\n"


def read_bundle(folder: Path) -> Bundle:
    """Return the bundle in `folder`.

    Raises:
        EvidenceError: `folder` is not a bundle, or one of its files is damaged.
    """
    path = folder / "collection.json"
    if not path.is_file():
        raise EvidenceError(
            f"{folder}: not a bundle of `bsl spy` (it has no collection.json)",
            hint="each `bsl spy` stores a bundle and prints its path on stderr",
        )
    collection = _read(path)
    if collection.get("schema_version") != SCHEMA_VERSION:
        raise EvidenceError(f"{path}: schema_version {collection.get('schema_version')} is not {SCHEMA_VERSION}")
    return Bundle(collection, tuple(_read(node) for node in sorted((folder / "nodes").glob("*.json"))))


def _read(path: Path) -> dict[str, Any]:
    try:
        document = read_json(path)
    except (OSError, ValueError) as error:
        raise EvidenceError(f"{path}: cannot be read ({str(error)[:LONGEST_REASON]})") from error
    if not isinstance(document, dict):
        raise EvidenceError(f"{path}: not a JSON object")
    return document
