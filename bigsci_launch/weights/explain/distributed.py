"""Audits what torch.distributed.checkpoint wrote: checksums, files that nothing uses, steps of single parameters."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from bigsci_launch.topology.words import agree
from bigsci_launch.weights.compare.comparison import WeightsFinding, names_text
from bigsci_launch.weights.explain.drift import Holdings
from bigsci_launch.weights.explain.health import broken_names, corrupted
from bigsci_launch.weights.files.elements import as_floats, read_elements
from bigsci_launch.weights.files.mapped import FilePool, MappedFile
from bigsci_launch.weights.files.sources import Source
from bigsci_launch.weights.files.tensors import StoredTensor, UnreadableFile
from bigsci_launch.weights.formats.dcp.metadata import (
    METADATA,
    OF_RANK,
    DcpMetadata,
    Item,
    is_dcp_name,
    read_dcp_metadata,
)
from bigsci_launch.weights.formats.torch_file import ZIP_MAGIC, read_torch_slice

# `optimizer.state.layers.0.weight.step`: the dictionary of the state, and the parameter.
STEP = re.compile(r"((?:.*?\.)?state)\.(.+)\.step")


def audit_distributed(sources: Sequence[Source], holdings: Holdings, files: FilePool) -> Iterator[WeightsFinding]:
    """Yield what is wrong in the folders that torch.distributed.checkpoint wrote, beyond what their reader reports."""
    for folder in (source.path for source in sources if source.format == "dcp"):
        # Metadata that cannot be read was reported by the reader.
        with suppress(UnreadableFile, OSError):
            metadata = read_dcp_metadata(folder)
            yield from _broken_items(metadata)
            yield from _unused_files(folder, metadata)
        yield from _odd_steps(_steps_in(folder, holdings, files))


def _broken_items(metadata: DcpMetadata) -> Iterator[WeightsFinding]:
    """Yield a finding for each file with tensors whose bytes do not match their checksums."""
    held: dict[Path, list[tuple[str, Item]]] = {}
    for name, item in metadata.items():
        if not item.transforms:
            held.setdefault(item.path, []).append((name, item))
    with ThreadPoolExecutor() as pool:
        broken = pool.map(_broken_in, held, held.values())
        for path, names in zip(held, broken, strict=True):
            if names:
                yield corrupted(path, names, ())


def _broken_in(path: Path, items: Sequence[tuple[str, Item]]) -> tuple[str, ...]:
    found: list[str] = []
    with suppress(UnreadableFile, OSError), MappedFile(path) as file, memoryview(file.memory) as memory:
        for name, item in items:
            if memory[item.offset : item.offset + len(ZIP_MAGIC)] == ZIP_MAGIC:
                with suppress(UnreadableFile):
                    found += broken_names(read_torch_slice(file, item.offset, item.length), memory, name)
    return tuple(dict.fromkeys(found))


def _unused_files(folder: Path, metadata: DcpMetadata) -> Iterator[WeightsFinding]:
    """Yield a finding for files that no entry uses. They are no fault: torch does not remove those of earlier saves."""
    used = {item.path for _, item in metadata.items()}
    present = [path for path in sorted(folder.iterdir()) if is_dcp_name(path.name) and path not in used]
    is_joined = not (folder / METADATA).exists()
    unused = tuple(
        path.name for path in present if path.name != METADATA and not (is_joined and OF_RANK.fullmatch(path.name))
    )
    if unused:
        claim = (
            f"{names_text(unused)} {agree('is', len(unused))} in the folder, but no entry of the metadata uses "
            f"{'it' if len(unused) == 1 else 'them'}: not read, and probably left by an earlier save"
        )
        yield WeightsFinding("unused file", (), (), claim, is_fault=False)


def _steps_in(folder: Path, holdings: Holdings, files: FilePool) -> Mapping[str, Mapping[str, float]]:
    """Return the step of each parameter, for each optimizer with its state in a folder."""
    found: dict[str, dict[str, float]] = {}
    for tensor in holdings.tensors:
        match = STEP.fullmatch(tensor.name) if tensor.path.parent == folder and tensor.num_elements == 1 else None
        if match:
            found.setdefault(match[1], {})[match[2]] = _scalar(tensor, files)
    for value in holdings.values:
        match = STEP.fullmatch(value.name) if value.path.parent == folder else None
        if match:
            with suppress(ValueError):
                found.setdefault(match[1], {})[match[2]] = float(value.text)
    return found


def _scalar(tensor: StoredTensor, files: FilePool) -> float:
    held = tensor.chunks[0].tensor if tensor.chunks else tensor
    return float(as_floats(read_elements(held, 0, 1, files), held.dtype)[0])


def _odd_steps(steps: Mapping[str, Mapping[str, float]]) -> Iterator[WeightsFinding]:
    """Yield a finding for each step that is not that of most parameters, or is smaller than that of as many."""
    for optimizer, held in steps.items():
        counts = Counter(held.values())
        usual = max(counts, key=lambda step: (counts[step], step))
        for odd in sorted(counts.keys() - {usual}):
            names = tuple(name for name, step in held.items() if step == odd)
            claim = (
                f"in {optimizer}, the step of {names_text(names)} is {odd:g}, that of {counts[usual]} other "
                f"{'parameter' if counts[usual] == 1 else 'parameters'} {usual:g}"
            )
            tail = ": lost on load, or without a gradient in some steps" if odd < usual else ""
            yield WeightsFinding("optimizer step differs", names, (), claim + tail)
