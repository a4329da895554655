"""Finds the files that make up the weights at the path that the user names."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from bigsci_launch.errors import CheckpointError
from bigsci_launch.file_names import is_digests_name, rank_of_name
from bigsci_launch.weights.files.json_text import BadJson, parse_json
from bigsci_launch.weights.files.mapped import MappedFile, UnreadableFile, os_reason, read_small_file
from bigsci_launch.weights.files.sources import OtherFile, Source, Unreadable, Weights
from bigsci_launch.weights.files.tensors import Place
from bigsci_launch.weights.formats.dcp_metadata import LAST_OF_MEGATRON, OF_MEGATRON, is_dcp_name
from bigsci_launch.weights.formats.deepspeed import is_deepspeed_name, locate_deepspeed, universal_states
from bigsci_launch.weights.formats.table import BY_SUFFIX, starts_as
from bigsci_launch.weights.locate.choice import MAX_POINTER_BYTES, SideName
from bigsci_launch.weights.locate.dumps import open_digests, open_texts, place_in_name, rank_dumps, topology_of
from bigsci_launch.weights.locate.index import check_shards, is_index_name, read_index
from bigsci_launch.weights.locate.parts import STATE_FILES, component_of, is_plain_name
from bigsci_launch.weights.locate.walk import Listing, walk

# Megatron-LM's mp_rank_00_001/model_optim_rng.pt: tp rank, pp rank.
MEGATRON_FOLDER = re.compile(r"mp_rank_(\d+)(?:_(\d+))?")
KNOWN = (
    "a DeepSpeed or universal checkpoint, a folder of .pt or .safetensors files, one such file, or a folder of "
    "weight dumps or digests"
)


def open_weights(path: Path, side: SideName = "a") -> Weights:
    """Open the weights at `path`: a file, a folder, or a folder of checkpoints with a `latest` file.

    If a folder contains dumps from several moments, side `a` is the last dump after a step, and side `b` the first
    dump before a step: the two moments around a restart.

    Raises:
        CheckpointError: `path` does not exist, cannot be read, or contains no weights or several checkpoints.
    """
    try:
        if path.is_dir():
            return _open_folder(path, side)
        if path.is_file():
            return _open_file(path)
        if path.exists():
            raise CheckpointError(f"{path}: not a weights file (not a regular file)", hint=f"name {KNOWN}")
    except OSError as error:
        raise CheckpointError(f"{path}: {os_reason(error)}", hint="ask its owner for read access") from error
    if path.is_symlink():
        raise CheckpointError(f"{path}: a symbolic link that is broken or points to itself")
    raise CheckpointError(f"{path}: no such file or folder")


def _open_file(path: Path) -> Weights:
    if path.suffix in BY_SUFFIX:
        return Weights(path, "files", (Source(path, "", "plain"),))
    if is_digests_name(path.name):
        return Weights(path, "digests", (Source(path, "", "digests"),))
    if is_index_name(path.name):
        return _open_index(path)
    if path.suffix == ".txt":
        from bigsci_launch.weights.formats.text_dump import is_text_dump

        if is_text_dump(path):
            return Weights(path, "text dumps", (Source(path, "", "text", place_in_name(path.stem)),))
    if is_dcp_name(path.name):
        # One rank's file alone says neither what is in it nor where that belongs.
        return Weights(path, "files", (Source(path.parent, "", "dcp"),))
    if path.suffix == ".nemo":
        raise CheckpointError(f"{path}: NeMo's archives are not read", hint="unpack it with tar, and name the folder")
    if starts_as(path):
        return Weights(path, "files", (Source(path, "", "plain"),))
    MappedFile(path).close()  # it says what was put in the place of weights
    raise CheckpointError(f"{path}: not a weights file", hint=f"name {KNOWN}")


def _open_index(path: Path) -> Weights:
    """Return the shards that an index names, and no other file.

    Raises:
        CheckpointError: the file is no index.
    """
    try:
        shards = [path.parent / file for file in sorted(read_index(path).shards)]
    except UnreadableFile as error:
        raise CheckpointError(f"{path}: {error.why}", hint="name the shards' folder to compare them anyway") from error
    found = Listing(path.parent, [file for file in shards if file.is_file()])
    sharding = check_shards([path], found.tensors)
    sources = tuple(replace(source, index=sharding.lists[source.path]) for source in _sources(found, found.tensors))
    return Weights(path, "files", sources, broken=sharding.broken, notes=sharding.notes)


def _open_folder(path: Path, side: SideName) -> Weights:
    listing = walk(path, side)
    for attempt in (_open_universal, _open_tensors, open_digests, open_texts):
        weights = attempt(listing, path, side)
        if weights is not None:
            used = {source.path for source in weights.sources}
            others = (file for file in listing.others if file not in used)
            return replace(
                weights,
                notes=(*listing.notes, *weights.notes),
                broken=(*weights.broken, *listing.odd),
                others=tuple(OtherFile(file, listing.label(file), is_plain_name(file.name)) for file in others),
            )
    raise CheckpointError(f"{path}: not a checkpoint ({_holds(path)})", hint=f"name {KNOWN}")


def _open_universal(listing: Listing, path: Path, side: SideName) -> Weights | None:
    parameters = {file for file in listing.tensors if file.suffix == ".pt" and file.parent.parent.name == "zero"}
    if not any(file.name == "fp32.pt" for file in parameters):
        return None
    states, metadata = universal_states(listing.tensors)
    kept = {source.path for source in states}
    sources = [
        Source(file, f"{file.parent.name}/{file.stem}", "universal")
        if file in parameters
        else Source(file, Path(listing.label(file)).with_suffix("").as_posix(), "aside")
        for file in listing.tensors
        if file not in kept
    ]
    everything = (*sources, *states, *_folders(listing), *_states(listing))
    return Weights(path, "universal", everything, metadata=metadata)


def _open_tensors(listing: Listing, path: Path, side: SideName) -> Weights | None:
    files = listing.tensors
    folders = {file.parent for file in files if is_deepspeed_name(file.name)}
    if folders:
        return _open_deepspeed(listing, path, folders)
    if any(rank_of_name(file.stem) is not None for file in files):
        return rank_dumps(listing, path)
    # Files without a known suffix count only if their first bytes say that they are tensors.
    unnamed = [file for file in listing.others if not is_plain_name(file.name) and starts_as(file)]
    if not files and not listing.dcp and not unnamed:
        return None
    sharding = check_shards([file for file in listing.others if is_index_name(file.name)], files)
    kept = [file for file in sorted([*files, *unnamed]) if file not in sharding.astray]
    sources = [replace(source, index=sharding.lists.get(source.path)) for source in _sources(listing, kept)]
    listing.leave_out({index.path for index in sharding.lists.values()} | {item.path for item in sharding.broken})
    everything = (*sources, *_folders(listing), *_states(listing))
    broken = (*sharding.broken, *_lost_of_megatron(listing))
    return Weights(path, "files", everything, topology_of(sources), broken=broken, notes=sharding.notes)


def _lost_of_megatron(listing: Listing) -> Iterator[Unreadable]:
    """Yield the files that Megatron-core writes next to its tensors, where only its `metadata.json` is left."""
    for folder in listing.dcp:
        stated = folder / LAST_OF_MEGATRON
        if stated in listing.others and folder / OF_MEGATRON not in listing.tensors:
            try:
                document = parse_json(read_small_file(stated, MAX_POINTER_BYTES))
            except (BadJson, UnreadableFile, OSError):
                continue
            if isinstance(document, dict) and "sharded_backend" in document:
                yield Unreadable(
                    folder / OF_MEGATRON, f"missing, but {stated.name} is of Megatron-core, which writes it"
                )


def _open_deepspeed(listing: Listing, path: Path, folders: set[Path]) -> Weights:
    """Return a DeepSpeed checkpoint with the files of the trainer that wrote it, which may be in the folder above."""
    if len(folders) > 1:
        names = ", ".join(folder.relative_to(listing.root).as_posix() for folder in sorted(folders))
        raise CheckpointError(f"{path}: several checkpoints of DeepSpeed", hint=f"name one of {names}")
    (folder,) = folders
    weights = locate_deepspeed(folder, [file for file in listing.tensors if file.parent == folder], path)
    rest = _sources(listing, [file for file in listing.tensors if file.parent != folder])
    beside = (*rest, *_folders(listing), *_states(listing))
    if not beside:
        return weights
    own = (replace(source, component="weights and optimizer") for source in weights.sources)
    return replace(weights, sources=(*own, *beside))


def _folders(listing: Listing) -> Iterator[Source]:
    for folder in listing.dcp:
        yield Source(folder, listing.label(folder), "dcp", component=component_of(folder))


def _states(listing: Listing) -> Iterator[Source]:
    for file in listing.others:
        if file.name in STATE_FILES:
            label = Path(listing.label(file)).with_suffix("").as_posix()
            yield Source(file, label, "json", component=component_of(file))


def _sources(listing: Listing, files: Sequence[Path]) -> list[Source]:
    """Return files as sources. Files that would share a label are labelled by their names with suffix."""
    found = [_source(listing, file) for file in files]
    counts = Counter(source.label for source in found)
    return [
        source if counts[source.label] == 1 else replace(source, label=listing.label(source.path)) for source in found
    ]


def _source(listing: Listing, file: Path) -> Source:
    label = Path(listing.label(file)).with_suffix("").as_posix()
    component = component_of(file)
    if component != "weights":
        return Source(file, label, "aside", component=component)
    place = place_in_name(file.stem)
    if place.is_known:
        return Source(file, str(place), "plain", place)
    match = MEGATRON_FOLDER.fullmatch(file.parent.name)
    return Source(file, label, "plain", Place(pp=int(match[2] or 0), tp=int(match[1])) if match else Place())


def _holds(folder: Path) -> str:
    names = [_entry_text(item) for item in sorted(folder.iterdir())]
    if not names:
        return "it is empty"
    return f"it contains {', '.join(names[:4])}{', ...' if len(names) > 4 else ''}"


def _entry_text(entry: Path) -> str:
    """Return an entry's name, and its kind if its suffix suggests a tensor file that it is not."""
    if entry.suffix not in BY_SUFFIX or entry.is_file():
        return entry.name
    kind = "a folder" if entry.is_dir() else "not a regular file" if entry.exists() else "a broken link"
    return f"{entry.name} ({kind})"


def labels(sources: Sequence[Source]) -> dict[str, Source]:
    """Return sources by label. If two share a label, the later one is labelled by its path."""
    found: dict[str, Source] = {}
    for source in sources:
        found[source.label if source.label not in found else source.path.as_posix()] = source
    return found
