"""The formats in which tensors and values are stored, one row each: how a file is recognised, and what reads it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from bigsci_launch.safe_files import open_stream
from bigsci_launch.weights.files.sources import Contents, Source
from bigsci_launch.weights.formats.torch_file import is_torch_start


@dataclass(frozen=True, slots=True)
class Format:
    """One format. Without suffixes and first bytes, only its place in a checkpoint tells: `locate` knows it."""

    name: str
    reader: str
    """What returns the contents of a source, as `module:function` of this room: imported when one is met."""
    suffixes: tuple[str, ...] = ()
    begins: Callable[[bytes], bool] | None = None
    """Whether the first bytes of a file are those of the format, for files whose suffix says nothing."""

    def read(self, source: Source) -> Contents:
        """Return the contents of a source.

        Raises:
            UnreadableFile: it cannot be read, or is not of this format.
        """
        module, _, function = self.reader.partition(":")
        contents: Contents = getattr(import_module(f"bigsci_launch.weights.formats.{module}"), function)(source)
        return contents


TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".torch", ".pt2")
TORCH = Format("torch", "contents:read_torch", TORCH_SUFFIXES, is_torch_start)
FORMATS = (
    TORCH,
    Format("safetensors", "safetensors_file:read_tensors", (".safetensors",)),
    Format("numpy", "numpy_file:read_numpy", (".npy", ".npz")),
    Format("dcp", "dcp:read_dcp"),
    Format("text", "text_dump:read_text_dump"),
    Format("digests", "digests:read_digest_tensors"),
    Format("json", "json_state:read_json_state"),
)
BY_NAME = {each.name: each for each in FORMATS}
BY_SUFFIX = {suffix: each for each in FORMATS for suffix in each.suffixes}


def format_of(source: Source) -> Format:
    """Return the format of a source: that which `locate` found, else by its suffix, its first bytes, or torch's."""
    path = source.path
    return BY_NAME.get(source.format) or BY_SUFFIX.get(path.suffix) or starts_as(path) or TORCH


def starts_as(path: Path) -> Format | None:
    """Return the format whose first bytes a file of any name has; None if it has those of none, or cannot be read."""
    try:
        with open_stream(path, follow=True) as stream:
            start = stream.read(512)
    except OSError:
        return None
    return next((each for each in FORMATS if each.begins is not None and each.begins(start)), None)
