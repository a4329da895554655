"""Renders the answer as one JSON document, `schema_version` 1."""

from __future__ import annotations

from typing import Any

from bigsci_launch.spy.evidence.ranks import Evidence, RankEvidence
from bigsci_launch.spy.evidence.samples import Child
from bigsci_launch.spy.evidence.stack_classes import merge_stacks
from bigsci_launch.spy.evidence.stacks import Frame
from bigsci_launch.spy.judge.conclusion import Conclusion, Pointer, Suspect
from bigsci_launch.spy.judge.verdict import Judgment

SCHEMA_VERSION = 1


def to_document(evidence: Evidence, conclusion: Conclusion) -> dict[str, Any]:
    """Return the document that `bsl spy --json` prints."""
    unreadable = [seen for seen in evidence.ranks if seen.why_unreadable]
    return {
        "schema_version": SCHEMA_VERSION,
        "job": evidence.job,
        "world_size": evidence.world_size,
        "coverage": {
            "ranks_read": sum(1 for seen in evidence.ranks if seen.threads),
            "ranks_unreadable": [
                {"rank": seen.rank, "node": seen.node, "why": seen.why_unreadable} for seen in unreadable
            ],
            "nodes_silent": [{"node": node, "why": why} for node, why in evidence.nodes_silent],
            "numbering": evidence.numbering.value,
            "problems": list(evidence.problems),
            "steps_left_out": list(evidence.steps_left_out),
        },
        "ranks": [_rank(seen, evidence) for seen in evidence.ranks],
        "others": [
            {"node": other.node, "pid": other.pid, "comm": other.comm, "role": other.role, "why": other.why}
            for other in evidence.others
        ],
        "verdict": {
            "state": conclusion.state.value,
            "class": str(conclusion.hang_class) if conclusion.hang_class else None,
            "signature": conclusion.signature.name if conclusion.signature else None,
            "suspects": [_suspect(suspect, evidence) for suspect in conclusion.suspects],
            "look_first": [_pointer(pointer, evidence) for pointer in conclusion.look_first],
            "sides": [{"ranks": list(side.ranks), "where": side.where} for side in conclusion.sides],
            "confidence": conclusion.confidence,
            "claim": conclusion.claim,
            "evidence": list(conclusion.evidence),
            "missing": list(conclusion.missing),
            "next": list(conclusion.next),
        },
        "classes": [
            {
                "ranks": list(found.ranks),
                "nodes": list(found.nodes),
                "thread": found.thread,
                "frames": [_frame(frame) for frame in found.frames],
            }
            for found in merge_stacks(evidence.ranks)
        ],
    }


def _rank(seen: RankEvidence, evidence: Evidence) -> dict[str, Any]:
    """Return who a rank is. `rank` identifies it in this document; outside, only what `numbered_by` makes it."""
    return {
        "rank": seen.rank,
        "name": evidence.short_name(seen.rank),
        "node": seen.node,
        "pid": seen.pid,
        "numbered_by": seen.numbered_by.value,
    }


def _child(child: Child) -> dict[str, Any]:
    """Return a process below a rank, with the frames of the thread that decides, if they could be read."""
    return {
        "pid": child.pid,
        "comm": child.comm,
        "state": child.state,
        "wchan": child.wchan,
        "frames": [_frame(frame) for frame in child.thread.own_frames] if child.thread else None,
    }


def _frame(frame: Frame) -> dict[str, Any]:
    return {"function": frame.function, "file": frame.file, "line": frame.line}


def _suspect(suspect: Suspect, evidence: Evidence) -> dict[str, Any]:
    return {**_who(suspect.rank, evidence), "why": suspect.why}


def _who(rank: int, evidence: Evidence) -> dict[str, Any]:
    seen = next(seen for seen in evidence.ranks if seen.rank == rank)
    coordinate = evidence.coordinate(rank)
    return {
        "rank": rank,
        "node": seen.node,
        "pid": seen.pid,
        "numbered_by": seen.numbered_by.value,
        "coordinate": coordinate.as_dict() if coordinate else None,
        "children": [_child(child) for child in (seen.last.children or () if seen.last else ())],
    }


def _pointer(pointer: Pointer, evidence: Evidence) -> dict[str, Any]:
    reason = {"reason": pointer.reason.words, "hit_rate": pointer.hit_rate}
    return {**_who(pointer.rank, evidence), **reason, "why": pointer.why}


def rules_document(judgment: Judgment) -> list[dict[str, Any]]:
    """Return every rule of the verdict as it was weighed on this job."""
    return [
        {
            "rule": weighed.rule.name,
            "looks_for": weighed.rule.says,
            "matches": weighed.conclusion is not None,
            "decides": weighed.decides,
            "beaten_by": list(weighed.beaten_by),
            "claim": weighed.conclusion.claim if weighed.conclusion else None,
        }
        for weighed in judgment.weighed
    ]
