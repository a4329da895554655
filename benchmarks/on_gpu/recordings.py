"""What is kept of hangs: logs, records, dumps and evidence of each, in one archive that is whole at any moment."""

from __future__ import annotations

import json
import shutil
import tarfile
from pathlib import Path

from on_gpu.looks import Answer, Ranks

LOG_BYTES = 200_000
KEPT = ("exits", "pids", "recorder", "exit.json")


def keep(ranks: Ranks, answer: Answer, folder: Path) -> None:
    """Copy what one hang has left into `folder`, the end of its logs only."""
    folder.mkdir(parents=True)
    for name in KEPT:
        path = ranks.attempt.path / name
        if path.is_dir():
            shutil.copytree(path, folder / name, ignore=shutil.ignore_patterns("*.sock"))
        elif path.exists():
            shutil.copy(path, folder / name)
    if ranks.run.bundles.exists():
        shutil.copytree(ranks.run.bundles, folder / "spy")
    for path in (*ranks.attempt.logs.iterdir(), ranks.attempt.job_output):
        (folder / path.name).write_bytes(path.read_bytes()[-LOG_BYTES:])
    (folder / "answer.json").write_text(json.dumps(answer.document or {"why": answer.why}, indent=1) + "\n")


def pack(folder: Path, archive: Path) -> None:
    """Write all that is kept so far."""
    part = archive.with_name(f".{archive.name}")
    with tarfile.open(part, "w:gz") as tar:
        tar.add(folder, archive.name.partition(".")[0])
    part.replace(archive)


def names_in(archive: Path) -> list[str]:
    """Return the files of an archive that are not empty."""
    with tarfile.open(archive) as tar:
        return [member.name for member in tar if member.isfile() and member.size]
