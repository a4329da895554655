"""Finds the files that make up the weights at the path that the user names."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from bigsci_launch.errors import CheckpointError
from bigsci_launch.file_names import (
    LATEST,
    is_digests_name,
    moment_of_dump,
    rank_of_name,
    step_of_tag,
    steps_done_at_dump,
)
from bigsci_launch.topology import Topology
from bigsci_launch.weights.files.sources import (
    CheckpointMetadata,
    FileFormat,
    Source,
    Unreadable,
    Weights,
    WeightsLayout,
)
from bigsci_launch.weights.files.tensors import PLACE_AXES, Place, UnreadableFile, os_reason
from bigsci_launch.weights.formats.contents import dump_place
from bigsci_launch.weights.formats.deepspeed import is_deepspeed_name, locate_deepspeed

SideName = Literal["a", "b"]
Moment = tuple[int, str]

TENSOR_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")
AXIS = {axis: re.compile(rf"(?:^|[-_.]){axis}[-_]?(\d+)(?=$|[-_.])") for axis in PLACE_AXES}
# Megatron-LM nests iter_0000100/mp_rank_00_001/model_optim_rng.pt: tp rank, pp rank.
MAX_DEPTH = 2
MEGATRON_FOLDER = re.compile(r"mp_rank_(\d+)(?:_(\d+))?")
MEGATRON_STEP = re.compile(r"iter_\d+/")
KNOWN = (
    "a DeepSpeed or universal checkpoint, a folder of .pt or .safetensors files, one such file, or a folder of "
    "weight dumps or digests"
)


def open_weights(path: Path, side: SideName = "a") -> Weights:
    """Open the weights at `path`: a file, a folder, or a folder of checkpoints with a `latest` file.

    If a folder contains dumps from several moments, side `a` is the last dump after a step, and side `b` the first
    dump before a step: the two moments around a restart.

    Raises:
        CheckpointError: `path` does not exist, cannot be read, or contains no weights.
    """
    try:
        if path.is_dir():
            return _open_folder(path, side)
        if path.exists():
            return _open_file(path)
    except OSError as error:
        raise CheckpointError(f"{path}: {os_reason(error)}", hint="ask its owner for read access") from error
    if path.is_symlink():
        raise CheckpointError(f"{path}: a symbolic link that is broken or points to itself")
    raise CheckpointError(f"{path}: no such file or folder")


def _open_file(path: Path) -> Weights:
    if path.suffix in TENSOR_SUFFIXES:
        return Weights(path, "files", (Source(path, "", "plain"),))
    if is_digests_name(path.name):
        return Weights(path, "digests", (Source(path, "", "digests"),))
    if path.suffix == ".txt":
        from bigsci_launch.weights.formats.text_dump import is_text_dump

        if is_text_dump(path):
            return Weights(path, "text dumps", (Source(path, "", "text", place_in_name(path.stem)),))
    raise CheckpointError(f"{path}: not a weights file", hint=f"name {KNOWN}")


def _open_folder(path: Path, side: SideName) -> Weights:
    folder, notes = _chosen(path, side)
    for attempt in (_open_universal, _open_tensors, _open_digests, _open_texts):
        weights = attempt(folder, path, side)
        if weights is not None:
            return replace(weights, notes=(*notes, *weights.notes))
    raise CheckpointError(f"{path}: not a checkpoint ({_holds(folder)})", hint=f"name {KNOWN}")


def _open_universal(folder: Path, path: Path, side: SideName) -> Weights | None:
    files = sorted((folder / "zero").glob("*/*.pt"))
    if not any(file.name == "fp32.pt" for file in files):
        return None
    return Weights(
        path, "universal", tuple(Source(file, f"{file.parent.name}/{file.stem}", "universal") for file in files)
    )


def _open_tensors(folder: Path, path: Path, side: SideName) -> Weights | None:
    files = _tensor_files(folder)
    if len({file.parent for file in files}) == 1 and any(is_deepspeed_name(file.name) for file in files):
        return locate_deepspeed(files[0].parent, files, path)
    if any(rank_of_name(file.stem) is not None for file in files):
        found = _by_rank(path, "rank dumps", tuple(_plain(folder, file, "dump") for file in files))
        return replace(found, metadata=CheckpointMetadata(global_steps=steps_done_at_dump(folder.name)))
    if not files:
        return None
    sources = tuple(_plain(folder, file, "plain") for file in files)
    return Weights(path, "files", sources, _topology(sources), broken=tuple(_missing_shards(folder)))


def _open_digests(folder: Path, path: Path, side: SideName) -> Weights | None:
    files = sorted(file for file in folder.iterdir() if is_digests_name(file.name))
    sources = tuple(Source(file, file.name.partition(".")[0], "digests") for file in files)
    return _by_rank(path, "digests", sources) if sources else None


def _open_texts(folder: Path, path: Path, side: SideName) -> Weights | None:
    from bigsci_launch.weights.formats.text_dump import is_text_dump, moment_of

    files = sorted(file for file in folder.glob("*.txt") if is_text_dump(file))
    if not files:
        return None
    moments = {moment for file in files if (moment := moment_of(file.stem))}
    moment, notes = _choose_moment(moments, side)
    chosen = [file for file in files if moment is None or moment_of(file.stem) == moment]
    places = [place_in_name(file.stem) for file in chosen]
    sources = tuple(
        Source(file, str(place) or file.stem, "text", place) for file, place in zip(chosen, places, strict=True)
    )
    return Weights(path, "text dumps", sources, _topology(sources), notes=notes)


def _tensor_files(folder: Path) -> list[Path]:
    """Return the tensor files in a folder; if it has none, those up to `MAX_DEPTH` folders below."""
    for depth in range(MAX_DEPTH + 1):
        found = sorted(file for file in folder.glob("*/" * depth + "*") if file.suffix in TENSOR_SUFFIXES)
        if files := [file for file in found if file.is_file()]:
            return files
    return []


def _by_rank(path: Path, layout: WeightsLayout, sources: tuple[Source, ...]) -> Weights:
    """Return weights with one file per rank. The last rank's coordinate gives the size of each axis."""
    for source in reversed(sources):
        try:
            last = replace(source, place=dump_place(source))
        except UnreadableFile:
            continue
        return Weights(path, layout, sources, _topology((last,)))
    return Weights(path, layout, sources)


def _topology(sources: Sequence[Source]) -> Topology | None:
    """Return the smallest topology that contains all places; None if a place is unknown on any axis."""
    sizes = {}
    for axis in PLACE_AXES:
        indices = [index for source in sources if (index := source.place[axis]) is not None]
        if not indices or len(indices) < len(sources):
            return None
        sizes[axis] = max(indices) + 1
    return Topology(**sizes)


def _chosen(path: Path, side: SideName) -> tuple[Path, tuple[str, ...]]:
    """Return the folder that `latest` names; otherwise the only checkpoint, the side's dump, or `path` itself.

    Raises:
        CheckpointError: `latest` names a folder that does not exist, or there are several checkpoints but no `latest`.
    """
    pointer = path / LATEST
    if not pointer.is_file():
        return _only_choice(path, side)
    tag = pointer.read_text(encoding="utf-8", errors="replace").strip()
    if tag and (path / tag).is_dir():
        return path / tag, ()
    there = sorted(item.name for item in path.iterdir() if step_of_tag(item.name) is not None)
    raise CheckpointError(
        f"{pointer}: {f'names {tag}, which does not exist' if tag else 'is empty'}",
        hint=f"name one of {', '.join(there)}" if there else "there is no global_step folder next to it",
    )


def _only_choice(path: Path, side: SideName) -> tuple[Path, tuple[str, ...]]:
    checkpoints = [item for item in path.iterdir() if step_of_tag(item.name) is not None]
    if len(checkpoints) > 1:
        names = ", ".join(sorted(folder.name for folder in checkpoints))
        raise CheckpointError(f"{path}: several checkpoints, but no `latest` file", hint=f"name one of {names}")
    if checkpoints:
        return checkpoints[0], ()
    dumps = {moment: item for item in path.iterdir() if (moment := moment_of_dump(item.name))}
    moment, notes = _choose_moment(set(dumps), side)
    return (dumps[moment], notes) if moment is not None else (path, ())


def _choose_moment(moments: set[Moment], side: SideName) -> tuple[Moment | None, tuple[str, ...]]:
    """Return the last moment after a step for side `a`, or the first before a step for `b`, with a note."""
    if not moments:
        return None, ()
    when, choose = _SIDES[side]
    moment = choose([moment for moment in moments if moment[1] == when] or sorted(moments))
    if len(moments) == 1:
        return moment, ()
    return moment, (f"{side.upper()} is the dump {moment[1]} step {moment[0]}; the folder has {len(moments)} dumps",)


_SIDES: dict[SideName, tuple[str, Callable[[Iterable[Moment]], Moment]]] = {"a": ("after", max), "b": ("before", min)}


def _holds(folder: Path) -> str:
    names = [_entry_text(item) for item in sorted(folder.iterdir())]
    if not names:
        return "it is empty"
    return f"it contains {', '.join(names[:4])}{', ...' if len(names) > 4 else ''}"


def _entry_text(entry: Path) -> str:
    """Return an entry's name, and its kind if its suffix suggests a tensor file that it is not."""
    if entry.suffix not in TENSOR_SUFFIXES or entry.is_file():
        return entry.name
    kind = "a folder" if entry.is_dir() else "not a regular file" if entry.exists() else "a broken link"
    return f"{entry.name} ({kind})"


def _plain(folder: Path, file: Path, file_format: FileFormat) -> Source:
    relative = file.relative_to(folder).with_suffix("").as_posix()
    place = place_in_name(file.stem)
    if place.is_known:
        return Source(file, str(place), file_format, place)
    match = MEGATRON_FOLDER.fullmatch(file.parent.name)
    if match:
        place = Place(pp=int(match[2] or 0), tp=int(match[1]))
    return Source(file, MEGATRON_STEP.sub("", relative), file_format, place)


def place_in_name(stem: str) -> Place:
    """Return the place in a file name such as `after-pp01-tp00-dp00`; axes that it omits are None."""
    found = {axis: match[1] for axis, pattern in AXIS.items() if (match := pattern.search(stem))}
    return Place(**{axis: int(index) for axis, index in found.items()})


def _missing_shards(folder: Path) -> Iterable[Unreadable]:
    """Yield the missing shards that an index (`model.safetensors.index.json`) lists."""
    for index in sorted(folder.glob("*.index.json")):
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except OSError as error:
            yield Unreadable(index, os_reason(error))
        except (ValueError, KeyError, TypeError, AttributeError):
            yield Unreadable(index, "not a shard index (it has no weight_map)")
        else:
            yield from (
                Unreadable(folder / name, f"missing, but listed in {index.name}")
                for name in names
                if not (folder / name).is_file()
            )


def labels(sources: Sequence[Source]) -> dict[str, Source]:
    """Return sources by label. If two share a label, the later one is labelled by its path."""
    found: dict[str, Source] = {}
    for source in sources:
        found[source.label if source.label not in found else source.path.as_posix()] = source
    return found
