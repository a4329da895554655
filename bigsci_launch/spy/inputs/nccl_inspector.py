"""Reads the lines of NCCL's Inspector: how many collectives a process has finished in each communicator.

One file per process, one JSON document per line, for each collective that has ended: {header: {id, rank, n_ranks, ..},
metadata: {hostname, pid, ..}, coll_perf: {coll: "AllReduce", coll_sn: 128, ..}}. `coll_sn` counts the collectives of
one kind in a communicator, `rank` is the place in it. The rank in the job is not in the file.

A change that NCCL has not taken up so far (NVIDIA/nccl#2359) writes `header` and `metadata` once, with `dump_stats`.
The lines after it are of the same communicator.
"""

from __future__ import annotations

from pathlib import Path

from bigsci_launch.safe_files import parse_json
from bigsci_launch.spy.evidence.numbering import NumberedBy
from bigsci_launch.spy.inputs.nccl_ras import as_operation
from bigsci_launch.spy.inputs.reading import Damaged, Found, NotThis, Reading

MARK, PLACE = b'"coll_perf"', b'"dump_stats"'
NO_STACKS = "NCCL's Inspector reports no stacks"


def read_inspector_lines(_path: Path, data: bytes) -> Found:
    """Read the newest number of each operation in each communicator.

    Raises:
        NotThis: it is something else. Damaged: no line of it can be read.
    """
    if data.lstrip()[:1] != b"{" or MARK not in data:
        raise NotThis
    counts: dict[str, dict[str, int]] = {}
    group, node, pid = "", "", None
    for line in data.splitlines():
        if MARK not in line and PLACE not in line:
            continue
        try:
            document = parse_json(line.decode("utf-8", "replace"))
            group = str(document["header"]["id"]) if "header" in document else group
            node = str(document.get("metadata", {}).get("hostname") or node)
            pid = int(document.get("metadata", {}).get("pid") or pid or 0)
            call = document.get("coll_perf")
            found = (as_operation(str(call["coll"])), int(call["coll_sn"])) if call is not None else None
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            group = ""  # the last line of a process that was killed may be torn
            continue
        if group and found is not None:
            operation, number = found
            of_group = counts.setdefault(group, {})
            of_group[operation] = max(of_group.get(operation, 0), number)
    if not counts:
        raise Damaged("it has lines of NCCL's Inspector, but none that can be read")
    recorder = {
        "first_record": 0, "tokens": [], "stream": [], "last_sequence": {}, "open": [], "members": {},
        "counts": {"verb": "finished", "of_rank": counts},
    }  # fmt: skip
    numbered_by = NumberedBy.FILE_ORDER
    return Found((Reading("NCCL Inspector", node, pid=pid, recorder=recorder, why=NO_STACKS, numbered_by=numbered_by),))
