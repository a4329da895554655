"""What is in the place of a file of weights: a pointer of Git LFS, a server's answer, or nothing but zeros."""

from __future__ import annotations

import mmap
import re

from bigsci_launch.units import format_bytes

HEAD_BYTES = 1024
BLOCK_BYTES = 1 << 20
_POINTER = re.compile(rb"version https://git-lfs\.github\.com/spec/[^\n]{1,40}\n(?:[^\n]{0,200}\n){0,8}")
_SIZE = re.compile(rb"^size (\d{1,18})$", re.MULTILINE)
_PAGE = re.compile(rb"(?:\xef\xbb\xbf)?\s{0,64}<(?:!doctype html|html|head|body)\b", re.IGNORECASE)
_ANSWER = re.compile(rb"(?:\xef\xbb\xbf)?\s{0,64}(?:<\?xml\b|\{\s{0,8}\"error\"\s{0,8}:)", re.IGNORECASE)
AGAIN = "the download got this answer instead of the file: download it again, signed in if it needs that"


def what_instead(content: bytes | mmap.mmap) -> str | None:
    """Return what a file with this content is, and what to do, if it only takes the place of one with weights."""
    head = bytes(content[:HEAD_BYTES])
    if pointer := _POINTER.match(head):
        stated = _SIZE.search(pointer[0])
        of = f" of {format_bytes(int(stated[1]))}" if stated else ""
        return (
            f"a Git LFS pointer, not the file{of} it stands for: run `git lfs pull` in its repository, or download it"
        )
    if _PAGE.match(head):
        return f"a web page (HTML), not weights: {AGAIN}"
    if _ANSWER.match(head):
        return f"the answer of a server, not weights: {AGAIN}"
    if head and not any(head) and _has_only_zeros(content):
        size = format_bytes(len(content))
        return f"{size} of zeros and nothing else: its bytes were never written, or were lost; copy it or save it again"
    return None


def _has_only_zeros(content: bytes | mmap.mmap) -> bool:
    zeros = bytes(BLOCK_BYTES)
    blocks = (content[at : at + BLOCK_BYTES] for at in range(0, len(content), BLOCK_BYTES))
    return all(block == zeros[: len(block)] for block in blocks)
