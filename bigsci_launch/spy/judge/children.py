"""Which of the processes below a rank holds it up."""

from __future__ import annotations

from bigsci_launch.spy.evidence.known_code import LOCK_WAITS
from bigsci_launch.spy.evidence.ranks import RankEvidence
from bigsci_launch.spy.evidence.samples import Child


def stuck_child(seen: RankEvidence) -> Child | None:
    """A child that is stopped, dead or in the kernel; else one that waits for a lock and did not run."""
    children = (seen.last.children or ()) if seen.last else ()
    halted = next((child for child in children if child.state in ("T", "t", "D", "Z")), None)
    idle = (child for child in children if child.state == "S" and not _has_run(seen, child))
    return halted or next((child for child in idle if child.wchan.startswith(LOCK_WAITS)), None)


def reading_worker(seen: RankEvidence) -> Child | None:
    """A worker of its data loader that is reading a sample: one that did not run between the samples, if there is."""
    workers = [child for child in (seen.last.children or () if seen.last else ()) if child.reading]
    return min(workers, key=lambda child: (_has_run(seen, child), child.pid), default=None)


def _has_run(seen: RankEvidence, child: Child) -> bool:
    """Whether a child has used CPU time between the samples."""
    before = {each.pid: each.cpu_ticks for each in seen.samples[0].children or ()}
    return before.get(child.pid) != child.cpu_ticks
