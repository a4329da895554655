"""Defects of the data: what a rank reads is not what it should read."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from silent.place import patch


def inject_data(spec: Mapping[str, Any], is_here: bool, undo: ExitStack) -> None:
    """Let this rank read something else. The path of the dataset is the same for all: it leads through the folder in
    which the process is, as a path on a node's own disk does."""
    from bigsci_launch.train import loop

    kind, options = spec["defect"], spec.get("options", {})
    if kind == "other file":
        os.chdir(options["other"] if is_here else options["own"])
        return
    original = loop.open_batches

    def open_batches(*args: Any, **kwargs: Any) -> Any:
        batches = original(*args, **kwargs)
        if is_here:
            DATA[kind](batches, spec["at"], options)
        return batches

    patch(undo, loop, "open_batches", open_batches)


def shift_cursor(batches: Any, at: int, options: Mapping[str, Any]) -> None:
    """Read other samples than the cursor says, from the step that begins after `from` samples on."""
    original = batches.step

    def step(consumed_samples: int, *args: Any) -> Iterator[Any]:
        is_on = consumed_samples >= options["from"]
        yield from original(max(0, consumed_samples + is_on * options["shift"]), *args)

    batches.step = step


def share_of_first(batches: Any, at: int, options: Mapping[str, Any]) -> None:
    """Read the samples of the first replica."""
    batches._share = replace(batches._share, dp_rank=0)


def flip_token(batches: Any, at: int, options: Mapping[str, Any]) -> None:
    """Change one token of each micro batch, in its tokens or its labels."""
    original = batches.step

    def step(consumed_samples: int, *args: Any) -> Iterator[Any]:
        for tokens, labels in original(consumed_samples, *args):
            changed = (tokens, labels)[options["part"]]
            if consumed_samples >= options["from"]:
                changed[0, 3] = (changed[0, 3] + 1) % 290
            yield tokens, labels

    batches.step = step


DATA: dict[str, Any] = {
    "other file": None,
    "shifted cursor": shift_cursor,
    "share of the first replica": share_of_first,
    "flipped token": flip_token,
}
