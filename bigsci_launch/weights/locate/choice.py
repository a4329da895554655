"""Chooses one of several checkpoints, or dumps, that are next to each other in a folder."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from pathlib import Path, PurePosixPath
from typing import Literal

from bigsci_launch.errors import CheckpointError
from bigsci_launch.file_names import LATEST, moment_of_dump
from bigsci_launch.safe_files import open_stream

SideName = Literal["a", "b"]
Moment = tuple[int, str]

# checkpoint-500 (Trainer), checkpoint_0 (accelerate), iter_0000100 (Megatron-LM), global_step20 (DeepSpeed), step-10
# (torchtitan), epoch=0-step=4 (Lightning), name--val_loss=2.10-step=100 (NeMo).
CHECKPOINT = re.compile(r"(?:^|[-_.])(?:checkpoint|ckpt|iter|iteration|global_?step|step|epoch)[-_=]?\d+")
LIGHTNING = re.compile(r"(?:.*(?:epoch|step)=\d+.*|last(?:-v\d+)?)\.ckpt")
MEGATRON_LATEST = "latest_checkpointed_iteration.txt"
MAX_POINTER_BYTES = 4096


def is_checkpoint_name(name: str) -> bool:
    """Whether a folder is called as one of a series of checkpoints."""
    return CHECKPOINT.search(name) is not None and moment_of_dump(name) is None


def is_pointer(name: str) -> bool:
    """Whether a file is called as one that names the newest checkpoint."""
    return name in (LATEST, MEGATRON_LATEST)


def choose_checkpoint(folder: Path, names: Collection[str], side: SideName) -> tuple[set[str], tuple[str, ...]]:
    """Return which of the entries `names` of a folder to leave out, and notes about the choice.

    Raises:
        CheckpointError: the file that names the newest checkpoint names none, or there are several and no such file.
    """
    checkpoints = {name for name in names if _is_one_of_series(name)}
    pointer = next((name for name in (LATEST, MEGATRON_LATEST) if name in names and (folder / name).is_file()), None)
    if pointer is not None:
        chosen = _named_by(folder / pointer, checkpoints)
        hidden = {name for name in names if name.startswith(".")}
        return (checkpoints | hidden) - {chosen}, ()
    if len(checkpoints) > 1:
        raise CheckpointError(
            f"{folder}: several checkpoints, but no `latest` file",
            hint=f"name one of {', '.join(sorted(checkpoints))}",
        )
    dumps = {moment: name for name in names if (moment := moment_of_dump(name))}
    moment, notes = choose_moment(set(dumps), side)
    return {name for other, name in dumps.items() if other != moment}, notes


def _is_one_of_series(name: str) -> bool:
    return LIGHTNING.fullmatch(name) is not None if name.endswith(".ckpt") else is_checkpoint_name(name)


def _named_by(pointer: Path, checkpoints: Collection[str]) -> str:
    with open_stream(pointer, follow=True) as stream:
        text = stream.read(MAX_POINTER_BYTES).decode("utf-8", "replace").strip()
    tag = PurePosixPath(f"iter_{int(text):07d}" if pointer.name == MEGATRON_LATEST and text.isdecimal() else text)
    is_inside = bool(tag.parts) and not tag.is_absolute() and ".." not in tag.parts and text.isprintable()
    if is_inside and (pointer.parent / tag).is_dir():
        return tag.parts[0]
    raise CheckpointError(
        f"{pointer}: {f'names {tag}, which does not exist' if text else 'is empty'}",
        hint=f"name one of {', '.join(sorted(checkpoints))}"
        if checkpoints
        else "there is no global_step folder next to it",
    )


def choose_moment(moments: Collection[Moment], side: SideName) -> tuple[Moment | None, tuple[str, ...]]:
    """Return the last moment after a step for side `a`, or the first before a step for `b`, with a note."""
    if not moments:
        return None, ()
    when, choose = _SIDES[side]
    moment = choose([moment for moment in moments if moment[1] == when] or sorted(moments))
    if len(moments) == 1:
        return moment, ()
    return moment, (f"{side.upper()} is the dump {moment[1]} step {moment[0]}; the folder has {len(moments)} dumps",)


_SIDES: dict[SideName, tuple[str, Callable[[Iterable[Moment]], Moment]]] = {"a": ("after", max), "b": ("before", min)}
