"""Hostile files end with a sentence that names them and exit code 4, whatever they are compared with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .hostile_files import (
    DIGEST_FILES,
    SAFETENSORS,
    SOUND,
    TEXTS,
    TORCH,
)

LONGEST_ANSWER = 3000


def require_refusal(diff: Any, path: Path, sound: Path, *, file: Path | None = None) -> None:
    """Require exit code 4 and the name of the file, against a sound file, against itself, and from an audit."""
    named = str(file or path)
    for arguments in ((path, sound), (sound, path), (path, path), ("--audit", path)):
        answer = diff(*arguments)
        said = answer.text + answer.talk
        assert answer.code == 4, said
        assert named in said
        assert len(said) < LONGEST_ANSWER, said
        assert said.replace("\n", "").replace("─", "").isascii(), said


def put(folder: Path, name: str, data: bytes) -> Path:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("case", SAFETENSORS)
def test_headers_of_safetensors(tmp_path: Path, diff: Any, case: str) -> None:
    sound = put(tmp_path, "sound.safetensors", SOUND[".safetensors"])
    require_refusal(diff, put(tmp_path, "w.safetensors", SAFETENSORS[case]()), sound)


@pytest.mark.parametrize("case", TORCH)
def test_zips_and_pickles(tmp_path: Path, diff: Any, case: str) -> None:
    sound = put(tmp_path, "sound.pt", SOUND[".pt"])
    require_refusal(diff, put(tmp_path, "w.pt", TORCH[case]()), sound)


@pytest.mark.parametrize("case", DIGEST_FILES)
def test_digests(tmp_path: Path, diff: Any, case: str) -> None:
    sound = put(tmp_path / "sound", "rank-0000.digests.json", SOUND[".digests.json"])
    path = put(tmp_path / "bad", "rank-0000.digests.json", DIGEST_FILES[case])
    require_refusal(diff, path.parent, sound.parent, file=path)


@pytest.mark.parametrize("case", TEXTS)
def test_printed_tensors(tmp_path: Path, diff: Any, case: str) -> None:
    sound = put(tmp_path, "sound.txt", SOUND[".txt"])
    require_refusal(diff, put(tmp_path, "w.txt", TEXTS[case]), sound)
