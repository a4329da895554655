"""Lines of logs as people keep them: without colours and stamps, and with who printed them. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from bigsci_launch.printable import without_escapes

STAMP = re.compile(
    r"^\[?(?P<date>\d{4}-\d\d-\d\d)[T _](?P<time>\d\d:\d\d:\d\d)(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?\]?:? ?"
)
GLOG = re.compile(r"\b[EWIF](\d{1,2})(\d\d) (\d\d):(\d\d):(\d\d)(?:\.(\d{1,9}))?\b")
MOMENT = re.compile(r"\d{4}-(\d\d)-(\d\d)[T _](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,9}))?")
RANK_LABEL = re.compile(r"^\[(?:rank|default):? ?(\d{1,6})\]:?\s?", re.IGNORECASE)
TASK_LABEL = re.compile(r"^ {0,5}(\d{1,6}): ")
NODE_LABEL = re.compile(r"^\[?([A-Za-z][\w.-]{0,60}?)(?:[ :/]+rank[ -]?(\d{1,6}))?(?:\]|:) (?=\S)")
MPI_LABEL = re.compile(r"^\[(?:\d+,)?(\d{1,6})\]<std(?:out|err)>:\s?")
"""Of mpirun, and of horovodrun without it."""
RAY_LABEL = re.compile(
    r"^\((?:raylet|(?P<name>[\w.<>:-]{1,80}(?:\([^()]{0,80}\))?) pid=(?P<pid>\d{1,9}))"
    r"(?:, ip=(?P<node>[\w.:-]{1,60}))?\)\s?"
)
NCCL_LABEL = re.compile(r"^(?P<node>[A-Za-z][\w.-]{0,60}):(?P<pid>\d{1,9}):\d{1,9} \[\d{1,3}\] ")
SKY_LABEL = re.compile(
    r"^\((?P<node>head|worker\d{1,5}), rank=\d{1,5}, pid=\d{1,9}(?:, ip=(?P<ip>[\w.:-]{1,60}))?\)\s?"
)
"""SkyPilot's rank is that of the node."""
KERNEL_LABEL = re.compile(r"^(?:[A-Z][a-z]{2} +\d{1,2} \d\d:\d\d:\d\d )?(?P<node>[A-Za-z][\w.-]{0,60}) kernel: ")
RANK_IN_NAME = re.compile(r"\brank[=: ]?(\d{1,6})\b", re.IGNORECASE)
"""In the name that an actor gives itself."""
INLINE_RANK = re.compile(r"\bRank (\d{1,6})\]")
NODES = re.compile(r"^(?!nvidia|nvme)(?:node|host|worker|gpu|n|nid|cn|dgx|r\d+)[\w-]*\d+(?:\.[\w.-]+)?$", re.IGNORECASE)
"""What may stand in front of a line as the name of a node: words such as `Traceback:` and `ValueError:` may not."""
DAY_S = 86400


@dataclass(frozen=True, slots=True)
class Speaker:
    """Who prints, as far as a label, the name of the file or the line itself says it."""

    rank: int | None = None
    node: str | None = None
    local_rank: int | None = None
    pid: int | None = None


UNKNOWN = Speaker()


@dataclass(frozen=True, slots=True)
class PlainLine:
    """A line without the labels in front of it. `moment` is in seconds of a year: glog gives no year."""

    text: str
    speaker: Speaker
    moment: float | None = None


def plain_line(line: str, speaker: Speaker) -> PlainLine:
    """Return a line, and who printed it: its own label beats `speaker`, which is that of its file."""
    text = without_escapes(line).rstrip()
    if not text:
        return PlainLine("", speaker)
    moment, is_labelled, is_tagged = None, False, False
    for _ in range(4):  # `2024-01-01T00:00:00Z n1: 3: [rank3]: ...`
        if match := STAMP.match(text):
            moment = moment or moment_of(match[0])
        elif match := MPI_LABEL.match(text):
            speaker, is_tagged = replace(speaker, rank=int(match[1])), True
        elif match := RANK_LABEL.match(text):
            is_local = text.lower().startswith("[default")
            is_labelled = not is_local
            number = int(match[1])
            speaker = replace(speaker, local_rank=number) if is_local else replace(speaker, rank=number)
        elif not is_tagged and (match := TASK_LABEL.match(text)):  # Horovod lists ranks in such lines
            speaker = replace(speaker, rank=int(match[1]))
        elif match := RAY_LABEL.match(text):
            speaker = _actor(match, speaker)
        elif match := SKY_LABEL.match(text):
            speaker = replace(speaker, node=match["ip"] or match["node"])
        elif match := KERNEL_LABEL.match(text):
            return PlainLine(text[match.end() :], replace(speaker, node=match["node"]), moment or moment_of(text[:200]))
        elif match := NCCL_LABEL.match(text):
            pid = int(match["pid"]) if speaker.rank is None else speaker.pid  # a label may be the task of a launcher
            return PlainLine(text[match.end() :], replace(speaker, node=match["node"], pid=pid), moment)
        elif (match := NODE_LABEL.match(text)) and NODES.match(match[1]):
            speaker = replace(speaker, node=match[1], rank=int(match[2]) if match[2] else speaker.rank)
        else:
            break
        text = text[match.end() :]
    if not is_labelled and (inline := INLINE_RANK.search(text[:400])):  # it may count in a group
        speaker = replace(speaker, rank=int(inline[1]))
    return PlainLine(text, speaker, moment if moment is not None else moment_of(text[:200]))


def _actor(label: re.Match[str], speaker: Speaker) -> Speaker:
    rank = RANK_IN_NAME.search(label["name"] or "")
    return replace(
        speaker,
        rank=int(rank[1]) if rank else speaker.rank,
        node=label["node"] or speaker.node,
        pid=int(label["pid"]) if label["pid"] else None,
    )


def moment_of(text: str) -> float | None:
    """Return the time in a text, in seconds since the year began, so that those with and without a year compare."""
    match = MOMENT.search(text) or GLOG.search(text)
    if match is None:
        return None
    month, day, hour, minute, second = map(int, match.groups()[:5])
    whole = (month * 31 + day) * DAY_S + hour * 3600 + minute * 60 + second
    return whole + float(f"0.{match[6] or 0}")
