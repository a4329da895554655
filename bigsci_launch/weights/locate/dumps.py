"""Dumps of weights: per rank, as digests, or as text that torch printed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bigsci_launch.file_names import is_digests_name, steps_done_at_dump
from bigsci_launch.topology import Topology
from bigsci_launch.weights.files.mapped import UnreadableFile
from bigsci_launch.weights.files.sources import CheckpointMetadata, Source, Weights, WeightsLayout
from bigsci_launch.weights.files.tensors import PLACE_AXES, Place
from bigsci_launch.weights.formats.contents import dump_place
from bigsci_launch.weights.locate.choice import SideName, choose_moment
from bigsci_launch.weights.locate.walk import Listing

AXIS = {axis: re.compile(rf"(?:^|[-_.]){axis}[-_]?(\d+)(?=$|[-_.])") for axis in PLACE_AXES}


def rank_dumps(listing: Listing, path: Path) -> Weights:
    """Return the per-rank files of a dump as weights."""
    sources = tuple(
        Source(file, Path(listing.label(file)).with_suffix("").as_posix(), "dump", place_in_name(file.stem))
        for file in listing.tensors
    )
    metadata = CheckpointMetadata(global_steps=steps_done_at_dump(listing.tensors[0].parent.name))
    return replace(_by_rank(path, "rank dumps", sources), metadata=metadata)


def open_digests(listing: Listing, path: Path, side: SideName) -> Weights | None:
    """Return a folder of digests as weights; None if it has none."""
    files = [file for file in listing.others if is_digests_name(file.name)]
    sources = tuple(
        Source(file, Path(listing.label(file)).with_suffix("").with_suffix("").as_posix(), "digests") for file in files
    )
    return _by_rank(path, "digests", sources) if sources else None


def open_texts(listing: Listing, path: Path, side: SideName) -> Weights | None:
    """Return a folder of printed tensors as weights; None if it has none.

    Next to such dumps, a file with the name of a rank's dump of such a moment is one too, whatever is left of it.
    """
    from bigsci_launch.weights.formats.text_dump import is_text_dump, moment_of

    texts = [file for file in listing.others if file.suffix == ".txt"]
    dumps = {file: moment_of(file.stem) for file in texts if is_text_dump(file)}
    if not dumps:
        return None
    named = {file for file in texts if place_in_name(file.stem).is_known and moment_of(file.stem) in dumps.values()}
    files = [file for file in texts if file in dumps or file in named]
    moments = {moment for moment in dumps.values() if moment}
    moment, notes = choose_moment(moments, side)
    chosen = [file for file in files if moment is None or moment_of(file.stem) == moment]
    listing.leave_out(files)
    places = [place_in_name(file.stem) for file in chosen]
    sources = tuple(
        Source(file, str(place) or file.stem, "text", place) for file, place in zip(chosen, places, strict=True)
    )
    return Weights(path, "text dumps", sources, topology_of(sources), notes=notes)


def _by_rank(path: Path, layout: WeightsLayout, sources: tuple[Source, ...]) -> Weights:
    """Return weights with one file per rank. The last rank's coordinate gives the size of each axis."""
    for source in reversed(sources):
        try:
            last = replace(source, place=dump_place(source))
        except UnreadableFile:
            continue
        return Weights(path, layout, sources, topology_of((last,)))
    return Weights(path, layout, sources)


def topology_of(sources: Sequence[Source]) -> Topology | None:
    """Return the smallest topology that contains all places; None if a place is unknown on any axis."""
    sizes = {}
    for axis in PLACE_AXES:
        indices = [index for source in sources if (index := source.place[axis]) is not None]
        if not indices or len(indices) < len(sources):
            return None
        sizes[axis] = max(indices) + 1
    return Topology(**sizes)


def place_in_name(stem: str) -> Place:
    """Return the place in a file name such as `after-pp01-tp00-dp00`; axes that it omits are None."""
    found = {axis: match[1] for axis, pattern in AXIS.items() if (match := pattern.search(stem))}
    return Place(**{axis: int(index) for axis, index in found.items()})
