"""From the path that the user names to the files that hold the weights."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from bigsci_launch.errors import CheckpointError
from bigsci_launch.weights.deepspeed import is_deepspeed_name, locate_deepspeed
from bigsci_launch.weights.sources import Kind, Source, Unreadable, Weights
from bigsci_launch.weights.tensors import Place, os_reason

TENSOR_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")
STEP_FOLDER = re.compile(r"global_step(\d+)")
DUMP_FOLDER = re.compile(r"step-(\d+)-(before|after)")
RANK_FILE = re.compile(r"rank-(\d+)")
AXIS = {axis: re.compile(rf"(?:^|[-_.]){axis}[-_]?(\d+)(?=$|[-_.])") for axis in ("pp", "tp", "dp")}
# Megatron-LM nests iter_0000100/mp_rank_00/model_optim_rng.pt.
MAX_DEPTH = 2
KNOWN = "a DeepSpeed checkpoint, a folder of .pt or .safetensors files, one such file, or a folder of weight dumps"


def open_weights(path: Path) -> Weights:
    """The weights at `path`: a file, a folder, or a folder of checkpoints whose `latest` names one.

    Raises:
        CheckpointError: nothing there, not readable, or nothing that holds weights.
    """
    try:
        if path.is_dir():
            return _open_folder(path)
        if path.exists():
            return _open_file(path)
    except OSError as error:
        raise CheckpointError(f"{path}: {os_reason(error)}", hint="ask its owner for read access to it") from error
    raise CheckpointError(f"{path}: no such file or folder")


def _open_file(path: Path) -> Weights:
    if path.suffix not in TENSOR_SUFFIXES:
        raise CheckpointError(f"{path}: not weights", hint=f"name {KNOWN}")
    return Weights(path, "files", (Source(path, "", "plain"),))


def _open_folder(path: Path) -> Weights:
    folder = _chosen(path)
    files = _tensor_files(folder)
    if len({file.parent for file in files}) == 1 and any(is_deepspeed_name(file.name) for file in files):
        return locate_deepspeed(files[0].parent, files, path)
    if not files:
        raise CheckpointError(f"{path}: not a checkpoint ({_holds(folder)})", hint=f"name {KNOWN}")
    if any(RANK_FILE.fullmatch(file.stem) for file in files):
        return Weights(path, "rank dumps", tuple(_plain(folder, file, "dump") for file in files))
    sources = tuple(_plain(folder, file, "plain") for file in files)
    return Weights(path, "files", sources, broken=tuple(_missing_shards(folder)))


def _tensor_files(folder: Path) -> list[Path]:
    """The files of tensors in a folder; where it has none, those up to `MAX_DEPTH` folders below."""
    for depth in range(MAX_DEPTH + 1):
        found = sorted(file for file in folder.glob("*/" * depth + "*") if file.suffix in TENSOR_SUFFIXES)
        if files := [file for file in found if file.is_file()]:
            return files
    return []


def _chosen(path: Path) -> Path:
    """The folder that `latest` names; without one, the only checkpoint or dump in `path`, else `path` itself.

    Raises:
        CheckpointError: `latest` names a folder that is not there, or there are several and no `latest`.
    """
    pointer = path / "latest"
    if not pointer.is_file():
        return _only_choice(path)
    tag = pointer.read_text(encoding="utf-8", errors="replace").strip()
    if tag and (path / tag).is_dir():
        return path / tag
    there = sorted(item.name for item in path.iterdir() if STEP_FOLDER.fullmatch(item.name))
    raise CheckpointError(
        f"{pointer}: names {tag or 'nothing'}, which is not there",
        hint=f"name one of {', '.join(there)}" if there else "the folder holds no global_step folder",
    )


def _only_choice(path: Path) -> Path:
    folders = [item for item in path.iterdir() if STEP_FOLDER.fullmatch(item.name) or DUMP_FOLDER.fullmatch(item.name)]
    if len(folders) > 1:
        names = ", ".join(sorted(folder.name for folder in folders))
        raise CheckpointError(f"{path}: several checkpoints or dumps, and no `latest`", hint=f"name one of {names}")
    return folders[0] if folders else path


def _holds(folder: Path) -> str:
    names = sorted(item.name for item in folder.iterdir())
    if not names:
        return "it is empty"
    return f"it holds {', '.join(names[:4])}{', ...' if len(names) > 4 else ''}"


def _plain(folder: Path, file: Path, kind: Kind) -> Source:
    place = place_in_name(file.stem)
    relative = file.relative_to(folder).with_suffix("").as_posix()
    return Source(file, str(place) if place.is_known else relative, kind, place)


def place_in_name(stem: str) -> Place:
    """The place that a file name such as `after-pp01-tp00-dp00` tells; axes that it leaves out are None."""
    found = {axis: match[1] for axis, pattern in AXIS.items() if (match := pattern.search(stem))}
    return Place(**{axis: int(index) for axis, index in found.items()})


def _missing_shards(folder: Path) -> Iterable[Unreadable]:
    """Shards that an index (`model.safetensors.index.json`) lists and that are not there."""
    for index in sorted(folder.glob("*.index.json")):
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except OSError as error:
            yield Unreadable(index, os_reason(error))
        except (ValueError, KeyError, TypeError, AttributeError):
            yield Unreadable(index, "not an index of shards (it has no weight_map)")
        else:
            yield from (
                Unreadable(folder / name, f"missing: {index.name} lists it")
                for name in names
                if not (folder / name).is_file()
            )


def labels(sources: Sequence[Source]) -> dict[str, Source]:
    """Sources by label; where two share one, the later keeps its own path as its label."""
    found: dict[str, Source] = {}
    for source in sources:
        found[source.label if source.label not in found else source.path.as_posix()] = source
    return found
