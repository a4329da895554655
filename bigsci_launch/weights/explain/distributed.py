"""Audits what torch.distributed.checkpoint wrote: checksums, files that nothing uses, steps of single parameters."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from bigsci_launch.topology.naming import agree
from bigsci_launch.weights.compare.comparison import WeightsFinding, names_text
from bigsci_launch.weights.explain.drift import Holdings
from bigsci_launch.weights.explain.health import ANOTHER_STEP, broken_names, corrupted
from bigsci_launch.weights.files.elements import as_floats, read_elements
from bigsci_launch.weights.files.mapped import MappedFile, UnreadableFile
from bigsci_launch.weights.files.pool import FilePool
from bigsci_launch.weights.files.sources import Source
from bigsci_launch.weights.files.tensors import StoredTensor
from bigsci_launch.weights.formats.dcp_metadata import (
    LAST_OF_MEGATRON,
    METADATA,
    OF_MEGATRON,
    OF_RANK,
    DcpMetadata,
    Item,
    is_dcp_name,
    read_dcp_metadata,
)
from bigsci_launch.weights.formats.torch_file import ZIP_MAGIC, read_torch_slice

# `optimizer.state.layers.0.weight.step`: the dictionary of the state, and the parameter.
STEP = re.compile(r"((?:.*?\.)?state)\.(.+)\.step")
# Megatron-core keeps it for each group of parameters: `common.optimizer.optimizer.param_groups.0.step`.
STEP_OF_GROUP = re.compile(r"(.*\bparam_groups)\.(\d+)\.step")
# The step that a folder's name states, and the values in it that state the same: Megatron-LM's and torchtitan's.
FOLDER_OF_STEP = re.compile(r"(?:iter_|step-)(\d+)")
STATED_STEPS = ("common.iteration", "train_state.step")

# `layers.1.mlp.experts.3.`, `local_experts.3.`: one of several experts, not one that gets every token.
EXPERT = re.compile(r"(?:.*[._])?(?<!shared_)experts\.\d+\.")


def audit_distributed(sources: Sequence[Source], holdings: Holdings, files: FilePool) -> Iterator[WeightsFinding]:
    """Yield what is wrong in the folders that torch.distributed.checkpoint wrote, beyond what their reader reports."""
    for folder in (source.path for source in sources if source.format == "dcp"):
        # Metadata that cannot be read was reported by the reader.
        with suppress(UnreadableFile, OSError):
            metadata = read_dcp_metadata(folder)
            yield from _broken_items(metadata)
            yield from _unused_files(folder, metadata)
        yield from _unfinished(folder)
        yield from _another_step(folder, holdings, files)
        yield from _odd_steps(_steps_in(folder, holdings, files))


def _broken_items(metadata: DcpMetadata) -> Iterator[WeightsFinding]:
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


def _unfinished(folder: Path) -> Iterator[WeightsFinding]:
    """Yield a finding if Megatron-core did not write the last file of a save, without which it does not load any."""
    if (folder / OF_MEGATRON).is_file() and not (folder / LAST_OF_MEGATRON).is_file():
        claim = f"{LAST_OF_MEGATRON} is missing, which Megatron-core writes last: the save was not finished"
        yield WeightsFinding("unfinished save", (), (), claim)


def _another_step(folder: Path, holdings: Holdings, files: FilePool) -> Iterator[WeightsFinding]:
    home = folder.resolve().name
    match = FOLDER_OF_STEP.fullmatch(home)
    if match is None:
        return
    values = [value for value in holdings.values if value.name in STATED_STEPS and value.path.parent == folder]
    stated: list[tuple[str, float | None]] = [(value.name, _number(value.text)) for value in values]
    stated += [(tensor.name, _scalar(tensor, files)) for tensor in holdings.tensors if _is_step(tensor, folder)]
    for name, step in stated:
        if step is not None and step != int(match[1]):
            claim = f"{name} is {step:g}, but the folder is {home}: they were not written together"
            yield WeightsFinding(ANOTHER_STEP, (), (), claim)


def _is_step(tensor: StoredTensor, folder: Path) -> bool:
    return tensor.name in STATED_STEPS and tensor.path.parent == folder and tensor.num_elements == 1


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _steps_in(folder: Path, holdings: Holdings, files: FilePool) -> Mapping[str, Mapping[str, float]]:
    """Return the step of each parameter, or group of parameters, for each optimizer with its state in a folder."""
    found: dict[str, dict[str, float]] = {}
    for tensor in holdings.tensors:
        match = STEP.fullmatch(tensor.name) if tensor.path.parent == folder and tensor.num_elements == 1 else None
        if match:
            found.setdefault(match[1], {})[match[2]] = _scalar(tensor, files)
    for value in holdings.values:
        if value.path.parent != folder:
            continue
        match = STEP.fullmatch(value.name) or STEP_OF_GROUP.fullmatch(value.name)
        step = _number(value.text) if match else None
        if match and step is not None:
            found.setdefault(match[1], {})[match[2]] = step
    return found


def _scalar(tensor: StoredTensor, files: FilePool) -> float:
    held = tensor.chunks[0].tensor if tensor.chunks else tensor
    return float(as_floats(read_elements(held, 0, 1, files), held.dtype)[0])


def _odd_steps(steps: Mapping[str, Mapping[str, float]]) -> Iterator[WeightsFinding]:
    """Yield a finding for each step that is not that of most parameters, or is smaller than that of as many.

    Experts to which no token was sent have no gradient, so their step may be smaller: that is no fault, if it is the
    same for all parameters of an expert.
    """
    for optimizer, held in steps.items():
        experts = _experts(held)
        counts = Counter(step for name, step in held.items() if name not in experts) or Counter(held.values())
        usual = max(counts, key=lambda step: (counts[step], step))
        idle = {name: held[name] for name in experts if held[name] < usual}
        if idle:
            yield _of_idle_experts(optimizer, idle, usual)
        for odd in sorted({step for name, step in held.items() if name not in idle} - {usual}):
            names = tuple(name for name, step in held.items() if step == odd and name not in idle)
            is_group = optimizer.endswith("param_groups")
            kind = f"{'group' if is_group else 'parameter'}{'s' * (counts[usual] != 1)}"
            which = f"{'group ' * is_group}{names_text(names)}"
            claim = f"in {optimizer}, the step of {which} is {odd:g}, that of {counts[usual]} other {kind} {usual:g}"
            tail = ": lost on load, or without a gradient in some steps" if odd < usual else ""
            yield WeightsFinding("optimizer step differs", names, (), claim + tail)


def _experts(steps: Mapping[str, float]) -> set[str]:
    found: dict[str, set[str]] = {}
    for name in steps:
        if match := EXPERT.match(name):
            found.setdefault(match[0], set()).add(name)
    alike = (names for names in found.values() if len({steps[name] for name in names}) == 1)
    return {name for names in alike for name in names}


def _of_idle_experts(optimizer: str, idle: Mapping[str, float], usual: float) -> WeightsFinding:
    names = tuple(sorted(idle))
    low, high = min(idle.values()), max(idle.values())
    stated = f"{low:g}" if low == high else f"{low:g} to {high:g}"
    claim = (
        f"in {optimizer}, the step of {names_text(names)} is {stated}, that of other parameters {usual:g}: these are "
        "experts, which do no step without a token"
    )
    return WeightsFinding("experts with fewer steps", names, (), claim, is_fault=False)
