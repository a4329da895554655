"""Finds faults that show without a second copy: NaN, corrupted bytes, lost steps, norms with weight decay."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from bigsci_launch.topology.naming import agree
from bigsci_launch.weights.compare.comparison import WeightsFinding, names_text
from bigsci_launch.weights.compare.places import describe_places
from bigsci_launch.weights.compare.statistics import CHUNK, FLOATS, ranges
from bigsci_launch.weights.files.elements import as_floats, read_elements
from bigsci_launch.weights.files.mapped import MappedFile, UnreadableFile
from bigsci_launch.weights.files.pool import FilePool
from bigsci_launch.weights.files.sources import CheckpointMetadata, OptimizerGroup, Source
from bigsci_launch.weights.files.tensors import Place, StoredTensor
from bigsci_launch.weights.formats.table import TORCH
from bigsci_launch.weights.formats.torch_file import TorchFile, read_torch_file, walk_tensors
from bigsci_launch.weights.match.sharding import NORM

CHECK_BYTES = 8 << 20
ANOTHER_STEP = "shard of another step"


def non_finite(tensors: Sequence[StoredTensor], files: FilePool) -> Iterator[WeightsFinding]:
    """Yield one finding for all tensors that contain NaN or infinities."""
    floats = [tensor for tensor in tensors if tensor.dtype in FLOATS and tensor.has_bytes]
    bad = [(tensor, count) for tensor in floats if (count := num_non_finite(tensor, files))]
    if bad:
        names = tuple(dict.fromkeys(f"{tensor.name} {tensor.role}" for tensor, _ in bad))
        places = tuple(dict.fromkeys(tensor.place for tensor, _ in bad))
        where = describe_places(places, places, {tensor.place for tensor in tensors})
        total = sum(count for _, count in bad)
        claim = f"{names_text(names)} {agree('contains', len(names))} {total:,} NaN or infinite elements"
        yield WeightsFinding("NaN", names, places, claim + (f" ({where})" if where else ""))


@np.errstate(all="ignore")
def num_non_finite(tensor: StoredTensor, files: FilePool) -> int:
    """Return how many elements are NaN or infinite."""
    if tensor.chunks:
        return sum(num_non_finite(chunk.tensor, files) for chunk in tensor.chunks)
    total = 0
    for start, stop in ranges(tensor.num_elements, CHUNK):
        values = as_floats(read_elements(tensor, start, stop, files), tensor.dtype)
        # A finite sum proves that all its terms are finite, so nothing has to be counted.
        if not np.isfinite(values.sum()):
            total += int(np.count_nonzero(~np.isfinite(values)))
    return total


def broken_records(sources: Sequence[Source]) -> Iterator[WeightsFinding]:
    """Yield a finding for each file with tensors whose bytes do not match their checksums."""
    paths = [source.path for source in sources if source.path.suffix in TORCH.suffixes]
    with ThreadPoolExecutor() as pool:
        broken = list(pool.map(_broken_in, paths))
    for source, found in zip(paths, broken, strict=True):
        if found:
            places = tuple({item.place for item in sources if item.path == source and item.place.is_known})
            yield corrupted(source, found, places)


def corrupted(path: Path, names: tuple[str, ...], places: tuple[Place, ...]) -> WeightsFinding:
    """Return the finding that the bytes of some tensors of a file do not match their checksums."""
    claim = (
        f"{path.name}: the bytes of {names_text(names)} do not match the checksum written with them: they were changed "
        "after they were saved"
    )
    return WeightsFinding("corrupted bytes", names, places, claim)


def _broken_in(path: Path) -> tuple[str, ...]:
    try:
        file = read_torch_file(path)
        with MappedFile(path) as mapped, memoryview(mapped.memory) as memory:
            return broken_names(file, memory)
    except (UnreadableFile, OSError):
        return ()


def broken_names(file: TorchFile, memory: memoryview, name: str = "") -> tuple[str, ...]:
    """Return the tensors whose bytes do not match their checksums; `name` is that of the whole object."""
    checked = {key: record for key, record in file.records.items() if record.crc is not None}
    broken = {key for key, record in checked.items() if _crc(memory, record.offset, record.num_bytes) != record.crc}
    if not broken or (len(broken) == len(checked) and len(checked) > 1):
        # torch can be configured not to compute checksums. All of them are then wrong and prove nothing.
        return ()
    names = [found for found, node in walk_tensors(file.tree, name) if node.storage in broken]
    return tuple(names) or ("a record that no tensor uses",)


def _crc(memory: memoryview, offset: int, length: int) -> int:
    checksum = 0
    for start, stop in ranges(length, CHECK_BYTES):
        checksum = zlib.crc32(memory[offset + start : offset + stop], checksum)
    return checksum


def mixed_steps(steps: Mapping[Path, int], metadata: CheckpointMetadata) -> Iterator[WeightsFinding]:
    """Yield the files that state another step than the checkpoint does."""
    expected = metadata.global_steps
    others = {path: step for path, step in steps.items() if expected is not None and step != expected}
    for step in sorted(set(others.values())):
        names = tuple(path.name for path, found in others.items() if found == step)
        stated = f"{names_text(names)} {agree('is', len(names))} of step {step}"
        claim = f"{stated}, the checkpoint's other files of step {expected}: they were not written together"
        yield WeightsFinding(ANOTHER_STEP, (), (), claim)


def lost_steps(
    groups: Mapping[Place, Sequence[OptimizerGroup]], metadata: CheckpointMetadata
) -> Iterator[WeightsFinding]:
    """Yield shards whose optimizer step differs from the checkpoint's, or from that of the other shards.

    All dp ranks do the same steps. If only some of their shards are of another step, these were not written with the
    others; otherwise the step was lost.
    """
    found: dict[float | None, set[Place]] = {}
    for place, held in groups.items():
        for group in held:
            found.setdefault(group.step, set()).add(place)
    expected = _expected_step(found, metadata)
    for step, places in found.items():
        if expected is not None and step != expected:
            where = describe_places(places, set(groups), set(groups))
            shown = "missing" if step is None else f"{step:g}"
            right = found.get(expected, set()) - places
            whole = {(place.pp, place.tp) for place in right if place.dp is not None}
            if whole and all((place.pp, place.tp) in whole for place in places):
                claim = f"the optimizer's step is {shown} in some shards ({where}), {expected:g} in the others"
                yield WeightsFinding(ANOTHER_STEP, (), tuple(places), f"{claim}: they were not written together")
                continue
            claim = f"the optimizer's step is {shown}{f' ({where})' if where else ''}, the checkpoint's is {expected:g}"
            tail = ": lost on load, so Adam's bias correction restarted" if (step or 0) < expected else ""
            yield WeightsFinding(
                "optimizer step restarted" if tail else "optimizer step differs", (), tuple(places), claim + tail
            )


def _expected_step(found: Mapping[float | None, set[Place]], metadata: CheckpointMetadata) -> float | None:
    """Return the checkpoint's optimizer step: its global step minus skipped steps, else the largest of any shard."""
    if metadata.global_steps is not None:
        return float(metadata.global_steps - metadata.skipped_steps)
    return max((step for step in found if step is not None), default=None)


def decayed_norms(groups: Mapping[Place, Sequence[OptimizerGroup]]) -> Iterator[WeightsFinding]:
    """Yield one finding for norms and biases with weight decay, if the run exempts other norms and biases."""
    decayed: dict[str, set[Place]] = {}
    is_exempting = False
    for place, held in groups.items():
        for group in held:
            for name in group.names:
                if not is_exempt_by_name(name):
                    continue
                if group.weight_decay:
                    decayed.setdefault(name, set()).add(place)
                else:
                    is_exempting = True
    if decayed and is_exempting:
        places = tuple({place for held in decayed.values() for place in held})
        names = tuple(decayed)
        where = describe_places(places, places, set(groups))
        claim = (
            f"{names_text(names)} {agree('is', len(names))} in the weight-decay group{f' ({where})' if where else ''}, "
            "but other norms and biases are not: a rule that checks the class of a norm missed it"
        )
        yield WeightsFinding("norm in the weight-decay group", names, places, claim)


def is_exempt_by_name(name: str) -> bool:
    """Whether a parameter is, by its name, a norm's or a bias: these are usually exempt from weight decay."""
    module, _, last = name.rpartition(".")
    return last.endswith("bias") or bool(NORM.search(module.rpartition(".")[2]))
